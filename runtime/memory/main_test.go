package memory_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	orders   = "orders"
	typeName = "orders.v1.OrderPlaced"
	lease    = 30 * time.Second
)

func policy(change ...func(*leasebus.Policy)) *leasebus.Policy {
	p := leasebus.DefaultPolicy(typeName, orders)
	for _, f := range change {
		f(&p)
	}
	return &p
}

// consumer is a feed that fails its test on any error.
type consumer struct {
	t     *testing.T
	feed  leasebus.Feed
	woken chan struct{}
}

func subscribe(t *testing.T, store *memory.Store, owner string, change ...func(*leasebus.Policy)) *consumer {
	t.Helper()
	c := &consumer{t: t, woken: make(chan struct{}, 1)}
	feed, err := store.Subscribe(t.Context(), leasebus.Subscription{
		Queue: orders, Types: []string{typeName}, Owner: owner, Policy: policy(change...), Concurrency: 1,
		Wake: func() {
			select {
			case c.woken <- struct{}{}:
			default:
			}
		},
		Check: func() { t.Error("Check was called; nothing in memory asks for a renewal") },
	})
	if err != nil {
		t.Fatalf("subscribe: %v", err)
	}
	t.Cleanup(func() {
		if err := feed.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	c.feed = feed
	return c
}

func (c *consumer) lease(limit int) []*leasebus.Lease {
	c.t.Helper()
	dst := make([]leasebus.Lease, limit)
	n, err := c.feed.Lease(context.Background(), dst)
	if err != nil {
		c.t.Fatalf("lease: %v", err)
	}
	leases := make([]*leasebus.Lease, n)
	for i := range leases {
		leases[i] = &dst[i]
	}
	return leases
}

// one leases the only message that is due.
func (c *consumer) one() *leasebus.Lease {
	c.t.Helper()
	leases := c.lease(2)
	if len(leases) != 1 {
		c.t.Fatalf("leased %d messages, want 1", len(leases))
	}
	return leases[0]
}

func (c *consumer) none() {
	c.t.Helper()
	if leases := c.lease(1); len(leases) != 0 {
		c.t.Fatalf("leased %q, want nothing", leases[0].Payload)
	}
}

func (c *consumer) settle(s leasebus.Settlement) leasebus.Result {
	c.t.Helper()
	batch := []leasebus.Settlement{s}
	if err := c.feed.Settle(context.Background(), batch); err != nil {
		c.t.Fatalf("settle %v: %v", s.Kind, err)
	}
	return batch[0].Result
}

func (c *consumer) mustSettle(s leasebus.Settlement) {
	c.t.Helper()
	if got := c.settle(s); got != leasebus.ResultOK {
		c.t.Fatalf("settle %v: result %d, want OK", s.Kind, got)
	}
}

func (c *consumer) renew(l *leasebus.Lease) leasebus.Result {
	c.t.Helper()
	batch := []leasebus.Renewal{{Lease: l}}
	if err := c.feed.Renew(context.Background(), batch); err != nil {
		c.t.Fatalf("renew: %v", err)
	}
	return batch[0].Result
}

// wakes reports whether Wake was called since it was last asked.
func (c *consumer) wakes() bool {
	select {
	case <-c.woken:
		return true
	default:
		return false
	}
}

func message(payload string) leasebus.Outgoing {
	return leasebus.Outgoing{Envelope: leasebus.Envelope{
		ID: leasebus.NewID(), Type: typeName, Queue: orders, Payload: []byte(payload),
	}}
}

func publish(t *testing.T, store *memory.Store, out ...leasebus.Outgoing) {
	t.Helper()
	receipts := make([]leasebus.Receipt, len(out))
	if err := store.Publish(t.Context(), out, receipts); err != nil {
		t.Fatalf("publish: %v", err)
	}
}

func publishText(t *testing.T, store *memory.Store, payloads ...string) {
	t.Helper()
	out := make([]leasebus.Outgoing, len(payloads))
	for i, p := range payloads {
		out[i] = message(p)
	}
	publish(t, store, out...)
}

func payloads(leases []*leasebus.Lease) []string {
	texts := make([]string, len(leases))
	for i, l := range leases {
		texts[i] = string(l.Payload)
	}
	return texts
}

func wantPayloads(t *testing.T, leases []*leasebus.Lease, want ...string) {
	t.Helper()
	if got := payloads(leases); !slices.Equal(got, want) {
		t.Fatalf("leased %q, want %q", got, want)
	}
}

func stats(t *testing.T, store *memory.Store) leasebus.QueueStats {
	t.Helper()
	s, err := store.Stats(t.Context(), orders)
	if err != nil {
		t.Fatalf("stats: %v", err)
	}
	return s
}

func wantStats(t *testing.T, store *memory.Store, want leasebus.QueueStats) {
	t.Helper()
	if got := stats(t, store); got != want {
		t.Fatalf("stats\n got %+v\nwant %+v", got, want)
	}
}

func failure(text string) *leasebus.Failure {
	return &leasebus.Failure{Attempt: 1, Text: text, ErrorType: "*errors.errorString"}
}
