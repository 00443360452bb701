package amqp

import (
	"cmp"
	"slices"
	"time"
)

// hold keeps moves until their time has come. Moves whose time is the same leave it as they came.
type hold struct {
	// list is sorted, the next one last. It is short: a consumer holds some hundreds at most.
	list []held
	seq  int64
}

type held struct {
	due  time.Time
	seq  int64
	move *move
}

// compare orders by what is due later.
func (h held) compare(other held) int {
	if c := other.due.Compare(h.due); c != 0 {
		return c
	}
	return cmp.Compare(other.seq, h.seq)
}

func (h *hold) len() int { return len(h.list) }

func (h *hold) add(m *move, due time.Time) {
	h.seq++
	added := held{due, h.seq, m}
	at, _ := slices.BinarySearchFunc(h.list, added, held.compare)
	h.list = slices.Insert(h.list, at, added)
}

// next is when the first move is due.
func (h *hold) next() (due time.Time, ok bool) {
	if len(h.list) == 0 {
		return time.Time{}, false
	}
	return h.list[len(h.list)-1].due, true
}

// take removes the first move if it is due; nil if it is not.
func (h *hold) take(now time.Time) *move {
	last := len(h.list) - 1
	if last < 0 || h.list[last].due.After(now) {
		return nil
	}
	m := h.list[last].move
	h.list = slices.Delete(h.list, last, last+1)
	return m
}

// takeAll removes the moves that which selects, the first one first.
func (h *hold) takeAll(which func(*move) bool) (taken []*move) {
	for _, each := range slices.Backward(h.list) {
		if which(each.move) {
			taken = append(taken, each.move)
		}
	}
	h.list = slices.DeleteFunc(h.list, func(each held) bool { return which(each.move) })
	return taken
}
