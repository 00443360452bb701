package leasebus

import (
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
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

// maxRungs bounds how many delays [RetryPolicy.Rungs] lists.
const maxRungs = 32

// BrokerRungs lists the delays that a broker keeps for the policy: those of WaitInBrokerFrom and more.
func (r RetryPolicy) BrokerRungs() []time.Duration {
	if r.WaitInBrokerFrom == nil {
		return r.Rungs(DefaultWaitInBrokerFrom)
	}
	return r.Rungs(*r.WaitInBrokerFrom)
}

// Rungs lists the nominal delays of shortest and more, each once, shortest first: what a broker keeps a queue for each
// of. Of more than 32 delays it leaves some out, evenly and never the longest: a delay that is not listed is spent on
// the next longer one.
func (r RetryPolicy) Rungs(shortest time.Duration) []time.Duration {
	if r.MaxAttempts <= 1 {
		return nil
	}
	longest := r.delay(r.MaxAttempts - 1)
	steps := sort.Search(r.MaxAttempts-2, func(i int) bool { return r.delay(i+1) == longest }) + 1
	stride := (steps + maxRungs - 1) / maxRungs
	var rungs []time.Duration
	for attempt := steps; attempt >= 1; attempt -= stride {
		if d := r.delay(attempt); d > 0 && d >= shortest {
			rungs = append(rungs, d)
		}
	}
	slices.Reverse(rungs)
	return slices.Compact(rungs)
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
