// Package suite has the cases: the work that every engine is given, and what is measured of it.
package suite

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/pprof"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
	"github.com/leasebus/leasebus/bench/internal/meter"
)

// Trial is one run of a load on one engine, in a database that nothing else has used.
type Trial struct {
	Engine engine.Engine
	DSN    string
	Meter  *meter.Meter
	// Profile is where a CPU profile of what is measured goes; "" = nowhere.
	Profile string
}

// Load is work that a trial does.
type Load interface {
	Run(ctx context.Context, t *Trial) (Outcome, error)
}

// begin reads the meters before what is measured; end says what that cost.
func (t *Trial) begin(ctx context.Context) (end func() (meter.Cost, error), err error) {
	stop, err := startProfile(t.Profile)
	if err != nil {
		return nil, err
	}
	before, err := t.Meter.Read(ctx)
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return func() (meter.Cost, error) {
		after, err := t.Meter.Read(ctx)
		return after.Since(before), errors.Join(err, stop())
	}, nil
}

func startProfile(path string) (stop func() error, err error) {
	if path == "" {
		return func() error { return nil }, nil
	}
	f, err := os.Create(path) //nolint:gosec // the user says where
	if err != nil {
		return nil, fmt.Errorf("profile: %w", err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, fmt.Errorf("profile: %w", errors.Join(err, f.Close()))
	}
	return func() error {
		pprof.StopCPUProfile()
		return f.Close()
	}, nil
}

const (
	fillBatch = 1000
	fillers   = 2
	// settleTime is what an engine gets to store the last outcomes before the meters are read.
	settleTime = 150 * time.Millisecond
	leftBound  = 10 * time.Second
)

// bodyOf is text of so many bytes that does not compress well, the same in every run.
func bodyOf(size int) string {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // text, no secret
	body := make([]byte, size)
	for i := range body {
		body[i] = letters[random.IntN(len(letters))]
	}
	return string(body)
}

// fill publishes n messages, spread over queues batch by batch, and brings the database to rest.
func (t *Trial) fill(ctx context.Context, bus engine.Bus, n, queues int, m engine.Message) error {
	var next atomic.Int64
	err := parallel(fillers, func(int) error {
		for {
			first := int(next.Add(fillBatch)) - fillBatch
			if first >= n {
				return nil
			}
			batch := make([]engine.Message, min(fillBatch, n-first))
			for i := range batch {
				batch[i] = m
				batch[i].Queue = first / fillBatch % max(queues, 1)
			}
			if err := bus.PublishBatch(ctx, batch); err != nil {
				return err
			}
		}
	})
	if err != nil {
		return fmt.Errorf("fill: %w", err)
	}
	return t.Meter.Tidy(ctx)
}

// parallel runs n of f and joins their errors.
func parallel(n int, f func(i int) error) error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = f(i) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// crew is an engine at work in the background.
type crew struct {
	stop  context.CancelFunc
	ended chan error
}

func hire(ctx context.Context, bus engine.Bus, handle engine.Handler) *crew {
	ctx, stop := context.WithCancel(ctx)
	c := &crew{stop: stop, ended: make(chan error, 1)}
	go func() { c.ended <- bus.Work(ctx, handle) }()
	return c
}

// dismiss ends the work and waits for it.
func (c *crew) dismiss() error {
	c.stop()
	if err := <-c.ended; err != nil {
		return fmt.Errorf("work: %w", err)
	}
	return nil
}

// await waits until is done is closed or the time is over; an engine that ends by itself has failed.
func (c *crew) await(ctx context.Context, done <-chan struct{}, limit time.Duration) error {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
		return nil
	case err := <-c.ended:
		c.ended <- err
		return fmt.Errorf("work ended by itself: %w", err)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// expectLeft waits until an engine has as many messages left as it should: more would be lost work, fewer lost messages.
func expectLeft(ctx context.Context, bus engine.Bus, want int64) error {
	deadline := time.Now().Add(leftBound)
	for {
		left, err := bus.Left(ctx)
		if err != nil || left == want {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d messages are left where %d should be", left, want)
		}
		time.Sleep(settleTime)
	}
}

// latencies collects durations from many goroutines.
type latencies struct {
	mu  sync.Mutex
	all []time.Duration
}

func (l *latencies) add(d time.Duration) {
	l.mu.Lock()
	l.all = append(l.all, d)
	l.mu.Unlock()
}

func (l *latencies) sorted() []time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(slices.Values(l.all))
}

func sinceNano(at int64) time.Duration { return time.Duration(time.Now().UnixNano() - at) }

// work is what a handler does.
func work(ctx context.Context, d time.Duration) {
	if d == 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
