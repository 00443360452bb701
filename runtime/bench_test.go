package leasebus_test

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// BenchmarkProcessor drains no-op messages through the typed API: what the engine itself costs, decoding and the memory
// backend included. "cpu-ns/msg" is the processor time of the whole process; publishing is outside the timer.
func BenchmarkProcessor(b *testing.B) {
	for _, workers := range []int{16, 64, 256} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			policy := leasebus.DefaultPolicy("google.protobuf.StringValue", "queue")
			store := memory.New()
			publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&policy, store)
			if err != nil {
				b.Fatal(err)
			}
			batch := make([]*wrapperspb.StringValue, 1000)
			for i := range batch {
				batch[i] = wrapperspb.String("an order, say, with an id, a customer and a few lines that describe it")
			}
			for left := b.N; left > 0; left -= len(batch) {
				if _, err := publisher.PublishBatch(b.Context(), batch[:min(left, len(batch))]); err != nil {
					b.Fatal(err)
				}
			}
			p, err := leasebus.NewProcessor(store, leasebus.WithConcurrency(workers), quiet)
			if err != nil {
				b.Fatal(err)
			}
			err = leasebus.RegisterHandler(p, &policy, func(context.Context, *wrapperspb.StringValue) error { return nil })
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			b.ResetTimer()
			before := cpuTime(b)
			ctx, cancel := context.WithCancel(b.Context())
			ran := make(chan error, 1)
			go func() { ran <- p.Run(ctx) }()
			waitFor(b, func() bool { return p.Stats().Succeeded == int64(b.N) })
			b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/msg")
			b.StopTimer()
			cancel()
			if err := <-ran; err != nil {
				b.Fatal(err)
			}
		})
	}
}

// waitFor polls: a signal from each handler would be measured too.
func waitFor(b *testing.B, done func() bool) {
	b.Helper()
	for !done() {
		time.Sleep(time.Millisecond)
	}
}

func cpuTime(b *testing.B) int64 {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return usage.Utime.Nano() + usage.Stime.Nano()
}

// BenchmarkPublish prepares messages for a store that takes them at no cost: what the typed publisher itself costs.
func BenchmarkPublish(b *testing.B) {
	policy := leasebus.DefaultPolicy("google.protobuf.StringValue", "queue")
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&policy, nowhere{})
	if err != nil {
		b.Fatal(err)
	}
	batch := make([]*wrapperspb.StringValue, 1000)
	for i := range batch {
		batch[i] = wrapperspb.String("an order, say, with an id, a customer and a few lines that describe it")
	}
	b.ReportAllocs()
	before := cpuTime(b)
	for left := b.N; left > 0; left -= len(batch) {
		if _, err := publisher.PublishBatch(b.Context(), batch[:min(left, len(batch))]); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(cpuTime(b)-before)/float64(b.N), "cpu-ns/msg")
}

// nowhere takes everything and keeps nothing.
type nowhere struct{}

func (nowhere) Publish(_ context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	for i := range out {
		receipts[i].ID = out[i].ID
	}
	return nil
}
