package postgres

import (
	"context"
	"strconv"
	"sync/atomic"
	"time"
)

// Claims of many messages, of all processes, take turns: some are at work at once in a queue, the others wait. Each of
// them would else step over the rows that all others are about to take, and lock what they have just leased, which costs
// far more than to take it: 16 at once get a third of what two get. A turn is a lock of the transaction, so that it ends
// however the claim does.
//
// There are more turns than are used: who has waited for one in vain leaves it alone for a while and takes the next.
// So nobody stands behind a process that has stopped in the middle of its claim, and as many are at work as it takes to
// keep the wait short, however many wait.
const (
	turnFrom  = 100
	turns     = 16
	turnTries = 2 // then it goes on without
	// shunned is for how long a turn is left alone.
	shunned = 10 * time.Second
	// A wait for a turn takes from the time that a lease is good for.
	turnWaitMost  = time.Second
	turnWaitShare = 10

	// takeTurnSQL takes the turn $5 if it is free, and else waits for $3.
	takeTurnSQL = pinSQL + `, set_config('lock_timeout', $4, true),
 CASE WHEN pg_try_advisory_xact_lock($2, $5) THEN '' ELSE pg_advisory_xact_lock($2, $3)::text END` + claimTimeSQL
)

// A queue is crowded while its claims have to wait for turns: there are more processes than can be at work. A second
// claim or settlement of the same one would get no more done, but keep another connection busy; eight processes do a
// seventh more without.
const (
	crowdedFrom = 2 * time.Millisecond // of waiting
	crowdedFor  = time.Second          // after the last wait
)

// turn is what a claim takes: first if it is free, else it waits for then.
type turn struct{ first, then int32 }

// turnTaker chooses the turns of a feed's claims.
type turnTaker struct {
	wait   time.Duration // for one turn, at most
	claims atomic.Int64
	// until when, in nanoseconds since 1970
	shun         [turns]atomic.Int64
	crowdedUntil atomic.Int64
}

func (t *turnTaker) init(lease time.Duration) {
	t.wait = max(min(lease/turnWaitShare, turnWaitMost), time.Millisecond)
}

// lockTimeout is the wait as PostgreSQL takes it.
func (t *turnTaker) lockTimeout() string { return strconv.FormatInt(t.wait.Milliseconds(), 10) }

// next is what a claim takes: one of the first two turns that are not shunned, and claims alternate in which of them they
// wait for. Nil if all are shunned.
func (t *turnTaker) next(now time.Time) *turn {
	var open []int32
	for i := range t.shun {
		if t.shun[i].Load() <= now.UnixNano() {
			open = append(open, int32(i))
		}
		if len(open) == 2 {
			break
		}
	}
	switch {
	case len(open) == 0:
		return nil
	case len(open) == 1:
		return &turn{open[0], open[0]}
	case t.claims.Add(1)%2 == 0:
		return &turn{open[1], open[0]}
	}
	return &turn{open[0], open[1]}
}

// inVain notes that the wait for a turn has ended without it.
func (t *turnTaker) inVain(waited *turn, now time.Time) {
	t.shun[waited.then].Store(now.Add(shunned).UnixNano())
	t.waited(t.wait, now)
}

// waited notes how long a claim waited for its turn.
func (t *turnTaker) waited(d time.Duration, now time.Time) {
	if d < crowdedFrom {
		t.crowdedUntil.Store(0)
		return
	}
	t.crowdedUntil.Store(now.Add(crowdedFor).UnixNano())
}

func (t *turnTaker) crowded(now time.Time) bool { return now.UnixNano() < t.crowdedUntil.Load() }

// turnKeys are for takeTurnSQL: the schema's number, and those of the turns of a queue in a segment. Who looks into a
// segment that is empty waits for nobody who works on another.
func (f *feed) turnKeys(seg segment, t *turn) (schema, first, then int32) {
	base := (f.queue*int32(segments) + int32(seg)) * turns        //nolint:gosec // any bits will do
	return int32(f.in.options.key), base + t.first, base + t.then //nolint:gosec // as above
}

// single lets one call after the other through.
type single chan struct{}

// alone has a call wait for the one before it, while the queue is crowded: not for long, because that may hang, and not
// beyond the end of ctx or enough.
func (f *feed) alone(ctx context.Context, s single, enough <-chan struct{}) (leave func()) {
	if !f.turns.crowded(time.Now()) {
		return func() {}
	}
	patience := time.NewTimer(f.turns.wait)
	defer patience.Stop()
	select {
	case s <- struct{}{}:
		return func() { <-s }
	case <-patience.C:
	case <-enough:
	case <-ctx.Done():
	}
	return func() {}
}
