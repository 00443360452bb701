package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"

	benchv1 "github.com/leasebus/leasebus/bench/gen/bench/v1"
	"github.com/leasebus/leasebus/bench/gen/bench/v1/benchv1leasebus"
)

func amqpEngine(classic bool) Engine {
	name, _ := amqpKind(AMQP, classic)
	options := []amqp.Option{amqp.WithLogger(discard())}
	if classic {
		options = append(options, amqp.WithClassicQueues())
	}
	task, flaky := benchv1leasebus.TaskPolicy(), benchv1leasebus.FlakyPolicy()
	return Engine{
		Name: name, About: "the generated API, default settings",
		Clear: func(_ context.Context, url string) error {
			topology, err := amqp.TopologyOf([]*leasebus.Policy{&task, &flaky}, options...)
			if err != nil {
				return fmt.Errorf("topology: %w", err)
			}
			var names []string
			for _, q := range topology.Queues {
				names = append(names, q.Name)
			}
			return amqpClear(url, names...)
		},
		Open: func(ctx context.Context, url string, o Options) (Bus, error) {
			if err := onlyOneQueue(o); err != nil {
				return nil, err
			}
			policy, maker := &task, taskQueue
			if o.Failing {
				policy, maker = &flaky, flakyQueue
			}
			return openAMQP(ctx, url, policy, maker, options)
		},
	}
}

func openAMQP(ctx context.Context, url string, policy *leasebus.Policy, maker queueMaker, options []amqp.Option) (*amqpBus, error) {
	broker, err := amqp.Dial(ctx, url, options...)
	if err != nil {
		return nil, err
	}
	topology, err := broker.Topology(policy)
	if err == nil {
		err = broker.Declare(ctx, topology)
	}
	var q queue
	if err == nil {
		q, err = maker(broker)
	}
	if err != nil {
		return nil, errors.Join(err, broker.Close())
	}
	return &amqpBus{&leasebusBus{store: broker, queues: []queue{q}, close: func() { _ = broker.Close() }}}, nil
}

// amqpBus is one whose store cannot count what consumers hold.
type amqpBus struct{ *leasebusBus }

func (b *amqpBus) Left(ctx context.Context) (int64, error) {
	left, err := b.leasebusBus.Left(ctx)
	if p := b.working.Load(); p != nil {
		left += int64(p.Held() + p.InFlight())
	}
	return left, err
}

func (*amqpBus) Claim(context.Context, int, string) (time.Duration, error) { return 0, ErrUnsupported }

var errFails = errors.New("this attempt fails")

// flakyQueue is taskQueue with messages whose first attempts may fail.
func flakyQueue(store leasebusStore) (queue, error) {
	message := func(m Message) *benchv1.Flaky {
		return &benchv1.Flaky{PublishedAt: m.PublishedAt, Body: m.Body, Fails: int32(m.Fails)} //nolint:gosec // few
	}
	q, err := queueOf(benchv1leasebus.NewFlakyPublisher, benchv1leasebus.NewFlakyManager, nil, message)(store)
	q.register = func(p *leasebus.Processor, handle Handler) error {
		return benchv1leasebus.RegisterFlakyHandler(p, benchv1leasebus.FlakyHandlerFunc(func(ctx context.Context, m *benchv1.Flaky) error {
			if d, _ := leasebus.DeliveryFrom(ctx); d.Attempt() <= int(m.GetFails()) {
				return errFails
			}
			handle(ctx, Message{PublishedAt: m.GetPublishedAt(), Body: m.GetBody()})
			return nil
		}))
	}
	return q, err
}
