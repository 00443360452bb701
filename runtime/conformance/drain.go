package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var drainCases = []testCase{
	{name: "S50_drain_releases_what_was_not_started_with_its_attempt", run: drainReleases},
	{name: "S50_C5_11_draining_processor_takes_no_more", run: drainingTakesNoMore},
	{name: "S50_C5_9_drain_cancels_with_the_shutdown_cause_and_refunds", brief: true, run: drainCancels},
	{name: "S50_C5_1_verdict_and_success_after_the_shutdown_count", brief: true, run: verdictsAfterShutdown},
	{name: "S50_C5_5_abandoned_handler_is_reported_and_fenced", needs: leaseExpiry, brief: true, run: abandonedIsReported},
	{name: "S25_refunds_of_started_attempts_are_capped", run: refundsAreCapped},
	{name: "S51_drain_with_a_done_context_leaves_handlers_running", run: drainWithDoneContext},
	{name: "S53_drain_several_times_and_from_a_handler", run: drainFromAHandler},
	{name: "S53_drain_in_a_pause_and_with_a_store_that_is_away", run: drainWhileAway},
	{name: "S50_S53_drain_does_not_wait_for_a_subscription_that_hangs", run: drainWhileSubscribing},
	{name: "S52_paused_processor_hands_the_same_message_over_after_resume", run: pauseKeepsMessages},
	{name: "S52_long_pause_gives_waiting_messages_back", run: longPauseGivesBack},
	{name: "S52_C5_3_pause_and_resume_under_load_lose_nothing", run: pausesUnderLoad},
}

func drainReleases(t *trial) {
	w := t.newWorker(t.store, leasebus.WithConcurrency(1))
	g := t.newGate()
	hold := func(context.Context, leasebus.Delivery, string) error { <-g.open; return nil }
	w.register(hold)
	second := w.registerSecond(hold)
	ids := append(t.publish("here"), second.publish("there")...)
	w.start()
	t.until("one runs and one waits", func() bool { return w.InFlight() == 1 && w.Held() == 1 })
	runs, _ := w.recorded()
	drained := make(chan error, 1)
	go func() { drained <- w.Drain(t.ctx) }()

	waiting := t
	if runs[0].id == ids[0] {
		waiting = second
	}
	begun := time.Now()
	l := waiting.subscribe().takeOne() // while the handler still runs
	if took := time.Since(begun); t.can(leaseExpiry) && took > t.lease*9/10 {
		t.Errorf("what the drain released was leased after %v: the lease of %v was waited for", took, t.lease)
	}
	want(t, "attempt of what was not started", l.Attempt, 1)
	want(t, "interruptions of what was not started", l.Interruptions, 0)
	g.lift()
	t.must(receive(t, "Drain to return", drained), "drain")
	want(t, "counter Succeeded", w.Stats().Succeeded, 1)
	want(t, "counter Released", w.Stats().Released, 1)
}

func drainingTakesNoMore(t *trial) {
	t.publishMany(200)
	g := t.newGate()
	w := t.work(func(context.Context, leasebus.Delivery, string) error { <-g.open; return nil }, leasebus.WithConcurrency(4))
	w.untilRuns(4)
	if err := w.Drain(t.doneContext()); !errors.Is(err, context.Canceled) { // leasing is stopped from here on
		t.Errorf("drain with a cancelled context: got %v, want an error that matches context.Canceled", err)
	}
	other := t.subscribe()
	leases := other.take(196) // all but those that run
	for _, l := range leases {
		want(t, "attempt", l.Attempt, 1)
	}
	t.publish("later")
	g.lift()
	w.drained()
	w.untilSettled(int(w.Stats().Released) + 4)
	want(t, "handler calls", len(w.untilRuns(4)), 4)
	want(t, "counter Succeeded", w.Stats().Succeeded, 4)
	want(t, "attempt of what came later", other.takeOne().Attempt, 1)
}

func drainCancels(t *trial) {
	t.policy.Retry = leasebus.NoRetry() // so that a failure would be a dead letter
	t.publish("interrupted")
	causes := make(chan error, 100)
	w := t.work(func(ctx context.Context, _ leasebus.Delivery, _ string) error {
		<-ctx.Done()
		causes <- context.Cause(ctx)
		return fmt.Errorf("query: %w", ctx.Err())
	})
	w.untilRuns(1)
	begun := time.Now()
	w.drained()
	t.notBefore("a drain with a running handler was over", begun, t.lease)
	if cause := receive(t, "the handler's cause", causes); !errors.Is(cause, leasebus.ErrShutdown) || errors.Is(cause, leasebus.ErrLeaseLost) {
		t.Errorf("cause: got %v, want one that matches ErrShutdown", cause)
	}
	l := t.subscribe().takeOne()
	want(t, "attempt", l.Attempt, 1)
	want(t, "interruptions", l.Interruptions, 1)
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
	want(t, "counter Failed", w.Stats().Failed, 0)
}

func verdictsAfterShutdown(t *trial) {
	ids := t.publish("done", "bad", "later")
	w := t.work(func(ctx context.Context, _ leasebus.Delivery, value string) error {
		<-ctx.Done()
		switch value {
		case "done":
			return nil
		case "bad":
			return leasebus.Permanent(errors.New("no use"))
		default:
			return leasebus.Defer(1000 * t.lease)
		}
	})
	w.untilRuns(3)
	w.drained()
	t.buriedAs(ids[1], leasebus.ReasonPermanent, 1, "no use")
	want(t, "counter Succeeded", w.Stats().Succeeded, 1)
	want(t, "counter Deferred", w.Stats().Deferred, 1)
	t.subscribe().nothing("one was handled, one is dead, one waits")
}

func abandonedIsReported(t *trial) {
	id := t.publish("stuck")[0]
	stuck := t.newGate()
	w := t.work(func(context.Context, leasebus.Delivery, string) error {
		<-stuck.open // whatever its context says
		return nil
	}, leasebus.WithDrainTimeout(t.lease/4), leasebus.WithDrainGrace(t.lease/4))
	w.untilRuns(1)
	begun := time.Now()
	left := w.leftBehind()
	t.notBefore("a drain with a stuck handler was over", begun, t.lease/2)
	want(t, "abandoned", left.AbandonedCount, 1)
	want(t, "unsettled", left.UnsettledCount, 0)
	wantAll(t, "abandoned ids", left.Abandoned, []leasebus.ID{id})
	l := t.subscribe().takeOne() // its lease was left to expire
	want(t, "id", l.ID, id)
	if t.can(attemptsAtLease) {
		want(t, "attempt: the abandoned one is spent", l.Attempt, 2)
	}
	stuck.lift()
	t.until("the abandoned handler had returned", func() bool { return w.Stats().AbandonedReturned == 1 })
	want(t, "counter Succeeded", w.Stats().Succeeded, 0)
	k := t.subscribe()
	k.nothing("the late success of an abandoned handler is dropped")
}

func refundsAreCapped(t *trial) {
	t.policy.Retry.Initial = t.lease / 10
	t.policy.Retry.WaitInBrokerFrom = new(time.Duration) // a consumer would forget a wait that it holds
	t.publish("longer than every deploy")
	k := t.subscribe()
	for range 10 {
		k.settled(leasebus.Settlement{Lease: k.takeOne(), Kind: leasebus.SettleRelease, Started: true})
	}
	k.leave()
	w := t.work(func(ctx context.Context, _ leasebus.Delivery, _ string) error {
		<-ctx.Done()
		return ctx.Err()
	}, leasebus.WithDrainTimeout(0))
	w.untilRuns(1)
	w.drained()
	want(t, "counter Released", w.Stats().Released, 0)
	want(t, "counter Failed", w.Stats().Failed, 1)
	want(t, "attempt after the eleventh interruption", t.subscribe().takeOne().Attempt, 2)
}

func drainWithDoneContext(t *trial) {
	t.publish("running")
	g := t.newGate()
	w := t.work(func(ctx context.Context, _ leasebus.Delivery, _ string) error { <-g.open; return ctx.Err() })
	w.untilRuns(1)
	mine := errors.New("enough waited")
	ctx, cancel := context.WithCancelCause(t.ctx)
	cancel(mine)
	var left *leasebus.DrainError
	if err := w.Drain(ctx); !errors.Is(err, mine) || errors.As(err, &left) {
		t.Errorf("drain with a done context: got %v, want an error that matches the context's cause", err)
	}
	t.publish("later")
	want(t, "message that is left for others", t.subscribe().takeOne().Attempt, 1)
	want(t, "running handlers", w.InFlight(), 1)
	g.lift()
	t.must(w.Drain(t.ctx), "drain again")
	w.drained()
	want(t, "counter Succeeded", w.Stats().Succeeded, 1)
	want(t, "handler calls", len(w.untilRuns(1)), 1)
}

func drainFromAHandler(t *trial) {
	t.publish("stop")
	w := t.newWorker(t.store)
	answer := make(chan error, 100)
	w.register(func(ctx context.Context, _ leasebus.Delivery, _ string) error {
		answer <- w.Drain(ctx)
		return nil
	})
	w.start()
	if err := receive(t, "the handler's drain", answer); !errors.Is(err, leasebus.ErrDrainStarted) {
		t.Errorf("drain from a handler: got %v, want ErrDrainStarted", err)
	}
	t.must(receive(t, "Run to return", w.ran), "run, after a handler asked for a drain")
	w.ran <- nil
	var callers sync.WaitGroup
	for range 3 {
		callers.Go(func() {
			if err := w.Drain(t.ctx); err != nil {
				t.Errorf("drain of a drained processor: %v", err)
			}
		})
	}
	callers.Wait()
	want(t, "counter Succeeded", w.Stats().Succeeded, 1)
	t.nothingLeft()
}

func drainWhileAway(t *trial) {
	u := &unreliable{Source: t.store}
	w := t.newWorker(u)
	w.register(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.start()
	t.publish("before")
	w.untilSettled(1)
	w.Pause()
	u.noSubscribe.Store(true)
	w.Resume()
	t.until("subscribing had failed", func() bool { return u.failures.Load() > 0 })
	w.drained()
	w.Pause()
	w.Resume() // after the end, neither does anything
	t.publish("after")
	want(t, "attempt of what came later", t.subscribe().takeOne().Attempt, 1)
	want(t, "handler calls", len(w.untilRuns(1)), 1)
}

func drainWhileSubscribing(t *trial) {
	u := &unreliable{Source: t.store}
	w := t.newWorker(u)
	w.register(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.start()
	t.publish("before")
	w.untilSettled(1)
	w.Pause()
	g := t.newGate()
	defer g.lift()
	u.hang.Store(g)
	w.Resume()
	t.until("subscribing had begun", func() bool { return u.failures.Load() > 0 })
	drained := make(chan error, 1)
	go func() { drained <- w.Drain(t.ctx) }()
	select {
	case err := <-drained:
		t.must(err, "drain")
	case <-time.After(t.patience()):
		t.Errorf("a drain, which is to end in %v, still waits after %v for a subscription that hangs", 2*t.lease, t.patience())
	}
}

func pauseKeepsMessages(t *trial) {
	g := t.newGate()
	w := t.newWorker(t.store, leasebus.WithConcurrency(1))
	w.register(func(context.Context, leasebus.Delivery, string) error { <-g.open; return nil })
	w.start()
	first := t.publish("running")
	w.untilRuns(1)
	second := t.publish("waiting")
	want(t, "running", w.InFlight(), 1)
	w.Pause()
	w.Pause() // twice is once
	g.lift()
	w.untilSettled(1) // running handlers go on
	sentinel := t.subscribe()
	l := sentinel.takeOne() // others go on too
	want(t, "message left for others", l.ID, second[0])
	want(t, "attempt", l.Attempt, 1)
	sentinel.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRelease})
	t.must(sentinel.Stop(t.ctx), "stop")
	want(t, "handler calls in a pause", len(w.untilRuns(1)), 1)
	w.Resume()
	w.Resume()
	w.untilSettled(2)
	wantAll(t, "attempts of the first message", w.attemptsOf(first[0]), []int{1})
	wantAll(t, "attempts of the same message after the pause", w.attemptsOf(second[0]), []int{1})
	want(t, "held", w.Held(), 0)
}

func longPauseGivesBack(t *trial) {
	g := t.newGate()
	w := t.newWorker(t.store, leasebus.WithConcurrency(1))
	hold := func(context.Context, leasebus.Delivery, string) error { <-g.open; return nil }
	w.register(hold)
	second := w.registerSecond(hold)
	ids := append(t.publish("here"), second.publish("there")...)
	w.start()
	t.until("one runs and one waits", func() bool { return w.InFlight() == 1 && w.Held() == 1 })
	w.Pause()
	runs, _ := w.recorded()
	waiting := t
	if runs[0].id == ids[0] {
		waiting = second
	}
	k := waiting.subscribe()
	l := k.takeOne()
	want(t, "attempt of what a long pause gave back", l.Attempt, 1)
	want(t, "interruptions of what a long pause gave back", l.Interruptions, 0)
	k.leave()
	g.lift()
	w.untilSettled(2)
	w.Resume()
	t.publish("after the pause")
	w.untilSettled(3)
	want(t, "counter Released", w.Stats().Released, 1)
}

func pausesUnderLoad(t *trial) {
	const messages = 300
	ids := t.publishMany(messages)
	var handled atomic.Int64
	w := t.work(func(context.Context, leasebus.Delivery, string) error {
		handled.Add(1)
		time.Sleep(t.lease / 1000)
		return nil
	})
	for i := range 10 {
		t.until("some more were handled", func() bool { return handled.Load() >= int64(min((i+1)*messages/12, messages)) })
		w.Pause()
		if i%2 == 0 {
			paused := time.Now()
			t.until("the pause was longer than a heartbeat", func() bool { return time.Since(paused) > t.policy.Lease.Heartbeat*3/2 })
		}
		w.Resume()
	}
	t.until("all were handled", func() bool { return w.Stats().Succeeded == messages })
	for _, id := range ids {
		wantAll(t, "attempts", w.attemptsOf(id), []int{1})
	}
	w.drained()
	t.nothingLeft()
}
