package memory_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestSettle_WhatEachKindLeaves(t *testing.T) {
	const minute = time.Minute
	for _, tt := range []struct {
		settlement leasebus.Settlement
		want       leasebus.QueueStats
		// Of the next lease, if there is one.
		wait                   time.Duration
		attempt, interruptions int
	}{
		{settlement: leasebus.Settlement{Kind: leasebus.SettleComplete}},
		{
			settlement: leasebus.Settlement{Kind: leasebus.SettleRetry, Delay: minute, Failure: failure("x")},
			want:       leasebus.QueueStats{Failed: 1}, wait: minute, attempt: 2,
		},
		{
			settlement: leasebus.Settlement{Kind: leasebus.SettleRetry, Delay: -minute},
			want:       leasebus.QueueStats{Failed: 1, Due: 1}, attempt: 2,
		},
		{
			settlement: leasebus.Settlement{Kind: leasebus.SettleDefer, Delay: minute},
			want:       leasebus.QueueStats{Pending: 1}, wait: minute, attempt: 1,
		},
		{
			settlement: leasebus.Settlement{Kind: leasebus.SettleDefer, Delay: -minute},
			want:       leasebus.QueueStats{Pending: 1, Due: 1}, attempt: 1,
		},
		{
			settlement: leasebus.Settlement{Kind: leasebus.SettleRelease},
			want:       leasebus.QueueStats{Pending: 1, Due: 1}, attempt: 1,
		},
		{
			settlement: leasebus.Settlement{Kind: leasebus.SettleRelease, Started: true, Delay: minute},
			want:       leasebus.QueueStats{Pending: 1, Due: 1}, attempt: 1, interruptions: 1,
		},
		{
			settlement: leasebus.Settlement{Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonPermanent},
			want:       leasebus.QueueStats{DeadLettered: 1},
		},
		{settlement: leasebus.Settlement{Kind: leasebus.SettleDiscard, Reason: leasebus.ReasonPermanent}},
		{settlement: leasebus.Settlement{Kind: leasebus.SettleVerify}, want: leasebus.QueueStats{Processing: 1}},
	} {
		t.Run(fmt.Sprintf("%v after %v, started %t", tt.settlement.Kind, tt.settlement.Delay, tt.settlement.Started), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				c := subscribe(t, store, "a#1")
				publishText(t, store, "m")
				first := c.one()
				tt.settlement.Lease = first
				want := leasebus.ResultOK
				if tt.settlement.Kind == leasebus.SettleVerify {
					want = leasebus.ResultStillLeased
				}
				if got := c.settle(tt.settlement); got != want {
					t.Fatalf("result %d, want %d", got, want)
				}
				wantStats(t, store, tt.want)
				if tt.attempt == 0 {
					store.Advance(lease - 1)
					c.none()
					return
				}
				if tt.wait > 0 { // S24
					time.Sleep(tt.wait - 1)
					c.none()
					time.Sleep(1)
				}
				next := c.one()
				if next.Attempt != tt.attempt || next.Interruptions != tt.interruptions || next.Generation != first.Generation+1 || next.Crashed {
					t.Errorf("attempt %d, interruptions %d, generation %d, crashed %t; want %d, %d, %d, false",
						next.Attempt, next.Interruptions, next.Generation, next.Crashed, tt.attempt, tt.interruptions, first.Generation+1)
				}
			})
		})
	}
}

func TestSettle_S12_OneEndForEachLease(t *testing.T) {
	t.Parallel()
	const rivals, rounds = 8, 200
	store := memory.New()
	c := subscribe(t, store, "a#1")
	for range rounds {
		publishText(t, store, "m")
		l := c.one()
		var (
			wg   sync.WaitGroup
			wins atomic.Int32
		)
		for i := range rivals {
			wg.Go(func() {
				kind := leasebus.SettleComplete
				if i%2 == 0 {
					kind = leasebus.SettleDeadLetter
				}
				batch := []leasebus.Settlement{{Lease: l, Kind: kind}}
				if err := c.feed.Settle(context.Background(), batch); err != nil {
					t.Errorf("settle: %v", err)
				}
				if batch[0].Result == leasebus.ResultOK {
					wins.Add(1)
				}
				if err := c.feed.Renew(context.Background(), []leasebus.Renewal{{Lease: l}}); err != nil {
					t.Errorf("renew: %v", err)
				}
			})
		}
		wg.Wait()
		if wins.Load() != 1 {
			t.Fatalf("%d settlements of one lease were accepted, want 1", wins.Load())
		}
	}
}

func TestSettle_S15_OneElementDoesNotSpoilItsNeighbours(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	publishText(t, store, "1", "2", "3", "4")
	l := c.lease(4)
	c.mustSettle(leasebus.Settlement{Lease: l[1], Kind: leasebus.SettleComplete})
	batch := []leasebus.Settlement{
		{Lease: l[0], Kind: leasebus.SettleComplete},
		{Lease: l[1], Kind: leasebus.SettleRetry, Failure: failure("late")},
		{Lease: l[2], Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonPermanent},
		{Lease: l[2], Kind: leasebus.SettleComplete},
		{Lease: l[3], Kind: leasebus.SettleDefer, Delay: time.Minute},
	}
	if err := c.feed.Settle(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	var got []leasebus.Result
	for _, s := range batch {
		got = append(got, s.Result)
	}
	want := []leasebus.Result{leasebus.ResultOK, leasebus.ResultLost, leasebus.ResultOK, leasebus.ResultLost, leasebus.ResultOK}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	wantStats(t, store, leasebus.QueueStats{DeadLettered: 1, Pending: 1})
	if err := c.feed.Settle(t.Context(), nil); err != nil {
		t.Errorf("an empty batch: %v", err)
	}
}

func TestSettle_ReleasedGoInFrontInTheirOrder(t *testing.T) {
	t.Parallel()
	store := memory.New()
	a, b := subscribe(t, store, "a#1"), subscribe(t, store, "b#2")
	publishText(t, store, "1", "2", "3", "4", "5")
	l := a.lease(4)
	var batch []leasebus.Settlement
	for _, held := range l[1:] {
		batch = append(batch, leasebus.Settlement{Lease: held, Kind: leasebus.SettleRelease})
	}
	if err := a.feed.Settle(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	wantPayloads(t, b.lease(9), "2", "3", "4", "5")
}

func TestSettle_VerifyTellsTheEndsApart(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	publishText(t, store, "1", "2", "3")
	l := c.lease(3)
	c.mustSettle(leasebus.Settlement{Lease: l[0], Kind: leasebus.SettleComplete})
	c.mustSettle(leasebus.Settlement{Lease: l[1], Kind: leasebus.SettleDeadLetter})
	for i, want := range []leasebus.Result{leasebus.ResultOK, leasebus.ResultLost, leasebus.ResultStillLeased} {
		if got := c.settle(leasebus.Settlement{Lease: l[i], Kind: leasebus.SettleVerify}); got != want {
			t.Errorf("message %d: result %d, want %d", i+1, got, want)
		}
	}
}

func TestSettle_S27_S29_ADeadLetterKeepsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		out := message("body")
		out.Headers = leasebus.NewHeaders(map[string]string{"tenant": "a"})
		out.IdempotencyKey, out.OrderingKey = "order 7", "customer 3"
		publish(t, store, out)
		start := time.Now().UTC()

		first, second := subscribe(t, store, "first#1"), subscribe(t, store, "second#2")
		time.Sleep(time.Second)
		f1 := leasebus.Failure{Attempt: 1, Text: "no stock", ErrorType: "*stock.Error"}
		first.mustSettle(leasebus.Settlement{Lease: first.one(), Kind: leasebus.SettleRetry, Delay: time.Second, Failure: &f1})
		time.Sleep(time.Second)
		f2 := leasebus.Failure{Attempt: 2, Text: "still no stock", ErrorType: "*stock.Error"}
		second.mustSettle(leasebus.Settlement{
			Lease: second.one(), Kind: leasebus.SettleDeadLetter, Failure: &f2,
			Reason: leasebus.ReasonExhausted, DeadLetterQueue: "orders.dlq", Attempts: 2,
		})

		want := out.Envelope
		want.FirstDue = start
		got := deadLetters(t, store, leasebus.Filter{})
		diff := cmp.Diff([]leasebus.DeadLetter{{
			Envelope: want, Cursor: "1", DeadLetterQueue: "orders.dlq", Reason: leasebus.ReasonExhausted,
			Error: "still no stock", ErrorType: "*stock.Error", Attempts: 2, Generation: 2,
			FirstFailed: start.Add(time.Second), DeadLetteredAt: start.Add(2 * time.Second), LastOwner: "second#2",
			History: []leasebus.FailureRecord{
				{Failure: f1, At: start.Add(time.Second), Owner: "first#1"},
				{Failure: f2, At: start.Add(2 * time.Second), Owner: "second#2"},
			},
		}}, got, cmp.Comparer(func(a, b leasebus.Headers) bool { return string(a.Encoded()) == string(b.Encoded()) }))
		if diff != "" {
			t.Errorf("dead letters (-want +got):\n%s", diff)
		}
		if zone := got[0].DeadLetteredAt.Location(); zone != time.UTC {
			t.Errorf("dead-lettered at a time in %v, want UTC", zone)
		}
		wantStats(t, store, leasebus.QueueStats{DeadLettered: 1})
	})
}

func TestSettle_S29_ADeadLetterWithoutAFailureShowsTheLastOne(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	publishText(t, store, "crashed at once", "failed, then crashed")
	l := c.lease(2)
	c.mustSettle(leasebus.Settlement{Lease: l[1], Kind: leasebus.SettleRetry, Failure: failure("earlier")})
	c.mustSettle(leasebus.Settlement{Lease: l[0], Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonCrashed})
	c.mustSettle(leasebus.Settlement{Lease: c.one(), Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonCrashed})
	d := deadLetters(t, store, leasebus.Filter{})
	if d[0].Error != "" || !d[0].FirstFailed.IsZero() || d[1].Error != "earlier" || d[1].FirstFailed.IsZero() {
		t.Errorf("errors %q and %q, first failed %v and %v", d[0].Error, d[1].Error, d[0].FirstFailed, d[1].FirstFailed)
	}
}

func TestSettle_S29_HistoryKeepsTheNewest(t *testing.T) {
	t.Parallel()
	const failures = leasebus.HistoryLimit + 5
	store := memory.New()
	c := subscribe(t, store, "a#1")
	publishText(t, store, "m")
	for i := range failures {
		kind := leasebus.SettleRetry
		if i == failures-1 {
			kind = leasebus.SettleDeadLetter
		}
		c.mustSettle(leasebus.Settlement{Lease: c.one(), Kind: kind, Failure: failure(fmt.Sprint(i))})
	}
	d := deadLetters(t, store, leasebus.Filter{})[0]
	if len(d.History) != leasebus.HistoryLimit || d.History[0].Text != "5" || d.Error != fmt.Sprint(failures-1) {
		t.Errorf("%d records from %q, last error %q; want %d from 5, %d", len(d.History), d.History[0].Text, d.Error, leasebus.HistoryLimit, failures-1)
	}
	if first := d.History[0].At; !d.FirstFailed.Before(first) {
		t.Errorf("first failed %v, not before the oldest record kept %v", d.FirstFailed, first)
	}
}

func TestRetain_CompletedForAsLongAsThePolicySays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		c := subscribe(t, store, "a#1", func(p *leasebus.Policy) { p.RetainCompleted = time.Hour })
		publishText(t, store, "1", "2")
		l := c.lease(2)
		c.mustSettle(leasebus.Settlement{Lease: l[0], Kind: leasebus.SettleComplete})
		time.Sleep(30 * time.Minute)
		c.mustSettle(leasebus.Settlement{Lease: l[1], Kind: leasebus.SettleComplete})
		wantStats(t, store, leasebus.QueueStats{Completed: 2})
		time.Sleep(30 * time.Minute)
		wantStats(t, store, leasebus.QueueStats{Completed: 1})
		time.Sleep(30 * time.Minute)
		wantStats(t, store, leasebus.QueueStats{})
	})
}

func TestRetain_S31_DeadLettersForEverUnlessThePolicySays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		c := subscribe(t, store, "a#1")
		publishText(t, store, "1", "2")
		l := c.lease(2)
		c.mustSettle(leasebus.Settlement{Lease: l[0], Kind: leasebus.SettleDeadLetter})
		time.Sleep(20 * time.Second)
		c.mustSettle(leasebus.Settlement{Lease: l[1], Kind: leasebus.SettleDeadLetter})
		store.Advance(50 * 365 * 24 * time.Hour)
		wantStats(t, store, leasebus.QueueStats{DeadLettered: 2})

		subscribe(t, store, "b#2", func(p *leasebus.Policy) { p.DeadLetter.Retention = 50*365*24*time.Hour + 10*time.Second })
		if d := deadLetters(t, store, leasebus.Filter{}); len(d) != 1 || string(d[0].Payload) != "2" {
			t.Errorf("%d dead letters are left, want the second one", len(d))
		}
		wantStats(t, store, leasebus.QueueStats{DeadLettered: 1})
		time.Sleep(10 * time.Second)
		wantStats(t, store, leasebus.QueueStats{})
	})
}
