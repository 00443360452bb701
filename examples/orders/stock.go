package orders

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	ordersv1 "github.com/leasebus/leasebus/examples/gen/orders/v1"
)

var (
	// ErrUnknownArticle says that the shop has never sold it.
	ErrUnknownArticle = errors.New("unknown article")
	// ErrSoldOut says that there is not enough of it now.
	ErrSoldOut = errors.New("sold out")
)

// Stock lays articles aside.
type Stock interface {
	// Reserve lays aside all items of an order, or none. Reserving for an order again changes nothing.
	// The error matches [ErrUnknownArticle] or [ErrSoldOut] if an item is the reason.
	Reserve(ctx context.Context, orderID string, items []*ordersv1.Item) error
}

// Shelves is [Stock] in the process. Make one with [NewShelves].
type Shelves struct {
	mu       sync.Mutex
	free     map[string]int
	reserved map[string]bool
}

// NewShelves fills shelves: so many of each article.
func NewShelves(articles map[string]int) *Shelves {
	free := make(map[string]int, len(articles))
	maps.Copy(free, articles)
	return &Shelves{free: free, reserved: make(map[string]bool)}
}

// Reserve implements [Stock].
func (s *Shelves) Reserve(_ context.Context, orderID string, items []*ordersv1.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reserved[orderID] {
		return nil
	}
	wanted := make(map[string]int, len(items)) // an article may stand on several lines
	for _, item := range items {
		sku := item.GetSku()
		wanted[sku] += int(item.GetQuantity())
		free, sold := s.free[sku]
		switch {
		case !sold:
			return fmt.Errorf("%w %q", ErrUnknownArticle, sku)
		case free < wanted[sku]:
			return fmt.Errorf("%w: %d of %q, of which %d are left", ErrSoldOut, wanted[sku], sku, free)
		}
	}
	for sku, quantity := range wanted {
		s.free[sku] -= quantity
	}
	s.reserved[orderID] = true
	return nil
}

// Deliver puts more of an article on its shelf.
func (s *Shelves) Deliver(sku string, quantity int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free[sku] += quantity
}

// Free is how many of an article can be sold.
func (s *Shelves) Free(sku string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.free[sku]
}
