package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var processorLeaseCases = []testCase{
	{name: "S5_C1_7_C1_8_handler_that_outlives_its_lease_runs_once", brief: true, run: longHandlerRunsOnce},
	{name: "S5_lease_that_waits_for_a_worker_is_kept", brief: true, run: waitingLeaseIsKept},
	{name: "S6_C1_12_one_failed_renewal_cancels_nobody", brief: true, run: oneFailedRenewal},
	{name: "S6_C1_11_C1_14_handler_is_cancelled_before_its_lease_can_end", needs: leaseExpiry, run: cancelledBeforeTheEnd},
	{name: "S6_S12_C1_1_C1_6_stolen_lease_cancels_the_handler_and_refuses_it", needs: leaseExpiry | fencingToken, brief: true, run: stolenLease},
	{name: "S12_C1_2_stale_failure_changes_nothing", needs: leaseExpiry | fencingToken, brief: true, run: staleFailure},
	{name: "S16_C2_4_settlement_waits_for_a_store_that_is_away", brief: true, run: settlementWaits},
	{name: "S14_settlement_whose_answer_was_lost_is_unknown_not_refused", needs: fencingToken, run: lostAnswerIsUnknown},
	{name: "S16_C5_6_C5_7_drain_reports_what_could_not_be_settled", brief: true, run: unsettledIsReported},
	{name: "S13_busy_settlement_is_tried_again_and_not_lost", run: busyIsTriedAgain},
	{name: "S13_S16_drain_reports_what_stayed_busy", brief: true, run: stayedBusyIsReported},
	{name: "S15_refused_text_is_replaced_and_spoils_no_neighbour", run: refusedTextIsReplaced},
	{name: "S15_settlement_that_is_always_refused_does_not_loop", run: refusedForGood},
	{name: "S37_C5_1_C5_2_operators_cancellation_reaches_the_handler", run: cancellationReaches},
	{name: "S17_completion_in_the_handlers_transaction_counts", needs: verify, run: completedInTransaction},
	{name: "S17_transaction_that_did_not_commit_is_a_failure", needs: verify, run: uncommittedTransaction},
	{name: "S6_lease_lost_while_it_waits_is_not_started", needs: leaseExpiry | attemptsAtLease, brief: true, run: lostWhileWaiting},
	{name: "S2_slow_handlers_hoard_nothing", needs: pull, run: slowHandlersHoardNothing},
	{name: "S54_resume_goes_on_when_the_store_is_back", run: resumeGoesOn},
	{name: "S54_C9_3_leasing_goes_on_after_a_store_was_away", brief: true, run: leasingGoesOn},
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
	causes := make(chan error, 100)
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
	if cause := receive(t, "the handler's cause", causes); !errors.Is(cause, leasebus.ErrLeaseLost) {
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

func lostAnswerIsUnknown(t *trial) {
	ids := t.publishMany(5)
	u := &unreliable{Source: t.store}
	u.mute.Store(true)
	w := t.newWorker(u)
	w.register(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.start()
	t.until("an answer was lost", func() bool { return u.failures.Load() > 0 })
	w.untilRuns(5)
	t.nothingLeft()
	u.mute.Store(false)
	w.untilSettled(5)
	s := w.Stats()
	want(t, "counter Succeeded and SettleUnknown together", s.Succeeded+s.SettleUnknown, 5)
	if s.SettleUnknown == 0 {
		t.Error("counter SettleUnknown: got 0, want what was settled with its answer lost")
	}
	want(t, "counter PersistRejected", s.PersistRejected, 0)
	for _, id := range ids {
		wantAll(t, "attempts", w.attemptsOf(id), []int{1})
	}
	w.drained()
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

// oneAmong runs a processor over a way to the store that can be made to fail, for messages that all succeed but "bad",
// which fails for good. All are settled together.
func (t *trial) oneAmong(good int, u *unreliable) (w *worker, bad leasebus.ID) {
	t.Helper()
	t.publishMany(good)
	bad = t.publish("bad")[0]
	w = t.newWorker(u, leasebus.WithConcurrency(good+1), leasebus.WithSettleLinger(min(t.lease/20, 100*time.Millisecond)))
	g := t.newGate()
	w.register(func(_ context.Context, _ leasebus.Delivery, value string) error {
		<-g.open
		if value == "bad" {
			return leasebus.Permanent(errors.New("bad text"))
		}
		return nil
	})
	w.start()
	w.untilRuns(good + 1)
	g.lift()
	return w, bad
}

func busyIsTriedAgain(t *trial) {
	u := &unreliable{Source: t.store}
	u.busy.Store(true)
	w, bad := t.oneAmong(10, u)
	t.until("several settlements had found their rows locked", func() bool { return u.failures.Load() > 3 })
	u.busy.Store(false)
	for _, o := range w.untilSettled(11) {
		t.wantResult("settlement after the rows were free", o.Result, leasebus.ResultOK)
	}
	t.buriedAs(bad, leasebus.ReasonPermanent, 1, "bad text")
	want(t, "counter PersistRejected", w.Stats().PersistRejected, 0)
	want(t, "counter LeaseLost", w.Stats().LeaseLost, 0)
}

func stayedBusyIsReported(t *trial) {
	id := t.publish("locked")[0]
	u := &unreliable{Source: t.store}
	u.busy.Store(true)
	w := t.newWorker(u)
	w.register(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.start()
	t.until("the settlement had found its row locked", func() bool { return u.failures.Load() > 3 })
	left := w.leftBehind()
	want(t, "unsettled", left.UnsettledCount, 1)
	wantAll(t, "unsettled ids", left.Unsettled, []leasebus.ID{id})
}

func refusedTextIsReplaced(t *trial) {
	u := &unreliable{Source: t.store, refuses: func(s *leasebus.Settlement) bool {
		return s.Failure != nil && s.Failure.Text == "bad text"
	}}
	w, bad := t.oneAmong(40, u)
	w.untilHandled(41)
	want(t, "counter Succeeded", w.Stats().Succeeded, 40)
	want(t, "counter DeadLettered", w.Stats().DeadLettered, 1)
	d := t.buriedAs(bad, leasebus.ReasonPermanent, 1, "")
	if d.Error == "" || d.Error == "bad text" {
		t.Errorf("error of what the store refused: got %q, want a fixed text", d.Error)
	}
	if n := u.failures.Load(); n > 20 {
		t.Errorf("the store refused %d times, want about as many as it takes to halve a batch of 41", n)
	}
}

func refusedForGood(t *trial) {
	u := &unreliable{Source: t.store, refuses: func(s *leasebus.Settlement) bool { return s.Kind == leasebus.SettleDeadLetter }}
	w, bad := t.oneAmong(10, u)
	outcomes := w.untilSettled(11)
	want(t, "counter Succeeded", w.Stats().Succeeded, 10)
	want(t, "counter SettleUnknown", w.Stats().SettleUnknown, 1)
	for _, o := range outcomes {
		if o.id == bad {
			t.wantResult("result of what is always refused", o.Result, leasebus.ResultUnknown)
		}
	}
	if n := u.failures.Load(); n > 20 {
		t.Errorf("the store refused %d times: that is a loop", n)
	}
}

func cancellationReaches(t *trial) {
	t.publish("cancelled")
	u := &unreliable{Source: t.store}
	w := t.newWorker(u)
	causes := make(chan error, 100)
	w.register(func(ctx context.Context, d leasebus.Delivery, _ string) error {
		if d.Attempt() > 1 {
			return nil
		}
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return ctx.Err()
	})
	w.start()
	w.untilRuns(1)
	u.cancelled.Store(true)
	if cause := receive(t, "the handler's cause", causes); !errors.Is(cause, leasebus.ErrCancelled) || errors.Is(cause, leasebus.ErrLeaseLost) {
		t.Errorf("cause: got %v, want one that matches ErrCancelled", cause)
	}
	u.cancelled.Store(false)
	w.untilSettled(1)
}

func completedInTransaction(t *trial) {
	t.publish("committed")
	u := &unreliable{Source: t.store}
	w := t.newWorker(u)
	w.register(func(ctx context.Context, _ leasebus.Delivery, _ string) error {
		l, ok := leasebus.LeaseFrom(ctx)
		if !ok {
			t.Error("LeaseFrom finds nothing in a handler's context")
		}
		if err := l.BeginComplete(); err != nil {
			t.Errorf("begin to complete: %v", err)
		}
		if err := l.BeginComplete(); err == nil {
			t.Error("begin to complete twice: got no error")
		}
		// What the commit of the handler's transaction does.
		batch := []leasebus.Settlement{{Lease: l}}
		if err := u.feed.Load().Feed.Settle(ctx, batch); err != nil || batch[0].Result != leasebus.ResultOK {
			t.Errorf("complete: got %s and error %v, want OK", resultName(batch[0].Result), err)
		}
		committed := time.Now()
		t.until("two heartbeats had passed", func() bool { return time.Since(committed) > 2*t.policy.Lease.Heartbeat })
		if ctx.Err() != nil {
			t.Errorf("the handler was cancelled after its transaction: %v", context.Cause(ctx))
		}
		return errors.New("after the commit, which counts")
	})
	w.start()
	o := w.untilSettled(1)[0]
	want(t, "outcome", o.Kind, leasebus.SettleComplete)
	t.wantResult("result", o.Result, leasebus.ResultOK)
	want(t, "counter Succeeded", w.Stats().Succeeded, 1)
	want(t, "counter LeaseLost", w.Stats().LeaseLost, 0)
	t.nothingLeft()
}

func uncommittedTransaction(t *trial) {
	t.policy.Retry.MaxAttempts = 2
	id := t.publish("rolled back")[0]
	w := t.work(func(ctx context.Context, _ leasebus.Delivery, _ string) error {
		l, _ := leasebus.LeaseFrom(ctx)
		return l.BeginComplete() // and the transaction is rolled back, or forgotten
	})
	outcomes := w.untilSettled(2)
	want(t, "outcome of the first attempt", outcomes[0].Kind, leasebus.SettleRetry)
	t.buriedAs(id, leasebus.ReasonExhausted, 2, "commit")
	want(t, "counter Succeeded", w.Stats().Succeeded, 0)
}

func lostWhileWaiting(t *trial) {
	u := &unreliable{Source: t.store}
	w := t.newWorker(u, leasebus.WithConcurrency(1))
	g := t.newGate()
	hold := func(context.Context, leasebus.Delivery, string) error { <-g.open; return nil }
	w.register(hold)
	second := w.registerSecond(hold)
	ids := append(t.publish("here"), second.publish("there")...)
	w.start()
	t.until("one runs and one waits", func() bool { return w.InFlight() == 1 && w.Held() == 1 })
	runs, _ := w.recorded()
	waiting, id := t, ids[0]
	if runs[0].id == ids[0] {
		waiting, id = second, ids[1]
	}
	u.noRenew.Store(true)
	t.until("both leases were given up", func() bool { return w.Stats().LeaseLost == 2 })
	w.Pause()
	heir := waiting.subscribe()
	l := heir.takeOne()
	want(t, "message that is leased by another", l.ID, id)
	u.noRenew.Store(false)
	g.lift()
	w.untilSettled(1)
	heir.complete(l)
	w.drained()
	want(t, "handler calls for the one that was lost while it waited", len(w.attemptsOf(id)), 0)
}

func slowHandlersHoardNothing(t *trial) {
	const workers, slow = 4, 60
	g := t.newGate()
	defer g.lift()
	w := t.work(func(_ context.Context, _ leasebus.Delivery, value string) error {
		if value == "slow" {
			<-g.open
			return nil
		}
		time.Sleep(time.Millisecond)
		return nil
	}, leasebus.WithConcurrency(workers))
	t.publishMany(2000) // so fast that the processor looks far ahead
	w.untilHandled(2000)
	out := make([]leasebus.Outgoing, slow)
	for i := range out {
		out[i] = t.outgoing("slow")
	}
	t.send(out...)
	w.untilRuns(2000 + workers)
	other, taken := t.subscribe(), 0
	t.until(fmt.Sprintf("another had %d of %d messages whose handlers are stuck at a processor with %d workers", slow-2*workers, slow, workers), func() bool {
		leases := other.lease(slow)
		other.complete(leases...)
		taken += len(leases)
		return taken >= slow-2*workers
	})
	g.lift()
}

func resumeGoesOn(t *trial) {
	u := &unreliable{Source: t.store}
	w := t.newWorker(u)
	w.register(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.start()
	t.publish("before")
	w.untilSettled(1)
	w.Pause()
	u.noSubscribe.Store(true)
	w.Resume()
	t.until("subscribing had failed", func() bool { return u.failures.Load() > 1 })
	t.publish("meanwhile")
	u.noSubscribe.Store(false)
	w.untilSettled(2)
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
	w.untilHandled(20)
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
	tokens := make(chan int64, 100)
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
		token := receive(t, "the next attempt", tokens)
		if token <= last {
			t.Errorf("token of attempt %d: got %d, want more than %d", i+1, token, last)
		}
		last = token
	}
}
