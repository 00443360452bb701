package amqp

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var _ leasebus.HealthChecker = (*Broker)(nil)

// CheckHealth implements [leasebus.HealthChecker], a part for each connection. It asks RabbitMQ nothing. One that is
// closed is down, until it has come back. One on which RabbitMQ takes no messages for now is up, with the reason. A
// consumer is degraded while it has no queue to consume, or while RabbitMQ does not take what was decided about messages.
func (b *Broker) CheckHealth(context.Context) []leasebus.HealthComponent {
	b.mu.Lock()
	closed := b.closed
	links := slices.SortedFunc(maps.Keys(b.links), func(a, b *link) int { return strings.Compare(a.purpose, b.purpose) })
	b.mu.Unlock()
	if closed {
		return []leasebus.HealthComponent{{Status: leasebus.HealthDown, Details: map[string]any{healthError: ErrClosed.Error()}}}
	}
	all := make([]leasebus.HealthComponent, len(links))
	for i, l := range links {
		all[i] = l.health()
	}
	return all
}

// healthError is the detail that says what is wrong.
const healthError = "error"

func (l *link) health() leasebus.HealthComponent {
	s := l.state()
	c := leasebus.HealthComponent{Name: l.purpose, Details: map[string]any{
		"server": l.target.addr, "since": s.Since.UTC().Format(time.RFC3339),
	}}
	if s.Blocked != "" {
		c.Details["blocked"] = s.Blocked
	}
	if f := l.feed.Load(); f != nil {
		f.tellHealth(&c)
	}
	if !s.Up {
		c.Status, c.Details[healthError] = leasebus.HealthDown, s.Err.Error()
	}
	return c
}

// tellHealth adds what the feed knows: how many messages RabbitMQ has sent it that are not acknowledged, and what the
// feed itself holds of them.
func (f *feed) tellHealth(c *leasebus.HealthComponent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c.Details["prefetch"] = f.prefetch
	c.Details["buffered"] = f.buffer.len()
	c.Details["waiting"] = f.moves.hold.len()
	switch {
	case f.life != nil:
		c.Details["unacked"] = f.life.ledger.count()
	case !f.stopped:
		c.Status, c.Details[healthError] = leasebus.HealthDegraded, "there is no consumer"
	}
	if f.moves.failing > 0 {
		c.Status, c.Details[healthError] = leasebus.HealthDegraded, "RabbitMQ does not take the outcome of messages"
		c.Details["failing"] = f.moves.failing
	}
}
