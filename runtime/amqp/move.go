package amqp

import (
	"context"
	"errors"
	"slices"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

const (
	// mostCarried is how many moves are published together, mostCarriers how many such batches are on their way: one that
	// waits for a queue without a leader does not hold up the others.
	mostCarried  = 256
	mostCarriers = 4
	// mendBound is the longest that declaring missing queues again may take.
	mendBound = 10 * time.Second
)

// move is a decision about a delivery, which is carried out by publishing it somewhere and acknowledging it when that is
// confirmed. Until then the feed keeps both, and tries again without end: no decision rests on a hope, and none is lost
// but with the delivery's channel, which brings the delivery back.
type move struct {
	d       *delivery
	message message
	kind    leasebus.SettlementKind
	// local: nothing is published, the delivery becomes leasable here when its wait is over.
	local bool
	// rung: the message waits in the broker, until then.
	rung  bool
	until time.Time
	// deadly: the copy may end this process when it comes back.
	deadly bool

	failures int
	err      error // of the last publish
	outcome  outcome
	asked    *question // who waits for the outcome; nil = nobody
	owed     bool      // the settlement was answered "busy", and will be asked again
}

type outcome uint8

const (
	underway outcome = iota
	confirmed
	// handedBack: the delivery is in its queue again.
	handedBack
	// dropped: the delivery's channel has ended.
	dropped
)

// question is one caller that waits for the outcome of moves.
type question struct {
	left int
	done chan struct{} // closed when left is 0
}

func (q *question) answered() {
	if q.left--; q.left == 0 {
		close(q.done)
	}
}

// awaited reports whether someone still waits for the outcome.
func (m *move) awaited() bool { return m != nil && (m.asked != nil || m.owed) }

// moves are all that a feed has decided and not carried out. They are guarded by the feed's lock.
type moves struct {
	hold     hold // those that wait, for their time or for another try
	ready    []*move
	carriers int // batches on their way
	alive    int // moves that have no outcome
	failing  int // of them, those that RabbitMQ has not taken at least once

	timer *time.Timer
	armed time.Time // what the timer runs to; zero = it does not
}

// clogged reports whether RabbitMQ does not take what is decided, and as much of it waits as may: more would only be
// handled for nothing.
func (f *feed) clogged() bool { return f.moves.failing > 0 && f.moves.alive >= f.budget }

// roomToHold reports whether one more wait may be spent here.
func (f *feed) roomToHold() bool { return f.moves.hold.len() < f.budget }

// keep holds a move until its time.
func (f *feed) keep(m *move, due time.Time) {
	f.begin(m)
	f.moves.hold.add(m, due)
	f.arm()
}

// carryOut publishes a move as soon as it can be; the caller calls launch.
func (f *feed) carryOut(m *move) {
	f.begin(m)
	f.moves.ready = append(f.moves.ready, m)
}

func (f *feed) begin(m *move) {
	m.d.state = moving
	f.moves.alive++
}

// arm sets the timer for the next move that is held.
func (f *feed) arm() {
	s := &f.moves
	due, ok := s.hold.next()
	if !ok || f.closed || !s.armed.IsZero() && !due.Before(s.armed) {
		return
	}
	s.armed = due
	if wait := time.Until(due); s.timer == nil {
		s.timer = time.AfterFunc(wait, f.ring)
	} else {
		s.timer.Reset(wait)
	}
}

func (s *moves) stopTimer() {
	if s.timer != nil {
		s.timer.Stop()
	}
}

// ring is when the time of some has come.
func (f *feed) ring() {
	f.mu.Lock()
	f.moves.armed = time.Time{}
	wake := false
	now := time.Now()
	for m := f.moves.hold.take(now); m != nil; m = f.moves.hold.take(now) {
		if !m.local {
			f.moves.ready = append(f.moves.ready, m)
			continue
		}
		f.moves.alive--
		m.d.state = buffered
		f.buffer.push(m.d)
		wake = true
	}
	f.launch()
	f.arm()
	wake = wake && f.hungry
	f.hungry = f.hungry && !wake
	f.mu.Unlock()
	if wake {
		f.wake()
	}
}

// launch puts what is ready on its way.
func (f *feed) launch() {
	for len(f.moves.ready) > 0 && f.moves.carriers < mostCarriers && !f.closed {
		n := min(len(f.moves.ready), mostCarried)
		batch := slices.Clone(f.moves.ready[:n])
		f.moves.ready = slices.Delete(f.moves.ready, 0, n)
		f.moves.carriers++
		f.carriers.Go(func() { f.carry(batch) })
	}
}

// carry publishes moves, pipelined, and acknowledges the deliveries of those that are confirmed.
func (f *feed) carry(batch []*move) {
	f.broker.publisher.publish(f.ctx, len(batch), func(i int, m *message) error {
		if batch[i].d.life.over.Load() {
			return errLifeOver
		}
		*m = batch[i].message
		return nil
	}, func(i int, err error) {
		if batch[i].err = err; err == nil && batch[i].deadly {
			_ = batch[i].d.life.ledger.ack([]*entry{&batch[i].d.entry}) // before the copy is back
		}
	})

	entries := make([]*entry, 0, len(batch))
	missing := false
	for i, m := range batch {
		if m.err == nil {
			entries = append(entries, &m.d.entry)
		}
		missing = missing || m.missed()
		if i == len(batch)-1 || batch[i+1].d.life != m.d.life {
			_ = m.d.life.ledger.ack(entries) // else they are delivered again, as twins of what was published
			entries = entries[:0]
		}
	}
	mended := missing && f.mend()

	f.mu.Lock()
	was := f.clogged()
	now := time.Now()
	for _, m := range batch {
		f.landed(m, mended, now)
	}
	f.moves.carriers--
	f.launch()
	f.arm()
	wake := was && !f.clogged() && f.hungry
	f.hungry = f.hungry && !wake
	f.mu.Unlock()
	if wake {
		f.wake()
	}
}

// takes reports whether RabbitMQ can be sent messages now.
func (p *publisher) takes() bool {
	s, why, _, _ := p.sessions.get()
	return why == nil && !s.IsClosed() && s.epoch.blockade.Load() == nil
}

// mend declares what is missing.
func (f *feed) mend() bool {
	ctx, cancel := context.WithTimeout(f.ctx, mendBound)
	defer cancel()
	e, err := f.link.await(ctx)
	if err == nil {
		err = f.broker.options.declare(ctx, e, f.topology)
	}
	if err != nil {
		f.log.ErrorContext(ctx, "amqp: a queue is missing and cannot be declared", "error", err)
		return false
	}
	f.log.WarnContext(ctx, "amqp: a queue was missing and has been declared again")
	return true
}

// landed notes what became of a publish.
func (f *feed) landed(m *move, mended bool, now time.Time) {
	switch {
	case m.err == nil:
		f.finish(m, confirmed)
		return
	case m.d.life.over.Load():
		f.finish(m, dropped)
		return
	}
	f.broker.counters.failedMoves.Add(1)
	if m.kind == leasebus.SettleRelease {
		_ = m.d.life.ledger.requeue(&m.d.entry) // else it goes back with its channel
		f.finish(m, handedBack)
		return
	}
	if m.failures == 0 {
		if f.moves.failing++; f.moves.failing == 1 {
			f.log.Warn("amqp: RabbitMQ does not take the outcome of messages; they are kept, and it is tried again", "id", m.d.id, "kind", m.kind, "error", m.err)
		}
	}
	again := now.Add(f.broker.options.pace.wait(m.failures, nil))
	m.failures++
	if m.rung && m.missed() {
		f.broker.counters.missingRungs.Add(1)
		if !mended {
			m.stayHere(f.sub.Queue)
			again = m.until
		}
	}
	f.moves.hold.add(m, again)
	if m.asked != nil {
		m.asked.answered()
		m.asked = nil
	}
}

// missed reports whether what the message was to go to is not there. RabbitMQ closes the channel for a missing exchange.
func (m *move) missed() bool {
	return errors.Is(m.err, ErrUnroutable) || m.message.exchange != "" && errors.Is(m.err, ErrRefused)
}

// stayHere spends a wait in the consumer that was to be spent in the broker.
func (m *move) stayHere(queue string) {
	m.rung = false
	m.message.exchange, m.message.key = "", queue
	delete(m.message.Headers, headerRemaining)
}

// finish is the end of a move.
func (f *feed) finish(m *move, o outcome) {
	if m.failures > 0 {
		if f.moves.failing--; f.moves.failing == 0 && o == confirmed {
			f.log.Info("amqp: RabbitMQ takes the outcome of messages again")
		}
	}
	f.moves.alive--
	m.outcome = o
	m.d.state = settled
	if m.asked != nil {
		m.asked.answered()
		m.asked = nil
	}
}

// clear removes the moves that are not on their way.
func (s *moves) clear() []*move {
	all := append(s.hold.takeAll(func(*move) bool { return true }), s.ready...)
	s.ready = nil
	return all
}

// takeLocal removes the waits that would end here.
func (s *moves) takeLocal() []*move {
	local := s.hold.takeAll(func(m *move) bool { return m.local })
	s.alive -= len(local)
	return local
}
