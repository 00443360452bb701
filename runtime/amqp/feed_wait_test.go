package amqp_test

import (
	"errors"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

func brokerFrom(d time.Duration) func(*leasebus.Policy) {
	return func(p *leasebus.Policy) { p.Retry.WaitInBrokerFrom = &d }
}

func retryAs(r leasebus.RetryPolicy) func(*leasebus.Policy) {
	return func(p *leasebus.Policy) {
		r.Jitter = 0
		p.Retry = r
	}
}

// nominal is a failure with the policy's own delay.
func (s *stage) nominal(l *leasebus.Lease) leasebus.Settlement {
	d := s.policy.Retry.Delay(l.Attempt)
	return leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Delay: d, Nominal: d, Failure: failed(l, "no")}
}

// Below the threshold a wait is spent in the consumer, from it on in a queue of the broker, which nobody holds then.
func TestFeed_S40_where_a_wait_is_spent(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(*leasebus.Policy)
		rung   string // "" = in the consumer
	}{
		"29 s": {retryAs(leasebus.FixedRetry(3, 29*time.Second)), ""},
		"30 s": {retryAs(leasebus.FixedRetry(3, 30*time.Second)), ".retry.30s"},
		"90 s": {retryAs(leasebus.FixedRetry(3, 90*time.Second)), ".retry.90s"},
		"threshold of 2 s": {func(p *leasebus.Policy) {
			retryAs(leasebus.FixedRetry(3, 2*time.Second))(p)
			brokerFrom(2 * time.Second)(p)
		}, ".retry.2s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := onStage(t, testservers.RabbitMQ(t), "wait", tt.change)
			s.send("late")
			c := s.consume(1)
			l := c.take(1)[0]
			c.settled(s.nominal(l))
			if tt.rung == "" {
				if n := s.rabbit.Ready(t, s.policy.Queue); n != 0 {
					t.Errorf("%d messages ready, want it held", n)
				}
				return
			}
			waiting := s.rabbit.Take(t, s.policy.Queue+tt.rung)
			if len(waiting) != 1 {
				t.Fatalf("%d messages in %s, want 1", len(waiting), s.policy.Queue+tt.rung)
			}
			if attempt := waiting[0].Headers["x-leasebus-attempt"]; attempt != int64(2) || waiting[0].MessageId != l.ID.String() {
				t.Errorf("attempt %v, id %s, want 2 and %v", attempt, waiting[0].MessageId, l.ID)
			}
		})
	}
}

// A wait in the broker is over when it is over, whoever is there then.
func TestFeed_S40_message_comes_back_from_the_broker(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "back", func(p *leasebus.Policy) {
		retryAs(leasebus.FixedRetry(3, time.Second))(p)
		brokerFrom(0)(p)
	})
	s.send("late")
	c := s.consume(1)
	l := c.take(1)[0]
	due := l.FirstDue
	sent := time.Now()
	c.settled(s.nominal(l))
	c.close()
	l = s.consume(1).take(1)[0]
	if waited := time.Since(sent); waited < time.Second {
		t.Errorf("back after %v, want a second at least", waited)
	}
	if l.Attempt != 2 || !l.FirstDue.Equal(due) || l.Crashed {
		t.Errorf("attempt %d, first due %v, crashed %v; want 2, %v, false", l.Attempt, l.FirstDue, l.Crashed, due)
	}
	if names := headerNames(l); len(names) > 0 {
		t.Errorf("headers %v, want none: what RabbitMQ adds on the way is not the application's", names)
	}
	if n := s.broker.Counters().Crashes; n != 0 {
		t.Errorf("%d crashes counted", n)
	}
}

func headerNames(l *leasebus.Lease) (names []string) {
	for name := range l.Headers.All() {
		names = append(names, name)
	}
	return names
}

// A short wait that is cut off by the end of its consumer gives the message back at once, with its attempt unspent.
func TestFeed_S40_short_wait_is_forgotten_with_its_consumer(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "forgotten", retryAs(leasebus.FixedRetry(3, 20*time.Second)))
	s.send("late")
	c := s.consume(1)
	sent := time.Now()
	c.settled(s.nominal(c.take(1)[0]))
	c.close()
	l := s.consume(1).take(1)[0]
	if waited := time.Since(sent); waited > 15*time.Second {
		t.Errorf("back after %v: the wait was not given up", waited)
	}
	if l.Attempt != 1 {
		t.Errorf("attempt %d, want 1", l.Attempt)
	}
}

// More waits than may be held spill into the broker; those held stay.
func TestFeed_S40_waits_beyond_the_budget_spill(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "spill", retryAs(leasebus.FixedRetry(3, 3*time.Second)), amqp.WithHoldBudget(2))
	s.send("a", "b", "c", "d")
	c := s.consume(2)
	leases := c.take(4)
	sent := time.Now()
	for _, l := range leases {
		c.settled(s.nominal(l))
	}
	if n := s.rabbit.Ready(t, s.policy.Queue+".retry.3s"); n != 2 && time.Since(sent) < 2*time.Second {
		t.Errorf("%d messages in the retry queue, want those 2 that are over the budget", n)
	}
	if n := s.broker.Counters().Spilled; n != 2 {
		t.Errorf("%d spilled, want 2", n)
	}
	for _, l := range c.take(4) {
		if l.Attempt != 2 {
			t.Errorf("attempt %d, want 2", l.Attempt)
		}
	}
	if waited := time.Since(sent); waited < 3*time.Second {
		t.Errorf("all back after %v, want 3s at least", waited)
	}
}

// A delay that no policy names takes the shared ladder, hop by hop, and keeps what it has.
func TestFeed_S40_other_delays_take_the_ladder(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "ladder", brokerFrom(0))
	s.send("deferred")
	c := s.consume(1)
	l := c.take(1)[0]
	id, due := l.ID, l.FirstDue
	sent := time.Now()
	c.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Delay: 2500 * time.Millisecond, Failure: failed(l, "later")})
	l = c.take(1)[0]
	waited := time.Since(sent)
	if waited < 2500*time.Millisecond || waited > 20*time.Second {
		t.Errorf("back after %v, want 2.5s, rounded up to 3s", waited)
	}
	if l.ID != id || l.Attempt != 2 || !l.FirstDue.Equal(due) {
		t.Errorf("id %v, attempt %d, first due %v; want %v, 2, %v", l.ID, l.Attempt, l.FirstDue, id, due)
	}
	if n := s.broker.Counters(); n.Crashes+n.BadFirstDues+n.BadAttempts+n.FailedMoves != 0 {
		t.Errorf("counters %+v", n)
	}
}

// Messages whose queue was deleted while they waited are out of the way of all others, and not lost.
func TestFeed_S26_S40_deleted_queue_does_not_jam_the_ladder(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	gone, s := onStage(t, rabbit, "gone", nil), onStage(t, rabbit, "there", nil)
	before := rabbit.Ready(t, "leasebus.delay.lost")
	out := outgoing(gone.policy.Queue, 100)
	for i := range out {
		out[i].Delay = time.Second
	}
	if _, err := publish(t.Context(), gone.broker, out); err != nil {
		t.Fatal(err)
	}
	rabbit.DeleteQueue(t, gone.policy.Queue)
	out = outgoing(s.policy.Queue, 10)
	for i := range out {
		out[i].Delay = time.Second
	}
	if _, err := publish(t.Context(), s.broker, out); err != nil {
		t.Fatal(err)
	}
	s.consume(10).take(10)
	until(t, "the others are put aside", func() bool { return rabbit.Ready(t, "leasebus.delay.lost") >= before+100 })
}

// What is published for later to a queue that does not exist is refused, not kept waiting.
func TestPublish_S40_S41_later_to_a_queue_that_is_not_there(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL())
	out := outgoing(rabbit.Queue(t, "missing"), 1)
	out[0].Delay = time.Hour
	if _, err := publish(t.Context(), b, out); !errors.Is(err, amqp.ErrUnroutable) {
		t.Errorf("published with %v, want ErrUnroutable", err)
	}
}

// What is published for later is not handed out before, keeps its time, and is counted as nothing bad.
func TestFeed_S40_scheduled_message_keeps_its_time(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "later", nil)
	c := s.consume(1)
	out := outgoing(s.policy.Queue, 1)
	out[0].Type, out[0].Delay = s.policy.Type, 1300*time.Millisecond
	sent := time.Now()
	if _, err := publish(t.Context(), s.broker, out); err != nil {
		t.Fatal(err)
	}
	took := time.Since(sent)
	l := c.take(1)[0]
	if waited := time.Since(sent); waited < 1300*time.Millisecond {
		t.Errorf("handed out after %v", waited)
	}
	if at := l.FirstDue.Sub(sent); at < 1290*time.Millisecond || at > 1310*time.Millisecond+took {
		t.Errorf("first due %v after it was published, want 1.3s", at)
	}
	if n := s.broker.Counters(); n.BadFirstDues != 0 {
		t.Errorf("counters %+v", n)
	}
}

// retryWithoutRung has a message wait for a second in a retry queue that somebody has deleted.
func (s *stage) retryWithoutRung(by *amqp.Broker) {
	s.Helper()
	s.send("late")
	c := s.consumeOn(by, 1)
	l := c.take(1)[0]
	s.rabbit.DeleteQueue(s, s.policy.Queue+".retry.1s")
	sent := time.Now()
	until(s, "the retry is settled", func() bool { return c.settle(s.nominal(l))[0] == leasebus.ResultOK })
	if l = c.take(1)[0]; l.Attempt != 2 || time.Since(sent) < time.Second {
		s.Errorf("attempt %d after %v, want 2 after a second", l.Attempt, time.Since(sent))
	}
	if n := by.Counters().MissingRungs; n != 1 {
		s.Errorf("%d missing rungs counted, want 1", n)
	}
}

// A retry queue that is gone is declared again, and the wait spent in it.
func TestFeed_S40_missing_rung_is_declared_again(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "mended", func(p *leasebus.Policy) {
		retryAs(leasebus.FixedRetry(3, time.Second))(p)
		brokerFrom(0)(p)
	})
	s.retryWithoutRung(s.broker)
}

// The same for the ladder that all share, by whomever it is missed first: a consumer or a publisher.
func TestFeed_S40_missing_ladder_is_declared_again(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.PrivateRabbitMQ(t).Rabbit, "ladder", brokerFrom(0))
	s.send("late")
	c := s.consume(1)
	l := c.take(1)[0]
	deleteLadder := func() {
		t.Helper()
		s.rabbit.Do(t, func(ch *amqp091.Channel) error { return ch.ExchangeDelete("leasebus.delay.1s", false, false) })
		s.rabbit.DeleteQueue(t, "leasebus.delay.1s")
	}
	deleteLadder()
	wait := leasebus.Settlement{Lease: l, Kind: leasebus.SettleDefer, Delay: time.Second}
	until(t, "the deferral is settled", func() bool { return c.settle(wait)[0] == leasebus.ResultOK })
	c.take(1)
	if n := s.broker.Counters().MissingRungs; n != 1 {
		t.Errorf("%d missing rungs counted, want 1", n)
	}

	later := func() error {
		out := outgoing(s.policy.Queue, 1)
		out[0].Delay = time.Second
		_, err := publish(t.Context(), s.broker, out)
		return err
	}
	if err := later(); err != nil {
		t.Fatal(err)
	}
	deleteLadder()
	if err := later(); !errors.Is(err, amqp.ErrRefused) {
		t.Errorf("published with %v while the ladder was missing, want ErrRefused", err)
	}
	if err := later(); err != nil {
		t.Errorf("published again: %v", err)
	}
}

// Where it cannot be declared, the wait is spent in the consumer.
func TestFeed_S40_missing_rung_that_stays_missing(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "unmended", func(p *leasebus.Policy) {
		retryAs(leasebus.FixedRetry(3, time.Second))(p)
		brokerFrom(0)(p)
	})
	theirs := dial(t, s.rabbit.URL(), amqp.WithExistingTopology())
	s.retryWithoutRung(theirs)
}

// What RabbitMQ notes about its own dead-lettering does not grow from retry to retry.
func TestFeed_S39_headers_do_not_grow(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "growing", func(p *leasebus.Policy) {
		retryAs(leasebus.FixedRetry(10, 20*time.Millisecond))(p)
		brokerFrom(0)(p)
	})
	s.send("again")
	c := s.consume(1)
	for attempt := 1; attempt <= 4; attempt++ {
		l := c.take(1)[0]
		if l.Attempt != attempt {
			t.Fatalf("attempt %d, want %d", l.Attempt, attempt)
		}
		c.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Delay: 20 * time.Millisecond, Nominal: 20 * time.Millisecond})
	}
	c.take(1)
	c.close()
	left := s.rabbit.Take(t, s.policy.Queue)
	if len(left) != 1 {
		t.Fatalf("%d messages are left, want 1", len(left))
	}
	deaths, _ := left[0].Headers["x-death"].([]any)
	if len(deaths) != 1 {
		t.Fatalf("x-death: %v, want what the last wait has left", left[0].Headers["x-death"])
	}
	if death, _ := deaths[0].(amqp091.Table); death["count"] != int64(1) {
		t.Errorf("x-death counts %v, want 1", death["count"])
	}
}
