package leasebus

import (
	"iter"
	"math"
	"math/rand/v2"
	"time"
)

// Delay is the nominal wait after the given attempt, without jitter: Initial × Multiplier^(attempt-1), capped by Max.
// It is 0 where no attempt follows. The arithmetic saturates: no attempt is too late for it.
func (r RetryPolicy) Delay(attempt int) time.Duration {
	if attempt >= r.MaxAttempts {
		return 0
	}
	return r.delay(attempt)
}

// Schedule lists the nominal delays, one for each attempt but the last.
// Collect it with [slices.Collect] unless MaxAttempts is huge.
func (r RetryPolicy) Schedule() iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		for attempt := 1; attempt < r.MaxAttempts; attempt++ {
			if !yield(r.delay(attempt)) {
				return
			}
		}
	}
}

func (r RetryPolicy) delay(attempt int) time.Duration {
	// The comparison is made in floating point, before the conversion: a product past the range of
	// time.Duration must become the cap, not a negative number.
	d := float64(r.Initial) * math.Pow(r.Multiplier, float64(max(attempt, 1)-1))
	if ceiling := r.ceiling(); !(d < float64(ceiling)) {
		return ceiling
	}
	return time.Duration(d)
}

func (r RetryPolicy) ceiling() time.Duration {
	if r.Max > 0 {
		return min(r.Max, maxDelay)
	}
	return maxDelay
}

// jittered draws from the delays that Jitter allows around d, evenly, never above the cap.
// Drawing below the cap, instead of clipping there, keeps a herd from meeting again at exactly Max.
func (r RetryPolicy) jittered(d time.Duration) time.Duration {
	if r.Jitter <= 0 || d <= 0 {
		return d
	}
	low := float64(d) * (1 - r.Jitter)
	high := math.Min(float64(d)*(1+r.Jitter), float64(r.ceiling()))
	return time.Duration(low + rand.Float64()*(high-low)) //nolint:gosec // spreads load, guards nothing
}
