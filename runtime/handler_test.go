package leasebus_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestNewProcessor_refuses_what_is_out_of_range(t *testing.T) {
	t.Parallel()
	for want, opts := range map[string][]leasebus.ProcessorOption{
		"WithConcurrency: 0 is out of range; allowed is 1 or more":    {leasebus.WithConcurrency(0)},
		"WithLookAhead: -1 is out of range; allowed is 0 or more":     {leasebus.WithLookAhead(-1)},
		"WithDrainTimeout: -1s is out of range; allowed is 0 or more": {leasebus.WithDrainTimeout(-time.Second)},
		"WithDrainGrace: -1s is out of range; allowed is 0 or more":   {leasebus.WithDrainGrace(-time.Second)},
		"WithUnhandledAfter: -1s":                                     {leasebus.WithUnhandledAfter(-time.Second)},
		"WithSettleLinger: 2s is out of range; allowed is 0 to 1s":    {leasebus.WithSettleLinger(2 * time.Second)},
		"WithOwner: is 300 bytes":                                     {leasebus.WithOwner(strings.Repeat("x", 300))},
		"WithOwner: holds a NUL":                                      {leasebus.WithOwner("\x00")},
		"Hooks.OnFailure: 9":                                          {leasebus.WithHooks(leasebus.Hooks{OnFailure: 9})},
	} {
		if _, err := leasebus.NewProcessor(memory.New(), opts...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	if _, err := leasebus.NewProcessor(nil); err == nil {
		t.Error("a nil source was taken")
	}
}

func TestRegister_refuses(t *testing.T) {
	t.Parallel()
	good := leasebus.DefaultPolicy("google.protobuf.StringValue", "queue")
	handle := func(context.Context, *wrapperspb.StringValue) error { return nil }
	with := func(change func(*leasebus.Policy)) *leasebus.Policy {
		p := good
		change(&p)
		return &p
	}
	for name, tt := range map[string]struct {
		policy *leasebus.Policy
		opts   []leasebus.HandlerOption
		want   string
	}{
		"a queue with two handlers": {with(func(*leasebus.Policy) {}), nil, `queue "queue" has the handler of google.protobuf.StringValue already`},
		"a type with two handlers": {
			with(func(p *leasebus.Policy) { p.Queue, p.DeadLetter.Queue = "other", "other.dlq" }), nil,
			"type google.protobuf.StringValue is handled by the handler of google.protobuf.StringValue already",
		},
		"another type's policy": {with(func(p *leasebus.Policy) { p.Type = "shop.Other" }), nil, "the policy is for shop.Other, the message type is google.protobuf.StringValue"},
		"S5 C1_16 a heartbeat as long as the lease": {
			with(func(p *leasebus.Policy) { p.Lease.Heartbeat = p.Lease.Duration }), nil,
			"lease.heartbeat: 30s is out of range; allowed is more than 0 and at most half of lease.duration 30s",
		},
		"no attempts":            {with(func(p *leasebus.Policy) { p.Retry.MaxAttempts = 0 }), nil, "retry.max_attempts: 0 is out of range"},
		"initial over max":       {with(func(p *leasebus.Policy) { p.Retry.Initial = time.Hour }), nil, "retry.exponential.initial: 1h0m0s is more than retry.exponential.max 5m0s"},
		"jitter":                 {with(func(p *leasebus.Policy) { p.Retry.Jitter = 1.5 }), nil, "retry.jitter: 1.5 is out of range; allowed is 0 to 1"},
		"multiplier":             {with(func(p *leasebus.Policy) { p.Retry.Multiplier = 0.5 }), nil, "retry.exponential.multiplier: 0.5 is out of range; allowed is 1 or more"},
		"negative timeout":       {with(func(p *leasebus.Policy) { p.Timeout = -1 }), nil, "timeout: -1ns is out of range"},
		"dead letters to itself": {with(func(p *leasebus.Policy) { p.DeadLetter.Queue = "queue" }), nil, "is the message's own queue"},
		"no dead-letter queue":   {with(func(p *leasebus.Policy) { p.DeadLetter.Queue = "" }), nil, "dead_letter.queue: is empty"},
		"queue name":             {with(func(p *leasebus.Policy) { p.Queue = "a b" }), nil, `queue: "a b" is not a queue name`},
		"queue name too long":    {with(func(p *leasebus.Policy) { p.Queue = strings.Repeat("q", 236) }), nil, "is 236 bytes long; allowed are 235"},
		"alias twice":            {with(func(p *leasebus.Policy) { p.Aliases = []string{"a.B", "a.B"} }), nil, `"a.B" is listed twice`},
		"MaxConcurrency 0":       {with(func(*leasebus.Policy) {}), []leasebus.HandlerOption{leasebus.MaxConcurrency(0)}, "MaxConcurrency"},
		"S31 C6_9 key shorter than dead letter": {
			with(func(p *leasebus.Policy) {
				p.DeadLetter.Retention = 48 * time.Hour
				p.Idempotency = &leasebus.IdempotencyPolicy{Retention: 24 * time.Hour, InProgressDelay: time.Second}
			}), nil, "idempotency.retention: 24h0m0s is shorter than dead_letter.retention 48h0m0s",
		},
		"idempotency is not there yet": {
			with(func(p *leasebus.Policy) {
				p.Idempotency = &leasebus.IdempotencyPolicy{Retention: time.Hour, InProgressDelay: time.Second}
			}), nil, "idempotency: not supported by this version",
		},
		"ordering is not there yet": {with(func(p *leasebus.Policy) { p.Ordering = &leasebus.OrderingPolicy{} }), nil, "ordering: not supported by this version"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, err := leasebus.NewProcessor(memory.New())
			if err != nil {
				t.Fatal(err)
			}
			if err := leasebus.RegisterHandler(p, &good, handle); err != nil {
				t.Fatal(err)
			}
			err = leasebus.RegisterHandler(p, tt.policy, handle, tt.opts...)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got  %v\nwant %q", err, tt.want)
			}
			if strings.HasSuffix(name, "not there yet") {
				if !errors.Is(err, leasebus.ErrUnsupported) {
					t.Errorf("%v is not ErrUnsupported", err)
				}
				if _, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](tt.policy, memory.New()); !errors.Is(err, leasebus.ErrUnsupported) {
					t.Errorf("publisher: %v", err)
				}
			}
			if ran := p.Run(t.Context()); fmt.Sprint(ran) != fmt.Sprint(err) {
				t.Errorf("Run answered %v; an error that nobody looked at must not be lost", ran)
			}
		})
	}
}

// It is for brokers; a store keeps every wait with the message, and takes the policy as it is.
func TestRegister_S40_wait_in_broker_from(t *testing.T) {
	t.Parallel()
	p := leasebus.DefaultPolicy("google.protobuf.StringValue", "queue")
	p.Retry.WaitInBrokerFrom = new(time.Duration)
	processor, err := leasebus.NewProcessor(memory.New())
	if err != nil {
		t.Fatal(err)
	}
	if err := leasebus.RegisterHandler(processor, &p, func(context.Context, *wrapperspb.StringValue) error { return nil }); err != nil {
		t.Errorf("handler: %v", err)
	}
	if _, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&p, memory.New()); err != nil {
		t.Errorf("publisher: %v", err)
	}
}

func TestRegister_nil_and_late(t *testing.T) {
	bubble(t, func(r *rig) {
		p, err := leasebus.NewProcessor(r.store, quiet)
		if err != nil {
			t.Fatal(err)
		}
		if err := leasebus.RegisterHandler[*wrapperspb.StringValue](p, &r.policy, nil); err == nil {
			t.Error("a nil handler was taken")
		}
		if err := leasebus.RegisterHandler[proto.Message](p, &r.policy, func(context.Context, proto.Message) error { return nil }); err == nil {
			t.Error("an interface was taken for a message type")
		}
		empty, err := leasebus.NewProcessor(r.store, quiet)
		if err != nil {
			t.Fatal(err)
		}
		if err := empty.Run(t.Context()); err == nil {
			t.Error("a processor without handlers ran")
		}
		r.handler = func(context.Context, string) error { return nil }
		r.start()
		r.wait(time.Second)
		other := newSecond(r)
		err = leasebus.RegisterHandler(r.processor, &other.policy, func(context.Context, *wrapperspb.BytesValue) error { return nil })
		if err == nil || !strings.Contains(err.Error(), "register before Run") {
			t.Errorf("late registration: %v", err)
		}
		if err := r.processor.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "runs once") {
			t.Errorf("second Run: %v", err)
		}
		if err := r.processor.Drain(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-r.ran; err != nil {
			t.Error(err)
		}
	})
}

func TestShares_S55_a_flood_does_not_starve_another_queue(t *testing.T) {
	bubble(t, func(r *rig) {
		var mu sync.Mutex
		var order []string
		r.handler = func(_ context.Context, text string) error {
			mu.Lock()
			order = append(order, text)
			mu.Unlock()
			time.Sleep(time.Second)
			return nil
		}
		other := newSecond(r)
		r.publish(slices.Repeat([]string{"flood"}, 2000)...)
		r.startBoth(&other, leasebus.WithConcurrency(4))
		r.wait(100*time.Second + 500*time.Millisecond)
		for range 40 {
			other.publish(r, "trickle")
		}
		r.wait(25 * time.Second)
		mu.Lock()
		defer mu.Unlock()
		n := 0
		for _, text := range order {
			if text == "trickle" {
				n++
			}
		}
		// Four workers, one second each: a fair half is 2 a second.
		if n < 39 {
			t.Errorf("%d of 40 ran within 25 s beside a flood", n)
		}
		if len(order) < 4*125 {
			t.Errorf("%d ran in 125 s on 4 workers: slots stayed idle", len(order))
		}
		r.mustStop()
	})
}

func TestShares_S55_MaxConcurrency_limits_one_handler(t *testing.T) {
	bubble(t, func(r *rig) {
		var now, most atomic.Int32
		r.handler = func(_ context.Context, text string) error {
			if text == "limited" {
				most.Store(max(most.Load(), now.Add(1)))
				defer now.Add(-1)
			}
			time.Sleep(time.Second)
			return nil
		}
		p, err := leasebus.NewProcessor(r.store, quiet, leasebus.WithConcurrency(8))
		if err != nil {
			t.Fatal(err)
		}
		r.processor = p
		register(r, p, leasebus.MaxConcurrency(2))
		other := newSecond(r)
		err = leasebus.RegisterHandler(p, &other.policy, func(ctx context.Context, _ *wrapperspb.BytesValue) error { return r.handler(ctx, "free") })
		if err != nil {
			t.Fatal(err)
		}
		r.publish(slices.Repeat([]string{"limited"}, 20)...)
		for range 60 {
			other.publish(r, "free")
		}
		go func() { r.ran <- p.Run(context.WithoutCancel(t.Context())) }()
		r.wait(11*time.Second + 500*time.Millisecond) // 10 s of work; whose first second is free for either to fill
		if most.Load() != 2 {
			t.Errorf("%d of the limited handler at once, want 2", most.Load())
		}
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 80}) // 2 and 6 at a time
		r.mustStop()
	})
}

func TestHooks_order_and_what_they_see(t *testing.T) {
	bubble(t, func(r *rig) {
		var told []string
		tell := func(format string, args ...any) { told = append(told, fmt.Sprintf(format, args...)) }
		r.handler = func(context.Context, string) error {
			tell("handler")
			return errors.New("boom")
		}
		around := func(name string) leasebus.Middleware {
			return func(next leasebus.HandlerFunc) leasebus.HandlerFunc {
				return func(ctx context.Context, d leasebus.Delivery) error {
					tell("%s in", name)
					err := next(ctx, d)
					tell("%s out: %v", name, err)
					return err
				}
			}
		}
		r.policy.Retry = leasebus.NoRetry()
		r.publish("text")
		r.start(leasebus.WithMiddleware(around("outer"), around("inner")), leasebus.WithHooks(leasebus.Hooks{
			Before: func(_ context.Context, d leasebus.Delivery) error {
				tell("before %s attempt %d", text(d), d.Attempt())
				return nil
			},
			After: func(_ context.Context, _ leasebus.Delivery, err error) error {
				tell("after: %v", err)
				return nil
			},
			Settled: func(_ leasebus.Delivery, o leasebus.Outcome) {
				tell("settled: %v, %s, %v, %v", o.Kind, o.Reason, o.Err, o.Result == leasebus.ResultOK)
			},
		}))
		r.wait(time.Second)
		want := []string{
			"before text attempt 1", "outer in", "inner in", "handler", "inner out: boom", "outer out: boom", "after: boom",
			"settled: dead-letter, exhausted, boom, true",
		}
		if !slices.Equal(told, want) {
			t.Errorf("told %q\nwant %q", told, want)
		}
		r.mustStop()
	})
}

func text(d leasebus.Delivery) string {
	m, _ := d.Message().(*wrapperspb.StringValue)
	return m.GetValue()
}

func TestHooks_failing(t *testing.T) {
	boom := errors.New("hook is broken")
	fail := func(context.Context, leasebus.Delivery) error { return boom }
	failAfter := func(context.Context, leasebus.Delivery, error) error { return boom }
	for name, tt := range map[string]struct {
		hooks   leasebus.Hooks
		handler error
		runs    int32
		want    leasebus.QueueStats
	}{
		"before, retry":       {leasebus.Hooks{Before: fail}, nil, 0, leasebus.QueueStats{Failed: 1}},
		"before, dead-letter": {leasebus.Hooks{Before: fail, OnFailure: leasebus.HookFailureDeadLetter}, nil, 0, leasebus.QueueStats{DeadLettered: 1}},
		"before, ignore":      {leasebus.Hooks{Before: fail, OnFailure: leasebus.HookFailureIgnore}, nil, 1, leasebus.QueueStats{Completed: 1}},
		"after, retry":        {leasebus.Hooks{After: failAfter}, nil, 1, leasebus.QueueStats{Failed: 1}},
		"after, dead-letter":  {leasebus.Hooks{After: failAfter, OnFailure: leasebus.HookFailureDeadLetter}, nil, 1, leasebus.QueueStats{DeadLettered: 1}},
		"after, complete despite it": {
			leasebus.Hooks{After: failAfter, OnFailure: leasebus.HookFailureIgnore}, nil, 1, leasebus.QueueStats{Completed: 1},
		},
		"after a failed handler, which decides": {
			leasebus.Hooks{After: failAfter, OnFailure: leasebus.HookFailureIgnore}, errors.New("x"), 1, leasebus.QueueStats{Failed: 1},
		},
		"before, panic": {
			leasebus.Hooks{Before: func(context.Context, leasebus.Delivery) error { panic("hook") }}, nil, 0, leasebus.QueueStats{Failed: 1},
		},
		"settled, panic": {
			leasebus.Hooks{Settled: func(leasebus.Delivery, leasebus.Outcome) { panic("hook") }}, nil, 1, leasebus.QueueStats{Completed: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(r *rig) {
				var runs atomic.Int32
				r.handler = func(context.Context, string) error {
					runs.Add(1)
					return tt.handler
				}
				r.policy.Retry.Initial = time.Hour
				r.publish("a")
				r.start(leasebus.WithHooks(tt.hooks))
				r.wait(time.Second)
				if runs.Load() != tt.runs {
					t.Errorf("the handler ran %d times, want %d", runs.Load(), tt.runs)
				}
				r.wantStats(tt.want)
				r.mustStop()
			})
		})
	}
}

func TestValidator_S19_invalid_burns_no_retries(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(context.Context, string) error { return errors.New("was called") }
		r.policy.DeadLetter.InvalidQueue = "queue.invalid"
		r.publish("")
		r.start(leasebus.WithValidator(func(_ context.Context, d leasebus.Delivery) error {
			if text(d) == "" {
				return errors.New("value is needed")
			}
			return nil
		}))
		r.wait(time.Second)
		dead, err := r.store.DeadLetters(t.Context(), "queue", leasebus.Filter{}, "", 1)
		if err != nil || len(dead) != 1 || dead[0].Reason != leasebus.ReasonInvalid || dead[0].DeadLetterQueue != "queue.invalid" ||
			dead[0].Attempts != 1 || dead[0].Error != "value is needed" {
			t.Errorf("dead letters %+v, %v", dead, err)
		}
		r.mustStop()
	})
}

func nilMap() map[string]int { return nil }

func TestPanic_S18_C2_11(t *testing.T) {
	for name, handler := range map[string]func(){
		"value":           func() { panic(7) },
		"error":           func() { panic(errors.New("boom")) },
		"nil map":         func() { nilMap()["a"] = 1 },
		"nil":             func() { panic(nil) },
		"Goexit":          goexit,
		"Goexit in defer": func() { defer goexit() },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(r *rig) {
				r.policy.Retry = leasebus.NoRetry()
				r.handler = func(_ context.Context, text string) error {
					if text == "bad" {
						handler()
					}
					return nil
				}
				r.publish("bad", "good", "bad", "good")
				r.start(leasebus.WithConcurrency(1))
				r.wait(time.Second)
				r.wantStats(leasebus.QueueStats{Completed: 2, DeadLettered: 2})
				dead, err := r.store.DeadLetters(t.Context(), "queue", leasebus.Filter{}, "", 1)
				if err != nil || dead[0].ErrorType != "*leasebus.PanicError" || !strings.Contains(dead[0].Error, "handler_test.go") {
					t.Errorf("dead letter %+v, %v", dead[0], err)
				}
				r.mustStop()
			})
		})
	}
}
