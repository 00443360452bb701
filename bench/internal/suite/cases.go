package suite

import (
	"slices"
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

// Groups are the charts that cases belong to.
const (
	GroupDrain     = "drain"
	GroupPayload   = "payload"
	GroupPublish   = "publish"
	GroupLatency   = "latency"
	GroupClaims    = "claims"
	GroupProcesses = "processes"
	GroupQueues    = "queues"
	GroupFootprint = "footprint"
	GroupSnapshot  = "old_snapshot"
	GroupSustained = "sustained"
)

// Cases that targets are about.
const (
	caseDrain         = "drain"
	caseDrainRiver    = "drain_river"
	casePublishBatch  = "publish_batch"
	casePublish256    = "publish_256"
	caseLatency400    = "latency_400"
	caseClaimsEmpty   = "claims_empty"
	caseClaimsLater   = "claims_1m_future"
	caseClaimsBacklog = "claims_500k_backlog"
	caseSnapshot      = "old_snapshot"
	caseSustained     = "sustained"
)

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
		drainCase(caseDrain, "100,000 waiting messages, no-op handlers",
			Drain{Messages: 100_000, Limit: 1500 * time.Millisecond, Body: smallBody},
			engine.Leasebus, engine.LeasebusBest, engine.WatermillMax, engine.Raw, engine.BareLoop),
		// River is slower, so that fewer suffice: it is not to spend the time with filling.
		drainCase(caseDrainRiver, "30,000 waiting messages, no-op handlers",
			Drain{Messages: 30_000, Limit: 1500 * time.Millisecond, Body: smallBody}, engine.River, engine.RiverBest),
		publishCase(casePublishBatch, "in batches of 1,000, 2 goroutines",
			Publish{Goroutines: 2, Batch: publishBatch, For: 600 * time.Millisecond, Body: smallBody}, engine.Leasebus, engine.River, engine.RiverBest),
		publishCase(casePublish256, "one by one, 256 goroutines",
			Publish{Goroutines: 256, For: 600 * time.Millisecond, Body: smallBody}, engine.Leasebus, engine.RiverBest),
		latencyCase(caseLatency400, "400 messages/s, published by another connection",
			Latency{Rate: usualRate, For: 1500 * time.Millisecond, Body: smallBody, Apart: true}, engine.Leasebus, engine.River, engine.RiverBest),
	}
}

// Full are all cases; long is how long the sustained ones last.
func Full(long time.Duration) []Case {
	return slices.Concat(workCases(), publishCases(), latencyCases(), claimCases(), scaleCases(), longCases(long))
}

// everyone is compared where that is affordable, both where it takes long.
func everyone() []string {
	return []string{
		engine.Leasebus, engine.LeasebusBest, engine.River, engine.RiverBest, engine.Watermill, engine.WatermillMax,
	}
}

func both() []string { return []string{engine.Leasebus, engine.RiverBest} }

func workCases() []Case {
	drain := Drain{Messages: 200_000, Limit: 10 * time.Second, Body: smallBody}
	return []Case{
		drainCase(caseDrain, "200,000 waiting messages, no-op handlers", drain,
			engine.Leasebus, engine.LeasebusBest, engine.Watermill, engine.WatermillMax, engine.Raw, engine.BareLoop, engine.Memory),
		drainCase(caseDrainRiver, "200,000 waiting messages, no-op handlers", drain, engine.River, engine.RiverBest),
		drainCase("handlers_1ms", "50,000 waiting messages, handlers of 1 ms",
			Drain{Messages: 50_000, Handler: time.Millisecond, Limit: 5 * time.Second, Body: smallBody}, everyone()...),
	}
}

func publishCases() (cases []Case) {
	engines := []string{engine.Leasebus, engine.River, engine.RiverBest, engine.Watermill, engine.Raw}
	for _, goroutines := range []int{1, 4, 256} {
		cases = append(cases, publishCase("publish_"+strconv.Itoa(goroutines), "one by one, goroutines: "+strconv.Itoa(goroutines),
			Publish{Goroutines: goroutines, For: 3 * time.Second, Body: smallBody}, engines...))
	}
	return append(cases,
		publishCase(casePublishBatch, "in batches of 1,000, 2 goroutines",
			Publish{Goroutines: 2, Batch: publishBatch, For: 3 * time.Second, Body: smallBody}, engines...),
		publishCase("publish_tx", "in the caller's transaction, 4 goroutines",
			Publish{Goroutines: 4, Tx: true, For: 3 * time.Second, Body: smallBody}, engines...),
	)
}

func latencyCases() []Case {
	return []Case{
		latencyCase(caseLatency400, "400 messages/s, published by another connection",
			Latency{Rate: usualRate, For: 10 * time.Second, Body: smallBody, Apart: true}, everyone()...),
		latencyCase("latency_half", "half of what the engine can take, published in batches by another connection",
			Latency{For: 10 * time.Second, Body: smallBody, Apart: true}, both()...),
		latencyCase("scheduled_1m", "1,000,000 messages for later, 20/s becoming due: how late they are",
			Scheduled{Later: 1_000_000, Rate: 20, Ahead: time.Second, For: 10 * time.Second, Body: smallBody}, both()...),
	}
}

func claimCases() (cases []Case) {
	for _, c := range []struct {
		name           string
		later, backlog int
	}{{caseClaimsEmpty, 0, 0}, {caseClaimsLater, 1_000_000, 0}, {caseClaimsBacklog, 0, 500_000}} {
		cases = append(cases, Case{
			Name: c.name, Group: GroupClaims, About: "claims of 10 messages", Engines: []string{engine.Leasebus},
			Load: Claims{Later: c.later, Backlog: c.backlog, Count: 3000, Body: smallBody},
		})
	}
	return cases
}

func scaleCases() (cases []Case) {
	const limit = 10 * time.Second
	for _, n := range []int{1, 2, 4, 8} {
		cases = append(cases, Case{
			Name: "processes_" + strconv.Itoa(n), Group: GroupProcesses, About: "a million waiting messages, worker processes: " + strconv.Itoa(n),
			Engines: both(), Load: Processes{Count: n, Messages: 1_000_000, Limit: 2 * limit, Body: smallBody},
		})
	}
	for _, c := range []struct {
		name          string
		body, waiting int
	}{{"256B", smallBody, 100_000}, {"4KiB", mediumBody, 40_000}, {"64KiB", largeBody, 4000}} {
		cases = append(cases, Case{
			Name: "payload_" + c.name, Group: GroupPayload, About: "draining messages of " + c.name,
			Engines: append(both(), engine.WatermillMax), Load: Drain{Messages: c.waiting, Limit: limit, Body: c.body},
		})
	}
	for _, n := range []int{1, 10, engine.MaxQueues} {
		cases = append(cases, Case{
			Name: "queues_" + strconv.Itoa(n), Group: GroupQueues, About: "100,000 waiting messages in so many queues: " + strconv.Itoa(n),
			Engines: both(), Load: Drain{Messages: 100_000, Queues: n, Limit: limit, Body: smallBody},
		})
	}
	return cases
}

func longCases(long time.Duration) []Case {
	minute := min(time.Minute, long/5)
	const snapshot = 65 * time.Second
	return []Case{
		{
			Name: "footprint", Group: GroupFootprint, About: "a worker process with handlers of 1 s in front of 500,000 messages", Engines: both(),
			Load: Footprint{Backlog: 500_000, Handler: time.Second, For: 10 * time.Second, Body: smallBody},
		},
		{
			Name: caseSnapshot, Group: GroupSnapshot, Engines: both(),
			About: "publishing and working while another session holds an old snapshot",
			Load: Pipeline{
				For: snapshot, Body: smallBody, OldSnapshot: true, Sizes: true,
				Begin: Span{2 * time.Second, 8 * time.Second}, End: Span{snapshot - 10*time.Second, snapshot},
			},
		},
		{
			Name: caseSustained, Group: GroupSustained, About: "publishing and working for " + long.String(), Engines: both(),
			Load: Pipeline{
				For: long, Body: smallBody, Sizes: true,
				Begin: Span{0, minute}, End: Span{long - minute, long},
			},
		},
	}
}

func drainCase(name, about string, d Drain, engines ...string) Case {
	return Case{Name: name, Group: GroupDrain, About: about, Load: d, Engines: engines}
}

func publishCase(name, about string, p Publish, engines ...string) Case {
	return Case{Name: name, Group: GroupPublish, About: about, Load: p, Engines: engines}
}

func latencyCase(name, about string, l Load, engines ...string) Case {
	return Case{Name: name, Group: GroupLatency, About: about, Load: l, Engines: engines}
}

// Targets are the ratios that must hold.
func Targets() []Target {
	return append([]Target{
		{"drain_default_vs_river_default", rate(caseDrain, engine.Leasebus), rate(caseDrainRiver, engine.River), 20},
		{"drain_best_vs_river_best", rate(caseDrain, engine.LeasebusBest), rate(caseDrainRiver, engine.RiverBest), 5},
		{"drain_best_vs_watermill", rate(caseDrain, engine.LeasebusBest), rate(caseDrain, engine.WatermillMax), 0.9},
		{"drain_best_vs_delete_ceiling", rate(caseDrain, engine.LeasebusBest), rate(caseDrain, engine.Raw), 0.4},
		{"drain_vs_bare_loop", rate(caseDrain, engine.Leasebus), rate(caseDrain, engine.BareLoop), 1 / 1.5},
		{"publish_batch_vs_river_insertmany", rate(casePublishBatch, engine.Leasebus), rate(casePublishBatch, engine.River), 3.5},
		{"publish_batch_vs_river_insertmanyfast", rate(casePublishBatch, engine.Leasebus), rate(casePublishBatch, engine.RiverBest), 1.8},
		{"publish_256_vs_river", rate(casePublish256, engine.Leasebus), rate(casePublish256, engine.RiverBest), 15},
		// leasebus has its defaults in both.
		{"latency_p99_river_vs_leasebus", Figure{caseLatency400, engine.River, P99}, Figure{caseLatency400, engine.Leasebus, P99}, 5},
		{"latency_p99_river_best_vs_leasebus", Figure{caseLatency400, engine.RiverBest, P99}, Figure{caseLatency400, engine.Leasebus, P99}, 1},
		{"claim_p99_empty_vs_1m_future", Figure{caseClaimsEmpty, engine.Leasebus, P99}, Figure{caseClaimsLater, engine.Leasebus, P99}, 0.33},
		{
			"claim_p99_empty_vs_500k_backlog",
			Figure{caseClaimsEmpty, engine.Leasebus, P99},
			Figure{caseClaimsBacklog, engine.Leasebus, P99},
			0.33,
		},
		{"processes_8_vs_1", rate("processes_8", engine.Leasebus), rate("processes_1", engine.Leasebus), 0.9},
		{"old_snapshot_60s_vs_5s", Figure{caseSnapshot, engine.Leasebus, Decay}, Figure{}, 0.9},
		{"sustained_min5_vs_min1", Figure{caseSustained, engine.Leasebus, Decay}, Figure{}, 0.9},
	}, amqpTargets()...)
}

func rate(name, engine string) Figure { return Figure{name, engine, Rate} }

// Ceilings are the figures that must not be exceeded.
func Ceilings() []Ceiling {
	return []Ceiling{
		{"latency_p50_ms", Figure{caseLatency400, engine.Leasebus, P50}, 3},
		{"sustained_largest_size_mb", Figure{caseSustained, engine.Leasebus, HotTableMax}, 1024},
	}
}
