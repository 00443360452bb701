package orders_test

import (
	"context"
	"fmt"

	ordersv1 "github.com/leasebus/leasebus/examples/gen/orders/v1"
	"github.com/leasebus/leasebus/examples/gen/orders/v1/ordersv1leasebus"
	"github.com/leasebus/leasebus/examples/orders"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// A service makes a place for its messages, publishes to it, and runs its handlers over it until it is told to stop.
func Example() {
	store := memory.New()
	postbox := &orders.Postbox{}
	shop, err := orders.NewShop(store, &orders.Till{}, orders.NewShelves(map[string]int{"teapot": 3}), postbox)
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	_, err = shop.PlaceOrder(ctx, &ordersv1.OrderPlaced{
		OrderId: "order-1", Email: "ada@example.com",
		Items: []*ordersv1.Item{{Sku: "teapot", Quantity: 2, PriceCents: 1250}},
	})
	if err != nil {
		panic(err)
	}

	p, err := leasebus.NewProcessor(store, leasebus.WithHooks(leasebus.Hooks{
		Settled: func(d leasebus.Delivery, _ leasebus.Outcome) {
			if d.Queue() == ordersv1leasebus.SendReceiptPolicy().Queue {
				stop() // a service would run on
			}
		},
	}))
	if err != nil {
		panic(err)
	}
	if err := shop.Register(p); err != nil {
		panic(err)
	}
	if err := p.Run(ctx); err != nil { // it drains when ctx ends, and says what was left
		panic(err)
	}
	for _, letter := range postbox.Sent() {
		fmt.Printf("to %s: %s\n", letter.To, letter.Text)
	}
	// Output: to ada@example.com: Thank you for order order-1. You paid 25.00.
}

// An operator looks at the dead letters of a message type, mends one, and sends it back to work.
func Example_operator() {
	store := memory.New()
	shelves := orders.NewShelves(map[string]int{"teapot": 3})
	shop, err := orders.NewShop(store, &orders.Till{}, shelves, &orders.Postbox{})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	_, err = shop.PlaceOrder(ctx, &ordersv1.OrderPlaced{
		OrderId: "order-1", Email: "ada@example.com",
		Items: []*ordersv1.Item{{Sku: "taepot", Quantity: 1, PriceCents: 1250}},
	})
	if err != nil {
		panic(err)
	}
	until(store, shop, leasebus.SettleDeadLetter)

	manager := ordersv1leasebus.NewReserveStockManager(store, leasebus.By("ann"))
	for dead, err := range manager.DeadLetters(ctx, leasebus.Filter{Reason: leasebus.ReasonPermanent}) {
		if err != nil {
			panic(err)
		}
		fmt.Printf("%s, attempt %d: %s\n", dead.Message.GetOrderId(), dead.Attempts, dead.Error)
		_, err = manager.RequeueEdited(ctx, dead.ID, func(m *ordersv1.ReserveStock) error {
			m.Items[0].Sku = "teapot"
			return nil
		})
		if err != nil {
			panic(err)
		}
	}

	until(store, shop, leasebus.SettleComplete)
	fmt.Println("teapots left:", shelves.Free("teapot"))
	// Output:
	// order-1, attempt 1: unknown article "taepot"
	// teapots left: 2
}

// until runs the shop until a request for stock has come to the end that is named.
func until(store *memory.Store, shop *orders.Shop, end leasebus.SettlementKind) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	p, err := leasebus.NewProcessor(store, leasebus.WithHooks(leasebus.Hooks{
		Settled: func(d leasebus.Delivery, o leasebus.Outcome) {
			if d.Queue() == ordersv1leasebus.ReserveStockPolicy().Queue && o.Kind == end {
				stop()
			}
		},
	}))
	if err != nil {
		panic(err)
	}
	if err := shop.Register(p); err != nil {
		panic(err)
	}
	if err := p.Run(ctx); err != nil {
		panic(err)
	}
}
