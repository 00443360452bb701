package amqp

import (
	"context"
	"math"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// settleBound is how long Settle waits for RabbitMQ to confirm what it publishes, before it answers "busy". The
// decision stays with the feed, and so does the delivery.
const settleBound = time.Second

// Settle implements [leasebus.Feed].
//
// A retry with a short wait is taken over at once: the wait is spent here, without a worker. What is published (longer
// waits, dead letters, what is released) is answered OK when RabbitMQ has confirmed it, and Busy while it has not.
// [leasebus.SettleVerify] tells only whether the lease is still there: RabbitMQ keeps no record of what was completed.
func (f *feed) Settle(ctx context.Context, batch []leasebus.Settlement) error {
	if ctx.Err() != nil {
		return f.refused("settle", context.Cause(ctx))
	}
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return f.refused("settle", leasebus.ErrFeedStopped)
	}
	l := f.life
	var (
		acks   []*entry
		asking question
	)
	now := time.Now()
	for i := range batch {
		s := &batch[i]
		d := f.mine(s.Lease)
		if d == nil {
			s.Result = leasebus.ResultLost
			continue
		}
		s.Result = f.settle(d, s, now)
		switch {
		case s.Result != leasebus.ResultUnknown:
		case d.move == nil:
			acks = append(acks, &d.entry)
		case asking.left == 0:
			asking.done = make(chan struct{})
			fallthrough
		default:
			d.move.asked = &asking
			asking.left++
		}
	}
	hurried := f.moves.failing > 0
	f.launch() //nolint:contextcheck // what is decided is carried out in any case
	f.mu.Unlock()

	if len(acks) > 0 {
		err := l.ledger.ack(acks)
		acknowledged(batch, err)
	}
	if asking.done != nil {
		f.await(ctx, &asking, hurried)
		f.answer(batch)
	}
	return nil
}

// acknowledged answers for what was completed. If it could not be sent, the channel has ended and the message will be
// delivered again.
func acknowledged(batch []leasebus.Settlement, err error) {
	result := leasebus.ResultOK
	if err != nil {
		result = leasebus.ResultLost
	}
	for i := range batch {
		s := &batch[i]
		if s.Result == leasebus.ResultUnknown && (s.Kind == leasebus.SettleComplete || s.Kind == leasebus.SettleDiscard) {
			s.Result = result
		}
	}
}

// await waits for the outcome of moves. While RabbitMQ does not take some, nobody waits: others are not to stand behind
// them.
func (f *feed) await(ctx context.Context, asking *question, hurried bool) {
	if hurried {
		return
	}
	timer := time.NewTimer(settleBound)
	defer timer.Stop()
	select {
	case <-asking.done:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// answer gives the results of moves.
func (f *feed) answer(batch []leasebus.Settlement) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range batch {
		if s := &batch[i]; s.Result == leasebus.ResultUnknown {
			d, _ := s.Lease.Ref.P.(*delivery)
			d.move.asked = nil
			s.Result = d.move.result()
		}
	}
}

// result is the answer to a settlement; it is owed from here on if there is none yet.
func (m *move) result() leasebus.Result {
	m.owed = m.outcome == underway
	switch m.outcome {
	case underway:
		return leasebus.ResultBusy
	case dropped:
		return leasebus.ResultLost
	default:
		return leasebus.ResultOK
	}
}

// settle begins one settlement. Unknown = the answer follows: for what is acknowledged from that, for what is published
// from its move.
func (f *feed) settle(d *delivery, s *leasebus.Settlement, now time.Time) leasebus.Result {
	if d.state != leased {
		if m := d.move; m != nil && m.owed && m.kind == s.Kind {
			return m.result()
		}
		return leasebus.ResultLost
	}
	switch s.Kind {
	case leasebus.SettleVerify:
		return leasebus.ResultStillLeased
	case leasebus.SettleComplete, leasebus.SettleDiscard:
		d.state = settled
		return leasebus.ResultUnknown
	case leasebus.SettleRelease:
		// A copy goes back, which does not look as if its worker had died. Where that cannot be, the message itself does.
		if f.moves.failing > 0 || !f.broker.publisher.takes() {
			d.life.requeue(d)
			return leasebus.ResultOK
		}
		d.move = f.again(d, s, now)
	case leasebus.SettleDeadLetter:
		d.move = &move{d: d, kind: s.Kind, message: f.deadLetter(d, s, now)}
	default:
		if d.move = f.again(d, s, now); d.move == nil {
			return leasebus.ResultOK
		}
	}
	f.carryOut(d.move)
	return leasebus.ResultUnknown
}

// again is how a message comes back for its next attempt; nil = its wait is spent here and has begun.
func (f *feed) again(d *delivery, s *leasebus.Settlement, now time.Time) *move {
	stamp := d.stamp
	switch {
	case s.Kind == leasebus.SettleRetry:
		stamp.attempt = min(stamp.attempt+1, math.MaxInt32)
		stamp.crashes = 0
	case s.Kind == leasebus.SettleDefer:
		stamp.crashes = 0
	case s.Started:
		stamp.interruptions++
		stamp.crashes = 0
	}
	var change func(amqp091.Table)
	if s.Failure != nil {
		change = func(table amqp091.Table) { putFailure(table, s.Failure, f.sub.Owner, now) }
	}
	m := &move{d: d, kind: s.Kind}
	if s.Kind == leasebus.SettleRelease || s.Delay <= 0 {
		m.message = f.toQueue(d, stamp, change)
		return m
	}
	m.until = now.Add(s.Delay)
	if f.waits.here(s.Nominal, s.Delay) {
		if f.roomToHold() {
			m.message = f.toQueue(d, stamp, change)
			f.keep(m, m.until)
			return nil
		}
		f.broker.counters.spilledWaits.Add(1)
	}
	f.waitInBroker(m, stamp, f.waits.there(f.sub.Queue, s.Nominal, s.Delay), change)
	return m
}
