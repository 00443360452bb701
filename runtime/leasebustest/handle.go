package leasebustest

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// Decision is what became of a message in [Handle].
type Decision struct {
	// Outcome holds the kind of decision, the error behind it, and the delay of a retry, drawn with the policy's jitter.
	leasebus.Outcome

	// ID is the message's: the causation of what its handler published.
	ID leasebus.ID
	// Policy is the one that decided: its Retry.Delay gives the delay of a retry without the jitter.
	Policy *leasebus.Policy
	// DeadLetter is what an operator will see. nil if the message did not become one.
	DeadLetter *leasebus.DeadLetter
}

// String tells the decision in words, for the messages of failing tests.
func (d Decision) String() string {
	text := decided(d.Kind, d.Delay, d.deadLetterQueue(), d.Reason)
	if d.Err != nil && d.Kind != leasebus.SettleDefer {
		text += ": " + d.Err.Error()
	}
	return text
}

func (d Decision) deadLetterQueue() string {
	if d.DeadLetter == nil {
		return ""
	}
	return d.DeadLetter.DeadLetterQueue
}

// decided tells a settlement in words.
func decided(kind leasebus.SettlementKind, delay time.Duration, deadLetterQueue string, reason leasebus.Reason) string {
	switch kind {
	case leasebus.SettleComplete:
		return "completed"
	case leasebus.SettleRetry:
		return fmt.Sprintf("to be retried after %v", delay)
	case leasebus.SettleDefer:
		return fmt.Sprintf("deferred by %v", delay)
	case leasebus.SettleDeadLetter:
		return fmt.Sprintf("dead-lettered to %q as %s", deadLetterQueue, reason)
	case leasebus.SettleDiscard:
		return fmt.Sprintf("discarded as %s", reason)
	case leasebus.SettleRelease:
		return "released"
	case leasebus.SettleVerify:
	}
	return kind.String()
}

// Handle runs the handler of m's type on m, once, and returns what was decided.
//
// register registers the handler, as the service does; it may register others too. The message comes from a store of
// its own: what the handler publishes goes where its publishers lead, so give them a [Store] to look at it with
// [Published].
//
// The test fails if no handler for the type is registered, or if the handler does not return in time ([Patience]).
// A handler that panics is one that failed, with a [*leasebus.PanicError].
func Handle[M proto.Message](tb testing.TB, register func(*leasebus.Processor) error, m M, opts ...HandleOption) Decision {
	tb.Helper()
	typeName := string(typeOf[M](tb).Descriptor().FullName())
	o := newHandleOptions(tb, opts)
	source := &oneMessage{
		store: memory.New(), typeName: typeName,
		attempt: o.attempt, age: o.age, unknown: make(chan struct{}),
	}
	source.publish = func(ctx context.Context, policy *leasebus.Policy) error {
		publisher, err := leasebus.NewTypedPublisher[M](policy, source.store)
		if err == nil {
			_, err = publisher.Publish(ctx, m, o.publish...)
		}
		return err
	}
	settled := make(chan Decision, 1)
	p := newProcessor(tb, source, register, &o.runOptions, leasebus.WithHooks(leasebus.Hooks{
		Settled: func(d leasebus.Delivery, outcome leasebus.Outcome) {
			settled <- Decision{Outcome: outcome, ID: d.ID(), Policy: source.policy}
		},
	}))
	running := start(tb, p)
	patience := time.NewTimer(o.patience)
	defer patience.Stop()

	var decision Decision
	select {
	case decision = <-settled:
		running.stop(tb)
		decision.DeadLetter = source.deadLetter(tb)
	case <-source.unknown:
		running.stop(tb)
		tb.Fatalf("leasebustest: no handler is registered for %s", source.typeName)
	case err := <-running.ended:
		tb.Fatalf("leasebustest: the processor ended: %v", err)
	case <-patience.C:
		running.stop(tb)
		tb.Fatalf("leasebustest: the handler of %s did not return within %v", source.typeName, o.patience)
	}
	return decision
}

// oneMessage is a source of empty queues, but for one message in the queue of its type, which is handed out once.
type oneMessage struct {
	store    *memory.Store
	typeName string
	publish  func(context.Context, *leasebus.Policy) error
	attempt  int
	age      time.Duration

	policy  *leasebus.Policy // of the type; set while the processor subscribes, before anything is leased
	ready   sync.Once
	unknown chan struct{} // closed if all queues are subscribed, none of them the type's
}

// Subscribe implements [leasebus.Source].
func (s *oneMessage) Subscribe(ctx context.Context, sub leasebus.Subscription) (leasebus.Feed, error) {
	feed, err := s.store.Subscribe(ctx, sub)
	if err != nil {
		return nil, err
	}
	mine := sub.Policy.Type == s.typeName
	if mine {
		s.policy = sub.Policy
		if err := s.publish(ctx, sub.Policy); err != nil {
			return nil, err
		}
		if wait, ok := s.store.NextDue(sub.Queue); ok { // published with a delay
			s.store.Advance(wait)
		}
	}
	return &oneMessageFeed{Feed: feed, source: s, mine: mine}, nil
}

func (s *oneMessage) deadLetter(tb testing.TB) *leasebus.DeadLetter {
	tb.Helper()
	letters, err := s.store.DeadLetters(tb.Context(), s.policy.Queue, leasebus.Filter{}, "", 1)
	if err != nil {
		tb.Fatalf("leasebustest: %v", err)
	}
	if len(letters) == 0 {
		return nil
	}
	return &letters[0]
}

type oneMessageFeed struct {
	leasebus.Feed

	source *oneMessage
	mine   bool
	given  atomic.Bool
}

// Lease implements [leasebus.Feed].
func (f *oneMessageFeed) Lease(ctx context.Context, dst []leasebus.Lease) (int, error) {
	s := f.source
	s.ready.Do(func() {
		if s.policy == nil {
			close(s.unknown)
		}
	})
	if !f.mine || f.given.Load() {
		return 0, nil
	}
	n, err := f.Feed.Lease(ctx, dst[:1])
	if n == 0 {
		return n, err
	}
	f.given.Store(true)
	dst[0].Attempt = s.attempt
	dst[0].Crashed = s.attempt > s.policy.Retry.MaxAttempts
	dst[0].Age += s.age
	dst[0].FirstDue = time.Now().Round(0).UTC().Add(-s.age) // whatever was advanced for a delay
	return n, nil
}
