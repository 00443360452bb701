package main

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// account counts what became of the messages; the help text says what each number means. It knows nothing but what the
// store tells, besides the ids that were acknowledged to their publishers.
type account struct {
	published, completed, retried, deadLettered, requeued, lost int64

	failures int64                    // all that are on record
	ended    map[leasebus.ID]struct{} // the messages that are completed or dead letters
	replaced []leasebus.ID            // what edits have put in the place of dead letters
}

func (a *account) String() string {
	return fmt.Sprintf("published=%d completed=%d retried=%d dead_lettered=%d requeued=%d lost=%d",
		a.published, a.completed, a.retried, a.deadLettered, a.requeued, a.lost)
}

// conclude tells what the store has at the end and draws up the account. It fails if a message is lost.
func (s *story) conclude(ctx context.Context) error {
	s.n.sayf("\nWhat the store has at the end:")
	s.n.sayf("          %-12s  %9s  %12s  %10s", "message", "completed", "dead letters", "unfinished")
	a := account{ended: make(map[leasebus.ID]struct{})}
	var left []leasebus.DeadLetter
	for _, p := range policies() {
		stats, err := s.store.Stats(ctx, p.Queue)
		if err != nil {
			return fmt.Errorf("stats of %s: %w", p.Queue, err)
		}
		completed, dead, err := s.ended(ctx, p.Queue)
		if err != nil {
			return err
		}
		if stats.Completed != int64(len(completed)) || stats.DeadLettered != int64(len(dead)) {
			return fmt.Errorf("%s: the store counts %d completed messages and %d dead letters, and lists %d and %d",
				p.Queue, stats.Completed, stats.DeadLettered, len(completed), len(dead))
		}
		unfinished := stats.Pending + stats.Processing + stats.Failed
		s.n.sayf("          %-12s  %9d  %12d  %10d", shortName(p.Type), stats.Completed, stats.DeadLettered, unfinished)
		a.published += unfinished
		a.addCompleted(completed)
		a.addDead(dead)
		left = append(left, dead...)
	}
	s.remaining(left)
	return s.close(&a)
}

// close finds out what is lost and prints the account.
func (s *story) close(a *account) error {
	a.retried = a.failures - a.deadLettered // the last failure before a dead letter is followed by no attempt
	known := append(s.n.acknowledged(), a.replaced...)
	slices.SortFunc(known, func(x, y leasebus.ID) int { return bytes.Compare(x[:], y[:]) })
	known = slices.Compact(known)
	for _, id := range known {
		if _, ended := a.ended[id]; !ended {
			a.lost++
		}
	}
	s.n.sayf("\ndemo: %v", a)
	if a.lost != 0 {
		return fmt.Errorf("%d of the %d messages whose publishing was acknowledged are neither completed nor dead letters",
			a.lost, len(known))
	}
	return nil
}

func (a *account) addCompleted(messages []leasebus.CompletedMessage) {
	for _, m := range messages {
		a.published++
		a.completed++
		a.failures += int64(len(m.History))
		a.requeued += int64(len(m.Requeues))
		a.deadLettered += int64(len(m.Requeues)) // each time it was one
		a.ended[m.ID] = struct{}{}
	}
}

func (a *account) addDead(letters []leasebus.DeadLetter) {
	for i := range letters {
		d := &letters[i]
		a.published++
		a.failures += int64(len(d.History))
		a.requeued += int64(len(d.Requeues))
		a.deadLettered += int64(len(d.Requeues)) // each time before
		if d.ReplacedBy == (leasebus.ID{}) {
			a.deadLettered++
		} else {
			a.replaced = append(a.replaced, d.ReplacedBy) // its last requeue is the edit, and it is a dead letter still
		}
		a.ended[d.ID] = struct{}{}
	}
}

// remaining tells of the dead letters that wait for an operator, and of those that an edit has replaced.
func (s *story) remaining(dead []leasebus.DeadLetter) {
	s.n.sayf("\nIts dead letters, each with the message it was:")
	for _, d := range dead {
		fate := "waits for an operator"
		if d.ReplacedBy != (leasebus.ID{}) {
			fate = "edited and requeued by " + d.Requeues[len(d.Requeues)-1].By
		}
		s.n.sayf("          %-10s  %-12s  %s after %s, %s", d.Headers.Get(leasebus.HeaderCorrelation), shortName(d.Type), d.Reason,
			attempts(d.Attempts), fate)
	}
}

func attempts(n int) string {
	if n == 1 {
		return "1 attempt"
	}
	return fmt.Sprintf("%d attempts", n)
}

// ended lists the messages of a queue that are completed, and its dead letters.
func (s *story) ended(ctx context.Context, queue string) ([]leasebus.CompletedMessage, []leasebus.DeadLetter, error) {
	completed, err := pages(func(m leasebus.CompletedMessage) leasebus.Cursor { return m.Cursor },
		func(after leasebus.Cursor, limit int) ([]leasebus.CompletedMessage, error) {
			return s.store.Completed(ctx, queue, after, limit)
		})
	if err != nil {
		return nil, nil, fmt.Errorf("completed messages of %s: %w", queue, err)
	}
	dead, err := pages(func(d leasebus.DeadLetter) leasebus.Cursor { return d.Cursor },
		func(after leasebus.Cursor, limit int) ([]leasebus.DeadLetter, error) {
			return s.store.DeadLetters(ctx, queue, leasebus.Filter{}, after, limit)
		})
	if err != nil {
		return nil, nil, fmt.Errorf("dead letters of %s: %w", queue, err)
	}
	return completed, dead, nil
}

// pages reads a list to its end.
func pages[T any](position func(T) leasebus.Cursor, read func(after leasebus.Cursor, limit int) ([]T, error)) ([]T, error) {
	const size = 100
	var all []T
	for after := leasebus.Cursor(""); ; after = position(all[len(all)-1]) {
		page, err := read(after, size)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if len(page) < size {
			return all, nil
		}
	}
}
