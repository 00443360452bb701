package leasebustest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/leasebustest"
)

var errNoStock = errors.New("no stock")

func TestHandle_TellsWhatWasDecided(t *testing.T) {
	for _, tt := range []struct {
		name    string
		answer  error
		policy  func(*leasebus.Policy)
		options []leasebustest.HandleOption
		want    leasebus.Outcome
		words   string
	}{
		{
			name: "completed", want: leasebus.Outcome{Kind: leasebus.SettleComplete}, words: "completed",
		},
		{
			name: "retried", answer: errNoStock,
			want:  leasebus.Outcome{Kind: leasebus.SettleRetry, Delay: time.Minute},
			words: "to be retried after 1m0s: no stock",
		},
		{
			name: "retried again", answer: errNoStock, options: []leasebustest.HandleOption{leasebustest.Attempt(2)},
			want:  leasebus.Outcome{Kind: leasebus.SettleRetry, Delay: 2 * time.Minute},
			words: "to be retried after 2m0s: no stock",
		},
		{
			name: "retried at once, run once", answer: leasebus.RetryAfter(0, errNoStock),
			want:  leasebus.Outcome{Kind: leasebus.SettleRetry},
			words: "to be retried after 0s: no stock",
		},
		{
			name: "exhausted", answer: errNoStock, options: []leasebustest.HandleOption{leasebustest.Attempt(3)},
			want:  leasebus.Outcome{Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonExhausted},
			words: `dead-lettered to "texts.dlq" as exhausted: no stock`,
		},
		{
			name: "young", answer: errNoStock, options: []leasebustest.HandleOption{leasebustest.Age(time.Hour - time.Minute)},
			policy: func(p *leasebus.Policy) { p.Retry.GiveUpAfter = time.Hour },
			want:   leasebus.Outcome{Kind: leasebus.SettleRetry, Delay: time.Minute},
			words:  "to be retried after 1m0s: no stock",
		},
		{
			name: "old", answer: errNoStock, options: []leasebustest.HandleOption{leasebustest.Age(time.Hour + time.Minute)},
			policy: func(p *leasebus.Policy) { p.Retry.GiveUpAfter = time.Hour },
			want:   leasebus.Outcome{Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonExpired},
			words:  `dead-lettered to "texts.dlq" as expired: no stock`,
		},
		{
			name: "deferred", answer: leasebus.Defer(time.Hour),
			want:  leasebus.Outcome{Kind: leasebus.SettleDefer, Delay: time.Hour},
			words: "deferred by 1h0m0s",
		},
		{
			name: "permanent", answer: leasebus.Permanent(errNoStock),
			want:  leasebus.Outcome{Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonPermanent},
			words: `dead-lettered to "texts.dlq" as permanent: no stock`,
		},
		{
			name: "invalid", answer: leasebus.Invalid(errNoStock),
			policy: func(p *leasebus.Policy) { p.DeadLetter.InvalidQueue = "texts.invalid" },
			want:   leasebus.Outcome{Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonInvalid},
			words:  `dead-lettered to "texts.invalid" as invalid: no stock`,
		},
		{
			name: "discarded", answer: leasebus.Permanent(errNoStock),
			policy: func(p *leasebus.Policy) { p.DeadLetter = leasebus.DeadLetterPolicy{Discard: true} },
			want:   leasebus.Outcome{Kind: leasebus.SettleDiscard, Reason: leasebus.ReasonPermanent},
			words:  "discarded as permanent: no stock",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inAndOut(t, func(t *testing.T) {
				change := tt.policy
				if change == nil {
					change = func(*leasebus.Policy) {}
				}
				runs := 0
				d := leasebustest.Handle(t, texts(func(context.Context, text) error {
					runs++
					return tt.answer
				}, change), wrapperspb.String("seven"), tt.options...)
				if d.Kind != tt.want.Kind || d.Reason != tt.want.Reason || d.Delay != tt.want.Delay || d.Result != leasebus.ResultOK {
					t.Errorf("decision %+v, want %+v", d.Outcome, tt.want)
				}
				if !errors.Is(d.Err, tt.answer) || runs != 1 {
					t.Errorf("error %v after %d runs, want %v after 1", d.Err, runs, tt.answer)
				}
				if d.String() != tt.words {
					t.Errorf("in words: %q, want %q", d, tt.words)
				}
				if dead := d.DeadLetter != nil; dead != (tt.want.Kind == leasebus.SettleDeadLetter) {
					t.Errorf("dead letter %+v", d.DeadLetter)
				} else if dead && (d.DeadLetter.ID != d.ID || d.DeadLetter.Error != "no stock") {
					t.Errorf("dead letter %+v, want message %v with no stock", d.DeadLetter, d.ID)
				}
			})
		})
	}
}

func TestHandle_TheHandlerSeesTheMessage(t *testing.T) {
	t.Parallel()
	inAndOut(t, func(t *testing.T) {
		id := leasebus.NewID()
		d := leasebustest.Handle(t, texts(func(ctx context.Context, m text) error {
			d, _ := leasebus.DeliveryFrom(ctx)
			if m.GetValue() != "seven" || d.ID() != id || d.Headers().Get("tenant") != "a" || d.Attempt() != 3 || d.Queue() != "texts" {
				t.Errorf("handled %v, message %v, tenant %q, attempt %d, queue %s", m, d.ID(), d.Headers().Get("tenant"), d.Attempt(), d.Queue())
			}
			if age := time.Since(d.FirstDue()); age < time.Hour || age > 2*time.Hour {
				t.Errorf("first due %v ago, want an hour", age)
			}
			return nil
		}), wrapperspb.String("seven"), leasebustest.Attempt(3), leasebustest.Age(time.Hour),
			leasebustest.PublishedWith(leasebus.WithID(id), leasebus.WithHeader("tenant", "a"), leasebus.Delay(time.Second)))
		if d.ID != id || d.Kind != leasebus.SettleComplete {
			t.Errorf("message %v: %v; want %v completed", d.ID, d, id)
		}
		if d.Policy.Queue != "texts" || d.Policy.Retry.Delay(1) != time.Minute {
			t.Errorf("decided by the policy %+v", d.Policy)
		}
	})
}

func TestHandle_ACrashedMessageIsNotRun(t *testing.T) {
	t.Parallel()
	d := leasebustest.Handle(t, texts(func(context.Context, text) error {
		t.Error("the handler ran")
		return nil
	}), wrapperspb.String("seven"), leasebustest.Attempt(4))
	if d.Kind != leasebus.SettleDeadLetter || d.Reason != leasebus.ReasonCrashed {
		t.Errorf("%v, want it dead-lettered as crashed", d)
	}
}

func TestHandle_APanicIsAFailure(t *testing.T) {
	t.Parallel()
	d := leasebustest.Handle(t, texts(func(context.Context, text) error { panic("oops") }), wrapperspb.String("seven"))
	var p *leasebus.PanicError
	if d.Kind != leasebus.SettleRetry || !errors.As(d.Err, &p) || p.Value != "oops" {
		t.Errorf("%v, want a retry with the panic", d)
	}
}

func TestHandle_WithTheServicesMiddleware(t *testing.T) {
	t.Parallel()
	type key struct{}
	middleware := func(next leasebus.HandlerFunc) leasebus.HandlerFunc {
		return func(ctx context.Context, d leasebus.Delivery) error {
			return next(context.WithValue(ctx, key{}, "a"), d)
		}
	}
	d := leasebustest.Handle(t, texts(func(ctx context.Context, _ text) error {
		if ctx.Value(key{}) != "a" {
			return errNoStock
		}
		return nil
	}), wrapperspb.String("seven"), leasebustest.Processing(leasebus.WithMiddleware(middleware)))
	if d.Kind != leasebus.SettleComplete {
		t.Error(d)
	}
}

func TestHandle_TheMessagePicksItsHandler(t *testing.T) {
	t.Parallel()
	register := func(p *leasebus.Processor) error {
		return errors.Join(
			texts(answer(errNoStock))(p),
			numbers(func(context.Context, number) error { return nil })(p),
		)
	}
	if d := leasebustest.Handle(t, register, wrapperspb.Int64(7)); d.Kind != leasebus.SettleComplete {
		t.Error(d)
	}
	if d := leasebustest.Handle(t, register, wrapperspb.String("seven")); d.Kind != leasebus.SettleRetry {
		t.Error(d)
	}
}

func TestHandle_WhatItsHandlerPublishes(t *testing.T) {
	t.Parallel()
	inAndOut(t, func(t *testing.T) {
		store := leasebustest.NewStore()
		out := newNumbers(t, store)
		d := leasebustest.Handle(t, texts(func(ctx context.Context, m text) error {
			_, err := out.Publish(ctx, wrapperspb.Int64(int64(len(m.GetValue()))), leasebus.Delay(time.Hour))
			return err
		}), wrapperspb.String("seven"))
		sent := leasebustest.Published[number](t, store)
		if len(sent) != 1 || sent[0].Message.GetValue() != 5 || sent[0].Delay != time.Hour || sent[0].Queue != "numbers" {
			t.Fatalf("published %+v, want the length of seven, an hour later", sent)
		}
		if cause := sent[0].Headers.Get(leasebus.HeaderCausation); cause != d.ID.String() {
			t.Errorf("caused by %s, want %s", cause, d.ID)
		}
	})
}

func TestHandle_LongHandlersInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := texts(func(ctx context.Context, _ text) error {
			select {
			case <-time.After(10 * time.Minute): // many leases long
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
		if d := leasebustest.Handle(t, slow, wrapperspb.String("seven"), leasebustest.Patience(time.Hour)); d.Kind != leasebus.SettleComplete {
			t.Error(d)
		}
		timeout := texts(func(ctx context.Context, _ text) error {
			<-ctx.Done()
			return context.Cause(ctx)
		}, func(p *leasebus.Policy) { p.Timeout = 10 * time.Second })
		if d := leasebustest.Handle(t, timeout, wrapperspb.String("seven")); d.Kind != leasebus.SettleRetry || !errors.Is(d.Err, leasebus.ErrHandlerTimeout) {
			t.Error(d)
		}
	})
}

func TestHandle_FailsItsTest(t *testing.T) {
	message := wrapperspb.String("seven")
	for _, tt := range []struct {
		name string
		test func(testing.TB)
		want string
	}{
		{"no handler", func(tb testing.TB) {
			leasebustest.Handle(tb, texts(answer(nil)), wrapperspb.Int64(7))
		}, "no handler is registered for google.protobuf.Int64Value"},
		{"nothing registered", func(tb testing.TB) {
			leasebustest.Handle(tb, func(*leasebus.Processor) error { return nil }, message)
		}, "no handler is registered"},
		{"registration", func(tb testing.TB) {
			leasebustest.Handle(tb, func(*leasebus.Processor) error { return errNoStock }, message)
		}, "no stock"},
		{"invalid message", func(tb testing.TB) {
			leasebustest.Handle(tb, texts(answer(nil)), message, leasebustest.PublishedWith(leasebus.WithHeader("leasebus-x", "")))
		}, "reserved"},
		{"stuck", func(tb testing.TB) {
			leasebustest.Handle(tb, texts(func(ctx context.Context, _ text) error {
				<-ctx.Done()
				return nil
			}), message, leasebustest.Patience(time.Second))
		}, "the handler of google.protobuf.StringValue did not return within 1s"},
		{"attempt", func(tb testing.TB) {
			leasebustest.Handle(tb, texts(answer(nil)), message, leasebustest.Attempt(0))
		}, "Attempt: 0 is out of range; allowed is 1 or more"},
		{"age", func(tb testing.TB) {
			leasebustest.Handle(tb, texts(answer(nil)), message, leasebustest.Age(-1))
		}, "Age: -1ns is out of range"},
		{"patience", func(tb testing.TB) {
			leasebustest.Handle(tb, texts(answer(nil)), message, leasebustest.Patience(0))
		}, "Patience: 0s is out of range"},
		{"processor option", func(tb testing.TB) {
			leasebustest.Handle(tb, texts(answer(nil)), message, leasebustest.Processing(leasebus.WithConcurrency(0)))
		}, "WithConcurrency: 0 is out of range"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { wantFailure(t, tt.test, tt.want) })
		})
	}
}

func TestHandle_NeedsAMessageType(t *testing.T) {
	t.Parallel()
	wantFailure(t, func(tb testing.TB) {
		leasebustest.Handle[proto.Message](tb, func(*leasebus.Processor) error { return nil }, wrapperspb.String("a"))
	}, "the message type is an interface")
}
