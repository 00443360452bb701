package engine

import (
	"context"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/proto"

	benchv1 "github.com/leasebus/leasebus/bench/gen/bench/v1"
)

// Messages that a subscriber reads in one transaction, which it holds open until all of them are acknowledged.
const (
	watermillDefaultBatch = 100
	watermillBestBatch    = 2000
)

const watermillTopic = "task"

func watermillEngine(name string, batch int) Engine {
	return Engine{
		Name: name, About: fmt.Sprintf("watermill-sql's queue, deleting when acknowledged, in batches of %d; no leases", batch),
		Setup: func(_ context.Context, pool *pgxpool.Pool) error {
			s, err := watermillSubscriber(pool, batch)
			if err != nil {
				return err
			}
			return s.SubscribeInitialize(watermillTopic)
		},
		Open: func(ctx context.Context, dsn string, o Options) (Bus, error) {
			if err := onlyOneQueue(o); err != nil {
				return nil, err
			}
			pool, err := openPool(ctx, dsn, 0)
			if err != nil {
				return nil, err
			}
			publisher, err := watermillPublisher(sql.BeginnerFromPgx(pool))
			if err != nil {
				pool.Close()
				return nil, err
			}
			return &watermillBus{pool: pool, publisher: publisher, batch: batch}, nil
		},
	}
}

func watermillSchema(batch int) sql.PostgreSQLQueueSchema {
	return sql.PostgreSQLQueueSchema{
		GeneratePayloadType: func(string) string { return "BYTEA" },
		SubscribeBatchSize:  batch,
	}
}

func watermillPublisher(db sql.ContextExecutor) (*sql.Publisher, error) {
	p, err := sql.NewPublisher(db, sql.PublisherConfig{SchemaAdapter: watermillSchema(0)}, watermill.NopLogger{})
	if err != nil {
		return nil, fmt.Errorf("watermill: %w", err)
	}
	return p, nil
}

func watermillSubscriber(pool *pgxpool.Pool, batch int) (*sql.Subscriber, error) {
	s, err := sql.NewSubscriber(sql.BeginnerFromPgx(pool), sql.SubscriberConfig{
		SchemaAdapter:  watermillSchema(batch),
		OffsetsAdapter: sql.PostgreSQLQueueOffsetsAdapter{DeleteOnAck: true},
	}, watermill.NopLogger{})
	if err != nil {
		return nil, fmt.Errorf("watermill: %w", err)
	}
	return s, nil
}

type watermillBus struct {
	pool      *pgxpool.Pool
	publisher *sql.Publisher
	batch     int
}

func (b *watermillBus) Publish(ctx context.Context, m Message) error {
	return b.PublishBatch(ctx, []Message{m})
}

func (b *watermillBus) PublishBatch(ctx context.Context, batch []Message) error {
	messages, err := watermillMessages(ctx, batch)
	if err != nil {
		return err
	}
	return watermillError(b.publisher.Publish(watermillTopic, messages...))
}

func (b *watermillBus) PublishTx(ctx context.Context, m Message) error {
	messages, err := watermillMessages(ctx, []Message{m})
	if err != nil {
		return err
	}
	return inTx(ctx, b.pool, func(tx pgx.Tx) error {
		publisher, err := watermillPublisher(sql.TxFromPgx(tx))
		if err != nil {
			return err
		}
		return watermillError(publisher.Publish(watermillTopic, messages...))
	})
}

func watermillMessages(ctx context.Context, batch []Message) ([]*message.Message, error) {
	messages := make([]*message.Message, len(batch))
	for i := range batch {
		if batch[i].Delay > 0 {
			return nil, fmt.Errorf("watermill: delays: %w", ErrUnsupported)
		}
		payload, err := proto.Marshal(taskOf(batch[i]))
		if err != nil {
			return nil, fmt.Errorf("watermill: encode: %w", err)
		}
		messages[i] = message.NewMessageWithContext(ctx, watermill.NewUUID(), payload)
	}
	return messages, nil
}

func watermillError(err error) error {
	if err != nil {
		return fmt.Errorf("watermill: %w", err)
	}
	return nil
}

// Work has one subscriber: its rows are locked, so a second one would wait for the first.
func (b *watermillBus) Work(ctx context.Context, handle Handler) error {
	s, err := watermillSubscriber(b.pool, b.batch)
	if err != nil {
		return err
	}
	messages, err := s.Subscribe(context.WithoutCancel(ctx), watermillTopic)
	if err != nil {
		return watermillError(err)
	}
	go func() {
		<-ctx.Done()
		_ = s.Close() // always nil
	}()
	for m := range messages {
		var task benchv1.Task
		if err := proto.Unmarshal(m.Payload, &task); err != nil {
			return fmt.Errorf("watermill: decode: %w", err)
		}
		handle(ctx, Message{PublishedAt: task.GetPublishedAt(), Body: task.GetBody()})
		m.Ack()
	}
	return nil
}

func (b *watermillBus) Left(ctx context.Context) (int64, error) {
	return count(ctx, b.pool, `SELECT count(*) FROM watermill_task`)
}

func (b *watermillBus) Close() { b.pool.Close() }
