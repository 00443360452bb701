package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/google/uuid"
	"github.com/rabbitmq/amqp091-go"
)

// amqpRawEngine is what RabbitMQ and its client can do: loops around the client, mandatory and persistent messages, each
// one confirmed; each delivery acknowledged when its handler has returned.
func amqpRawEngine(classic bool) Engine {
	name, arguments := amqpKind(AMQPRaw, classic)
	return Engine{
		Name: name,
		About: fmt.Sprintf("loops around amqp091-go: at most %d unconfirmed, %d handlers, prefetch %d, single acknowledgements",
			amqpWindow, amqpHandlers, amqpPrefetch),
		Clear: func(_ context.Context, url string) error { return amqpClear(url, amqpTask) },
		Open: func(_ context.Context, url string, o Options) (Bus, error) {
			if err := errors.Join(onlyOneQueue(o), noFailing(o)); err != nil {
				return nil, err
			}
			b := &amqpRawBus{url: url}
			if err := b.open(arguments); err != nil {
				b.Close()
				return nil, err
			}
			return b, nil
		},
	}
}

type amqpRawBus struct {
	url       string
	conn      *amqp091.Connection
	publisher *amqp091.Channel
	window    chan struct{}
	returned  atomic.Int64
	returns   sync.WaitGroup
	depth     *depth
}

func (b *amqpRawBus) open(arguments amqp091.Table) (err error) {
	if b.conn, err = amqp091.Dial(b.url); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if b.publisher, err = b.conn.Channel(); err != nil {
		return fmt.Errorf("open a channel: %w", err)
	}
	if err := amqpQueue(b.publisher, arguments); err != nil {
		return err
	}
	if err := b.publisher.Confirm(false); err != nil {
		return fmt.Errorf("confirm mode: %w", err)
	}
	b.window = make(chan struct{}, amqpWindow)
	returns := b.publisher.NotifyReturn(make(chan amqp091.Return, amqpWindow))
	b.returns.Go(func() {
		for range returns {
			b.returned.Add(1)
		}
	})
	b.depth, err = newDepth(b.conn)
	return err
}

func (b *amqpRawBus) send(ctx context.Context, m Message) (*amqp091.DeferredConfirmation, error) {
	body, err := amqpBody(m)
	if err != nil {
		return nil, err
	}
	confirm, err := b.publisher.PublishWithDeferredConfirmWithContext(ctx, "", amqpTask, true, false, amqp091.Publishing{
		DeliveryMode: amqp091.Persistent, ContentType: "application/x-protobuf", Type: rawType, MessageId: uuid.NewString(), Body: body,
	})
	if err != nil {
		return nil, fmt.Errorf("publish: %w", err)
	}
	return confirm, nil
}

func (b *amqpRawBus) confirmed(ctx context.Context, confirm *amqp091.DeferredConfirmation) error {
	ok, err := confirm.WaitContext(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("confirm: %w", err)
	case !ok:
		return errors.New("the broker refused a message")
	case b.returned.Load() > 0:
		return errReturned
	}
	return nil
}

func (b *amqpRawBus) Publish(ctx context.Context, m Message) error {
	b.window <- struct{}{}
	defer func() { <-b.window }()
	confirm, err := b.send(ctx, m)
	if err != nil {
		return err
	}
	return b.confirmed(ctx, confirm)
}

// PublishBatch slides the window over the batch.
func (b *amqpRawBus) PublishBatch(ctx context.Context, batch []Message) error {
	var pending []*amqp091.DeferredConfirmation
	oldest := func() error {
		err := b.confirmed(ctx, pending[0])
		pending = pending[1:]
		<-b.window
		return err
	}
	for _, m := range batch {
		for taken := false; !taken; {
			select {
			case b.window <- struct{}{}:
				taken = true
			default:
				if len(pending) == 0 { // others have it all
					b.window <- struct{}{}
					taken = true
				} else if err := oldest(); err != nil {
					return err
				}
			}
		}
		confirm, err := b.send(ctx, m)
		if err != nil {
			<-b.window
			return err
		}
		pending = append(pending, confirm)
	}
	for len(pending) > 0 {
		if err := oldest(); err != nil {
			return err
		}
	}
	return nil
}

func (*amqpRawBus) PublishTx(ctx context.Context, m Message) error { return noTx(ctx, m) }

// Work consumes on a connection of its own.
func (b *amqpRawBus) Work(ctx context.Context, handle Handler) error {
	conn, err := amqp091.Dial(b.url)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		return fmt.Errorf("open a channel: %w", err)
	}
	if err := ch.Qos(amqpPrefetch, 0, false); err != nil {
		return fmt.Errorf("prefetch: %w", err)
	}
	const consumer = "bench"
	deliveries, err := ch.Consume(amqpTask, consumer, false, false, false, false, nil)
	if err != nil {
		return fmt.Errorf("consume: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = ch.Cancel(consumer, false) })()
	errs := make([]error, amqpHandlers)
	var all sync.WaitGroup
	for i := range amqpHandlers {
		all.Go(func() {
			for d := range deliveries {
				if ctx.Err() != nil {
					continue // it goes back with the connection
				}
				if errs[i] = errors.Join(errs[i], b.handle(ctx, d, handle)); errs[i] != nil {
					return
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func (b *amqpRawBus) handle(ctx context.Context, d amqp091.Delivery, handle Handler) error {
	b.depth.unacked.Add(1)
	defer b.depth.unacked.Add(-1)
	m, err := amqpMessage(d.Body)
	if err != nil {
		return err
	}
	handle(ctx, m)
	if err := d.Ack(false); err != nil {
		return fmt.Errorf("acknowledge: %w", err)
	}
	return nil
}

func (b *amqpRawBus) Left(context.Context) (int64, error) { return b.depth.left() }

func (b *amqpRawBus) Close() {
	if b.conn != nil {
		_ = b.conn.Close()
	}
	b.returns.Wait()
}
