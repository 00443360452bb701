package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	ordersv1 "github.com/leasebus/leasebus/examples/gen/orders/v1"
	"github.com/leasebus/leasebus/examples/orders"
)

// The shop's services as the demo has them: each works, but for what the story needs to go wrong.

// shakyPayments is a payment provider that is down for the first attempts at some orders.
type shakyPayments struct {
	orders.Payments

	mu     sync.Mutex
	outage map[string]int // by order: how many attempts find it down
}

var errProviderDown = errors.New("the provider answers 503")

func (p *shakyPayments) Charge(ctx context.Context, orderID string, cents int64) error {
	p.mu.Lock()
	down := p.outage[orderID] > 0
	if down {
		p.outage[orderID]--
	}
	p.mu.Unlock()
	if down {
		return errProviderDown
	}
	return p.Payments.Charge(ctx, orderID, cents)
}

// slowStock takes its time to find some articles.
type slowStock struct {
	orders.Stock

	search map[string]time.Duration // by article

	mu       sync.Mutex
	searches map[string]int // by order
}

func (s *slowStock) Reserve(ctx context.Context, orderID string, items []*ordersv1.Item) error {
	s.mu.Lock()
	s.searches[orderID]++
	s.mu.Unlock()
	for _, item := range items {
		select {
		case <-time.After(s.search[item.GetSku()]):
		case <-ctx.Done():
			return fmt.Errorf("search for %s: %w", item.GetSku(), context.Cause(ctx))
		}
	}
	return s.Stock.Reserve(ctx, orderID, items)
}

// searched is how often the articles of an order were looked for.
func (s *slowStock) searched(orderID string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.searches[orderID]
}

// localMail knows the mail server of one domain only.
type localMail struct {
	orders.Mail

	domain string
}

func (m localMail) Send(ctx context.Context, orderID, to, text string) error {
	if _, domain, _ := strings.Cut(to, "@"); domain != m.domain {
		return fmt.Errorf("no mail server found for %s", domain)
	}
	return m.Mail.Send(ctx, orderID, to, text)
}
