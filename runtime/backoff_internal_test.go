package leasebus

import (
	"testing"
	"time"
)

func TestJitter_S22_C4_3_stays_in_its_range(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		policy    RetryPolicy
		d         time.Duration
		low, high time.Duration
	}{
		"both sides":             {RetryPolicy{Max: time.Minute, Jitter: 0.2}, 10 * time.Second, 8 * time.Second, 12 * time.Second},
		"fixed, no cap":          {RetryPolicy{Jitter: 0.2}, 10 * time.Second, 8 * time.Second, 12 * time.Second},
		"at the cap":             {RetryPolicy{Max: 500 * time.Millisecond, Jitter: 0.5}, 500 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond},
		"whole":                  {RetryPolicy{Max: time.Minute, Jitter: 1}, 10 * time.Second, 0, 20 * time.Second},
		"longest delay there is": {RetryPolicy{Jitter: 1}, maxDelay, 0, maxDelay},
		"none":                   {RetryPolicy{Max: time.Minute}, 10 * time.Second, 10 * time.Second, 10 * time.Second},
	} {
		below, above := 0, 0
		middle := tt.low + (tt.high-tt.low)/2
		for range 10_000 {
			got := tt.policy.jittered(tt.d)
			if got < tt.low || got > tt.high {
				t.Fatalf("%s: drew %v, want %v to %v", name, got, tt.low, tt.high)
			}
			if got < middle {
				below++
			} else if got > middle {
				above++
			}
		}
		// Evenly: a herd is spread over the whole range, not clipped onto its end.
		if tt.low != tt.high && (below < 4500 || above < 4500) {
			t.Errorf("%s: %d draws below the middle, %d above", name, below, above)
		}
	}
}

func TestBackoff_C4_5_never_dies(t *testing.T) {
	t.Parallel()
	b := backoff{first: 100 * time.Millisecond, max: 10 * time.Second}
	for i := range 5000 {
		if d := b.next(); d <= 0 || d > 10*time.Second {
			t.Fatalf("wait %d is %v", i, d)
		}
	}
}
