package memory_test

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// A publisher and a handler meet in one process. Generated code brings the policy, the publisher and the registration;
// here they are made by hand for a well-known type.
func Example() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	store := memory.New()
	greetings := leasebus.DefaultPolicy("google.protobuf.StringValue", "greetings")

	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&greetings, store)
	if err != nil {
		panic(err)
	}
	if _, err := publisher.Publish(ctx, wrapperspb.String("hello")); err != nil {
		panic(err)
	}

	processor, err := leasebus.NewProcessor(store)
	if err != nil {
		panic(err)
	}
	err = leasebus.RegisterHandler(processor, &greetings, func(_ context.Context, m *wrapperspb.StringValue) error {
		fmt.Println(m.GetValue())
		stop() // one is enough
		return nil
	})
	if err != nil {
		panic(err)
	}
	if err := processor.Run(ctx); err != nil {
		panic(err)
	}
	// Output: hello
}

// Time passes when a test says so: a message for tomorrow becomes due without a wait.
func ExampleStore_Advance() {
	ctx := context.Background()
	store := memory.New()
	greetings := leasebus.DefaultPolicy("google.protobuf.StringValue", "greetings")
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&greetings, store)
	if err != nil {
		panic(err)
	}
	if _, err := publisher.Publish(ctx, wrapperspb.String("good morning"), leasebus.Delay(24*time.Hour)); err != nil {
		panic(err)
	}
	due := func() int64 {
		stats, err := store.Stats(ctx, "greetings")
		if err != nil {
			panic(err)
		}
		return stats.Due
	}

	fmt.Println("due today:", due())
	store.Advance(24 * time.Hour)
	fmt.Println("due tomorrow:", due())
	// Output:
	// due today: 0
	// due tomorrow: 1
}
