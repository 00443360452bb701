package engine

import (
	"context"

	leasebus "github.com/leasebus/leasebus/runtime"
	"google.golang.org/protobuf/proto"

	benchv1 "github.com/leasebus/leasebus/bench/gen/bench/v1"
	"github.com/leasebus/leasebus/bench/gen/bench/v1/benchv1leasebus"
)

//go:generate go run ../queues

// queue is what is generated for one message type, without the type.
type queue struct {
	publish      func(ctx context.Context, via leasebus.Publisher, m Message) error
	publishBatch func(ctx context.Context, batch []Message) error
	register     func(p *leasebus.Processor, handle Handler) error
	stats        func(ctx context.Context) (leasebus.QueueStats, error)
}

// queueMaker opens a queue of a store.
type queueMaker func(store leasebusStore) (queue, error)

// queueOf makes a queue of what is generated for a message type.
func queueOf[M carrier](
	newPublisher func(leasebus.Publisher, ...leasebus.PublisherOption) (*leasebus.TypedPublisher[M], error),
	newManager func(leasebus.Operator, ...leasebus.ManagerOption) *leasebus.TypedManager[M],
	register func(*leasebus.Processor, func(context.Context, M) error) error,
	message func(Message) M,
) queueMaker {
	return func(store leasebusStore) (queue, error) {
		publisher, err := newPublisher(store)
		if err != nil {
			return queue{}, err
		}
		return queue{
			publish: func(ctx context.Context, via leasebus.Publisher, m Message) error {
				to := publisher
				if via != nil {
					to = publisher.Via(via)
				}
				_, err := to.Publish(ctx, message(m), delayOf(m)...)
				return err
			},
			publishBatch: func(ctx context.Context, batch []Message) error {
				messages := make([]M, len(batch))
				for i := range batch {
					messages[i] = message(batch[i])
				}
				_, err := publisher.PublishBatch(ctx, messages, delayOf(batch[0])...)
				return err
			},
			register: func(p *leasebus.Processor, handle Handler) error {
				return register(p, func(ctx context.Context, m M) error {
					handle(ctx, Message{PublishedAt: m.GetPublishedAt(), Body: m.GetBody()})
					return nil
				})
			},
			stats: newManager(store).Stats,
		}, nil
	}
}

// carrier is what the messages of the benchmarks have in common.
type carrier interface {
	proto.Message
	GetPublishedAt() int64
	GetBody() string
}

func delayOf(m Message) []leasebus.PublishOption {
	if m.Delay == 0 {
		return nil
	}
	return []leasebus.PublishOption{leasebus.Delay(m.Delay)}
}

func taskOf(m Message) *benchv1.Task {
	return &benchv1.Task{PublishedAt: m.PublishedAt, Body: m.Body}
}

// taskQueue is the one queue of all cases but those of many.
var taskQueue = queueOf(benchv1leasebus.NewTaskPublisher, benchv1leasebus.NewTaskManager, //nolint:gochecknoglobals // see manyQueues
	func(p *leasebus.Processor, handle func(context.Context, *benchv1.Task) error) error {
		return benchv1leasebus.RegisterTaskHandler(p, benchv1leasebus.TaskHandlerFunc(handle))
	}, taskOf)
