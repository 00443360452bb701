package amqp

import (
	"cmp"
	"slices"
	"sync"
)

// acker acknowledges the deliveries of one channel.
type acker interface {
	Ack(tag uint64, multiple bool) error
	Nack(tag uint64, multiple, requeue bool) error
}

// ledger lists what one channel has delivered and what is open of it: neither acknowledged nor handed back.
//
// It merges acknowledgements where that is safe. An acknowledgement for several covers every delivery before it, so it
// may stand for a batch only below the first open one. What lies above is acknowledged alone: waiting for the open one,
// which may be held for a while, would soon leave nothing to be delivered.
//
// Acknowledging twice, or what was never delivered, would close the channel. So an entry leaves the list together with
// its acknowledgement, under one lock.
type ledger struct {
	channel acker

	mu          sync.Mutex
	closed      bool
	first, last *entry // open ones, in order of their tags
	open        int    // how many
}

// count is how many deliveries are open.
func (l *ledger) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open
}

// entry is a delivery's place in the ledger of its channel.
type entry struct {
	tag        uint64
	open       bool
	prev, next *entry
}

// delivered enters a delivery. Tags grow from one to the next.
func (l *ledger) delivered(e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.open++
	e.open, e.prev = true, l.last
	if l.last == nil {
		l.first = e
	} else {
		l.last.next = e
	}
	l.last = e
}

// ack acknowledges entries, and sorts them by their tags. Those that are not open are left out. An error means that the
// channel has ended, and that all of them will be delivered again.
func (l *ledger) ack(entries []*entry) error {
	slices.SortFunc(entries, func(a, b *entry) int { return cmp.Compare(a.tag, b.tag) })
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return errLifeOver
	}
	entries = slices.DeleteFunc(entries, func(e *entry) bool { return !l.take(e) })
	together := len(entries)
	if l.first != nil {
		together, _ = slices.BinarySearchFunc(entries, l.first.tag, func(e *entry, tag uint64) int { return cmp.Compare(e.tag, tag) })
	}
	if together > 0 {
		if err := l.channel.Ack(entries[together-1].tag, together > 1); err != nil {
			return err
		}
	}
	for _, e := range entries[together:] {
		if err := l.channel.Ack(e.tag, false); err != nil {
			return err
		}
	}
	return nil
}

// requeue hands a delivery back to its queue, unless it is not open any more.
func (l *ledger) requeue(e *entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.take(e) {
		return nil
	}
	return l.channel.Nack(e.tag, false, true)
}

// close ends the ledger together with its channel: what is open will be delivered again.
func (l *ledger) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for l.first != nil {
		l.take(l.first)
	}
}

// take removes an open entry; false if it is not one.
func (l *ledger) take(e *entry) bool {
	if !e.open {
		return false
	}
	if e.prev == nil {
		l.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		l.last = e.prev
	} else {
		e.next.prev = e.prev
	}
	l.open--
	e.open, e.prev, e.next = false, nil, nil
	return true
}
