package suite

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
)

// Publish has goroutines publish for a time.
type Publish struct {
	Goroutines int
	// Batch is how many messages each call stores; 0 = one by one.
	Batch int
	// Tx publishes each message in a transaction of the caller's.
	Tx   bool
	For  time.Duration
	Body int
}

// Run implements Load.
func (p Publish) Run(ctx context.Context, t *Trial) (Outcome, error) {
	bus, err := t.Engine.Open(ctx, t.DSN, engine.Options{})
	if err != nil {
		return Outcome{}, err
	}
	defer bus.Close()
	m := engine.Message{Body: bodyOf(p.Body)}
	// The first call opens connections and makes the queue known.
	if err := p.once(ctx, bus, m); err != nil {
		return Outcome{}, err
	}
	if err := t.Meter.Tidy(ctx); err != nil {
		return Outcome{}, err
	}
	end, err := t.begin(ctx)
	if err != nil {
		return Outcome{}, err
	}
	var published atomic.Int64
	deadline := time.Now().Add(p.For)
	err = parallel(p.Goroutines, func(int) error {
		for time.Now().Before(deadline) {
			if err := p.once(ctx, bus, m); err != nil {
				return err
			}
			published.Add(int64(max(p.Batch, 1)))
		}
		return nil
	})
	if err != nil {
		return Outcome{}, err
	}
	cost, err := end()
	if err != nil {
		return Outcome{}, err
	}
	s := Sample{Rate: float64(published.Load()) / cost.Wall.Seconds()}
	s.addCost(cost, published.Load())
	tables, indexes, err := t.Meter.Sizes(ctx)
	if err != nil {
		return Outcome{}, err
	}
	s.addSizes(tables, indexes)
	return Outcome{Sample: s}, expectLeft(ctx, bus, published.Load()+int64(max(p.Batch, 1)))
}

func (p Publish) once(ctx context.Context, bus engine.Bus, m engine.Message) error {
	m.PublishedAt = time.Now().UnixNano()
	switch {
	case p.Tx:
		return bus.PublishTx(ctx, m)
	case p.Batch > 0:
		batch := make([]engine.Message, p.Batch)
		for i := range batch {
			batch[i] = m
		}
		return bus.PublishBatch(ctx, batch)
	default:
		return bus.Publish(ctx, m)
	}
}
