package leasebustest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/leasebustest"
)

func wantCounts(t *testing.T, got, want leasebus.ProcessorStats) {
	t.Helper()
	want.Leased = want.Succeeded + want.Failed + want.Deferred + want.DeadLettered + want.Discarded
	if got != want {
		t.Errorf("counts\n got %+v\nwant %+v", got, want)
	}
}

func TestDrain_UntilEverythingHasEnded(t *testing.T) {
	t.Parallel()
	inAndOut(t, func(t *testing.T) {
		store := leasebustest.NewStore()
		publishTexts(t, store, "good", "bad", "flaky", "late", "hopeless")
		if _, err := newTexts(t, store).Publish(t.Context(), wrapperspb.String("scheduled"), leasebus.Delay(24*time.Hour)); err != nil {
			t.Fatal(err)
		}
		var order []string
		begun := store.Now()
		counts := leasebustest.Drain(t, store, texts(func(ctx context.Context, m text) error {
			d, _ := leasebus.DeliveryFrom(ctx)
			order = append(order, m.GetValue())
			switch {
			case m.GetValue() == "bad":
				return leasebus.Permanent(errNoStock)
			case m.GetValue() == "hopeless", m.GetValue() == "flaky" && d.Attempt() < 3:
				return errNoStock
			case m.GetValue() == "late" && !slices.Contains(order[:len(order)-1], "late"):
				return leasebus.Defer(time.Hour)
			}
			return nil
		}))
		wantCounts(t, counts, leasebus.ProcessorStats{Succeeded: 4, Failed: 4, Deferred: 1, DeadLettered: 2})
		want := []string{
			"good", "bad", "flaky", "late", "hopeless", "flaky", "hopeless", "flaky", "hopeless", "late", "scheduled",
		}
		if !slices.Equal(order, want) {
			t.Errorf("handled %q, want %q", order, want)
		}
		if passed := store.Now().Sub(begun); passed < 24*time.Hour || passed > 25*time.Hour {
			t.Errorf("%v passed on the store's clock, want 24h", passed)
		}
		stats, err := store.Stats(t.Context(), "texts")
		if err != nil || stats != (leasebus.QueueStats{DeadLettered: 2}) {
			t.Errorf("the store has %+v, %v; want two dead letters", stats, err)
		}
	})
}

func TestDrain_AFlowOfSeveralQueues(t *testing.T) {
	t.Parallel()
	inAndOut(t, func(t *testing.T) {
		store := leasebustest.NewStore()
		out := newNumbers(t, store)
		publishTexts(t, store, "a", "bb", "ccc")
		sum := int64(0)
		register := func(p *leasebus.Processor) error {
			return errors.Join(
				texts(func(ctx context.Context, m text) error {
					_, err := out.Publish(ctx, wrapperspb.Int64(int64(len(m.GetValue()))), leasebus.Delay(time.Hour))
					return err
				})(p),
				numbers(func(_ context.Context, m number) error {
					sum += m.GetValue()
					return nil
				})(p),
			)
		}
		wantCounts(t, leasebustest.Drain(t, store, register), leasebus.ProcessorStats{Succeeded: 6})
		if sum != 6 {
			t.Errorf("sum %d, want 6", sum)
		}
		if n := len(leasebustest.Published[number](t, store)); n != 3 {
			t.Errorf("%d numbers are remembered, want 3", n)
		}
	})
}

func TestDrain_QueuesWithoutAHandlerStay(t *testing.T) {
	t.Parallel()
	store := leasebustest.NewStore()
	publishTexts(t, store, "a")
	if _, err := newNumbers(t, store).Publish(t.Context(), wrapperspb.Int64(1)); err != nil {
		t.Fatal(err)
	}
	wantCounts(t, leasebustest.Drain(t, store, texts(answer(nil))), leasebus.ProcessorStats{Succeeded: 1})
	if stats, err := store.Stats(t.Context(), "numbers"); err != nil || stats.Pending != 1 {
		t.Errorf("numbers: %+v, %v; want 1 pending", stats, err)
	}
}

func TestDrain_AnEmptyStore(t *testing.T) {
	t.Parallel()
	inAndOut(t, func(t *testing.T) {
		wantCounts(t, leasebustest.Drain(t, leasebustest.NewStore(), texts(answer(nil))), leasebus.ProcessorStats{})
	})
}

func TestDrain_WhatADeadWorkerHolds(t *testing.T) {
	t.Parallel()
	inAndOut(t, func(t *testing.T) {
		store := leasebustest.NewStore()
		publishTexts(t, store, "a")
		dead, err := store.Subscribe(t.Context(), leasebus.Subscription{Queue: "texts", Owner: "dead#1", Policy: textPolicy()})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := dead.Lease(t.Context(), make([]leasebus.Lease, 1)); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if err := dead.Close(); err != nil {
			t.Fatal(err)
		}
		wantCounts(t, leasebustest.Drain(t, store, texts(func(ctx context.Context, _ text) error {
			if d, _ := leasebus.DeliveryFrom(ctx); d.Attempt() != 2 {
				t.Errorf("attempt %d, want 2", d.Attempt())
			}
			return nil
		})), leasebus.ProcessorStats{Succeeded: 1})
	})
}

func TestDrain_TwiceOnOneStore(t *testing.T) {
	t.Parallel()
	store := leasebustest.NewStore()
	publishTexts(t, store, "a")
	wantCounts(t, leasebustest.Drain(t, store, texts(answer(leasebus.Permanent(errNoStock)))), leasebus.ProcessorStats{DeadLettered: 1})
	manager := leasebus.NewTypedManager[text](textPolicy(), store)
	if result, err := manager.RequeueAll(t.Context(), leasebus.Filter{}); err != nil || result.Requeued != 1 {
		t.Fatalf("requeue: %+v, %v", result, err)
	}
	wantCounts(t, leasebustest.Drain(t, store, texts(answer(nil))), leasebus.ProcessorStats{Succeeded: 1})
}

func TestDrain_ManyAtOnce(t *testing.T) {
	t.Parallel()
	inAndOut(t, func(t *testing.T) {
		store := leasebustest.NewStore()
		const messages = 500
		values := make([]string, messages)
		for i := range values {
			values[i] = fmt.Sprint(i)
		}
		publishTexts(t, store, values...)
		var runs atomic.Int64
		counts := leasebustest.Drain(t, store, texts(func(ctx context.Context, _ text) error {
			runs.Add(1)
			if d, _ := leasebus.DeliveryFrom(ctx); d.Attempt() == 1 {
				return errNoStock
			}
			return nil
		}), leasebustest.Processing(leasebus.WithConcurrency(8), leasebus.WithLookAhead(64)))
		wantCounts(t, counts, leasebus.ProcessorStats{Succeeded: messages, Failed: messages})
		if runs.Load() != 2*messages {
			t.Errorf("%d runs, want %d", runs.Load(), 2*messages)
		}
	})
}

func TestDrain_FailsItsTest(t *testing.T) {
	for _, tt := range []struct {
		name string
		test func(testing.TB, *leasebustest.Store)
		want []string
	}{
		{"deferred for ever", func(tb testing.TB, store *leasebustest.Store) {
			leasebustest.Drain(tb, store, texts(answer(leasebus.Defer(time.Minute))), leasebustest.MaxRuns(20))
		}, []string{
			"messages are left after 20 runs", `(google.protobuf.StringValue in queue "texts")`,
			"was handed out 20 times", "last deferred by 1m0s", "raise MaxRuns",
		}},
		{"deferred for ever at once", func(tb testing.TB, store *leasebustest.Store) {
			leasebustest.Drain(tb, store, texts(answer(leasebus.Defer(0))))
		}, []string{"messages are left after 10000 runs", "last deferred by 0s"}},
		{"published for ever", func(tb testing.TB, store *leasebustest.Store) {
			again := newTexts(tb, store)
			leasebustest.Drain(tb, store, texts(func(ctx context.Context, m text) error {
				_, err := again.Publish(ctx, m)
				return err
			}), leasebustest.MaxRuns(30))
		}, []string{"messages are left after 30 runs", "of 30 messages", "was handed out 1 times and last completed"}},
		{"stuck", func(tb testing.TB, store *leasebustest.Store) {
			leasebustest.Drain(tb, store, texts(func(ctx context.Context, _ text) error {
				<-ctx.Done()
				return nil
			}), leasebustest.Patience(time.Second))
		}, []string{"nothing has ended for 1s; handlers run for message", `in queue "texts"`}},
		{"registration", func(tb testing.TB, store *leasebustest.Store) {
			leasebustest.Drain(tb, store, func(*leasebus.Processor) error { return errNoStock })
		}, []string{"no stock"}},
		{"nothing registered", func(tb testing.TB, store *leasebustest.Store) {
			leasebustest.Drain(tb, store, func(*leasebus.Processor) error { return nil })
		}, []string{"no handler is registered"}},
		{"max runs", func(tb testing.TB, store *leasebustest.Store) {
			leasebustest.Drain(tb, store, texts(answer(nil)), leasebustest.MaxRuns(0))
		}, []string{"MaxRuns: 0 is out of range; allowed is 1 or more"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := leasebustest.NewStore()
				publishTexts(t, store, "a")
				wantFailure(t, func(tb testing.TB) { tt.test(tb, store) }, tt.want...)
			})
		})
	}
}

func TestDrain_MaxRunsThatAreJustEnough(t *testing.T) {
	t.Parallel()
	store := leasebustest.NewStore()
	publishTexts(t, store, "a", "b")
	wantCounts(t, leasebustest.Drain(t, store, texts(answer(errNoStock)), leasebustest.MaxRuns(6)),
		leasebus.ProcessorStats{Failed: 4, DeadLettered: 2})
}
