package conformance

import (
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var wakeCases = []testCase{
	{name: "S9_publish_wakes_a_hungry_feed", run: func(t *trial) {
		t.wakes("a publish", func() { t.publish("new") })
	}},
	{name: "S9_message_that_becomes_due_wakes_a_hungry_feed", needs: scheduledPublish, brief: true, run: func(t *trial) {
		t.wakes("a message became due", func() {
			out := t.outgoing("later")
			out.Delay = t.lease / 2
			t.send(out)
		})
	}},
	{name: "S9_retry_that_becomes_due_wakes_a_hungry_feed", run: func(t *trial) {
		t.wakesBy("a retry became due", func(k *consumer, l *leasebus.Lease) { k.settled(retry(l, t.lease/2, "again")) })
	}},
	{name: "S19_deferral_that_is_over_wakes_a_hungry_feed", run: func(t *trial) {
		t.wakesBy("a deferral was over", func(k *consumer, l *leasebus.Lease) {
			k.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleDefer, Delay: t.lease / 2})
		})
	}},
	{name: "S50_release_wakes_a_hungry_feed", run: func(t *trial) {
		t.wakesBy("a release", func(k *consumer, l *leasebus.Lease) {
			k.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRelease})
		})
	}},
	{name: "S9_lease_that_expires_wakes_a_hungry_feed", needs: leaseExpiry, brief: true, run: func(t *trial) {
		t.wakesBy("a lease expired", func(*consumer, *leasebus.Lease) {})
	}},
	{name: "S9_closed_feed_wakes_the_others", brief: true, run: func(t *trial) {
		t.wakesBy("another feed was closed", func(k *consumer, _ *leasebus.Lease) { t.must(k.Close(), "close") })
	}},
	{name: "S33_requeue_wakes_a_hungry_feed", run: func(t *trial) {
		t.wakesBy("a requeue", func(k *consumer, l *leasebus.Lease) {
			k.bury(l)
			t.takeDeadLetters(1)
			t.requeue(leasebus.DeadLetterRef{ID: l.ID})
		})
	}},
	{name: "S35_edited_message_wakes_a_hungry_feed", needs: edit, run: func(t *trial) {
		t.wakesBy("an edit", func(k *consumer, l *leasebus.Lease) {
			k.bury(l)
			t.replace(t.takeDeadLetters(1)[0], "edited")
		})
	}},
	{name: "S9_partial_batch_leaves_a_feed_hungry", run: partialBatchLeavesHungry},
	{name: "S9_message_already_there_is_leased_without_wake", run: messageAlreadyThere},
}

// wakes checks that a feed that found nothing is woken when there is something. Being woken for nothing is allowed.
func (t *trial) wakes(why string, cause func()) {
	t.Helper()
	k := t.subscribe()
	k.nothing("nothing was published")
	cause()
	k.wokenFor(why)
}

// wakesBy is wakes for what happens to a message that another has.
func (t *trial) wakesBy(why string, cause func(*consumer, *leasebus.Lease)) {
	t.Helper()
	t.publish("message")
	other := t.subscribe()
	l := other.takeOne()
	t.wakes(why, func() {
		cause(other, l)
		other.leave()
	})
}

// wokenFor leases only when it is woken, until it gets a message.
func (k *consumer) wokenFor(why string) {
	k.t.Helper()
	timer := time.NewTimer(k.t.patience())
	defer timer.Stop()
	for {
		select {
		case <-k.woken:
			if len(k.lease(1)) > 0 {
				return
			}
		case <-timer.C:
			k.t.Fatalf("a feed whose Lease found nothing was not woken within %v when %s", k.t.patience(), why)
		}
	}
}

func partialBatchLeavesHungry(t *trial) {
	k := t.subscribe()
	t.publish("one")
	k.takeOne()
	for len(k.lease(10)) > 0 {
		t.Error("leased a message that was not published")
	}
	for i := range 10 {
		t.publish("another")
		k.wokenFor("a publish")
		if got := len(k.lease(10)); got != 0 {
			t.Fatalf("round %d: leased %d more messages than were published", i, got)
		}
	}
}

func messageAlreadyThere(t *trial) {
	ids := t.publishMany(3)
	k := t.subscribe()
	wantAll(t, "messages published before Subscribe", idsOf(k.take(3)), ids)
}
