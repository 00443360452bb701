package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// One broker for all faults of a single queue: they do not disturb each other.
func TestFaults_OfAQueue(t *testing.T) { //nolint:tparallel // one closes the connections of all
	t.Parallel()
	rabbit := testservers.PrivateRabbitMQ(t)
	t.Run("S54 the queue is deleted while it is consumed", func(t *testing.T) { queueDeleted(t, rabbit) })
	t.Run("S42 S54 C8_6 the broker closes the channel", func(t *testing.T) { channelClosed(t, rabbit) })
	t.Run("S54 the broker closes the connections", func(t *testing.T) { connectionsClosed(t, rabbit) })
	t.Run("S42 S54 C8_2 a handler outlasts consumer_timeout", func(t *testing.T) { consumerTimeout(t, rabbit) })
	t.Run("S27 C6_13 a dead-letter queue refuses", func(t *testing.T) { deadLettersRefused(t, rabbit) })
	t.Run("S42 C8_4 a settlement comes twice or too late", func(t *testing.T) { settledTwice(t, rabbit) })
}

// queueDeleted: what was in the queue is gone with it, but the consumer is there for what comes next.
func queueDeleted(t *testing.T, rabbit *testservers.Broker) {
	s := onStage(t, rabbit.Rabbit, "deleted", nil)
	var seen book
	s.work(func(_ context.Context, d leasebus.Delivery, value string) error {
		seen.note(d, value)
		return nil
	})
	s.send("before")
	until(t, "the first is handled", func() bool { return seen.values() == 1 })
	for round := range 3 {
		rabbit.DeleteQueue(t, s.policy.Queue)
		value := fmt.Sprint("after ", round)
		until(t, "a publish is confirmed", func() bool {
			_, err := publish(t.Context(), s.broker, s.messages(value))
			return err == nil
		})
		until(t, value+" is handled", func() bool { return len(seen.of(value)) > 0 })
	}
}

// channelClosed: the handler's lease is lost with its channel, and nobody acknowledges on the next one what was
// delivered on the last.
func channelClosed(t *testing.T, rabbit *testservers.Broker) {
	s := onStage(t, rabbit.Rabbit, "channel", nil)
	var seen book
	ended := make(chan error, 1)
	release := make(chan struct{})
	w := s.work(func(ctx context.Context, d leasebus.Delivery, value string) error {
		seen.note(d, value)
		if value == "slow" && len(seen.of(value)) == 1 {
			<-ctx.Done()
			ended <- context.Cause(ctx)
			<-release
		}
		return nil
	}, leasebus.WithConcurrency(2))
	s.send("slow")
	until(t, "the handler runs", func() bool { return seen.values() == 1 })
	if n := rabbit.CloseChannels(t, s.policy.Queue); n != 1 {
		t.Errorf("closed %d channels, want 1", n)
	}
	until(t, "the message is delivered again", func() bool { return len(seen.of("slow")) == 2 })
	close(release) // the late settlement must harm nothing
	s.send("next")
	until(t, "the next one is handled", func() bool { return len(seen.of("next")) == 1 })
	until(t, "both are settled", func() bool { return w.Stats().Succeeded == 2 })
	if cause := <-ended; !errors.Is(cause, leasebus.ErrLeaseLost) {
		t.Errorf("the handler's context ended with %v, want the lost lease", cause)
	}
	if got := seen.attempts("slow"); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("attempts %v; a channel that ends is nobody's failure", got)
	}
	stats := w.Stats()
	if stats.LeaseLost != 1 || stats.PersistSkipped != 1 || stats.Succeeded != 2 {
		t.Errorf("stats %+v; want one lost lease whose late outcome was dropped", stats)
	}
	seen.wantOneIDEach(t)
}

func connectionsClosed(t *testing.T, rabbit *testservers.Broker) {
	s := onStage(t, rabbit.Rabbit, "connections", nil)
	var seen book
	s.work(func(_ context.Context, d leasebus.Delivery, value string) error {
		seen.note(d, value)
		return nil
	})
	for round := range 3 {
		value := fmt.Sprint("round ", round)
		s.send(value)
		until(t, value+" is handled", func() bool { return len(seen.of(value)) > 0 })
		if n := rabbit.CloseConnections(t, "for a test"); n < 2 {
			t.Errorf("closed %d connections, want those of the publisher and of the consumer", n)
		}
	}
	s.send("last")
	until(t, "the last is handled", func() bool { return len(seen.of("last")) > 0 })
}

// consumerTimeout: RabbitMQ closes the channel under a handler that is too long for it, and keeps doing so to that
// message; others are handled in between.
func consumerTimeout(t *testing.T, rabbit *testservers.Broker) {
	rabbit.Ctl(t, "eval", "application:set_env(rabbit, consumer_timeout, 3000).") // for channels that are opened from here on
	defer rabbit.Ctl(t, "eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
	s := onStage(t, rabbit.Rabbit, "timeout", nil)
	var seen book
	w := s.work(func(ctx context.Context, d leasebus.Delivery, value string) error {
		seen.note(d, value)
		if value == "long" && len(seen.of(value)) < 3 {
			<-ctx.Done()
			return context.Cause(ctx)
		}
		return nil
	})
	s.send("long", "short")
	until(t, "the long one was interrupted twice", func() bool { return len(seen.of("long")) == 3 })
	s.send("another")
	until(t, "all are settled", func() bool { return w.Stats().Succeeded == 3 })
	if got := seen.attempts("long"); !slices.Equal(got, []int{1, 1, 1}) {
		t.Errorf("attempts %v; RabbitMQ's limit is no failure of the message", got)
	}
	if n := rabbit.Ready(t, s.policy.DeadLetter.Queue); n != 0 {
		t.Errorf("%d dead letters, want none", n)
	}
}

// settledTwice: RabbitMQ closes a channel on which something is acknowledged twice, and delivers again what the channel
// had. Neither a second settlement nor one from an earlier channel gets that far.
func settledTwice(t *testing.T, rabbit *testservers.Broker) {
	s := onStage(t, rabbit.Rabbit, "twice", nil)
	feed := s.subscribe()
	s.send("a", "b")
	leases := feed.take(2)
	one := func(l *leasebus.Lease, kind leasebus.SettlementKind) leasebus.Result {
		t.Helper()
		batch := []leasebus.Settlement{{Lease: l, Kind: kind, DeadLetterQueue: s.policy.DeadLetter.Queue, Reason: leasebus.ReasonPermanent}}
		if err := feed.Settle(t.Context(), batch); err != nil {
			t.Fatal(err)
		}
		return batch[0].Result
	}
	if got := one(leases[0], leasebus.SettleComplete); got != leasebus.ResultOK {
		t.Fatalf("the first settlement: %d, want OK", got)
	}
	for _, kind := range []leasebus.SettlementKind{
		leasebus.SettleComplete, leasebus.SettleRelease, leasebus.SettleDeadLetter, leasebus.SettleRetry,
	} {
		if got := one(leases[0], kind); got != leasebus.ResultLost {
			t.Errorf("a second settlement, %v: %d, want lost", kind, got)
		}
	}
	renewals := []leasebus.Renewal{{Lease: leases[1]}}
	if err := feed.Renew(t.Context(), renewals); err != nil || renewals[0].Result != leasebus.ResultOK {
		t.Errorf("the neighbour's lease: %d, %v; want OK: the channel must still be there", renewals[0].Result, err)
	}

	rabbit.CloseChannels(t, s.policy.Queue)
	again := feed.take(1)
	if again[0].ID != leases[1].ID {
		t.Errorf("delivered again is %v, want %v", again[0].ID, leases[1].ID)
	}
	if got := one(leases[1], leasebus.SettleComplete); got != leasebus.ResultLost {
		t.Errorf("a settlement from the channel before: %d, want lost", got)
	}
	if got := one(again[0], leasebus.SettleComplete); got != leasebus.ResultOK {
		t.Errorf("the present one's: %d, want OK", got)
	}
	if n := rabbit.Ready(t, s.policy.Queue) + rabbit.Ready(t, s.policy.DeadLetter.Queue); n != 0 {
		t.Errorf("%d messages are left, want none", n)
	}
}

// hand drives a feed by hand.
type hand struct {
	leasebus.Feed
	t testing.TB
}

func (s *stage) subscribe() *hand {
	s.Helper()
	nothing := func() {}
	feed, err := s.broker.Subscribe(s.Context(), leasebus.Subscription{
		Queue: s.policy.Queue, Types: []string{s.policy.Type}, Owner: "tester#1", Policy: s.policy, Concurrency: 4, Wake: nothing, Check: nothing,
	})
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		if err := feed.Close(); err != nil {
			s.Errorf("close the feed: %v", err)
		}
	})
	return &hand{feed, s}
}

// take leases until it has n.
func (h *hand) take(n int) (all []*leasebus.Lease) {
	h.t.Helper()
	until(h.t, fmt.Sprint(n, " messages are leased"), func() bool {
		leases := make([]leasebus.Lease, n-len(all))
		got, err := h.Lease(h.t.Context(), leases)
		if err != nil {
			h.t.Fatal(err)
		}
		for i := range got {
			all = append(all, &leases[i])
		}
		return len(all) == n
	})
	return all
}

// A connection on which nothing comes any more is given up by both sides, and by the client first. What it had is
// delivered again when the broker has noticed too.
func TestFault_S54_S56_HalfOpenConnection(t *testing.T) {
	t.Parallel()
	direct := testservers.RabbitMQ(t)
	proxy, rabbit := direct.Proxy(t)
	s := onStage(t, rabbit, "silent", nil, amqp.WithHeartbeat(time.Second), amqp.WithPublishTimeout(2*time.Second))
	var seen book
	lost := make(chan error, 1)
	s.work(func(ctx context.Context, d leasebus.Delivery, value string) error {
		seen.note(d, value)
		if value == "held" && len(seen.of(value)) == 1 {
			<-ctx.Done()
			lost <- context.Cause(ctx)
			return context.Cause(ctx)
		}
		return nil
	})
	s.send("held")
	until(t, "the handler runs", func() bool { return seen.values() == 1 })
	proxy.Silence()
	silent := time.Now()
	if cause := <-lost; !errors.Is(cause, leasebus.ErrLeaseLost) {
		t.Errorf("the handler's context ended with %v, want the lost lease", cause)
	}
	if took := time.Since(silent); took > 10*time.Second {
		t.Errorf("the silence was noticed after %v; the heartbeat is 1 s", took)
	}
	until(t, "both connections are reported as down", func() bool {
		return !slices.ContainsFunc(s.broker.CheckHealth(t.Context()), func(c leasebus.HealthComponent) bool { return c.Status != leasebus.HealthDown })
	})
	if _, err := publish(t.Context(), s.broker, s.messages("unsent")); !errors.Is(err, amqp.ErrDisconnected) {
		t.Errorf("a publish into the silence: %v, want that there is no connection", err)
	}
	proxy.Cut() // the half that the broker still has
	proxy.Speak()
	until(t, "it is handled again", func() bool { return len(seen.of("held")) == 2 })
	s.send("after")
	until(t, "the next one is handled", func() bool { return len(seen.of("after")) == 1 })
	if got := seen.attempts("held"); !slices.Equal(got, []int{1, 1}) || strings.Contains(fmt.Sprint(seen.runs), "unsent") {
		t.Errorf("attempts %v of %v", got, seen.runs)
	}
	seen.wantOneIDEach(t)
}
