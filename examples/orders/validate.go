package orders

import (
	"context"
	"errors"
	"fmt"
	"strings"

	ordersv1 "github.com/leasebus/leasebus/examples/gen/orders/v1"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// Validate refuses orders that nobody can carry out, before a handler sees them: they take the invalid route of their
// message, and no retry is spent on them. Give it to [leasebus.WithValidator].
func Validate(_ context.Context, d leasebus.Delivery) error {
	order, ok := d.Message().(*ordersv1.OrderPlaced)
	if !ok {
		return nil // the other messages are made by the shop itself
	}
	var problems []error
	if order.GetOrderId() == "" {
		problems = append(problems, errors.New("order_id is empty"))
	}
	if !strings.Contains(order.GetEmail(), "@") {
		problems = append(problems, errors.New("email is no address"))
	}
	if len(order.GetItems()) == 0 {
		problems = append(problems, errors.New("items is empty; one or more are needed"))
	}
	for i, item := range order.GetItems() {
		if item.GetQuantity() < 1 || item.GetPriceCents() < 0 {
			problems = append(problems, fmt.Errorf("items[%d] has quantity %d and price %d; allowed are 1 and 0, or more",
				i, item.GetQuantity(), item.GetPriceCents()))
		}
	}
	return errors.Join(problems...)
}
