package suite

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/leasebus/leasebus/bench/internal/engine"
	"github.com/leasebus/leasebus/bench/internal/stats"
)

// Pipeline publishes in batches and works at the same time, as fast as both go, with a bounded backlog.
type Pipeline struct {
	For  time.Duration
	Body int
	// OldSnapshot has another session hold a snapshot from the beginning, so that no vacuum can clean up.
	OldSnapshot bool
	// Begin and End are the spans whose rates are compared; zero = they are not.
	Begin, End Span
	// Sizes samples the tables' sizes.
	Sizes bool
}

// Span is a part of a run's time.
type Span struct{ From, To time.Duration }

const (
	pipelinePublishers = 2
	pipelineBatch      = 500
	pipelineBacklog    = 20_000
	pipelineFull       = time.Millisecond
	pipelineTick       = time.Second
	sizesEvery         = 5
)

// Run implements Load.
func (p Pipeline) Run(ctx context.Context, t *Trial) (Outcome, error) {
	bus, err := t.Engine.Open(ctx, t.DSN, engine.Options{})
	if err != nil {
		return Outcome{}, err
	}
	defer bus.Close()
	if err := t.Meter.Tidy(ctx); err != nil {
		return Outcome{}, err
	}
	if p.OldSnapshot {
		release, err := holdSnapshot(ctx, t.DSN)
		if err != nil {
			return Outcome{}, err
		}
		defer release()
	}
	end, err := t.begin(ctx)
	if err != nil {
		return Outcome{}, err
	}
	var published, handled atomic.Int64
	workers := hire(ctx, bus, func(context.Context, engine.Message) { handled.Add(1) })
	publishing, stop := context.WithTimeout(ctx, p.For)
	defer stop()
	publishers := make(chan error, 1)
	go func() {
		publishers <- parallel(pipelinePublishers, func(int) error {
			return p.publish(ctx, publishing, bus, &published, &handled)
		})
	}()
	out, err := p.watch(publishing, ctx, t, &handled)
	if err != nil {
		return Outcome{}, err
	}
	if err := <-publishers; err != nil {
		return Outcome{}, err
	}
	if err := expectLeft(ctx, bus, 0); err != nil {
		return Outcome{}, err
	}
	if err := workers.dismiss(); err != nil {
		return Outcome{}, err
	}
	cost, err := end()
	if err != nil {
		return Outcome{}, err
	}
	out.Sample.addCost(cost, handled.Load())
	return out, nil
}

// publish goes on until publishing ends; calls under way are let finish.
func (p Pipeline) publish(ctx, publishing context.Context, bus engine.Bus, published, handled *atomic.Int64) error {
	m := engine.Message{Body: bodyOf(p.Body)}
	batch := make([]engine.Message, pipelineBatch)
	for publishing.Err() == nil {
		if published.Load()-handled.Load() > pipelineBacklog {
			time.Sleep(pipelineFull)
			continue
		}
		m.PublishedAt = time.Now().UnixNano()
		for i := range batch {
			batch[i] = m
		}
		published.Add(pipelineBatch)
		if err := bus.PublishBatch(ctx, batch); err != nil {
			return err
		}
	}
	return nil
}

// watch notes the rate of every second, and the sizes now and then, until publishing ends.
func (p Pipeline) watch(publishing, ctx context.Context, t *Trial, handled *atomic.Int64) (Outcome, error) {
	began, last, lastAt := time.Now(), int64(0), time.Now()
	rates := []Point{}
	sizes := []Point{}
	largest := 0.0
	ticker := time.NewTicker(pipelineTick)
	defer ticker.Stop()
	for seconds := 1; ; seconds++ {
		select {
		case <-ticker.C:
		case <-publishing.Done():
			total, took := handled.Load(), time.Since(began)
			s := Sample{Rate: float64(total) / took.Seconds()}
			if p.Sizes {
				s[HotTableMax] = largest
			}
			if p.End.To > 0 {
				s[Decay] = stats.Ratio(p.End.mean(rates), p.Begin.mean(rates))
			}
			return Outcome{Sample: s, Series: Series{Rate: rates, HotTableMax: sizes}}, nil
		}
		now, n := time.Now(), handled.Load()
		rates = append(rates, Point{now.Sub(began).Seconds(), float64(n-last) / now.Sub(lastAt).Seconds()})
		last, lastAt = n, now
		if p.Sizes && seconds%sizesEvery == 0 {
			tables, indexes, err := t.Meter.Sizes(ctx)
			if err != nil {
				return Outcome{}, err
			}
			size := float64(tables+indexes) / megabyte
			largest = max(largest, size)
			sizes = append(sizes, Point{now.Sub(began).Seconds(), size})
		}
	}
}

// mean is the mean of the points of the span.
func (s Span) mean(points []Point) float64 {
	sum, n := 0.0, 0
	for _, p := range points {
		if p.Seconds > s.From.Seconds() && p.Seconds <= s.To.Seconds() {
			sum += p.Value
			n++
		}
	}
	if n == 0 {
		return 0
	}
	return sum / float64(n)
}

// holdSnapshot opens a transaction that sees the database as it is now, for as long as it is held.
func holdSnapshot(ctx context.Context, dsn string) (release func(), err error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, fmt.Errorf("old snapshot: %w", err)
	}
	_, err = conn.Exec(ctx, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
	if err != nil {
		return nil, fmt.Errorf("old snapshot: %w", err)
	}
	return func() { _ = conn.Close(context.WithoutCancel(ctx)) }, nil
}
