package amqp_test

import (
	"context"
	"slices"
	"testing"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// part is what a broker says about one of its connections.
func part(t testing.TB, b *amqp.Broker, name string) leasebus.HealthComponent {
	t.Helper()
	all := b.CheckHealth(t.Context())
	i := slices.IndexFunc(all, func(c leasebus.HealthComponent) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("there is no part %q: %+v", name, all)
	}
	return all[i]
}

func TestHealth_S52_S54_S56_each_connection_by_name(t *testing.T) {
	t.Parallel()
	proxy, rabbit := testservers.RabbitMQ(t).Proxy(t)
	s := onStage(t, rabbit, "health", nil, amqp.WithName("shop"))
	release := make(chan struct{})
	w := s.work(func(context.Context, leasebus.Delivery, string) error {
		<-release
		return nil
	}, leasebus.WithConcurrency(1))
	consumer := "consume " + s.policy.Queue
	s.send("a", "b", "c")
	until(t, "all were delivered", func() bool { return part(t, s.broker, consumer).Details["unacked"] == 3 })
	if c := part(t, s.broker, consumer); c.Status != leasebus.HealthUp || c.Details["prefetch"] != 4 || c.Details["server"] != rabbit.Addr() {
		t.Errorf("the consumer: %+v, want up", c)
	}
	if c := part(t, s.broker, "publish"); c.Status != leasebus.HealthUp {
		t.Errorf("the publisher: %+v, want up", c)
	}

	proxy.Down()
	for _, name := range []string{consumer, "publish"} {
		until(t, name+" is down", func() bool {
			c := part(t, s.broker, name)
			return c.Status == leasebus.HealthDown && c.Details["error"] != nil
		})
	}
	proxy.Up(t)
	close(release)
	until(t, "all is up again", func() bool {
		return !slices.ContainsFunc(s.broker.CheckHealth(t.Context()), func(c leasebus.HealthComponent) bool { return c.Status != leasebus.HealthUp })
	})
	until(t, "all were handled", func() bool { return w.Stats().Succeeded >= 3 && part(t, s.broker, consumer).Details["unacked"] == 0 })
}

func TestHealth_S56_down_after_close(t *testing.T) {
	t.Parallel()
	b := dial(t, testservers.RabbitMQ(t).URL())
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if all := b.CheckHealth(t.Context()); len(all) != 1 || all[0].Status != leasebus.HealthDown {
		t.Errorf("%+v, want down", all)
	}
}
