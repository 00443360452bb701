package amqp_test

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// ladder is what all topologies end with.
const ladder = `queue leasebus.delay.1s: waits of 1s for all queues
    x-dead-letter-exchange = leasebus.delay.due
    x-dead-letter-strategy = at-least-once
    x-message-ttl = 1000
    x-overflow = reject-publish
    x-queue-type = quorum
`

func TestTopology_is_what_the_policies_need(t *testing.T) {
	t.Parallel()
	policy := leasebus.DefaultPolicy("orders.v1.OrderPlaced", "orders")
	policy.Retry = leasebus.FixedRetry(3, 90*time.Second)
	policy.DeadLetter.InvalidQueue = "orders.invalid"
	got, err := amqp.TopologyOf([]*leasebus.Policy{&policy}, amqp.WithExchange("events", "topic"))
	if err != nil {
		t.Fatal(err)
	}
	text := got.String()
	for _, want := range []string{
		"exchange events (topic)\n",
		`queue orders.dlq: dead letters
    x-queue-type = quorum
queue orders.invalid: invalid messages
    x-queue-type = quorum
queue orders: messages of orders.v1.OrderPlaced
    x-dead-letter-exchange = 
    x-dead-letter-routing-key = orders.dlq
    x-dead-letter-strategy = at-least-once
    x-overflow = reject-publish
    x-queue-type = quorum
queue orders.retry.90s: waits of 90s for orders
    x-dead-letter-exchange = 
    x-dead-letter-routing-key = orders
    x-dead-letter-strategy = at-least-once
    x-message-ttl = 90000
    x-overflow = reject-publish
    x-queue-type = quorum
` + ladder,
		"binding events -> orders, key \"orders\"\n",
		"exchange leasebus.delay.1h (fanout)\n",
		"exchange leasebus.delay.due (direct)\n    alternate-exchange = leasebus.delay.lost\n",
		"binding leasebus.delay.due -> orders, key \"orders\"\n",
		"binding leasebus.delay.lost -> leasebus.delay.lost, key \"\"\n",
		"binding leasebus.delay.1h -> leasebus.delay.1h, key \"\"\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the topology lacks\n%s\nit is\n%s", want, text)
		}
	}
}

func TestTopology_of_classic_queues(t *testing.T) {
	t.Parallel()
	policy := leasebus.DefaultPolicy("orders.v1.OrderPlaced", "orders")
	policy.Retry = leasebus.NoRetry()
	got, err := amqp.TopologyOf([]*leasebus.Policy{&policy}, amqp.WithClassicQueues())
	if err != nil {
		t.Fatal(err)
	}
	want := `queue orders.dlq: dead letters
    x-queue-type = classic
    x-queue-version = 2
queue orders: messages of orders.v1.OrderPlaced
    x-dead-letter-exchange = 
    x-dead-letter-routing-key = orders.dlq
    x-queue-type = classic
    x-queue-version = 2
` + ladder // which all services share, whatever their own queues are
	if text := got.String(); !strings.Contains(text, want) {
		t.Errorf("the topology lacks\n%s\nit is\n%s", want, text)
	}
}

func TestTopology_refuses(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("q", 250)
	for _, c := range []struct {
		name     string
		policies func(a, b *leasebus.Policy)
		want     string
	}{
		{"a name that is too long with its suffix", func(a, _ *leasebus.Policy) {
			a.Queue, a.DeadLetter.Queue = long, "dead"
		}, `"` + long + `.retry.10s" is 260 bytes; allowed are 1 to 255`},
		{"a queue without a name", func(a, _ *leasebus.Policy) { a.DeadLetter.Queue = "" }, "is 0 bytes"},
		{"one queue for two types", func(_, b *leasebus.Policy) { b.Queue = "a" }, `queue "a" is to be for messages of test.A, and for messages of test.B`},
		{"dead letters in a queue of messages", func(_, b *leasebus.Policy) { b.DeadLetter.Queue = "a" }, `queue "a" is to be for messages of test.A, and for dead letters`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			a, b := leasebus.DefaultPolicy("test.A", "a"), leasebus.DefaultPolicy("test.B", "b")
			c.policies(&a, &b)
			if _, err := amqp.TopologyOf([]*leasebus.Policy{&a, &b}); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

func TestTopology_shares_a_queue_of_dead_letters(t *testing.T) {
	t.Parallel()
	a, b := leasebus.DefaultPolicy("test.A", "a"), leasebus.DefaultPolicy("test.B", "b")
	a.DeadLetter.Queue, b.DeadLetter.Queue = "dead", "dead"
	got, err := amqp.TopologyOf([]*leasebus.Policy{&a, &b})
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(got.String(), "queue dead:"); n != 1 {
		t.Errorf("the shared queue is there %d times, want 1:\n%v", n, got)
	}
}

func TestTopology_S44_limits_of_deliveries_by_server_version(t *testing.T) {
	t.Parallel()
	policy := leasebus.DefaultPolicy("orders.v1.OrderPlaced", "orders")
	topology, err := amqp.TopologyOf([]*leasebus.Policy{&policy})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		major int
		limit any
	}{{3, nil}, {4, -1.0}, {5, -1.0}} {
		text, err := topology.Definitions("/", c.major)
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range definitionsOf(t, text).Queues {
			if q.Arguments["x-delivery-limit"] != c.limit {
				t.Errorf("RabbitMQ %d: queue %s has the limit %v, want %v", c.major, q.Name, q.Arguments["x-delivery-limit"], c.limit)
			}
		}
	}
	if _, err := topology.Definitions("/", 2); err == nil {
		t.Error("definitions for RabbitMQ 2 were written, want an error")
	}
}

type definitions struct {
	Queues []struct {
		Name      string         `json:"name"`
		Arguments map[string]any `json:"arguments"`
	} `json:"queues"`
}

func definitionsOf(t *testing.T, text []byte) (d definitions) {
	t.Helper()
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return d
}

func TestDeclare_S44_C8_1_tells_what_differs(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL())
	const limit = "With that limit RabbitMQ takes messages away"
	for _, c := range []struct {
		name string
		// change is made to the right arguments before the queue is declared with them.
		change func(args amqp091.Table)
		want   amqp.MismatchError
		text   string
	}{
		{
			"a missing target", func(args amqp091.Table) { delete(args, "x-dead-letter-routing-key") },
			amqp.MismatchError{Argument: "x-dead-letter-routing-key", Have: "none", Want: "DLQ"},
			"amqp.WithExistingTopology",
		},
		{
			"another target", func(args amqp091.Table) { args["x-dead-letter-routing-key"] = "elsewhere" },
			amqp.MismatchError{Argument: "x-dead-letter-routing-key", Have: "elsewhere", Want: "DLQ"},
			"Delete it",
		},
		{"another type", func(args amqp091.Table) {
			delete(args, "x-queue-type")
			delete(args, "x-dead-letter-strategy")
		}, amqp.MismatchError{Argument: "x-queue-type", Have: "none", Want: "quorum"}, ""},
		{
			"an inherited limit", func(args amqp091.Table) { args["x-delivery-limit"] = int64(20) },
			amqp.MismatchError{Argument: "x-delivery-limit", Have: "20", Want: "none"},
			limit,
		},
		{
			"a lifetime", func(args amqp091.Table) { args["x-message-ttl"] = int64(5) },
			amqp.MismatchError{Argument: "x-message-ttl", Have: "5", Want: "none"},
			"",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			policy := leasebus.DefaultPolicy("test.v1.Thing", rabbit.Queue(t, "differs", ".dlq"))
			policy.Retry = leasebus.NoRetry()
			topology, err := b.Topology(&policy)
			if err != nil {
				t.Fatal(err)
			}
			at := slices.IndexFunc(topology.Queues, func(q amqp.Queue) bool { return q.Name == policy.Queue })
			args := amqp091.Table(topology.Queues[at].Arguments)
			right := maps.Clone(topology.Queues[at].Arguments)
			c.change(args)
			if args["x-dead-letter-routing-key"] == "DLQ" {
				args["x-dead-letter-routing-key"] = policy.DeadLetter.Queue
			}
			rabbit.Do(t, func(ch *amqp091.Channel) error {
				_, err := ch.QueueDeclare(policy.Queue, true, false, false, false, args)
				return err
			})
			topology.Queues[at].Arguments = right

			err = b.Declare(t.Context(), topology)
			want := c.want
			want.Kind, want.Name = "queue", policy.Queue
			if want.Want == "DLQ" {
				want.Want = policy.DeadLetter.Queue
			}
			var got *amqp.MismatchError
			if !errors.As(err, &got) || !errors.Is(err, amqp.ErrMismatch) {
				t.Fatalf("got %v, want a mismatch", err)
			}
			if diff := cmp.Diff(&want, got); diff != "" {
				t.Errorf("the mismatch differs (-want +got):\n%s", diff)
			}
			if !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), policy.Queue) {
				t.Errorf("the error %q does not say %q", err, c.text)
			}
			// Its connection and the rest of the topology are none the worse.
			if _, err := publish(t.Context(), b, outgoing(policy.DeadLetter.Queue, 1)); err != nil {
				t.Errorf("publish to another queue: %v", err)
			}

			asItIs := dial(t, rabbit.URL(), amqp.WithExistingTopology())
			switch err := asItIs.Declare(t.Context(), topology); {
			case c.text == limit && !errors.Is(err, amqp.ErrMismatch):
				t.Errorf("taken as it is: got %v, want the limit refused", err)
			case c.text != limit && err != nil:
				t.Errorf("taken as it is: %v", err)
			}
		})
	}
}

func TestDeclare_twice_is_no_error(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	for _, opts := range [][]amqp.Option{nil, {amqp.WithClassicQueues()}} {
		b := dial(t, rabbit.URL(), opts...)
		policy := declared(t, rabbit, b, "twice")
		topology, err := b.Topology(policy)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Declare(t.Context(), topology); err != nil {
			t.Errorf("declared again: %v", err)
		}
		asItIs := dial(t, rabbit.URL(), append(opts, amqp.WithExistingTopology())...)
		if err := asItIs.Declare(t.Context(), topology); err != nil {
			t.Errorf("taken as it is: %v", err)
		}
	}
}

func TestDeclare_S44_takes_nothing_that_is_not_there(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL(), amqp.WithExistingTopology())
	policy := leasebus.DefaultPolicy("test.v1.Thing", rabbit.Queue(t, "absent", ".dlq"))
	topology, err := b.Topology(&policy)
	if err != nil {
		t.Fatal(err)
	}
	err = b.Declare(t.Context(), topology)
	for _, name := range []string{policy.Queue, policy.DeadLetter.Queue} { // all of it is told at once
		if err == nil || !strings.Contains(err.Error(), "no queue '"+name+"'") {
			t.Errorf("got %v, want an error about %s", err, name)
		}
	}
}

func TestDeclare_tells_of_an_exchange_of_another_kind(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	name := rabbit.Queue(t, "exchange") // a name that nobody else uses
	rabbit.Do(t, func(ch *amqp091.Channel) error {
		return ch.ExchangeDeclare(name, "direct", true, false, false, false, nil)
	})
	t.Cleanup(func() {
		rabbit.Do(t, func(ch *amqp091.Channel) error { return ch.ExchangeDelete(name, false, false) })
	})
	b := dial(t, rabbit.URL(), amqp.WithExchange(name, "topic"))
	policy := leasebus.DefaultPolicy("test.v1.Thing", rabbit.Queue(t, "bound", ".dlq"))
	policy.Retry = leasebus.NoRetry()
	topology, err := b.Topology(&policy)
	if err != nil {
		t.Fatal(err)
	}
	var got *amqp.MismatchError
	if err := b.Declare(t.Context(), topology); !errors.As(err, &got) {
		t.Fatalf("got %v, want a mismatch", err)
	}
	want := &amqp.MismatchError{Kind: "exchange", Name: name, Argument: "type", Have: "direct", Want: "topic"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the mismatch differs (-want +got):\n%s", diff)
	}
}

func TestDeclare_S54_declares_again(t *testing.T) {
	t.Parallel()
	shared := testservers.RabbitMQ(t)
	proxy, rabbit := shared.Proxy(t)
	b := dial(t, rabbit.URL())
	policy := declared(t, shared, b, "again")
	proxy.Down()
	shared.DeleteQueue(t, policy.Queue)
	shared.DeleteQueue(t, policy.DeadLetter.Queue)
	proxy.Up(t)
	// The first may have been sent before the loss was noticed.
	until(t, "a publish succeeds", func() bool {
		_, err := publish(t.Context(), b, outgoing(policy.Queue, 1))
		return err == nil
	})
	if _, err := publish(t.Context(), b, outgoing(policy.DeadLetter.Queue, 1)); err != nil {
		t.Errorf("the queue of dead letters: %v", err)
	}
}

func TestLeftovers_S40_of_an_earlier_policy(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dial(t, rabbit.URL())
	policy := declared(t, rabbit, b, "leftovers") // waits of 5, 10, 20 and 40 seconds
	if found, err := b.Leftovers(t.Context(), policy); err != nil || len(found) != 0 {
		t.Errorf("with the policy as it was: %v, %v; want none", found, err)
	}
	if _, err := publish(t.Context(), b, outgoing(policy.Queue+".retry.40s", 2)); err != nil {
		t.Fatal(err)
	}
	policy.Retry = leasebus.FixedRetry(3, 10*time.Second)
	found, err := b.Leftovers(t.Context(), policy)
	if err != nil {
		t.Fatal(err)
	}
	want := []amqp.Leftover{{policy.Queue + ".retry.20s", 0}, {policy.Queue + ".retry.40s", 2}, {policy.Queue + ".retry.5s", 0}}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Errorf("the leftovers differ (-want +got):\n%s", diff)
	}
}

// What is exported and imported is what would have been declared.
func TestDefinitions_S44_can_be_imported(t *testing.T) {
	t.Parallel()
	rabbit := testservers.PrivateRabbitMQ(t)
	orders, notes := leasebus.DefaultPolicy("test.v1.Order", "orders"), leasebus.DefaultPolicy("test.v1.Note", "notes")
	orders.DeadLetter.InvalidQueue = "orders.invalid"
	notes.DeadLetter = leasebus.DeadLetterPolicy{Discard: true}
	opt := amqp.WithExchange("events", "topic")
	topology, err := amqp.TopologyOf([]*leasebus.Policy{&orders, &notes}, opt)
	if err != nil {
		t.Fatal(err)
	}
	text, err := topology.Definitions("/", 3)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	file := filepath.Join(folder, "definitions.json")
	// rabbitmqctl may run as another user.
	if err := errors.Join(os.WriteFile(file, text, 0o644), os.Chmod(folder, 0o755), os.Chmod(filepath.Dir(folder), 0o755)); err != nil {
		t.Fatal(err)
	}
	rabbit.Ctl(t, "import_definitions", file)
	asItIs := dial(t, rabbit.URL(), opt, amqp.WithExistingTopology())
	if err := asItIs.Declare(t.Context(), topology); err != nil {
		t.Errorf("taken as it was imported: %v", err)
	}
	out := outgoing("orders", 1)
	out = append(out, outgoing("notes", 2)...)
	if _, err := publish(t.Context(), asItIs, out); err != nil { // by the exchange's bindings
		t.Errorf("published to what was imported: %v", err)
	}
	b := dial(t, rabbit.URL(), opt)
	if err := b.Declare(t.Context(), topology); err != nil {
		t.Errorf("declared over what was imported: %v", err)
	}
}
