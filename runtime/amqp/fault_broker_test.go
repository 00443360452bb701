package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// While memory runs short, RabbitMQ takes nothing from those who publish. Consumers go on acknowledging, what they have
// decided to publish is kept, and all comes back by itself, each time.
func TestFault_S27_S54_S56_C7_6_C8_8_MemoryAlarm(t *testing.T) {
	t.Parallel()
	rabbit := testservers.PrivateRabbitMQ(t)
	proxy, through := rabbit.Proxy(t)
	s := onStage(t, through, "alarm", nil)
	var seen book
	gate := make(chan struct{}, 1000)
	w := s.work(func(_ context.Context, d leasebus.Delivery, value string) error {
		<-gate
		seen.note(d, value)
		if value[0] == 'f' && d.Attempt() == 1 { // its second attempt has to be published
			return errors.New("fails once")
		}
		return nil
	}, leasebus.WithConcurrency(8))
	const rounds = 4
	for round := range rounds {
		succeeded := w.Stats().Succeeded
		for i := range 8 {
			s.send(fmt.Sprintf("%c %d.%d", "fs"[i%2], round, i)) // fails once, or succeeds
		}
		until(t, "all handlers run", func() bool { return w.InFlight() == 8 })
		rabbit.MemoryAlarm(t, true)
		until(t, "publishing is blocked", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			began := time.Now()
			_, err := publish(ctx, s.broker, s.messages(fmt.Sprint("s blocked ", round)))
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("a publish with a second to go took %v", took)
			}
			return errors.Is(err, context.DeadlineExceeded)
		})
		// Starting the service again would lead to the same broker: it is up, and says why it is slow.
		var health leasebus.Health
		health.Add("broker", s.broker)
		if report := health.Check(t.Context()); report.Status != leasebus.HealthUp || part(t, s.broker, "publish").Details["blocked"] == nil {
			t.Errorf("blocked: %+v, want up, with the reason", report)
		}
		for range 8 {
			gate <- struct{}{}
		}
		until(t, "those that succeed are settled", func() bool { return w.Stats().Succeeded == succeeded+4 })
		if round%2 == 1 {
			proxy.Cut() // alarms outlive connections
		}
		rabbit.MemoryAlarm(t, false)
		for range 100 {
			gate <- struct{}{}
		}
		until(t, "those that failed have succeeded", func() bool {
			done := 0
			for i := 0; i < 8; i += 2 {
				if slices.Contains(seen.attempts(fmt.Sprintf("f %d.%d", round, i)), 2) {
					done++
				}
			}
			return done == 4
		})
		until(t, "nothing is held", func() bool { return w.Held()+w.InFlight() == 0 && rabbit.Ready(t, s.policy.Queue) == 0 })
		if reason := part(t, s.broker, "publish").Details["blocked"]; reason != nil {
			t.Errorf("still blocked for %v", reason)
		}
		for len(gate) > 0 {
			<-gate
		}
	}
	seen.wantOneIDEach(t)
	if n := rabbit.Ready(t, s.policy.DeadLetter.Queue); n != 0 {
		t.Errorf("%d dead letters, want none", n)
	}
}

// The broker is stopped and killed in turns while two services publish and consume. Whatever was confirmed is handled.
func TestFault_S41_S54_C7_2_StoppedAndKilledUnderLoad(t *testing.T) {
	t.Parallel()
	rabbit := testservers.PrivateRabbitMQ(t)
	s := onStage(t, rabbit.Rabbit, "load", nil)
	other := s.again()
	var seen book
	var attempts atomic.Int64
	handle := func(_ context.Context, d leasebus.Delivery, value string) error {
		seen.note(d, value)
		if d.Attempt() == 1 && attempts.Add(1)%50 == 0 { // one that failed thrice would be a dead letter
			return errors.New("some fail")
		}
		return nil
	}
	workers := []*worker{s.work(handle), other.work(handle)}
	var post mail
	sending, stop := context.WithCancel(t.Context())
	var senders sync.WaitGroup
	for i := range 8 {
		from := s
		if i%2 == 1 {
			from = other
		}
		senders.Go(func() { post.keepSending(sending, from) })
	}
	progress := func(what string) {
		t.Helper()
		confirmed, handled := post.sent(), seen.values()
		until(t, "work goes on "+what, func() bool { return post.sent() > confirmed+100 && seen.values() > handled+100 })
	}
	progress("at first")
	for round := range 4 {
		if round%2 == 0 {
			rabbit.Stop(t)
		} else {
			rabbit.Kill(t)
		}
		if !slices.ContainsFunc(s.broker.CheckHealth(t.Context()), func(c leasebus.HealthComponent) bool { return c.Status == leasebus.HealthDown }) {
			until(t, "health is down", func() bool { return part(t, s.broker, "publish").Status == leasebus.HealthDown })
		}
		down := time.Now()
		rabbit.Start(t)
		t.Logf("round %d: the broker answers after %v", round, time.Since(down).Round(time.Millisecond))
		progress(fmt.Sprint("after round ", round))
	}
	stop()
	senders.Wait()
	post.wantAllHandled(t, &seen)
	until(t, "nothing is left", func() bool {
		q := rabbit.Queues(t)[s.policy.Queue]
		return q.Ready+q.Unacked == 0
	})
	for _, w := range workers {
		if err := w.drain(); err != nil {
			t.Errorf("drain: %v", err)
		}
	}
	if n := rabbit.Ready(t, s.policy.DeadLetter.Queue); n != 0 {
		t.Errorf("%d dead letters, want none", n)
	}
}

// deadLettersRefused: the decision and the delivery are kept, the message is neither handled again nor sent round in
// circles, and when more is decided than may be held, no more is handled.
func deadLettersRefused(t *testing.T, rabbit *testservers.Broker) {
	t.Helper()
	// Classic queues refuse at once, quorum queues when they have told the publisher that they are full.
	s := onStage(t, rabbit.Rabbit, "refusing", nil, amqp.WithClassicQueues())
	const concurrency, budget, total = 4, 8, 40
	dead := s.policy.DeadLetter.Queue
	rabbit.Ctl(t, "set_policy", "--apply-to", "queues", "full", "^"+dead+"$", `{"max-length":0,"overflow":"reject-publish"}`)
	until(t, "it refuses", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		out := s.messages("probe")
		out[0].Queue = dead
		_, err := publish(ctx, s.broker, out)
		return err != nil
	})
	rabbit.Take(t, dead) // what came before it refused

	var seen book
	w := s.work(func(_ context.Context, d leasebus.Delivery, value string) error {
		seen.note(d, value)
		return leasebus.Permanent(errors.New("cannot be handled"))
	}, leasebus.WithConcurrency(concurrency), leasebus.WithLookAhead(0))
	values := make([]string, total)
	for i := range values {
		values[i] = fmt.Sprint("bad ", i)
	}
	s.send(values...)
	consumer := "consume " + s.policy.Queue
	until(t, "it is noticed", func() bool { return part(t, s.broker, consumer).Status == leasebus.HealthDegraded })
	until(t, "no more is handled", func() bool {
		before := seen.values()
		time.Sleep(500 * time.Millisecond) // that nothing happens can only be seen by waiting
		return seen.values() == before
	})
	if n := seen.values(); n < budget || n > 2*concurrency+budget {
		t.Errorf("%d messages were handled while nothing could be dead-lettered; want %d, which may be held, and at most the prefetch", n, budget)
	}
	if n := s.broker.Counters().FailedMoves; n > 500 {
		t.Errorf("%d publishes were refused within a second or so; want few", n)
	}
	if n := rabbit.Ready(t, dead); n != 0 {
		t.Errorf("%d dead letters, want none yet", n)
	}

	rabbit.Ctl(t, "clear_policy", "full")
	until(t, "all are dead letters", func() bool { return rabbit.Ready(t, dead) == total })
	until(t, "it is mended", func() bool { return part(t, s.broker, consumer).Status == leasebus.HealthUp })
	if err := w.drain(); err != nil {
		t.Error(err)
	}
	for _, value := range values {
		if got := seen.attempts(value); !slices.Equal(got, []int{1}) {
			t.Errorf("%s was handled on attempts %v, want once", value, got)
		}
	}
	ids := make(map[string]bool)
	for _, d := range rabbit.Take(t, dead) {
		ids[d.MessageId] = true
	}
	if left := rabbit.Ready(t, s.policy.Queue); len(ids) != total || left != 0 {
		t.Errorf("%d different dead letters and %d messages left, want %d and none", len(ids), left, total)
	}
}
