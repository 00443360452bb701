package amqp

import (
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// waitInBroker makes m one whose message waits in the broker.
func (f *feed) waitInBroker(m *move, s stamps, at step, change func(amqp091.Table)) {
	s.remaining = at.remaining
	m.rung = true
	m.message = f.toQueue(m.d, s, change)
	m.message.exchange, m.message.key = at.exchange, at.key
}

// goOnWaiting is for a delivery that came off the shared ladder before its wait was over.
func (f *feed) goOnWaiting(d *delivery, now time.Time) {
	left := d.stamp.remaining
	m := &move{d: d, kind: leasebus.SettleDefer, until: now.Add(left)}
	if d.stamp.crashes == 0 && f.waits.here(0, left) && f.roomToHold() {
		m.local = true
		f.keep(m, m.until)
		return
	}
	d.id = idOf(d.msg.MessageId)
	f.waitInBroker(m, d.stamp, ladderStep(f.sub.Queue, left), nil)
	f.carryOut(m)
	f.launch()
}

// toQueue is a copy for the feed's own queue.
func (f *feed) toQueue(d *delivery, s stamps, change func(amqp091.Table)) message {
	p := copyOf(&d.msg, d.id, s, change)
	f.fit(d, p.Headers, headerHistory, headerRequeues)
	return message{key: f.sub.Queue, Publishing: p}
}

// fit makes headers fit into a frame.
func (f *feed) fit(d *delivery, table amqp091.Table, expendable ...string) {
	if dropped := fit(table, d.life.headerRoom(), expendable...); dropped != nil {
		f.log.Warn("amqp: headers of a message do not fit beside what leasebus adds to them, and were dropped", "id", d.id, "headers", dropped)
	}
}

// headerRoom is how large the headers of a message may be: a frame, less its properties.
func (l *life) headerRoom() int {
	const properties = 4 << 10
	frame := l.channel.epoch.conn.Config.FrameSize
	if frame == 0 { // no limit
		frame = frameSize
	}
	return frame - properties
}
