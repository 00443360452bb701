package amqp

import (
	"errors"
	"log/slog"
	"sync"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
)

func dialIn(t testing.TB, url string, opts ...Option) *Broker {
	t.Helper()
	b, err := Dial(t.Context(), url, append([]Option{WithLogger(slog.New(slog.NewTextHandler(t.Output(), nil)))}, opts...)...)
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// classicQueue is one that is there, under a name that nobody else uses.
func classicQueue(t testing.TB, rabbit *testservers.Rabbit, label string) string {
	t.Helper()
	name := rabbit.Queue(t, label)
	rabbit.Do(t, func(ch *amqp091.Channel) error {
		_, err := ch.QueueDeclare(name, true, false, false, false, nil)
		return err
	})
	return name
}

func (p *publisher) publishAll(t testing.TB, exchange, key string, n int) []error {
	t.Helper()
	outcomes := make([]error, n)
	p.publish(t.Context(), n, func(i int, m *message) error {
		*m = message{amqp091.Publishing{MessageId: leasebus.NewID().String(), Body: []byte{byte(i)}}, exchange, key}
		return nil
	}, func(i int, err error) { outcomes[i] = err })
	return outcomes
}

// What others had on the channel when it was closed was confirmed before, or is unknown; what was not sent yet is sent
// on the next one.
func TestPublisher_S41_C7_9_a_neighbour_closes_the_channel(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dialIn(t, rabbit.URL())
	queue := classicQueue(t, rabbit, "neighbour")
	missing := rabbit.Queue(t, "exchange")
	var both sync.WaitGroup
	both.Go(func() {
		unknown, confirmed := 0, 0
		for i, err := range b.publisher.publishAll(t, "", queue, 5000) {
			switch {
			case err == nil:
				confirmed++
			case errors.Is(err, leasebus.ErrOutcomeUnknown):
				unknown++
			default:
				t.Errorf("message %d: %v, want stored or unknown", i, err)
			}
		}
		if stored := rabbit.Ready(t, queue); stored < confirmed || stored > confirmed+unknown {
			t.Errorf("%d messages are stored, %d were confirmed and of %d it is unknown", stored, confirmed, unknown)
		}
	})
	both.Go(func() {
		for i := range 5 {
			err := b.publisher.publishAll(t, missing, "key", 1)[0]
			if !errors.Is(err, ErrRefused) {
				t.Errorf("message %d to a missing exchange: %v", i, err)
			}
		}
	})
	both.Wait()
}
