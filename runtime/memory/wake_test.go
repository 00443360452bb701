package memory_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestWake_WhenThereIsSomethingForAHungryFeed(t *testing.T) {
	for _, tt := range []struct {
		name string
		// cause makes a message leasable for a feed that has found nothing.
		cause func(t *testing.T, store *memory.Store, other *consumer, held *leasebus.Lease)
	}{
		{"published", func(t *testing.T, store *memory.Store, _ *consumer, _ *leasebus.Lease) {
			publishText(t, store, "new")
		}},
		{"scheduled", func(t *testing.T, store *memory.Store, _ *consumer, _ *leasebus.Lease) {
			late, early := message("late"), message("early")
			late.Delay, early.Delay = 20*time.Second, time.Second
			publish(t, store, late, early)
			time.Sleep(time.Second)
		}},
		{"advanced", func(t *testing.T, store *memory.Store, _ *consumer, _ *leasebus.Lease) {
			out := message("late")
			out.Delay = 20 * time.Second
			publish(t, store, out)
			store.Advance(20 * time.Second)
		}},
		{"advanced near", func(t *testing.T, store *memory.Store, _ *consumer, _ *leasebus.Lease) {
			out := message("late")
			out.Delay = 20 * time.Second
			publish(t, store, out)
			store.Advance(19 * time.Second)
			time.Sleep(time.Second)
		}},
		{"retried", func(_ *testing.T, _ *memory.Store, other *consumer, held *leasebus.Lease) {
			other.mustSettle(leasebus.Settlement{Lease: held, Kind: leasebus.SettleRetry, Delay: 5 * time.Second})
			time.Sleep(5 * time.Second)
		}},
		{"deferred", func(_ *testing.T, _ *memory.Store, other *consumer, held *leasebus.Lease) {
			other.mustSettle(leasebus.Settlement{Lease: held, Kind: leasebus.SettleDefer})
		}},
		{"released", func(_ *testing.T, _ *memory.Store, other *consumer, held *leasebus.Lease) {
			other.mustSettle(leasebus.Settlement{Lease: held, Kind: leasebus.SettleRelease})
		}},
		{"expired", func(*testing.T, *memory.Store, *consumer, *leasebus.Lease) {
			time.Sleep(lease)
		}},
		{"renewed, then expired", func(_ *testing.T, _ *memory.Store, other *consumer, held *leasebus.Lease) {
			time.Sleep(lease / 2)
			other.renew(held)
			time.Sleep(lease)
		}},
		{"requeued", func(t *testing.T, store *memory.Store, other *consumer, held *leasebus.Lease) {
			other.mustSettle(leasebus.Settlement{Lease: held, Kind: leasebus.SettleDeadLetter})
			requeue(t, store, leasebus.DeadLetterRef{ID: held.ID})
		}},
		{"replaced", func(t *testing.T, store *memory.Store, other *consumer, held *leasebus.Lease) {
			other.mustSettle(leasebus.Settlement{Lease: held, Kind: leasebus.SettleDeadLetter})
			edited := message("edited").Envelope
			if _, err := store.Replace(t.Context(), orders, leasebus.DeadLetterRef{ID: held.ID}, &edited, "ann"); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				other := subscribe(t, store, "other#1")
				publishText(t, store, "held")
				held := other.lease(1)[0] // all it asked for: it is not hungry
				c := subscribe(t, store, "c#2")
				c.none()
				if c.wakes() || !other.wakes() { // it was hungry before the first publish
					t.Fatal("woken for nothing, or not at the first message")
				}
				tt.cause(t, store, other, held)
				synctest.Wait()
				if !c.wakes() {
					t.Error("the hungry feed was not woken")
				}
				if other.wakes() {
					t.Error("the feed that is not hungry was woken")
				}
				c.one()
			})
		})
	}
}

func TestWake_OnceUntilTheNextLease(t *testing.T) {
	t.Parallel()
	store := memory.New()
	c := subscribe(t, store, "a#1")
	c.none()
	publishText(t, store, "1")
	if !c.wakes() {
		t.Fatal("not woken")
	}
	publishText(t, store, "2")
	if c.wakes() {
		t.Error("woken again before it leased")
	}
	wantPayloads(t, c.lease(2), "1", "2") // it got all it asked for, so there may be more
	publishText(t, store, "3")
	if c.wakes() {
		t.Error("woken though it knows that there may be more")
	}
	wantPayloads(t, c.lease(2), "3")
	publishText(t, store, "4")
	if !c.wakes() {
		t.Error("not woken after a lease that left room")
	}
}

func TestWake_NotAfterStopOrClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		stopped, closed := subscribe(t, store, "a#1"), subscribe(t, store, "b#2")
		out := message("later")
		out.Delay = time.Second
		publish(t, store, out)
		if err := stopped.feed.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := closed.feed.Close(); err != nil {
			t.Fatal(err)
		}
		publishText(t, store, "now")
		time.Sleep(time.Minute)
		synctest.Wait()
		if stopped.wakes() || closed.wakes() {
			t.Error("woken after its end")
		}
		c := subscribe(t, store, "c#3") // the timer starts again for a feed that comes later
		wantPayloads(t, c.lease(3), "now", "later")
		out = message("later still")
		out.Delay = time.Second
		publish(t, store, out)
		time.Sleep(time.Second)
		synctest.Wait()
		if !c.wakes() {
			t.Error("not woken by the timer")
		}
	})
}

// In a bubble a lost wake-up is a deadlock, which synctest reports: the workers do nothing but lease until there is
// nothing and then wait to be woken.
func TestWake_NeverLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { wakeStress(t, 4000, time.Minute) })
}

// The same on real threads, where the interleavings are finer and the clock is a real one.
func TestWake_NeverLostOnRealThreads(t *testing.T) {
	t.Parallel()
	wakeStress(t, 4000, 5*time.Millisecond)
}

func wakeStress(t *testing.T, messages int, spread time.Duration) {
	const workers, publishers = 4, 4
	store := memory.New()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	var left atomic.Int64
	left.Store(int64(messages))
	var wg sync.WaitGroup
	for i := range workers {
		c := subscribe(t, store, fmt.Sprintf("worker#%d", i), func(p *leasebus.Policy) { p.Lease.Duration = time.Hour })
		wg.Go(func() { work(ctx, t, c, spread, &left, cancel) })
	}
	for range publishers {
		wg.Go(func() {
			for range messages / publishers {
				out := message("m")
				if rand.IntN(2) == 0 {
					out.Delay = rand.N(spread)
				}
				publish(t, store, out)
				if rand.IntN(50) == 0 {
					time.Sleep(rand.N(spread))
				}
			}
		})
	}
	wg.Wait()
	if left.Load() != 0 {
		t.Errorf("%d of %d messages were never handed out", left.Load(), messages)
	}
	wantStats(t, store, leasebus.QueueStats{})
}

// work leases, and settles at random, until nothing is left.
func work(ctx context.Context, t *testing.T, c *consumer, spread time.Duration, left *atomic.Int64, done func()) {
	dst := make([]leasebus.Lease, 3)
	for {
		n, err := c.feed.Lease(context.Background(), dst)
		if err != nil {
			t.Errorf("lease: %v", err)
			return
		}
		batch := make([]leasebus.Settlement, n)
		for i := range batch {
			batch[i] = leasebus.Settlement{Lease: &dst[i], Kind: leasebus.SettleComplete}
			switch rand.IntN(8) {
			case 0:
				batch[i].Kind = leasebus.SettleRelease
			case 1:
				batch[i].Kind, batch[i].Delay = leasebus.SettleRetry, rand.N(spread)
			}
		}
		if err := c.feed.Settle(context.Background(), batch); err != nil {
			t.Errorf("settle: %v", err)
			return
		}
		for i := range batch {
			if batch[i].Kind == leasebus.SettleComplete && left.Add(-1) == 0 {
				done()
			}
		}
		if n == len(dst) {
			continue
		}
		select {
		case <-c.woken:
		case <-ctx.Done():
			return
		}
	}
}
