package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// bury makes dead letters of new messages with these values, and returns their ids.
func (s *stage) bury(values ...string) []leasebus.ID {
	s.Helper()
	ids := s.send(values...)
	before := s.rabbit.Ready(s, s.policy.DeadLetter.Queue)
	w := s.work(func(_ context.Context, _ leasebus.Delivery, value string) error {
		return leasebus.Permanent(fmt.Errorf("cannot handle %s", value))
	}, leasebus.WithConcurrency(1))
	until(s, "all were dead-lettered", func() bool {
		return s.rabbit.Ready(s, s.policy.DeadLetter.Queue) == before+len(values)
	})
	if err := w.drain(); err != nil {
		s.Fatal(err)
	}
	return ids
}

func (s *stage) manager() *leasebus.TypedManager[*wrapperspb.StringValue] {
	return leasebus.NewTypedManager[*wrapperspb.StringValue](s.policy, s.broker, leasebus.By("tester"))
}

func TestOperator_S32_dead_letters_are_listed_and_stay(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "browse", nil)
	var values []string
	for i := range 250 {
		values = append(values, fmt.Sprint("value ", i))
	}
	ids := s.bury(values...)
	for round := range 3 {
		var got []leasebus.ID
		for d, err := range s.manager().DeadLetters(t.Context(), leasebus.Filter{}) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, d.ID)
			if d.Error != "cannot handle "+d.Message.GetValue() || d.Reason != leasebus.ReasonPermanent || d.Queue != s.policy.Queue ||
				d.Attempts != 1 || d.DeadLetterQueue != s.policy.DeadLetter.Queue || len(d.History) != 1 || d.LastOwner == "" {
				t.Fatalf("dead letter %+v", d)
			}
		}
		if !slices.Equal(got, ids) {
			t.Fatalf("round %d: %d listed, want %d, in order", round, len(got), len(ids))
		}
	}
	stats, err := s.manager().Stats(t.Context())
	if err != nil || stats.DeadLettered != 250 || stats.Pending != 0 {
		t.Errorf("stats %+v, error %v", stats, err)
	}
	if _, err := s.manager().Get(t.Context(), leasebus.NewID()); !errors.Is(err, leasebus.ErrNotFound) {
		t.Errorf("get of an unknown id: %v", err)
	}
	result, err := s.manager().RequeueAll(t.Context(), leasebus.Filter{ErrorContains: "value 1"})
	if err != nil || result.Requeued != 111 || len(result.Skipped) != 0 {
		t.Fatalf("requeue all: %+v, %v", result, err)
	}
	if n := s.rabbit.Ready(t, s.policy.Queue); n != 111 {
		t.Errorf("%d messages are back in the queue, want 111", n)
	}
}

// Acting on dead letters: by id and by place, twins together, each answer in its place, nothing lost.
func TestOperator_S30_S33_S36_requeue_and_discard(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "act", nil)
	ids := s.bury("a", "b", "c", "d")
	// A crash between the copy and the acknowledgement has left two.
	for _, twin := range s.rabbit.Take(t, s.policy.DeadLetter.Queue) {
		copies := 1
		if twin.MessageId == ids[1].String() {
			copies = 2
		}
		for range copies {
			s.sendTo(s.policy.DeadLetter.Queue, twin)
		}
	}
	letters, err := s.broker.DeadLetters(t.Context(), s.policy.Queue, leasebus.Filter{}, "", 10)
	if err != nil || len(letters) != 5 {
		t.Fatalf("%d letters, %v; want 5", len(letters), err)
	}
	unknown := leasebus.NewID()
	refs := []leasebus.DeadLetterRef{{ID: unknown}, {ID: ids[1]}, {ID: letters[0].ID, Cursor: letters[0].Cursor}, {ID: ids[2], Cursor: letters[0].Cursor}}
	done, err := s.broker.Requeue(t.Context(), s.policy.Queue, refs, "tester")
	want := []leasebus.Disposition{leasebus.DispositionNotFound, leasebus.DispositionDone, leasebus.DispositionDone, leasebus.DispositionNotFound}
	if err != nil || !slices.Equal(done, want) {
		t.Fatalf("requeue: %v, %v; want %v", done, err, want)
	}
	if n := s.rabbit.Ready(t, s.policy.Queue); n != 3 {
		t.Errorf("%d messages are back, want a and both twins of b", n)
	}
	done, err = s.broker.Discard(t.Context(), s.policy.Queue, []leasebus.DeadLetterRef{{ID: ids[2]}, {ID: ids[2]}, {ID: ids[0]}}, "tester")
	if want := []leasebus.Disposition{leasebus.DispositionDone, leasebus.DispositionDone, leasebus.DispositionNotFound}; err != nil || !slices.Equal(done, want) {
		t.Fatalf("discard: %v, %v; want %v", done, err, want)
	}
	if n := s.rabbit.Ready(t, s.policy.DeadLetter.Queue); n != 1 {
		t.Errorf("%d dead letters are left, want d", n)
	}

	// What came back begins anew, and remembers.
	for _, l := range s.consume(4).take(3) {
		if l.Attempt != 1 || l.Age > time.Minute {
			t.Errorf("attempt %d, age %v after a requeue", l.Attempt, l.Age)
		}
	}
	for _, garbage := range []leasebus.Cursor{"garbage", "-1." + leasebus.Cursor(unknown.String()), "5", "5.x"} {
		if _, err := s.broker.DeadLetters(t.Context(), s.policy.Queue, leasebus.Filter{}, garbage, 1); err == nil {
			t.Errorf("cursor %q was taken", garbage)
		}
		if _, err := s.broker.Requeue(t.Context(), s.policy.Queue, []leasebus.DeadLetterRef{{Cursor: garbage}}, "x"); err == nil {
			t.Errorf("a reference with cursor %q was taken", garbage)
		}
	}
	if _, err := s.broker.DeadLetters(t.Context(), s.policy.Queue, leasebus.Filter{}, "", 0); err == nil {
		t.Error("a limit of 0 was taken")
	}
}

// sendTo publishes a message again as it is.
func (s *stage) sendTo(queue string, d amqp091.Delivery) {
	s.Helper()
	s.rabbit.Do(s, func(ch *amqp091.Channel) error {
		return ch.Publish("", queue, true, false, amqp091.Publishing{
			Headers: d.Headers, ContentType: d.ContentType, DeliveryMode: d.DeliveryMode, MessageId: d.MessageId, Type: d.Type, Body: d.Body,
		})
	})
	before := 0
	until(s, "it is there", func() bool { before = s.rabbit.Ready(s, queue); return before > 0 })
}

// History and operators' actions outlive a requeue; attempts and age do not.
func TestOperator_S33_history_outlives_a_requeue(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "history", nil)
	id := s.bury("again")[0]
	result, err := s.manager().Requeue(t.Context(), id)
	if err != nil || result.Requeued != 1 {
		t.Fatalf("requeue: %+v, %v", result, err)
	}
	w := s.work(func(context.Context, leasebus.Delivery, string) error {
		return leasebus.Permanent(errors.New("still no use"))
	})
	until(t, "it is dead-lettered again", func() bool { return w.Stats().DeadLettered == 1 })
	d, err := s.manager().Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Requeues) != 1 || d.Requeues[0].By != "tester" || time.Since(d.Requeues[0].At) > time.Minute {
		t.Errorf("requeues %+v", d.Requeues)
	}
	if len(d.History) != 2 || d.History[0].Text != "cannot handle again" || d.History[1].Text != "still no use" || d.Attempts != 1 {
		t.Errorf("history %+v, attempts %d", d.History, d.Attempts)
	}
}

// Several queues may share a dead-letter queue: each has its own dead letters there.
func TestOperator_S33_C6_3_queues_that_share_a_dead_letter_queue(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	shared := rabbit.Queue(t, "shared")
	var stages []*stage
	var ids []leasebus.ID
	for _, label := range []string{"one", "two"} {
		s := onStage(t, rabbit, label, nil)
		s.rabbit.DeleteQueue(t, s.policy.Queue)
		s.policy.DeadLetter.Queue = shared
		topology, err := s.broker.Topology(s.policy)
		if err == nil {
			err = s.broker.Declare(t.Context(), topology)
		}
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.bury(label)...)
		stages = append(stages, s)
	}
	for i, s := range stages {
		letters, err := s.broker.DeadLetters(t.Context(), s.policy.Queue, leasebus.Filter{}, "", 10)
		if err != nil || len(letters) != 1 || letters[0].ID != ids[i] {
			t.Errorf("%s: %d letters, %v", s.policy.Queue, len(letters), err)
		}
		done, err := s.broker.Requeue(t.Context(), s.policy.Queue, []leasebus.DeadLetterRef{{ID: ids[0]}, {ID: ids[1]}}, "tester")
		if err != nil || done[i] != leasebus.DispositionDone || done[1-i] != leasebus.DispositionNotFound {
			t.Errorf("%s: requeue %v, %v", s.policy.Queue, done, err)
		}
	}
}

// What RabbitMQ has dead-lettered by itself is listed too, with what RabbitMQ says about it, and can be requeued.
func TestOperator_S28_dead_letters_that_RabbitMQ_made(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "theirs", nil)
	s.sendRaw(amqp091.Publishing{Body: []byte("rejected")})
	s.rabbit.Do(t, func(ch *amqp091.Channel) error {
		d, ok, err := ch.Get(s.policy.Queue, false)
		if err != nil || !ok {
			return fmt.Errorf("get: %v, %w", ok, err)
		}
		return ch.Reject(d.DeliveryTag, false)
	})
	until(t, "it is a dead letter", func() bool { return s.rabbit.Ready(t, s.policy.DeadLetter.Queue) == 1 })
	letters, err := s.broker.DeadLetters(t.Context(), s.policy.Queue, leasebus.Filter{}, "", 10)
	if err != nil || len(letters) != 1 {
		t.Fatalf("%d letters, %v", len(letters), err)
	}
	d := letters[0]
	if d.Queue != s.policy.Queue || d.Reason != leasebus.ReasonPermanent || d.Error != "dead-lettered by RabbitMQ: rejected" ||
		time.Since(d.DeadLetteredAt) > time.Minute || d.ID == (leasebus.ID{}) {
		t.Errorf("dead letter %+v", d)
	}
	done, err := s.broker.Requeue(t.Context(), s.policy.Queue, []leasebus.DeadLetterRef{{ID: d.ID, Cursor: d.Cursor}}, "tester")
	if err != nil || done[0] != leasebus.DispositionDone {
		t.Errorf("requeue: %v, %v", done, err)
	}
	if l := s.consume(1).take(1)[0]; string(l.Payload) != "rejected" || l.ID != d.ID {
		t.Errorf("requeued: id %v, payload %q", l.ID, l.Payload)
	}
}

// An edited message takes the dead letter's place, which stays as the record.
func TestOperator_S35_edited_message_takes_the_place(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "edit", nil)
	id := s.bury("wrong")[0]
	m := s.manager()
	edited, err := m.RequeueEdited(t.Context(), id, func(v *wrapperspb.StringValue) error {
		v.Value = "right"
		return nil
	})
	if err != nil || edited.ID == id {
		t.Fatalf("edit: %+v, %v", edited, err)
	}
	if l := s.consume(1).take(1)[0]; l.ID != edited.ID || l.Headers.Get(leasebus.HeaderReplaces) != id.String() || l.Attempt != 1 {
		t.Errorf("edited message: id %v, replaces %q, attempt %d", l.ID, l.Headers.Get(leasebus.HeaderReplaces), l.Attempt)
	}
	d, err := m.Get(t.Context(), id)
	if err != nil || d.ReplacedBy != edited.ID || d.Message.GetValue() != "wrong" || d.Attempts != 1 {
		t.Errorf("dead letter %+v, %v", d, err)
	}
	if _, err := m.RequeueEdited(t.Context(), id, func(*wrapperspb.StringValue) error { return nil }); !errors.Is(err, leasebus.ErrReplaced) {
		t.Errorf("edit again: %v, want ErrReplaced", err)
	}
	result, err := m.Requeue(t.Context(), id)
	if err != nil || result.Requeued != 0 || len(result.Skipped) != 1 || result.Skipped[0].Why != leasebus.DispositionReplaced {
		t.Errorf("requeue: %+v, %v", result, err)
	}
}

// A queue whose messages cannot go back keeps its dead letters.
func TestOperator_S33_requeue_that_fails_loses_nothing(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "nowhere", nil)
	ids := s.bury("a", "b")
	s.rabbit.DeleteQueue(t, s.policy.Queue)
	if _, err := s.manager().Requeue(t.Context(), ids...); err == nil {
		t.Error("requeue into a queue that does not exist: got no error")
	}
	if n := s.rabbit.Ready(t, s.policy.DeadLetter.Queue); n != 2 {
		t.Errorf("%d dead letters are left, want 2", n)
	}
}
