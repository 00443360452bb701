package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var operatorCases = []testCase{
	{name: "S32_filter_selects_by_every_field", needs: operate, run: filterSelects},
	{name: "S32_filter_reads_error_text_literally", needs: operate, run: errorTextIsLiteral},
	{name: "S32_paging_is_stable_and_complete", needs: operate, run: pagingIsStable},
	{name: "S32_stats_count_by_state", needs: operate, run: statsCountByState},
	{name: "S32_C13_3_oldest_due_age_and_stuck_are_told", needs: operate | leaseExpiry, brief: true, run: ageAndStuckAreTold},
	{name: "S32_unknown_queue_is_empty", run: unknownQueueIsEmpty},
	{name: "S32_invalid_questions_are_refused", needs: operate, run: invalidQuestionsAreRefused},
	{name: "S32_done_context_changes_nothing", run: doneContextOperatesNothing},
	{name: "S33_requeue_restarts_attempts_and_keeps_history", needs: operate | fencingToken, run: requeueRestarts},
	{name: "S33_requeued_message_is_handled_again", run: requeuedIsHandledAgain},
	{name: "S33_C6_5_requeue_tells_what_it_left_and_why", needs: operate, run: requeueTells},
	{name: "S33_twins_are_acted_on_together", needs: operate, run: twinsTogether},
	{name: "S33_concurrent_requeues_of_one_message_requeue_once", needs: operate | oneDeadLetter, run: requeuedOnce},
	{name: "S34_cut_off_leaves_out_what_came_later", needs: operate, run: cutOff},
	{name: "S35_C6_2_replace_puts_an_edited_message_in_its_place", needs: edit, run: replacePutsEdited},
	{name: "S35_replaced_dead_letter_is_neither_edited_nor_requeued", needs: edit, run: replacedIsOver},
	{name: "S35_unstorable_edit_changes_nothing", needs: edit, run: unstorableEdit},
	{name: "S36_discard_deletes_what_it_names", run: discardDeletesWhatItNames},
	{name: "S31_completed_messages_are_kept_for_their_retention", needs: operate, brief: true, run: completedAreKept},
	{name: "S33_C6_3_queues_are_operated_apart", needs: operate, run: queuesAreOperatedApart},
}

// requeue sends dead letters back, all of which have to be there.
func (t *trial) requeue(refs ...leasebus.DeadLetterRef) {
	t.Helper()
	t.wantDone("requeue", refs, func() ([]leasebus.Disposition, error) { return t.store.Requeue(t.ctx, t.queue, refs, "tester") })
}

func (t *trial) discard(refs ...leasebus.DeadLetterRef) {
	t.Helper()
	t.wantDone("discard", refs, func() ([]leasebus.Disposition, error) { return t.store.Discard(t.ctx, t.queue, refs, "tester") })
}

func (t *trial) wantDone(what string, refs []leasebus.DeadLetterRef, act func() ([]leasebus.Disposition, error)) {
	t.Helper()
	done, err := act()
	t.must(err, "%s %d dead letters", what, len(refs))
	want(t, "answers to "+what, len(done), len(refs))
	for i, d := range done {
		want(t, fmt.Sprintf("%s of %v", what, refs[i].ID), d, leasebus.DispositionDone)
	}
}

// replace edits a dead letter, and returns what took its place.
func (t *trial) replace(d leasebus.DeadLetter, value string) leasebus.Envelope {
	t.Helper()
	edited := d.Envelope
	edited.ID, edited.Payload = leasebus.NewID(), payloadOf(t, value)
	edited.Headers = d.Headers.With(leasebus.HeaderReplaces, d.ID.String())
	done, err := t.store.Replace(t.ctx, t.queue, refOf(d), &edited, "editor")
	t.must(err, "replace %v", d.ID)
	want(t, "replace", done, leasebus.DispositionDone)
	return edited
}

func refOf(d leasebus.DeadLetter) leasebus.DeadLetterRef {
	return leasebus.DeadLetterRef{ID: d.ID, Cursor: d.Cursor}
}

// buried makes n dead letters, one after the other, with the texts "error 0", "error 1", ….
func (t *trial) buried(n int) []leasebus.ID {
	t.Helper()
	ids := t.publishMany(n)
	k := t.subscribe()
	for i, l := range k.take(n) {
		k.settled(t.deadLetter(l, leasebus.ReasonPermanent, fmt.Sprint("error ", i)))
	}
	k.leave()
	t.takeDeadLetters(n)
	return ids
}

func filterSelects(t *trial) {
	types := []string{typeName, "other.Type", typeName, "other.Type"}
	reasons := []leasebus.Reason{leasebus.ReasonExhausted, leasebus.ReasonExhausted, leasebus.ReasonInvalid, leasebus.ReasonCrashed}
	texts := []string{"timeout on host-1", "Timeout on host-2", "bad payload", "no outcome"}
	k := t.subscribe()
	var ids []leasebus.ID
	for i := range types {
		out := t.outgoing("x")
		out.Type = types[i]
		t.send(out)
		ids = append(ids, out.ID)
		s := t.deadLetter(k.takeOne(), reasons[i], texts[i])
		if i == 2 {
			s.DeadLetterQueue = t.queue + leasebus.InvalidSuffix
		}
		k.settled(s)
		now := time.Now()
		t.until("the clock had moved on", func() bool { return time.Since(now) > 2*time.Millisecond })
	}
	letters := t.takeDeadLetters(4)
	wantAll(t, "dead letters, oldest first", idsOfLetters(letters), ids)

	pick := func(at ...int) []leasebus.ID {
		var picked []leasebus.ID
		for _, i := range at {
			picked = append(picked, ids[i])
		}
		return picked
	}
	for _, c := range []struct {
		what  string
		f     leasebus.Filter
		right []leasebus.ID
	}{
		{"everything", leasebus.Filter{}, ids},
		{"ids, one of them unknown", leasebus.Filter{IDs: []leasebus.ID{ids[3], leasebus.NewID(), ids[1]}}, pick(1, 3)},
		{"an unknown id", leasebus.Filter{IDs: []leasebus.ID{leasebus.NewID()}}, nil},
		{"type", leasebus.Filter{Type: "other.Type"}, pick(1, 3)},
		{"reason", leasebus.Filter{Reason: leasebus.ReasonExhausted}, pick(0, 1)},
		{"dead-letter queue", leasebus.Filter{DeadLetterQueue: t.queue + leasebus.InvalidSuffix}, pick(2)},
		{"error text, case told apart", leasebus.Filter{ErrorContains: "timeout"}, pick(0)},
		{"error text", leasebus.Filter{ErrorContains: "host-"}, pick(0, 1)},
		{"since", leasebus.Filter{Since: letters[2].DeadLetteredAt}, pick(2, 3)},
		{"before", leasebus.Filter{Before: letters[2].DeadLetteredAt}, pick(0, 1)},
		{"since and before", leasebus.Filter{Since: letters[1].DeadLetteredAt, Before: letters[2].DeadLetteredAt}, pick(1)},
		{"up to", leasebus.Filter{UpTo: letters[1].Cursor}, pick(0, 1)},
		{"type and reason", leasebus.Filter{Type: "other.Type", Reason: leasebus.ReasonExhausted}, pick(1)},
		{"what contradicts itself", leasebus.Filter{Type: typeName, Reason: leasebus.ReasonCrashed}, nil},
	} {
		wantAll(t, "filter by "+c.what, idsOfLetters(t.deadLetters(c.f)), c.right)
		page, err := t.store.DeadLetters(t.ctx, t.queue, c.f, "", 1)
		t.must(err, "first page by %s", c.what)
		wantAll(t, "first one by "+c.what, idsOfLetters(page), c.right[:min(1, len(c.right))])
	}
}

func errorTextIsLiteral(t *trial) {
	texts := []string{`100% of a_b`, `100 of aXb`, `back\slash`, `it's "quoted"`, `(a|b)*`}
	k := t.subscribe()
	var ids []leasebus.ID
	for _, text := range texts {
		ids = append(ids, t.publish("x")...)
		k.settled(t.deadLetter(k.takeOne(), leasebus.ReasonPermanent, text))
	}
	for part, at := range map[string]int{"100%": 0, "a_b": 0, `k\s`: 2, `'s "q`: 3, "|b)*": 4} {
		wantAll(t, "dead letters whose error contains "+part, idsOfLetters(t.deadLetters(leasebus.Filter{ErrorContains: part})), ids[at:at+1])
	}
}

func pagingIsStable(t *trial) {
	const letters, page = 23, 5
	ids := t.buried(letters)
	var got []leasebus.ID
	after := leasebus.Cursor("")
	for round := 0; ; round++ {
		part, err := t.store.DeadLetters(t.ctx, t.queue, leasebus.Filter{}, after, page)
		t.must(err, "page %d", round)
		want(t, fmt.Sprintf("size of page %d", round), len(part), min(page, letters-len(got)))
		got = append(got, idsOfLetters(part)...)
		if len(part) < page {
			break
		}
		after = part[len(part)-1].Cursor
		t.requeue(refOf(part[0]), refOf(part[page-1])) // what is behind us may go, the cursor's own row too
	}
	wantAll(t, "all pages", got, ids)
	end, err := t.store.DeadLetters(t.ctx, t.queue, leasebus.Filter{}, t.deadLetters(leasebus.Filter{})[letters-2*4-1].Cursor, page)
	t.must(err, "page behind the last one")
	want(t, "size of the page behind the last one", len(end), 0)
}

func statsCountByState(t *trial) {
	want(t, "stats of an empty queue", t.stats(), leasebus.QueueStats{})
	t.publishMany(10)
	later := t.outgoing("later")
	later.Delay = 1000 * t.lease
	t.send(later)
	k := t.subscribe()
	leases := k.take(6)
	k.settled(
		leasebus.Settlement{Lease: leases[0]}, retry(leases[1], 1000*t.lease, "x"), retry(leases[2], 0, "x"),
		t.deadLetter(leases[3], leasebus.ReasonPermanent, "x"),
	)
	s := t.stats()
	want(t, "pending: 4 due and 1 scheduled", s.Pending, 5)
	want(t, "processing", s.Processing, 2)
	want(t, "failed", s.Failed, 2)
	want(t, "dead-lettered", s.DeadLettered, 1)
	want(t, "completed, without a retention", s.Completed, 0)
	want(t, "due: 4 pending and 1 failed", s.Due, 5)
	want(t, "stuck", s.Stuck, 0)
}

func ageAndStuckAreTold(t *trial) {
	stuck := t.publish("stuck")
	t.subscribe().takeOne() // and nothing is heard of it again
	taken := time.Now()
	publishing := time.Now()
	t.publish("waiting")
	published := time.Now()
	t.until("the lease was stuck", func() bool { return t.stats().Stuck == 1 })
	t.notBefore("a lease was called stuck", taken.Add(-clockSlack), t.lease-clockSlack)
	least := time.Since(published)
	s := t.stats()
	most := time.Since(publishing)
	want(t, "processing", s.Processing, 1)
	if s.OldestDueAge < least-clockSlack || s.OldestDueAge > most+clockSlack {
		t.Errorf("oldest due age: got %v, want %v to %v", s.OldestDueAge, least, most)
	}
	k := t.subscribe()
	leases := k.take(2)
	k.complete(leases...)
	want(t, "stats after all was done", t.stats(), leasebus.QueueStats{})
	_ = stuck
}

func unknownQueueIsEmpty(t *trial) {
	t.queue = t.newQueue()
	want(t, "stats", t.stats(), leasebus.QueueStats{})
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
	refs := []leasebus.DeadLetterRef{{ID: leasebus.NewID()}, {ID: leasebus.NewID()}}
	for what, act := range map[string]func(context.Context, string, []leasebus.DeadLetterRef, string) ([]leasebus.Disposition, error){
		"requeue": t.store.Requeue, "discard": t.store.Discard,
	} {
		done, err := act(t.ctx, t.queue, refs, "tester")
		t.must(err, "%s in a queue that does not exist", what)
		wantAll(t, what+" in a queue that does not exist", done, []leasebus.Disposition{leasebus.DispositionNotFound, leasebus.DispositionNotFound})
	}
}

func invalidQuestionsAreRefused(t *trial) {
	t.buried(1)
	for _, limit := range []int{0, -1} {
		if letters, err := t.store.DeadLetters(t.ctx, t.queue, leasebus.Filter{}, "", limit); err == nil {
			t.Errorf("dead letters with limit %d: got %d and no error", limit, len(letters))
		}
	}
	for _, garbage := range []leasebus.Cursor{"garbage", "-1", "9'; --", "99999999999999999999999999"} {
		if _, err := t.store.DeadLetters(t.ctx, t.queue, leasebus.Filter{}, garbage, 1); err == nil {
			t.Errorf("dead letters behind cursor %q: got no error", garbage)
		}
		if _, err := t.store.DeadLetters(t.ctx, t.queue, leasebus.Filter{UpTo: garbage}, "", 1); err == nil {
			t.Errorf("dead letters up to cursor %q: got no error", garbage)
		}
	}
	t.takeDeadLetters(1)
}

func doneContextOperatesNothing(t *trial) {
	id := t.buried(1)[0]
	refs := []leasebus.DeadLetterRef{{ID: id}}
	ctx := t.doneContext()
	for what, act := range map[string]func() error{
		"dead letters": func() error { _, err := t.store.DeadLetters(ctx, t.queue, leasebus.Filter{}, "", 1); return err },
		"requeue":      func() error { _, err := t.store.Requeue(ctx, t.queue, refs, "tester"); return err },
		"discard":      func() error { _, err := t.store.Discard(ctx, t.queue, refs, "tester"); return err },
		"stats":        func() error { _, err := t.store.Stats(ctx, t.queue); return err },
	} {
		if err := act(); !errors.Is(err, context.Canceled) {
			t.Errorf("%s with a cancelled context: got error %v, want one that matches context.Canceled", what, err)
		}
	}
	t.takeDeadLetters(1)
}

func requeueRestarts(t *trial) {
	t.publish("second life")
	k := t.subscribe()
	k.settled(leasebus.Settlement{Lease: k.takeOne(), Kind: leasebus.SettleRelease, Started: true})
	k.settled(retry(k.takeOne(), 0, "first error"))
	l := k.takeOne()
	due, generation := l.FirstDue, l.Generation
	k.settled(t.deadLetter(l, leasebus.ReasonExhausted, "second error"))
	dead := t.takeDeadLetters(1)[0]

	requeued := time.Now()
	t.requeue(refOf(dead))
	want(t, "dead letters after a requeue", len(t.deadLetters(leasebus.Filter{})), 0)
	want(t, "dead-lettered after a requeue", t.stats().DeadLettered, 0)
	l = k.takeOne()
	want(t, "attempt after a requeue", l.Attempt, 1)
	want(t, "interruptions after a requeue", l.Interruptions, 0)
	want(t, "crashed after a requeue", l.Crashed, false)
	want(t, "first due after a requeue", l.FirstDue.UTC(), due.UTC())
	if l.Generation < generation+2 {
		t.Errorf("generation after a requeue and a lease: got %d, want at least %d", l.Generation, generation+2)
	}
	if passed := time.Since(requeued); l.Age < -clockSlack || l.Age > passed+clockSlack {
		t.Errorf("age after a requeue: got %v, want at most %v: it restarts", l.Age, passed)
	}

	k.settled(t.deadLetter(l, leasebus.ReasonPermanent, "third error"))
	dead = t.takeDeadLetters(1)[0]
	var texts []string
	for _, h := range dead.History {
		texts = append(texts, h.Text)
	}
	wantAll(t, "history over a requeue", texts, []string{"first error", "second error", "third error"})
	if len(dead.Requeues) != 1 || dead.Requeues[0].By != "tester" {
		t.Fatalf("requeues: got %+v, want one by tester", dead.Requeues)
	}
	t.between("time of the requeue", dead.Requeues[0].At, requeued, time.Now())
	want(t, "attempts", dead.Attempts, 1)

	for i := range leasebus.HistoryLimit + 3 {
		t.requeue(leasebus.DeadLetterRef{ID: dead.ID})
		k.settled(t.deadLetter(k.takeOne(), leasebus.ReasonPermanent, fmt.Sprint("error ", i)))
	}
	dead = t.takeDeadLetters(1)[0]
	want(t, "requeues that are kept", len(dead.Requeues), leasebus.HistoryLimit)
	want(t, "failures that are kept", len(dead.History), leasebus.HistoryLimit)
}

func requeuedIsHandledAgain(t *trial) {
	ids := t.buried(2)
	t.requeue(leasebus.DeadLetterRef{ID: ids[1]})
	k := t.subscribe()
	l := k.takeOne()
	want(t, "id", l.ID, ids[1])
	want(t, "attempt after a requeue", l.Attempt, 1)
	k.complete(l)
	k.nothing("the other one is a dead letter still")
	wantAll(t, "dead letters", idsOfLetters(t.takeDeadLetters(1)), ids[:1])
}

func requeueTells(t *trial) {
	ids := t.buried(3)
	letters := t.takeDeadLetters(3)
	pending := t.publish("pending")[0]
	k := t.subscribe()
	working := k.takeOne()
	want(t, "message being worked on", working.ID, pending)
	waiting := t.outgoing("waiting")
	waiting.Delay = 1000 * t.lease
	t.send(waiting)
	refs := []leasebus.DeadLetterRef{
		{ID: ids[0]},
		{ID: leasebus.NewID()},
		{ID: pending},
		{ID: waiting.ID},
		refOf(letters[2]),
		{ID: ids[0]},
		{ID: ids[1], Cursor: letters[2].Cursor},
	}
	done, err := t.store.Requeue(t.ctx, t.queue, refs, "tester")
	t.must(err, "requeue")
	wantAll(t, "dispositions", done[:5], []leasebus.Disposition{
		leasebus.DispositionDone, leasebus.DispositionNotFound, leasebus.DispositionNotDeadLettered,
		leasebus.DispositionNotDeadLettered, leasebus.DispositionDone,
	})
	// Named twice in one call: acted on once. What the second answer is depends on when it is looked at.
	if done[5] != leasebus.DispositionNotDeadLettered && done[5] != leasebus.DispositionDone {
		t.Errorf("disposition of one named twice: got %v, want done or not dead-lettered", done[5])
	}
	if done[6] == leasebus.DispositionDone {
		t.Error("a reference whose id and position do not belong together was acted on")
	}
	done, err = t.store.Requeue(t.ctx, t.queue, []leasebus.DeadLetterRef{{ID: ids[0]}, refOf(letters[2])}, "tester")
	t.must(err, "requeue again")
	wantAll(t, "dispositions of what was requeued already", done, []leasebus.Disposition{
		leasebus.DispositionNotDeadLettered, leasebus.DispositionMoved,
	})
	wantAll(t, "messages that are back", sorted(idsOf(k.take(2))), sorted([]leasebus.ID{ids[0], ids[2]}))
	k.nothing("each was requeued once")
	t.wantResult("renewal of what was being worked on", k.renew(working)[0], leasebus.ResultOK)
	wantAll(t, "dead letters", idsOfLetters(t.takeDeadLetters(1)), ids[1:2])
}

func twinsTogether(t *trial) {
	out := t.outgoing("twin")
	bury := func() {
		t.send(out)
		t.send(out)
		k := t.subscribe()
		k.bury(k.take(2)...)
	}
	bury()
	t.requeue(leasebus.DeadLetterRef{ID: out.ID})
	want(t, "dead letters after a requeue of twins", len(t.deadLetters(leasebus.Filter{})), 0)
	k := t.subscribe()
	k.complete(k.take(2)...)

	bury()
	letters := t.takeDeadLetters(2)
	t.discard(refOf(letters[0]))
	wantAll(t, "cursors after a discard of one twin by its position",
		[]leasebus.Cursor{t.takeDeadLetters(1)[0].Cursor}, []leasebus.Cursor{letters[1].Cursor})
	bury()
	t.discard(leasebus.DeadLetterRef{ID: out.ID})
	want(t, "dead letters after a discard of all twins", len(t.deadLetters(leasebus.Filter{})), 0)
	k.nothing("twins were discarded")
}

func requeuedOnce(t *trial) {
	const operators = 6
	ids := t.buried(10)
	refs := make([]leasebus.DeadLetterRef, len(ids))
	for i, id := range ids {
		refs[i].ID = id
		if i%2 == 0 { // some of them in another order, so that locks cross
			refs[i].ID = ids[len(ids)-2-i]
		}
	}
	answers := make(chan []leasebus.Disposition, operators)
	for range operators {
		go func() {
			done, err := t.store.Requeue(t.ctx, t.queue, refs, "tester")
			if err != nil {
				t.Errorf("requeue: %v", err)
			}
			answers <- done
		}()
	}
	times := make([]int, len(refs))
	for range operators {
		for i, d := range <-answers {
			if d == leasebus.DispositionDone {
				times[i]++
			}
		}
	}
	for i, n := range times {
		want(t, fmt.Sprintf("requeues of %v that were done", refs[i].ID), n, 1)
	}
	k := t.subscribe()
	wantAll(t, "messages", sorted(idsOf(k.take(len(ids)))), sorted(ids))
	k.nothing("each was requeued once")
}

func cutOff(t *trial) {
	before, err := t.store.LastDeadLetter(t.ctx, t.queue)
	t.must(err, "last dead letter of a queue without any")
	first := t.buried(3)
	last, err := t.store.LastDeadLetter(t.ctx, t.queue)
	t.must(err, "last dead letter")
	k := t.subscribe()
	later := t.publishMany(2)
	k.bury(k.take(2)...)
	wantAll(t, "dead letters", idsOfLetters(t.deadLetters(leasebus.Filter{})), append(first, later...))
	wantAll(t, "dead letters up to the cut-off", idsOfLetters(t.deadLetters(leasebus.Filter{UpTo: last})), first)
	if before != "" {
		want(t, "dead letters up to a cut-off taken when there were none", len(t.deadLetters(leasebus.Filter{UpTo: before})), 0)
	}

	// One that is requeued and fails again has come later.
	t.requeue(leasebus.DeadLetterRef{ID: first[0]})
	k.bury(k.takeOne())
	wantAll(t, "dead letters up to the cut-off, one of them dead-lettered again",
		idsOfLetters(t.deadLetters(leasebus.Filter{UpTo: last})), first[1:])
	t.discard(leasebus.DeadLetterRef{ID: first[2]}) // the cut-off's own
	wantAll(t, "dead letters up to a cut-off that is gone itself", idsOfLetters(t.deadLetters(leasebus.Filter{UpTo: last})), first[1:2])
}

func replacePutsEdited(t *trial) {
	out := t.outgoing("wrong")
	out.IdempotencyKey = "key"
	t.send(out)
	k := t.subscribe()
	k.bury(k.takeOne())
	dead := t.takeDeadLetters(1)[0]
	replaced := time.Now()
	edited := t.replace(dead, "right")

	l := k.takeOne()
	want(t, "id", l.ID, edited.ID)
	wantAll(t, "payload", l.Payload, payloadOf(t, "right"))
	want(t, "type", l.Type, typeName)
	want(t, "idempotency key", l.IdempotencyKey, "key")
	want(t, "header that links it", l.Headers.Get(leasebus.HeaderReplaces), out.ID.String())
	want(t, "attempt", l.Attempt, 1)
	if passed := time.Since(replaced); l.Age > passed+clockSlack {
		t.Errorf("age of the edited message: got %v, want at most %v", l.Age, passed)
	}
	k.complete(l)
	k.nothing("one message took the dead letter's place")

	dead = t.takeDeadLetters(1)[0]
	want(t, "id of the dead letter", dead.ID, out.ID)
	want(t, "replaced by", dead.ReplacedBy, edited.ID)
	wantAll(t, "payload of the dead letter", dead.Payload, out.Payload)
}

func replacedIsOver(t *trial) {
	t.buried(1)
	dead := t.takeDeadLetters(1)[0]
	edited := t.replace(dead, "right")
	for _, ref := range []leasebus.DeadLetterRef{{ID: dead.ID}, refOf(dead)} {
		done, err := t.store.Requeue(t.ctx, t.queue, []leasebus.DeadLetterRef{ref}, "tester")
		t.must(err, "requeue of a replaced dead letter")
		wantAll(t, "requeue of a replaced dead letter", done, []leasebus.Disposition{leasebus.DispositionReplaced})
		again := dead.Envelope
		again.ID = leasebus.NewID()
		answer, err := t.store.Replace(t.ctx, t.queue, ref, &again, "editor")
		t.must(err, "replace again")
		want(t, "replace of a replaced dead letter", answer, leasebus.DispositionReplaced)
	}
	k := t.subscribe()
	want(t, "message", k.takeOne().ID, edited.ID)
	k.nothing("a replaced dead letter was requeued")
	t.discard(refOf(dead))
	want(t, "dead letters after a discard", len(t.deadLetters(leasebus.Filter{})), 0)
}

func unstorableEdit(t *trial) {
	t.buried(1)
	dead := t.takeDeadLetters(1)[0]
	edited := dead.Envelope
	edited.ID = leasebus.NewID()
	edited.Headers = leasebus.NewHeaders(map[string]string{"x": "a\x00b"})
	if _, err := t.store.Replace(t.ctx, t.queue, refOf(dead), &edited, "editor"); !errors.Is(err, leasebus.ErrInvalidEnvelope) {
		t.Errorf("replace by an envelope with a NUL in a header: got error %v, want one that matches ErrInvalidEnvelope", err)
	}
	edited.Headers = leasebus.Headers{}
	if done, err := t.store.Replace(t.doneContext(), t.queue, refOf(dead), &edited, "editor"); !errors.Is(err, context.Canceled) {
		t.Errorf("replace with a cancelled context: got %v, %v, want an error that matches context.Canceled", done, err)
	}
	done, err := t.store.Replace(t.ctx, t.queue, leasebus.DeadLetterRef{ID: leasebus.NewID()}, &edited, "editor")
	t.must(err, "replace one that is not there")
	want(t, "replace of one that is not there", done, leasebus.DispositionNotFound)
	want(t, "replaced by", t.takeDeadLetters(1)[0].ReplacedBy, leasebus.ID{})
	t.subscribe().nothing("nothing was replaced")
}

func discardDeletesWhatItNames(t *trial) {
	ids := t.buried(4)
	letters := t.takeDeadLetters(4)
	done, err := t.store.Discard(t.ctx, t.queue, []leasebus.DeadLetterRef{{ID: ids[1]}, {ID: leasebus.NewID()}, refOf(letters[3])}, "tester")
	t.must(err, "discard")
	wantAll(t, "dispositions", done, []leasebus.Disposition{leasebus.DispositionDone, leasebus.DispositionNotFound, leasebus.DispositionDone})
	wantAll(t, "dead letters", idsOfLetters(t.takeDeadLetters(2)), []leasebus.ID{ids[0], ids[2]})
	done, err = t.store.Discard(t.ctx, t.queue, []leasebus.DeadLetterRef{{ID: ids[1]}}, "tester")
	t.must(err, "discard again")
	wantAll(t, "discard of one that is gone", done, []leasebus.Disposition{leasebus.DispositionNotFound})
	t.subscribe().nothing("dead letters were discarded")
}

func completedAreKept(t *trial) {
	t.policy.RetainCompleted = t.lease
	t.publishMany(3)
	k := t.subscribe()
	k.complete(k.take(3)...)
	completed := time.Now()
	if kept := t.stats().Completed; kept != 3 && time.Since(completed) < t.lease/2 {
		t.Errorf("completed: got %d, want 3", kept)
	}
	k.nothing("they were completed")
	t.until("the completed messages were forgotten", func() bool { return t.stats().Completed == 0 })
	t.notBefore("completed messages were forgotten", completed.Add(-clockSlack-t.lease/10), t.lease-t.lease/10)
}

func queuesAreOperatedApart(t *trial) {
	ids := t.buried(2)
	here := t.queue
	t.queue = t.newQueue()
	t.policy = t.policyFor(t.queue)
	there := t.buried(1)
	done, err := t.store.Requeue(t.ctx, t.queue, []leasebus.DeadLetterRef{{ID: ids[0]}, {ID: there[0]}}, "tester")
	t.must(err, "requeue")
	wantAll(t, "requeue of ids of two queues in one of them", done, []leasebus.Disposition{leasebus.DispositionNotFound, leasebus.DispositionDone})
	want(t, "message of the other queue", t.subscribe().takeOne().ID, there[0])
	t.queue = here
	wantAll(t, "dead letters of the first queue", idsOfLetters(t.takeDeadLetters(2)), ids)
}
