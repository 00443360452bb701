package memory_test

import (
	"fmt"
	"testing"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// BenchmarkLeaseSettle is what the store adds to each message that a processor handles: one lease and one completion,
// with a subscriber that has found nothing waiting beside it. Budget: 500 ns for each message.
func BenchmarkLeaseSettle(b *testing.B) {
	const published = 64_000
	for _, batch := range []int{1, 16, 100, 500} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			store := memory.New()
			feed := benchFeed(b, store)
			dst := make([]leasebus.Lease, batch)
			settlements := make([]leasebus.Settlement, batch)
			out, receipts := benchBatch(published)
			b.ReportAllocs()
			b.ResetTimer()
			for n := 0; n < b.N; n += batch {
				if n%published < batch { // seldom: stopping the timer stops the world
					b.StopTimer()
					if err := store.Publish(b.Context(), out, receipts); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
				leaseAndSettle(b, feed, dst, settlements, leasebus.Settlement{})
			}
		})
	}
}

// BenchmarkStandingQueue leases and settles from a queue of many messages, where a scan would show.
func BenchmarkStandingQueue(b *testing.B) {
	const standing, batch = 100_000, 500
	for name, end := range map[string]leasebus.Settlement{
		"release": {Kind: leasebus.SettleRelease},
		"retry":   {Kind: leasebus.SettleRetry},
		"later":   {Kind: leasebus.SettleRetry, Delay: time.Nanosecond},
	} {
		b.Run(name, func(b *testing.B) {
			store := memory.New()
			feed := benchFeed(b, store)
			out, receipts := benchBatch(standing)
			if err := store.Publish(b.Context(), out, receipts); err != nil {
				b.Fatal(err)
			}
			dst := make([]leasebus.Lease, batch)
			settlements := make([]leasebus.Settlement, batch)
			b.ReportAllocs()
			b.ResetTimer()
			for n := 0; n < b.N; n += batch {
				leaseAndSettle(b, feed, dst, settlements, end)
			}
		})
	}
}

func BenchmarkRenew(b *testing.B) {
	const batch = 500
	store := memory.New()
	feed := benchFeed(b, store)
	out, receipts := benchBatch(batch)
	if err := store.Publish(b.Context(), out, receipts); err != nil {
		b.Fatal(err)
	}
	dst := make([]leasebus.Lease, batch)
	if n, err := feed.Lease(b.Context(), dst); n != batch || err != nil {
		b.Fatal(n, err)
	}
	renewals := make([]leasebus.Renewal, batch)
	for i := range renewals {
		renewals[i].Lease = &dst[i]
	}
	b.ReportAllocs()
	b.ResetTimer()
	for n := 0; n < b.N; n += batch {
		if err := feed.Renew(b.Context(), renewals); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPublish(b *testing.B) {
	for _, batch := range []int{1, 16, 500} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			store := memory.New()
			out, receipts := benchBatch(batch)
			b.ReportAllocs()
			b.ResetTimer()
			for n := 0; n < b.N; n += batch {
				if err := store.Publish(b.Context(), out, receipts); err != nil {
					b.Fatal(err)
				}
				if n%100_000 < batch {
					store = memory.New() // what is not leased piles up
				}
			}
		})
	}
}

func benchFeed(b *testing.B, store *memory.Store) leasebus.Feed {
	b.Helper()
	var feed leasebus.Feed
	for _, owner := range []string{"idle#1", "busy#2"} {
		f, err := store.Subscribe(b.Context(), leasebus.Subscription{
			Queue: orders, Owner: owner, Policy: policy(), Wake: func() {}, Check: func() {},
		})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := f.Lease(b.Context(), make([]leasebus.Lease, 1)); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = f.Close() })
		feed = f
	}
	return feed
}

func benchBatch(n int) ([]leasebus.Outgoing, []leasebus.Receipt) {
	out := make([]leasebus.Outgoing, n)
	headers := leasebus.NewHeaders(map[string]string{leasebus.HeaderCorrelation: leasebus.NewID().String()})
	for i := range out {
		out[i] = message("a hundred bytes or so are what a message of the benchmark has, like most messages of real services do")
		out[i].Headers = headers
	}
	return out, make([]leasebus.Receipt, n)
}

func leaseAndSettle(b *testing.B, feed leasebus.Feed, dst []leasebus.Lease, settlements []leasebus.Settlement, end leasebus.Settlement) {
	n, err := feed.Lease(b.Context(), dst)
	if err != nil || n != len(dst) {
		b.Fatalf("leased %d of %d: %v", n, len(dst), err)
	}
	for i := range settlements {
		settlements[i].Lease, settlements[i].Kind, settlements[i].Delay = &dst[i], end.Kind, end.Delay
	}
	if err := feed.Settle(b.Context(), settlements); err != nil {
		b.Fatal(err)
	}
	if settlements[0].Result != leasebus.ResultOK {
		b.Fatalf("result %d", settlements[0].Result)
	}
}
