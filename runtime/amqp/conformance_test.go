package amqp_test

import (
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
	"github.com/leasebus/leasebus/runtime/conformance"
)

// The broker is the test's own: the cases leave hundreds of queues behind.
func TestContract(t *testing.T) {
	t.Parallel()
	rabbit := testservers.PrivateRabbitMQ(t)
	conformance.Run(t, conformance.Backend{
		Open: func(t *testing.T) conformance.Store {
			t.Helper()
			return dial(t, rabbit.URL())
		},
		Prepare: func(t *testing.T, store conformance.Store, policy *leasebus.Policy) {
			t.Helper()
			broker, _ := store.(*amqp.Broker)
			topology, err := broker.Topology(policy)
			if err == nil {
				err = broker.Declare(t.Context(), topology)
			}
			if err != nil {
				t.Fatalf("declare: %v", err)
			}
		},
		Capabilities: conformance.Capabilities{Edit: true, ScheduledPublish: true},
		Lease:        500 * time.Millisecond,
	})
}
