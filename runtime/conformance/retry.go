package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var retryCases = []testCase{
	{name: "S21_fixed_delays_are_kept_by_the_store", brief: true, run: func(t *trial) {
		t.policy.Retry = leasebus.FixedRetry(4, t.lease/5)
		t.schedule(1, 1, 1)
	}},
	{name: "S21_exponential_delays_are_kept_by_the_store", brief: true, run: func(t *trial) {
		t.policy.Retry = leasebus.ExponentialRetry(6, t.lease/5, t.lease*4/5, 2)
		t.schedule(1, 2, 4, 4, 4)
	}},
	{name: "S22_jitter_stays_in_its_range", brief: true, run: jitterStaysInRange},
	{name: "S23_message_too_old_to_retry_has_expired", run: tooOldIsExpired},
	{name: "S23_requeue_restarts_the_age", run: requeueRestartsTheAge},
	{name: "S26_C4_9_failing_message_holds_up_no_other", run: failingHoldsNobodyUp},
	{name: "S7_handler_timeout_is_a_failure_with_its_own_cause", brief: true, run: timeoutIsAFailure},
	{name: "S11_C1_15_handler_that_ignores_its_timeout_is_abandoned", run: stuckHandlerIsAbandoned},
}

// schedule lets a message fail until its attempts are spent, and checks the delays, counted in fifths of a lease.
func (t *trial) schedule(fifths ...int) {
	t.Helper()
	t.policy.Retry.Jitter = 0
	id := t.publish("failing")[0]
	w := t.work(func(context.Context, leasebus.Delivery, string) error { return errors.New("no") })
	outcomes := w.untilSettled(len(fifths) + 1)
	runs, _ := w.recorded()
	for i, n := range fifths {
		right := time.Duration(n) * (t.lease / 5)
		want(t, fmt.Sprintf("delay after attempt %d", i+1), outcomes[i].Delay, right)
		if gap := runs[i+1].at.Sub(runs[i].at); gap < right {
			t.Errorf("attempt %d came %v after the one before, want at least %v", i+2, gap, right)
		}
	}
	t.buriedAs(id, leasebus.ReasonExhausted, len(fifths)+1, "no")
}

func jitterStaysInRange(t *trial) {
	t.policy.Retry = leasebus.FixedRetry(2, t.lease/2)
	t.publishMany(50)
	w := t.work(func(_ context.Context, d leasebus.Delivery, _ string) error {
		if d.Attempt() == 1 {
			return errors.New("no")
		}
		return nil
	})
	seen := make(map[time.Duration]bool)
	for _, o := range w.untilHandled(100) {
		if o.Kind != leasebus.SettleRetry {
			continue
		}
		seen[o.Delay] = true
		if d := t.lease / 2; o.Delay < d*8/10 || o.Delay > d*12/10 {
			t.Errorf("delay: got %v, want %v and a fifth of it to both sides", o.Delay, d)
		}
	}
	if len(seen) < 10 {
		t.Errorf("50 delays took %d different values: they meet again", len(seen))
	}
}

func tooOldIsExpired(t *trial) {
	t.policy.Retry = leasebus.FixedRetry(1000, t.lease/4)
	t.policy.Retry.Jitter, t.policy.Retry.GiveUpAfter = 0, t.lease
	sent := time.Now()
	id := t.publish("failing")[0]
	w := t.work(func(context.Context, leasebus.Delivery, string) error { return errors.New("no") })
	d := t.takeDeadLetters(1)[0]
	t.notBefore("a message was too old", sent.Add(-clockSlack), t.lease)
	want(t, "dead letter", d.ID, id)
	want(t, "reason", d.Reason, leasebus.ReasonExpired)
	want(t, "attempts", d.Attempts, len(w.attemptsOf(id)))
	if d.Attempts < 2 || d.Attempts > 5 {
		t.Errorf("attempts: got %d, want 2 to 5 in four delays' time", d.Attempts)
	}
}

func requeueRestartsTheAge(t *trial) {
	t.policy.Retry = leasebus.FixedRetry(2, t.lease/10)
	t.policy.Retry.GiveUpAfter = t.lease
	id := t.publish("failing")[0]
	published := time.Now()
	w := t.work(func(context.Context, leasebus.Delivery, string) error { return errors.New("no") })
	t.buriedAs(id, leasebus.ReasonExhausted, 2, "no")
	t.until("the message was too old", func() bool { return time.Since(published) > t.lease+clockSlack })
	t.requeue(leasebus.DeadLetterRef{ID: id})
	w.untilSettled(4)
	t.buriedAs(id, leasebus.ReasonExhausted, 2, "no")
}

func failingHoldsNobodyUp(t *trial) {
	t.policy.Retry.Initial = 1000 * t.lease
	t.publish("bad")
	good := t.publishMany(10)
	w := t.work(func(_ context.Context, _ leasebus.Delivery, value string) error {
		if value == "bad" {
			return errors.New("no")
		}
		return nil
	}, leasebus.WithConcurrency(1))
	// A slow machine may have the processor give back what waits, so that settlements are not counted.
	t.until("everything was handled", func() bool { return w.Stats().Succeeded == int64(len(good)) && w.Stats().Failed == 1 })
}

func timeoutIsAFailure(t *trial) {
	t.policy.Timeout = t.lease / 2
	t.policy.Retry.MaxAttempts = 2
	id := t.publish("slow")[0]
	causes := make(chan error, 100)
	w := t.work(func(ctx context.Context, _ leasebus.Delivery, _ string) error {
		begun := time.Now()
		deadline, ok := ctx.Deadline()
		if !ok || deadline.Sub(begun) > t.policy.Timeout {
			t.Errorf("the handler's deadline is %v away (set: %v), want at most %v", deadline.Sub(begun), ok, t.policy.Timeout)
		}
		<-ctx.Done()
		t.notBefore("the handler timed out", begun.Add(-clockSlack), t.policy.Timeout)
		causes <- context.Cause(ctx)
		return ctx.Err()
	})
	w.untilSettled(2)
	for range 2 {
		if cause := receive(t, "the handler's cause", causes); !errors.Is(cause, leasebus.ErrHandlerTimeout) || errors.Is(cause, leasebus.ErrLeaseLost) {
			t.Errorf("cause: got %v, want one that matches ErrHandlerTimeout", cause)
		}
	}
	t.buriedAs(id, leasebus.ReasonExhausted, 2, leasebus.ErrHandlerTimeout.Error())
	want(t, "counter LeaseLost", w.Stats().LeaseLost, 0)
	want(t, "counter Abandoned", w.Stats().Abandoned, 0)
}

func stuckHandlerIsAbandoned(t *trial) {
	t.policy.Timeout = t.lease / 4
	t.policy.Retry = leasebus.NoRetry()
	ids := t.publish("stuck", "after")
	stuck := t.newGate()
	w := t.work(func(_ context.Context, _ leasebus.Delivery, value string) error {
		if value == "stuck" {
			<-stuck.open // whatever its context says
		}
		return nil
	}, leasebus.WithConcurrency(1), leasebus.WithDrainGrace(t.lease/4))
	w.untilSettled(2) // its slot went to another worker
	t.buriedAs(ids[0], leasebus.ReasonExhausted, 1, leasebus.ErrHandlerTimeout.Error())
	want(t, "handler calls for the message behind it", len(w.attemptsOf(ids[1])), 1)
	want(t, "counter Abandoned", w.Stats().Abandoned, 1)
	stuck.lift()
	t.until("the abandoned handler had returned", func() bool { return w.Stats().AbandonedReturned == 1 })
	w.untilSettled(2) // its late success changed nothing
	want(t, "dead letters", len(t.takeDeadLetters(1)), 1)
	t.publish("one more")
	w.untilSettled(3)
}
