package postgres

import (
	"sync"
	"time"
)

// cursor says where a feed begins to look for messages in one segment. Without it every claim would walk over the dead
// index entries of all messages that were handled since the last vacuum.
//
// It is a hint. Three things bring it back to what lies behind it: an arrival that names its position, a look back to
// where the cursor was a moment ago (while notifications do not come), and the keeper's sweep.
type cursor struct {
	mu sync.Mutex
	// next is where the next claim begins, far is the farthest that it ever was.
	next, far int64
	// floor is what the next claim must not jump over, though others may have claimed behind it; noFloor if there is no such
	// position. The first claim jumps over nothing.
	floor int64
	// dry: a claim has found less than it asked for, and nothing has arrived since it began.
	dry    bool
	passes []*pass

	lookBack [lookBackSteps]int64
	step     int
	stepAt   time.Time
}

// pass is a claim under way. It looks from a position on, or from the queue's front, but not behind its floor.
type pass struct {
	from, far, floor int64
	// heard is the lowest position that arrived since the claim began, which may not have seen it. 0 = none did.
	heard int64
}

const (
	// lookBackSteps samples, lookBackEvery apart: how long ago the cursor is that a look back begins from.
	lookBackSteps = 8
	lookBackEvery = 25 * time.Millisecond
)

// begin starts a claim; nil if there is nothing to be found. Several may be under way. They begin at one place: one that
// left a part to another would, with the queue's front, make that one jump over it.
func (c *cursor) begin(now time.Time, deaf bool) *pass {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dry {
		return nil
	}
	if deaf && now.Sub(c.stepAt) >= lookBackEvery {
		c.stepAt = now
		c.step = (c.step + 1) % lookBackSteps
		old := c.lookBack[c.step]
		c.lookBack[c.step] = c.next
		c.next = min(c.next, old)
	}
	p := &pass{from: c.next, far: c.far, floor: max(c.floor, c.next)}
	if deaf { // of what lies behind the front, nobody tells
		p.floor = p.from
	}
	c.floor = noFloor
	c.passes = append(c.passes, p)
	return p
}

// found ends a claim: top is the last position that was claimed (0 = none), full says that there may be more behind it.
// Otherwise there was nothing more at its time. Arrivals meanwhile stand. front is where the claims of all were before.
// behind: there may be more behind the front, which a claim that began there meanwhile does not see.
func (c *cursor) found(p *pass, top int64, full bool, front int64) (behind bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.end(p)
	next := p.from
	if top != 0 {
		next = top + 1
	}
	if !full {
		next = max(next, p.far)
	}
	if p.heard != 0 {
		next = min(next, p.heard)
	}
	switch {
	case full && top < p.floor: // what it was not to jump over is still to come
		c.floor, behind = min(c.floor, p.floor), true
	case full && next < front && p.floor != noFloor: // it is on its way to the front
		c.floor, behind = min(c.floor, next), true
	}
	c.next = min(max(c.next, next), c.floor)
	c.far = max(c.far, c.next)
	c.dry = !full && p.heard == 0 && c.floor == noFloor
	return behind
}

// failed ends a claim of which nothing is known.
func (c *cursor) failed(p *pass) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.end(p)
	c.back(p.from)
}

// end forgets a pass. Call it with the lock held.
func (c *cursor) end(p *pass) {
	for i := range c.passes {
		if c.passes[i] == p {
			c.passes = append(c.passes[:i], c.passes[i+1:]...)
			return
		}
	}
}

// arrived takes a position where there is something.
func (c *cursor) arrived(pos int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.back(pos)
}

// back makes a claim look at pos. Call it with the lock held.
func (c *cursor) back(pos int64) {
	c.next, c.floor, c.dry = min(c.next, pos), min(c.floor, pos), false
	for _, p := range c.passes {
		if p.heard == 0 || pos < p.heard {
			p.heard = max(pos, 1)
		}
	}
}

// unseen is the part of the segment where something can be that no claim is going to find: all that lies before the
// cursor or, if the segment is dry, everything. With recent, it begins only where the cursor was a moment ago.
func (c *cursor) unseen(recent bool) (from, below int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	below = c.next
	if c.dry {
		below = maxPosition
	}
	if !recent {
		return 0, below
	}
	from = c.next
	for _, old := range c.lookBack {
		from = min(from, old)
	}
	return from, below
}

const (
	maxPosition = 1<<63 - 1
	noFloor     = maxPosition
)
