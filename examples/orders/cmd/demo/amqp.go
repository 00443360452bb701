package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

const (
	// rabbitmqEnv names the variable with the broker's URL; make demo BACKEND=amqp sets it.
	rabbitmqEnv     = "LEASEBUS_TEST_RABBITMQ"
	defaultRabbitMQ = "amqp://guest:guest@127.0.0.1:5672/" //nolint:gosec // what every RabbitMQ comes with

	// demoLock is a queue that only one connection can have: that of the one demo that runs.
	demoLock = "leasebus.demo"
)

// openAMQP declares the queues of the shop, which must not hold anything yet, and deletes them when the story is over.
func openAMQP(ctx context.Context) (backend, func(), error) { //nolint:ireturn // as every opener
	url := os.Getenv(rabbitmqEnv)
	if url == "" {
		url = defaultRabbitMQ
	}
	conn, ch, err := lock(url)
	if err != nil {
		return nil, nil, err
	}
	broker, err := amqp.Dial(ctx, url)
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	names, err := declare(ctx, broker, ch)
	closeStore := func() {
		_ = broker.Close() // the account is drawn up, nothing can be lost any more
		if err == nil {
			deleteQueues(ch, names)
		}
		_ = conn.Close()
	}
	if err != nil {
		closeStore()
		return nil, nil, err
	}
	return newWitness(broker), closeStore, nil
}

// lock keeps other demos from the broker for as long as the connection is open.
func lock(url string) (*amqp091.Connection, *amqp091.Channel, error) {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to the broker that %s names: %w", rabbitmqEnv, err)
	}
	ch, err := conn.Channel()
	if err == nil {
		_, err = ch.QueueDeclare(demoLock, false, true, true, false, nil)
	}
	var refused *amqp091.Error
	if errors.As(err, &refused) && refused.Code == amqp091.ResourceLocked {
		err = errors.New("another demo runs on this broker")
	}
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return conn, ch, nil
}

// declare makes the queues of the shop and returns their names.
func declare(ctx context.Context, broker *amqp.Broker, ch *amqp091.Channel) (names []string, err error) {
	all := policies()
	shop := make([]*leasebus.Policy, len(all))
	for i := range all {
		shop[i] = &all[i]
	}
	topology, err := broker.Topology(shop...)
	if err != nil {
		return nil, err
	}
	if err := broker.Declare(ctx, topology); err != nil {
		return nil, err
	}
	for _, q := range topology.Queues {
		if !strings.HasPrefix(q.Name, "leasebus.") { // those are everybody's
			names = append(names, q.Name)
		}
	}
	for _, name := range names {
		q, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
		if err != nil {
			return nil, fmt.Errorf("look at queue %s: %w", name, err)
		}
		if q.Messages > 0 || q.Consumers > 0 {
			return nil, fmt.Errorf("queue %s has %d messages and %d consumers already; delete it, or name another broker or virtual host in %s",
				name, q.Messages, q.Consumers, rabbitmqEnv)
		}
	}
	return names, nil
}

func deleteQueues(ch *amqp091.Channel, names []string) {
	for _, name := range names {
		if _, err := ch.QueueDelete(name, false, false, false); err != nil {
			fmt.Fprintf(os.Stderr, "demo: the queue %s is left behind: %v\n", name, err)
			return
		}
	}
}

// witness is a broker together with what was seen of it: RabbitMQ keeps no messages that are completed, and does not
// count those that consumers hold. A service that wants to know would ask its own database.
type witness struct {
	*amqp.Broker

	mu         sync.Mutex
	unfinished map[leasebus.ID]string                   // published and not ended, with their queues
	failures   map[leasebus.ID][]leasebus.FailureRecord // of messages that are not ended
	completed  map[string][]leasebus.CompletedMessage   // by queue
}

func newWitness(b *amqp.Broker) *witness {
	return &witness{
		Broker: b, unfinished: make(map[leasebus.ID]string),
		failures: make(map[leasebus.ID][]leasebus.FailureRecord), completed: make(map[string][]leasebus.CompletedMessage),
	}
}

// Publish implements [leasebus.Publisher].
func (w *witness) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	w.mu.Lock() // before: the message may be handled before the broker has confirmed it
	for i := range out {
		w.unfinished[out[i].ID] = out[i].Queue
	}
	w.mu.Unlock()
	err := w.Broker.Publish(ctx, out, receipts)
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range receipts {
		if receipts[i].Err != nil && !errors.Is(receipts[i].Err, leasebus.ErrOutcomeUnknown) {
			delete(w.unfinished, out[i].ID)
		}
	}
	return err
}

// Replace implements [leasebus.Operator].
func (w *witness) Replace(ctx context.Context, queue string, ref leasebus.DeadLetterRef, edited *leasebus.Envelope, by string) (leasebus.Disposition, error) {
	w.mu.Lock()
	w.unfinished[edited.ID] = queue
	w.mu.Unlock()
	d, err := w.Broker.Replace(ctx, queue, ref, edited, by)
	if err == nil && d != leasebus.DispositionDone {
		w.mu.Lock()
		delete(w.unfinished, edited.ID)
		w.mu.Unlock()
	}
	return d, err
}

// Subscribe implements [leasebus.Source].
func (w *witness) Subscribe(ctx context.Context, sub leasebus.Subscription) (leasebus.Feed, error) {
	feed, err := w.Broker.Subscribe(ctx, sub)
	if err != nil {
		return nil, err
	}
	return witnessed{feed, w}, nil
}

type witnessed struct {
	leasebus.Feed
	w *witness
}

// Settle implements [leasebus.Feed].
func (f witnessed) Settle(ctx context.Context, batch []leasebus.Settlement) error {
	err := f.Feed.Settle(ctx, batch)
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	for i := range batch {
		if batch[i].Result == leasebus.ResultOK {
			f.w.saw(&batch[i])
		}
	}
	return err
}

// saw notes a settlement that the broker has taken.
func (w *witness) saw(s *leasebus.Settlement) {
	id, now := s.Lease.ID, time.Now().UTC()
	if s.Failure != nil {
		w.failures[id] = append(w.failures[id], leasebus.FailureRecord{Failure: *s.Failure, At: now})
	}
	switch s.Kind {
	case leasebus.SettleComplete:
		w.completed[s.Lease.Queue] = append(w.completed[s.Lease.Queue], leasebus.CompletedMessage{
			Envelope: s.Lease.Envelope, Attempts: s.Lease.Attempt, CompletedAt: now, History: w.failures[id],
		})
	case leasebus.SettleDeadLetter, leasebus.SettleDiscard:
	default:
		return
	}
	delete(w.unfinished, id)
	delete(w.failures, id)
}

// Completed implements [leasebus.Operator].
func (w *witness) Completed(_ context.Context, queue string, after leasebus.Cursor, _ int) ([]leasebus.CompletedMessage, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if after != "" {
		return nil, nil // all of them are on the first page
	}
	return slices.Clone(w.completed[queue]), nil
}

// Stats implements [leasebus.Operator].
func (w *witness) Stats(ctx context.Context, queue string) (leasebus.QueueStats, error) {
	stats, err := w.Broker.Stats(ctx, queue)
	w.mu.Lock()
	defer w.mu.Unlock()
	stats.Pending, stats.Failed = 0, 0
	for in := range maps.Values(w.unfinished) {
		if in == queue {
			stats.Pending++
		}
	}
	stats.Completed = int64(len(w.completed[queue]))
	return stats, err
}
