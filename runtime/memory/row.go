package memory

import (
	leasebus "github.com/leasebus/leasebus/runtime"
)

type state uint8

const (
	// pending and failed rows wait: on released or ready if they are due, in later if not.
	pending state = iota
	failed
	// processing rows are on leased.
	processing
	// deadLettered rows are on the shelf.
	deadLettered
	// completed rows are on history, or nowhere.
	completed
	// discarded rows are nowhere.
	discarded

	states = iota
)

// row is one stored message. All but env and queue is guarded by the queue's lock.
type row struct {
	env   leasebus.Envelope
	queue *queue

	// next and prev belong to the one list that the row is on.
	next, prev *row

	// due is when the row may be leased: for a processing row the expiry of its lease, for a completed one the time it
	// was completed.
	due int64
	// ageFrom is when the row was first due, or last requeued (S23).
	ageFrom    int64
	generation int64
	completion int64 // position of a completed row among those that were kept
	owner      string

	attempt       int32
	deferrals     int32
	interruptions int32
	state         state
	// crashed: the last attempt that was spent has no outcome (S10).
	crashed bool

	past *past
	dead *death
}

// past is what failures and operators left behind. Most rows have none.
type past struct {
	firstFailed int64
	failures    []leasebus.FailureRecord
	requeues    []leasebus.RequeueRecord
}

func (r *row) record() *past {
	if r.past == nil {
		r.past = &past{}
	}
	return r.past
}

func (r *row) fail(f *leasebus.Failure, now int64, owner string) {
	p := r.record()
	if len(p.failures) == 0 {
		p.firstFailed = now
	}
	p.failures = appendNewest(p.failures, leasebus.FailureRecord{Failure: *f, At: r.queue.store.timeOf(now), Owner: owner})
}

// appendNewest keeps the newest [leasebus.HistoryLimit] records.
func appendNewest[T any](records []T, newest T) []T {
	if len(records) == leasebus.HistoryLimit {
		copy(records, records[1:])
		records[len(records)-1] = newest
		return records
	}
	return append(records, newest)
}

// list is a doubly linked list through the rows themselves.
type list struct {
	head, tail *row
	len        int
}

func (l *list) pushBack(r *row) { l.insertAfter(l.tail, r) }

// insertAfter puts r behind at, or in front of all if at is nil.
func (l *list) insertAfter(at, r *row) {
	r.prev = at
	if at == nil {
		r.next, l.head = l.head, r
	} else {
		r.next, at.next = at.next, r
	}
	if r.next == nil {
		l.tail = r
	} else {
		r.next.prev = r
	}
	l.len++
}

func (l *list) remove(r *row) {
	if r.prev == nil {
		l.head = r.next
	} else {
		r.prev.next = r.next
	}
	if r.next == nil {
		l.tail = r.prev
	} else {
		r.next.prev = r.prev
	}
	r.next, r.prev = nil, nil
	l.len--
}

func (l *list) popFront() *row {
	r := l.head
	if r != nil {
		l.remove(r)
	}
	return r
}

// schedule is a binary min-heap of rows by the time they become due; rows due together leave it as they came.
type schedule struct {
	rows []scheduled
	seq  int64
}

// scheduled carries the keys beside the row, so that sifting touches no row.
type scheduled struct {
	due, seq int64
	row      *row
}

func (a scheduled) before(b scheduled) bool {
	return a.due < b.due || a.due == b.due && a.seq < b.seq
}

func (h *schedule) push(r *row) {
	h.seq++
	item := scheduled{r.due, h.seq, r}
	h.rows = append(h.rows, item)
	i := len(h.rows) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !item.before(h.rows[parent]) {
			break
		}
		h.rows[i] = h.rows[parent]
		i = parent
	}
	h.rows[i] = item
}

func (h *schedule) pop() *row {
	first := h.rows[0].row
	last := len(h.rows) - 1
	item := h.rows[last]
	h.rows[last] = scheduled{}
	h.rows = h.rows[:last]
	if last == 0 {
		return first
	}
	i := 0
	for {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && h.rows[child+1].before(h.rows[child]) {
			child++
		}
		if !h.rows[child].before(item) {
			break
		}
		h.rows[i] = h.rows[child]
		i = child
	}
	h.rows[i] = item
	return first
}

// first is when the next row becomes due.
func (h *schedule) first() (due int64, ok bool) {
	if len(h.rows) == 0 {
		return 0, false
	}
	return h.rows[0].due, true
}
