package amqp_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// sendRaw publishes as another program would.
func (s *stage) sendRaw(p amqp091.Publishing) {
	s.Helper()
	s.rabbit.Do(s, func(ch *amqp091.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		confirm, err := ch.PublishWithDeferredConfirm("", s.policy.Queue, true, false, p)
		if err != nil {
			return err
		}
		if !confirm.Wait() {
			return errors.New("not confirmed")
		}
		return nil
	})
}

// A dead letter says in its headers all that is known, to whoever reads it, leasebus or not.
func TestFeed_S29_S43_dead_letter_carries_why(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "why", nil)
	s.send("doomed")
	c := s.consume(1)
	l := c.take(1)[0]
	due := l.FirstDue
	first := time.Now()
	c.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Failure: failed(l, "first error")})
	l = c.take(1)[0]
	buried := time.Now()
	c.settled(leasebus.Settlement{
		Lease: l, Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonExhausted, DeadLetterQueue: s.policy.DeadLetter.Queue,
		Attempts: 2, Failure: failed(l, "last error"),
	})
	d, err := s.manager().Get(t.Context(), l.ID)
	if err != nil {
		t.Fatal(err)
	}
	if d.Queue != s.policy.Queue || d.Type != s.policy.Type || d.Reason != leasebus.ReasonExhausted || d.Error != "last error" ||
		d.ErrorType != "*test.Error" || d.Attempts != 2 || d.LastOwner != "hand#1" || !d.FirstDue.Equal(due) || d.Message.GetValue() != "doomed" {
		t.Errorf("dead letter %+v", d.DeadLetter)
	}
	near := func(what string, got, want time.Time) {
		t.Helper()
		if got.Sub(want).Abs() > time.Second || got.Location() != time.UTC {
			t.Errorf("%s: %v, want about %v, in UTC", what, got, want)
		}
	}
	near("first failed", d.FirstFailed, first)
	near("dead-lettered at", d.DeadLetteredAt, buried)
	if len(d.History) != 2 || d.History[0].Text != "first error" || d.History[1].Text != "last error" || d.History[1].Attempt != 2 || d.History[0].Owner != "hand#1" {
		t.Errorf("history %+v", d.History)
	}

	letters := s.rabbit.Take(t, s.policy.DeadLetter.Queue)
	if len(letters) != 1 {
		t.Fatalf("%d dead letters", len(letters))
	}
	for name, want := range map[string]any{
		"x-leasebus-origin-queue": s.policy.Queue, "x-leasebus-reason": "exhausted", "x-leasebus-error": "last error",
		"x-leasebus-error-type": "*test.Error", "x-leasebus-attempt": int64(2), "x-leasebus-first-due": due.UnixMilli(),
	} {
		if got := letters[0].Headers[name]; got != want {
			t.Errorf("header %s: %v, want %v", name, got, want)
		}
	}
	if letters[0].Type != s.policy.Type || letters[0].MessageId != l.ID.String() {
		t.Errorf("type %q, message_id %q", letters[0].Type, letters[0].MessageId)
	}
}

// Errors, histories and headers of any size: the dead letter gets through, and so do its neighbours' settlements.
func TestFeed_S43_C3_8_dead_letter_fits_into_a_frame(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "huge", nil)
	var long strings.Builder
	for range 4 << 10 {
		long.WriteString("é")
	}
	text := long.String()[:4<<10]
	s.sendRaw(amqp091.Publishing{
		Type: s.policy.Type, MessageId: "huge", Body: []byte{},
		Headers: amqp091.Table{"large": strings.Repeat("x", 70_000), "larger": strings.Repeat("y", 50_000), "small": "kept"},
	})
	c := s.consume(4)
	for range 30 {
		l := c.take(1)[0]
		c.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Failure: failed(l, text)})
	}
	l := c.take(1)[0]
	s.send("neighbour")
	neighbour := c.take(1)[0]
	c.settled(leasebus.Settlement{
		Lease: l, Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonExhausted, DeadLetterQueue: s.policy.DeadLetter.Queue,
		Attempts: l.Attempt, Failure: failed(l, text),
	}, leasebus.Settlement{Lease: neighbour})
	letters := s.rabbit.Take(t, s.policy.DeadLetter.Queue)
	if len(letters) != 1 {
		t.Fatalf("%d dead letters", len(letters))
	}
	h := letters[0].Headers
	if h["small"] != "kept" || h["x-leasebus-reason"] != "exhausted" || h["x-leasebus-attempt"] != int64(31) {
		t.Errorf("headers: small %v, reason %v, attempt %v", h["small"], h["x-leasebus-reason"], h["x-leasebus-attempt"])
	}
	if n := s.broker.Counters().FailedMoves; n != 0 {
		t.Errorf("%d publishes failed", n)
	}
}

// Messages of other programs are handled, retried and dead-lettered like our own, and keep what they came with.
func TestFeed_S39_message_of_another_program(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "foreign", nil)
	s.sendRaw(amqp091.Publishing{
		MessageId: "order-7", CorrelationId: "flow 7", AppId: "their app", Body: []byte{0x0a, 2, 'h', 'i'},
		Headers: amqp091.Table{"n": int32(3), "nested": amqp091.Table{"a": "b"}, "text": "ä"},
	})
	c := s.consume(1)
	l := c.take(1)[0]
	id := l.ID
	if l.Type != s.policy.Type || l.Attempt != 1 || l.Headers.Get("n") != "3" || l.Headers.Get("text") != "ä" ||
		l.Headers.Get(leasebus.HeaderCorrelation) != "flow 7" || l.Age > time.Minute {
		t.Errorf("lease %+v, headers %q", l.Envelope, headerNames(l))
	}
	c.settled(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Failure: failed(l, "no")})
	l = c.take(1)[0]
	if l.ID != id || l.Attempt != 2 {
		t.Errorf("second time: id %v, attempt %d; want %v, 2", l.ID, l.Attempt, id)
	}
	c.close()
	left := s.rabbit.Take(t, s.policy.Queue)
	if len(left) != 1 {
		t.Fatalf("%d messages left", len(left))
	}
	nested, _ := left[0].Headers["nested"].(amqp091.Table)
	if left[0].MessageId != "order-7" || left[0].AppId != "their app" || left[0].Headers["n"] != int32(3) || nested["a"] != "b" {
		t.Errorf("on its way: %+v", left[0])
	}
}

// What cannot be decoded takes the invalid route at once; a type that is not known waits for someone who knows it.
func TestFeed_S19_S20_S28_what_cannot_be_handled(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "invalid", nil)
	s.policy.DeadLetter.InvalidQueue = s.policy.Queue + leasebus.InvalidSuffix
	s.sendRaw(amqp091.Publishing{Body: []byte("{\"json\": true}"), ContentType: "application/json"})
	s.sendRaw(amqp091.Publishing{Type: "their.Type", MessageId: "1", Body: []byte{}})
	w := s.work(func(_ context.Context, d leasebus.Delivery, _ string) error {
		t.Errorf("the handler was called for %s", d.Type())
		return nil
	}, leasebus.WithUnhandledAfter(200*time.Millisecond))
	until(t, "both are dead letters", func() bool { return w.Stats().DeadLettered == 2 })
	invalid := s.rabbit.Take(t, s.policy.DeadLetter.InvalidQueue)
	if len(invalid) != 1 || invalid[0].Headers["x-leasebus-reason"] != "invalid" || string(invalid[0].Body) != "{\"json\": true}" || invalid[0].ContentType != "application/json" {
		t.Errorf("invalid: %+v", invalid)
	}
	unhandled := s.rabbit.Take(t, s.policy.DeadLetter.Queue)
	if len(unhandled) != 1 || unhandled[0].Headers["x-leasebus-reason"] != "unhandled_type" || unhandled[0].Headers["x-leasebus-attempt"] != int64(0) {
		t.Errorf("unhandled: %+v", unhandled)
	}
}

// Headers that say what cannot be are not believed, and counted.
func TestFeed_S39_bad_headers_are_counted(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "bad", nil)
	for _, headers := range []amqp091.Table{
		{"x-leasebus-attempt": "many"},
		{"x-leasebus-attempt": int64(-3), "x-leasebus-first-due": time.Now().Add(time.Hour).UnixMilli()},
		{"x-leasebus-first-due": "tomorrow"},
	} {
		s.sendRaw(amqp091.Publishing{Type: s.policy.Type, Headers: headers})
	}
	for _, l := range s.consume(4).take(3) {
		if l.Attempt != 1 || l.Age < 0 || l.Age > time.Minute {
			t.Errorf("attempt %d, age %v", l.Attempt, l.Age)
		}
	}
	if n := s.broker.Counters(); n.BadAttempts != 2 || n.BadFirstDues != 2 {
		t.Errorf("counters %+v, want 2 bad attempts and 2 bad times", n)
	}
}

// Without a dead-letter queue, by choice, what cannot be handled is deleted, and nothing else is.
func TestFeed_S28_discarded_by_choice(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "discard", func(p *leasebus.Policy) { p.DeadLetter = leasebus.DeadLetterPolicy{Discard: true} })
	s.send("bad", "good")
	w := s.work(func(_ context.Context, _ leasebus.Delivery, value string) error {
		if value == "bad" {
			return leasebus.Permanent(errors.New("no use"))
		}
		return nil
	})
	until(t, "one is discarded, one handled", func() bool { return w.Stats().Discarded == 1 && w.Stats().Succeeded == 1 })
	if err := w.drain(); err != nil {
		t.Error(err)
	}
	if n := s.rabbit.Ready(t, s.policy.Queue); n != 0 {
		t.Errorf("%d messages are left", n)
	}
	for d, err := range s.manager().DeadLetters(t.Context(), leasebus.Filter{}) {
		t.Errorf("dead letter %v, error %v", d.ID, err)
	}
}

// A consumer is sent no more than twice its concurrency and the hold budget: what is beyond is left for others.
func TestFeed_S2_prefetch_is_bounded(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "prefetch", nil, amqp.WithHoldBudget(1))
	s.send(make([]string, 20)...)
	s.consume(2)
	until(t, "the consumer has been sent its share", func() bool { return s.rabbit.Ready(t, s.policy.Queue) <= 20-5 })
	other := s.consume(10)
	if got := len(other.take(15)); got != 15 {
		t.Errorf("another got %d", got)
	}
	if more := other.lease(10); len(more) > 0 {
		t.Errorf("another got %d more than the first one leaves", len(more))
	}
}
