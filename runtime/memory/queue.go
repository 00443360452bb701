package memory

import (
	"slices"
	"sync"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// queue holds the rows of one queue. A row is in exactly one of its places, by its state.
//
// released and ready are each sorted by due: a row is put there with the store's now, behind everything that became
// due before it. So their heads are the rows that have been due longest.
type queue struct {
	store *Store
	name  string

	mu sync.Mutex
	// released are rows handed back unfinished: they came before those in ready, and go first.
	released list
	ready    list
	later    schedule
	leased   list // sorted by expiry
	dead     shelf
	history  list
	counts   [states]int64

	completions int64 // kept ones, ever: the position of the newest

	// Retentions in nanoseconds, 0 = of completed rows none, of dead letters for ever.
	retainCompleted, retainDead int64

	feeds  []*feed // those that may still lease
	hungry int     // of feeds: got less than they asked for, and were not woken since

	// The timer runs while a feed is hungry and something will become due. It may fire early or for nothing.
	timer    *time.Timer
	armed    bool
	armedFor int64
}

func newQueue(s *Store, name string) *queue {
	return &queue{store: s, name: name, dead: shelf{byID: make(map[leasebus.ID]list)}}
}

// lock returns the store's now, read under the lock: what comes later to a queue has a later time.
func (q *queue) lock() (now int64) {
	q.mu.Lock()
	now = q.store.now()
	q.promote(now)
	return now
}

// unlock wakes, outside the lock, the feeds that wait for what there is now, or arms the timer for what will be.
func (q *queue) unlock(now int64) {
	if q.hungry == 0 {
		q.mu.Unlock()
		return
	}
	var room [4]*feed
	wake := room[:0]
	if q.leasable(now) {
		for _, f := range q.feeds {
			if f.hungry {
				wake = append(wake, f)
				f.hungry = false
			}
		}
		q.hungry = 0
	} else {
		q.arm(now)
	}
	q.mu.Unlock()
	for _, f := range wake {
		f.wake()
	}
}

// leasable reports whether a lease would find something.
func (q *queue) leasable(now int64) bool {
	return q.released.len > 0 || q.ready.len > 0 || q.leased.len > 0 && q.leased.head.due <= now
}

// promote moves what has become due to ready, in the order in which it did.
func (q *queue) promote(now int64) {
	for {
		due, ok := q.later.first()
		if !ok || due > now {
			return
		}
		q.ready.pushBack(q.later.pop())
	}
}

// next is when something that cannot be leased now can be.
func (q *queue) next() (due int64, ok bool) {
	due, ok = q.later.first()
	if q.leased.len > 0 && (!ok || q.leased.head.due < due) {
		return q.leased.head.due, true
	}
	return due, ok
}

// arm sets the timer for the next time at which something can be leased.
func (q *queue) arm(now int64) {
	next, ok := q.next()
	if !ok || q.armed && q.armedFor <= next {
		return
	}
	q.armed, q.armedFor = true, next
	if wait := time.Duration(next - now); q.timer == nil {
		q.timer = time.AfterFunc(wait, q.ring)
	} else {
		q.timer.Reset(wait)
	}
}

func (q *queue) ring() {
	now := q.lock()
	q.armed = false
	q.unlock(now)
}

// reconsider is for a clock that has jumped.
func (q *queue) reconsider() { q.ring() }

// wait puts a row with its due time where such rows wait.
func (q *queue) wait(r *row, as state, now int64) {
	q.enter(r, as)
	if r.due > now {
		q.later.push(r)
		return
	}
	q.ready.pushBack(r)
}

// enter counts r in its new state.
func (q *queue) enter(r *row, as state) {
	r.state = as
	q.counts[as]++
}

func (q *queue) leave(r *row) { q.counts[r.state]-- }

// slabSize rows are allocated together. It is small because one row that stays keeps its neighbours in memory.
const slabSize = 16

func (q *queue) publish(out []leasebus.Outgoing) {
	var fresh list
	for rest := out; len(rest) > 0; {
		slab := rest[:min(len(rest), slabSize)]
		q.copyIn(slab, &fresh)
		rest = rest[len(slab):]
	}

	now := q.lock()
	for i := range out {
		q.arrive(fresh.popFront(), q.dueOf(&out[i], now), now)
	}
	q.unlock(now)
}

func (q *queue) arrive(r *row, due, now int64) {
	r.due, r.ageFrom = due, due
	r.env.FirstDue = q.store.timeOf(due)
	q.wait(r, pending, now)
}

// copyIn makes rows of out that share no memory with it.
func (q *queue) copyIn(out []leasebus.Outgoing, into *list) {
	size := 0
	for i := range out {
		size += len(out[i].Payload) + len(out[i].Headers.Encoded())
	}
	arena := make([]byte, 0, size)
	keep := func(b []byte) []byte {
		from := len(arena)
		arena = append(arena, b...)
		return slices.Clip(arena[from:])
	}
	rows := make([]row, len(out))
	for i := range rows {
		r := &rows[i]
		r.queue = q
		r.env = out[i].Envelope
		r.env.Queue = q.name
		r.env.Payload = keep(r.env.Payload)
		if encoded := r.env.Headers.Encoded(); len(encoded) > 0 {
			r.env.Headers, _ = leasebus.DecodeHeaders(keep(encoded)) // a copy of headers that are validated already
		}
		into.pushBack(r)
	}
}

func (q *queue) dueOf(out *leasebus.Outgoing, now int64) int64 {
	if !out.At.IsZero() {
		return max(now, int64(out.At.Sub(q.store.wall)))
	}
	return after(now, max(0, int64(out.Delay)))
}

// lease moves up to len(dst) rows to f (S1). The rows whose lease expired come first: they have waited longest.
func (q *queue) lease(f *feed, dst []leasebus.Lease, now int64) int {
	expiry := after(now, f.duration)
	for n := range dst {
		r := q.take(now)
		if r == nil {
			return n
		}
		q.leave(r)
		q.enter(r, processing)
		r.owner = f.sub.Owner
		r.generation++
		r.attempt++
		q.extend(r, expiry)

		l := &dst[n]
		l.Envelope = r.env
		l.Attempt = int(r.attempt)
		l.Generation = r.generation
		l.Age = time.Duration(now - r.ageFrom)
		l.Crashed = r.crashed
		l.Interruptions = int(r.interruptions)
		l.Ref = leasebus.Ref{P: r}
	}
	return len(dst)
}

func (q *queue) take(now int64) *row {
	if r := q.leased.head; r != nil && r.due <= now {
		q.leased.remove(r)
		r.crashed = true
		return r
	}
	if r := q.released.popFront(); r != nil {
		return r
	}
	return q.ready.popFront()
}

// extend puts r among the leased rows by its expiry. Leases of one length are made in the order of their expiry, so
// the first look from the back finds the place.
func (q *queue) extend(r *row, expiry int64) {
	r.due = expiry
	at := q.leased.tail
	for at != nil && at.due > expiry {
		at = at.prev
	}
	q.leased.insertAfter(at, r)
}

// prune forgets what its retention has passed.
func (q *queue) prune(now int64) {
	for r := q.history.head; r != nil && after(r.due, q.retainCompleted) <= now; r = q.history.head {
		q.history.remove(r)
		q.leave(r)
	}
	if q.retainDead > 0 {
		for r := q.dead.oldest(); r != nil && after(r.dead.at, q.retainDead) <= now; r = q.dead.oldest() {
			q.unbury(r)
			r.state = discarded
		}
	}
}

func (q *queue) nextDue() (wait time.Duration, ok bool) {
	now := q.lock()
	defer q.unlock(now)
	if q.leasable(now) {
		return 0, true
	}
	due, ok := q.next()
	if !ok {
		return 0, false
	}
	return time.Duration(due - now), true
}
