package amqp_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

func TestMain(m *testing.M) {
	testservers.RunWorker(faultRoles)
	goleak.VerifyTestMain(m)
}

// logTo shows the broker's log with the test that fails.
func logTo(t testing.TB) amqp.Option {
	t.Helper()
	return amqp.WithLogger(slog.New(slog.NewTextHandler(t.Output(), nil)))
}

// dial connects to a broker for the length of the test.
func dial(t testing.TB, url string, opts ...amqp.Option) *amqp.Broker {
	t.Helper()
	b, err := amqp.Dial(t.Context(), url, append([]amqp.Option{logTo(t)}, opts...)...)
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return b
}

// declared is a policy whose queues are there, under names that nobody else uses.
func declared(t testing.TB, on *testservers.Rabbit, b *amqp.Broker, label string) *leasebus.Policy {
	t.Helper()
	policy := leasebus.DefaultPolicy("test.v1.Thing", on.Queue(t, label, ".dlq", ".retry.5s", ".retry.10s", ".retry.20s", ".retry.40s"))
	topology, err := b.Topology(&policy)
	if err != nil {
		t.Fatalf("topology: %v", err)
	}
	if err := b.Declare(t.Context(), topology); err != nil {
		t.Fatalf("declare: %v", err)
	}
	return &policy
}

// outgoing are n messages for a queue.
func outgoing(queue string, n int) []leasebus.Outgoing {
	out := make([]leasebus.Outgoing, n)
	for i := range out {
		out[i].Envelope = leasebus.Envelope{ID: leasebus.NewID(), Type: "test.v1.Thing", Queue: queue, Payload: []byte("payload")}
	}
	return out
}

// publish publishes all of out in one call.
func publish(ctx context.Context, to leasebus.Publisher, out []leasebus.Outgoing) ([]leasebus.Receipt, error) {
	receipts := make([]leasebus.Receipt, len(out))
	err := to.Publish(ctx, out, receipts)
	return receipts, err
}

// until waits for a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	amqp.Eventually(t, 30*time.Second, what, ok)
}
