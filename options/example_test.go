package options_test

import (
	"fmt"

	"github.com/leasebus/leasebus/golden/alloptions"
	"github.com/leasebus/leasebus/options"
)

// The policy of a message that is known by its descriptor alone.
func ExampleResolve() {
	var message *alloptions.OrderShipped
	policy, err := options.Resolve(message.ProtoReflect().Descriptor())
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(policy.Queue, policy.Lease.Duration)
	for delay := range policy.Retry.Schedule() {
		fmt.Println("retry after", delay)
	}
	// Output:
	// orders.shipped 1m0s
	// retry after 1m30s
	// retry after 1m30s
}
