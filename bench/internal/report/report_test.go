package report_test

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/leasebus/leasebus/bench/internal/engine"
	"github.com/leasebus/leasebus/bench/internal/report"
	"github.com/leasebus/leasebus/bench/internal/suite"
)

func sample() *report.Report {
	result := func(name, engine string, samples ...suite.Sample) suite.Result {
		return suite.Result{Case: name, Engine: engine, Samples: samples, Median: suite.Median(samples)}
	}
	rates := func(values ...float64) (samples []suite.Sample) {
		for _, v := range values {
			samples = append(samples, suite.Sample{suite.Rate: v})
		}
		return samples
	}
	failed := result("drain", engine.BareLoop)
	failed.Errors = []string{"it broke"}
	sustained := result("sustained", engine.Leasebus, suite.Sample{suite.Rate: 70_000, suite.Decay: 0.95, suite.HotTableMax: 300})
	sustained.Series = suite.Series{suite.Rate: {{Seconds: 1, Value: 70_000}, {Seconds: 2, Value: 71_000}}}
	return &report.Report{
		Machine: report.Machine{Cores: 2, PostgreSQL: "15.1"},
		Cases: []suite.Case{
			{Name: "drain", Group: "drain", About: "waiting messages", Engines: []string{engine.Leasebus, engine.LeasebusBest, engine.BareLoop}},
			{Name: "drain_river", Group: "drain", About: "waiting messages", Engines: []string{engine.River, engine.RiverBest}},
			{Name: "sustained", Group: "sustained", About: "for long", Engines: []string{engine.Leasebus}},
		},
		Results: []suite.Result{
			result("drain", engine.Leasebus, rates(90_000, 110_000, 100_000)...),
			result("drain", engine.LeasebusBest, suite.Sample{suite.Rate: 1_234_567, suite.WAL: 235.4, suite.ClientCPU: 2.345, suite.ServerCPU: 15.67}),
			failed,
			result("drain_river", engine.River, rates(1000, 1000, 500)...),
			result("drain_river", engine.RiverBest, suite.Sample{suite.Rate: math.NaN()}),
			sustained,
		},
	}
}

func TestHead(t *testing.T) {
	t.Parallel()
	r := sample()
	r.Machine = report.Machine{
		Cores: 2, OS: "linux/amd64", Go: "go1.26", PostgreSQL: "15.1", Date: "2026-01-02",
		Settings: []string{"shared_buffers=1GB"}, Versions: []string{"peer v1", "other v2"},
	}
	var out bytes.Buffer
	if err := r.Head(&out); err != nil {
		t.Fatal(err)
	}
	const want = "2026-01-02, 2 cores, linux/amd64, go1.26, PostgreSQL 15.1 (shared_buffers=1GB)\npeer v1, other v2\n"
	if got := out.String(); got != want {
		t.Errorf("the head is %q, want %q", got, want)
	}
}

func TestList(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := report.List(&out, sample().Cases[:1]); err != nil {
		t.Fatal(err)
	}
	const want = "drain                  waiting messages (leasebus, leasebus-best, bare-loop)\n"
	if got := out.String(); got != want {
		t.Errorf("the list is %q, want %q", got, want)
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := sample().Table(&out); err != nil {
		t.Fatal(err)
	}
	const want = `
drain: waiting messages
  engine         rounds     rate/s  client µs/msg  server µs/msg  WAL B/msg
  leasebus            3    100,000              –              –          –
  leasebus-best       1  1,234,567           2.35           15.7        235
  bare-loop           0          –              –              –          –
  bare-loop failed: it broke

drain_river: waiting messages
  engine      rounds  rate/s
  river            3   1,000
  river-best       1       –

sustained: for long
  engine    rounds  rate/s  end ÷ begin  largest size MB
  leasebus       1  70,000         0.95              300
`
	if got := trimLines(out.String()); got != want {
		t.Errorf("the table is\n%s\nwant\n%s", got, want)
	}
}

// trimLines drops the padding at the ends of lines.
func trimLines(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}

// The lines are read by programs: name and number, nothing else, and only what was measured.
func TestRatios(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := sample().Ratios(&out); err != nil {
		t.Fatal(err)
	}
	const want = `RATIO drain_default_vs_river_default 100.000
RATIO sustained_min5_vs_min1 0.950
`
	if got := out.String(); got != want {
		t.Errorf("the ratios are\n%s\nwant\n%s", got, want)
	}
}

func TestRatioHasTheRangeOfTheRounds(t *testing.T) {
	t.Parallel()
	target := suite.Targets()[0]
	ratio, low, high := sample().Ratio(target)
	if ratio != 100 || low != 90 || high != 200 {
		t.Errorf("%s: %v (%v … %v), want 100 (90 … 200)", target.Name, ratio, low, high)
	}
}

func TestGoals(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	r := sample()
	r.Results[5].Median[suite.Decay] = 0.5
	if err := r.Goals(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"drain_default_vs_river_default  100       90.0 … 200   ≥ 20.0   ok",
		"sustained_min5_vs_min1          0.50      0.95 … 0.95  ≥ 0.90   MISSED",
		"sustained_largest_size_mb       300       300 … 300    ≤ 1,024  ok",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the goals lack %q:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "NaN") {
		t.Errorf("a goal is told that was not measured:\n%s", out.String())
	}
}

func TestJSON(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := sample().JSON(&out); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Machine struct{ PostgreSQL string }
		Cases   []struct {
			Name    string
			Engines []struct {
				Name    string
				Median  map[string]float64
				Samples []map[string]float64
				Series  map[string][]struct{ Seconds, Value float64 }
				Errors  []string
			}
		}
		Targets []struct {
			Name       string
			Ratio, Low float64
			AtLeast    float64 `json:"atLeast"`
		}
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if got.Machine.PostgreSQL != "15.1" || len(got.Cases) != 3 || len(got.Targets) != 2 {
		t.Fatalf("decoded: %+v", got)
	}
	first := got.Cases[0].Engines[0]
	if first.Median["rate/s"] != 100_000 || len(first.Samples) != 3 || first.Samples[1]["rate/s"] != 110_000 {
		t.Errorf("decoded: %+v", first)
	}
	if got.Cases[0].Engines[2].Errors[0] != "it broke" || len(got.Cases[2].Engines[0].Series["rate/s"]) != 2 {
		t.Errorf("decoded: %+v", got)
	}
	if target := got.Targets[0]; target.Name != "drain_default_vs_river_default" || target.Low != 90 || target.AtLeast != 20 {
		t.Errorf("decoded: %+v", target)
	}
}

func TestCharts(t *testing.T) {
	t.Parallel()
	paths, err := sample().Charts(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(text, []byte("<svg")) || !bytes.Contains(text, []byte("leasebus")) {
			t.Errorf("%s is no chart with leasebus in it", path)
		}
		names = append(names, path[strings.LastIndexByte(path, '/')+1:])
	}
	if got := strings.Join(names, " "); got != "drain.svg wal.svg cpu.svg sustained.svg" {
		t.Errorf("charts drawn: %s", got)
	}
}
