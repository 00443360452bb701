package conformance

import (
	"fmt"
	"strings"
	"sync"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var settleCases = []testCase{
	{name: "S12_C1_1_C1_2_C1_6_stale_settlement_and_renewal_are_lost", needs: leaseExpiry | fencingToken, brief: true, run: staleSettlementIsLost},
	{name: "S12_C1_5_deferral_does_not_let_a_stale_settlement_through", needs: leaseExpiry | fencingToken, brief: true, run: deferralKeepsTheFence},
	{name: "S12_C1_19_requeue_fences_the_worker_of_before", needs: leaseExpiry | fencingToken, brief: true, run: requeueFences},
	{name: "S12_second_settlement_is_lost", run: secondSettlementIsLost},
	{name: "S12_settlement_after_expiry_counts_while_nobody_took_over", needs: leaseExpiry, brief: true, run: lateSettlementCounts},
	{name: "S12_lease_of_another_feed_is_lost", needs: fencingToken, run: foreignLeaseIsLost},
	{name: "S12_C1_8_of_competing_settlements_one_is_applied", run: oneOfCompetingSettlements},
	{name: "S14_renewals_may_race_settlements", run: renewalsRaceSettlements},
	{name: "S15_mixed_batch_is_settled_each_its_own_way", needs: operate, run: mixedBatch},
	{name: "S15_lost_element_does_not_spoil_its_neighbours", run: lostElementAmidGoodOnes},
	{name: "S15_largest_texts_are_stored", run: largestTexts},
	{name: "S17_verify_tells_committed_from_still_leased", needs: verify, run: verifyTells},
	{name: "S17_verify_of_a_stale_lease_is_lost", needs: verify | leaseExpiry | fencingToken, brief: true, run: verifyOfAStaleLease},
	{name: "S19_C4_7_deferral_gives_the_attempt_back", run: deferralGivesTheAttemptBack},
	{name: "S24_retry_is_due_after_its_delay", run: retryIsDueAfterItsDelay},
	{name: "S24_C4_1_longest_delay_is_kept", needs: operate, run: longestDelay},
	{name: "S26_C4_9_waiting_message_does_not_hold_up_others", run: waitingHoldsNobodyUp},
	{name: "S50_release_is_at_once_visible_to_others", run: releaseIsVisible},
	{name: "S50_release_of_a_started_message_counts_an_interruption", run: releaseCountsInterruptions},
	{name: "S28_discard_deletes", run: discardDeletes},
	{name: "S60_payload_survives_retry_deferral_and_release", run: payloadSurvives},
}

// everyEnd is one settlement of l for each way to end it.
func (t *trial) everyEnd(l *leasebus.Lease) []leasebus.Settlement {
	discard := t.deadLetter(l, leasebus.ReasonPermanent, "stale")
	discard.Kind, discard.DeadLetterQueue = leasebus.SettleDiscard, ""
	return []leasebus.Settlement{
		{Lease: l, Kind: leasebus.SettleComplete},
		retry(l, 0, "stale"),
		{Lease: l, Kind: leasebus.SettleDefer},
		{Lease: l, Kind: leasebus.SettleRelease},
		{Lease: l, Kind: leasebus.SettleRelease, Started: true},
		t.deadLetter(l, leasebus.ReasonPermanent, "stale"),
		discard,
	}
}

// fenced checks that nothing that the holder of stale does reaches the holder of live, who has a later lease.
func (t *trial) fenced(was *consumer, stale *leasebus.Lease, is *consumer, live *leasebus.Lease) {
	t.Helper()
	for _, s := range t.everyEnd(stale) {
		t.wantResult(fmt.Sprintf("stale %v (generation %d, the live lease has %d)", s.Kind, stale.Generation, live.Generation),
			was.settle(s)[0], leasebus.ResultLost)
		t.wantResult(fmt.Sprintf("renewal of the live lease after a stale %v", s.Kind), is.renew(live)[0], leasebus.ResultOK)
	}
	t.wantResult("stale renewal", was.renew(stale)[0], leasebus.ResultLost)
	was.nothing("another has it")
}

func staleSettlementIsLost(t *trial) {
	t.publish("fenced")
	// The label is the same: only the generation tells the two apart.
	stalled, heir := t.subscribeAs("host:1#same"), t.subscribeAs("host:1#same")
	stale := stalled.takeOne()
	live := heir.takeOne()
	t.fenced(stalled, stale, heir, live)
	heir.settled(retry(live, 0, "the outcome that counts"))
	last := heir.takeOne()
	want(t, "attempt", last.Attempt, 3)
	t.fenced(stalled, stale, heir, last)
	t.fenced(heir, live, heir, last)
	heir.complete(last)
	for _, s := range t.everyEnd(stale) {
		t.wantResult(fmt.Sprintf("stale %v of a completed message", s.Kind), stalled.settle(s)[0], leasebus.ResultLost)
	}
	heir.nothing("it was completed")
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
}

func deferralKeepsTheFence(t *trial) {
	t.publish("deferred")
	stalled, heir := t.subscribeAs("host:1#same"), t.subscribeAs("host:1#same")
	stale := stalled.takeOne()
	heir.settled(leasebus.Settlement{Lease: heir.takeOne(), Kind: leasebus.SettleDefer})
	heir.settled(leasebus.Settlement{Lease: heir.takeOne(), Kind: leasebus.SettleRelease})
	// Both attempts after the first were given back, so that the numbers of attempts meet.
	live := heir.takeOne()
	t.fenced(stalled, stale, heir, live)
	heir.complete(live)
}

func requeueFences(t *trial) {
	t.publish("requeued")
	stalled, heir := t.subscribeAs("host:1#same"), t.subscribeAs("host:1#same")
	stale := stalled.takeOne()
	buried := heir.takeOne()
	heir.bury(buried)
	t.wantResult("stale complete of a dead letter", stalled.settle(leasebus.Settlement{Lease: stale})[0], leasebus.ResultLost)
	t.requeue(leasebus.DeadLetterRef{ID: stale.ID})
	t.wantResult("stale complete of a requeued message", stalled.settle(leasebus.Settlement{Lease: stale})[0], leasebus.ResultLost)
	live := heir.takeOne()
	want(t, "attempt after a requeue", live.Attempt, 1)
	t.fenced(stalled, stale, heir, live)
	t.fenced(heir, buried, heir, live)
	heir.complete(live)
}

func secondSettlementIsLost(t *trial) {
	k := t.subscribe()
	for i := range t.everyEnd(&leasebus.Lease{}) {
		for j := range t.everyEnd(&leasebus.Lease{}) {
			t.publish("settled twice")
			l := k.takeOne()
			first, second := t.everyEnd(l)[i], t.everyEnd(l)[j]
			if first.Kind == leasebus.SettleRetry || first.Kind == leasebus.SettleDefer {
				first.Delay = 1000 * t.lease // out of the way
			}
			k.settled(first)
			t.wantResult(fmt.Sprintf("%v after %v", second.Kind, first.Kind), k.settle(second)[0], leasebus.ResultLost)
			t.wantResult(fmt.Sprintf("renewal after %v", first.Kind), k.renew(l)[0], leasebus.ResultLost)
			if first.Kind == leasebus.SettleRelease { // back in the queue
				k.complete(k.takeOne())
			}
			k.nothing(fmt.Sprintf("it was settled by %v, %v came too late", first.Kind, second.Kind))
		}
	}
}

func lateSettlementCounts(t *trial) {
	t.publish("late")
	k, watcher := t.subscribe(), t.subscribe()
	l := k.takeOne()
	leased := time.Now()
	t.until("the lease had expired", func() bool { return time.Since(leased) > t.lease+clockSlack })
	t.wantResult("complete after expiry, before another lease", k.settle(leasebus.Settlement{Lease: l})[0], leasebus.ResultOK)
	watcher.nothing("it was completed, late and by nobody else")
}

func foreignLeaseIsLost(t *trial) {
	t.publish("mine")
	k, other := t.subscribe(), t.subscribe()
	l := k.takeOne()
	for _, s := range t.everyEnd(l) {
		t.wantResult(fmt.Sprintf("%v by one who has another owner", s.Kind), other.settle(s)[0], leasebus.ResultLost)
	}
	t.wantResult("renewal by one who has another owner", other.renew(l)[0], leasebus.ResultLost)
	k.complete(l)
}

func oneOfCompetingSettlements(t *trial) {
	const rounds = 20
	k := t.subscribe()
	for range rounds {
		t.publish("contested")
		l := k.takeOne()
		ends := t.everyEnd(l)
		for i := range ends {
			if ends[i].Kind != leasebus.SettleDeadLetter && ends[i].Kind != leasebus.SettleDiscard {
				ends[i].Kind, ends[i].Failure = leasebus.SettleComplete, nil
			}
		}
		results := make([]leasebus.Result, len(ends))
		var done sync.WaitGroup
		for i := range ends {
			done.Go(func() {
				answers, err := k.trySettle(ends[i])
				if err != nil {
					t.Errorf("settle: %v", err)
				}
				results[i] = answers[0]
			})
		}
		done.Wait()
		applied := 0
		for i, r := range results {
			switch r {
			case leasebus.ResultOK:
				applied++
			case leasebus.ResultLost:
			default:
				t.Errorf("competing %v: got %s, want OK or Lost", ends[i].Kind, resultName(r))
			}
		}
		want(t, "competing settlements that were applied", applied, 1)
		k.nothing("one of the competing settlements has ended it")
		for _, d := range t.deadLetters(leasebus.Filter{}) {
			t.discard(leasebus.DeadLetterRef{ID: d.ID})
		}
	}
}

func renewalsRaceSettlements(t *trial) {
	const messages = 200
	t.publishMany(messages)
	k := t.subscribe()
	leases := k.take(messages)
	over := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
			}
			batch := make([]leasebus.Renewal, messages)
			for i := range batch {
				batch[i].Lease = leases[i]
			}
			if err := k.Renew(t.ctx, batch); err != nil {
				t.Errorf("renew: %v", err)
				return
			}
			for _, r := range batch {
				if r.Result != leasebus.ResultOK && r.Result != leasebus.ResultLost && r.Result != leasebus.ResultBusy {
					t.Errorf("renewal amid settlements: got %s, want OK, Lost or Busy", resultName(r.Result))
				}
			}
			t.pause()
		}
	})
	// Against the order in which they were leased: opposite orders of locks deadlock.
	for i := messages; i > 0; i -= 20 {
		batch := make([]leasebus.Settlement, 20)
		for j := range batch {
			batch[j].Lease = leases[i-1-j]
		}
		k.settled(batch...)
		t.pause()
	}
	close(over)
	done.Wait()
	k.nothing("all were completed")
}

func mixedBatch(t *trial) {
	t.publishMany(7)
	k := t.subscribe()
	leases := k.take(7)
	batch := make([]leasebus.Settlement, 0, len(leases))
	for i, l := range leases {
		s := t.everyEnd(l)[i]
		if s.Kind == leasebus.SettleRetry || s.Kind == leasebus.SettleDefer {
			s.Delay = 1000 * t.lease
		}
		batch = append(batch, s)
	}
	k.settled(batch...)
	stats := t.stats()
	want(t, "processing", stats.Processing, 0)
	want(t, "failed (retried)", stats.Failed, 1)
	want(t, "pending (deferred, released, interrupted)", stats.Pending, 3)
	want(t, "dead-lettered", stats.DeadLettered, 1)
	want(t, "due (released, interrupted)", stats.Due, 2)
	wantAll(t, "dead letters", idsOfLetters(t.takeDeadLetters(1)), []leasebus.ID{leases[5].ID})
	wantAll(t, "messages that are back", sorted(idsOf(k.take(2))), sorted(idsOf(leases[3:5])))
	k.nothing("the others are done or wait")
}

func lostElementAmidGoodOnes(t *trial) {
	t.publishMany(9)
	k := t.subscribe()
	leases := k.take(9)
	k.complete(leases[4])
	batch := make([]leasebus.Settlement, len(leases))
	for i, l := range leases {
		batch[i].Lease = l
	}
	for i, r := range k.settle(batch...) {
		right := leasebus.ResultOK
		if i == 4 {
			right = leasebus.ResultLost
		}
		t.wantResult(fmt.Sprintf("element %d of a batch whose element 4 is lost", i), r, right)
	}
	k.nothing("all were completed")
}

func largestTexts(t *trial) {
	t.publish("verbose")
	k := t.subscribe()
	texts := []string{
		strings.Repeat("ä", 2048), strings.Repeat("漢", 1365), "quotes ' \" \\ and\r\nlines\tand \u0001 control \u007f",
		"%s %d {} \\u0000 \\x00 $1", "",
	}
	l := k.takeOne()
	for _, text := range texts {
		s := retry(l, 0, text)
		s.Failure.ErrorType = strings.Repeat("*", leasebus.MaxNameBytes)
		k.settled(s)
		l = k.takeOne()
	}
	k.settled(t.deadLetter(l, leasebus.ReasonPermanent, texts[0]))
	dead := t.takeDeadLetters(1)[0]
	if t.can(operate) {
		want(t, "text of the dead letter", dead.Error, texts[0])
		for i, text := range texts {
			if i >= len(dead.History) {
				t.Fatalf("history holds %d failures, want %d", len(dead.History), len(texts)+1)
			}
			want(t, fmt.Sprintf("text of failure %d", i), dead.History[i].Text, text)
		}
	}
}

func verifyTells(t *trial) {
	t.publish("verified")
	k := t.subscribe()
	l := k.takeOne()
	ask := leasebus.Settlement{Lease: l, Kind: leasebus.SettleVerify}
	for range 2 {
		t.wantResult("verify of a live lease", k.settle(ask)[0], leasebus.ResultStillLeased)
	}
	t.wantResult("renewal after verify", k.renew(l)[0], leasebus.ResultOK)
	k.complete(l)
	t.wantResult("verify of a completed lease", k.settle(ask)[0], leasebus.ResultOK)
	k.nothing("it was completed")
}

func verifyOfAStaleLease(t *trial) {
	t.publish("verified")
	k, heir := t.subscribe(), t.subscribe()
	stale := k.takeOne()
	ask := leasebus.Settlement{Lease: stale, Kind: leasebus.SettleVerify}
	live := heir.takeOne()
	t.wantResult("verify of a lease that another has", k.settle(ask)[0], leasebus.ResultLost)
	heir.complete(live)
}

func deferralGivesTheAttemptBack(t *trial) {
	t.publish("patient")
	k := t.subscribe()
	for range 30 {
		l := k.takeOne()
		want(t, "attempt", l.Attempt, 1)
		k.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleDefer})
	}
	l := k.takeOne()
	sent := time.Now()
	k.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleDefer, Delay: t.lease / 2})
	k.nothing("it was deferred")
	last := k.takeOne()
	t.notBefore("a deferred message was leased", sent, t.lease/2)
	want(t, "attempt", last.Attempt, 1)
	want(t, "interruptions", last.Interruptions, 0)
	k.complete(last)
}

func retryIsDueAfterItsDelay(t *trial) {
	t.publish("failing")
	k := t.subscribe()
	l := k.takeOne()
	for attempt, delay := range []time.Duration{t.lease / 2, t.lease / 10, 0, -time.Second} {
		sent := time.Now()
		k.settled(retry(l, delay, "again"))
		if delay > t.lease/4 {
			k.nothing("its retry is not due")
			if t.can(operate) {
				want(t, "failed", t.stats().Failed, 1)
				want(t, "due", t.stats().Due, 0)
			}
		}
		l = k.takeOne()
		t.notBefore(fmt.Sprintf("a retry with delay %v was leased", delay), sent, delay)
		want(t, "attempt", l.Attempt, attempt+2)
	}
	k.complete(l)
}

func longestDelay(t *trial) {
	const century = 876_000 * time.Hour // the longest that the engine asks for
	ids := t.publishMany(2)
	k := t.subscribe()
	leases := k.take(2)
	k.settled(retry(leases[0], century, "much later"), leasebus.Settlement{Lease: leases[1], Kind: leasebus.SettleDefer, Delay: century})
	k.nothing("it is due in a hundred years")
	stats := t.stats()
	want(t, "failed", stats.Failed, 1)
	want(t, "pending", stats.Pending, 1)
	want(t, "due", stats.Due, 0)
	_ = ids
}

func waitingHoldsNobodyUp(t *trial) {
	ids := t.publish("bad", "good")
	k := t.subscribe()
	k.settled(retry(k.takeOne(), 1000*t.lease, "much later"))
	begun := time.Now()
	want(t, "next message", k.takeOne().ID, ids[1])
	if took := time.Since(begun); took > t.patience()/2 {
		t.Errorf("the second message was leased after %v: the first one's wait held it up", took)
	}
}

func releaseIsVisible(t *trial) {
	t.publishMany(10)
	k, other := t.subscribe(), t.subscribe()
	leases := k.take(10)
	batch := make([]leasebus.Settlement, len(leases))
	for i, l := range leases {
		batch[i] = leasebus.Settlement{Lease: l, Kind: leasebus.SettleRelease}
	}
	k.settled(batch...)
	k.leave()
	released := time.Now()
	again := other.take(10)
	if took := time.Since(released); t.can(leaseExpiry) && took > t.lease*9/10 {
		t.Errorf("released messages were leased after %v: the lease of %v was waited for", took, t.lease)
	}
	wantAll(t, "messages", sorted(idsOf(again)), sorted(idsOf(leases)))
	for _, l := range again {
		want(t, "attempt after a release", l.Attempt, 1)
		want(t, "interruptions after a release of what was not started", l.Interruptions, 0)
	}
	other.complete(again...)
}

func releaseCountsInterruptions(t *trial) {
	t.publish("interrupted")
	k := t.subscribe()
	for i := range 12 {
		l := k.takeOne()
		want(t, "attempt", l.Attempt, 1)
		want(t, "interruptions", l.Interruptions, i)
		k.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRelease, Started: true})
	}
	k.settled(retry(k.takeOne(), 0, "failed"))
	l := k.takeOne()
	want(t, "attempt after a failure", l.Attempt, 2)
	want(t, "interruptions after a failure", l.Interruptions, 12)
}

func discardDeletes(t *trial) {
	t.publish("unwanted")
	k := t.subscribe()
	s := t.deadLetter(k.takeOne(), leasebus.ReasonPermanent, "no use")
	s.Kind, s.DeadLetterQueue = leasebus.SettleDiscard, ""
	k.settled(s)
	k.nothing("it was discarded")
	want(t, "dead letters", len(t.deadLetters(leasebus.Filter{})), 0)
	t.nothingLeft()
}

func payloadSurvives(t *trial) {
	out := t.outgoing("")
	out.Payload = everyByte()
	out.Headers = leasebus.NewHeaders(map[string]string{"kept": "äöü"})
	t.send(out)
	k := t.subscribe()
	check := func(after string) *leasebus.Lease {
		l := k.takeOne()
		wantAll(t, "payload after "+after, l.Payload, everyByte())
		want(t, "header after "+after, l.Headers.Get("kept"), "äöü")
		return l
	}
	k.settled(retry(check("publish"), 0, "again"))
	k.settled(retry(check("a retry"), t.lease/10, "again"))
	k.settled(leasebus.Settlement{Lease: check("a retry with a delay"), Kind: leasebus.SettleDefer})
	k.settled(leasebus.Settlement{Lease: check("a deferral"), Kind: leasebus.SettleRelease})
	k.bury(check("a release"))
	wantAll(t, "payload of the dead letter", t.takeDeadLetters(1)[0].Payload, everyByte())
	t.requeue(leasebus.DeadLetterRef{ID: out.ID})
	k.complete(check("a requeue"))
}
