package main

import (
	"context"
	"fmt"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// account counts what became of the messages; the help text says what each number means.
type account struct {
	published, completed, retried, deadLettered, requeued, lost int64
}

func (a *account) String() string {
	return fmt.Sprintf("published=%d completed=%d retried=%d dead_lettered=%d requeued=%d lost=%d",
		a.published, a.completed, a.retried, a.deadLettered, a.requeued, a.lost)
}

// conclude tells what the store has at the end and draws up the account. It fails if a message is lost.
func (s *story) conclude(ctx context.Context) error {
	s.n.sayf("\nWhat the store has at the end:")
	s.n.sayf("          %-12s  %9s  %12s  %10s", "message", "completed", "dead letters", "unfinished")
	var (
		a    account
		left []leasebus.DeadLetter
	)
	for _, p := range policies() {
		stats, err := s.store.Stats(ctx, p.Queue)
		if err != nil {
			return fmt.Errorf("stats of %s: %w", p.Queue, err)
		}
		dead, err := s.deadLetters(ctx, p.Queue)
		if err != nil {
			return err
		}
		a.add(stats, dead)
		unfinished := stats.Pending + stats.Processing + stats.Failed
		s.n.sayf("          %-12s  %9d  %12d  %10d", shortName(p.Type), stats.Completed, stats.DeadLettered, unfinished)
		left = append(left, dead...)
	}
	s.remaining(left)

	// The store counts what is completed and lists what is dead. When it can list both, retries are to be counted from
	// their histories, and losses id by id.
	a.retried = s.n.retries()
	a.lost = int64(len(s.n.acknowledged())) - a.completed - a.deadLettered
	s.n.sayf("\ndemo: %v", &a)
	if a.lost != 0 {
		return fmt.Errorf("%d of the %d messages whose publishing was acknowledged are neither completed nor dead letters",
			a.lost, len(s.n.acknowledged()))
	}
	return nil
}

// add counts the messages of one queue.
func (a *account) add(stats leasebus.QueueStats, dead []leasebus.DeadLetter) {
	a.published += stats.Pending + stats.Processing + stats.Failed + stats.Completed + stats.DeadLettered
	a.completed += stats.Completed
	a.deadLettered += stats.DeadLettered
	for i := range dead {
		a.requeued += int64(len(dead[i].Requeues))
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

// deadLetters lists all dead letters of a queue.
func (s *story) deadLetters(ctx context.Context, queue string) ([]leasebus.DeadLetter, error) {
	const page = 100
	var all []leasebus.DeadLetter
	for after := leasebus.Cursor(""); ; {
		found, err := s.store.DeadLetters(ctx, queue, leasebus.Filter{}, after, page)
		if err != nil {
			return nil, fmt.Errorf("dead letters of %s: %w", queue, err)
		}
		all = append(all, found...)
		if len(found) < page {
			return all, nil
		}
		after = found[page-1].Cursor
	}
}
