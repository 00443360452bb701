package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"
)

// A publish of watermill's takes a channel of its own until it is confirmed, and a subscription hands out one message
// at a time. So its best is many of both.
const (
	watermillChannels      = 256
	watermillSubscriptions = amqpHandlers
	watermillPrefetch      = amqpPrefetch / watermillSubscriptions
)

func amqpWatermillEngine(classic bool) Engine {
	name, arguments := amqpKind(AMQPWatermill, classic)
	return Engine{
		Name: name,
		About: fmt.Sprintf("watermill-amqp at its best with confirms: %d channels, %d subscriptions with a prefetch of %d each",
			watermillChannels, watermillSubscriptions, watermillPrefetch),
		Clear: func(_ context.Context, url string) error { return amqpClear(url, amqpTask) },
		Open: func(_ context.Context, url string, o Options) (Bus, error) {
			if err := errors.Join(onlyOneQueue(o), noFailing(o)); err != nil {
				return nil, err
			}
			b := &amqpWatermillBus{config: amqpWatermillConfig(url, arguments)}
			if err := b.open(url); err != nil {
				b.Close()
				return nil, err
			}
			return b, nil
		},
	}
}

func amqpWatermillConfig(url string, arguments amqp091.Table) wamqp.Config {
	config := wamqp.NewDurableQueueConfig(url)
	config.Queue.Arguments = arguments
	config.Publish.ConfirmDelivery = true
	config.Publish.Mandatory = true
	config.Publish.ChannelPoolSize = watermillChannels
	config.Consume.Qos.PrefetchCount = watermillPrefetch
	return config
}

type amqpWatermillBus struct {
	config    wamqp.Config
	conn      *amqp091.Connection // for asking only
	publisher *wamqp.Publisher
	depth     *depth
}

func (b *amqpWatermillBus) open(url string) (err error) {
	if b.conn, err = amqp091.Dial(url); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if b.depth, err = newDepth(b.conn); err != nil {
		return err
	}
	if err := amqpQueue(b.depth.ch, b.config.Queue.Arguments); err != nil {
		return err
	}
	b.publisher, err = wamqp.NewPublisher(b.config, watermill.NopLogger{})
	return watermillError(err)
}

func (b *amqpWatermillBus) Publish(ctx context.Context, m Message) error {
	body, err := amqpBody(m)
	if err != nil {
		return err
	}
	return watermillError(b.publisher.Publish(amqpTask, message.NewMessageWithContext(ctx, watermill.NewUUID(), body)))
}

// PublishBatch uses all channels: a call with many messages would wait for each confirm before the next message.
func (b *amqpWatermillBus) PublishBatch(ctx context.Context, batch []Message) error {
	calls, ctx := errgroup.WithContext(ctx)
	calls.SetLimit(watermillChannels)
	for _, m := range batch {
		calls.Go(func() error { return b.Publish(ctx, m) })
	}
	return calls.Wait() //nolint:wrapcheck // Publish says what it is
}

func (*amqpWatermillBus) PublishTx(ctx context.Context, m Message) error { return noTx(ctx, m) }

func (b *amqpWatermillBus) Work(ctx context.Context, handle Handler) error {
	subscriber, err := wamqp.NewSubscriber(b.config, watermill.NopLogger{})
	if err != nil {
		return watermillError(err)
	}
	errs := make([]error, watermillSubscriptions)
	var all sync.WaitGroup
	for i := range watermillSubscriptions {
		messages, err := subscriber.Subscribe(context.WithoutCancel(ctx), amqpTask)
		if err != nil {
			errs[i] = watermillError(err)
			break
		}
		all.Go(func() { errs[i] = b.consume(ctx, messages, handle) })
	}
	<-ctx.Done()
	err = subscriber.Close()
	all.Wait()
	return errors.Join(watermillError(err), errors.Join(errs...))
}

func (b *amqpWatermillBus) consume(ctx context.Context, messages <-chan *message.Message, handle Handler) error {
	for m := range messages {
		b.depth.unacked.Add(1)
		given, err := amqpMessage(m.Payload)
		if err != nil {
			return err
		}
		handle(ctx, given)
		m.Ack()
		b.depth.unacked.Add(-1)
	}
	return nil
}

func (b *amqpWatermillBus) Left(context.Context) (int64, error) { return b.depth.left() }

func (b *amqpWatermillBus) Close() {
	if b.publisher != nil {
		_ = b.publisher.Close()
	}
	if b.conn != nil {
		_ = b.conn.Close()
	}
}
