package leasebus

import (
	"slices"
	"sync"
)

// dispatcher hands held leases to workers: one lock, parked workers, and at most one of them being woken at a time.
// Queues take turns, so that a flooded one cannot keep another from its share of the workers.
type dispatcher struct {
	mu      sync.Mutex
	turn    []*queue // queues with work that may run now, in turn; turn[turnHead:] is live
	head    int
	parked  []chan struct{}
	waking  bool
	closed  bool
	running int
	idle    chan struct{} // closed when running falls to 0; nil while nobody waits
}

// backlog is a queue's part in the dispatcher, guarded by the dispatcher's lock.
type backlog struct {
	held    []*Lease // held[heldHead:] wait for a worker, in order of arrival
	head    int
	running int
	limit   int // of handlers at once
	paused  bool
	inTurn  bool
}

func (b *backlog) waiting() int { return len(b.held) - b.head }

// push adds leases of q. Their order is kept.
func (d *dispatcher) push(q *queue, leases []*Lease) {
	d.mu.Lock()
	b := &q.backlog
	if b.head > len(b.held)/2 { // keep the array from growing behind the head
		n := copy(b.held, b.held[b.head:])
		clear(b.held[n:])
		b.held, b.head = b.held[:n], 0
	}
	b.held = append(b.held, leases...)
	d.schedule(q)
	wake := d.wakeOne()
	d.mu.Unlock()
	signal(wake)
}

// next parks until a lease may run, and returns it; nil when the dispatcher is closed. finished, if any, is the queue
// whose handler has just ended. last is called when the lease is the last one its queue holds.
func (d *dispatcher) next(parking chan struct{}, finished *queue, last func(*queue)) *Lease {
	d.mu.Lock()
	if finished != nil {
		d.finish(finished)
	}
	for {
		if d.closed {
			d.mu.Unlock()
			return nil
		}
		if d.head < len(d.turn) {
			lease, emptied := d.take()
			wake := d.wakeOne()
			d.mu.Unlock()
			signal(wake)
			if emptied {
				last(lease.run.queue)
			}
			return lease
		}
		d.parked = append(d.parked, parking)
		d.mu.Unlock()
		<-parking
		d.mu.Lock()
		d.waking = false
	}
}

// take removes the first lease of the queue whose turn it is.
func (d *dispatcher) take() (lease *Lease, emptied bool) {
	q := d.turn[d.head]
	d.turn[d.head] = nil
	d.head++
	b := &q.backlog
	b.inTurn = false
	lease = b.held[b.head]
	b.held[b.head] = nil
	b.head++
	b.running++
	d.running++
	d.schedule(q)
	return lease, b.waiting() == 0
}

// schedule gives q a turn if it has something that may run.
func (d *dispatcher) schedule(q *queue) {
	b := &q.backlog
	if b.inTurn || b.paused || b.waiting() == 0 || b.running >= b.limit {
		return
	}
	b.inTurn = true
	if d.head == len(d.turn) {
		d.turn, d.head = d.turn[:0], 0
	} else if d.head > 64 && d.head > len(d.turn)/2 {
		n := copy(d.turn, d.turn[d.head:])
		clear(d.turn[n:])
		d.turn, d.head = d.turn[:n], 0
	}
	d.turn = append(d.turn, q)
}

// finish gives the slot of an ended handler back.
func (d *dispatcher) finish(q *queue) {
	q.backlog.running--
	d.running--
	if d.running == 0 && d.idle != nil {
		close(d.idle)
		d.idle = nil
	}
	d.schedule(q)
}

// finished is finish for a goroutine that takes no next lease.
func (d *dispatcher) finished(q *queue) {
	d.mu.Lock()
	d.finish(q)
	wake := d.wakeOne()
	d.mu.Unlock()
	signal(wake)
}

// wakeOne picks a parked worker if there is work for one. Call it with the lock held, signal without.
func (d *dispatcher) wakeOne() chan struct{} {
	if d.waking || len(d.parked) == 0 || d.head == len(d.turn) {
		return nil
	}
	last := len(d.parked) - 1
	parking := d.parked[last]
	d.parked = d.parked[:last]
	d.waking = true
	return parking
}

func signal(parking chan struct{}) {
	if parking != nil {
		parking <- struct{}{}
	}
}

// pause takes q's turns away; resume gives them back.
func (d *dispatcher) pause(q *queue) {
	d.mu.Lock()
	defer d.mu.Unlock()
	q.backlog.paused = true
	d.dropTurn(q)
}

func (d *dispatcher) dropTurn(q *queue) {
	if !q.backlog.inTurn {
		return
	}
	q.backlog.inTurn = false
	i := d.head + slices.Index(d.turn[d.head:], q)
	d.turn = slices.Delete(d.turn, i, i+1)
}

func (d *dispatcher) resume(q *queue) {
	d.mu.Lock()
	q.backlog.paused = false
	d.schedule(q)
	wake := d.wakeOne()
	d.mu.Unlock()
	signal(wake)
}

// withdraw takes back the leases of one session that no worker has, but for the first keep ones of its queue.
func (d *dispatcher) withdraw(s *session, keep int) []*Lease {
	d.mu.Lock()
	defer d.mu.Unlock()
	b := &s.queue.backlog
	var taken []*Lease
	kept := b.held[:min(b.head+keep, len(b.held))]
	for _, lease := range b.held[len(kept):] {
		if lease.run.session == s {
			taken = append(taken, lease)
		} else {
			kept = append(kept, lease)
		}
	}
	clear(b.held[len(kept):])
	b.held = kept
	if b.waiting() == 0 {
		d.dropTurn(s.queue)
	}
	return taken
}

// count returns how many of q's leases wait for a worker and how many run.
func (d *dispatcher) count(q *queue) (waiting, running int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return q.backlog.waiting(), q.backlog.running
}

func (d *dispatcher) inFlight() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.running
}

// whenIdle returns a channel that is closed when no handler runs.
func (d *dispatcher) whenIdle() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.running == 0 {
		done := make(chan struct{})
		close(done)
		return done
	}
	if d.idle == nil {
		d.idle = make(chan struct{})
	}
	return d.idle
}

// close lets every worker go home.
func (d *dispatcher) close() {
	d.mu.Lock()
	d.closed = true
	parked := d.parked
	d.parked = nil
	d.mu.Unlock()
	for _, parking := range parked {
		signal(parking)
	}
}
