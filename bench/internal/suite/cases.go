package suite

import (
	"strconv"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
)

// Case is a load, and the engines that are compared under it.
type Case struct {
	Name string
	// Group is the chart that the case belongs to.
	Group   string
	About   string
	Load    Load
	Engines []string
}

// Figure points at a figure of a report.
type Figure struct {
	Case, Engine string
	Metric       Metric
}

// Target is a ratio of two figures that must hold.
type Target struct {
	Name        string
	Over, Under Figure
	AtLeast     float64
}

// Ceiling is a figure that must not be exceeded.
type Ceiling struct {
	Name   string
	Figure Figure
	AtMost float64
}

const (
	smallBody  = 230 // some 256 bytes as a protobuf message
	mediumBody = 4 << 10
	largeBody  = 64 << 10

	publishBatch = 1000
	usualRate    = 400
)

// Quick are the cases of make bench-quick, small enough for some rounds within a minute.
func Quick() []Case {
	return []Case{
		drainCase("drain", "100,000 waiting messages, no-op handlers",
			Drain{Messages: 100_000, Limit: 1500 * time.Millisecond, Body: smallBody},
			engine.Leasebus, engine.LeasebusBest, engine.WatermillMax, engine.Raw, engine.BareLoop),
		// River is slower, so that fewer suffice: it is not to spend the time with filling.
		drainCase("drain_river", "30,000 waiting messages, no-op handlers",
			Drain{Messages: 30_000, Limit: 1500 * time.Millisecond, Body: smallBody}, engine.River, engine.RiverBest),
		publishCase("publish_batch", "in batches of 1,000, 2 goroutines",
			Publish{Goroutines: 2, Batch: publishBatch, For: 600 * time.Millisecond, Body: smallBody}, engine.Leasebus, engine.River, engine.RiverBest),
		publishCase("publish_256", "one by one, 256 goroutines",
			Publish{Goroutines: 256, For: 600 * time.Millisecond, Body: smallBody}, engine.Leasebus, engine.RiverBest),
		latencyCase("latency_400", "400 messages/s, published by another connection",
			Latency{Rate: usualRate, For: 1500 * time.Millisecond, Body: smallBody, Apart: true}, engine.Leasebus, engine.RiverBest),
	}
}

// Full are all cases; long is how long the sustained ones last.
func Full(long time.Duration) []Case {
	everyone := []string{
		engine.Leasebus, engine.LeasebusBest, engine.River, engine.RiverBest, engine.Watermill, engine.WatermillMax,
	}
	both := []string{engine.Leasebus, engine.RiverBest}
	drain := Drain{Messages: 200_000, Limit: 10 * time.Second, Body: smallBody}
	drainRiver := drain
	cases := []Case{
		drainCase("drain", "200,000 waiting messages, no-op handlers", drain, append(everyone[:2:2],
			engine.Watermill, engine.WatermillMax, engine.Raw, engine.BareLoop, engine.Memory)...),
		drainCase("drain_river", "200,000 waiting messages, no-op handlers", drainRiver, engine.River, engine.RiverBest),
		drainCase("handlers_1ms", "50,000 waiting messages, handlers of 1 ms",
			Drain{Messages: 50_000, Handler: time.Millisecond, Limit: 5 * time.Second, Body: smallBody}, everyone...),
	}
	for _, goroutines := range []int{1, 4, 256} {
		name := "publish_" + strconv.Itoa(goroutines)
		cases = append(cases, publishCase(name, "one by one, goroutines: "+strconv.Itoa(goroutines),
			Publish{Goroutines: goroutines, For: 3 * time.Second, Body: smallBody},
			engine.Leasebus, engine.River, engine.RiverBest, engine.Watermill, engine.Raw))
	}
	cases = append(cases,
		publishCase("publish_batch", "in batches of 1,000, 2 goroutines",
			Publish{Goroutines: 2, Batch: publishBatch, For: 3 * time.Second, Body: smallBody},
			engine.Leasebus, engine.River, engine.RiverBest, engine.Watermill, engine.Raw),
		publishCase("publish_tx", "in the caller's transaction, 4 goroutines",
			Publish{Goroutines: 4, Tx: true, For: 3 * time.Second, Body: smallBody},
			engine.Leasebus, engine.River, engine.RiverBest, engine.Watermill, engine.Raw),
		latencyCase("latency_400", "400 messages/s, published by another connection",
			Latency{Rate: usualRate, For: 10 * time.Second, Body: smallBody, Apart: true}, everyone...),
		latencyCase("latency_half", "half of what the engine can take, published in batches by another connection",
			Latency{For: 10 * time.Second, Body: smallBody, Apart: true}, both...),
		latencyCase("scheduled_1m", "1,000,000 messages for later, 20/s becoming due: how late they are",
			Scheduled{Later: 1_000_000, Rate: 20, Ahead: time.Second, For: 10 * time.Second, Body: smallBody}, both...),
	)
	for _, c := range []struct {
		name           string
		later, backlog int
	}{{"claims_empty", 0, 0}, {"claims_1m_future", 1_000_000, 0}, {"claims_500k_backlog", 0, 500_000}} {
		cases = append(cases, Case{
			Name: c.name, Group: "claims", About: "claims of 10 messages", Engines: []string{engine.Leasebus},
			Load: Claims{Later: c.later, Backlog: c.backlog, Count: 3000, Body: smallBody},
		})
	}
	for _, n := range []int{1, 2, 4, 8} {
		cases = append(cases, Case{
			Name: "processes_" + strconv.Itoa(n), Group: "processes", About: "200,000 waiting messages, worker processes: " + strconv.Itoa(n),
			Engines: both, Load: Processes{Count: n, Messages: 200_000, Limit: 10 * time.Second, Body: smallBody},
		})
	}
	for _, c := range []struct {
		name          string
		body, waiting int
	}{{"256B", smallBody, 100_000}, {"4KiB", mediumBody, 40_000}, {"64KiB", largeBody, 4000}} {
		cases = append(cases, Case{
			Name: "payload_" + c.name, Group: "payload", About: "draining messages of " + c.name,
			Engines: append(both[:2:2], engine.WatermillMax), Load: Drain{Messages: c.waiting, Limit: 10 * time.Second, Body: c.body},
		})
	}
	for _, n := range []int{1, 10, engine.MaxQueues} {
		cases = append(cases, Case{
			Name: "queues_" + strconv.Itoa(n), Group: "queues", About: "100,000 waiting messages in so many queues: " + strconv.Itoa(n),
			Engines: both, Load: Drain{Messages: 100_000, Queues: n, Limit: 10 * time.Second, Body: smallBody},
		})
	}
	return append(cases, longCases(long)...)
}

func longCases(long time.Duration) []Case {
	both := []string{engine.Leasebus, engine.RiverBest}
	minute := min(time.Minute, long/5)
	const snapshot = 65 * time.Second
	return []Case{
		{
			Name: "footprint", Group: "footprint", About: "a worker process with handlers of 1 s in front of 500,000 messages", Engines: both,
			Load: Footprint{Backlog: 500_000, Handler: time.Second, For: 10 * time.Second, Body: smallBody},
		},
		{
			Name: "old_snapshot", Group: "old_snapshot", Engines: both,
			About: "publishing and working while another session holds an old snapshot",
			Load: Pipeline{
				For: snapshot, Body: smallBody, OldSnapshot: true, Sizes: true,
				Begin: Span{2 * time.Second, 8 * time.Second}, End: Span{snapshot - 10*time.Second, snapshot},
			},
		},
		{
			Name: "sustained", Group: "sustained", About: "publishing and working for " + long.String(), Engines: both,
			Load: Pipeline{
				For: long, Body: smallBody, Sizes: true,
				Begin: Span{0, minute}, End: Span{long - minute, long},
			},
		},
	}
}

func drainCase(name, about string, d Drain, engines ...string) Case {
	return Case{Name: name, Group: "drain", About: about, Load: d, Engines: engines}
}

func publishCase(name, about string, p Publish, engines ...string) Case {
	return Case{Name: name, Group: "publish", About: about, Load: p, Engines: engines}
}

func latencyCase(name, about string, l Load, engines ...string) Case {
	return Case{Name: name, Group: "latency", About: about, Load: l, Engines: engines}
}

// Targets are the ratios that must hold.
func Targets() []Target {
	rate := func(name, engine string) Figure { return Figure{name, engine, Rate} }
	const drain, drainRiver = "drain", "drain_river"
	return []Target{
		{"drain_default_vs_river_default", rate(drain, engine.Leasebus), rate(drainRiver, engine.River), 20},
		{"drain_best_vs_river_best", rate(drain, engine.LeasebusBest), rate(drainRiver, engine.RiverBest), 5},
		{"drain_best_vs_watermill", rate(drain, engine.LeasebusBest), rate(drain, engine.WatermillMax), 0.9},
		{"drain_best_vs_delete_ceiling", rate(drain, engine.LeasebusBest), rate(drain, engine.Raw), 0.4},
		{"drain_vs_bare_loop", rate(drain, engine.Leasebus), rate(drain, engine.BareLoop), 1 / 1.5},
		{"publish_batch_vs_river_insertmany", rate("publish_batch", engine.Leasebus), rate("publish_batch", engine.River), 3.5},
		{"publish_batch_vs_river_insertmanyfast", rate("publish_batch", engine.Leasebus), rate("publish_batch", engine.RiverBest), 1.8},
		{"publish_256_vs_river", rate("publish_256", engine.Leasebus), rate("publish_256", engine.RiverBest), 15},
		{
			"latency_p99_river_vs_leasebus",
			Figure{"latency_400", engine.RiverBest, P99}, Figure{"latency_400", engine.Leasebus, P99}, 5,
		},
		{"claim_p99_empty_vs_1m_future", Figure{"claims_empty", engine.Leasebus, P99}, Figure{"claims_1m_future", engine.Leasebus, P99}, 0.33},
		{
			"claim_p99_empty_vs_500k_backlog",
			Figure{"claims_empty", engine.Leasebus, P99}, Figure{"claims_500k_backlog", engine.Leasebus, P99}, 0.33,
		},
		{"processes_8_vs_1", rate("processes_8", engine.Leasebus), rate("processes_1", engine.Leasebus), 0.9},
		{"old_snapshot_60s_vs_5s", Figure{"old_snapshot", engine.Leasebus, Decay}, Figure{}, 0.9},
		{"sustained_min5_vs_min1", Figure{"sustained", engine.Leasebus, Decay}, Figure{}, 0.9},
	}
}

// Ceilings are the figures that must not be exceeded.
func Ceilings() []Ceiling {
	return []Ceiling{
		{"latency_p50_ms", Figure{"latency_400", engine.Leasebus, P50}, 3},
		{"sustained_largest_size_mb", Figure{"sustained", engine.Leasebus, HotTableMax}, 1024},
	}
}
