package leasebustest

import (
	"context"
	"testing"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// newProcessor makes a processor with its handlers, or fails the test.
func newProcessor(tb testing.TB, source leasebus.Source, register func(*leasebus.Processor) error, o *runOptions, more ...leasebus.ProcessorOption) *leasebus.Processor {
	tb.Helper()
	p, err := leasebus.NewProcessor(source, append(o.processor, more...)...)
	if err == nil {
		err = register(p)
	}
	if err != nil {
		tb.Fatalf("leasebustest: %v", err)
	}
	return p
}

// running is a processor that runs.
type running struct {
	cancel context.CancelFunc
	ended  chan error
}

func start(tb testing.TB, p *leasebus.Processor) *running {
	tb.Helper()
	ctx, cancel := context.WithCancel(tb.Context())
	r := &running{cancel: cancel, ended: make(chan error, 1)}
	go func() { r.ended <- p.Run(ctx) }()
	return r
}

// stop returns when the processor has ended. What it had to leave fails the test, but does not end it.
func (r *running) stop(tb testing.TB) {
	tb.Helper()
	r.cancel()
	if err := <-r.ended; err != nil {
		tb.Errorf("leasebustest: %v", err)
	}
}
