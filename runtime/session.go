package leasebus

import (
	"context"
	"errors"
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// leaseBatch is the most that one Lease asks for, settleBatch the most that one Settle carries.
	leaseBatch  = 500
	settleBatch = 500
	// leasers is how many Lease calls of a session may be under way: if the last one brought all of a large batch, or if
	// there was a wake since it began.
	leasers, severalFrom = 2, 200
	// settlers is how many Settle calls of a session may be under way.
	settlers = 2
	// feedStopBound is the longest that a backend may take to hand back what it has buffered.
	feedStopBound = 5 * time.Second
	// slabLeases is the least that is allocated for leases at once.
	slabLeases = 64

	// The look-ahead covers what the handlers finish during three round trips of Lease, within these bounds.
	minLookAheadWindow = 5 * time.Millisecond
	maxLookAheadWindow = 100 * time.Millisecond
)

// session is one subscription of one queue: it leases, renews and settles until it is stopped and its last lease ends.
// Pausing stops it, resuming starts another.
type session struct {
	p     *Processor
	queue *queue
	feed  Feed

	// ctx ends when the session is given up; calls to the backend hang on it.
	ctx  context.Context
	quit context.CancelFunc
	done sync.WaitGroup

	wake  chan struct{} // Lease may return something
	room  chan struct{} // there may be room for leases again
	check chan struct{} // renew now
	kick  chan struct{} // there are settlements

	// starved is set while the leaser waits for room; roomMark is the in-flight count below which it has some.
	starved  atomic.Bool
	roomMark atomic.Int64
	// leased counts leases that are neither settled nor given up.
	leased atomic.Int64

	trouble troubles // for people

	lookAhead atomic.Int64
	sampledAt time.Time // of the leaser, as are those below
	sampled   int64
	spare     []Lease
	reserved  int // what the Lease calls under way may bring

	mu       sync.Mutex
	stopping bool
	leasing  int           // Lease calls under way
	stopped  chan struct{} // closed with stopping
	empty    chan struct{} // closed when nothing is leased and nothing will be
	over     bool          // no settlement is sent any more
	slabs    slabList
	pending  []Settlement
	locked   []Settlement // those whose row was locked, until they are tried again
}

// slab is the leases of one Lease call, which share memory.
type slab struct {
	leases     []Lease
	live       atomic.Int32
	prev, next *slab
}

// slabList holds the slabs that have live leases: what the heartbeat walks.
type slabList struct{ first, last *slab }

func (l *slabList) add(s *slab) {
	s.prev = l.last
	if l.last == nil {
		l.first = s
	} else {
		l.last.next = s
	}
	l.last = s
}

// leases iterates over all leases of the slabs, ended ones too.
func (l *slabList) leases() iter.Seq[*Lease] {
	return func(yield func(*Lease) bool) {
		for block := l.first; block != nil; block = block.next {
			for i := range block.leases {
				if !yield(&block.leases[i]) {
					return
				}
			}
		}
	}
}

func (l *slabList) remove(s *slab) {
	if s.prev == nil {
		l.first = s.next
	} else {
		s.prev.next = s.next
	}
	if s.next == nil {
		l.last = s.prev
	} else {
		s.next.prev = s.prev
	}
	s.prev, s.next = nil, nil
}

func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// openSession subscribes; run starts the work.
func (p *Processor) openSession(ctx context.Context, q *queue) (*session, error) {
	s := &session{
		p: p, queue: q,
		wake: make(chan struct{}, 1), room: make(chan struct{}, 1),
		check: make(chan struct{}, 1), kick: make(chan struct{}, 1),
		stopped: make(chan struct{}), empty: make(chan struct{}),
	}
	feed, err := p.source.Subscribe(ctx, Subscription{
		Queue: q.policy.Queue, Types: q.types, Owner: p.owner, Policy: q.policy, Concurrency: q.backlog.limit,
		Wake:  func() { nudge(s.wake) },
		Check: func() { nudge(s.check) },
	})
	if err != nil {
		return nil, err
	}
	s.feed = feed
	s.ctx, s.quit = context.WithCancel(context.Background())
	return s, nil
}

func (s *session) run() {
	s.done.Go(s.leaseLoop)
	s.done.Go(s.heartbeatLoop)
	for range settlers {
		s.done.Go(s.settleLoop)
	}
}

// halt ends leasing, as far as this side goes. What is leased already goes on.
func (s *session) halt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopping {
		s.stopping = true
		close(s.stopped)
		s.noticeEmpty()
	}
}

// stop ends leasing, and waits for the backend to hand back what it has buffered.
func (s *session) stop() {
	s.halt()
	ctx, cancel := context.WithTimeout(s.ctx, feedStopBound)
	defer cancel()
	if err := s.feed.Stop(ctx); err != nil {
		s.p.log.Warn("leasebus: stop of a feed failed", "queue", s.queue.policy.Queue, "error", err)
	}
}

// shed gives back what the handlers have become too slow for: all beyond free slots and what they finished since the
// last heartbeat. A message is not to wait here while others could work on it.
func (s *session) shed(finished int64) {
	waiting, running := s.p.dispatcher.count(s.queue)
	keep := max(s.p.slotsFor(s.queue)-running, 0) + int(finished)
	if waiting <= keep {
		return
	}
	s.lookAhead.Store(min(s.lookAhead.Load(), finished))
	s.release(keep)
}

// release gives back what is leased and not started, the first keep of it excepted.
func (s *session) release(keep int) { s.giveBackAll(s.p.dispatcher.withdraw(s, keep)) }

// close gives up what is left and waits until the session's goroutines are gone. Safe to call twice.
func (s *session) close() {
	s.quit()
	s.done.Wait()
	s.p.forget(s)
	if err := s.feed.Close(); err != nil {
		s.p.log.Warn("leasebus: close of a feed failed", "queue", s.queue.policy.Queue, "error", err)
	}
}

// leaseLoop keeps the workers supplied. While the queue is full, it has several Lease calls under way: a store would
// wait for the next one as long as it works on one.
func (s *session) leaseLoop() {
	defer s.queue.contending.Store(false)
	l := leaser{s: s, done: make(chan leased, leasers), hungry: true, atOnce: 1, backoff: backoff{first: 50 * time.Millisecond, max: 10 * time.Second}}
	for {
		want := 0
		if l.hungry && l.underWay < l.atOnce {
			want = s.roomFor()
		}
		s.queue.contending.Store(l.hungry && l.underWay == 0 && want == 0)
		if want > 0 {
			l.start(want)
			continue
		}
		wake := s.wake
		if l.underWay == leasers {
			wake = nil // what is under way may have begun too early: the wake is for after that
		}
		select {
		case <-wake: // for a call that begins from here on, beside one that is under way
			l.hungry, l.woken, l.atOnce = true, true, leasers
		case <-s.room:
		case <-s.stopped:
			return
		case end := <-l.done:
			if !l.ended(end) {
				return
			}
		}
	}
}

// leaser is the state of leaseLoop.
type leaser struct {
	s        *session
	done     chan leased
	hungry   bool // there may be messages
	woken    bool // no call has begun since the last wake
	begun    int  // calls, ever
	underWay int
	atOnce   int // calls
	backoff  backoff
}

// start asks for want leases. What comes is handed to the workers before done is told.
func (l *leaser) start(want int) {
	s := l.s
	select { // cleared before the round trip: a wake during it must not be lost
	case <-s.wake:
	default:
	}
	l.woken = false
	l.begun++
	call := l.begun
	if len(s.spare) < want {
		s.spare = make([]Lease, max(want, slabLeases))
	}
	dst := s.spare[:want:want]
	s.spare = s.spare[want:]
	s.reserved += want
	l.underWay++
	s.done.Go(func() {
		began := time.Now()
		n, err := s.lease(dst)
		l.done <- leased{call, want, n, dst[n:], time.Since(began), err}
	})
}

// ended takes the end of a Lease call; false if there is to be no other one.
func (l *leaser) ended(end leased) bool {
	s := l.s
	l.underWay--
	s.reserved -= end.want
	if len(end.rest) > len(s.spare) {
		s.spare = end.rest
	}
	s.observe(end.roundTrip)
	s.trouble.lease.note(end.err)
	switch {
	case end.err == nil:
		full := end.n == end.want
		if full || end.call == l.begun { // an older call that found too little says nothing of what came since
			l.hungry, l.atOnce = full || l.woken, 1
		}
		if l.woken || full && end.want >= severalFrom {
			l.atOnce = leasers
		}
		l.backoff.reset()
		return true
	case errors.Is(end.err, ErrFeedStopped), s.ctx.Err() != nil:
		return false
	default:
		s.p.stats.leaseErrors.Add(1)
		s.p.log.WarnContext(s.ctx, "leasebus: leasing failed", "queue", s.queue.policy.Queue, "error", end.err, "failures", l.backoff.failures+1)
		return l.backoff.wait(s.stopped)
	}
}

// leased is the end of a Lease call.
type leased struct {
	call      int // its number
	want, n   int
	rest      []Lease // was not filled
	roundTrip time.Duration
	err       error
}

// lease fills dst with leases and hands them to the workers.
func (s *session) lease(dst []Lease) (int, error) {
	s.p.suspects.calm(s.stopped)
	if !s.beginLeasing() {
		return 0, ErrFeedStopped
	}
	defer s.endLeasing()
	sent := s.p.now()
	n, err := s.feed.Lease(s.ctx, dst)
	if n > 0 {
		s.accept(dst[:n:n], sent)
	}
	return n, err
}

func (s *session) beginLeasing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return false
	}
	s.leasing++
	return true
}

func (s *session) endLeasing() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leasing--
	s.noticeEmpty()
}

// accept takes leases over from the backend.
func (s *session) accept(leases []Lease, sent time.Duration) {
	arrived, valid := s.p.now(), sent+s.queue.policy.Lease.Duration
	block := &slab{leases: leases}
	block.live.Store(int32(len(leases))) //nolint:gosec // at most leaseBatch
	for i := range leases {
		r := &leases[i].run
		r.queue, r.session, r.slab = s.queue, s, block
		r.arrivedAt = arrived
		r.ctx.base, r.ctx.lease = s.p.base, &leases[i]
		r.validUntil.Store(int64(valid))
	}
	s.p.stats.leased.Add(int64(len(leases)))
	s.p.stats.held.Add(int64(len(leases)))
	s.queue.inFlight.Add(int64(len(leases)))
	s.leased.Add(int64(len(leases)))

	s.mu.Lock()
	s.slabs.add(block)
	s.mu.Unlock()
	if s.p.now() >= valid-s.queue.margin() {
		s.giveBackAll(pointers(leases)) // too late to be worked on
		return
	}
	s.dispatch(s.quarantine(leases))
}

func pointers(leases []Lease) []*Lease {
	list := make([]*Lease, len(leases))
	for i := range leases {
		list[i] = &leases[i]
	}
	return list
}

// dispatch hands leases to the workers, unless nobody is to start anything any more.
func (s *session) dispatch(leases []*Lease) {
	s.mu.Lock()
	stopping := s.stopping
	if !stopping {
		s.p.dispatcher.push(s.queue, leases)
	}
	s.mu.Unlock()
	if stopping {
		s.giveBackAll(leases)
	}
}

// giveBackAll releases leases that were not started. That is fenced, so it harms nobody if a lease is gone.
func (s *session) giveBackAll(leases []*Lease) {
	for _, l := range leases {
		s.giveBack(l, Settlement{Kind: SettleRelease})
	}
}

// giveBack settles a lease that was not started; false if it is gone already.
func (s *session) giveBack(l *Lease, st Settlement) bool {
	if !l.advance(stateHeld, stateSettling) {
		return false
	}
	s.queue.leaveSlot()
	st.Lease = l
	s.settle(st)
	return true
}

// observe adapts the look-ahead to what the handlers finish during a few round trips: fast handlers get full batches,
// slow ones hoard nothing. It falls slowly, so that one pause does not starve the next burst.
func (s *session) observe(roundTrip time.Duration) {
	now, finished := time.Now(), s.queue.finished.Load()
	elapsed := now.Sub(s.sampledAt)
	if elapsed < time.Millisecond {
		return
	}
	window := min(max(3*roundTrip, minLookAheadWindow), maxLookAheadWindow)
	target := int64(float64(finished-s.sampled) * float64(window) / float64(elapsed))
	target = min(target, s.p.options.lookAhead)
	if s.queue.policy.Retry.MaxAttempts == 1 {
		target = 0 // a crash spends the attempt of all that is leased: with only one, nothing is leased before its turn
	}
	if before := s.lookAhead.Load(); target < before {
		target = before - (before-target+7)/8
	}
	s.lookAhead.Store(target)
	s.sampledAt, s.sampled = now, finished
}

// roomFor says how many leases are worth asking for now: 0 = none, and the leaser will be nudged when there is room.
func (s *session) roomFor() int {
	q := s.queue
	capacity := int64(s.p.slotsFor(q)) + s.lookAhead.Load()
	batch := min(int64(leaseBatch), capacity)
	// While others wait to be run, a whole half batch is worth waiting for; idle workers are not.
	least := func() int64 {
		if waiting, _ := s.p.dispatcher.count(q); waiting > 0 {
			return max(batch/2, 1)
		}
		return 1
	}
	room := func() int64 {
		if s.backlog() > 4*settleBatch { // settling is behind: more leases would only expire
			return 0
		}
		return min(capacity-q.inFlight.Load()-int64(s.reserved), batch)
	}
	wanted := least()
	if free := room(); free >= wanted {
		return int(free)
	}
	s.roomMark.Store(capacity - wanted - int64(s.reserved))
	s.starved.Store(true)
	if free := room(); free >= least() { // it came, or the last one that waited went, while the flag was being set
		s.starved.Store(false)
		return int(free)
	}
	return 0
}

func (s *session) backlog() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pending)
}

// leaveSlot takes a lease out of the in-flight count, and lets the leaser know if it waited for that.
func (q *queue) leaveSlot() {
	n := q.inFlight.Add(-1)
	if s := q.current.Load(); s != nil && s.starved.Load() && n <= s.roomMark.Load() {
		s.offerRoom()
	}
}

func (s *session) offerRoom() {
	if s.starved.CompareAndSwap(true, false) {
		nudge(s.room)
	}
}

// ended is the end of a lease, settled or not.
func (s *session) ended(l *Lease) {
	l.run.state.Store(stateDone)
	s.p.stats.held.Add(-1)
	if l.run.suspect {
		s.p.suspects.leave()
	}
	lastOfSlab := l.run.slab.live.Add(-1) == 0
	lastOfAll := s.leased.Add(-1) == 0
	if !lastOfSlab && !lastOfAll {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if lastOfSlab {
		s.slabs.remove(l.run.slab)
	}
	s.noticeEmpty()
}

// noticeEmpty closes empty when nothing is leased and nothing can be any more. Call it with the lock held.
func (s *session) noticeEmpty() {
	if !s.stopping || s.leasing > 0 || s.leased.Load() != 0 {
		return
	}
	select {
	case <-s.empty:
	default:
		close(s.empty)
	}
}

// backoff is the wait between two tries of something that fails: doubling, with full jitter on the upper half.
type backoff struct {
	first, max time.Duration
	failures   int
}

func (b *backoff) reset() { b.failures = 0 }

func (b *backoff) next() time.Duration {
	b.failures++
	r := RetryPolicy{Initial: b.first, Max: b.max, Multiplier: 2, Jitter: 0.5}
	return r.jittered(r.delay(b.failures))
}

// wait returns false if stop came first.
func (b *backoff) wait(stop <-chan struct{}) bool {
	timer := time.NewTimer(b.next())
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-stop:
		return false
	}
}
