package suite

import (
	"context"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
)

// Failing works on messages that are there already, of which so many in a hundred fail once and wait two seconds for
// their next attempt. It counts those that succeed, until nine of ten have or the time is over: from then on there is
// little left to do but wait.
type Failing struct {
	Messages int
	Percent  int
	Limit    time.Duration
	Body     int
}

// Run implements Load.
func (f Failing) Run(ctx context.Context, t *Trial) (Outcome, error) {
	bus, err := t.Engine.Open(ctx, t.DSN, engine.Options{Failing: true})
	if err != nil {
		return Outcome{}, err
	}
	defer bus.Close()
	m := engine.Message{Body: bodyOf(f.Body), PublishedAt: time.Now().UnixNano()}
	batch := make([]engine.Message, fillBatch)
	for first := 0; first < f.Messages; first += fillBatch {
		for i := range batch {
			batch[i] = m
			if (first+i)%100 < f.Percent {
				batch[i].Fails = 1
			}
		}
		if err := bus.PublishBatch(ctx, batch[:min(fillBatch, f.Messages-first)]); err != nil {
			return Outcome{}, err
		}
	}
	end, err := t.begin(ctx)
	if err != nil {
		return Outcome{}, err
	}
	c := newCountdown(int64(f.Messages / 10 * 9))
	began := time.Now()
	workers := hire(ctx, bus, func(context.Context, engine.Message) { c.one() })
	if err := workers.await(ctx, c.done, f.Limit); err != nil {
		return Outcome{}, err
	}
	succeeded, took := c.count.Load(), time.Since(began)
	cost, err := end()
	if err != nil {
		return Outcome{}, err
	}
	s := Sample{Rate: float64(succeeded) / took.Seconds()}
	s.addCost(cost, succeeded)
	return Outcome{Sample: s}, workers.dismiss()
}
