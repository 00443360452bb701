package suite

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
)

// Drain works on messages that are there already. It counts those whose handler has returned until all are done or the
// time is over.
type Drain struct {
	Messages int
	Limit    time.Duration
	// Handler is how long each message takes.
	Handler time.Duration
	Queues  int
	Body    int
}

// Run implements Load.
func (d Drain) Run(ctx context.Context, t *Trial) (Outcome, error) {
	bus, err := t.Engine.Open(ctx, t.DSN, engine.Options{Queues: d.Queues})
	if err != nil {
		return Outcome{}, err
	}
	defer bus.Close()
	m := engine.Message{Body: bodyOf(d.Body), PublishedAt: time.Now().UnixNano()}
	if err := t.fill(ctx, bus, d.Messages, d.Queues, m); err != nil {
		return Outcome{}, err
	}
	end, err := t.begin(ctx)
	if err != nil {
		return Outcome{}, err
	}
	c := newCountdown(int64(d.Messages))
	began := time.Now()
	workers := hire(ctx, bus, func(ctx context.Context, _ engine.Message) {
		work(ctx, d.Handler)
		c.one()
	})
	if err := workers.await(ctx, c.done, d.Limit); err != nil {
		return Outcome{}, err
	}
	handled, took := c.count.Load(), time.Since(began)
	finished := handled >= int64(d.Messages)
	if finished {
		time.Sleep(settleTime)
	} else if err := workers.dismiss(); err != nil {
		return Outcome{}, err
	}
	cost, err := end()
	if err != nil {
		return Outcome{}, err
	}
	s := Sample{Rate: float64(handled) / took.Seconds()}
	s.addCost(cost, c.count.Load())
	tables, indexes, err := t.Meter.Sizes(ctx)
	if err != nil {
		return Outcome{}, err
	}
	s.addSizes(tables, indexes)
	if finished {
		if err := expectLeft(ctx, bus, 0); err != nil {
			return Outcome{}, err
		}
		if err := workers.dismiss(); err != nil {
			return Outcome{}, err
		}
	}
	return Outcome{Sample: s}, nil
}

// countdown closes done at the n-th.
type countdown struct {
	n     int64
	count atomic.Int64
	done  chan struct{}
}

func newCountdown(n int64) *countdown { return &countdown{n: n, done: make(chan struct{})} }

func (c *countdown) one() {
	if c.count.Add(1) == c.n {
		close(c.done)
	}
}
