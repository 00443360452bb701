package amqp_test

import (
	"context"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

const benchWindow = 256

// BenchmarkPublish compares with a loop on the library that does the least that can be called confirmed: mandatory and
// persistent messages, a window of the same size, and the confirms awaited in order.
func BenchmarkPublish(b *testing.B) {
	rabbit := testservers.RabbitMQ(b)
	for _, kind := range []string{"classic", "quorum"} {
		for name, run := range map[string]func(b *testing.B, url, queue string, payload []byte){
			"bare": benchBare, "batch": benchBatch, "callers": benchCallers,
		} {
			b.Run(kind+"/"+name, func(b *testing.B) {
				queue := rabbit.Queue(b, "bench")
				rabbit.Do(b, func(ch *amqp091.Channel) error {
					_, err := ch.QueueDeclare(queue, true, false, false, false, amqp091.Table{"x-queue-type": kind})
					return err
				})
				b.ReportAllocs()
				before := testservers.CPUTime()
				run(b, rabbit.URL(), queue, make([]byte, 200))
				b.ReportMetric(float64((testservers.CPUTime()-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
				if n := rabbit.Ready(b, queue); n < b.N {
					b.Errorf("%d messages are stored of %d", n, b.N)
				}
			})
		}
	}
}

func benchBare(b *testing.B, url, queue string, payload []byte) {
	conn, err := amqp091.Dial(url)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		b.Fatal(err)
	}
	if err := ch.Confirm(false); err != nil {
		b.Fatal(err)
	}
	pending := make(chan *amqp091.DeferredConfirmation, benchWindow)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for confirmation := range pending {
			if !confirmation.Wait() {
				b.Error("a message was refused")
			}
		}
	}()
	b.ResetTimer()
	for b.Loop() {
		confirmation, err := ch.PublishWithDeferredConfirm("", queue, true, false, amqp091.Publishing{
			Headers:     amqp091.Table{"x-leasebus-first-due": time.Now().UnixMilli(), "x-leasebus-correlation": "0198f2b0-0000-7000-8000-000000000000"},
			ContentType: "application/x-protobuf", DeliveryMode: amqp091.Persistent,
			MessageId: leasebus.NewID().String(), Type: "bench.v1.Task", Body: payload,
		})
		if err != nil {
			b.Fatal(err)
		}
		pending <- confirmation
	}
	close(pending)
	<-done
}

func benchBatch(b *testing.B, url, queue string, payload []byte) {
	broker := dial(b, url, amqp.WithConfirmWindow(benchWindow))
	out := make([]leasebus.Outgoing, b.N)
	receipts := make([]leasebus.Receipt, b.N)
	b.ResetTimer()
	for i := range out {
		out[i].Envelope = benchEnvelope(queue, payload)
	}
	if err := broker.Publish(context.Background(), out, receipts); err != nil { // one call: a bare loop never lets its window run dry either
		b.Fatal(err)
	}
}

func benchCallers(b *testing.B, url, queue string, payload []byte) {
	broker := dial(b, url, amqp.WithConfirmWindow(benchWindow))
	b.SetParallelism(128)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		out := make([]leasebus.Outgoing, 1)
		receipts := make([]leasebus.Receipt, 1)
		for pb.Next() {
			out[0].Envelope = benchEnvelope(queue, payload)
			if err := broker.Publish(context.Background(), out, receipts); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func benchEnvelope(queue string, payload []byte) leasebus.Envelope {
	id := leasebus.NewID()
	return leasebus.Envelope{
		ID: id, Type: "bench.v1.Task", Queue: queue, Payload: payload,
		Headers: leasebus.NewHeaders(map[string]string{leasebus.HeaderCorrelation: id.String()}),
	}
}
