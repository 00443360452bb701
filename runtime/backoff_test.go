package leasebus_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	leasebus "github.com/leasebus/leasebus/runtime"
)

func TestSchedule_S21_golden(t *testing.T) {
	t.Parallel()
	s := func(seconds ...int) (list []time.Duration) {
		for _, n := range seconds {
			list = append(list, time.Duration(n)*time.Second)
		}
		return list
	}
	for name, tt := range map[string]struct {
		policy leasebus.RetryPolicy
		want   []time.Duration
	}{
		"none":                    {leasebus.NoRetry(), nil},
		"fixed":                   {leasebus.FixedRetry(4, 3*time.Second), s(3, 3, 3)},
		"exponential":             {leasebus.ExponentialRetry(5, time.Second, time.Minute, 2), s(1, 2, 4, 8)},
		"exponential, capped":     {leasebus.ExponentialRetry(6, time.Second, 4*time.Second, 2), s(1, 2, 4, 4, 4)},
		"exponential, factor 10":  {leasebus.ExponentialRetry(5, time.Second, time.Minute, 10), s(1, 10, 60, 60)},
		"exponential, factor 1.5": {leasebus.ExponentialRetry(4, 4*time.Second, time.Minute, 1.5), s(4, 6, 9)},
		"one attempt":             {leasebus.ExponentialRetry(1, time.Second, time.Minute, 2), nil},
		"default":                 {leasebus.DefaultPolicy("t", "q").Retry, s(5, 10, 20, 40)},
	} {
		if got := slices.Collect(tt.policy.Schedule()); !slices.Equal(got, tt.want) {
			t.Errorf("%s: schedule %v, want %v", name, got, tt.want)
		}
	}
}

func TestRungs_S40_delays_that_a_broker_keeps(t *testing.T) {
	t.Parallel()
	s := func(seconds ...int) (list []time.Duration) {
		for _, n := range seconds {
			list = append(list, time.Duration(n)*time.Second)
		}
		return list
	}
	from := func(r leasebus.RetryPolicy, d time.Duration) leasebus.RetryPolicy {
		r.WaitInBrokerFrom = &d
		return r
	}
	exponential := leasebus.ExponentialRetry(6, 10*time.Second, time.Hour, 2)
	for name, tt := range map[string]struct {
		policy leasebus.RetryPolicy
		want   []time.Duration
	}{
		"30 s and more":               {exponential, s(40, 80, 160)},
		"30 s itself":                 {leasebus.FixedRetry(5, 30*time.Second), s(30)},
		"29 s stay in the consumer":   {leasebus.FixedRetry(5, 29*time.Second), nil},
		"moved":                       {from(exponential, 20*time.Second), s(20, 40, 80, 160)},
		"all":                         {from(exponential, 0), s(10, 20, 40, 80, 160)},
		"none":                        {from(exponential, 24*time.Hour), nil},
		"repeated delays are one":     {leasebus.ExponentialRetry(9, 30*time.Second, time.Minute, 2), s(30, 60)},
		"no retries":                  {leasebus.NoRetry(), nil},
		"one retry":                   {leasebus.FixedRetry(2, time.Minute), s(60)},
		"default":                     {leasebus.DefaultPolicy("t", "q").Retry, s(40)},
		"unlimited attempts":          {leasebus.ExponentialRetry(math.MaxInt32, 10*time.Second, time.Minute, 2), s(40, 60)},
		"unlimited attempts, one gap": {leasebus.FixedRetry(math.MaxInt32, time.Minute), s(60)},
	} {
		if got := tt.policy.BrokerRungs(); !slices.Equal(got, tt.want) {
			t.Errorf("%s: rungs %v, want %v", name, got, tt.want)
		}
	}
}

func TestRungs_S40_are_few_and_cover_every_delay(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := leasebus.ExponentialRetry(
			rapid.IntRange(1, math.MaxInt32).Draw(t, "attempts"),
			time.Duration(rapid.Int64Range(1, int64(time.Hour)).Draw(t, "initial")),
			time.Duration(rapid.Int64Range(int64(time.Hour), int64(1000*time.Hour)).Draw(t, "max")),
			rapid.Float64Range(1, 4).Draw(t, "multiplier"),
		)
		rungs := r.Rungs(0)
		if len(rungs) > 32 || !slices.IsSorted(rungs) || len(slices.Compact(slices.Clone(rungs))) != len(rungs) {
			t.Fatalf("rungs %v: want at most 32, shortest first, each once", rungs)
		}
		attempt := rapid.IntRange(1, r.MaxAttempts).Draw(t, "attempt")
		d := r.Delay(attempt)
		if d == 0 {
			return
		}
		at, exact := slices.BinarySearch(rungs, d)
		if at == len(rungs) || !exact && r.MaxAttempts <= 32 {
			t.Fatalf("delay %v of attempt %d has no rung among %v", d, attempt, rungs)
		}
	})
}

func TestDelay_S22_C4_1_C4_2_C4_4_saturates(t *testing.T) {
	t.Parallel()
	capped := leasebus.ExponentialRetry(math.MaxInt32, time.Second, 5*time.Minute, 2)
	for _, attempt := range []int{30, 40, 63, 64, 65, 70, 199, 1000, 5000, math.MaxInt32 - 1} {
		if got := capped.Delay(attempt); got != 5*time.Minute {
			t.Errorf("attempt %d: delay %v, want the cap", attempt, got)
		}
	}
	if got := capped.Delay(math.MaxInt32); got != 0 {
		t.Errorf("the last attempt has a next delay: %v", got)
	}
	huge := leasebus.RetryPolicy{MaxAttempts: math.MaxInt32, Initial: 800_000 * time.Hour, Max: 870_000 * time.Hour, Multiplier: 1e9}
	if got := huge.Delay(1000); got != 870_000*time.Hour {
		t.Errorf("delay %v, want the cap", got)
	}
}

func TestDelay_S22_grows_up_to_the_cap(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := leasebus.RetryPolicy{
			MaxAttempts: math.MaxInt32,
			Initial:     time.Duration(rapid.Int64Range(1, int64(time.Hour)).Draw(t, "initial")),
			Max:         time.Duration(rapid.Int64Range(int64(time.Hour), int64(1000*time.Hour)).Draw(t, "max")),
			Multiplier:  rapid.Float64Range(1, 100).Draw(t, "multiplier"),
		}
		attempt := rapid.IntRange(1, math.MaxInt32-2).Draw(t, "attempt")
		d, next := r.Delay(attempt), r.Delay(attempt+1)
		if d <= 0 || d > r.Max || next < d {
			t.Fatalf("attempt %d: %v, then %v, cap %v", attempt, d, next, r.Max)
		}
	})
}
