// Package report writes what was measured: as a table, as JSON, as charts, and as the ratios that must hold.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/leasebus/leasebus/bench/internal/stats"
	"github.com/leasebus/leasebus/bench/internal/suite"
)

// Report is everything that a run has to say.
type Report struct {
	// Machine says what was measured on.
	Machine Machine
	Cases   []suite.Case
	Results []suite.Result
}

// Machine describes where a report comes from.
type Machine struct {
	Cores      int      `json:"cores"`
	OS         string   `json:"os"`
	Go         string   `json:"go"`
	PostgreSQL string   `json:"postgresql,omitempty"`
	RabbitMQ   string   `json:"rabbitmq,omitempty"`
	Settings   []string `json:"settings,omitempty"`
	Versions   []string `json:"versions"`
	Date       string   `json:"date"`
}

func (r *Report) find(caseName, engine string) (suite.Result, bool) {
	for _, result := range r.Results {
		if result.Case == caseName && result.Engine == engine {
			return result, true
		}
	}
	return suite.Result{}, false
}

// Value is a figure's median; NaN if it was not measured.
func (r *Report) Value(f suite.Figure) float64 {
	result, ok := r.find(f.Case, f.Engine)
	if !ok {
		return math.NaN()
	}
	return result.Median.Get(f.Metric)
}

// Ratio is the ratio of the medians of a target's figures, and the range of the rounds' own ratios. NaN if it was not
// measured. A target without a figure to divide by is a ratio already.
func (r *Report) Ratio(t suite.Target) (ratio, low, high float64) {
	if t.Under == (suite.Figure{}) {
		result, _ := r.find(t.Over.Case, t.Over.Engine)
		low, high = stats.Range(valuesOf(result, t.Over.Metric))
		return r.Value(t.Over), low, high
	}
	over, _ := r.find(t.Over.Case, t.Over.Engine)
	under, _ := r.find(t.Under.Case, t.Under.Engine)
	a, b := valuesOf(over, t.Over.Metric), valuesOf(under, t.Under.Metric)
	var rounds []float64
	for i := range min(len(a), len(b)) {
		rounds = append(rounds, stats.Ratio(a[i], b[i]))
	}
	low, high = stats.Range(rounds)
	return stats.Ratio(r.Value(t.Over), r.Value(t.Under)), low, high
}

func valuesOf(result suite.Result, m suite.Metric) []float64 {
	values := make([]float64, 0, len(result.Samples))
	for _, s := range result.Samples {
		values = append(values, s.Get(m))
	}
	return values
}

// List writes what cases there are.
func List(w io.Writer, cases []suite.Case) error {
	for _, c := range cases {
		if _, err := fmt.Fprintf(w, "%-22s %s (%s)\n", c.Name, c.About, strings.Join(c.Engines, ", ")); err != nil {
			return fmt.Errorf("report: %w", err)
		}
	}
	return nil
}

// Head writes what was measured on.
func (r *Report) Head(w io.Writer) error {
	m := r.Machine
	server := "RabbitMQ " + m.RabbitMQ
	if m.RabbitMQ == "" {
		server = fmt.Sprintf("PostgreSQL %s (%s)", m.PostgreSQL, strings.Join(m.Settings, ", "))
	}
	if _, err := fmt.Fprintf(w, "%s, %d cores, %s, %s, %s\n%s\n",
		m.Date, m.Cores, m.OS, m.Go, server, strings.Join(m.Versions, ", ")); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

// Table writes the medians, a table for each case.
func (r *Report) Table(w io.Writer) error {
	for _, c := range r.Cases {
		if _, err := fmt.Fprintf(w, "\n%s: %s\n", c.Name, c.About); err != nil {
			return fmt.Errorf("report: %w", err)
		}
		if err := r.table(w, c); err != nil {
			return fmt.Errorf("report: %w", err)
		}
	}
	return nil
}

func (r *Report) table(w io.Writer, c suite.Case) error {
	metrics := r.metricsOf(c)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	widest := len("engine")
	for _, name := range c.Engines {
		widest = max(widest, len(name))
	}
	header := []string{fmt.Sprintf("%-*s", widest, "engine"), "rounds"}
	for _, m := range metrics {
		header = append(header, string(m))
	}
	lines := []string{strings.Join(header, "\t") + "\t"}
	for _, name := range c.Engines {
		result, _ := r.find(c.Name, name)
		line := []string{fmt.Sprintf("%-*s", widest, name), strconv.Itoa(len(result.Samples))}
		for _, m := range metrics {
			line = append(line, number(result.Median.Get(m)))
		}
		lines = append(lines, strings.Join(line, "\t")+"\t")
	}
	if _, err := fmt.Fprintln(t, strings.Join(lines, "\n")); err != nil {
		return err //nolint:wrapcheck // Table says what it is
	}
	if err := t.Flush(); err != nil {
		return err //nolint:wrapcheck // Table says what it is
	}
	for _, name := range c.Engines {
		result, _ := r.find(c.Name, name)
		for _, text := range result.Errors {
			if _, err := fmt.Fprintf(w, "  %s failed: %s\n", name, text); err != nil {
				return err //nolint:wrapcheck // Table says what it is
			}
		}
	}
	return nil
}

// metricsOf are those that any engine has figures of.
func (r *Report) metricsOf(c suite.Case) (metrics []suite.Metric) {
	for _, m := range suite.Metrics() {
		for _, name := range c.Engines {
			if result, _ := r.find(c.Name, name); !math.IsNaN(result.Median.Get(m)) {
				metrics = append(metrics, m)
				break
			}
		}
	}
	return metrics
}

const (
	thousand = 1000
	hundred  = 100
	ten      = 10
)

// number writes as many digits as mean something.
func number(v float64) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case v >= thousand:
		return grouped(int64(math.Round(v)))
	case v >= hundred:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= ten:
		return strconv.FormatFloat(v, 'f', 1, 64)
	default:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
}

// grouped writes 1,234,567.
func grouped(n int64) string {
	if n < thousand {
		return strconv.FormatInt(n, 10)
	}
	return grouped(n/thousand) + fmt.Sprintf(",%03d", n%thousand)
}

// Goals writes how the measured ratios and figures stand to what must hold.
func (r *Report) Goals(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	lines := []string{"\ngoal\tmeasured\trounds\tmust be\t"}
	for _, target := range suite.Targets() {
		ratio, low, high := r.Ratio(target)
		if math.IsNaN(ratio) {
			continue
		}
		lines = append(lines, fmt.Sprintf("%s\t%s\t%s … %s\t≥ %s\t%s",
			target.Name, number(ratio), number(low), number(high), number(target.AtLeast), verdict(ratio >= target.AtLeast)))
	}
	for _, ceiling := range suite.Ceilings() {
		value := r.Value(ceiling.Figure)
		if math.IsNaN(value) {
			continue
		}
		result, _ := r.find(ceiling.Figure.Case, ceiling.Figure.Engine)
		low, high := stats.Range(valuesOf(result, ceiling.Figure.Metric))
		lines = append(lines, fmt.Sprintf("%s\t%s\t%s … %s\t≤ %s\t%s",
			ceiling.Name, number(value), number(low), number(high), number(ceiling.AtMost), verdict(value <= ceiling.AtMost)))
	}
	if _, err := fmt.Fprintln(t, strings.Join(lines, "\n")+"\n"); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

func verdict(holds bool) string {
	if holds {
		return "ok"
	}
	return "MISSED"
}

// Ratios writes a line "RATIO name ratio" for each target that was measured.
func (r *Report) Ratios(w io.Writer) error {
	for _, target := range suite.Targets() {
		ratio, _, _ := r.Ratio(target)
		if math.IsNaN(ratio) {
			continue
		}
		if _, err := fmt.Fprintf(w, "RATIO %s %.3f\n", target.Name, ratio); err != nil {
			return fmt.Errorf("report: %w", err)
		}
	}
	return nil
}

type jsonCase struct {
	Name    string       `json:"name"`
	About   string       `json:"about"`
	Engines []jsonEngine `json:"engines"`
}

type jsonEngine struct {
	Name    string                         `json:"name"`
	Median  suite.Sample                   `json:"median"`
	Samples []suite.Sample                 `json:"samples"`
	Series  map[suite.Metric][]suite.Point `json:"series,omitempty"`
	Errors  []string                       `json:"errors,omitempty"`
}

type jsonTarget struct {
	Name    string  `json:"name"`
	Ratio   float64 `json:"ratio"`
	Low     float64 `json:"low"`
	High    float64 `json:"high"`
	AtLeast float64 `json:"atLeast"`
}

// JSON writes everything, every round's figures included.
func (r *Report) JSON(w io.Writer) error {
	out := struct {
		Machine Machine      `json:"machine"`
		Cases   []jsonCase   `json:"cases"`
		Targets []jsonTarget `json:"targets"`
	}{Machine: r.Machine}
	for _, c := range r.Cases {
		jc := jsonCase{Name: c.Name, About: c.About}
		for _, name := range c.Engines {
			result, _ := r.find(c.Name, name)
			jc.Engines = append(jc.Engines, jsonEngine{
				name, finite(result.Median), finiteAll(result.Samples), result.Series, result.Errors,
			})
		}
		out.Cases = append(out.Cases, jc)
	}
	for _, target := range suite.Targets() {
		if ratio, low, high := r.Ratio(target); !math.IsNaN(ratio) {
			out.Targets = append(out.Targets, jsonTarget{target.Name, ratio, low, high, target.AtLeast})
		}
	}
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(out); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

// finite leaves out what JSON has no number for.
func finite(s suite.Sample) suite.Sample {
	kept := make(suite.Sample, len(s))
	for m, v := range s {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			kept[m] = v
		}
	}
	return kept
}

func finiteAll(samples []suite.Sample) []suite.Sample {
	kept := make([]suite.Sample, len(samples))
	for i := range samples {
		kept[i] = finite(samples[i])
	}
	return kept
}
