package memory_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestLease_S1_HandsOverWhatWasPublished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		out := message("body")
		out.Headers = leasebus.NewHeaders(map[string]string{"tenant": "a", "traceparent": "00-1-2-03"})
		out.IdempotencyKey, out.OrderingKey = "order 7", "customer 3"
		published := time.Now()
		publish(t, store, out)
		time.Sleep(time.Second)

		got := subscribe(t, store, "a#1").one()
		if string(got.Payload) != "body" || got.ID != out.ID || got.Type != typeName || got.Queue != orders ||
			got.IdempotencyKey != "order 7" || got.OrderingKey != "customer 3" {
			t.Errorf("leased %+v, published %+v", got.Envelope, out.Envelope)
		}
		if string(got.Headers.Encoded()) != string(out.Headers.Encoded()) {
			t.Errorf("headers %q, want %q", got.Headers.Encoded(), out.Headers.Encoded())
		}
		if got.Attempt != 1 || got.Generation != 1 || got.Crashed || got.Interruptions != 0 {
			t.Errorf("attempt %d, generation %d, crashed %t, interruptions %d; want 1, 1, false, 0",
				got.Attempt, got.Generation, got.Crashed, got.Interruptions)
		}
		if got.Age != time.Second || !got.FirstDue.Equal(published) || got.FirstDue.Location() != time.UTC {
			t.Errorf("age %v, first due %v; want 1s, %v in UTC", got.Age, got.FirstDue, published)
		}
	})
}

func TestLease_S1_ArrivalOrderInBatches(t *testing.T) {
	t.Parallel()
	store := memory.New()
	var want []string
	for i := range 40 { // more than one slab
		want = append(want, fmt.Sprint(i))
	}
	publishText(t, store, want...)
	c := subscribe(t, store, "a#1")
	if got := c.lease(0); len(got) != 0 {
		t.Fatalf("leased %d into no room", len(got))
	}
	wantPayloads(t, c.lease(15), want[:15]...)
	wantPayloads(t, c.lease(15), want[15:30]...)
	wantPayloads(t, c.lease(15), want[30:]...)
	c.none()
}

func TestLease_S1_ScheduledMessagesWait(t *testing.T) {
	const hour = time.Hour
	for _, tt := range []struct {
		name  string
		delay time.Duration
		at    time.Duration // from now, if set
		want  time.Duration
	}{
		{name: "delay", delay: hour, want: hour},
		{name: "no delay"},
		{name: "negative delay is now", delay: -hour},
		{name: "at", at: hour, want: hour},
		{name: "at in the past is now", at: -hour},
		{name: "at wins over delay", delay: 2 * hour, at: hour, want: hour},
		{name: "a hundred years", delay: 876_000 * hour, want: 876_000 * hour},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				c := subscribe(t, store, "a#1")
				out := message("m")
				out.Delay = tt.delay
				if tt.at != 0 {
					out.At = time.Now().Add(tt.at)
				}
				publish(t, store, out)
				if tt.want > 0 {
					store.Advance(tt.want - 1)
					c.none()
					store.Advance(1)
				}
				got := c.one()
				if want := time.Now().Add(tt.want); !got.FirstDue.Equal(want) || got.Age != 0 {
					t.Errorf("first due %v with age %v, want %v with 0", got.FirstDue, got.Age, want)
				}
			})
		})
	}
}

func TestLease_S1_ADelayPastTheEndOfTimeIsNoneOfThePast(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	out := message("m")
	out.Delay = math.MaxInt64
	publish(t, store, out)
	c.none()
	store.Advance(time.Hour)
	c.none()
}

func TestLease_S1_WhatBecameDueEarlierComesFirst(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	for i, delay := range []time.Duration{3 * time.Second, time.Second, 2 * time.Second, time.Second} {
		out := message(fmt.Sprint(i))
		out.Delay = delay
		publish(t, store, out)
	}
	store.Advance(2500 * time.Millisecond)
	publishText(t, store, "now")
	store.Advance(time.Second)
	wantPayloads(t, c.lease(10), "1", "3", "2", "now", "0")
}

func TestLease_S2_ClaimersNeverShare(t *testing.T) {
	t.Parallel()
	const messages, claimers = 2000, 8
	store := memory.New()
	for i := range messages / 100 {
		batch := make([]string, 100)
		for j := range batch {
			batch[j] = fmt.Sprint(100*i + j)
		}
		publishText(t, store, batch...)
	}
	var (
		mu   sync.Mutex
		seen = make(map[string]int)
		wg   sync.WaitGroup
	)
	for i := range claimers {
		c := subscribe(t, store, fmt.Sprintf("worker#%d", i))
		wg.Go(func() {
			for {
				dst := make([]leasebus.Lease, 7)
				n, err := c.feed.Lease(context.Background(), dst)
				if err != nil {
					t.Errorf("lease: %v", err)
				}
				if n == 0 || err != nil {
					return
				}
				mu.Lock()
				for i := range n {
					seen[string(dst[i].Payload)]++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(seen) != messages {
		t.Errorf("%d messages were leased, want %d", len(seen), messages)
	}
	for payload, n := range seen {
		if n != 1 {
			t.Errorf("message %s was leased %d times", payload, n)
		}
	}
}

func TestLease_S9_AnExpiredLeaseIsAnyones(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		dead, alive := subscribe(t, store, "dead#1"), subscribe(t, store, "alive#2")
		publishText(t, store, "m")
		first := dead.one()

		time.Sleep(lease - 1)
		alive.none()
		wantStats(t, store, leasebus.QueueStats{Processing: 1})
		time.Sleep(1)
		wantStats(t, store, leasebus.QueueStats{Processing: 1, Stuck: 1})

		second := alive.one()
		if second.Attempt != 2 || second.Generation != first.Generation+1 || !second.Crashed || second.Age != lease {
			t.Errorf("attempt %d, generation %d, crashed %t, age %v; want 2, %d, true, %v",
				second.Attempt, second.Generation, second.Crashed, second.Age, first.Generation+1, lease)
		}
		wantStats(t, store, leasebus.QueueStats{Processing: 1})
	})
}

func TestLease_S9_ExpiredComeBeforeNew(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	publishText(t, store, "1", "2")
	c.lease(2)
	publishText(t, store, "3")
	store.Advance(lease)
	wantPayloads(t, c.lease(5), "1", "2", "3")
}

func TestLease_S9_LeasesOfDifferentLengthsExpireInTheirOrder(t *testing.T) {
	t.Parallel()
	store := memory.New()
	long := subscribe(t, store, "long#1", func(p *leasebus.Policy) { p.Lease.Duration = time.Hour })
	short := subscribe(t, store, "short#2", func(p *leasebus.Policy) { p.Lease.Duration = time.Minute })
	publishText(t, store, "1", "2", "3")
	long.lease(1)
	short.lease(1)
	long.lease(1)
	store.Advance(time.Minute)
	wantPayloads(t, short.lease(3), "2")
	store.Advance(time.Hour)
	wantPayloads(t, short.lease(3), "2", "1", "3")
}

// A crash stays the last word on an attempt until an outcome of a later one is recorded.
func TestLease_S10_CrashedUntilAnOutcomeIsRecorded(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	publishText(t, store, "m")
	wantCrashed := func(want bool, attempt int) *leasebus.Lease {
		t.Helper()
		l := c.one()
		if l.Crashed != want || l.Attempt != attempt {
			t.Fatalf("attempt %d, crashed %t; want %d, %t", l.Attempt, l.Crashed, attempt, want)
		}
		return l
	}
	wantCrashed(false, 1)
	store.Advance(lease)
	l := wantCrashed(true, 2)
	c.mustSettle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRelease})
	l = wantCrashed(true, 2) // the release gave attempt 2 back; the last one spent is the crash
	c.mustSettle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Failure: failure("x")})
	wantCrashed(false, 3)
}

func TestFence_S12_AStaleWorkerChangesNothing(t *testing.T) {
	t.Parallel()
	for _, kind := range []leasebus.SettlementKind{
		leasebus.SettleComplete, leasebus.SettleRetry, leasebus.SettleDefer, leasebus.SettleRelease,
		leasebus.SettleDeadLetter, leasebus.SettleDiscard, leasebus.SettleVerify,
	} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			store := memory.New()
			// The same label for both: fencing rests on the generation alone.
			stale, holder := subscribe(t, store, "same#1"), subscribe(t, store, "same#1")
			publishText(t, store, "m")
			old := stale.one()
			store.Advance(lease)
			current := holder.one()

			if got := stale.renew(old); got != leasebus.ResultLost {
				t.Errorf("stale renewal: result %d, want Lost", got)
			}
			if got := stale.settle(leasebus.Settlement{Lease: old, Kind: kind, Failure: failure("stale"), Started: true}); got != leasebus.ResultLost {
				t.Errorf("stale %v: result %d, want Lost", kind, got)
			}
			wantStats(t, store, leasebus.QueueStats{Processing: 1})
			if got := holder.renew(current); got != leasebus.ResultOK {
				t.Errorf("the holder's renewal: result %d, want OK", got)
			}
			holder.mustSettle(leasebus.Settlement{Lease: current, Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonPermanent})
			if d := deadLetters(t, store, leasebus.Filter{}); len(d) != 1 || len(d[0].History) != 0 {
				t.Errorf("dead letters %+v, want one without a history", d)
			}
			if got := stale.settle(leasebus.Settlement{Lease: old, Kind: kind}); got != leasebus.ResultLost {
				t.Errorf("stale %v after the end: result %d, want Lost", kind, got)
			}
		})
	}
}

func TestFence_S12_ANewLeaseOfTheSameWorkerEndsTheOld(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	publishText(t, store, "m")
	first := c.one()
	c.mustSettle(leasebus.Settlement{Lease: first, Kind: leasebus.SettleRelease})
	second := c.one()
	if got := c.renew(first); got != leasebus.ResultLost {
		t.Errorf("renewal of the released lease: result %d, want Lost", got)
	}
	if got := c.settle(leasebus.Settlement{Lease: first, Kind: leasebus.SettleComplete}); got != leasebus.ResultLost {
		t.Errorf("completion of the released lease: result %d, want Lost", got)
	}
	c.mustSettle(leasebus.Settlement{Lease: second, Kind: leasebus.SettleComplete})
}

func TestFence_S12_LeasesOfElsewhereAreLost(t *testing.T) {
	t.Parallel()
	store, other := memory.New(), memory.New()
	c, far := subscribe(t, store, "a#1"), subscribe(t, other, "a#1")
	publishText(t, other, "m")
	for name, l := range map[string]*leasebus.Lease{"another store's": far.one(), "no store's": {Attempt: 1, Generation: 1}} {
		if got := c.renew(l); got != leasebus.ResultLost {
			t.Errorf("%s: renewal: result %d, want Lost", name, got)
		}
		for _, kind := range []leasebus.SettlementKind{leasebus.SettleComplete, leasebus.SettleVerify} {
			if got := c.settle(leasebus.Settlement{Lease: l, Kind: kind}); got != leasebus.ResultLost {
				t.Errorf("%s: %v: result %d, want Lost", name, kind, got)
			}
		}
	}
}

func TestRenew_ExtendsFromNow(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c, other := subscribe(t, store, "a#1"), subscribe(t, store, "b#2")
	publishText(t, store, "1", "2")
	leases := c.lease(2)
	store.Advance(lease - time.Second)
	if got := c.renew(leases[0]); got != leasebus.ResultOK {
		t.Fatalf("renewal: result %d, want OK", got)
	}
	store.Advance(time.Second)
	wantPayloads(t, other.lease(2), "2")
	store.Advance(lease - time.Second - time.Millisecond)
	other.none()
	store.Advance(time.Millisecond)
	wantPayloads(t, other.lease(1), "1")
}

func TestRenew_AnExpiredLeaseThatNobodyTookGoesOn(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c, other := subscribe(t, store, "a#1"), subscribe(t, store, "b#2")
	publishText(t, store, "m")
	l := c.one()
	store.Advance(2 * lease)
	if got := c.renew(l); got != leasebus.ResultOK {
		t.Fatalf("renewal: result %d, want OK", got)
	}
	other.none()
	store.Advance(2 * lease)
	c.mustSettle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleComplete})
	other.none()
}

func TestSubscribe_RefusesWhatCannotLease(t *testing.T) {
	t.Parallel()
	store := memory.New()
	for name, change := range map[string]func(*leasebus.Subscription){
		"no queue":       func(s *leasebus.Subscription) { s.Queue = "" },
		"no owner":       func(s *leasebus.Subscription) { s.Owner = "" },
		"no policy":      func(s *leasebus.Subscription) { s.Policy = nil },
		"no lease":       func(s *leasebus.Subscription) { s.Policy.Lease.Duration = 0 },
		"negative lease": func(s *leasebus.Subscription) { s.Policy.Lease.Duration = -1 },
	} {
		sub := leasebus.Subscription{Queue: orders, Owner: "a#1", Policy: policy()}
		change(&sub)
		if feed, err := store.Subscribe(t.Context(), sub); err == nil || feed != nil {
			t.Errorf("%s: feed %v, error %v; want an error", name, feed, err)
		}
	}
}

func TestFeed_StopEndsIntakeOnly(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	publishText(t, store, "1", "2", "3")
	leases := c.lease(2)
	for range 2 {
		if err := c.feed.Stop(t.Context()); err != nil {
			t.Fatalf("stop: %v", err)
		}
	}
	if n, err := c.feed.Lease(t.Context(), make([]leasebus.Lease, 1)); n != 0 || !errors.Is(err, leasebus.ErrFeedStopped) {
		t.Errorf("lease after stop: %d, %v; want 0, ErrFeedStopped", n, err)
	}
	if got := c.renew(leases[0]); got != leasebus.ResultOK {
		t.Errorf("renewal after stop: result %d, want OK", got)
	}
	c.mustSettle(leasebus.Settlement{Lease: leases[0], Kind: leasebus.SettleComplete})
	for range 2 {
		if err := c.feed.Close(); err != nil {
			t.Fatalf("close: %v", err)
		}
	}
	if err := c.feed.Settle(t.Context(), []leasebus.Settlement{{Lease: leases[1]}}); !errors.Is(err, leasebus.ErrFeedStopped) {
		t.Errorf("settle after close: %v, want ErrFeedStopped", err)
	}
	if err := c.feed.Renew(t.Context(), []leasebus.Renewal{{Lease: leases[1]}}); !errors.Is(err, leasebus.ErrFeedStopped) {
		t.Errorf("renew after close: %v, want ErrFeedStopped", err)
	}
	store.Advance(lease)
	wantPayloads(t, subscribe(t, store, "b#2").lease(3), "2", "3")
}

func TestContext_DoneBeforeAnythingHappens(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	publishText(t, store, "1", "2")
	l := c.lease(1)[0]
	before := stats(t, store)
	before.OldestDueAge = 0

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	renewals, settlements := []leasebus.Renewal{{Lease: l}}, []leasebus.Settlement{{Lease: l}}
	ref := []leasebus.DeadLetterRef{{ID: l.ID}}
	edited := message("new").Envelope
	for name, call := range map[string]func() error{
		"publish": func() error {
			return store.Publish(ctx, []leasebus.Outgoing{message("x")}, make([]leasebus.Receipt, 1))
		},
		"subscribe":        func() error { _, err := store.Subscribe(ctx, leasebus.Subscription{Queue: orders}); return err },
		"lease":            func() error { _, err := c.feed.Lease(ctx, make([]leasebus.Lease, 1)); return err },
		"renew":            func() error { return c.feed.Renew(ctx, renewals) },
		"settle":           func() error { return c.feed.Settle(ctx, settlements) },
		"dead letters":     func() error { _, err := store.DeadLetters(ctx, orders, leasebus.Filter{}, "", 1); return err },
		"last dead letter": func() error { _, err := store.LastDeadLetter(ctx, orders); return err },
		"requeue":          func() error { _, err := store.Requeue(ctx, orders, ref, "me"); return err },
		"replace":          func() error { _, err := store.Replace(ctx, orders, ref[0], &edited, "me"); return err },
		"discard":          func() error { _, err := store.Discard(ctx, orders, ref, "me"); return err },
		"stats":            func() error { _, err := store.Stats(ctx, orders); return err },
	} {
		if err := call(); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: error %v, want context.Canceled", name, err)
		}
	}
	if renewals[0].Result != leasebus.ResultUnknown || settlements[0].Result != leasebus.ResultUnknown {
		t.Errorf("results %d and %d, want Unknown", renewals[0].Result, settlements[0].Result)
	}
	after := stats(t, store)
	after.OldestDueAge = 0
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("stats changed:\n%s", diff)
	}
}
