package amqp_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

func (s *stage) deadLetter(l *leasebus.Lease) leasebus.Settlement {
	return leasebus.Settlement{
		Lease: l, Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonPermanent, DeadLetterQueue: s.policy.DeadLetter.Queue,
		Attempts: l.Attempt, Failure: failed(l, "no use"),
	}
}

// closedDeadLetterQueue takes nothing until it is opened: it is full of one message.
func (s *stage) closedDeadLetterQueue() (open func()) {
	s.Helper()
	full := s.rabbit.Queue(s, "full")
	s.rabbit.Do(s, func(ch *amqp091.Channel) error {
		_, err := ch.QueueDeclare(full, true, false, false, false, amqp091.Table{"x-max-length": int64(0), "x-overflow": "reject-publish"})
		return err
	})
	s.policy.DeadLetter.Queue = full
	return func() {
		s.Helper()
		s.rabbit.DeleteQueue(s, full)
		s.rabbit.Do(s, func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclare(full, true, false, false, false, nil)
			return err
		})
	}
}

// While RabbitMQ does not take a dead letter, the delivery and the decision about it stay here. Nobody else is held up,
// until as many of them wait as may: then no more is handed out. When it takes them, all goes on by itself.
func TestFeed_S27_decision_is_kept_until_it_is_taken(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "kept", nil)
	theirs := dial(t, s.rabbit.URL(), amqp.WithExistingTopology(), amqp.WithHoldBudget(2))
	open := s.closedDeadLetterQueue()
	s.send("a", "b", "c", "d")
	c := s.consumeOn(theirs, 2)
	leases := c.take(3)

	first := s.deadLetter(leases[0])
	if r := c.settle(first, leasebus.Settlement{Lease: leases[1]}); r[0] != leasebus.ResultBusy || r[1] != leasebus.ResultOK {
		t.Fatalf("results %v, want busy for the dead letter and OK for its neighbour", r)
	}
	renewals := []leasebus.Renewal{{Lease: leases[0]}}
	if err := c.Renew(t.Context(), renewals); err != nil || renewals[0].Result != leasebus.ResultOK {
		t.Errorf("renewal of what is decided: %d, error %v, want OK", renewals[0].Result, err)
	}
	if r := c.settle(leasebus.Settlement{Lease: leases[0]}); r[0] != leasebus.ResultLost {
		t.Errorf("another decision about it: %d, want lost", r[0])
	}
	begun := time.Now()
	if r := c.settle(first); r[0] != leasebus.ResultBusy || time.Since(begun) >= time.Second {
		t.Errorf("asked again: %d after %v, want busy at once", r[0], time.Since(begun))
	}
	second := s.deadLetter(leases[2])
	if r := c.settle(second); r[0] != leasebus.ResultBusy {
		t.Errorf("a second dead letter: %d, want busy", r[0])
	}
	if more := c.lease(1); len(more) > 0 {
		t.Errorf("leased %d more, with as many decisions waiting as may be held", len(more))
	}
	if n := s.rabbit.Ready(t, s.policy.Queue); n > 1 {
		t.Errorf("%d messages ready: they must not go back", n)
	}

	until(t, "what was not taken is counted, and tried again", func() bool { return theirs.Counters().FailedMoves >= 3 })
	open()
	until(t, "both dead letters are taken", func() bool {
		return s.rabbit.Ready(t, s.policy.DeadLetter.Queue) == 2
	})
	if r := c.settle(first, second); r[0] != leasebus.ResultOK || r[1] != leasebus.ResultOK {
		t.Errorf("asked afterwards: %v, want OK", r)
	}
	if r := c.settle(first); r[0] != leasebus.ResultLost {
		t.Errorf("asked once more: %d, want lost", r[0])
	}
	select {
	case <-c.woken:
	case <-time.After(10 * time.Second):
		t.Error("nobody was told that there is something to lease again")
	}
	c.take(1)
}

// A feed that is closed before RabbitMQ has taken everything says so, and what was decided about goes back.
func TestFeed_S16_S27_close_tells_what_was_not_taken(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "untaken", nil)
	theirs := dial(t, s.rabbit.URL(), amqp.WithExistingTopology())
	s.closedDeadLetterQueue()
	s.send("a")
	feed, err := theirs.Subscribe(t.Context(), leasebus.Subscription{
		Queue: s.policy.Queue, Types: []string{s.policy.Type}, Owner: "hand#2", Policy: s.policy, Concurrency: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	c := &consumer{Feed: feed, s: s}
	l := c.take(1)[0]
	if r := c.settle(s.deadLetter(l)); r[0] != leasebus.ResultBusy {
		t.Errorf("result %d, want busy", r[0])
	}
	if err := feed.Close(); err == nil || !strings.Contains(err.Error(), "1 messages") {
		t.Errorf("close: %v, want it to tell of one message", err)
	}
	if err := feed.Close(); err != nil {
		t.Errorf("close again: %v", err)
	}
	if l := s.consumeOn(theirs, 1).take(1)[0]; l.Attempt != 1 {
		t.Errorf("back with attempt %d, want 1", l.Attempt)
	}
}

// A feed whose processor does not ask for long settles what it was given all the same.
func TestFeed_S39_settlements_without_wake_and_check(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "deaf", nil)
	feed, err := s.broker.Subscribe(t.Context(), leasebus.Subscription{
		Queue: s.policy.Queue, Types: []string{s.policy.Type}, Owner: "deaf#1", Policy: s.policy, Concurrency: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	c := &consumer{Feed: feed, s: s}
	s.send("a")
	c.settled(leasebus.Settlement{Lease: c.take(1)[0], Kind: leasebus.SettleRetry, Delay: 30 * time.Millisecond})
	c.settled(leasebus.Settlement{Lease: c.take(1)[0]})
	c.close()
	if n := s.rabbit.Ready(t, s.policy.Queue); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

// A feed whose broker is closed before it says so, to whoever leases and settles, and closes all the same.
func TestFeed_S53_broker_that_is_closed_first(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "orphan", nil)
	b := dial(t, s.rabbit.URL())
	s.send("a", "b")
	c := s.consumeOn(b, 1)
	l := c.take(1)[0]
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	until(t, "leasing is refused", func() bool {
		_, err := c.Lease(t.Context(), make([]leasebus.Lease, 1))
		return errors.Is(err, amqp.ErrClosed)
	})
	if r := c.settle(leasebus.Settlement{Lease: l}); r[0] != leasebus.ResultLost {
		t.Errorf("settled with %d, want lost", r[0])
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Errorf("stop: %v", err)
	}
	c.close()
	s.consume(2).take(2)
}
