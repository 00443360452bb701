package conformance

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var processorLeaseCases = []testCase{
	{name: "S5_C1_7_C1_8_handler_that_outlives_its_lease_runs_once", run: longHandlerRunsOnce},
	{name: "S5_lease_that_waits_for_a_worker_is_kept", run: waitingLeaseIsKept},
	{name: "S6_C1_12_one_failed_renewal_cancels_nobody", run: oneFailedRenewal},
	{name: "S6_C1_11_C1_14_handler_is_cancelled_before_its_lease_can_end", needs: leaseExpiry, run: cancelledBeforeTheEnd},
	{name: "S6_S12_C1_1_C1_6_stolen_lease_cancels_the_handler_and_refuses_it", needs: leaseExpiry | fencingToken, run: stolenLease},
	{name: "S12_C1_2_stale_failure_changes_nothing", needs: leaseExpiry | fencingToken, run: staleFailure},
	{name: "S16_C2_4_settlement_waits_for_a_store_that_is_away", run: settlementWaits},
	{name: "S16_C5_6_C5_7_drain_reports_what_could_not_be_settled", run: unsettledIsReported},
	{name: "S54_C9_3_leasing_goes_on_after_a_store_was_away", run: leasingGoesOn},
	{name: "S2_C2_1_several_processors_handle_each_message_once", run: severalProcessors},
	{name: "S46_fencing_token_grows_from_attempt_to_attempt", needs: fencingToken, run: tokenGrows},
}

func longHandlerRunsOnce(t *trial) {
	id := t.publish("long")[0]
	long := func(context.Context, leasebus.Delivery, string) error {
		for begun := time.Now(); time.Since(begun) < 5*t.lease; {
			t.pause()
		}
		return nil
	}
	w, rival := t.work(long, leasebus.WithDrainTimeout(10*t.lease)), t.work(long, leasebus.WithDrainTimeout(10*t.lease))
	t.until("it was handled", func() bool { return w.Stats().Succeeded+rival.Stats().Succeeded == 1 })
	want(t, "attempts, at both workers", len(w.attemptsOf(id))+len(rival.attemptsOf(id)), 1)
	want(t, "counter LeaseLost", w.Stats().LeaseLost+rival.Stats().LeaseLost, 0)
	t.nothingLeft()
}

func waitingLeaseIsKept(t *trial) {
	slow := func(context.Context, leasebus.Delivery, string) error {
		for begun := time.Now(); time.Since(begun) < 2*t.lease; {
			t.pause()
		}
		return nil
	}
	w := t.newWorker(t.store, leasebus.WithConcurrency(1), leasebus.WithDrainTimeout(10*t.lease))
	w.register(slow)
	ids := append(t.publish("here"), w.registerSecond(slow).publish("there")...)
	w.start()
	t.until("one runs and one waits", func() bool { return w.InFlight() == 1 && w.Held() == 1 })
	w.untilSettled(2)
	for _, id := range ids {
		wantAll(t, "attempts", w.attemptsOf(id), []int{1})
	}
	want(t, "counter LeaseLost", w.Stats().LeaseLost, 0)
	want(t, "counter Leased", w.Stats().Leased, 2)
}

func oneFailedRenewal(t *trial) {
	id := t.publish("steady")[0]
	u := &unreliable{Source: t.store}
	w := t.newWorker(u)
	over := t.newGate()
	w.register(func(ctx context.Context, _ leasebus.Delivery, _ string) error {
		select {
		case <-over.open:
		case <-ctx.Done():
			t.Errorf("the handler was cancelled: %v", context.Cause(ctx))
		}
		return nil
	})
	u.noRenew.Store(true)
	w.start()
	t.until("a renewal had failed", func() bool { return u.failures.Load() > 0 })
	u.noRenew.Store(false)
	after, since := u.renewals.Load(), time.Now()
	t.until("two leases had passed, renewed", func() bool { return u.renewals.Load() > after+2 && time.Since(since) > 2*t.lease })
	over.lift()
	want(t, "outcome", w.untilSettled(1)[0].Kind, leasebus.SettleComplete)
	wantAll(t, "attempts", w.attemptsOf(id), []int{1})
	want(t, "counter LeaseLost", w.Stats().LeaseLost, 0)
}

func cancelledBeforeTheEnd(t *trial) {
	id := t.publish("cut off")[0]
	u := &unreliable{Source: t.store}
	u.noRenew.Store(true)
	w := t.newWorker(u)
	var handed, cancelled atomic.Int64
	first := t.newGate()
	w.register(func(ctx context.Context, d leasebus.Delivery, _ string) error {
		if d.Attempt() > 1 {
			return nil
		}
		handed.Store(time.Now().UnixNano())
		<-ctx.Done()
		cancelled.Store(time.Now().UnixNano())
		if cause := context.Cause(ctx); !errors.Is(cause, leasebus.ErrLeaseLost) {
			t.Errorf("cause: got %v, want one that matches ErrLeaseLost", cause)
		}
		<-first.open
		return nil // late, and said all the same
	})
	w.start()
	t.until("the handler was cancelled", func() bool { return cancelled.Load() > 0 })
	if ran := time.Duration(cancelled.Load() - handed.Load()); ran > t.lease {
		t.Errorf("without a renewal, the handler was cancelled after %v, want it before the lease of %v can end", ran, t.lease)
	}
	u.noRenew.Store(false)
	t.until("the lost lease was counted", func() bool { return w.Stats().LeaseLost == 1 })
	t.until("another attempt had been settled", func() bool { return len(w.attemptsOf(id)) == 2 && w.Stats().Succeeded == 1 })
	first.lift()
	outcomes := w.untilSettled(2)
	t.wantResult("the second attempt", outcomes[0].Result, leasebus.ResultOK)
	t.wantResult("the first attempt, late", outcomes[1].Result, leasebus.ResultLost)
	want(t, "counter PersistSkipped", w.Stats().PersistSkipped, 1)
	t.nothingLeft()
}

// stolen lets a worker lose its lease without noticing, until another has it, and returns what its handler then answers.
func (t *trial) stolen(answer error) (w *worker, heir *consumer, live *leasebus.Lease) {
	t.Helper()
	t.publish("stolen")
	u := &unreliable{Source: t.store}
	u.lies.Store(true)
	w = t.newWorker(u)
	causes := make(chan error, 1)
	w.register(func(ctx context.Context, d leasebus.Delivery, _ string) error {
		if d.Attempt() > 1 {
			t.Errorf("attempt %d was handed to the worker that lost its lease", d.Attempt())
		}
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return answer
	})
	heir = t.subscribeAs("conformance")
	// The worker has one slot, and it is taken: the expired lease goes to the heir.
	w.start()
	w.untilRuns(1)
	w.Pause()
	live = heir.takeOne()
	want(t, "attempt of the heir", live.Attempt, 2)
	u.lies.Store(false)
	if cause := <-causes; !errors.Is(cause, leasebus.ErrLeaseLost) {
		t.Errorf("cause: got %v, want one that matches ErrLeaseLost", cause)
	}
	o := w.untilSettled(1)[0]
	t.wantResult("settlement of the stale worker", o.Result, leasebus.ResultLost)
	want(t, "counter LeaseLost", w.Stats().LeaseLost, 1)
	want(t, "counter PersistSkipped", w.Stats().PersistSkipped, 1)
	t.wantResult("renewal by the heir", heir.renew(live)[0], leasebus.ResultOK)
	return w, heir, live
}

func stolenLease(t *trial) {
	w, heir, live := t.stolen(nil)
	heir.settled(retry(live, 0, "the outcome that counts"))
	want(t, "attempt", heir.takeOne().Attempt, 3)
	want(t, "counter Succeeded", w.Stats().Succeeded, 0)
}

func staleFailure(t *trial) {
	w, heir, live := t.stolen(leasebus.Permanent(errors.New("stale")))
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
	heir.complete(live)
	t.nothingLeft()
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
	want(t, "counter DeadLettered", w.Stats().DeadLettered, 0)
}

func settlementWaits(t *trial) {
	ids := t.publishMany(10)
	u := &unreliable{Source: t.store}
	u.noSettle.Store(true)
	w := t.newWorker(u)
	w.register(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.start()
	w.untilRuns(8)
	since := time.Now()
	t.until("two leases had passed with the store away", func() bool { return time.Since(since) > 2*t.lease && u.failures.Load() > 2 })
	u.noSettle.Store(false)
	for _, o := range w.untilSettled(10) {
		t.wantResult("settlement after the store was back", o.Result, leasebus.ResultOK)
	}
	for _, id := range ids {
		wantAll(t, "attempts", w.attemptsOf(id), []int{1})
	}
	t.nothingLeft()
}

func unsettledIsReported(t *trial) {
	ids := t.publishMany(3)
	u := &unreliable{Source: t.store}
	u.noSettle.Store(true)
	w := t.newWorker(u)
	w.register(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.start()
	w.untilRuns(3)
	left := w.leftBehind()
	want(t, "unsettled", left.UnsettledCount, 3)
	want(t, "abandoned", left.AbandonedCount, 0)
	wantAll(t, "unsettled ids", sorted(left.Unsettled), sorted(ids))
	again := t.subscribe().take(3) // nothing is lost
	wantAll(t, "messages that are leased again", sorted(idsOf(again)), sorted(ids))
}

func leasingGoesOn(t *trial) {
	u := &unreliable{Source: t.store}
	u.noLease.Store(true)
	w := t.newWorker(u)
	w.register(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.start()
	t.publishMany(20)
	since := time.Now()
	t.until("leasing had failed for a lease", func() bool { return time.Since(since) > t.lease && u.failures.Load() > 1 })
	if calls := u.failures.Load(); calls > 200 {
		t.Errorf("a store that was away for %v was asked %d times: that is a hot loop", time.Since(since), calls)
	}
	u.noLease.Store(false)
	w.untilSettled(20)
}

func severalProcessors(t *trial) {
	const processors, messages = 4, 400
	ids := t.publishMany(messages)
	var workers []*worker
	for range processors {
		workers = append(workers, t.work(func(context.Context, leasebus.Delivery, string) error { return nil }))
	}
	t.until("all were handled", func() bool {
		succeeded := int64(0)
		for _, w := range workers {
			succeeded += w.Stats().Succeeded
		}
		return succeeded >= messages
	})
	var handled []leasebus.ID
	for _, w := range workers {
		w.drained()
		runs, outcomes := w.recorded()
		want(t, "settlements of one processor", len(outcomes), len(runs))
		for _, r := range runs {
			handled = append(handled, r.id)
			want(t, "attempt", r.attempt, 1)
		}
	}
	if !slices.Equal(sorted(handled), sorted(ids)) {
		t.Errorf("%d handler calls for %d messages, not one for each", len(handled), messages)
	}
	t.nothingLeft()
}

func tokenGrows(t *trial) {
	t.publish("fenced")
	tokens := make(chan int64, 3)
	w := t.work(func(_ context.Context, d leasebus.Delivery, _ string) error {
		token, ok := d.FencingToken()
		if !ok {
			t.Error("the delivery has no fencing token")
		}
		tokens <- token
		return errors.New("again")
	})
	w.untilSettled(3)
	last := int64(0)
	for i := range 3 {
		token := <-tokens
		if token <= last {
			t.Errorf("token of attempt %d: got %d, want more than %d", i+1, token, last)
		}
		last = token
	}
}
