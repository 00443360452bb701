package suite

import (
	"math"
	"time"

	"github.com/leasebus/leasebus/bench/internal/meter"
	"github.com/leasebus/leasebus/bench/internal/stats"
)

// Metric names a figure of a sample, with its unit.
type Metric string

// The metrics, in the order in which reports have them.
const (
	Rate        Metric = "rate/s"
	P50         Metric = "p50 ms"
	P90         Metric = "p90 ms"
	P99         Metric = "p99 ms"
	Max         Metric = "max ms"
	ClientCPU   Metric = "client µs/msg"
	ServerCPU   Metric = "server µs/msg"
	WAL         Metric = "WAL B/msg"
	Tables      Metric = "tables MB"
	Indexes     Metric = "indexes MB"
	Resident    Metric = "resident MB"
	Decay       Metric = "end ÷ begin"
	Saturation  Metric = "saturation/s"
	HotTableMax Metric = "largest size MB"
)

// Metrics are all metrics in their order.
func Metrics() []Metric {
	return []Metric{
		Rate, P50, P90, P99, Max, ClientCPU, ServerCPU, WAL, Tables, Indexes, Resident, Decay, Saturation, HotTableMax,
	}
}

// Sample is what one run of a case on one engine came to.
type Sample map[Metric]float64

// Point is one of a series over time.
type Point struct {
	Seconds float64 `json:"seconds"`
	Value   float64 `json:"value"`
}

// Series are figures over the time of a run, by metric.
type Series map[Metric][]Point

// Outcome is all that a run has to say.
type Outcome struct {
	Sample Sample
	Series Series
}

// Median is the median of each metric over samples. A metric that is in some of them only is the median of those.
func Median(samples []Sample) Sample {
	all := make(map[Metric][]float64)
	for _, s := range samples {
		for m, v := range s {
			all[m] = append(all[m], v)
		}
	}
	median := make(Sample, len(all))
	for m, values := range all {
		median[m] = stats.Median(values)
	}
	return median
}

// Get is a metric's value, NaN if the sample has none.
func (s Sample) Get(m Metric) float64 {
	if v, ok := s[m]; ok {
		return v
	}
	return math.NaN()
}

const (
	megabyte = 1 << 20
	perMilli = float64(time.Millisecond)
)

// addCost shares a cost out over messages.
func (s Sample) addCost(c meter.Cost, messages int64) {
	if messages == 0 {
		return
	}
	n := float64(messages)
	s[ClientCPU] = float64(c.Client.Microseconds()) / n
	if c.Server >= 0 {
		s[ServerCPU] = float64(c.Server.Microseconds()) / n
	}
	if c.WAL > 0 {
		s[WAL] = float64(c.WAL) / n
	}
}

// addLatency takes sorted durations.
func (s Sample) addLatency(sorted []time.Duration) {
	if len(sorted) == 0 {
		return
	}
	for metric, q := range map[Metric]float64{P50: 0.5, P90: 0.9, P99: 0.99, Max: 1} {
		s[metric] = float64(stats.Quantile(sorted, q)) / perMilli
	}
}

func (s Sample) addSizes(tables, indexes int64) {
	if tables == 0 {
		return // a broker
	}
	s[Tables], s[Indexes] = float64(tables)/megabyte, float64(indexes)/megabyte
}
