package conformance

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var managerCases = []testCase{
	{name: "S32_manager_lists_typed_dead_letters", run: managerLists},
	{name: "S33_C6_2_requeued_message_is_handled_and_ends", run: managerRequeues},
	{name: "S33_C6_5_manager_tells_what_it_skipped", needs: operate, run: managerTells},
	{name: "S34_C6_6_requeue_of_more_than_a_page", needs: operate, run: managerRequeuesAll},
	{name: "S34_requeue_all_takes_no_message_twice", needs: operate, run: requeueAllTakesNoneTwice},
	{name: "S35_C6_2_edited_message_is_handled_in_place_of_the_dead_letter", needs: edit, run: managerEdits},
	{name: "S35_edit_that_fails_changes_nothing", needs: edit, run: failedEdit},
	{name: "S36_C6_7_discard_needs_a_filter_or_an_explicit_all", needs: operate, run: managerDiscards},
}

func (t *trial) manager() *leasebus.TypedManager[*wrapperspb.StringValue] {
	return leasebus.NewTypedManager[*wrapperspb.StringValue](t.policy, t.store, leasebus.By("tester"))
}

// failingWorker fails every message, at once and for good.
func (t *trial) failingWorker() *worker {
	return t.work(func(_ context.Context, _ leasebus.Delivery, value string) error {
		return leasebus.Permanent(fmt.Errorf("cannot handle %s", value))
	})
}

func managerLists(t *trial) {
	ids := t.publish("one", "two", "three")
	broken := t.outgoing("")
	broken.Payload = []byte{0xff}
	t.send(broken)
	t.failingWorker().untilSettled(4)
	m := t.manager()
	byID := make(map[leasebus.ID]string)
	for d, err := range m.DeadLetters(t.ctx, leasebus.Filter{}) {
		t.must(err, "list dead letters")
		if d.ID == broken.ID {
			if d.DecodeError == nil {
				t.Error("a dead letter that cannot be decoded has no DecodeError")
			}
			continue
		}
		byID[d.ID] = d.Message.GetValue()
		want(t, "error of "+d.Message.GetValue(), d.Error, "cannot handle "+d.Message.GetValue())
	}
	for i, value := range []string{"one", "two", "three"} {
		want(t, "value of a dead letter", byID[ids[i]], value)
	}
	d, err := m.Get(t.ctx, ids[1])
	t.must(err, "get a dead letter")
	want(t, "value of the one that was asked for", d.Message.GetValue(), "two")
	if _, err := m.Get(t.ctx, leasebus.NewID()); !errors.Is(err, leasebus.ErrNotFound) {
		t.Errorf("get of an unknown id: got error %v, want ErrNotFound", err)
	}
	page, next, err := m.Page(t.ctx, leasebus.Filter{}, "", 3)
	t.must(err, "first page")
	want(t, "size of the first page", len(page), 3)
	page, next, err = m.Page(t.ctx, leasebus.Filter{}, next, 3)
	t.must(err, "second page")
	want(t, "size of the second page", len(page), 1)
	want(t, "cursor behind the last page", next, "")
}

func managerRequeues(t *trial) {
	id := t.publish("twice")[0]
	broken := t.failingWorker()
	broken.untilSettled(1)
	broken.drained()
	t.takeDeadLetters(1)
	mended := t.work(func(context.Context, leasebus.Delivery, string) error { return nil })
	result, err := t.manager().Requeue(t.ctx, id)
	t.must(err, "requeue")
	want(t, "requested", result.Requested, 1)
	want(t, "requeued", result.Requeued, 1)
	want(t, "skipped", len(result.Skipped), 0)
	want(t, "outcome", mended.untilSettled(1)[0].Kind, leasebus.SettleComplete)
	wantAll(t, "attempts after the requeue", mended.attemptsOf(id), []int{1})
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
	t.nothingLeft()
}

func managerTells(t *trial) {
	ids := t.buried(9)
	unknown := leasebus.NewID()
	result, err := t.manager().Requeue(t.ctx, append([]leasebus.ID{unknown}, ids...)...)
	t.must(err, "requeue")
	want(t, "requested", result.Requested, 10)
	want(t, "requeued", result.Requeued, 9)
	wantAll(t, "skipped", result.Skipped, []leasebus.Skipped{{ID: unknown, Why: leasebus.DispositionNotFound}})
}

func managerRequeuesAll(t *trial) {
	const letters = 450
	t.publishMany(letters)
	k := t.subscribe()
	k.bury(k.take(letters)...)
	result, err := t.manager().RequeueAll(t.ctx, leasebus.Filter{Reason: leasebus.ReasonPermanent})
	t.must(err, "requeue all")
	want(t, "requested", result.Requested, letters)
	want(t, "requeued", result.Requeued, letters)
	k.complete(k.take(letters)...)
	want(t, "stats", t.stats(), leasebus.QueueStats{})
}

func requeueAllTakesNoneTwice(t *trial) {
	const letters = 250
	t.publishMany(letters)
	w := t.failingWorker() // which makes dead letters of all that comes back, while the manager works
	w.untilSettled(letters)
	t.takeDeadLetters(letters)
	result, err := t.manager().RequeueAll(t.ctx, leasebus.Filter{})
	t.must(err, "requeue all")
	want(t, "requested", result.Requested, letters)
	want(t, "requeued", result.Requeued, letters)
	w.untilSettled(2 * letters)
	for _, d := range t.takeDeadLetters(letters) {
		want(t, "requeues of one dead letter", len(d.Requeues), 1)
	}
}

func managerEdits(t *trial) {
	t.prepare(t.policy)
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](t.policy, t.store)
	t.must(err, "make a publisher")
	receipt, err := publisher.Publish(t.ctx, wrapperspb.String("wrong"), leasebus.WithCorrelation("flow 7"), leasebus.WithHeader("x", "y"))
	t.must(err, "publish")
	origins := make(chan published, 100)
	w := t.work(func(_ context.Context, d leasebus.Delivery, value string) error {
		if value == "wrong" {
			return leasebus.Permanent(errors.New("wrong"))
		}
		want(t, "header", d.Headers().Get("x"), "y")
		want(t, "link to the dead letter", d.Headers().Get(leasebus.HeaderReplaces), receipt.ID.String())
		origins <- originOf(d)
		return nil
	})
	w.untilSettled(1)
	t.takeDeadLetters(1)
	m := t.manager()
	edited, err := m.RequeueEdited(t.ctx, receipt.ID, func(v *wrapperspb.StringValue) error {
		v.Value = "right"
		return nil
	})
	t.must(err, "edit and requeue")
	if edited.ID == receipt.ID {
		t.Error("the edited message has the dead letter's id, want a new one")
	}
	origin := receive(t, "the handler of the edited message", origins)
	want(t, "origin", origin, published{edited.ID.String(), "flow 7", receipt.ID.String(), "", ""})
	w.untilSettled(2)

	dead := t.takeDeadLetters(1)[0]
	want(t, "replaced by", dead.ReplacedBy, edited.ID)
	if _, err := m.RequeueEdited(t.ctx, receipt.ID, func(*wrapperspb.StringValue) error { return nil }); !errors.Is(err, leasebus.ErrReplaced) {
		t.Errorf("edit of a replaced dead letter: got error %v, want ErrReplaced", err)
	}
	result, err := m.Requeue(t.ctx, receipt.ID)
	t.must(err, "requeue of a replaced dead letter")
	wantAll(t, "skipped", result.Skipped, []leasebus.Skipped{{ID: receipt.ID, Why: leasebus.DispositionReplaced}})
	all, err := m.RequeueAll(t.ctx, leasebus.Filter{})
	t.must(err, "requeue all")
	want(t, "requeued, all of them replaced", all.Requeued, 0)
	t.nothingLeft()
}

func failedEdit(t *trial) {
	id := t.buried(1)[0]
	m := t.manager()
	mine := errors.New("changed my mind")
	if _, err := m.RequeueEdited(t.ctx, id, func(*wrapperspb.StringValue) error { return mine }); !errors.Is(err, mine) {
		t.Errorf("edit that fails: got error %v, want its own", err)
	}
	huge := func(v *wrapperspb.StringValue) error {
		v.Value = string(make([]byte, leasebus.DefaultMaxPayload+1))
		return nil
	}
	if _, err := m.RequeueEdited(t.ctx, id, huge); !errors.Is(err, leasebus.ErrInvalidEnvelope) {
		t.Errorf("edit to a payload over the limit: got error %v, want ErrInvalidEnvelope", err)
	}
	if _, err := m.RequeueEdited(t.ctx, leasebus.NewID(), huge); !errors.Is(err, leasebus.ErrNotFound) {
		t.Errorf("edit of an unknown id: got error %v, want ErrNotFound", err)
	}
	want(t, "replaced by", t.takeDeadLetters(1)[0].ReplacedBy, leasebus.ID{})
	t.subscribe().nothing("no edit succeeded")
}

func managerDiscards(t *trial) {
	ids := t.buried(4)
	m := t.manager()
	if n, err := m.Discard(t.ctx, leasebus.Filter{}); n != 0 || !errors.Is(err, leasebus.ErrFilterNeeded) {
		t.Errorf("discard without a filter: got %d, %v, want 0 and ErrFilterNeeded", n, err)
	}
	n, err := m.Discard(t.ctx, leasebus.Filter{ErrorContains: "error 2"})
	t.must(err, "discard")
	want(t, "discarded", n, 1)
	wantAll(t, "dead letters", idsOfLetters(t.takeDeadLetters(3)), []leasebus.ID{ids[0], ids[1], ids[3]})
	n, err = m.DiscardAll(t.ctx)
	t.must(err, "discard all")
	want(t, "discarded", n, 3)
	stats, err := m.Stats(t.ctx)
	t.must(err, "stats")
	want(t, "stats", stats, leasebus.QueueStats{})
}
