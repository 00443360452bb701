package amqp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

func TestPublish_S41_C7_8_stores_what_it_confirms(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	for name, opts := range map[string][]amqp.Option{
		"quorum": nil, "classic": {amqp.WithClassicQueues()}, "one at a time": {amqp.WithConfirmWindow(1)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := dial(t, rabbit.URL(), opts...)
			queue := declared(t, rabbit, b, "stores").Queue
			out := outgoing(queue, 500)
			for i := range out {
				out[i].Payload = fmt.Append(nil, i)
				out[i].Headers = leasebus.NewHeaders(map[string]string{"tenant": "t", leasebus.HeaderCorrelation: "c"})
			}
			receipts, err := publish(t.Context(), b, out)
			if err != nil {
				t.Fatal(err)
			}
			got := rabbit.Take(t, queue)
			if len(got) != len(out) {
				t.Fatalf("%d messages are stored, want %d", len(got), len(out))
			}
			for i, d := range got { // in the order of publishing
				if receipts[i].ID != out[i].ID || receipts[i].AlreadyAccepted {
					t.Fatalf("receipt %d is %+v, want the id %v", i, receipts[i], out[i].ID)
				}
				if d.MessageId != out[i].ID.String() || d.Type != out[i].Type || !bytes.Equal(d.Body, out[i].Payload) {
					t.Fatalf("message %d is %s %s %q, want %v %s %q", i, d.MessageId, d.Type, d.Body, out[i].ID, out[i].Type, out[i].Payload)
				}
				if d.DeliveryMode != amqp091.Persistent || d.Headers["tenant"] != "t" || d.Headers["x-leasebus-correlation"] != "c" {
					t.Fatalf("message %d has mode %d and headers %v", i, d.DeliveryMode, d.Headers)
				}
			}
		})
	}
}

func TestPublish_S41_C7_4_C7_5_unroutable(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL(), amqp.WithConfirmWindow(16))
	queue := declared(t, rabbit, b, "routed").Queue
	out := outgoing(queue, 1000)
	missing := func(i int) bool { return i%7 == 3 }
	for i := range out {
		if missing(i) {
			out[i].Queue = queue + ".absent"
		}
		out[i].ID = out[i%2].ID // two publishes with one id are still two
	}
	receipts, err := publish(t.Context(), b, out)
	if !errors.Is(err, amqp.ErrUnroutable) {
		t.Errorf("got %v, want an error about missing queues", err)
	}
	for i, r := range receipts {
		if missing(i) != errors.Is(r.Err, amqp.ErrUnroutable) || !missing(i) && r.Err != nil {
			t.Errorf("message %d for %s: %v", i, out[i].Queue, r.Err)
		}
	}
	if err := receipts[3].Err; !strings.Contains(err.Error(), queue+".absent") {
		t.Errorf("the error %q does not name the queue", err)
	}
	if n := rabbit.Ready(t, queue); n != 857 {
		t.Errorf("%d messages are stored, want 857", n)
	}
}

// Sixty-four callers share the channel, some of them with what cannot be routed.
func TestPublish_C7_10_many_callers(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL(), amqp.WithConfirmWindow(8))
	queue := declared(t, rabbit, b, "callers").Queue
	var callers sync.WaitGroup
	for i := range 64 {
		callers.Go(func() {
			for range 20 {
				out := outgoing(queue, 1+i%3)
				if i%4 == 0 {
					out[0].Queue = queue + ".absent"
				}
				receipts, _ := publish(t.Context(), b, out)
				for at, r := range receipts {
					if want := at == 0 && i%4 == 0; errors.Is(r.Err, amqp.ErrUnroutable) != want || !want && r.Err != nil {
						t.Errorf("caller %d, message %d for %s: %v", i, at, out[at].Queue, r.Err)
					}
				}
			}
		})
	}
	callers.Wait()
	// Of three callers, one publishes one message at a time, one two, and one three; each fourth loses one.
	if n, want := rabbit.Ready(t, queue), 20*(22+21*2+21*3-16); n != want {
		t.Errorf("%d messages are stored, want %d", n, want)
	}
}

func TestPublish_S41_missing_exchange(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	name := rabbit.Queue(t, "exchange")
	b := dial(t, rabbit.URL(), amqp.WithExchange(name, "topic"))
	t.Cleanup(func() {
		rabbit.Do(t, func(ch *amqp091.Channel) error { return ch.ExchangeDelete(name, false, false) })
	})
	for range 3 { // the channel is closed each time, and there again
		receipts, err := publish(t.Context(), b, outgoing("anything", 20))
		if !errors.Is(err, amqp.ErrRefused) || !strings.Contains(err.Error(), "no exchange '"+name+"'") {
			t.Fatalf("got %v, want the missing exchange", err)
		}
		for i, r := range receipts {
			if !errors.Is(r.Err, amqp.ErrRefused) && !errors.Is(r.Err, amqp.ErrDisconnected) {
				t.Errorf("message %d: %v", i, r.Err)
			}
		}
	}
	queue := declared(t, rabbit, b, "bound").Queue
	if _, err := publish(t.Context(), b, outgoing(queue, 5)); err != nil {
		t.Errorf("publish to the exchange that is there now: %v", err)
	}
	if n := len(rabbit.Take(t, queue)); n != 5 {
		t.Errorf("%d messages are stored, want 5", n)
	}
}

func TestPublish_S41_refused_by_a_full_queue(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	for _, kind := range []string{"classic", "quorum"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			b := dial(t, rabbit.URL())
			queue := rabbit.Queue(t, "full")
			rabbit.Do(t, func(ch *amqp091.Channel) error {
				_, err := ch.QueueDeclare(queue, true, false, false, false,
					amqp091.Table{"x-queue-type": kind, "x-max-length": int64(10), "x-overflow": "reject-publish"})
				return err
			})
			receipts, err := publish(t.Context(), b, outgoing(queue, 500))
			if !errors.Is(err, amqp.ErrRefused) {
				t.Errorf("got %v, want refusals", err)
			}
			taken := 0
			for i, r := range receipts {
				switch {
				case r.Err == nil:
					taken++
				case !errors.Is(r.Err, amqp.ErrRefused) || errors.Is(r.Err, leasebus.ErrOutcomeUnknown):
					t.Errorf("message %d: %v, want a plain refusal", i, r.Err)
				}
			}
			if stored := len(rabbit.Take(t, queue)); stored != taken || taken == len(receipts) {
				t.Errorf("%d messages are stored and %d were confirmed of %d", stored, taken, len(receipts))
			}
		})
	}
}

// Everything that RabbitMQ would answer by closing the channel or the connection is refused before it is sent, and
// nobody else notices.
func TestPublish_C3_9_C3_10_refuses_what_cannot_travel(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL(), amqp.WithMaxPayload(1000))
	queue := declared(t, rabbit, b, "travels").Queue
	long := strings.Repeat("x", 256)
	headers := func(n, size int) leasebus.Headers {
		m := make(map[string]string)
		for i := range n {
			m[fmt.Sprintf("h%03d", i)] = strings.Repeat("v", size)
		}
		return leasebus.NewHeaders(m)
	}
	for _, c := range []struct {
		name   string
		change func(out *leasebus.Outgoing)
		want   string
	}{
		{"a payload over the limit", func(o *leasebus.Outgoing) { o.Payload = make([]byte, 1001) }, "payload: is 1001 bytes; allowed are 1000"},
		{"a header over the limit", func(o *leasebus.Outgoing) { o.Headers = headers(1, 140<<10) }, "allowed are"},
		{"a header value over its limit", func(o *leasebus.Outgoing) { o.Headers = headers(1, 9<<10) }, "header h000: is 9216 bytes; allowed are 8192"},
		{"too many headers", func(o *leasebus.Outgoing) { o.Headers = headers(30, 8<<10) }, "headers: are"},
		{"a long header name", func(o *leasebus.Outgoing) { o.Headers = leasebus.NewHeaders(map[string]string{long: "v"}) }, "header name: is 256 bytes; allowed are 255"},
		{"a long queue", func(o *leasebus.Outgoing) { o.Queue = long }, "queue: is 256 bytes; allowed are 255"},
		{"a long type", func(o *leasebus.Outgoing) { o.Type = long }, "type: is 256 bytes; allowed are 255"},
		{"a long key", func(o *leasebus.Outgoing) { o.IdempotencyKey = long }, "idempotency key: is 256 bytes; allowed are 255"},
		{"a long key in two-byte letters", func(o *leasebus.Outgoing) { o.OrderingKey = strings.Repeat("é", 128) }, "ordering key: is 256 bytes"},
		{"a reserved header", func(o *leasebus.Outgoing) {
			o.Headers = leasebus.NewHeaders(map[string]string{"X-Leasebus-Attempt": "7"})
		}, "reserved"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			out := outgoing(queue, 3)
			c.change(&out[1])
			receipts, err := publish(t.Context(), b, out)
			if !errors.Is(err, leasebus.ErrInvalidEnvelope) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
			if receipts[0].Err != nil || receipts[2].Err != nil || receipts[1].Err == nil {
				t.Errorf("the receipts are %v, want an error for the second alone", receipts)
			}
		})
	}
}

// The largest that is allowed does travel.
func TestPublish_C3_9_takes_what_is_just_small_enough(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL())
	queue := declared(t, rabbit, b, "large").Queue
	m := make(map[string]string)
	for i := range 7 {
		m[fmt.Sprintf("h%d", i)] = strings.Repeat("v", leasebus.MaxHeaderBytes)
	}
	m[strings.Repeat("n", leasebus.MaxNameBytes)] = strings.Repeat("v", leasebus.MaxHeaderBytes-1000)
	out := outgoing(queue, 2)
	out[0].Headers = leasebus.NewHeaders(m)
	out[0].Type = strings.Repeat("t", leasebus.MaxNameBytes)
	out[0].IdempotencyKey = strings.Repeat("k", leasebus.MaxNameBytes)
	out[1].Payload = make([]byte, leasebus.DefaultMaxPayload)
	if _, err := publish(t.Context(), b, out); err != nil {
		t.Fatal(err)
	}
	got := rabbit.Take(t, queue)
	if len(got) != 2 || len(got[1].Body) != leasebus.DefaultMaxPayload || len(got[0].Type) != leasebus.MaxNameBytes {
		t.Errorf("%d messages have arrived, want both as they were sent", len(got))
	}
}

func TestPublish_C5_12_context(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL())
	queue := declared(t, rabbit, b, "context").Queue
	reason := errors.New("the caller has had enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(reason)
	receipts, err := publish(ctx, b, outgoing(queue, 3))
	if !errors.Is(err, reason) || errors.Is(err, leasebus.ErrOutcomeUnknown) {
		t.Errorf("got %v, want the context's cause alone", err)
	}
	for i, r := range receipts {
		if !errors.Is(r.Err, reason) {
			t.Errorf("message %d: %v, want the context's cause", i, r.Err)
		}
	}
	if n := rabbit.Ready(t, queue); n != 0 {
		t.Errorf("%d messages are stored, want none", n)
	}
	if _, err := publish(t.Context(), b, nil); err != nil {
		t.Errorf("nothing to publish: %v", err)
	}
}

func TestPublish_S40_delayed(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL())
	queue := declared(t, rabbit, b, "delayed").Queue
	now := time.Now()
	out := outgoing(queue, 3)
	out[0].Delay = time.Second
	out[1].Delay, out[1].At = time.Hour, now.Add(700*time.Millisecond)
	out[2].Delay, out[2].At = time.Hour, now.Add(-time.Second) // past: at once
	if _, err := publish(t.Context(), b, out); err != nil {
		t.Fatal(err)
	}
	if got := rabbit.Take(t, queue); len(got) != 1 || got[0].MessageId != out[2].ID.String() {
		t.Errorf("%d messages are due at once, want the one whose time has passed", len(got))
	}
	var late []amqp091.Delivery
	until(t, "the delayed messages have come", func() bool {
		late = append(late, rabbit.Take(t, queue)...)
		return len(late) == 2
	})
	if waited := time.Since(now); waited < time.Second {
		t.Errorf("the last one came after %v, want 1s or more", waited)
	}
	for i, d := range late {
		due, _ := d.Headers["x-leasebus-first-due"].(int64)
		if due < now.Add(699*time.Millisecond).UnixMilli() || due > time.Now().UnixMilli() {
			t.Errorf("message %d was first due at %d, want its time", i, due)
		}
		if _, there := d.Headers["x-leasebus-remaining"]; there {
			t.Errorf("message %d has still to wait: %v", i, d.Headers)
		}
	}
}

func TestPublish_S52_paused(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL())
	queue := declared(t, rabbit, b, "paused").Queue
	gate := leasebus.NewPublishGate(b)
	gate.Pause()
	if _, err := publish(t.Context(), gate, outgoing(queue, 1)); !errors.Is(err, leasebus.ErrPublishingPaused) {
		t.Errorf("got %v while paused", err)
	}
	gate.Resume()
	if _, err := publish(t.Context(), gate, outgoing(queue, 1)); err != nil {
		t.Errorf("got %v after the pause", err)
	}
	if n := rabbit.Ready(t, queue); n != 1 {
		t.Errorf("%d messages are stored, want 1", n)
	}
}

func TestPublish_S53_after_close(t *testing.T) {
	t.Parallel()
	b := dial(t, testservers.RabbitMQ(t).URL())
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := publish(t.Context(), b, outgoing("anything", 1)); !errors.Is(err, amqp.ErrClosed) {
		t.Errorf("got %v, want %v", err, amqp.ErrClosed)
	}
	if err := b.Close(); err != nil {
		t.Errorf("close again: %v", err)
	}
}

// Close waits for what is on its way: all of it is answered, and as it is.
func TestClose_C7_7_C7_10_while_publishing(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL(), amqp.WithConfirmWindow(1024))
	queue := declared(t, rabbit, b, "closing").Queue
	var callers sync.WaitGroup
	var mu sync.Mutex
	confirmed := 0
	for range 64 {
		callers.Go(func() {
			for ended := false; !ended; {
				receipts, _ := publish(t.Context(), b, outgoing(queue, 50))
				for i, r := range receipts {
					if ended = errors.Is(r.Err, amqp.ErrClosed); !ended && r.Err != nil {
						t.Errorf("message %d: %v, want it confirmed or not sent", i, r.Err)
					}
					if r.Err == nil {
						mu.Lock()
						confirmed++
						mu.Unlock()
					}
				}
			}
		})
	}
	until(t, "there is something to close amid", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return confirmed > 500
	})
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	callers.Wait()
	if n := rabbit.Ready(t, queue); n != confirmed {
		t.Errorf("%d messages are stored, %d were confirmed", n, confirmed)
	}
}

// Others hear what is published to an exchange. What is delayed comes to its own queue alone.
func TestPublish_to_an_exchange(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	name := rabbit.Queue(t, "exchange")
	others := rabbit.Queue(t, "others")
	b := dial(t, rabbit.URL(), amqp.WithExchange(name, "topic"))
	t.Cleanup(func() {
		rabbit.Do(t, func(ch *amqp091.Channel) error { return ch.ExchangeDelete(name, false, false) })
	})
	queue := declared(t, rabbit, b, "own").Queue
	rabbit.Do(t, func(ch *amqp091.Channel) error {
		if _, err := ch.QueueDeclare(others, true, false, false, false, nil); err != nil {
			return err
		}
		return ch.QueueBind(others, "#", name, false, nil)
	})
	out := outgoing(queue, 2)
	out[1].Delay = time.Millisecond
	if _, err := publish(t.Context(), b, out); err != nil {
		t.Fatal(err)
	}
	until(t, "both have come", func() bool { return rabbit.Ready(t, queue) == 2 })
	if got := rabbit.Take(t, others); len(got) != 1 || got[0].MessageId != out[0].ID.String() {
		t.Errorf("%d messages have come to the others, want the one that is not delayed", len(got))
	}
}
