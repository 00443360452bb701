package conformance

import (
	"context"
	"errors"
	"slices"
	"sync"

	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var hookCases = []testCase{
	{name: "S19_hooks_and_middleware_see_every_message_in_order", run: hooksInOrder},
	{name: "S19_failing_hook_retries_dead_letters_or_is_ignored", run: failingHooks},
	{name: "S19_settled_hook_sees_what_the_store_did", run: settledHookSees},
	{name: "S59_publish_in_a_handler_passes_correlation_and_trace_on", run: correlationIsPassedOn},
	{name: "S59_explicit_correlation_and_causation_win", run: explicitCorrelationWins},
	{name: "S52_closed_publish_gate_stores_nothing", run: publishGate},
}

func hooksInOrder(t *trial) {
	t.publish("seen")
	var (
		mu    sync.Mutex
		order []string
	)
	note := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		order = append(order, what)
	}
	middleware := func(name string) leasebus.Middleware {
		return func(next leasebus.HandlerFunc) leasebus.HandlerFunc {
			return func(ctx context.Context, d leasebus.Delivery) error {
				note(name + " in")
				err := next(ctx, d)
				note(name + " out")
				return err
			}
		}
	}
	hooks := func(name string) leasebus.Hooks {
		return leasebus.Hooks{
			Before:  func(context.Context, leasebus.Delivery) error { note("before " + name); return nil },
			After:   func(context.Context, leasebus.Delivery, error) error { note("after " + name); return nil },
			Settled: func(leasebus.Delivery, leasebus.Outcome) { note("settled " + name) },
		}
	}
	w := t.work(func(context.Context, leasebus.Delivery, string) error { note("handler"); return nil },
		leasebus.WithHooks(hooks("1"), hooks("2")), leasebus.WithMiddleware(middleware("outer"), middleware("inner")))
	w.untilSettled(1)
	w.drained()
	mu.Lock()
	defer mu.Unlock()
	wantAll(t, "order of hooks, middleware and handler", order, []string{
		"before 1", "before 2", "outer in", "inner in", "handler", "inner out", "outer out", "after 1", "after 2", "settled 1", "settled 2",
	})
}

func failingHooks(t *trial) {
	t.policy.Retry.MaxAttempts = 2
	fails := errors.New("hook is broken")
	for _, c := range []struct {
		what    string
		hooks   leasebus.Hooks
		calls   int // of the handler
		reason  leasebus.Reason
		settled int
	}{
		{"before fails, retry", leasebus.Hooks{Before: func(context.Context, leasebus.Delivery) error { return fails }}, 0, leasebus.ReasonExhausted, 2},
		{"before fails, dead letter", leasebus.Hooks{Before: func(context.Context, leasebus.Delivery) error { return fails }, OnFailure: leasebus.HookFailureDeadLetter}, 0, leasebus.ReasonPermanent, 1},
		{"before fails, ignore", leasebus.Hooks{Before: func(context.Context, leasebus.Delivery) error { return fails }, OnFailure: leasebus.HookFailureIgnore}, 1, "", 1},
		{"before panics", leasebus.Hooks{Before: func(context.Context, leasebus.Delivery) error { panic(fails) }}, 0, leasebus.ReasonExhausted, 2},
		{"after fails, retry", leasebus.Hooks{After: func(context.Context, leasebus.Delivery, error) error { return fails }}, 2, leasebus.ReasonExhausted, 2},
		{"after fails, dead letter", leasebus.Hooks{After: func(context.Context, leasebus.Delivery, error) error { return fails }, OnFailure: leasebus.HookFailureDeadLetter}, 1, leasebus.ReasonPermanent, 1},
		{"after fails, ignore", leasebus.Hooks{After: func(context.Context, leasebus.Delivery, error) error { return fails }, OnFailure: leasebus.HookFailureIgnore}, 1, "", 1},
		{"settled panics", leasebus.Hooks{Settled: func(leasebus.Delivery, leasebus.Outcome) { panic(fails) }}, 1, "", 1},
	} {
		id := t.publish(c.what)[0]
		w := t.work(func(context.Context, leasebus.Delivery, string) error { return nil }, leasebus.WithHooks(c.hooks))
		w.untilSettled(c.settled)
		w.drained()
		want(t, c.what+": handler calls", len(w.attemptsOf(id)), c.calls)
		letters := t.deadLetters(leasebus.Filter{})
		if c.reason == "" {
			want(t, c.what+": dead letters", len(letters), 0)
			want(t, c.what+": counter Succeeded", w.Stats().Succeeded, 1)
			continue
		}
		d := t.buriedAs(id, c.reason, c.settled, "hook is broken")
		t.discard(leasebus.DeadLetterRef{ID: d.ID})
	}
}

func settledHookSees(t *trial) {
	ids := t.publish("done", "bad", "later")
	mine := errors.New("no use")
	w := t.work(func(_ context.Context, _ leasebus.Delivery, value string) error {
		switch value {
		case "bad":
			return leasebus.Permanent(mine)
		case "later":
			return leasebus.Defer(1000 * t.lease)
		}
		return nil
	}, leasebus.WithConcurrency(1))
	outcomes := w.untilSettled(3) // in the order in which the store answered
	slices.SortFunc(outcomes, func(a, b outcome) int { return slices.Index(ids, a.id) - slices.Index(ids, b.id) })
	for i, o := range outcomes {
		t.wantResult("result", o.Result, leasebus.ResultOK)
		want(t, "kind", o.Kind, []leasebus.SettlementKind{leasebus.SettleComplete, leasebus.SettleDeadLetter, leasebus.SettleDefer}[i])
	}
	want(t, "reason", outcomes[1].Reason, leasebus.ReasonPermanent)
	if !errors.Is(outcomes[1].Err, mine) {
		t.Errorf("error: got %v, want the handler's own", outcomes[1].Err)
	}
	want(t, "delay", outcomes[2].Delay, 1000*t.lease)
}

const (
	trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	state = "vendor=value"
)

// published is what a handler sees of a message's origin.
type published struct{ id, correlation, causation, trace, state string }

func originOf(d leasebus.Delivery) published {
	h := d.Headers()
	return published{d.ID().String(), d.Correlation(), d.Causation(), h.Get(leasebus.HeaderTraceparent), h.Get(leasebus.HeaderTracestate)}
}

// chain publishes a message whose handler publishes another, and returns what the handlers saw.
func (t *trial) chain(opts ...leasebus.PublishOption) (parent, child published) {
	t.Helper()
	t.prepare(t.policy)
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](t.policy, t.store)
	t.must(err, "make a publisher")
	seen := make(chan published, 100) // so that no handler waits, whatever comes back
	t.work(func(ctx context.Context, d leasebus.Delivery, value string) error {
		seen <- originOf(d)
		if value == "child" {
			return nil
		}
		_, err := publisher.Publish(ctx, wrapperspb.String("child"), opts...)
		return err
	})
	first, err := publisher.Publish(t.ctx, wrapperspb.String("parent"), leasebus.WithCorrelation("flow 7"),
		leasebus.WithHeader(leasebus.HeaderTraceparent, trace), leasebus.WithHeader(leasebus.HeaderTracestate, state))
	t.must(err, "publish")
	for parent.id == "" || child.id == "" { // a slow machine may see one of them twice
		if o := receive(t, "both handlers", seen); o.id == first.ID.String() {
			parent = o
		} else {
			child = o
		}
	}
	t.nothingLeft()
	return parent, child
}

func correlationIsPassedOn(t *trial) {
	parent, child := t.chain()
	want(t, "origin of the first message", parent, published{parent.id, "flow 7", "", trace, state})
	want(t, "origin of the one published in its handler", child, published{child.id, "flow 7", parent.id, trace, state})
}

func explicitCorrelationWins(t *trial) {
	_, child := t.chain(leasebus.WithCorrelation("flow 8"), leasebus.WithCausation("a button"), leasebus.WithHeader(leasebus.HeaderTraceparent, "00-1-1-00"))
	want(t, "correlation", child.correlation, "flow 8")
	want(t, "causation", child.causation, "a button")
	want(t, "trace", child.trace, "00-1-1-00")
}

func publishGate(t *trial) {
	g := leasebus.NewPublishGate(t.store)
	t.prepare(t.policy)
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](t.policy, g)
	t.must(err, "make a publisher")
	g.Pause()
	if _, err := publisher.Publish(t.ctx, wrapperspb.String("never")); !errors.Is(err, leasebus.ErrPublishingPaused) {
		t.Errorf("publish at a closed gate: got error %v, want ErrPublishingPaused", err)
	}
	g.Resume()
	receipt, err := publisher.Publish(t.ctx, wrapperspb.String("now"))
	t.must(err, "publish")
	k := t.subscribe()
	want(t, "message", k.takeOne().ID, receipt.ID)
	k.nothing("it was published at a closed gate")
}
