package orders_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	ordersv1 "github.com/leasebus/leasebus/examples/gen/orders/v1"
	"github.com/leasebus/leasebus/examples/gen/orders/v1/ordersv1leasebus"
	"github.com/leasebus/leasebus/examples/orders"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/leasebustest"
)

// shop is the shop with what it works on. Tests replace what is to go wrong before they open it.
type shop struct {
	*orders.Shop

	store    *leasebustest.Store
	payments orders.Payments
	stock    orders.Stock
	mail     orders.Mail

	till    *orders.Till
	shelves *orders.Shelves
	postbox *orders.Postbox
}

func newShop(t *testing.T, change ...func(*shop)) *shop {
	t.Helper()
	s := &shop{
		store:   leasebustest.NewStore(),
		till:    &orders.Till{},
		shelves: orders.NewShelves(map[string]int{"teapot": 10}),
		postbox: &orders.Postbox{},
	}
	s.payments, s.stock, s.mail = s.till, s.shelves, s.postbox
	for _, f := range change {
		f(s)
	}
	opened, err := orders.NewShop(s.store, s.payments, s.stock, s.mail)
	if err != nil {
		t.Fatal(err)
	}
	s.Shop = opened
	return s
}

func (s *shop) place(t *testing.T, order *ordersv1.OrderPlaced) {
	t.Helper()
	if _, err := s.PlaceOrder(t.Context(), order); err != nil {
		t.Fatal(err)
	}
}

func order(change ...func(*ordersv1.OrderPlaced)) *ordersv1.OrderPlaced {
	o := &ordersv1.OrderPlaced{
		OrderId: "order-1", Email: "ada@example.com",
		Items: []*ordersv1.Item{{Sku: "teapot", Quantity: 2, PriceCents: 1250}},
	}
	for _, f := range change {
		f(o)
	}
	return o
}

// paymentsFunc, stockFunc and mailFunc are services that do what a test wants.
type (
	paymentsFunc func(context.Context) error
	stockFunc    func(context.Context) error
	mailFunc     func(context.Context) error
)

func (f paymentsFunc) Charge(ctx context.Context, _ string, _ int64) error { return f(ctx) }

func (f stockFunc) Reserve(ctx context.Context, _ string, _ []*ordersv1.Item) error { return f(ctx) }

func (f mailFunc) Send(ctx context.Context, _ string, _ string, _ string) error { return f(ctx) }

func fails(err error) func(context.Context) error { return func(context.Context) error { return err } }

var errDown = errors.New("the provider answers 503")

// What a handler publishes is looked at in the store that its publishers were given.
func TestOrderPlaced_IsPaidAndAsksForStock(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	decision := leasebustest.Handle(t, s.Register, order(), leasebustest.PublishedWith(leasebus.WithCorrelation("order-1")))
	if decision.Kind != leasebus.SettleComplete {
		t.Fatalf("the order was %v, want completed", decision)
	}
	if paid := s.till.Total(); paid != 2500 {
		t.Errorf("%d cents were paid, want 2500", paid)
	}
	published := leasebustest.Published[*ordersv1.ReserveStock](t, s.store)
	if len(published) != 1 {
		t.Fatalf("%d ReserveStock were published, want 1", len(published))
	}
	want := &ordersv1.ReserveStock{OrderId: "order-1", Email: "ada@example.com", Items: order().GetItems()}
	if got := published[0]; !proto.Equal(got.Message, want) {
		t.Errorf("published %v, want %v", got.Message, want)
	}
	headers := published[0].Headers
	if got := headers.Get(leasebus.HeaderCorrelation); got != "order-1" {
		t.Errorf("correlation %q, want that of the order", got)
	}
	if got := headers.Get(leasebus.HeaderCausation); got != decision.ID.String() {
		t.Errorf("causation %q, want the id of the message that was handled, %s", got, decision.ID)
	}
}

// What becomes of a message is the annotations' decision; a test shows what they come to.
func TestFailures(t *testing.T) {
	t.Parallel()
	placed, reserve := ordersv1leasebus.OrderPlacedPolicy(), ordersv1leasebus.ReserveStockPolicy()
	stock := &ordersv1.ReserveStock{OrderId: "order-1", Items: order().GetItems()}
	for _, test := range []struct {
		name    string
		change  func(*shop)
		handle  func(*testing.T, *shop, int) leasebustest.Decision
		attempt int
		kind    leasebus.SettlementKind
		delay   time.Duration
		reason  leasebus.Reason
		to      string
	}{
		{
			name: "payment fails at first", change: func(s *shop) { s.payments = paymentsFunc(fails(errDown)) },
			handle: handle(order()), attempt: 1, kind: leasebus.SettleRetry, delay: 300 * time.Millisecond,
		},
		{
			name: "payment fails again", change: func(s *shop) { s.payments = paymentsFunc(fails(errDown)) },
			handle: handle(order()), attempt: 2, kind: leasebus.SettleRetry, delay: 600 * time.Millisecond,
		},
		{
			name: "payment fails to the end", change: func(s *shop) { s.payments = paymentsFunc(fails(errDown)) },
			handle: handle(order()), attempt: 3, kind: leasebus.SettleDeadLetter, reason: leasebus.ReasonExhausted, to: placed.DeadLetter.Queue,
		},
		{
			name: "order without items", handle: handle(order(func(o *ordersv1.OrderPlaced) { o.Items = nil })),
			attempt: 1, kind: leasebus.SettleDeadLetter, reason: leasebus.ReasonInvalid, to: placed.DeadLetter.InvalidQueue,
		},
		{
			name: "order of nothing", handle: handle(order(func(o *ordersv1.OrderPlaced) { o.Items[0].Quantity = 0 })),
			attempt: 1, kind: leasebus.SettleDeadLetter, reason: leasebus.ReasonInvalid, to: placed.DeadLetter.InvalidQueue,
		},
		{
			name: "sold out", change: func(s *shop) { s.stock = orders.NewShelves(map[string]int{"teapot": 1}) },
			handle: handle(stock), attempt: 1, kind: leasebus.SettleRetry, delay: 300 * time.Millisecond,
		},
		{
			name: "unknown article", change: func(s *shop) { s.stock = orders.NewShelves(nil) },
			handle: handle(stock), attempt: 1, kind: leasebus.SettleDeadLetter, reason: leasebus.ReasonPermanent, to: reserve.DeadLetter.Queue,
		},
		{
			name: "mail server away", change: func(s *shop) { s.mail = mailFunc(fails(errDown)) },
			handle: handle(&ordersv1.SendReceipt{OrderId: "order-1"}), attempt: 2, kind: leasebus.SettleRetry, delay: 300 * time.Millisecond,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			if test.change == nil {
				test.change = func(*shop) {}
			}
			s := newShop(t, test.change)
			d := test.handle(t, s, test.attempt)
			if d.Kind != test.kind || d.Delay != test.delay || d.Reason != test.reason {
				t.Fatalf("the message was %v, want %v after %v, %q", d, test.kind, test.delay, test.reason)
			}
			if d.DeadLetter != nil && d.DeadLetter.DeadLetterQueue != test.to {
				t.Errorf("it went to %q, want %q", d.DeadLetter.DeadLetterQueue, test.to)
			}
		})
	}
}

// handle has the shop handle m as the service would, at its nth attempt.
func handle[M proto.Message](m M) func(*testing.T, *shop, int) leasebustest.Decision {
	return func(t *testing.T, s *shop, attempt int) leasebustest.Decision {
		t.Helper()
		return leasebustest.Handle(t, s.Register, m, leasebustest.Attempt(attempt),
			leasebustest.Processing(leasebus.WithValidator(orders.Validate)))
	}
}

// A whole flow, with a shop that is sold out until a delivery comes. The delays between the attempts take no time.
func TestOrder_WaitsForADelivery(t *testing.T) {
	t.Parallel()
	attempts := 0
	s := newShop(t, func(s *shop) {
		shelves := orders.NewShelves(map[string]int{"teapot": 0})
		s.stock = stockFunc(func(ctx context.Context) error {
			if attempts++; attempts == 3 {
				shelves.Deliver("teapot", 2)
			}
			return shelves.Reserve(ctx, "order-1", order().GetItems())
		})
	})
	s.place(t, order())
	stats := leasebustest.Drain(t, s.store, s.Register)
	if stats.Succeeded != 3 || stats.Failed != 2 || stats.DeadLettered != 0 {
		t.Errorf("%d messages succeeded, %d attempts failed, %d were dead-lettered; want 3, 2, 0",
			stats.Succeeded, stats.Failed, stats.DeadLettered)
	}
	letters := s.postbox.Sent()
	if want := (orders.Letter{OrderID: "order-1", To: "ada@example.com", Text: "Thank you for order order-1. You paid 25.00."}); len(letters) != 1 || letters[0] != want {
		t.Errorf("letters %+v, want %+v", letters, want)
	}
}

// At least once means that it may be twice: a worker died after its effect, or a customer pressed the button again.
func TestOrder_PlacedTwiceHasEffectsOnce(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.place(t, order())
	s.place(t, order())
	stats := leasebustest.Drain(t, s.store, s.Register)
	if stats.Succeeded != 6 {
		t.Errorf("%d messages succeeded, want 6", stats.Succeeded)
	}
	if paid, free, sent := s.till.Total(), s.shelves.Free("teapot"), len(s.postbox.Sent()); paid != 2500 || free != 8 || sent != 1 {
		t.Errorf("%d cents were paid, %d teapots are left, %d letters were sent; want 2500, 8, 1", paid, free, sent)
	}
}

// Messages that were published before a release renamed their type are on their way for a while.
func TestOrder_UnderItsFormerName(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	payload, err := proto.Marshal(order())
	if err != nil {
		t.Fatal(err)
	}
	out := []leasebus.Outgoing{{Envelope: leasebus.Envelope{
		ID: leasebus.NewID(), Type: "orders.v1.OrderCreated", Queue: ordersv1leasebus.OrderPlacedPolicy().Queue, Payload: payload,
	}}}
	if err := s.store.Publish(t.Context(), out, make([]leasebus.Receipt, 1)); err != nil {
		t.Fatal(err)
	}
	leasebustest.Drain(t, s.store, s.Register)
	if sent := len(s.postbox.Sent()); sent != 1 {
		t.Errorf("%d letters were sent, want 1", sent)
	}
}

// Time passes at once in a synctest bubble, for the processor too: a search that takes a minute is renewed some two
// hundred times meanwhile, and a second worker never sees the message.
func TestReserveStock_LongerThanItsLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		searches := 0
		s := newShop(t, func(s *shop) {
			s.stock = stockFunc(func(ctx context.Context) error {
				searches++
				select {
				case <-time.After(time.Minute):
					return nil
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			})
		})
		s.place(t, order())
		ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
		defer stop()
		ended := make(chan error, 2)
		for range 2 {
			p, err := leasebus.NewProcessor(s.store)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Register(p); err != nil {
				t.Fatal(err)
			}
			go func() { ended <- p.Run(ctx) }()
		}
		if err := errors.Join(<-ended, <-ended); err != nil {
			t.Error(err)
		}
		if sent := len(s.postbox.Sent()); searches != 1 || sent != 1 {
			t.Errorf("%d searches, %d letters; want 1 and 1", searches, sent)
		}
	})
}
