package memory

import (
	"context"
	"fmt"
	"slices"
	"sync"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// feed is one processor's hold on a queue.
type feed struct {
	queue    *queue
	sub      leasebus.Subscription
	duration int64 // of a lease

	// Guarded by the queue's lock.
	hungry, stopped, closed bool

	// waking is held while Wake runs, so that Close can wait for it.
	waking sync.Mutex
	deaf   bool
}

func (q *queue) subscribe(sub leasebus.Subscription) *feed {
	f := &feed{queue: q, sub: sub, duration: int64(sub.Policy.Lease.Duration)}
	now := q.lock()
	q.retainCompleted = int64(sub.Policy.RetainCompleted)
	q.retainDead = int64(sub.Policy.DeadLetter.Retention)
	q.feeds = append(q.feeds, f)
	f.hungry = true
	q.hungry++
	q.unlock(now)
	return f
}

func (f *feed) wake() {
	f.waking.Lock()
	defer f.waking.Unlock()
	if !f.deaf && f.sub.Wake != nil {
		f.sub.Wake()
	}
}

// Lease implements [leasebus.Feed].
func (f *feed) Lease(ctx context.Context, dst []leasebus.Lease) (int, error) {
	if ctx.Err() != nil {
		return 0, f.refused("lease", context.Cause(ctx))
	}
	q := f.queue
	now := q.lock()
	defer q.unlock(now)
	if f.stopped {
		return 0, f.refused("lease", leasebus.ErrFeedStopped)
	}
	n := q.lease(f, dst, now)
	if n < len(dst) && !f.hungry {
		f.hungry = true
		q.hungry++
	}
	return n, nil
}

// Renew implements [leasebus.Feed]. A lease that has expired, but that nobody took, is renewed like any other.
func (f *feed) Renew(ctx context.Context, batch []leasebus.Renewal) error {
	if ctx.Err() != nil {
		return f.refused("renew", context.Cause(ctx))
	}
	q := f.queue
	now := q.lock()
	defer q.unlock(now)
	if f.closed {
		return f.refused("renew", leasebus.ErrFeedStopped)
	}
	expiry := after(now, f.duration)
	for i := range batch {
		r, mine := f.mine(batch[i].Lease)
		if !mine {
			batch[i].Result = leasebus.ResultLost
			continue
		}
		q.leased.remove(r)
		q.extend(r, expiry)
		batch[i].Result = leasebus.ResultOK
	}
	return nil
}

// Settle implements [leasebus.Feed]. It never answers Busy or Rejected.
//
// What is released goes in front of what arrived, behind what was released before.
func (f *feed) Settle(ctx context.Context, batch []leasebus.Settlement) error {
	if ctx.Err() != nil {
		return f.refused("settle", context.Cause(ctx))
	}
	q := f.queue
	now := q.lock()
	defer q.unlock(now)
	if f.closed {
		return f.refused("settle", leasebus.ErrFeedStopped)
	}
	for i := range batch {
		batch[i].Result = f.settle(&batch[i], now)
	}
	q.prune(now)
	return nil
}

// mine finds the row of a lease and reports whether the lease still holds it (S12).
func (f *feed) mine(l *leasebus.Lease) (*row, bool) {
	r, ok := l.Ref.P.(*row)
	if !ok || r.queue != f.queue {
		return nil, false
	}
	return r, r.state == processing && r.generation == l.Generation && r.owner == f.sub.Owner
}

func (f *feed) settle(s *leasebus.Settlement, now int64) leasebus.Result {
	r, mine := f.mine(s.Lease)
	if s.Kind == leasebus.SettleVerify {
		return verify(r, mine, s.Lease)
	}
	if !mine {
		return leasebus.ResultLost
	}
	q := f.queue
	q.leased.remove(r)
	q.leave(r)
	if s.Failure != nil {
		r.fail(s.Failure, now, f.sub.Owner)
	}
	switch s.Kind {
	case leasebus.SettleComplete:
		q.complete(r, now)
	case leasebus.SettleRetry:
		r.crashed = false
		r.due = after(now, max(0, int64(s.Delay)))
		q.wait(r, failed, now)
	case leasebus.SettleDefer:
		r.attempt--
		r.deferrals++
		r.due = after(now, max(0, int64(s.Delay)))
		q.wait(r, pending, now)
	case leasebus.SettleRelease:
		r.attempt--
		if s.Started {
			r.interruptions++
		}
		r.due = now
		q.enter(r, pending)
		q.released.pushBack(r)
	case leasebus.SettleDeadLetter:
		q.bury(r, s, now)
	case leasebus.SettleDiscard:
		r.state = discarded
	case leasebus.SettleVerify: // answered above
	}
	return leasebus.ResultOK
}

// verify tells the three ends of a lease apart for a caller who does not know which it was.
func verify(r *row, mine bool, l *leasebus.Lease) leasebus.Result {
	switch {
	case mine:
		return leasebus.ResultStillLeased
	case r != nil && r.state == completed && r.generation == l.Generation:
		return leasebus.ResultOK
	}
	return leasebus.ResultLost
}

// complete keeps r only where a policy retains what is completed.
func (q *queue) complete(r *row, now int64) {
	if q.retainCompleted == 0 {
		r.state = completed
		return
	}
	r.due = now
	q.completions++
	r.completion = q.completions
	q.enter(r, completed)
	q.history.pushBack(r)
}

// Stop implements [leasebus.Feed]. The store buffers nothing for a feed, so there is nothing to hand back.
func (f *feed) Stop(context.Context) error {
	q := f.queue
	now := q.lock()
	defer q.unlock(now)
	f.stop()
	return nil
}

func (f *feed) stop() {
	if f.stopped {
		return
	}
	q := f.queue
	f.stopped = true
	if f.hungry {
		f.hungry = false
		q.hungry--
	}
	q.feeds = slices.DeleteFunc(q.feeds, func(other *feed) bool { return other == f })
	if len(q.feeds) == 0 && q.armed {
		q.armed = false
		q.timer.Stop()
	}
}

// Close implements [leasebus.Feed]. When it has returned, Wake is not called any more; it must not be called from Wake.
func (f *feed) Close() error {
	q := f.queue
	now := q.lock()
	f.stop()
	f.closed = true
	q.unlock(now)

	f.waking.Lock()
	defer f.waking.Unlock()
	f.deaf = true
	return nil
}

func (f *feed) refused(what string, err error) error {
	return fmt.Errorf("memory: %s from %q: %w", what, f.queue.name, err)
}
