package leasebustest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Drain runs the handlers that register registers until every message in their queues is completed, dead-lettered or
// discarded, and returns how often each of these happened. What they publish to the store meanwhile is drained too,
// where it has a handler.
//
// Nothing is waited for: whenever all that is left is for later, the store's clock is advanced to the next time at
// which something is due. So a schedule of retries over hours takes no time. [leasebus.Delivery] shows the times as if
// they had passed; the time of the process is not changed.
//
// The test fails if messages never come to an end ([MaxRuns]), such as one that is deferred for ever, or if a handler
// does not return in time ([Patience]).
func Drain(tb testing.TB, store *Store, register func(*leasebus.Processor) error, opts ...DrainOption) leasebus.ProcessorStats {
	tb.Helper()
	o := newDrainOptions(tb, opts)
	source := &watched{store: store, maxRuns: o.maxRuns, trails: make(map[leasebus.ID]*trail), changed: make(chan struct{}, 1)}
	p := newProcessor(tb, source, register, &o.runOptions)
	running := start(tb, p)
	patience := time.NewTimer(o.patience)
	defer patience.Stop()
	for {
		select {
		case <-source.changed:
			patience.Reset(o.patience)
		case err := <-running.ended:
			tb.Fatalf("leasebustest: the processor ended: %v", err)
		case <-patience.C:
			stuck := source.heldNow()
			running.stop(tb)
			tb.Fatalf("leasebustest: nothing has ended for %v; handlers run for %s", o.patience, stuck)
		}
		switch source.step() {
		case goOn:
		case finished:
			running.stop(tb)
			return p.Stats()
		case endless:
			running.stop(tb)
			tb.Fatalf("leasebustest: messages are left after %d runs of handlers: %s; if it does end, raise MaxRuns", o.maxRuns, source.busiest())
		}
	}
}

// watched is the store's source as a processor uses it: it knows what is being worked on.
type watched struct {
	store   *Store
	maxRuns int
	changed chan struct{} // something was leased, or settled

	mu     sync.Mutex
	queues []string
	held   int
	runs   int
	trails map[leasebus.ID]*trail
}

// trail is what happened to the messages of one id.
type trail struct {
	queue, typeName string
	runs, held      int
	last            string
}

type progress uint8

const (
	goOn progress = iota
	finished
	endless
)

// step advances the clock if nothing else can happen. The lock keeps leases away meanwhile: one given before the clock
// jumps would be expired after it.
func (w *watched) step() progress {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.held > 0 {
		return goOn
	}
	wait, left := w.nextDue()
	switch {
	case !left:
		return finished
	case w.runs >= w.maxRuns:
		return endless
	}
	w.store.Advance(wait)
	return goOn
}

func (w *watched) nextDue() (wait time.Duration, ok bool) {
	for _, queue := range w.queues {
		if d, waits := w.store.NextDue(queue); waits && (!ok || d < wait) {
			wait, ok = d, true
		}
	}
	return wait, ok
}

func (w *watched) notice() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

func (w *watched) heldNow() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var held []string
	for id, t := range w.trails {
		if t.held > 0 {
			held = append(held, fmt.Sprintf("message %s (%s in queue %q)", id, t.typeName, t.queue))
		}
	}
	return strings.Join(held, ", ")
}

// busiest describes the message that was handed out most often.
func (w *watched) busiest() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var (
		most   = &trail{}
		mostID leasebus.ID
	)
	for id, t := range w.trails {
		if t.runs > most.runs {
			most, mostID = t, id
		}
	}
	return fmt.Sprintf("of %d messages, %s (%s in queue %q) was handed out %d times and last %s",
		len(w.trails), mostID, most.typeName, most.queue, most.runs, most.last)
}

// Subscribe implements [leasebus.Source].
func (w *watched) Subscribe(ctx context.Context, sub leasebus.Subscription) (leasebus.Feed, error) {
	feed, err := w.store.Subscribe(ctx, sub)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queues = append(w.queues, sub.Queue)
	return &watchedFeed{Feed: feed, watched: w}, nil
}

type watchedFeed struct {
	leasebus.Feed

	watched *watched
}

// Lease implements [leasebus.Feed].
func (f *watchedFeed) Lease(ctx context.Context, dst []leasebus.Lease) (int, error) {
	w := f.watched
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.notice()
	n, err := f.Feed.Lease(ctx, dst[:min(len(dst), w.maxRuns-w.runs)])
	for i := range n {
		l := &dst[i]
		t := w.trails[l.ID]
		if t == nil {
			t = &trail{queue: l.Queue, typeName: l.Type}
			w.trails[l.ID] = t
		}
		t.runs++
		t.held++
	}
	w.runs += n
	w.held += n
	return n, err
}

// Settle implements [leasebus.Feed].
func (f *watchedFeed) Settle(ctx context.Context, batch []leasebus.Settlement) error {
	if err := f.Feed.Settle(ctx, batch); err != nil {
		return err
	}
	w := f.watched
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.notice()
	for i := range batch {
		s := &batch[i]
		if s.Result != leasebus.ResultOK && s.Result != leasebus.ResultLost {
			continue
		}
		w.held--
		t := w.trails[s.Lease.ID]
		t.held--
		t.last = decided(s.Kind, s.Delay, s.DeadLetterQueue, s.Reason)
	}
	return nil
}
