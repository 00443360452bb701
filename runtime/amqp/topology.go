package amqp

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Topology is what a virtual host has to hold for a set of messages: a value, to be looked at, exported and declared.
// [TopologyOf] and [Broker.Topology] make one.
type Topology struct {
	Exchanges []Exchange
	Queues    []Queue
	Bindings  []Binding
}

// Exchange is a durable exchange.
type Exchange struct {
	Name string
	// Kind is direct, topic, fanout or headers.
	Kind string
	// Alternate is the exchange that takes what this one has no queue for; "" = none.
	Alternate string
}

// Queue is a durable queue.
type Queue struct {
	Name string
	// Purpose is what it is for, in a few words.
	Purpose string
	// Arguments are those that it is declared with, by their names in RabbitMQ. What depends on the server's version is
	// not among them: see [Topology.Definitions].
	Arguments map[string]any
}

// Binding leads the messages of an exchange that have this routing key to a queue.
type Binding struct {
	Exchange, Queue, Key string
}

// Arguments of queues.
const (
	argType         = "x-queue-type"
	argVersion      = "x-queue-version"
	argOverflow     = "x-overflow"
	argStrategy     = "x-dead-letter-strategy"
	argDeadExchange = "x-dead-letter-exchange"
	argDeadKey      = "x-dead-letter-routing-key"
	argLimit        = "x-delivery-limit"
	argAlternate    = "alternate-exchange"

	typeQuorum = "quorum"
)

// TopologyOf is what the messages of these policies need, with the options that change it: [WithClassicQueues] and
// [WithExchange]. It fails if a name is too long, or if two policies want one queue to be different things.
//
// For each policy there is the queue itself; the queue of dead letters and that of invalid messages; and a queue for
// each retry delay that may be spent in the broker. All share a ladder of queues for delays that no policy names. Each
// queue passes on what it cannot keep: none drops a message.
func TopologyOf(policies []*leasebus.Policy, opts ...Option) (*Topology, error) {
	o, err := optionsOf(opts)
	if err != nil {
		return nil, err
	}
	return o.topologyOf(policies...)
}

// Topology is what the messages of these policies need, with this broker's options; see [TopologyOf].
func (b *Broker) Topology(policies ...*leasebus.Policy) (*Topology, error) {
	return b.options.topologyOf(policies...)
}

func (o *options) topologyOf(policies ...*leasebus.Policy) (*Topology, error) {
	t := &Topology{}
	var problems []error
	for _, p := range policies {
		problems = append(problems, t.addPolicy(p, o))
	}
	t.addLadder()
	problems = append(problems, t.checkNames())
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	return t, nil
}

// addPolicy adds a policy's queues, those first that others pass messages to.
func (t *Topology) addPolicy(p *leasebus.Policy, o *options) error {
	source := o.ofType()
	var problems []error
	if dead := p.DeadLetter; !dead.Discard {
		problems = append(problems, t.addQueue(dead.Queue, "dead letters", o.ofType()))
		if dead.InvalidQueue != "" {
			problems = append(problems, t.addQueue(dead.InvalidQueue, "invalid messages", o.ofType()))
		}
		source[argDeadExchange], source[argDeadKey] = "", dead.Queue
		o.neverDrop(source)
	}
	problems = append(problems, t.addQueue(p.Queue, "messages of "+p.Type, source))
	for _, r := range rungsOf(p.Queue, p.Retry) {
		args := o.ofType()
		maps.Copy(args, r.arguments())
		o.neverDrop(args)
		problems = append(problems, t.addQueue(r.name, "waits of "+delayName(r.delay)+" for "+p.Queue, args))
	}
	t.Bindings = append(t.Bindings, Binding{ladderDue, p.Queue, p.Queue})
	if o.exchange.Name != "" {
		if !slices.Contains(t.Exchanges, o.exchange) {
			t.Exchanges = append(t.Exchanges, o.exchange)
		}
		t.Bindings = append(t.Bindings, Binding{o.exchange.Name, p.Queue, p.Queue})
	}
	return errors.Join(problems...)
}

// addLadder adds the shared ladder. Its queues are quorum queues whatever the options say: all services of the virtual
// host have to agree on them.
func (t *Topology) addLadder() {
	var quorum options
	for _, r := range sharedLadder() {
		args := quorum.ofType()
		maps.Copy(args, r.arguments())
		quorum.neverDrop(args)
		_ = t.addQueue(r.name, "waits of "+delayName(r.delay)+" for all queues", args) // a name of ours
		// The routing key is the queue that the message returns to, so that one queue can serve all.
		t.Exchanges = append(t.Exchanges, Exchange{Name: r.name, Kind: amqp091.ExchangeFanout})
		t.Bindings = append(t.Bindings, Binding{r.name, r.name, ""})
	}
	_ = t.addQueue(ladderLost, "messages whose queue was gone when their wait was over", quorum.ofType()) // as above
	t.Exchanges = append(t.Exchanges,
		Exchange{Name: ladderLost, Kind: amqp091.ExchangeFanout},
		Exchange{Name: ladderDue, Kind: amqp091.ExchangeDirect, Alternate: ladderLost})
	t.Bindings = append(t.Bindings, Binding{ladderLost, ladderLost, ""})
}

// ofType are the arguments that make a queue one of the type asked for.
func (o *options) ofType() map[string]any {
	if o.classic {
		return map[string]any{argType: "classic", argVersion: int64(2)}
	}
	return map[string]any{argType: typeQuorum}
}

// neverDrop makes a quorum queue keep what it dead-letters until the other queue has it. Otherwise it would be lost
// where that queue is gone, full, or without a leader. Classic queues cannot.
func (o *options) neverDrop(args map[string]any) {
	if !o.classic {
		args[argStrategy], args[argOverflow] = "at-least-once", "reject-publish"
	}
}

func (t *Topology) addQueue(name, purpose string, args map[string]any) error {
	for _, q := range t.Queues {
		if q.Name != name {
			continue
		}
		if q.Purpose == purpose && reflect.DeepEqual(q.Arguments, args) {
			return nil // dead letters of several policies may share a queue
		}
		return fmt.Errorf("amqp: queue %q is to be for %s, and for %s; give one of them another name", name, q.Purpose, purpose)
	}
	t.Queues = append(t.Queues, Queue{name, purpose, args})
	return nil
}

// checkNames refuses what the protocol cannot carry: the library would shut down the whole connection.
func (t *Topology) checkNames() error {
	var problems []error
	check := func(what, name string) {
		if len(name) > leasebus.MaxNameBytes || name == "" {
			problems = append(problems, fmt.Errorf("amqp: the name of %s %q is %d bytes; allowed are 1 to %d", what, name, len(name), leasebus.MaxNameBytes))
		}
	}
	for _, x := range t.Exchanges {
		check("exchange", x.Name)
	}
	for _, q := range t.Queues {
		check("queue", q.Name)
	}
	return errors.Join(problems...)
}

// String lists the topology, a line for each part.
func (t *Topology) String() string {
	var b strings.Builder
	for _, x := range t.Exchanges {
		fmt.Fprintf(&b, "exchange %s (%s)\n", x.Name, x.Kind)
		if x.Alternate != "" {
			fmt.Fprintf(&b, "    %s = %s\n", argAlternate, x.Alternate)
		}
	}
	for _, q := range t.Queues {
		fmt.Fprintf(&b, "queue %s: %s\n", q.Name, q.Purpose)
		for _, name := range slices.Sorted(maps.Keys(q.Arguments)) {
			fmt.Fprintf(&b, "    %s = %v\n", name, q.Arguments[name])
		}
	}
	for _, each := range t.Bindings {
		fmt.Fprintf(&b, "binding %s -> %s, key %q\n", each.Exchange, each.Queue, each.Key)
	}
	return b.String()
}

// arguments are those that the exchange is declared with.
func (x Exchange) arguments() map[string]any {
	if x.Alternate == "" {
		return nil
	}
	return map[string]any{argAlternate: x.Alternate}
}

// forServer are the arguments for a server of this major version.
//
// Quorum queues count returns, and dead-letter a message that has been returned too often: RabbitMQ 4 after 20, unless
// told otherwise. A drained consumer returns what it has not begun, so every deploy counts. RabbitMQ 3 knows no -1, and
// has no limit by itself.
func (q *Queue) forServer(major int) map[string]any {
	const limited = 4
	if major < limited || q.Arguments[argType] != typeQuorum {
		return q.Arguments
	}
	args := maps.Clone(q.Arguments)
	args[argLimit] = int64(-1)
	return args
}
