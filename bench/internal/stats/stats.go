// Package stats has the little statistics that the benchmarks need.
package stats

import (
	"cmp"
	"math"
	"slices"
)

// Median is the middle of values, the mean of the two in the middle if there are two. NaN if there are none.
// The order of values is kept.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// Quantile is the smallest value that at least the share q of values do not exceed (nearest rank), the zero value if
// there are none. It needs sorted values, and q within 0 and 1.
func Quantile[T cmp.Ordered](sorted []T, q float64) T {
	if len(sorted) == 0 {
		var zero T
		return zero
	}
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Range is the smallest and the largest of values; NaN if there are none.
func Range(values []float64) (smallest, largest float64) {
	if len(values) == 0 {
		return math.NaN(), math.NaN()
	}
	return slices.Min(values), slices.Max(values)
}

// Ratio is a ÷ b, and NaN where that says nothing: if one of them is missing or not above zero.
func Ratio(a, b float64) float64 {
	if !(a > 0) || !(b > 0) {
		return math.NaN()
	}
	return a / b
}
