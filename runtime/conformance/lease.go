package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var leaseCases = []testCase{
	{name: "S1_invalid_subscription_is_refused", run: invalidSubscriptionIsRefused},
	{name: "S1_batch_size_is_honoured", run: batchSizeIsHonoured},
	{name: "S1_lease_of_nothing_answers_at_once", run: leaseOfNothing},
	{name: "S1_C5_12_done_context_leases_renews_and_settles_nothing", run: doneContextChangesNothing},
	{name: "S1_attempt_is_counted_at_lease", run: attemptIsCountedAtLease},
	{name: "S12_generation_grows_with_every_lease", needs: fencingToken, run: generationGrows},
	{name: "S2_C1_18_concurrent_consumers_get_disjoint_messages", run: consumersAreDisjoint},
	{name: "S2_live_lease_is_not_given_to_another", run: liveLeaseIsNotGiven},
	{name: "S5_renewals_keep_a_lease_beyond_its_length", needs: leaseExpiry, brief: true, run: renewalsKeepALease},
	{name: "S9_C2_1_C2_2_C2_8_expired_lease_is_leased_again", needs: leaseExpiry, brief: true, run: expiredLeaseIsLeasedAgain},
	{name: "S9_C2_3_owner_label_neither_keeps_nor_frees_a_lease", needs: leaseExpiry, run: ownerLabelPlaysNoPart},
	{name: "S9_lease_of_a_closed_feed_is_leased_again", brief: true, run: closedFeedLeavesItsLeases},
	{name: "S10_C2_7_worker_that_dies_has_spent_an_attempt", needs: leaseExpiry | attemptsAtLease, brief: true, run: deadWorkerSpendsAnAttempt},
	{name: "S13_renewals_are_answered_one_by_one", needs: leaseExpiry | fencingToken, brief: true, run: renewalsAreAnsweredOneByOne},
	{name: "S13_empty_batches_are_no_error", run: emptyBatches},
}

func invalidSubscriptionIsRefused(t *trial) {
	k := &consumer{t: t, owner: "worker#1"}
	for what, spoil := range map[string]func(*leasebus.Subscription){
		"no queue":              func(s *leasebus.Subscription) { s.Queue = "" },
		"no owner":              func(s *leasebus.Subscription) { s.Owner = "" },
		"no policy":             func(s *leasebus.Subscription) { s.Policy = nil },
		"lease of no length":    func(s *leasebus.Subscription) { s.Policy.Lease.Duration = 0 },
		"lease below no length": func(s *leasebus.Subscription) { s.Policy.Lease.Duration = -time.Second },
	} {
		sub := t.subscription(k)
		sub.Policy = t.policyFor(t.queue)
		spoil(&sub)
		if feed, err := t.store.Subscribe(t.ctx, sub); err == nil {
			t.Errorf("subscribe with %s: got no error", what)
			_ = feed.Close()
		}
	}
	if feed, err := t.store.Subscribe(t.doneContext(), t.subscription(k)); !errors.Is(err, context.Canceled) {
		t.Errorf("subscribe with a cancelled context: got error %v, want one that matches context.Canceled", err)
		if err == nil {
			_ = feed.Close()
		}
	}
}

func batchSizeIsHonoured(t *trial) {
	ids := t.publishMany(7)
	k := t.subscribe()
	dst := make([]leasebus.Lease, 5)
	var got []leasebus.ID
	t.until("all 7 messages were leased, at most 3 at a time", func() bool {
		n, err := k.Lease(t.ctx, dst[:3])
		t.must(err, "lease up to 3")
		if n > 3 {
			t.Fatalf("lease up to 3: answered %d", n)
		}
		for i := range n {
			got = append(got, dst[i].ID)
		}
		for i := n; i < len(dst); i++ {
			if i >= 3 && dst[i].ID != (leasebus.ID{}) {
				t.Fatalf("lease up to 3 wrote element %d", i)
			}
		}
		return len(got) >= len(ids)
	})
	wantAll(t, "messages", got, ids)
}

func leaseOfNothing(t *trial) {
	k := t.subscribe()
	begun := time.Now()
	k.nothing("nothing was published")
	if n, err := k.Lease(t.ctx, nil); n != 0 || err != nil {
		t.Errorf("lease into no room, queue empty: got %d, %v, want 0 and no error", n, err)
	}
	t.publish("there")
	if n, err := k.Lease(t.ctx, nil); n != 0 || err != nil {
		t.Errorf("lease into no room: got %d, %v, want 0 and no error", n, err)
	}
	if took := time.Since(begun); took > t.patience()/2 {
		t.Errorf("three leases of nothing took %v: Lease must not wait for messages", took)
	}
	want(t, "attempt of a message that was not leased by a lease into no room", k.takeOne().Attempt, 1)
}

func doneContextChangesNothing(t *trial) {
	t.publish("untouched")
	k := t.subscribe()
	if n, err := k.Lease(t.doneContext(), make([]leasebus.Lease, 1)); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("lease with a cancelled context: got %d, %v, want 0 and an error that matches context.Canceled", n, err)
	}
	l := k.takeOne()
	want(t, "attempt after a lease with a cancelled context", l.Attempt, 1)

	renewals := []leasebus.Renewal{{Lease: l}}
	if err := k.Renew(t.doneContext(), renewals); !errors.Is(err, context.Canceled) {
		t.Errorf("renew with a cancelled context: got error %v, want one that matches context.Canceled", err)
	}
	t.wantResult("renewal with a cancelled context", renewals[0].Result, leasebus.ResultUnknown)
	settlements := []leasebus.Settlement{{Lease: l}}
	if err := k.Settle(t.doneContext(), settlements); !errors.Is(err, context.Canceled) {
		t.Errorf("settle with a cancelled context: got error %v, want one that matches context.Canceled", err)
	}
	t.wantResult("settlement with a cancelled context", settlements[0].Result, leasebus.ResultUnknown)
	t.wantResult("renewal afterwards", k.renew(l)[0], leasebus.ResultOK)
	k.complete(l)
}

func attemptIsCountedAtLease(t *trial) {
	t.publish("tried")
	k := t.subscribe()
	for attempt := 1; attempt <= 5; attempt++ {
		l := k.takeOne()
		want(t, "attempt", l.Attempt, attempt)
		want(t, "crashed, with every outcome recorded", l.Crashed, false)
		k.settled(retry(l, 0, fmt.Sprint("attempt ", attempt)))
	}
}

func generationGrows(t *trial) {
	t.publish("fenced")
	k, last := t.subscribe(), int64(0)
	grown := func(after string) *leasebus.Lease {
		l := k.takeOne()
		if l.Generation <= last {
			t.Errorf("generation of the lease after %s: got %d, want more than %d", after, l.Generation, last)
		}
		last = l.Generation
		return l
	}
	k.settled(retry(grown("publish"), 0, "again"))
	k.settled(leasebus.Settlement{Lease: grown("a retry"), Kind: leasebus.SettleDefer})
	k.settled(leasebus.Settlement{Lease: grown("a deferral"), Kind: leasebus.SettleRelease})
	k.settled(leasebus.Settlement{Lease: grown("a release"), Kind: leasebus.SettleRelease, Started: true})
	k.settled(retry(grown("an interruption"), t.lease/10, "later"))
	k.bury(grown("a wait"))
	dead := t.takeDeadLetters(1)[0]
	if dead.Generation < last {
		t.Errorf("generation of the dead letter: got %d, want at least %d", dead.Generation, last)
	}
	t.requeue(leasebus.DeadLetterRef{ID: dead.ID})
	if l := grown("a requeue"); l.Generation < dead.Generation+2 {
		t.Errorf("generation of the lease after a requeue: got %d, want more than %d: both requeue and lease count", l.Generation, dead.Generation+1)
	}
}

func consumersAreDisjoint(t *trial) {
	const consumers, messages = 8, 400
	t.publishMany(messages)
	var (
		mu   sync.Mutex
		seen = make(map[leasebus.ID]string)
		done sync.WaitGroup
	)
	for range consumers {
		k := t.subscribe()
		done.Go(func() {
			dst := make([]leasebus.Lease, 7)
			for begun := time.Now(); time.Since(begun) < t.patience(); {
				n, err := k.Lease(t.ctx, dst)
				if err != nil {
					t.Errorf("lease: %v", err)
					return
				}
				batch := make([]leasebus.Settlement, n)
				mu.Lock()
				for i := range n {
					if other, twice := seen[dst[i].ID]; twice {
						t.Errorf("%s leased %v, which %s has", k.owner, dst[i].ID, other)
					}
					seen[dst[i].ID] = k.owner
					batch[i].Lease = &dst[i]
				}
				all := len(seen) == messages
				mu.Unlock()
				results, err := k.trySettle(batch...)
				for _, r := range results {
					if err != nil || r != leasebus.ResultOK {
						t.Errorf("complete: got %s and error %v, want OK", resultName(r), err)
					}
				}
				if all {
					return
				}
				if n == 0 {
					t.pause()
				}
			}
		})
	}
	done.Wait()
	want(t, "messages leased", len(seen), messages)
	t.nothingLeft()
}

func liveLeaseIsNotGiven(t *trial) {
	t.publish("mine")
	k, rival := t.subscribe(), t.subscribe()
	l := k.takeOne()
	rival.nothing("another consumer has it")
	k.nothing("this consumer has it already")
	k.complete(l)
	rival.nothing("it was completed")
}

func renewalsKeepALease(t *trial) {
	k, rival := t.subscribe(), t.subscribe()
	t.until("the machine ran evenly for three leases", func() bool {
		t.publish("kept")
		l := k.takeOne()
		for begun, sent := time.Now(), time.Now(); time.Since(begun) < 3*t.lease; t.pause() {
			stolen := rival.lease(1)
			if pause := time.Since(sent); pause > t.lease*9/10 { // too late with the renewal: nothing can be said
				rival.complete(stolen...)
				rival.complete(rival.lease(1)...)
				return false
			}
			if len(stolen) > 0 {
				t.Fatalf("leased by another (generation %d) %v after the last renewal, lease %v", stolen[0].Generation, time.Since(sent), t.lease)
			}
			if time.Since(sent) > t.lease/4 {
				sent = time.Now()
				t.wantResult("renewal", k.renew(l)[0], leasebus.ResultOK)
			}
		}
		k.complete(l)
		return true
	})
}

func expiredLeaseIsLeasedAgain(t *trial) {
	t.publishMany(50)
	k, rival := t.subscribe(), t.subscribe()
	sent := time.Now()
	first := k.take(50)
	second := rival.takeOne()
	t.notBefore("an unsettled message was leased by another", sent, t.lease)
	leases := append(rival.take(49), second)
	wantAll(t, "messages of the dead worker", sorted(idsOf(leases)), sorted(idsOf(first)))
	for _, l := range leases {
		if t.can(attemptsAtLease) {
			want(t, "attempt", l.Attempt, 2)
			want(t, "crashed", l.Crashed, true)
		}
	}
	rival.complete(leases...)
	t.nothingLeft()
}

func ownerLabelPlaysNoPart(t *trial) {
	t.publish("orphan")
	sent := time.Now()
	first := t.subscribeAs("host:1#same").takeOne()
	reborn := t.subscribeAs("host:1#same")
	reborn.nothing("its lease has not expired")
	l := reborn.takeOne()
	t.notBefore("an orphan was leased by a worker with the same name", sent, t.lease)
	want(t, "id", l.ID, first.ID)
	reborn.complete(l)
}

func closedFeedLeavesItsLeases(t *trial) {
	t.publish("left behind")
	k := t.subscribe()
	first := k.takeOne()
	t.must(k.Close(), "close")
	l := t.subscribe().takeOne()
	want(t, "id", l.ID, first.ID)
	if t.can(attemptsAtLease) {
		want(t, "attempt", l.Attempt, 2)
	}
}

func deadWorkerSpendsAnAttempt(t *trial) {
	t.publish("killer")
	for attempt := 1; attempt <= 3; attempt++ {
		l := t.subscribe().takeOne() // and nothing is heard of it again
		want(t, "attempt", l.Attempt, attempt)
		want(t, fmt.Sprintf("crashed, at attempt %d", attempt), l.Crashed, attempt > 1)
	}
	k := t.subscribe()
	k.settled(retry(k.takeOne(), 0, "an outcome at last"))
	l := k.takeOne()
	want(t, "attempt", l.Attempt, 5)
	want(t, "crashed, after a recorded outcome", l.Crashed, false)
}

func renewalsAreAnsweredOneByOne(t *trial) {
	t.publishMany(2)
	slow, k := t.subscribe(), t.subscribe()
	stale := slow.take(2)
	fresh := k.take(2) // when the leases of slow have expired
	t.publish("live")
	live := slow.takeOne()
	t.publish("done")
	done := slow.takeOne()
	slow.complete(done)

	results := slow.renew(stale[0], live, done, stale[1])
	t.wantResult("renewal of a lease that another has", results[0], leasebus.ResultLost)
	t.wantResult("renewal of a live lease between lost ones", results[1], leasebus.ResultOK)
	t.wantResult("renewal of a settled lease", results[2], leasebus.ResultLost)
	t.wantResult("renewal of the other stale lease", results[3], leasebus.ResultLost)
	for _, r := range k.renew(fresh...) {
		t.wantResult("renewal by the one who has it", r, leasebus.ResultOK)
	}
	k.complete(fresh...)
	slow.complete(live)
}

func emptyBatches(t *trial) {
	k := t.subscribe()
	t.must(k.Renew(t.ctx, nil), "renew nothing")
	t.must(k.Settle(t.ctx, nil), "settle nothing")
	for what, act := range map[string]func() ([]leasebus.Disposition, error){
		"requeue": func() ([]leasebus.Disposition, error) { return t.store.Requeue(t.ctx, t.queue, nil, "tester") },
		"discard": func() ([]leasebus.Disposition, error) { return t.store.Discard(t.ctx, t.queue, nil, "tester") },
	} {
		done, err := act()
		t.must(err, "%s nothing", what)
		want(t, "answers to "+what+" nothing", len(done), 0)
	}
}
