package leasebus_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// crash leases everything there is and lets the leases expire, as a process does that dies.
func (r *rig) crash(messages int) {
	r.Helper()
	feed, err := r.store.Subscribe(r.Context(), leasebus.Subscription{Queue: r.policy.Queue, Policy: &r.policy, Owner: "killed#1", Wake: func() {}, Check: func() {}})
	if err != nil {
		r.Fatal(err)
	}
	n, err := feed.Lease(r.Context(), make([]leasebus.Lease, messages))
	if err != nil || n != messages {
		r.Fatalf("leased %d of %d, %v", n, messages, err)
	}
	if err := feed.Close(); err != nil {
		r.Fatal(err)
	}
	r.wait(r.policy.Lease.Duration)
}

func TestQuarantine_S10_C2_7_suspects_are_not_run_together(t *testing.T) {
	for name, tt := range map[string]struct {
		maxAttempts, crashes, together int
	}{
		"one crash is nobody's fault":       {5, 1, 40},
		"two crashes, three attempts left":  {5, 2, 16},
		"three crashes, two attempts left":  {5, 3, 4},
		"four crashes, the last attempt":    {5, 4, 1},
		"one crash, and the last attempt":   {2, 1, 1},
		"two crashes, and many attempts":    {50, 2, 40},
		"no attempt left: they are not run": {2, 2, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(r *rig) {
				r.policy.Retry.MaxAttempts = tt.maxAttempts
				const suspects = 40
				r.publish(strings.Split(strings.Repeat("suspect ", suspects)[:8*suspects-1], " ")...)
				for range tt.crashes {
					r.crash(suspects)
				}
				r.publish("fresh", "fresh")
				var mu sync.Mutex
				now, most, leasedMost := 0, 0, int64(0)
				r.handler = func(ctx context.Context, text string) error {
					if text != "suspect" {
						time.Sleep(time.Second)
						return nil
					}
					d, _ := leasebus.DeliveryFrom(ctx)
					if d.Attempt() != tt.crashes+1 {
						t.Errorf("attempt %d: waiting for the others was paid for", d.Attempt())
					}
					mu.Lock()
					now++
					most = max(most, now)
					mu.Unlock()
					time.Sleep(10 * time.Millisecond)
					leased := r.stats().Processing
					mu.Lock()
					leasedMost = max(leasedMost, leased)
					now--
					mu.Unlock()
					return nil
				}
				r.start()
				r.wait(time.Minute)
				mu.Lock()
				defer mu.Unlock()
				if most != tt.together {
					t.Errorf("%d suspects ran together, want %d", most, tt.together)
				}
				// What a crash would charge: the group, and the two that nobody suspects.
				if leasedMost > int64(tt.together)+2 {
					t.Errorf("%d were leased while a suspect ran, want at most %d", leasedMost, tt.together+2)
				}
				if tt.together == 0 {
					r.wantStats(leasebus.QueueStats{Completed: 2, DeadLettered: suspects})
				} else {
					r.wantStats(leasebus.QueueStats{Completed: suspects + 2})
				}
				r.mustStop()
			})
		})
	}
}

func TestQuarantine_S50_a_drain_gives_suspects_back(t *testing.T) {
	bubble(t, func(r *rig) {
		r.policy.Retry.MaxAttempts = 2
		r.publish("a", "b", "c")
		r.crash(3)
		r.handler = func(context.Context, string) error { return nil }
		r.settle = func(ctx context.Context, _ []leasebus.Settlement, pass func() error) error {
			time.Sleep(time.Second)
			return pass()
		}
		r.start()
		r.wait(500 * time.Millisecond) // the two that must wait are being put off, the third waits for that
		r.mustStop()
		stats := r.stats()
		if stats.Processing != 0 || stats.DeadLettered != 0 {
			t.Errorf("store: %+v", stats)
		}
		r.settle = nil
		r.start()
		r.wait(time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 3})
		r.mustStop()
	})
}
