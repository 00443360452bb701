package suite

import (
	"context"
	"sync"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
)

// Latency publishes at a steady rate, whatever comes of it, and times each message from there to its handler.
type Latency struct {
	// Rate is in messages a second; 0 = half of what the engine can take, found out first.
	Rate int
	For  time.Duration
	Body int
	// Apart publishes by another connection than the workers', as another process would.
	Apart bool
}

const (
	// latencyWarmUp is what is not timed: connections are opened, statements prepared.
	latencyWarmUp = 300 * time.Millisecond
	// latencyTick is how often messages are published in batches, if the rate is too high for single ones.
	latencyTick = 2 * time.Millisecond
	singlesUpTo = 1000
	// saturationTime is how long it is tried what an engine can take.
	saturationTime = 3 * time.Second
)

// Run implements Load.
func (l Latency) Run(ctx context.Context, t *Trial) (Outcome, error) {
	bus, err := t.Engine.Open(ctx, t.DSN, engine.Options{})
	if err != nil {
		return Outcome{}, err
	}
	defer bus.Close()
	publisher := bus
	if l.Apart {
		if publisher, err = t.Engine.Open(ctx, t.DSN, engine.Options{}); err != nil {
			return Outcome{}, err
		}
		defer publisher.Close()
	}
	s := Sample{}
	if l.Rate == 0 {
		saturation, err := Pipeline{For: saturationTime, Body: l.Body}.Run(ctx, t)
		if err != nil {
			return Outcome{}, err
		}
		s[Saturation] = saturation.Sample[Rate]
		l.Rate = int(saturation.Sample[Rate] / 2)
	}
	if err := t.Meter.Tidy(ctx); err != nil {
		return Outcome{}, err
	}
	var seen latencies
	start := time.Now().Add(latencyWarmUp)
	workers := hire(ctx, bus, func(_ context.Context, m engine.Message) {
		if m.PublishedAt >= start.UnixNano() {
			seen.add(sinceNano(m.PublishedAt))
		}
	})
	end, err := t.begin(ctx)
	if err != nil {
		return Outcome{}, err
	}
	published, err := l.publish(ctx, publisher, start.Add(l.For))
	if err != nil {
		return Outcome{}, err
	}
	if err := expectLeft(ctx, bus, 0); err != nil {
		return Outcome{}, err
	}
	cost, err := end()
	if err != nil {
		return Outcome{}, err
	}
	if err := workers.dismiss(); err != nil {
		return Outcome{}, err
	}
	s[Rate] = float64(published) / (l.For + latencyWarmUp).Seconds()
	s.addLatency(seen.sorted())
	s.addCost(cost, published)
	return Outcome{Sample: s}, nil
}

// publish goes by the clock: what cannot be published in time is published late, at once.
func (l Latency) publish(ctx context.Context, bus engine.Bus, until time.Time) (published int64, err error) {
	batch, every := 1, time.Second/time.Duration(l.Rate)
	if l.Rate > singlesUpTo {
		batch, every = int(float64(l.Rate)*latencyTick.Seconds()), latencyTick
	}
	body := bodyOf(l.Body)
	var (
		calls sync.WaitGroup
		mu    sync.Mutex
	)
	for at := time.Now(); at.Before(until) && ctx.Err() == nil; at = at.Add(every) {
		time.Sleep(time.Until(at))
		published += int64(batch)
		calls.Go(func() {
			if failed := publishNow(ctx, bus, batch, body); failed != nil {
				mu.Lock()
				err = failed
				mu.Unlock()
			}
		})
	}
	calls.Wait()
	return published, err
}

func publishNow(ctx context.Context, bus engine.Bus, n int, body string) error {
	m := engine.Message{PublishedAt: time.Now().UnixNano(), Body: body}
	if n == 1 {
		return bus.Publish(ctx, m)
	}
	batch := make([]engine.Message, n)
	for i := range batch {
		batch[i] = m
	}
	return bus.PublishBatch(ctx, batch)
}

// Scheduled keeps many messages for later and times how late those are that become due meanwhile.
type Scheduled struct {
	// Later is how many wait for an hour.
	Later int
	// Rate is how many a second become due, each published Ahead of its time.
	Rate  int
	Ahead time.Duration
	For   time.Duration
	Body  int
}

// muchLater is when messages for later are due.
const muchLater = time.Hour

// Run implements Load.
func (l Scheduled) Run(ctx context.Context, t *Trial) (Outcome, error) {
	bus, err := t.Engine.Open(ctx, t.DSN, engine.Options{})
	if err != nil {
		return Outcome{}, err
	}
	defer bus.Close()
	m := engine.Message{Body: bodyOf(l.Body), Delay: muchLater}
	if err := t.fill(ctx, bus, l.Later, 1, m); err != nil {
		return Outcome{}, err
	}
	var late latencies
	workers := hire(ctx, bus, func(_ context.Context, m engine.Message) { late.add(sinceNano(m.PublishedAt)) })
	m.Delay = l.Ahead
	every := time.Second / time.Duration(l.Rate)
	for at, until := time.Now(), time.Now().Add(l.For); at.Before(until); at = at.Add(every) {
		time.Sleep(time.Until(at))
		m.PublishedAt = time.Now().Add(l.Ahead).UnixNano()
		if err := bus.Publish(ctx, m); err != nil {
			return Outcome{}, err
		}
	}
	if err := expectLeft(ctx, bus, int64(l.Later)); err != nil {
		return Outcome{}, err
	}
	if err := workers.dismiss(); err != nil {
		return Outcome{}, err
	}
	s := Sample{}
	s.addLatency(late.sorted())
	return Outcome{Sample: s}, nil
}

// Claims times single claims of a few messages each, with so many others in the store.
type Claims struct {
	// Later wait for an hour, Backlog are due and not claimed before those that are timed: as many are claimed as
	// are published.
	Later, Backlog int
	Count          int
	Body           int
}

// claimSize is how many messages each claim takes.
const claimSize = 10

// Run implements Load.
func (c Claims) Run(ctx context.Context, t *Trial) (Outcome, error) {
	bus, err := t.Engine.Open(ctx, t.DSN, engine.Options{})
	if err != nil {
		return Outcome{}, err
	}
	defer bus.Close()
	claimer, ok := bus.(engine.Claimer)
	if !ok {
		return Outcome{}, engine.ErrUnsupported
	}
	m := engine.Message{Body: bodyOf(c.Body)}
	if err := t.fill(ctx, bus, c.Backlog, 1, m); err != nil {
		return Outcome{}, err
	}
	m.Delay = muchLater
	if err := t.fill(ctx, bus, c.Later, 1, m); err != nil {
		return Outcome{}, err
	}
	var took latencies
	for range c.Count {
		d, err := claimer.Claim(ctx, claimSize, m.Body)
		if err != nil {
			return Outcome{}, err
		}
		took.add(d)
	}
	s := Sample{}
	s.addLatency(took.sorted())
	return Outcome{Sample: s}, nil
}
