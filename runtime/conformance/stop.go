package conformance

import (
	"errors"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var stopCases = []testCase{
	{name: "S50_C5_11_stopped_feed_leases_nothing", run: stoppedFeedLeasesNothing},
	{name: "S50_stopped_feed_renews_and_settles", run: stoppedFeedSettles},
	{name: "S50_stop_hands_back_what_is_not_leased", run: stopHandsBack},
	{name: "S53_stop_and_close_twice_are_no_error", run: stopAndCloseTwice},
	{name: "S53_closed_feed_does_not_wake", run: closedFeedDoesNotWake},
}

func (k *consumer) stopped() {
	k.t.Helper()
	k.t.must(k.Stop(k.t.ctx), "stop")
	n, err := k.Lease(k.t.ctx, make([]leasebus.Lease, 1))
	if n != 0 || !errors.Is(err, leasebus.ErrFeedStopped) {
		k.t.Errorf("lease after Stop: got %d, %v, want 0 and an error that matches ErrFeedStopped", n, err)
	}
}

func stoppedFeedLeasesNothing(t *trial) {
	t.publishMany(5)
	k := t.subscribe()
	k.stopped()
	t.publish("later")
	k.stopped()
	for _, l := range t.subscribe().take(6) {
		want(t, "attempt", l.Attempt, 1)
	}
}

func stoppedFeedSettles(t *trial) {
	t.publishMany(3)
	k := t.subscribe()
	leases := k.take(3)
	k.stopped()
	for _, r := range k.renew(leases...) {
		t.wantResult("renewal after Stop", r, leasebus.ResultOK)
	}
	k.settled(
		leasebus.Settlement{Lease: leases[0]},
		leasebus.Settlement{Lease: leases[1], Kind: leasebus.SettleRelease},
		retry(leases[2], 0, "after Stop"),
	)
	other := t.subscribe()
	wantAll(t, "messages that another gets", sorted(idsOf(other.take(2))), sorted(idsOf(leases[1:])))
	other.nothing("it was completed after Stop")
}

func stopHandsBack(t *trial) {
	ids := t.publishMany(20)
	k, other := t.subscribe(), t.subscribe()
	mine := k.take(2)
	k.stopped()
	rest := other.take(18) // at once, not when the feed is closed
	for _, l := range rest {
		want(t, "attempt of what was handed back", l.Attempt, 1)
	}
	wantAll(t, "messages", sorted(append(idsOf(mine), idsOf(rest)...)), sorted(ids))
	k.complete(mine...)
	other.complete(rest...)
}

func stopAndCloseTwice(t *trial) {
	k := t.subscribe()
	k.stopped()
	k.stopped()
	t.must(k.Close(), "close")
	t.must(k.Close(), "close again")
	unstopped := t.subscribe()
	t.must(unstopped.Close(), "close without Stop")
}

func closedFeedDoesNotWake(t *trial) {
	k, other := t.subscribe(), t.subscribe()
	k.nothing("nothing was published")
	t.must(k.Close(), "close")
	select {
	case <-k.woken: // of before
	default:
	}
	t.publishMany(3)
	other.complete(other.take(3)...)
	select {
	case <-k.woken:
		t.Error("Wake was called after Close had returned")
	default:
	}
}
