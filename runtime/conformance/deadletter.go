package conformance

import (
	"fmt"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var deadLetterCases = []testCase{
	{name: "S27_S29_C6_1_dead_letter_keeps_everything", needs: operate, run: deadLetterKeepsEverything},
	{name: "S29_dead_letter_keeps_the_message", run: deadLetterKeepsTheMessage},
	{name: "S29_C4_8_history_is_bounded_and_keeps_the_newest", needs: operate, run: historyIsBounded},
	{name: "S28_routes_are_labels_of_one_queue", needs: operate, run: routesAreLabels},
	{name: "S28_dead_letter_is_not_leased_again", run: deadLetterIsNotLeased},
	{name: "S30_one_message_is_one_dead_letter", needs: oneDeadLetter, run: oneMessageOneDeadLetter},
	{name: "S31_dead_letters_stay_without_a_retention", needs: operate, brief: true, run: deadLettersStay},
}

func deadLetterKeepsEverything(t *trial) {
	out := t.outgoing("doomed")
	out.Headers = leasebus.NewHeaders(map[string]string{leasebus.HeaderCorrelation: "c", "x": "y"})
	out.IdempotencyKey, out.OrderingKey = "key", "lane"
	published := time.Now()
	t.send(out)

	k := t.subscribe()
	l := k.takeOne()
	due := l.FirstDue
	firstFailed := time.Now()
	k.settled(retry(l, t.lease/10, "first error"))
	l = k.takeOne()
	last := t.deadLetter(l, leasebus.ReasonExhausted, "last error")
	last.Attempts, last.Failure.ErrorType = 2, "*last.Error"
	buried := time.Now()
	k.settled(last)
	answered := time.Now()

	d := t.takeDeadLetters(1)[0]
	want(t, "id", d.ID, out.ID)
	want(t, "type", d.Type, out.Type)
	want(t, "queue", d.Queue, t.queue)
	wantAll(t, "payload", d.Payload, out.Payload)
	want(t, "header x", d.Headers.Get("x"), "y")
	want(t, "correlation", d.Headers.Get(leasebus.HeaderCorrelation), "c")
	want(t, "idempotency key", d.IdempotencyKey, "key")
	want(t, "ordering key", d.OrderingKey, "lane")
	want(t, "first due", d.FirstDue.UTC(), due.UTC())
	want(t, "dead-letter queue", d.DeadLetterQueue, t.policy.DeadLetter.Queue)
	want(t, "reason", d.Reason, leasebus.ReasonExhausted)
	want(t, "error", d.Error, "last error")
	want(t, "error type", d.ErrorType, "*last.Error")
	want(t, "attempts", d.Attempts, 2)
	want(t, "last owner", d.LastOwner, k.owner)
	want(t, "replaced by", d.ReplacedBy, leasebus.ID{})
	want(t, "requeues", len(d.Requeues), 0)
	if d.Cursor == "" {
		t.Error("cursor is empty")
	}
	t.between("first failed", d.FirstFailed, firstFailed, buried)
	t.between("dead-lettered at", d.DeadLetteredAt, buried, answered)
	t.between("first due", d.FirstDue, published, firstFailed)
	want(t, "time zone of dead-lettered at", d.DeadLetteredAt.Location(), time.UTC)
	if len(d.History) != 2 {
		t.Fatalf("history: got %d failures, want 2: %+v", len(d.History), d.History)
	}
	for i, text := range []string{"first error", "last error"} {
		h := d.History[i]
		want(t, fmt.Sprintf("attempt of failure %d", i), h.Attempt, i+1)
		want(t, fmt.Sprintf("text of failure %d", i), h.Text, text)
		want(t, fmt.Sprintf("owner of failure %d", i), h.Owner, k.owner)
		t.between(fmt.Sprintf("time of failure %d", i), h.At, firstFailed, answered)
	}
	want(t, "error type of the first failure", d.History[0].ErrorType, "*conformance.Error")
	want(t, "first failed, by the history", d.History[0].At, d.FirstFailed)
}

// between compares a store's time with the time here: on one machine, these are one clock.
func (t *trial) between(what string, got, from, to time.Time) {
	t.Helper()
	if got.Before(from.Add(-clockSlack)) || got.After(to.Add(clockSlack)) {
		t.Errorf("%s: got %v, want %v to %v", what, got, from, to)
	}
}

func deadLetterKeepsTheMessage(t *trial) {
	out := t.outgoing("")
	out.Payload, out.Headers = everyByte(), leasebus.NewHeaders(map[string]string{"x": "y"})
	t.send(out)
	k := t.subscribe()
	k.settled(t.deadLetter(k.takeOne(), leasebus.ReasonInvalid, "what is this"))
	d := t.takeDeadLetters(1)[0]
	want(t, "id", d.ID, out.ID)
	want(t, "type", d.Type, out.Type)
	want(t, "queue", d.Queue, t.queue)
	wantAll(t, "payload", d.Payload, out.Payload)
	want(t, "header", d.Headers.Get("x"), "y")
	want(t, "reason", d.Reason, leasebus.ReasonInvalid)
	want(t, "error", d.Error, "what is this")
	want(t, "attempts", d.Attempts, 1)
	t.nothingLeft()
}

func historyIsBounded(t *trial) {
	const failures = leasebus.HistoryLimit + 5
	t.publish("failing")
	k := t.subscribe()
	begun := time.Now()
	var firstFailedBy time.Time
	for attempt := 1; attempt < failures; attempt++ {
		k.settled(retry(k.takeOne(), 0, fmt.Sprint("error ", attempt)))
		if attempt == 1 {
			firstFailedBy = time.Now()
		}
	}
	k.settled(t.deadLetter(k.takeOne(), leasebus.ReasonExhausted, fmt.Sprint("error ", failures)))
	d := t.takeDeadLetters(1)[0]
	if len(d.History) != leasebus.HistoryLimit {
		t.Fatalf("history: got %d failures, want the newest %d of %d", len(d.History), leasebus.HistoryLimit, failures)
	}
	for i, h := range d.History {
		want(t, fmt.Sprintf("text of failure %d of the history", i), h.Text, fmt.Sprint("error ", failures-leasebus.HistoryLimit+i+1))
	}
	want(t, "attempts", d.Attempts, failures)
	t.between("first failed, of a failure that the history has dropped", d.FirstFailed, begun, firstFailedBy)
}

func routesAreLabels(t *trial) {
	t.publishMany(2)
	k := t.subscribe()
	leases := k.take(2)
	invalid := t.deadLetter(leases[1], leasebus.ReasonInvalid, "invalid")
	invalid.DeadLetterQueue = t.queue + leasebus.InvalidSuffix
	k.settled(t.deadLetter(leases[0], leasebus.ReasonPermanent, "permanent"), invalid)
	letters := t.takeDeadLetters(2)
	want(t, "route of the first", letters[0].DeadLetterQueue, t.policy.DeadLetter.Queue)
	want(t, "route of the second", letters[1].DeadLetterQueue, invalid.DeadLetterQueue)
	only := t.deadLetters(leasebus.Filter{DeadLetterQueue: invalid.DeadLetterQueue})
	wantAll(t, "dead letters of the invalid route", idsOfLetters(only), []leasebus.ID{leases[1].ID})
}

func deadLetterIsNotLeased(t *trial) {
	t.publish("dead")
	k := t.subscribe()
	k.bury(k.takeOne())
	sentinel := t.publish("alive")[0]
	want(t, "next message", k.takeOne().ID, sentinel)
	k.nothing("it is a dead letter")
}

func oneMessageOneDeadLetter(t *trial) {
	ids := t.publishMany(30)
	k := t.subscribe()
	leases := k.take(30)
	k.bury(leases...)
	for _, l := range leases {
		t.wantResult("second dead letter", k.settle(t.deadLetter(l, leasebus.ReasonPermanent, "again"))[0], leasebus.ResultLost)
	}
	wantAll(t, "dead letters", sorted(idsOfLetters(t.takeDeadLetters(30))), sorted(ids))
	want(t, "dead-lettered", t.stats().DeadLettered, 30)
}

func deadLettersStay(t *trial) {
	t.publish("kept")
	k := t.subscribe()
	k.bury(k.takeOne())
	buried := time.Now()
	t.until("three leases had passed", func() bool { return time.Since(buried) > 3*t.lease })
	t.subscribe()
	t.takeDeadLetters(1)
	want(t, "dead-lettered", t.stats().DeadLettered, 1)
}
