package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	ordersv1 "github.com/leasebus/leasebus/examples/gen/orders/v1"
	"github.com/leasebus/leasebus/examples/gen/orders/v1/ordersv1leasebus"
	"github.com/leasebus/leasebus/examples/orders"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// policies are those of the shop's messages, in the order in which an order passes through them.
func policies() []leasebus.Policy {
	return []leasebus.Policy{
		ordersv1leasebus.OrderPlacedPolicy(),
		ordersv1leasebus.ReserveStockPolicy(),
		ordersv1leasebus.SendReceiptPolicy(),
	}
}

// What goes wrong in the story.
const (
	shakyOrder  = "order-1002"
	outage      = 2
	slowArticle = "piano"
	searchTime  = 2200 * time.Millisecond
	mailDomain  = "example.com"
	typo        = "mo@exmaple.com"
	corrected   = "mo@example.com"
)

// story is the shop, the processor that runs it, and the operators that look after its messages.
type story struct {
	n         *narrator
	store     backend
	publisher leasebus.Publisher // the store, told about
	shop      *orders.Shop
	stock     *slowStock
	letters   *orders.Postbox
	processor *leasebus.Processor

	placed   *ordersv1leasebus.OrderPlacedManager
	reserve  *ordersv1leasebus.ReserveStockManager
	receipts *ordersv1leasebus.SendReceiptManager
}

func newStory(store backend, n *narrator, log *slog.Logger) (*story, error) {
	operator := leasebus.By("operator ann")
	s := &story{
		n:         n,
		store:     store,
		publisher: n.publisher(store),
		letters:   &orders.Postbox{},
		stock: &slowStock{
			Stock:    orders.NewShelves(map[string]int{"teapot": 100, slowArticle: 1}),
			search:   map[string]time.Duration{slowArticle: searchTime},
			searches: make(map[string]int),
		},
		placed:   ordersv1leasebus.NewOrderPlacedManager(store, operator),
		reserve:  ordersv1leasebus.NewReserveStockManager(store, operator),
		receipts: ordersv1leasebus.NewSendReceiptManager(store, operator),
	}
	payments := &shakyPayments{Payments: &orders.Till{}, outage: map[string]int{shakyOrder: outage}}
	var err error
	s.shop, err = orders.NewShop(s.publisher, payments, s.stock, localMail{s.letters, mailDomain})
	if err != nil {
		return nil, err
	}
	s.processor, err = leasebus.NewProcessor(store,
		leasebus.WithOwner("demo"),
		leasebus.WithConcurrency(4),
		leasebus.WithValidator(orders.Validate),
		leasebus.WithHooks(n.hooks()),
		leasebus.WithLogger(log),
	)
	if err != nil {
		return nil, err
	}
	return s, s.shop.Register(s.processor)
}

// tell runs the shop for as long as the acts take.
func (s *story) tell(ctx context.Context) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	acting, breakOff := context.WithCancelCause(ctx)
	ended := make(chan error, 1)
	go func() {
		err := s.processor.Run(running)
		breakOff(fmt.Errorf("the processor has ended: %w", err))
		ended <- err
	}()

	told := s.acts(acting)
	stop()
	return errors.Join(told, <-ended)
}

func (s *story) acts(ctx context.Context) error {
	for i, act := range []struct {
		title string
		play  func(context.Context) error
	}{
		{"An order goes all the way. Each handler publishes the next message.", s.ordinary},
		{"The payment provider is down for a moment. What a handler fails at is tried again, after growing delays.", s.outage},
		{"A piano takes longer to find than its lease lasts. The lease is renewed, and nobody else gets the message.", s.slow},
		{"A receipt goes to a mistyped address. Its attempts run out; an operator mends it and sends it back to work.", s.mistyped},
		{"An article that does not exist. The handler answers \"permanent\", and no further attempt is made.", s.unknown},
		{"An order without items, and something that is no order at all. Neither reaches a handler.", s.invalid},
		{"An order from the last release, which called the message OrderCreated. Its alias brings it to the handler.", s.former},
	} {
		s.n.sayf("\n%d. %s", i+1, act.title)
		if err := act.play(ctx); err != nil {
			return fmt.Errorf("act %d: %w", i+1, err)
		}
	}
	return nil
}

func (s *story) ordinary(ctx context.Context) error {
	return s.delivers(ctx, order("order-1001", "ada@example.com", "teapot", 2))
}

func (s *story) outage(ctx context.Context) error {
	return s.delivers(ctx, order(shakyOrder, "bo@example.com", "teapot", 1))
}

func (s *story) slow(ctx context.Context) error {
	o := order("order-1003", "cy@example.com", slowArticle, 1)
	if err := s.delivers(ctx, o); err != nil {
		return err
	}
	if n := s.stock.searched(o.GetOrderId()); n != 1 {
		return fmt.Errorf("the piano was searched for %d times; a lease that is kept makes it 1", n)
	}
	return nil
}

func (s *story) mistyped(ctx context.Context) error {
	o := order("order-1004", typo, "teapot", 1)
	if err := s.place(ctx, o); err != nil {
		return err
	}
	exhausted := leasebus.Filter{Reason: leasebus.ReasonExhausted}
	for dead, err := range s.receipts.DeadLetters(ctx, exhausted) {
		if err != nil {
			return err
		}
		if err := s.mend(ctx, dead); err != nil {
			return err
		}
	}
	if err := s.quiet(ctx); err != nil {
		return err
	}
	return s.delivered(o)
}

// mend is what an operator does about a mistyped address.
func (s *story) mend(ctx context.Context, dead leasebus.TypedDeadLetter[*ordersv1.SendReceipt]) error {
	return s.n.act("ann", shortName(dead.Type), func() (string, error) {
		receipt, err := s.receipts.RequeueEdited(ctx, dead.ID, func(m *ordersv1.SendReceipt) error {
			m.Email = corrected
			return nil
		})
		if err != nil {
			return "", err
		}
		s.n.published[receipt.ID] = shortName(dead.Type)
		return fmt.Sprintf("the operator changes the address to %s and requeues it, as a new message", corrected), nil
	})
}

func (s *story) unknown(ctx context.Context) error {
	if err := s.place(ctx, order("order-1005", "di@example.com", "unicorn", 1)); err != nil {
		return err
	}
	return leaves(ctx, s.reserve, leasebus.ReasonPermanent, 1)
}

func (s *story) invalid(ctx context.Context) error {
	empty := order("order-1006", "ed@example.com", "", 0)
	empty.Items = nil
	if err := s.place(ctx, empty); err != nil {
		return err
	}
	if err := s.publishRaw(ctx, "order-1007", ordersv1leasebus.OrderPlacedPolicy().Type, []byte("\xffno protobuf")); err != nil {
		return err
	}
	return leaves(ctx, s.placed, leasebus.ReasonInvalid, 2)
}

func (s *story) former(ctx context.Context) error {
	o := order("order-1008", "flo@example.com", "teapot", 1)
	payload, err := proto.Marshal(o)
	if err != nil {
		return fmt.Errorf("encode an order: %w", err)
	}
	if err := s.publishRaw(ctx, o.GetOrderId(), ordersv1leasebus.OrderPlacedPolicy().Aliases[0], payload); err != nil {
		return err
	}
	return s.delivered(o)
}

// place places an order and waits until nothing more happens.
func (s *story) place(ctx context.Context, o *ordersv1.OrderPlaced) error {
	if _, err := s.shop.PlaceOrder(ctx, o); err != nil {
		return err
	}
	return s.quiet(ctx)
}

// delivers places an order that is to end with a receipt.
func (s *story) delivers(ctx context.Context, o *ordersv1.OrderPlaced) error {
	if err := s.place(ctx, o); err != nil {
		return err
	}
	return s.delivered(o)
}

// publishRaw publishes what the shop's own publisher would not, and waits until nothing more happens: another program,
// or an older release of this one, has put it together.
func (s *story) publishRaw(ctx context.Context, orderID, typeName string, payload []byte) error {
	out := []leasebus.Outgoing{{Envelope: leasebus.Envelope{
		ID: leasebus.NewID(), Type: typeName, Queue: ordersv1leasebus.OrderPlacedPolicy().Queue, Payload: payload,
		Headers: leasebus.NewHeaders(map[string]string{leasebus.HeaderCorrelation: orderID}),
	}}}
	if err := s.publisher.Publish(ctx, out, make([]leasebus.Receipt, 1)); err != nil {
		return fmt.Errorf("publish for %s: %w", orderID, err)
	}
	return s.quiet(ctx)
}

// quiet waits until no message waits and none is worked on. The queues are asked in the order in which messages pass
// through them, so none can slip from one that is still to be asked into one that was.
func (s *story) quiet(ctx context.Context) error {
	const poll = 5 * time.Millisecond
	for {
		busy, err := s.busy(ctx)
		if err != nil || !busy {
			return err
		}
		select {
		case <-time.After(poll):
		case <-ctx.Done():
			return fmt.Errorf("messages are still under way: %w", context.Cause(ctx))
		}
	}
}

func (s *story) busy(ctx context.Context) (bool, error) {
	for _, p := range policies() {
		stats, err := s.store.Stats(ctx, p.Queue)
		if err != nil {
			return false, fmt.Errorf("stats of %s: %w", p.Queue, err)
		}
		if stats.Pending+stats.Processing+stats.Failed > 0 {
			return true, nil
		}
	}
	// What the store has settled may not have been told of yet.
	return s.processor.InFlight()+s.processor.Held() > 0, nil
}

// delivered checks that an order has come to its end: the customer has a receipt.
func (s *story) delivered(o *ordersv1.OrderPlaced) error {
	for _, letter := range s.letters.Sent() {
		if letter.OrderID == o.GetOrderId() {
			return nil
		}
	}
	return fmt.Errorf("no receipt was sent for %s", o.GetOrderId())
}

// leaves checks how many dead letters of a reason there are, which have not been mended.
func leaves[M proto.Message](ctx context.Context, m *leasebus.TypedManager[M], reason leasebus.Reason, want int) error {
	found := 0
	for dead, err := range m.DeadLetters(ctx, leasebus.Filter{Reason: reason}) {
		if err != nil {
			return err
		}
		if dead.ReplacedBy == (leasebus.ID{}) {
			found++
		}
	}
	if found != want {
		return fmt.Errorf("%d dead letters are %s; the story has %d", found, reason, want)
	}
	return nil
}

func order(id, email, sku string, quantity int32) *ordersv1.OrderPlaced {
	const price = 1250
	return &ordersv1.OrderPlaced{
		OrderId: id, Email: email,
		Items: []*ordersv1.Item{{Sku: sku, Quantity: quantity, PriceCents: price}},
	}
}
