package leasebustest

import (
	"log/slog"
	"testing"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Defaults of [Handle] and [Drain].
const (
	// DefaultPatience is how long a handler may take.
	DefaultPatience = time.Minute
	// DefaultMaxRuns is how many times [Drain] hands out messages before it takes them for endless.
	DefaultMaxRuns = 10_000
)

// HandleOption changes one [Handle].
type HandleOption interface{ applyHandle(*handleOptions) }

// DrainOption changes one [Drain].
type DrainOption interface{ applyDrain(*drainOptions) }

// Option is for both.
type Option interface {
	HandleOption
	DrainOption
}

type runOptions struct {
	patience  time.Duration
	processor []leasebus.ProcessorOption
}

func newRunOptions() runOptions {
	return runOptions{
		patience: DefaultPatience,
		processor: []leasebus.ProcessorOption{
			leasebus.WithConcurrency(1), // messages in their order: what fails once will fail again
			leasebus.WithLookAhead(0),
			leasebus.WithSettleLinger(0),
			leasebus.WithDrainTimeout(0), // what still runs at the end has failed its test
			leasebus.WithDrainGrace(time.Second),
			leasebus.WithLogger(slog.New(slog.DiscardHandler)),
		},
	}
}

type handleOptions struct {
	runOptions

	attempt int
	age     time.Duration
	publish []leasebus.PublishOption
}

type drainOptions struct {
	runOptions

	maxRuns int
}

type runOption func(*runOptions)

func (f runOption) applyHandle(o *handleOptions) { f(&o.runOptions) }
func (f runOption) applyDrain(o *drainOptions)   { f(&o.runOptions) }

// Processing adds options of the processor, such as the service's middleware, validator and hooks.
// Unless they say otherwise, one handler runs at a time, and the processor logs nothing.
func Processing(opts ...leasebus.ProcessorOption) Option {
	return runOption(func(o *runOptions) { o.processor = append(o.processor, opts...) })
}

// Patience sets how long a handler may take before the test fails. Default [DefaultPatience]. In a synctest bubble it
// counts in the bubble's time.
func Patience(d time.Duration) Option {
	return runOption(func(o *runOptions) { o.patience = d })
}

func newHandleOptions(tb testing.TB, opts []HandleOption) *handleOptions {
	tb.Helper()
	o := &handleOptions{runOptions: newRunOptions(), attempt: 1}
	for _, opt := range opts {
		opt.applyHandle(o)
	}
	o.check(tb)
	refuse(tb, o.attempt < 1, "Attempt", o.attempt, "1 or more")
	refuse(tb, o.age < 0, "Age", o.age, "0 or more")
	return o
}

func newDrainOptions(tb testing.TB, opts []DrainOption) *drainOptions {
	tb.Helper()
	o := &drainOptions{runOptions: newRunOptions(), maxRuns: DefaultMaxRuns}
	for _, opt := range opts {
		opt.applyDrain(o)
	}
	o.check(tb)
	refuse(tb, o.maxRuns < 1, "MaxRuns", o.maxRuns, "1 or more")
	return o
}

func (o *runOptions) check(tb testing.TB) {
	tb.Helper()
	refuse(tb, o.patience <= 0, "Patience", o.patience, "more than 0")
}

func refuse(tb testing.TB, wrong bool, option string, given any, allowed string) {
	tb.Helper()
	if wrong {
		tb.Fatalf("leasebustest: %s: %v is out of range; allowed is %s", option, given, allowed)
	}
}

type handleOption func(*handleOptions)

func (f handleOption) applyHandle(o *handleOptions) { f(o) }

// Attempt makes the message arrive at its nth attempt. Default 1. An n above the policy's maximum is a message whose
// worker died: it is dead-lettered without the handler.
func Attempt(n int) HandleOption {
	return handleOption(func(o *handleOptions) { o.attempt = n })
}

// Age makes the message one that was first due d ago.
func Age(d time.Duration) HandleOption {
	return handleOption(func(o *handleOptions) { o.age = d })
}

// PublishedWith adds options with which the message was published, such as headers.
func PublishedWith(opts ...leasebus.PublishOption) HandleOption {
	return handleOption(func(o *handleOptions) { o.publish = append(o.publish, opts...) })
}

type drainOption func(*drainOptions)

func (f drainOption) applyDrain(o *drainOptions) { f(o) }

// MaxRuns sets how many times messages are handed to handlers, all together, before the test fails.
// Default [DefaultMaxRuns].
func MaxRuns(n int) DrainOption {
	return drainOption(func(o *drainOptions) { o.maxRuns = n })
}
