package memory

import (
	"fmt"
	"slices"
	"strconv"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// death is what is known about a dead letter besides its row.
type death struct {
	position        int64
	at              int64
	deadLetterQueue string
	reason          leasebus.Reason
	text, errorType string
	attempts        int
	lastOwner       string
	replacedBy      leasebus.ID
}

// bury makes r a dead letter with everything of S29.
func (q *queue) bury(r *row, s *leasebus.Settlement, now int64) {
	d := &death{
		at:              now,
		deadLetterQueue: s.DeadLetterQueue,
		reason:          s.Reason,
		attempts:        s.Attempts,
		lastOwner:       r.owner,
	}
	if p := r.past; p != nil && len(p.failures) > 0 { // s.Failure is the newest of them, if it is there
		last := p.failures[len(p.failures)-1]
		d.text, d.errorType = last.Text, last.ErrorType
	}
	r.dead = d
	q.enter(r, deadLettered)
	q.dead.add(r)
}

func (r *row) deadLetter() leasebus.DeadLetter {
	d, s := r.dead, r.queue.store
	letter := leasebus.DeadLetter{
		Envelope:        r.env,
		Cursor:          cursorOf(d.position),
		DeadLetterQueue: d.deadLetterQueue,
		Reason:          d.reason,
		Error:           d.text,
		ErrorType:       d.errorType,
		Attempts:        d.attempts,
		Generation:      r.generation,
		DeadLetteredAt:  s.timeOf(d.at),
		LastOwner:       d.lastOwner,
		ReplacedBy:      d.replacedBy,
	}
	if p := r.past; p != nil {
		letter.History, letter.Requeues = p.failures, p.requeues
		if len(p.failures) > 0 {
			letter.FirstFailed = s.timeOf(p.firstFailed)
		}
	}
	return letter
}

// shelf holds dead letters by position, oldest first, and by id. A position is given once and never again.
type shelf struct {
	places []place // the first one is never empty
	empty  int     // of places
	last   int64
	byID   map[leasebus.ID]list // twins have one id
}

// place keeps its position when its row is gone, so that a position can be searched for.
type place struct {
	position int64
	row      *row
}

func (s *shelf) add(r *row) {
	s.last++
	r.dead.position = s.last
	s.places = append(s.places, place{s.last, r})
	twins := s.byID[r.env.ID]
	twins.pushBack(r)
	s.byID[r.env.ID] = twins
}

// search is the index of the first place at or behind position.
func (s *shelf) search(position int64) int {
	i, _ := slices.BinarySearchFunc(s.places, position, func(p place, position int64) int {
		switch {
		case p.position < position:
			return -1
		case p.position > position:
			return 1
		}
		return 0
	})
	return i
}

func (s *shelf) remove(r *row) {
	twins := s.byID[r.env.ID]
	twins.remove(r)
	if twins.len == 0 {
		delete(s.byID, r.env.ID)
	} else {
		s.byID[r.env.ID] = twins
	}

	i := s.search(r.dead.position)
	s.places[i].row = nil
	s.empty++
	if s.empty > len(s.places)/2 {
		s.places = slices.DeleteFunc(s.places, func(p place) bool { return p.row == nil })
		s.empty = 0
	}
	for len(s.places) > 0 && s.places[0].row == nil {
		s.places = s.places[1:]
		s.empty--
	}
}

func (s *shelf) oldest() *row {
	if len(s.places) == 0 {
		return nil
	}
	return s.places[0].row
}

// from calls visit for each dead letter behind position until it answers false.
func (s *shelf) from(position int64, visit func(*row) bool) {
	for _, p := range s.places[s.search(after(position, 1)):] {
		if p.row != nil && !visit(p.row) {
			return
		}
	}
}

// find appends the dead letters that ref names: the one at its position, or all twins.
func (s *shelf) find(found []*row, ref target) []*row {
	for r := s.byID[ref.id].head; r != nil; r = r.next {
		if !ref.one || ref.position == r.dead.position {
			found = append(found, r)
		}
	}
	return found
}

func cursorOf(position int64) leasebus.Cursor {
	return leasebus.Cursor(strconv.FormatInt(position, 10))
}

// positionOf reads a cursor. 0 = before all.
func positionOf(c leasebus.Cursor) (int64, error) {
	if c == "" {
		return 0, nil
	}
	position, err := strconv.ParseInt(string(c), 10, 64)
	if err != nil || position < 0 {
		return 0, fmt.Errorf("memory: %q is no cursor of this store", c)
	}
	return position, nil
}
