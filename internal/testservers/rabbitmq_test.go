//go:build unix

package testservers

import (
	"errors"
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
)

func TestRabbitMQ_QueuesOfATestAreItsOwn(t *testing.T) { //nolint:tparallel // what follows looks at what the subtest left behind
	t.Parallel()
	broker := RabbitMQ(t)
	var first string
	t.Run("test", func(t *testing.T) {
		var second string
		first, second = broker.Queue(t, "orders", ".dlq"), broker.Queue(t, "orders")
		if first == second {
			t.Errorf("two queues have the name %s", first)
		}
		broker.Do(t, func(ch *amqp.Channel) error {
			return errors.Join(declare(ch, first), declare(ch, first+".dlq"), publish(t.Context(), ch, first))
		})
		if n := broker.Ready(t, first); n != 1 {
			t.Errorf("%d messages, want 1", n)
		}
		if all := broker.Take(t, first); len(all) != 1 {
			t.Errorf("took %d messages, want 1", len(all))
		}
	})
	for _, queue := range []string{first, first + ".dlq"} {
		err := broker.do(func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
			return err
		})
		var closed *amqp.Error
		if !errors.As(err, &closed) || closed.Code != amqp.NotFound {
			t.Errorf("queue %s is still there: %v", queue, err)
		}
	}
}

func TestRabbitMQ_BrokerOfTheEnvironment(t *testing.T) {
	broker := RabbitMQ(t)
	for _, secret := range []string{"amqp://somebody:not-for-logs@127.0.0.1:1/", "127.0.0.1:not-for-logs"} {
		t.Setenv(RabbitMQEnv, secret)
		_, err := findRabbitMQ(t.Context())
		if err == nil || !strings.Contains(err.Error(), RabbitMQEnv) || strings.Contains(err.Error(), "not-for-logs") {
			t.Errorf("%s: error %v; want one that names %s and no password", secret, err, RabbitMQEnv)
		}
	}
	t.Setenv(RabbitMQEnv, broker.URL())
	if url, err := findRabbitMQ(t.Context()); err != nil || url != broker.URL() {
		t.Errorf("found %q, %v; want %q", url, err, broker.URL())
	}
	t.Setenv(RabbitMQEnv, strings.Replace(broker.URL(), "guest:", "nobody:", 1))
	if _, err := findRabbitMQ(t.Context()); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("error %v; want one that says that access is refused", err)
	}
}

func TestBefore310(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]bool{"3.9.29": true, "2.8.7": true, "3.10.8": false, "3.13.0-rc.1": false, "4.1.0": false, "": false} {
		if got := before310(version); got != want {
			t.Errorf("%q: %v, want %v", version, got, want)
		}
	}
}

func TestRabbit_At(t *testing.T) {
	t.Parallel()
	broker := (&Rabbit{url: "amqp://ann:s%2Ft@broker.example:5671/a%2Fb"}).At("127.0.0.1:7")
	uri, err := amqp.ParseURI(broker.URL())
	if err != nil {
		t.Fatal(err)
	}
	if uri.Host != "127.0.0.1" || uri.Port != 7 || uri.Username != "ann" || uri.Password != "s/t" || uri.Vhost != "a/b" {
		t.Errorf("at another address: %+v", uri)
	}
}
