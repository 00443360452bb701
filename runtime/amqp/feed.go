package amqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// feed is one processor's hold on a queue: a consumer on a connection of its own, what it has been sent, and the
// decisions that are not carried out yet.
type feed struct {
	broker   *Broker
	sub      leasebus.Subscription
	topology *Topology
	waits    waits
	link     *link
	log      *slog.Logger
	prefetch int
	budget   int // of moves that are held

	// ctx ends with Close; quit ends it.
	ctx      context.Context //nolint:containedctx // of the feed itself
	quit     context.CancelFunc
	jobs     sync.WaitGroup // the consuming
	carriers sync.WaitGroup // of moves

	mu      sync.Mutex
	life    *life // nil = there is no consumer now
	buffer  fifo
	hungry  bool // got less than it asked for, and was not woken since
	stopped bool
	closed  bool
	moves   moves
	// orphaned: the broker was closed.
	orphaned bool

	// waking is held while Wake or Check runs, so that Close can wait for it.
	waking sync.Mutex
	deaf   bool
}

// fifo is what was delivered and not leased yet.
type fifo struct {
	list []*delivery // list[head:] is live
	head int
}

func (q *fifo) len() int { return len(q.list) - q.head }

func (q *fifo) push(d *delivery) {
	if q.head > len(q.list)/2 { // keep the array from growing behind the head
		n := copy(q.list, q.list[q.head:])
		clear(q.list[n:])
		q.list, q.head = q.list[:n], 0
	}
	q.list = append(q.list, d)
}

func (q *fifo) pop() *delivery {
	if q.head == len(q.list) {
		return nil
	}
	d := q.list[q.head]
	q.list[q.head] = nil
	q.head++
	return d
}

// delivery is a message that RabbitMQ has sent and that is not acknowledged yet. All but what is set before anyone else
// sees it is guarded by the feed's lock.
type delivery struct {
	entry
	life  *life
	msg   received
	stamp stamps
	id    leasebus.ID // from the lease on
	state deliveryState
	spent bool  // too many crashes: leased with no attempt left
	move  *move // the one that its settlement waits for
}

type deliveryState uint8

const (
	buffered deliveryState = iota
	leased
	moving // the decision is with the feed
	settled
)

// Lease implements [leasebus.Feed]: it hands out what RabbitMQ has sent already.
//
// A message that is delivered again is not handed out, but published again with one more crash counted, and comes back
// behind the others: its last worker may have died of it. While the broker does not take what has been decided, and as
// much of that is held as may be, nothing is handed out.
func (f *feed) Lease(ctx context.Context, dst []leasebus.Lease) (int, error) {
	if ctx.Err() != nil {
		return 0, f.refused("lease", context.Cause(ctx))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.stopped:
		return 0, f.refused("lease", leasebus.ErrFeedStopped)
	case f.orphaned:
		return 0, f.refused("lease", ErrClosed)
	}
	now := time.Now()
	n := 0
	for n < len(dst) && !f.clogged() {
		d := f.buffer.pop()
		if d == nil {
			break
		}
		if d.msg.Redelivered && f.countCrash(d) {
			continue
		}
		f.hand(d, &dst[n], now)
		n++
	}
	f.hungry = f.hungry || n < len(dst) // once told, not before it is woken
	f.launch()                          //nolint:contextcheck // what is decided is carried out in any case
	return n, nil
}

// hand fills a lease.
func (f *feed) hand(d *delivery, l *leasebus.Lease, now time.Time) {
	d.state = leased
	l.Envelope = envelopeOf(&d.msg, f.sub.Queue, f.sub.Policy.Type, d.stamp.firstDue)
	d.id = l.ID
	l.Attempt = d.stamp.attempt
	l.Generation = 0
	l.Age = max(now.Sub(d.stamp.ageFrom), 0)
	l.Crashed = d.spent
	if d.spent {
		l.Attempt = max(l.Attempt, min(f.sub.Policy.Retry.MaxAttempts, math.MaxInt-1)+1)
	}
	l.Interruptions = d.stamp.interruptions
	l.Ref = leasebus.Ref{N: int64(d.tag), P: d} //nolint:gosec // a tag counts deliveries of one channel
}

// Renew implements [leasebus.Feed]. A delivery is this consumer's for as long as its channel lives.
func (f *feed) Renew(ctx context.Context, batch []leasebus.Renewal) error {
	if ctx.Err() != nil {
		return f.refused("renew", context.Cause(ctx))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.refused("renew", leasebus.ErrFeedStopped)
	}
	for i := range batch {
		batch[i].Result = leasebus.ResultLost
		if d := f.mine(batch[i].Lease); d != nil && (d.state == leased || d.move.awaited()) {
			batch[i].Result = leasebus.ResultOK
		}
	}
	return nil
}

// mine finds the delivery of a lease; nil if it is another's, or its channel has ended.
func (f *feed) mine(l *leasebus.Lease) *delivery {
	d, ok := l.Ref.P.(*delivery)
	if !ok || d.life != f.life || d.life == nil {
		return nil
	}
	return d
}

// Stop implements [leasebus.Feed]. The consumer is cancelled first: what is handed back would only come again. Where that
// cannot be, nothing is handed back before Close. Waits that are held go on until then.
func (f *feed) Stop(ctx context.Context) error {
	f.mu.Lock()
	f.stopped = true
	l := f.life
	f.mu.Unlock()
	if l == nil {
		return nil
	}
	if err := l.cancel(ctx); err != nil {
		return f.refused("stop", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for d := f.buffer.pop(); d != nil; d = f.buffer.pop() {
		l.requeue(d)
	}
	for _, m := range f.moves.takeLocal() {
		l.requeue(m.d)
	}
	return nil
}

// Close implements [leasebus.Feed]. What is on its way is waited for, for a moment. Whatever is not settled then goes
// back to its queue, held retries with their attempt unchanged. Its error tells of decisions that RabbitMQ did not take.
func (f *feed) Close() error {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return nil
	}
	f.stopped, f.closed = true, true
	f.moves.stopTimer()
	f.mu.Unlock()

	late := time.AfterFunc(farewell, f.quit)
	f.carriers.Wait()
	late.Stop()
	f.quit()

	f.mu.Lock()
	undone := f.moves.failing
	f.mu.Unlock()
	f.broker.disconnect(f.link)
	f.jobs.Wait()

	f.waking.Lock()
	defer f.waking.Unlock()
	f.deaf = true
	if undone > 0 {
		return fmt.Errorf("amqp: close of the feed of %q: RabbitMQ did not take the outcome of %d messages; they go back to their queue", f.sub.Queue, undone)
	}
	return nil
}

// wake tells the processor that Lease may return something; call it without the lock.
func (f *feed) wake() { f.call(f.sub.Wake) }

func (f *feed) check() { f.call(f.sub.Check) }

func (f *feed) call(what func()) {
	f.waking.Lock()
	defer f.waking.Unlock()
	if !f.deaf && what != nil {
		what()
	}
}

func (f *feed) refused(what string, err error) error {
	return fmt.Errorf("amqp: %s from %q: %w", what, f.sub.Queue, err)
}

var errLifeOver = errors.New("its channel has ended")
