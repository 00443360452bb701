package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"strings"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var verdictCases = []testCase{
	{name: "S19_C4_10_failing_message_is_retried_then_dead_lettered_once", run: failingIsDeadLettered},
	{name: "S19_permanent_error_is_dead_lettered_at_once", run: permanentIsDeadLettered},
	{name: "S28_invalid_message_takes_the_invalid_route", run: invalidTakesItsRoute},
	{name: "S28_discarded_message_leaves_nothing", run: optOutDiscards},
	{name: "S19_retry_after_replaces_the_policys_delay", run: retryAfterReplaces},
	{name: "S19_C4_7_deferred_message_spends_no_attempt", brief: true, run: deferSpendsNothing},
	{name: "S19_C6_11_undecodable_body_is_invalid_and_not_handled", run: undecodableIsInvalid},
	{name: "S19_message_that_fails_validation_is_invalid", run: validationFails},
	{name: "S20_C6_11_unknown_type_is_deferred_then_dead_lettered", brief: true, run: unknownTypeIsDeferred},
	{name: "S20_unknown_type_waits_for_a_worker_that_knows_it", brief: true, run: unknownTypeWaits},
	{name: "S60_message_under_a_former_name_is_handled", run: aliasIsHandled},
	{name: "S18_C2_11_panic_and_goexit_are_failures", run: panicIsAFailure},
	{name: "S18_C2_11_error_whose_methods_panic_is_a_failure", run: rudeErrorIsAFailure},
	{name: "S7_C5_1_cancellation_of_the_handlers_own_is_a_failure", run: ownCancellation},
	{name: "S10_C2_7_crash_looping_message_is_dead_lettered", needs: leaseExpiry | attemptsAtLease, brief: true, run: crashLoopIsDeadLettered},
	{name: "S10_message_whose_attempts_were_spent_elsewhere_is_exhausted", needs: attemptsAtLease, run: spentElsewhere},
	{name: "S15_C3_1_C3_2_C3_3_NUL_in_an_error_spoils_no_neighbour", run: nulInAnError},
}

// buriedAs waits for the one dead letter there is to be, and checks why it is one.
func (t *trial) buriedAs(id leasebus.ID, reason leasebus.Reason, attempts int, text string) leasebus.DeadLetter {
	t.Helper()
	d := t.takeDeadLetters(1)[0]
	want(t, "dead letter", d.ID, id)
	want(t, "reason", d.Reason, reason)
	want(t, "attempts", d.Attempts, attempts)
	if !strings.Contains(d.Error, text) {
		t.Errorf("error: got %q, want one that contains %q", d.Error, text)
	}
	return d
}

func failingIsDeadLettered(t *trial) {
	id := t.publish("bad")[0]
	w := t.work(func(_ context.Context, d leasebus.Delivery, _ string) error {
		return fmt.Errorf("attempt %d failed", d.Attempt())
	})
	outcomes := w.untilSettled(3)
	wantAll(t, "attempts handled", w.attemptsOf(id), []int{1, 2, 3})
	for i, kind := range []leasebus.SettlementKind{leasebus.SettleRetry, leasebus.SettleRetry, leasebus.SettleDeadLetter} {
		want(t, fmt.Sprintf("outcome of attempt %d", i+1), outcomes[i].Kind, kind)
		t.wantResult(fmt.Sprintf("result of attempt %d", i+1), outcomes[i].Result, leasebus.ResultOK)
	}
	d := t.buriedAs(id, leasebus.ReasonExhausted, 3, "attempt 3 failed")
	want(t, "dead-letter queue", d.DeadLetterQueue, t.policy.DeadLetter.Queue)
	want(t, "error type", d.ErrorType, "*errors.errorString")
	if t.can(operate) {
		want(t, "failures in the history", len(d.History), 3)
		if !strings.HasPrefix(d.LastOwner, "conformance#") {
			t.Errorf("last owner: got %q, want the processor's label and a random part", d.LastOwner)
		}
	}
	t.nothingLeft()
	s := w.Stats()
	want(t, "counter Failed", s.Failed, 2)
	want(t, "counter DeadLettered", s.DeadLettered, 1)
	want(t, "counter Leased", s.Leased, 3)
}

func permanentIsDeadLettered(t *trial) {
	id := t.publish("bad")[0]
	w := t.work(func(context.Context, leasebus.Delivery, string) error {
		return fmt.Errorf("while paying: %w", leasebus.Permanent(errors.New("card stolen")))
	})
	w.untilSettled(1)
	t.buriedAs(id, leasebus.ReasonPermanent, 1, "card stolen")
	want(t, "handler calls", len(w.attemptsOf(id)), 1)
}

func invalidTakesItsRoute(t *trial) {
	t.policy.DeadLetter.InvalidQueue = t.queue + leasebus.InvalidSuffix
	id := t.publish("bad")[0]
	w := t.work(func(context.Context, leasebus.Delivery, string) error {
		return leasebus.Invalid(errors.New("no customer"))
	})
	w.untilSettled(1)
	d := t.buriedAs(id, leasebus.ReasonInvalid, 1, "no customer")
	want(t, "dead-letter queue", d.DeadLetterQueue, t.queue+leasebus.InvalidSuffix)
}

func optOutDiscards(t *trial) {
	t.policy.DeadLetter = leasebus.DeadLetterPolicy{Discard: true}
	t.publish("bad")
	w := t.work(func(context.Context, leasebus.Delivery, string) error {
		return leasebus.Permanent(errors.New("no use"))
	})
	w.untilSettled(1)
	t.nothingLeft()
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
	want(t, "counter Discarded", w.Stats().Discarded, 1)
}

func retryAfterReplaces(t *trial) {
	t.policy.Retry.Initial = 1000 * t.lease
	t.policy.Retry.MaxAttempts = 2
	id := t.publish("busy")[0]
	w := t.work(func(context.Context, leasebus.Delivery, string) error {
		return leasebus.RetryAfter(t.lease/2, errors.New("too many requests"))
	})
	outcomes := w.untilSettled(2)
	want(t, "delay", outcomes[0].Delay, t.lease/2)
	runs, _ := w.recorded()
	if gap := runs[1].at.Sub(runs[0].at); gap < t.lease/2 {
		t.Errorf("the second attempt came after %v, want at least %v", gap, t.lease/2)
	}
	t.buriedAs(id, leasebus.ReasonExhausted, 2, "too many requests") // the limit holds
}

func deferSpendsNothing(t *trial) {
	t.policy.Retry = leasebus.NoRetry()
	const deferrals = 20
	id := t.publish("not yet")[0]
	calls := 0
	w := t.work(func(context.Context, leasebus.Delivery, string) error {
		if calls++; calls <= deferrals {
			return leasebus.Defer(t.lease / 50)
		}
		return nil
	}, leasebus.WithConcurrency(1))
	w.untilSettled(deferrals + 1)
	for _, attempt := range w.attemptsOf(id) {
		want(t, "attempt", attempt, 1)
	}
	want(t, "counter Deferred", w.Stats().Deferred, deferrals)
	want(t, "counter Succeeded", w.Stats().Succeeded, 1)
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
	t.nothingLeft()
}

func undecodableIsInvalid(t *trial) {
	bad := t.outgoing("")
	bad.Payload = []byte{0xff, 0xff, 0x00}
	t.send(bad)
	good := t.publish("good")[0]
	w := t.work(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.untilSettled(2)
	d := t.buriedAs(bad.ID, leasebus.ReasonInvalid, 1, typeName)
	wantAll(t, "payload of the dead letter", d.Payload, bad.Payload)
	want(t, "handler calls for what cannot be decoded", len(w.attemptsOf(bad.ID)), 0)
	want(t, "handler calls for its neighbour", len(w.attemptsOf(good)), 1)
}

func validationFails(t *trial) {
	ids := t.publish("bad", "good")
	w := t.work(func(context.Context, leasebus.Delivery, string) error { return nil },
		leasebus.WithValidator(func(_ context.Context, d leasebus.Delivery) error {
			if d.ID() == ids[0] {
				return errors.New("value is not allowed")
			}
			return nil
		}))
	w.untilSettled(2)
	t.buriedAs(ids[0], leasebus.ReasonInvalid, 1, "value is not allowed")
	want(t, "handler calls for what fails validation", len(w.attemptsOf(ids[0])), 0)
}

func unknownTypeIsDeferred(t *trial) {
	unknown := t.outgoing("from the future")
	unknown.Type = "future.v2.Message"
	good := t.publish("good")[0]
	patience := min(4*t.lease, 10*time.Second) // less than after which it would be looked at again
	w := t.work(func(context.Context, leasebus.Delivery, string) error { return nil }, leasebus.WithUnhandledAfter(patience))
	w.untilSettled(1) // it works by now, so that it sees the next one in time
	sent := time.Now()
	t.send(unknown)
	w.untilSettled(3)
	t.notBefore("a message of an unknown type was dead-lettered", sent, patience)
	d := t.buriedAs(unknown.ID, leasebus.ReasonUnhandledType, 0, "future.v2.Message")
	want(t, "type of the dead letter", d.Type, unknown.Type)
	want(t, "counter Deferred", w.Stats().Deferred, 1)
	want(t, "handler calls for its neighbour", len(w.attemptsOf(good)), 1)
}

func unknownTypeWaits(t *trial) {
	out := t.outgoing("renamed")
	out.Type = "new.v2.Name"
	t.send(out)
	old := t.work(func(context.Context, leasebus.Delivery, string) error { return nil }, leasebus.WithUnhandledAfter(t.lease))
	old.untilSettled(1)
	old.drained()
	t.policy.Aliases = []string{out.Type}
	w := t.work(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.untilSettled(1)
	wantAll(t, "attempts at the worker that knows the type", w.attemptsOf(out.ID), []int{1})
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
}

func aliasIsHandled(t *trial) {
	t.policy.Aliases = []string{"old.v1.Name"}
	out := t.outgoing("renamed")
	out.Type = "old.v1.Name"
	t.send(out)
	seen := make(chan string, 100)
	w := t.work(func(_ context.Context, d leasebus.Delivery, value string) error {
		seen <- d.Type() + " " + value
		return nil
	})
	want(t, "type and message in the handler", receive(t, "the handler", seen), "old.v1.Name renamed")
	want(t, "outcome", w.untilSettled(1)[0].Kind, leasebus.SettleComplete)
}

func panicIsAFailure(t *trial) {
	t.policy.Retry = leasebus.NoRetry()
	// The table is in a function, so that its name stands in the stack.
	panics := map[string]func(){
		"panic with a text":   func() { panic("out of cheese") },
		"panic with an error": func() { panic(errors.New("redo from start")) },
		"panic with a number": func() { panic(42) },
		"write to a nil map":  func() { nilMap()["x"] = 1 },
		"runtime.Goexit":      runtime.Goexit,
	}
	texts := map[string]string{
		"panic with a text": "out of cheese", "panic with an error": "redo from start", "panic with a number": "42",
		"write to a nil map": "nil map", "runtime.Goexit": "Goexit",
	}
	ids := make(map[leasebus.ID]string)
	for what := range panics {
		ids[t.publish(what)[0]] = what
	}
	// Fewer workers than panics: a worker that a Goexit ends has to be replaced.
	w := t.work(func(_ context.Context, _ leasebus.Delivery, value string) error {
		if misbehave := panics[value]; misbehave != nil {
			misbehave()
		}
		return nil
	}, leasebus.WithConcurrency(1))
	w.untilSettled(len(panics))
	for _, d := range t.takeDeadLetters(len(panics)) {
		what := ids[d.ID]
		want(t, "reason after "+what, d.Reason, leasebus.ReasonExhausted)
		if !strings.Contains(d.Error, texts[what]) || !strings.Contains(d.Error, "goroutine") {
			t.Errorf("error after %s: got %.200q, want %q and a stack", what, d.Error, texts[what])
		}
		if len(d.Error) > 4<<10 {
			t.Errorf("error after %s: %d bytes, want at most 4 KiB", what, len(d.Error))
		}
	}
	t.publish("calm")
	want(t, "outcome after all the panics", w.untilSettled(len(panics) + 1)[len(panics)].Kind, leasebus.SettleComplete)
	want(t, "running handlers", w.InFlight(), 0)
}

func rudeErrorIsAFailure(t *trial) {
	t.policy.Retry = leasebus.NoRetry()
	id := t.publish("typed nil")[0]
	w := t.work(func(context.Context, leasebus.Delivery, string) error {
		var none *fs.PathError // which is no nil error, and whose methods do not like it
		return none
	})
	w.untilSettled(1)
	t.buriedAs(id, leasebus.ReasonExhausted, 1, "PathError")
	t.publish("calm")
	w.untilSettled(2) // the worker has survived it
}

func ownCancellation(t *trial) {
	t.policy.Retry.MaxAttempts = 2
	id := t.publish("slow query")[0]
	w := t.work(func(ctx context.Context, _ leasebus.Delivery, _ string) error {
		own, cancel := context.WithTimeout(ctx, 0)
		defer cancel()
		<-own.Done()
		return own.Err()
	})
	w.untilSettled(2)
	t.buriedAs(id, leasebus.ReasonExhausted, 2, context.DeadlineExceeded.Error())
	want(t, "counter LeaseLost", w.Stats().LeaseLost, 0)
}

func crashLoopIsDeadLettered(t *trial) {
	id := t.publish("killer")[0]
	for range t.policy.Retry.MaxAttempts {
		t.subscribe().takeOne() // and its process ends here
	}
	neighbours := t.publishMany(5)
	w := t.work(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.untilSettled(len(neighbours) + 1)
	t.buriedAs(id, leasebus.ReasonCrashed, 3, "")
	want(t, "handler calls for the killer", len(w.attemptsOf(id)), 0)
	for _, neighbour := range neighbours {
		wantAll(t, "attempts of a neighbour", w.attemptsOf(neighbour), []int{1})
	}
}

func spentElsewhere(t *trial) {
	id := t.publish("tired")[0]
	k := t.subscribe()
	for range 3 { // by a worker whose policy allows more
		k.settled(retry(k.takeOne(), 0, "elsewhere"))
	}
	w := t.work(func(context.Context, leasebus.Delivery, string) error { return nil })
	w.untilSettled(1)
	t.buriedAs(id, leasebus.ReasonExhausted, 3, "")
	want(t, "handler calls", len(w.attemptsOf(id)), 0)
}

func nulInAnError(t *trial) {
	t.policy.Retry = leasebus.NoRetry()
	bad := map[string]string{
		"NUL": "a\x00b", "no UTF-8": "a\xff\xfeb", "huge": strings.Repeat("漢\x00", 10_000), "cut rune": strings.Repeat("x", 4095) + "ä",
	}
	ids := make(map[leasebus.ID]string)
	out := make([]leasebus.Outgoing, 0, 44)
	for i := range 40 {
		out = append(out, t.outgoing(fmt.Sprint("good ", i)))
	}
	for what := range bad {
		each := t.outgoing(what)
		ids[each.ID] = what
		out = append(out[:len(ids)*9], append([]leasebus.Outgoing{each}, out[len(ids)*9:]...)...)
	}
	t.send(out...)
	all := t.newGate()
	w := t.newWorker(t.store, leasebus.WithConcurrency(len(out)), leasebus.WithSettleLinger(100*time.Millisecond))
	w.register(func(_ context.Context, _ leasebus.Delivery, value string) error {
		<-all.open // so that all are settled together
		if text, ok := bad[value]; ok {
			return errors.New(text)
		}
		return nil
	})
	w.start()
	w.untilRuns(len(out))
	all.lift()
	w.untilSettled(len(out))
	s := w.Stats()
	want(t, "counter Succeeded", s.Succeeded, 40)
	want(t, "counter DeadLettered", s.DeadLettered, int64(len(bad)))
	runs, _ := w.recorded()
	want(t, "handler calls", len(runs), len(out))
	for _, d := range t.takeDeadLetters(len(bad)) {
		what := ids[d.ID]
		if strings.ContainsRune(d.Error, 0) || strings.ToValidUTF8(d.Error, "") != d.Error || d.Error == "" || len(d.Error) > 4<<10 {
			t.Errorf("error text %s: stored as %.50q (%d bytes), want valid UTF-8 without NUL, at most 4 KiB", what, d.Error, len(d.Error))
		}
		if what == "NUL" {
			want(t, "error text with a NUL", d.Error, "a\uFFFDb")
		}
	}
	w.drained()
	t.nothingLeft()
}

func nilMap() map[string]int { return nil }
