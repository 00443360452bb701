package engine

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/rabbitmq/amqp091-go"
	"google.golang.org/protobuf/proto"

	benchv1 "github.com/leasebus/leasebus/bench/gen/bench/v1"
)

// The names of the engines on RabbitMQ. Each is there for quorum queues, which leasebus declares by default, and, with
// Classic behind its name, for classic ones.
const (
	AMQP          = "leasebus-amqp"
	AMQPRaw       = "raw-amqp"
	AMQPWatermill = "watermill-amqp" //nolint:gosec // no credentials

	Classic = "-classic"
)

const (
	// amqpWindow is how many messages may be on their way to the broker and not confirmed, for each of the engines.
	amqpWindow = 256
	// amqpHandlers is how many handlers run at a time, for each of the engines.
	amqpHandlers = 64
	// amqpPrefetch is how many deliveries the broker sends ahead: what leasebus asks for with so many handlers.
	amqpPrefetch = 256

	amqpTask = "bench.task"
)

// OnRabbitMQ lists the engines that are measured on a broker. What is called a DSN elsewhere is its URL.
func OnRabbitMQ() (all []Engine) {
	for _, classic := range []bool{false, true} {
		all = append(all, amqpEngine(classic), amqpRawEngine(classic), amqpWatermillEngine(classic))
	}
	return all
}

// amqpKind is the name of an engine, and what to declare its queues with.
func amqpKind(name string, classic bool) (string, amqp091.Table) {
	if classic {
		return name + Classic, amqp091.Table{amqp091.QueueTypeArg: amqp091.QueueTypeClassic}
	}
	return name, amqp091.Table{amqp091.QueueTypeArg: amqp091.QueueTypeQuorum}
}

// amqpQueue declares the one queue of an engine that is not leasebus.
func amqpQueue(ch *amqp091.Channel, arguments amqp091.Table) error {
	if _, err := ch.QueueDeclare(amqpTask, true, false, false, false, arguments); err != nil {
		return fmt.Errorf("declare %s: %w", amqpTask, err)
	}
	return nil
}

// amqpClear deletes queues, so that nothing is left of an earlier trial.
func amqpClear(url string, queues ...string) error {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return fmt.Errorf("clear the broker: %w", err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		return fmt.Errorf("clear the broker: %w", err)
	}
	for _, name := range queues {
		if _, err := ch.QueueDelete(name, false, false, false); err != nil {
			return fmt.Errorf("delete %s: %w", name, err)
		}
	}
	return nil
}

func amqpBody(m Message) ([]byte, error) {
	if m.Delay > 0 || m.Fails > 0 {
		return nil, ErrUnsupported
	}
	body, err := proto.Marshal(taskOf(m))
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return body, nil
}

func amqpMessage(body []byte) (Message, error) {
	var task benchv1.Task
	if err := proto.Unmarshal(body, &task); err != nil {
		return Message{}, fmt.Errorf("decode: %w", err)
	}
	return Message{PublishedAt: task.GetPublishedAt(), Body: task.GetBody()}, nil
}

// depth counts what waits in a queue, and what handlers have and is not acknowledged: only who has it knows that. What is
// on its way to them is in neither.
type depth struct {
	ch      *amqp091.Channel // for asking only
	unacked atomic.Int64
}

func newDepth(conn *amqp091.Connection) (*depth, error) {
	ch, err := conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("open a channel: %w", err)
	}
	return &depth{ch: ch}, nil
}

func (d *depth) left() (int64, error) {
	q, err := d.ch.QueueDeclarePassive(amqpTask, true, false, false, false, nil)
	if err != nil {
		return 0, fmt.Errorf("count what is left: %w", err)
	}
	return int64(q.Messages) + d.unacked.Load(), nil
}

var errReturned = errors.New("a message came back: there is no queue for it")

func noTx(context.Context, Message) error { return ErrUnsupported }
