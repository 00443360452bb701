package orders

import (
	"context"
	"errors"
	"fmt"

	ordersv1 "github.com/leasebus/leasebus/examples/gen/orders/v1"
	"github.com/leasebus/leasebus/examples/gen/orders/v1/ordersv1leasebus"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// The generated interfaces say what a handler is; the shop is three of them.
var (
	_ ordersv1leasebus.OrderPlacedHandler  = (*Shop)(nil)
	_ ordersv1leasebus.ReserveStockHandler = (*Shop)(nil)
	_ ordersv1leasebus.SendReceiptHandler  = (*Shop)(nil)
)

// Shop takes orders and carries them out.
//
// A message is delivered at least once: a worker that dies after the payment and before it could say so leaves the
// message to another one, which takes the payment again and publishes the next message a second time, under a new id.
// So every effect carries the id of its order, and whoever has it already does nothing ([Payments], [Stock], [Mail]).
type Shop struct {
	payments Payments
	stock    Stock
	mail     Mail

	placed   *ordersv1leasebus.OrderPlacedPublisher
	reserve  *ordersv1leasebus.ReserveStockPublisher
	receipts *ordersv1leasebus.SendReceiptPublisher
}

// NewShop opens a shop whose messages go to a store or broker.
func NewShop(to leasebus.Publisher, payments Payments, stock Stock, mail Mail) (*Shop, error) {
	placed, errPlaced := ordersv1leasebus.NewOrderPlacedPublisher(to)
	reserve, errReserve := ordersv1leasebus.NewReserveStockPublisher(to)
	receipts, errReceipts := ordersv1leasebus.NewSendReceiptPublisher(to)
	if err := errors.Join(errPlaced, errReserve, errReceipts); err != nil {
		return nil, fmt.Errorf("open the shop: %w", err)
	}
	return &Shop{
		payments: payments, stock: stock, mail: mail,
		placed: placed, reserve: reserve, receipts: receipts,
	}, nil
}

// Register makes p hand the shop its messages. Make p with [Validate] as its validator.
func (s *Shop) Register(p *leasebus.Processor) error {
	return errors.Join(
		ordersv1leasebus.RegisterOrderPlacedHandler(p, s),
		ordersv1leasebus.RegisterReserveStockHandler(p, s),
		ordersv1leasebus.RegisterSendReceiptHandler(p, s),
	)
}

// PlaceOrder takes an order. When it returns without an error, the order is stored and will be carried out.
//
// All messages of an order share its id as their correlation: the handlers pass it on without doing anything for it.
func (s *Shop) PlaceOrder(ctx context.Context, order *ordersv1.OrderPlaced) (leasebus.ID, error) {
	receipt, err := s.placed.Publish(ctx, order, leasebus.WithCorrelation(order.GetOrderId()))
	if err != nil {
		return leasebus.ID{}, fmt.Errorf("place order %s: %w", order.GetOrderId(), err)
	}
	return receipt.ID, nil
}

// HandleOrderPlaced takes the payment. A payment provider that fails may work again in a moment: the error is
// returned as it is, and the message comes again.
func (s *Shop) HandleOrderPlaced(ctx context.Context, m *ordersv1.OrderPlaced) error {
	if err := s.payments.Charge(ctx, m.GetOrderId(), total(m.GetItems())); err != nil {
		return fmt.Errorf("take the payment: %w", err)
	}
	_, err := s.reserve.Publish(ctx, &ordersv1.ReserveStock{
		OrderId: m.GetOrderId(), Email: m.GetEmail(), Items: m.GetItems(),
	})
	return err
}

// HandleReserveStock lays the articles aside. What is sold out may be delivered until the next attempt; what the shop
// does not sell will not be, however often one looks.
func (s *Shop) HandleReserveStock(ctx context.Context, m *ordersv1.ReserveStock) error {
	err := s.stock.Reserve(ctx, m.GetOrderId(), m.GetItems())
	switch {
	case errors.Is(err, ErrUnknownArticle):
		return leasebus.Permanent(err)
	case err != nil:
		return fmt.Errorf("reserve the stock: %w", err)
	}
	_, err = s.receipts.Publish(ctx, &ordersv1.SendReceipt{
		OrderId: m.GetOrderId(), Email: m.GetEmail(), TotalCents: total(m.GetItems()),
	})
	return err
}

// HandleSendReceipt sends the receipt.
func (s *Shop) HandleSendReceipt(ctx context.Context, m *ordersv1.SendReceipt) error {
	text := fmt.Sprintf("Thank you for order %s. You paid %d.%02d.", m.GetOrderId(), m.GetTotalCents()/100, m.GetTotalCents()%100)
	if err := s.mail.Send(ctx, m.GetOrderId(), m.GetEmail(), text); err != nil {
		return fmt.Errorf("send the receipt: %w", err)
	}
	return nil
}

func total(items []*ordersv1.Item) (cents int64) {
	for _, item := range items {
		cents += int64(item.GetQuantity()) * item.GetPriceCents()
	}
	return cents
}
