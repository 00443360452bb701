package postgres

import (
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
	turnFrom = 100
	atOnce   = 2
	turns    = 16
	// shunned is for how long a turn is left alone.
	shunned = 10 * time.Second
	// A wait for a turn takes from the time that a lease is good for.
	turnWaitMost  = time.Second
	turnWaitShare = 10

	takeTurnSQL = pinSQL + `, set_config('lock_timeout', $4, true), pg_advisory_xact_lock($2, $3)` + claimTimeSQL
)

// turn is what one claim waits for.
type turn struct {
	number int32
	wait   string // a lock_timeout
}

// turnTaker chooses the turns of a feed's claims.
type turnTaker struct {
	claims atomic.Int64
	shun   [turns]atomic.Int64 // until when, in nanoseconds since 1970
}

// next is the turn that a claim waits for: the claims of a feed spread over the first that it does not shun. Nil if it
// shuns all.
func (t *turnTaker) next(now time.Time, lease time.Duration) *turn {
	skip := t.claims.Add(1) % atOnce
	last := -1
	for i := range t.shun {
		if t.shun[i].Load() > now.UnixNano() {
			continue
		}
		last = i
		if skip == 0 {
			break
		}
		skip--
	}
	if last < 0 {
		return nil
	}
	wait := min(lease/turnWaitShare, turnWaitMost)
	return &turn{number: int32(last), wait: strconv.FormatInt(max(wait.Milliseconds(), 1), 10)}
}

// inVain notes that the wait for a turn has ended without it.
func (t *turnTaker) inVain(waited *turn, now time.Time) {
	t.shun[waited.number].Store(now.Add(shunned).UnixNano())
}

// turnKey is for both numbers of takeTurnSQL: the schema's, and that of a turn of a queue in a segment. Who looks into a
// segment that is empty waits for nobody who works on another.
func (f *feed) turnKey(seg segment, t *turn) (schema, key int32) {
	return int32(f.in.options.key), (f.queue*int32(segments)+int32(seg))*turns + t.number //nolint:gosec // any bits will do
}
