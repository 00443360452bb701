package leasebus

import (
	"sync"
	"sync/atomic"
	"time"
)

const (
	// suspectFrom is the attempt from which a message whose last attempt crashed is a suspect: one crash is nobody's
	// fault (a deploy, the machine), two in a row are somebody's.
	suspectFrom = 3
	// maxSuspects is how many suspects a processor holds at most.
	maxSuspects = 64
	// suspectDelay is how long the other suspects are put off at least; else for as long as one has run already: each time
	// they are leased, a crash before they are put off again would charge them.
	suspectDelay = 250 * time.Millisecond
	// suspectPause is how long nothing is leased after a suspect was admitted: most killers do it at once.
	suspectPause = time.Second
)

// quarantine keeps a message that kills its process from taking others to the dead letters with it: whatever a dying
// process holds has spent an attempt, and would be leased, and spend the next one, together with the killer.
//
// So suspects are held in groups that shrink as their attempts run out, on the last one alone. The innocent ones of a
// group complete, the others have crashed once more and meet again in a smaller group. This is group testing, with the
// attempts as the number of rounds.
type quarantine struct {
	mu    sync.Mutex
	held  int
	limit int           // of the strictest suspect that is held
	first time.Time     // when the first of the present group was admitted
	last  time.Time     // when the last one was
	clear chan struct{} // closed when none is held any more
}

// groupOf is how many suspects may be held together with l; 0 = l is none.
func groupOf(p *Policy, l *Lease) int {
	left := p.Retry.MaxAttempts - l.Attempt
	if !l.Crashed || left < 0 || l.Attempt < suspectFrom && left > 0 {
		return 0
	}
	group := 1
	for ; left > 0 && group < maxSuspects; left-- {
		group *= 4
	}
	return group
}

// admit lets a suspect in if the group allows it.
func (q *quarantine) admit(group int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	limit := group
	if q.held > 0 {
		limit = min(limit, q.limit)
	}
	if q.held >= limit {
		return false
	}
	q.last = time.Now()
	if q.held == 0 {
		q.first, q.clear = q.last, make(chan struct{})
	}
	q.held++
	q.limit = limit
	return true
}

func (q *quarantine) leave() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.held--
	if q.held == 0 {
		close(q.clear)
	}
}

// delay is for a suspect that cannot be admitted now.
func (q *quarantine) delay() time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	return max(suspectDelay, time.Since(q.first))
}

// calm waits until nobody has been admitted for a moment, or none is held.
func (q *quarantine) calm(stop <-chan struct{}) {
	for {
		q.mu.Lock()
		held, cleared, rest := q.held, q.clear, suspectPause-time.Since(q.last)
		q.mu.Unlock()
		if held == 0 || rest <= 0 {
			return
		}
		timer := time.NewTimer(rest)
		select {
		case <-cleared:
		case <-timer.C:
		case <-stop:
			timer.Stop()
			return
		}
		timer.Stop()
	}
}

// quarantine sorts out suspects. Those that must wait are put off, their attempt given back; the others start only when
// that is stored: a crash before would charge those that wait, too. It returns what may start at once.
func (s *session) quarantine(leases []Lease) []*Lease {
	start := make([]*Lease, 0, len(leases))
	var admitted, putOff []*Lease
	for i := range leases {
		l := &leases[i]
		switch group := groupOf(s.queue.policy, l); {
		case group == 0:
			start = append(start, l)
		case s.p.suspects.admit(group):
			l.run.suspect = true
			admitted = append(admitted, l)
		default:
			putOff = append(putOff, l)
		}
	}
	if len(putOff) == 0 {
		return append(start, admitted...)
	}
	rest := &countdown{then: func() { s.dispatch(admitted) }}
	rest.left.Store(int64(len(putOff)))
	for _, l := range putOff {
		if !s.giveBack(l, Settlement{Kind: SettleDefer, Delay: s.p.suspects.delay(), state: settlementState{part: rest}}) {
			rest.done() // lost already
		}
	}
	return start
}

// countdown calls then when the last of its parts is done.
type countdown struct {
	left atomic.Int64
	then func()
}

func (c *countdown) done() {
	if c.left.Add(-1) == 0 {
		c.then()
	}
}
