package orders

import (
	"context"
	"sync"
)

// Payments takes money.
type Payments interface {
	// Charge takes the money for an order. Charging an order again changes nothing.
	Charge(ctx context.Context, orderID string, cents int64) error
}

// Till is [Payments] in the process. The zero value is empty and ready.
type Till struct {
	mu   sync.Mutex
	paid map[string]int64
}

// Charge implements [Payments].
func (t *Till) Charge(_ context.Context, orderID string, cents int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, done := t.paid[orderID]; done {
		return nil
	}
	if t.paid == nil {
		t.paid = make(map[string]int64)
	}
	t.paid[orderID] = cents
	return nil
}

// Total is what was paid for all orders, in cents.
func (t *Till) Total() (cents int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, paid := range t.paid {
		cents += paid
	}
	return cents
}
