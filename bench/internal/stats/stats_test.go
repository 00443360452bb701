package stats_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/leasebus/leasebus/bench/internal/stats"
)

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{nil, math.NaN()},
		{[]float64{7}, 7},
		{[]float64{9, 1}, 5},
		{[]float64{3, 100, 1}, 3},
		{[]float64{4, 1, 1000, 2}, 3},
	} {
		before := slices.Clone(c.values)
		if got := stats.Median(c.values); !same(got, c.want) {
			t.Errorf("Median(%v) = %v, want %v", c.values, got, c.want)
		}
		if !slices.Equal(before, c.values) {
			t.Errorf("Median changed the order of %v to %v", before, c.values)
		}
	}
}

func TestQuantile(t *testing.T) {
	t.Parallel()
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	for _, c := range []struct {
		sorted []time.Duration
		q      float64
		want   time.Duration
	}{
		{nil, 0.5, 0},
		{hundred[:1], 0.99, 1},
		{hundred, 0, 1},
		{hundred, 0.5, 50},
		{hundred, 0.99, 99},
		{hundred, 1, 100},
		{hundred[:3], 0.5, 2},
		{hundred[:4], 0.5, 2},
	} {
		if got := stats.Quantile(c.sorted, c.q); got != c.want {
			t.Errorf("Quantile of %d values at %v = %d, want %d", len(c.sorted), c.q, got, c.want)
		}
	}
}

func TestRange(t *testing.T) {
	t.Parallel()
	if low, high := stats.Range([]float64{3, 1, 2}); low != 1 || high != 3 {
		t.Errorf("Range = %v, %v, want 1, 3", low, high)
	}
	if low, high := stats.Range(nil); !math.IsNaN(low) || !math.IsNaN(high) {
		t.Errorf("Range of nothing = %v, %v, want NaN", low, high)
	}
}

func TestRatioSaysNothingWithoutTwoFigures(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ a, b, want float64 }{
		{6, 3, 2},
		{0, 3, math.NaN()},
		{3, 0, math.NaN()},
		{math.NaN(), 1, math.NaN()},
		{1, math.NaN(), math.NaN()},
	} {
		if got := stats.Ratio(c.a, c.b); !same(got, c.want) {
			t.Errorf("Ratio(%v, %v) = %v, want %v", c.a, c.b, got, c.want)
		}
	}
}

func same(a, b float64) bool { return a == b || math.IsNaN(a) && math.IsNaN(b) }
