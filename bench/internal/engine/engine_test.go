package engine_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"

	"github.com/leasebus/leasebus/bench/internal/engine"
)

// Every engine does the same work, or says that it has no such thing.
func TestEngines(t *testing.T) {
	t.Parallel()
	for _, e := range engine.All() {
		t.Run(e.Name, func(t *testing.T) {
			t.Parallel()
			dsn := testservers.Postgres(t).DSN()
			if err := e.Prepare(t.Context(), dsn); err != nil {
				t.Fatal(err)
			}
			for _, queues := range []int{1, 10} {
				try(t, e, dsn, queues)
			}
		})
	}
}

// One after the other: they share the queue's name, on a broker of their own.
func TestEnginesOnRabbitMQ(t *testing.T) { //nolint:tparallel // see above
	t.Parallel()
	broker := testservers.PrivateRabbitMQ(t)
	for _, e := range engine.OnRabbitMQ() {
		t.Run(e.Name, func(t *testing.T) {
			if err := e.Clear(t.Context(), broker.URL()); err != nil {
				t.Fatal(err)
			}
			try(t, e, broker.URL(), 1)
			if err := e.Clear(t.Context(), broker.URL()); err != nil {
				t.Fatal(err)
			}
			failing(t, e, broker.URL())
		})
	}
}

// failing handles a message whose first attempt fails, if the engine has such.
func failing(t *testing.T, e engine.Engine, url string) {
	t.Helper()
	bus, err := e.Open(t.Context(), url, engine.Options{Failing: true})
	if errors.Is(err, engine.ErrUnsupported) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer bus.Close()
	if err := bus.PublishBatch(t.Context(), []engine.Message{{Body: "sound"}, {Body: "flaky", Fails: 1}}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	order := make(chan string, 2)
	ended := make(chan error, 1)
	go func() { ended <- bus.Work(ctx, func(_ context.Context, m engine.Message) { order <- m.Body }) }()
	if first, second := <-order, <-order; first != "sound" || second != "flaky" || time.Since(began) < 2*time.Second {
		t.Errorf("handled %s and %s within %v; want the sound one, and after 2 s the other", first, second, time.Since(began))
	}
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func try(t *testing.T, e engine.Engine, dsn string, queues int) {
	t.Helper()
	bus, err := e.Open(t.Context(), dsn, engine.Options{Queues: queues})
	if queues > 1 && errors.Is(err, engine.ErrUnsupported) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer bus.Close()
	want := publish(t, bus, queues)
	if left, err := bus.Left(t.Context()); err != nil || left != want {
		t.Fatalf("%d messages are left after publishing, %v, want %d", left, err, want)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var seen seen
	ended := make(chan error, 1)
	go func() { ended <- bus.Work(ctx, seen.handle) }()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		left, err := bus.Left(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		handled := seen.all()
		if left == 0 && handled >= want { // what is on its way from a broker is neither left nor handled
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after a minute %d messages are left, and %d handled of %d", left, handled, want)
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if n := seen.all(); n != want {
		t.Errorf("%d messages were handled, want %d", n, want)
	}
	if raw := e.Name == engine.Raw || e.Name == engine.BareLoop; !raw && seen.bodies["one"] == 0 {
		t.Errorf("the handlers saw %v; a message lost its body", seen.bodies)
	}
}

// publish uses every way in and returns how many messages it published.
func publish(t *testing.T, bus engine.Bus, queues int) (published int64) {
	t.Helper()
	now := time.Now().UnixNano()
	for q := range queues {
		if err := bus.Publish(t.Context(), engine.Message{Body: "one", PublishedAt: now, Queue: q}); err != nil {
			t.Fatal(err)
		}
		batch := make([]engine.Message, 100)
		for i := range batch {
			batch[i] = engine.Message{Body: "many", PublishedAt: now, Queue: q}
		}
		if err := bus.PublishBatch(t.Context(), batch); err != nil {
			t.Fatal(err)
		}
		published += 1 + int64(len(batch))
	}
	switch err := bus.PublishTx(t.Context(), engine.Message{Body: "tx", PublishedAt: now}); {
	case err == nil:
		published++
	case !errors.Is(err, engine.ErrUnsupported):
		t.Fatal(err)
	}
	return published
}

type seen struct {
	mu     sync.Mutex
	count  int
	bodies map[string]int
}

func (s *seen) handle(_ context.Context, m engine.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bodies == nil {
		s.bodies = make(map[string]int)
	}
	s.count++
	s.bodies[m.Body]++
}

func (s *seen) all() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int64(s.count)
}

func TestDelayedMessagesComeLater(t *testing.T) {
	t.Parallel()
	for _, name := range []string{engine.Leasebus, engine.River} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, err := engine.ByName(name)
			if err != nil {
				t.Fatal(err)
			}
			dsn := testservers.Postgres(t).DSN()
			if err := e.Prepare(t.Context(), dsn); err != nil {
				t.Fatal(err)
			}
			bus, err := e.Open(t.Context(), dsn, engine.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer bus.Close()
			if err := bus.Publish(t.Context(), engine.Message{Body: "later", Delay: time.Hour}); err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer stop()
			var seen seen
			if err := bus.Work(ctx, seen.handle); err != nil {
				t.Fatal(err)
			}
			if left, err := bus.Left(t.Context()); err != nil || left != 1 || seen.count != 0 {
				t.Errorf("%d are left, %d were handled, %v; want the message to wait", left, seen.count, err)
			}
		})
	}
}

func TestClaim(t *testing.T) {
	t.Parallel()
	e, err := engine.ByName(engine.Leasebus)
	if err != nil {
		t.Fatal(err)
	}
	dsn := testservers.Postgres(t).DSN()
	if err := e.Prepare(t.Context(), dsn); err != nil {
		t.Fatal(err)
	}
	bus, err := e.Open(t.Context(), dsn, engine.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer bus.Close()
	claimer, ok := bus.(engine.Claimer)
	if !ok {
		t.Fatal("leasebus cannot time its claims")
	}
	for range 20 {
		if took, err := claimer.Claim(t.Context(), 10, "x"); err != nil || took <= 0 {
			t.Fatalf("a claim took %v, %v", took, err)
		}
	}
	if left, err := bus.Left(t.Context()); err != nil || left != 0 {
		t.Errorf("%d messages are left, %v; want none", left, err)
	}
}

func TestByName(t *testing.T) {
	t.Parallel()
	if _, err := engine.ByName("nobody"); err == nil {
		t.Error("an engine was found that is not there")
	}
}
