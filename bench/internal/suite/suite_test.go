package suite_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
	"github.com/leasebus/leasebus/bench/internal/suite"
)

func TestCasesHaveNamesOfTheirOwnAndKnownEngines(t *testing.T) {
	t.Parallel()
	for name, cases := range map[string][]suite.Case{
		"quick": suite.Quick(), "full": suite.Full(5 * time.Minute), "quick AMQP": suite.QuickAMQP(), "full AMQP": suite.FullAMQP(),
	} {
		var names []string
		for _, c := range cases {
			if slices.Contains(names, c.Name) {
				t.Errorf("%s: two cases are called %s", name, c.Name)
			}
			names = append(names, c.Name)
			if c.Load == nil || c.Group == "" || c.About == "" || len(c.Engines) == 0 {
				t.Errorf("%s: case %s lacks something: %+v", name, c.Name, c)
			}
			for _, e := range c.Engines {
				if _, err := engine.ByName(e); err != nil {
					t.Errorf("%s: case %s: %v", name, c.Name, err)
				}
			}
		}
	}
}

// A target whose case has another name would be left out without a word.
func TestTargetsAreMeasured(t *testing.T) {
	t.Parallel()
	full := slices.Concat(suite.Full(time.Minute), suite.FullAMQP())
	quick := slices.Concat(suite.Quick(), suite.QuickAMQP())
	for _, target := range suite.Targets() {
		for _, f := range []suite.Figure{target.Over, target.Under} {
			if f != (suite.Figure{}) && !measures(full, f) {
				t.Errorf("target %s: nothing measures %+v", target.Name, f)
			}
		}
		prefix := target.Name[:min(len(target.Name), 5)]
		if slices.Contains([]string{"drain", "publi", "laten", "amqp_"}, prefix) && (!measures(quick, target.Over) || !measures(quick, target.Under)) {
			t.Errorf("target %s is not measured by the quick cases", target.Name)
		}
	}
	for _, ceiling := range suite.Ceilings() {
		if !measures(full, ceiling.Figure) {
			t.Errorf("ceiling %s: nothing measures %+v", ceiling.Name, ceiling.Figure)
		}
	}
}

func measures(cases []suite.Case, f suite.Figure) bool {
	return slices.ContainsFunc(cases, func(c suite.Case) bool {
		return c.Name == f.Case && slices.Contains(c.Engines, f.Engine)
	})
}

func TestMedian(t *testing.T) {
	t.Parallel()
	median := suite.Median([]suite.Sample{
		{suite.Rate: 10, suite.P99: 3},
		{suite.Rate: 30},
		{suite.Rate: 20, suite.P99: 5},
	})
	if got := median.Get(suite.Rate); got != 20 {
		t.Errorf("the median of 10, 30, 20 is %v", got)
	}
	if got := median.Get(suite.P99); got != 4 {
		t.Errorf("the median of 3 and 5 is %v", got)
	}
	if got := median.Get(suite.WAL); !math.IsNaN(got) {
		t.Errorf("a metric that nobody measured is %v, want NaN", got)
	}
}

func TestMetricsAreListedOnce(t *testing.T) {
	t.Parallel()
	metrics := suite.Metrics()
	if len(slices.Compact(slices.Sorted(slices.Values(metrics)))) != len(metrics) {
		t.Errorf("a metric is listed twice: %v", metrics)
	}
}
