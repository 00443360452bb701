package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// A service that only publishes makes sure at its start that the queues are there.
func Example_publishing() { //nolint:testableexamples // it needs a server
	publish := func(ctx context.Context) error {
		broker, err := amqp.Dial(ctx, os.Getenv("RABBITMQ_URL"), amqp.WithName("shop"))
		if err != nil {
			return err
		}
		defer func() { _ = broker.Close() }()

		// Generated code brings the policy and wraps the publisher.
		policy := leasebus.DefaultPolicy("google.protobuf.StringValue", "greetings")
		topology, err := broker.Topology(&policy)
		if err != nil {
			return err
		}
		if err := broker.Declare(ctx, topology); err != nil {
			return err
		}
		greetings, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&policy, broker)
		if err != nil {
			return err
		}
		id := leasebus.NewID()
		for {
			_, err = greetings.Publish(ctx, wrapperspb.String("hello"), leasebus.WithID(id))
			if !errors.Is(err, leasebus.ErrOutcomeUnknown) {
				return err
			}
			// Whether it is stored nobody can say. With the same id, publishing it again is safe.
		}
	}
	if err := publish(context.Background()); err != nil {
		slog.Error("not published", "error", err)
	}
}

// What a policy needs can be printed, and exported for those who manage the broker.
func ExampleTopologyOf() {
	policy := leasebus.DefaultPolicy("orders.v1.OrderPlaced", "orders")
	policy.Retry = leasebus.FixedRetry(5, 90*time.Second)
	topology, err := amqp.TopologyOf([]*leasebus.Policy{&policy})
	if err != nil {
		slog.Error("no topology", "error", err)
		return
	}
	for _, queue := range topology.Queues {
		fmt.Println(queue.Name)
	}
	// Output:
	// orders.dlq
	// orders
	// orders.retry.90s
	// leasebus.delay.1s
	// leasebus.delay.10s
	// leasebus.delay.1m
	// leasebus.delay.10m
	// leasebus.delay.1h
	// leasebus.delay.lost
}
