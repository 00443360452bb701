package orders

import (
	"context"
	"slices"
	"sync"
)

// Mail sends letters to customers.
type Mail interface {
	// Send sends the one letter about an order. Sending it again does nothing.
	Send(ctx context.Context, orderID, to, text string) error
}

// Letter is what was sent.
type Letter struct{ OrderID, To, Text string }

// Postbox is [Mail] in the process: it keeps what was sent. The zero value is empty and ready.
type Postbox struct {
	mu   sync.Mutex
	sent []Letter
}

// Send implements [Mail].
func (p *Postbox) Send(_ context.Context, orderID, to, text string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.ContainsFunc(p.sent, func(l Letter) bool { return l.OrderID == orderID }) {
		p.sent = append(p.sent, Letter{orderID, to, text})
	}
	return nil
}

// Sent returns the letters that were sent, in their order.
func (p *Postbox) Sent() []Letter {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.sent)
}
