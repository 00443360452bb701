package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// RabbitMQ 4 dead-letters a message of a quorum queue at its 21st return unless it is told not to, and a drain returns
// whatever was sent ahead. A message that nobody has begun is not to end for that.
func TestFault_S44_S50_C6_14_TwentyFiveDrainsOfOneMessage(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "drains", nil)
	id := s.send("waiting")[0]
	for range 25 {
		feed := s.subscribe()
		until(t, "it is here", func() bool { return part(t, s.broker, "consume "+s.policy.Queue).Details["buffered"] == 1 })
		if err := errors.Join(feed.Stop(t.Context()), feed.Close()); err != nil {
			t.Fatal(err)
		}
	}
	var seen book
	s.work(func(_ context.Context, d leasebus.Delivery, value string) error {
		seen.note(d, value)
		return nil
	})
	until(t, "it is handled or dead", func() bool {
		return seen.values()+s.rabbit.Ready(t, s.policy.DeadLetter.Queue) == 1
	})
	if runs := seen.of("waiting"); len(runs) != 1 || runs[0].attempt != 1 || runs[0].id != id {
		t.Errorf("it was handled as %+v, want once, on attempt 1", runs)
	}
}

// A wait in the broker is not shortened by a restart of the consumer, nor is it lengthened much.
func TestFault_S40_ALongWaitOutlastsRestarts(t *testing.T) {
	t.Parallel()
	const wait = 3 * time.Second
	from := time.Second
	s := onStage(t, testservers.RabbitMQ(t), "long", func(p *leasebus.Policy) {
		p.Retry = leasebus.FixedRetry(3, wait)
		p.Retry.Jitter, p.Retry.WaitInBrokerFrom = 0, &from
	})
	var seen book
	var w *worker
	start := func() {
		w = s.work(func(_ context.Context, d leasebus.Delivery, value string) error {
			seen.note(d, value)
			if d.Attempt() == 1 {
				return errors.New("not yet")
			}
			return nil
		})
	}
	start()
	s.awaitConsumer()
	s.send("patient")
	until(t, "the first attempt has failed", func() bool { return w.Stats().Failed == 1 })
	for range 3 {
		if err := w.drain(); err != nil {
			t.Fatal(err)
		}
		start()
		s.awaitConsumer()
	}
	until(t, "the second attempt is there", func() bool { return len(seen.of("patient")) == 2 })
	runs := seen.of("patient")
	if waited := runs[1].at.Sub(runs[0].at); waited < wait || waited > wait+10*time.Second {
		t.Errorf("the second attempt came after %v, want %v", waited, wait)
	}
	if got := seen.attempts("patient"); !slices.Equal(got, []int{1, 2}) {
		t.Errorf("attempts %v", got)
	}
	seen.wantOneIDEach(t)
}

// A wait that is spent in the consumer ends with it: the message goes back, and its attempt does not count.
func TestFault_S40_S50_AShortWaitGoesBackWithItsAttempt(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "short", func(p *leasebus.Policy) {
		p.Retry = leasebus.FixedRetry(3, 20*time.Second)
		p.Retry.Jitter = 0
	})
	var seen book
	fail := true
	handle := func(_ context.Context, d leasebus.Delivery, value string) error {
		seen.note(d, value)
		if fail {
			return errors.New("not yet")
		}
		return nil
	}
	w := s.work(handle)
	s.send("a", "b", "c")
	until(t, "all have failed", func() bool { return w.Stats().Failed == 3 })
	if n := part(t, s.broker, "consume "+s.policy.Queue).Details["waiting"]; n != 3 {
		t.Errorf("%v wait in the consumer, want 3", n)
	}
	began := time.Now()
	if err := w.drain(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("the drain took %v; it waited for waits", took)
	}
	fail = false
	s.work(handle)
	until(t, "all are handled", func() bool {
		return len(seen.of("a")) == 2 && len(seen.of("b")) == 2 && len(seen.of("c")) == 2
	})
	for _, value := range []string{"a", "b", "c"} {
		if got := seen.attempts(value); !slices.Equal(got, []int{1, 1}) {
			t.Errorf("%s: attempts %v, want the first one again", value, got)
		}
	}
	seen.wantOneIDEach(t)
}

// A drain takes as long as the handlers that run, and counts stay exact: what was handled and what is in the queue add
// up, nothing twice.
func TestFault_S50_ADrainTakesAsLongAsItsHandlers(t *testing.T) {
	t.Parallel()
	const (
		handler = 20 * time.Millisecond
		total   = 1000
	)
	for _, workers := range []int{8, 32} { // 32 have a prefetch of 128
		t.Run(fmt.Sprint(workers), func(t *testing.T) {
			t.Parallel()
			s := onStage(t, testservers.RabbitMQ(t), "drain", nil)
			values := make([]string, total)
			for i := range values {
				values[i] = fmt.Sprint(i)
			}
			var seen book
			quickest := time.Hour
			for try := 0; try < 10 && quickest > handler+100*time.Millisecond; try++ {
				s.send(values...)
				before := s.rabbit.Ready(t, s.policy.Queue)
				var handled atomic.Int64
				w := s.work(func(_ context.Context, d leasebus.Delivery, value string) error {
					time.Sleep(handler)
					seen.note(d, value)
					handled.Add(1)
					return nil
				}, leasebus.WithConcurrency(workers))
				until(t, "it is at work", func() bool { return handled.Load() > int64(2*workers) })
				began := time.Now()
				err := w.drain()
				quickest = min(quickest, time.Since(began))
				if err != nil {
					t.Fatal(err)
				}
				left := s.rabbit.Ready(t, s.policy.Queue)
				until(t, "what was handed back is ready", func() bool {
					left = s.rabbit.Ready(t, s.policy.Queue)
					return left+int(handled.Load()) >= before
				})
				if left+int(handled.Load()) != before {
					t.Errorf("%d were there, %d were handled, %d are left", before, handled.Load(), left)
				}
				if w.Held() != 0 || w.InFlight() != 0 {
					t.Errorf("after the drain %d are held and %d run", w.Held(), w.InFlight())
				}
			}
			t.Logf("the quickest drain took %v", quickest)
			if quickest > handler+100*time.Millisecond {
				t.Errorf("the quickest drain took %v; handlers take %v", quickest, handler)
			}
		})
	}
}
