package suite

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/leasebus/leasebus/bench/internal/meter"
)

func TestSpanMean(t *testing.T) {
	t.Parallel()
	points := []Point{{1, 10}, {2, 20}, {3, 30}, {4, 40}}
	for _, c := range []struct {
		span Span
		want float64
	}{
		{Span{0, 2 * time.Second}, 15},
		{Span{2 * time.Second, 4 * time.Second}, 35},
		{Span{0, time.Minute}, 25},
		{Span{time.Minute, 2 * time.Minute}, 0},
	} {
		if got := c.span.mean(points); got != c.want {
			t.Errorf("mean of %v = %v, want %v", c.span, got, c.want)
		}
	}
}

func TestAddCost(t *testing.T) {
	t.Parallel()
	s := Sample{}
	s.addCost(meter.Cost{Client: 2 * time.Second, Server: 4 * time.Second, WAL: 3000}, 1_000_000)
	if s[ClientCPU] != 2 || s[ServerCPU] != 4 || s[WAL] != 0.003 {
		t.Errorf("the shares of a million messages are %v", s)
	}
	unknown := Sample{}
	unknown.addCost(meter.Cost{Server: -1}, 1)
	if !math.IsNaN(unknown.Get(ServerCPU)) {
		t.Errorf("a server on another machine takes %v", unknown[ServerCPU])
	}
	nothing := Sample{}
	nothing.addCost(meter.Cost{Client: time.Second}, 0)
	if len(nothing) != 0 {
		t.Errorf("no messages cost %v each", nothing)
	}
}

func TestAddLatency(t *testing.T) {
	t.Parallel()
	sorted := make([]time.Duration, 1000)
	for i := range sorted {
		sorted[i] = time.Duration(i+1) * time.Millisecond
	}
	s := Sample{}
	s.addLatency(sorted)
	if s[P50] != 500 || s[P90] != 900 || s[P99] != 990 || s[Max] != 1000 {
		t.Errorf("quantiles of 1 to 1,000 ms: %v", s)
	}
}

func TestBody(t *testing.T) {
	t.Parallel()
	a := bodyOf(1000)
	if len(a) != 1000 || a != bodyOf(1000) {
		t.Error("a body is not the same each time, or not as long as was asked for")
	}
	if strings.Count(a, a[:1]) > 60 {
		t.Errorf("a body repeats itself: %q", a)
	}
}

func TestCountdown(t *testing.T) {
	t.Parallel()
	c := newCountdown(2)
	c.one()
	select {
	case <-c.done:
		t.Fatal("done after one of two")
	default:
	}
	c.one()
	<-c.done
	c.one() // one message may come twice
	if got := c.count.Load(); got != 3 {
		t.Errorf("counted %d, want 3", got)
	}
}
