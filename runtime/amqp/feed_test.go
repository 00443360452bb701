package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// stage is a broker, a queue that is there, and a policy for it.
type stage struct {
	testing.TB
	rabbit *testservers.Rabbit
	broker *amqp.Broker
	policy *leasebus.Policy
}

// onStage declares the queues of a policy that change has changed.
func onStage(t testing.TB, rabbit *testservers.Rabbit, label string, change func(*leasebus.Policy), opts ...amqp.Option) *stage {
	t.Helper()
	s := &stage{TB: t, rabbit: rabbit, broker: dial(t, rabbit.URL(), opts...)}
	p := leasebus.DefaultPolicy("google.protobuf.StringValue", "")
	p.Retry = leasebus.FixedRetry(3, 50*time.Millisecond)
	p.Retry.Jitter = 0
	if change != nil {
		change(&p)
	}
	var suffixes []string
	for _, d := range p.Retry.Rungs(time.Second) {
		suffixes = append(suffixes, ".retry."+shortest(d))
	}
	p.Queue = rabbit.Queue(t, label, append(suffixes, leasebus.DeadLetterSuffix, leasebus.InvalidSuffix)...)
	if !p.DeadLetter.Discard {
		p.DeadLetter.Queue = p.Queue + leasebus.DeadLetterSuffix
	}
	s.policy = &p
	topology, err := s.broker.Topology(&p)
	if err == nil {
		err = s.broker.Declare(t.Context(), topology)
	}
	if err != nil {
		t.Fatalf("declare: %v", err)
	}
	return s
}

func shortest(d time.Duration) string {
	if d%time.Second == 0 {
		return fmt.Sprintf("%ds", d/time.Second)
	}
	return fmt.Sprintf("%dms", d.Milliseconds())
}

// messages are new ones with these values.
func (s *stage) messages(values ...string) []leasebus.Outgoing {
	s.Helper()
	out := make([]leasebus.Outgoing, len(values))
	for i, value := range values {
		payload, err := proto.Marshal(wrapperspb.String(value))
		if err != nil {
			s.Fatal(err)
		}
		out[i].Envelope = leasebus.Envelope{ID: leasebus.NewID(), Type: s.policy.Type, Queue: s.policy.Queue, Payload: payload}
	}
	return out
}

// send publishes messages with these values.
func (s *stage) send(values ...string) []leasebus.ID {
	s.Helper()
	out := s.messages(values...)
	if _, err := publish(s.Context(), s.broker, out); err != nil {
		s.Fatal(err)
	}
	ids := make([]leasebus.ID, len(out))
	for i := range out {
		ids[i] = out[i].ID
	}
	return ids
}

// worker runs a processor until the end of the test.
type worker struct {
	*leasebus.Processor
	stop context.CancelFunc
	ran  chan error
}

func (s *stage) work(handle func(ctx context.Context, d leasebus.Delivery, value string) error, opts ...leasebus.ProcessorOption) *worker {
	s.Helper()
	log := slog.New(slog.NewTextHandler(s.Output(), &slog.HandlerOptions{Level: slog.LevelError}))
	p, err := leasebus.NewProcessor(s.broker, append([]leasebus.ProcessorOption{leasebus.WithConcurrency(4), leasebus.WithLogger(log)}, opts...)...)
	if err == nil {
		err = leasebus.RegisterHandler(p, s.policy, func(ctx context.Context, m *wrapperspb.StringValue) error {
			d, _ := leasebus.DeliveryFrom(ctx)
			return handle(ctx, d, m.GetValue())
		})
	}
	if err != nil {
		s.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.Context()))
	w := &worker{Processor: p, stop: cancel, ran: make(chan error, 1)}
	go func() { w.ran <- p.Run(ctx) }()
	s.Cleanup(func() {
		if err := w.drain(); err != nil {
			s.Errorf("drain: %v", err)
		}
	})
	return w
}

func (w *worker) drain() error {
	w.stop()
	err := <-w.ran
	w.ran <- err
	return err
}

func TestFeed_S19_S39_messages_are_handled_retried_and_dead_lettered(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "story", nil)
	var values []string
	for i := range 50 {
		values = append(values, fmt.Sprint("good ", i))
	}
	values[7], values[8], values[20] = "bad", "never", "second time lucky"
	s.send(values...)
	var mu sync.Mutex
	attempts := make(map[string][]int)
	var handled atomic.Int64
	w := s.work(func(_ context.Context, d leasebus.Delivery, value string) error {
		mu.Lock()
		attempts[value] = append(attempts[value], d.Attempt())
		mu.Unlock()
		switch {
		case value == "never":
			return leasebus.Permanent(errors.New("no use"))
		case value == "bad", value == "second time lucky" && d.Attempt() == 1:
			return errors.New("no")
		}
		handled.Add(1)
		return nil
	})
	until(t, "all were handled or dead-lettered", func() bool {
		stats := w.Stats()
		return stats.Succeeded == 48 && stats.DeadLettered == 2
	})
	if err := w.drain(); err != nil {
		t.Error(err)
	}
	if got := fmt.Sprint(attempts["bad"], attempts["never"], attempts["second time lucky"]); got != "[1 2 3] [1] [1 2]" {
		t.Errorf("attempts: %s", got)
	}
	if n := s.rabbit.Ready(t, s.policy.Queue); n != 0 {
		t.Errorf("%d messages are left", n)
	}
	if n := s.rabbit.Ready(t, s.policy.DeadLetter.Queue); n != 2 {
		t.Errorf("%d dead letters, want 2", n)
	}
}
