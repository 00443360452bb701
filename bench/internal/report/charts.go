package report

import (
	"fmt"
	"image/color"
	"math"
	"path/filepath"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"

	"github.com/leasebus/leasebus/bench/internal/suite"
)

const (
	chartWidth  = 9 * vg.Inch
	chartHeight = 4.5 * vg.Inch
	barsShare   = 6 * vg.Inch
	widestBar   = 0.45 * vg.Inch
)

// chart is one picture: bars of a metric by case and engine, or a line over time for each engine.
type chart struct {
	name, title string
	groups      []string
	metric      suite.Metric
	overTime    bool
}

var charts = []chart{ //nolint:gochecknoglobals // a table
	{name: "drain", title: "Working on what is there: messages a second", groups: []string{suite.GroupDrain, suite.GroupPayload}, metric: suite.Rate},
	{name: "publish", title: "Publishing: messages a second", groups: []string{suite.GroupPublish}, metric: suite.Rate},
	{name: "latency_p50", title: "From publishing to the handler, median: ms", groups: []string{suite.GroupLatency}, metric: suite.P50},
	{name: "latency_p99", title: "From publishing to the handler, 99 %: ms", groups: []string{suite.GroupLatency}, metric: suite.P99},
	{name: "claims", title: "A claim of 10 messages, 99 %: ms", groups: []string{suite.GroupClaims}, metric: suite.P99},
	{name: "processes", title: "Worker processes: messages a second", groups: []string{suite.GroupProcesses}, metric: suite.Rate},
	{name: "queues", title: "Queues: messages a second", groups: []string{suite.GroupQueues}, metric: suite.Rate},
	{name: "wal", title: "WAL for each message worked on: bytes", groups: []string{suite.GroupDrain}, metric: suite.WAL},
	{name: "cpu", title: "CPU of the server for each message worked on: µs", groups: []string{suite.GroupDrain}, metric: suite.ServerCPU},
	{name: "sustained", title: "Publishing and working: messages a second", groups: []string{suite.GroupSustained}, metric: suite.Rate, overTime: true},
	{
		name: "sustained_size", title: "Publishing and working: size of all tables and indexes, MB",
		groups: []string{suite.GroupSustained}, metric: suite.HotTableMax, overTime: true,
	},
	{
		name: "old_snapshot", title: "The same while a session holds an old snapshot: messages a second",
		groups: []string{suite.GroupSnapshot}, metric: suite.Rate, overTime: true,
	},
}

// colors are those of Okabe and Ito, which everybody can tell apart.
var colors = []color.Color{ //nolint:gochecknoglobals // a table
	color.RGBA{0x00, 0x72, 0xb2, 0xff},
	color.RGBA{0xd5, 0x5e, 0x00, 0xff},
	color.RGBA{0x00, 0x9e, 0x73, 0xff},
	color.RGBA{0xe6, 0x9f, 0x00, 0xff},
	color.RGBA{0x56, 0xb4, 0xe9, 0xff},
	color.RGBA{0xcc, 0x79, 0xa7, 0xff},
	color.RGBA{0x99, 0x99, 0x99, 0xff},
	color.RGBA{0xf0, 0xe4, 0x42, 0xff},
	color.RGBA{0x33, 0x33, 0x33, 0xff},
}

// Charts writes an SVG file for each chart that there are figures for, and returns their paths.
func (r *Report) Charts(folder string) (paths []string, err error) {
	for _, c := range charts {
		p, err := r.draw(c)
		if err != nil {
			return paths, fmt.Errorf("chart %s: %w", c.name, err)
		}
		if p == nil {
			continue
		}
		path := filepath.Join(folder, c.name+".svg")
		if err := p.Save(chartWidth, chartHeight, path); err != nil {
			return paths, fmt.Errorf("chart %s: %w", c.name, err)
		}
		paths = append(paths, path)
	}
	return paths, nil
}

// draw is nil if there is nothing to be seen.
func (r *Report) draw(c chart) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = c.title
	p.Y.Min = 0
	p.Legend.Top = true
	p.Add(plotter.NewGrid())
	var (
		drawn bool
		err   error
	)
	if c.overTime {
		drawn, err = r.lines(p, c)
	} else {
		drawn, err = r.bars(p, c)
	}
	if err != nil || !drawn {
		return nil, err
	}
	p.Y.Max *= 1.3 // room for the legend
	return p, nil
}

func (r *Report) casesOf(c chart) (cases []suite.Case) {
	for _, one := range r.Cases {
		if slices.Contains(c.groups, one.Group) {
			cases = append(cases, one)
		}
	}
	return cases
}

// bars has a group of bars for each case, and a color for each engine.
func (r *Report) bars(p *plot.Plot, c chart) (drawn bool, err error) {
	cases := r.casesOf(c)
	var engines, names []string
	for _, one := range cases {
		names = append(names, one.Name)
		for _, name := range one.Engines {
			if !slices.Contains(engines, name) {
				engines = append(engines, name)
			}
		}
	}
	if len(cases) == 0 {
		return false, nil
	}
	width := min(widestBar, barsShare/vg.Length(len(cases)*len(engines)))
	for i, name := range engines {
		values := make(plotter.Values, len(cases))
		for j, one := range cases {
			if v := r.Value(suite.Figure{Case: one.Name, Engine: name, Metric: c.metric}); !math.IsNaN(v) {
				values[j] = v
				drawn = true
			}
		}
		bars, err := plotter.NewBarChart(values, width)
		if err != nil {
			return false, fmt.Errorf("bars of %s: %w", name, err)
		}
		bars.Color = colors[i%len(colors)]
		bars.LineStyle.Width = 0
		bars.Offset = width * (vg.Length(i) - vg.Length(len(engines)-1)/2)
		p.Add(bars)
		p.Legend.Add(name, bars)
	}
	p.NominalX(names...)
	return drawn, nil
}

func (r *Report) lines(p *plot.Plot, c chart) (drawn bool, err error) {
	p.X.Label.Text = "seconds"
	for _, one := range r.casesOf(c) {
		for i, name := range one.Engines {
			result, _ := r.find(one.Name, name)
			points := result.Series[c.metric]
			if len(points) == 0 {
				continue
			}
			xys := make(plotter.XYs, len(points))
			for j, point := range points {
				xys[j].X, xys[j].Y = point.Seconds, point.Value
			}
			line, err := plotter.NewLine(xys)
			if err != nil {
				return false, fmt.Errorf("line of %s: %w", name, err)
			}
			line.Color = colors[i%len(colors)]
			p.Add(line)
			p.Legend.Add(name, line)
			drawn = true
		}
	}
	return drawn, nil
}
