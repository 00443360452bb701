package postgres

import (
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// cursor says where a feed begins to look for messages. Without it every claim would walk over the dead index entries of
// all messages that were handled since the last vacuum.
//
// It is a hint. Three things bring it back to what lies behind it: an arrival that names its position, a look back to
// where the cursor was a moment ago (while notifications do not come), and the sweep, which reads the queue from its
// low-water mark, below which nothing can be any more; from time to time the sweep reads from the very beginning.
type cursor struct {
	sweepEvery time.Duration

	mu   sync.Mutex
	next int64
	// heard is the lowest position that arrived since the last claim began, which may not have seen it. 0 = none did.
	heard int64

	// low is the low-water mark: no message lies below it.
	low int64
	// below and xid are a mark in the making: when every transaction that is older than xid has ended, nothing can
	// appear below that position.
	below int64
	xid   int64

	sweepAt  time.Time
	wholeAt  time.Time
	lookBack [lookBackSteps]int64
	step     int
	stepAt   time.Time
}

const (
	// lookBackSteps samples, lookBackEvery apart: how long ago the cursor is that a look back begins from.
	lookBackSteps = 8
	lookBackEvery = 25 * time.Millisecond
	// wholeEvery is how often a sweep does not trust the low-water mark.
	wholeEvery = time.Minute
)

// claimFrom returns where the next claim begins, and the state that advance needs.
func (c *cursor) claimFrom(now time.Time, deaf bool) (from, was int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard = 0
	switch {
	case !now.Before(c.sweepAt):
		return c.sweep(now), c.next
	case deaf && now.Sub(c.stepAt) >= lookBackEvery:
		c.stepAt = now
		c.step = (c.step + 1) % lookBackSteps
		old := c.lookBack[c.step]
		c.lookBack[c.step] = c.next
		return min(old, c.next), c.next
	}
	return c.next, c.next
}

// sweep is a look from the low-water mark. Call it with the lock held.
func (c *cursor) sweep(now time.Time) int64 {
	// A jitter keeps processes apart.
	c.sweepAt = now.Add(c.sweepEvery - c.sweepEvery/4 + rand.N(c.sweepEvery/2)) //nolint:gosec // a jitter
	if now.Before(c.wholeAt) {
		return c.low
	}
	c.wholeAt = now.Add(wholeEvery)
	return 0
}

// sweepSoon makes the next claim a sweep; whole = from the beginning.
func (c *cursor) sweepSoon(whole bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sweepAt = time.Time{}
	if whole {
		c.wholeAt = time.Time{}
	}
}

// advance takes the result of a claim: top is the last position that was claimed, full says that there may be more
// behind it. Arrivals meanwhile stand.
func (c *cursor) advance(was, top int64, full bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.next != was:
		c.next = min(c.next, top+1)
	case full || top+1 > c.next:
		c.next = top + 1
	}
	if c.heard != 0 {
		c.next = min(c.next, c.heard)
	}
}

// arrived takes a position where there is something.
func (c *cursor) arrived(pos int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next = min(c.next, pos)
	if c.heard == 0 || pos < c.heard {
		c.heard = pos
	}
}

// lowMark returns the low-water mark and whether a sweep is due.
func (c *cursor) lowMark(now time.Time) (low int64, due bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.low, !now.Before(c.sweepAt)
}

// mark takes what a look from low has found: the first message at or above it (0 = none), the position that the
// sequence has reached, and the oldest and the next transaction.
func (c *cursor) mark(low, first, reached, xmin, xmax int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if low != c.low {
		return
	}
	if first == 0 {
		first = math.MaxInt64
	}
	if c.xid != 0 && xmin >= c.xid {
		c.low = max(c.low, min(first, c.below))
		c.xid = 0
	}
	if c.xid == 0 {
		c.below, c.xid = reached, xmax
	}
}

// behind is a position that the cursor had a moment ago: what committed late lies between.
func (c *cursor) behind() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	behind := c.next
	for _, old := range c.lookBack {
		behind = min(behind, old)
	}
	return behind
}
