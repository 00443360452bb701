package leasebustest_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/leasebustest"
)

// What the tests of a service have from its generated code: here, by hand, for a StringValue that is an order.
var orderPolicy = func() leasebus.Policy {
	p := leasebus.DefaultPolicy("google.protobuf.StringValue", "orders")
	p.Retry = leasebus.ExponentialRetry(3, time.Minute, time.Hour, 2)
	return p
}()

func newOrderPublisher(to leasebus.Publisher) (*leasebus.TypedPublisher[*wrapperspb.StringValue], error) {
	return leasebus.NewTypedPublisher[*wrapperspb.StringValue](&orderPolicy, to)
}

func registerOrderHandler(p *leasebus.Processor, handle func(context.Context, *wrapperspb.StringValue) error) error {
	return leasebus.RegisterHandler(p, &orderPolicy, handle)
}

func ExamplePublished() {
	t := exampleTest{} // in a test, its own t

	store := leasebustest.NewStore()
	orders, err := newOrderPublisher(store)
	if err != nil {
		t.Fatalf("%v", err)
	}
	// What is tested would do this:
	if _, err := orders.Publish(t.Context(), wrapperspb.String("seven chairs"), leasebus.Delay(time.Hour)); err != nil {
		t.Fatalf("%v", err)
	}

	for _, sent := range leasebustest.Published[*wrapperspb.StringValue](t, store) {
		fmt.Printf("%s: %s, in %v\n", sent.Queue, sent.Message.GetValue(), sent.Delay)
	}
	// Output: orders: seven chairs, in 1h0m0s
}

func ExampleHandle() {
	t := exampleTest{} // in a test, its own t

	// What is tested: a handler with its answers for what can go wrong.
	register := func(p *leasebus.Processor) error {
		return registerOrderHandler(p, func(_ context.Context, order *wrapperspb.StringValue) error {
			switch order.GetValue() {
			case "":
				return leasebus.Invalid(errors.New("an empty order"))
			case "seven tables":
				return leasebus.RetryAfter(10*time.Minute, errors.New("no stock"))
			}
			return nil
		})
	}

	for _, order := range []string{"seven chairs", "seven tables", ""} {
		fmt.Println(leasebustest.Handle(t, register, wrapperspb.String(order)))
	}
	last := leasebustest.Handle(t, register, wrapperspb.String("seven tables"), leasebustest.Attempt(3))
	fmt.Println(last)
	if last.Kind == leasebus.SettleDeadLetter {
		fmt.Println("an operator will see:", last.DeadLetter.Error)
	}
	// Output:
	// completed
	// to be retried after 10m0s: no stock
	// dead-lettered to "orders.dlq" as invalid: an empty order
	// dead-lettered to "orders.dlq" as exhausted: no stock
	// an operator will see: no stock
}

func ExampleDrain() {
	t := exampleTest{} // in a test, its own t

	store := leasebustest.NewStore()
	orders, err := newOrderPublisher(store)
	if err != nil {
		t.Fatalf("%v", err)
	}
	for _, order := range []string{"seven chairs", "seven tables", "seven wishes"} {
		if _, err := orders.Publish(t.Context(), wrapperspb.String(order)); err != nil {
			t.Fatalf("%v", err)
		}
	}

	// The tables are there at the second attempt, a minute later; nobody waits for it.
	counts := leasebustest.Drain(t, store, func(p *leasebus.Processor) error {
		return registerOrderHandler(p, func(ctx context.Context, order *wrapperspb.StringValue) error {
			delivery, _ := leasebus.DeliveryFrom(ctx)
			switch order.GetValue() {
			case "seven wishes":
				return leasebus.Permanent(errors.New("not in the catalogue"))
			case "seven tables":
				if delivery.Attempt() == 1 {
					return errors.New("no stock")
				}
			}
			return nil
		})
	})

	fmt.Printf("%d completed, %d retried, %d dead-lettered\n", counts.Succeeded, counts.Failed, counts.DeadLettered)
	// Output: 2 completed, 1 retried, 1 dead-lettered
}
