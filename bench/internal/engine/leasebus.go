package engine

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
	"github.com/leasebus/leasebus/runtime/postgres"

	"github.com/leasebus/leasebus/bench/gen/bench/v1/benchv1leasebus"
)

const bestAbout = "the generated API; 256 handlers, look-ahead 2,000, 16 connections"

func bestInbox() []postgres.Option { return []postgres.Option{postgres.WithConnections(16)} }

func bestProcessor() []leasebus.ProcessorOption {
	return []leasebus.ProcessorOption{leasebus.WithConcurrency(256), leasebus.WithLookAhead(2000)}
}

func leasebusEngine(name, about string, inbox []postgres.Option, processor []leasebus.ProcessorOption) Engine {
	return Engine{
		Name: name, About: about,
		Setup: func(ctx context.Context, pool *pgxpool.Pool) error { return postgres.Migrate(ctx, pool) },
		Open: func(ctx context.Context, dsn string, o Options) (Bus, error) {
			pool, err := openPool(ctx, dsn, 0)
			if err != nil {
				return nil, err
			}
			store, err := postgres.NewInbox(ctx, pool, append([]postgres.Option{postgres.WithLogger(discard())}, inbox...)...)
			if err != nil {
				pool.Close()
				return nil, err
			}
			b := &leasebusBus{
				store: store, options: processor, pool: pool,
				tx:    func(tx pgx.Tx) leasebus.Publisher { return store.Tx(tx) },
				close: func() { _ = store.Close() },
			}
			return b, b.open(o)
		},
	}
}

func memoryEngine() Engine {
	return Engine{
		Name: Memory, About: "the generated API on the store in memory: what the engine alone can do",
		Setup: func(context.Context, *pgxpool.Pool) error { return nil },
		Open: func(_ context.Context, _ string, o Options) (Bus, error) {
			b := &leasebusBus{store: memory.New()}
			return b, b.open(o)
		},
	}
}

// discard is a logger that does all the work and drops the text.
func discard() *slog.Logger {
	return slog.New(slog.NewTextHandler(io.Discard, nil)) //nolint:sloglint // slog.DiscardHandler would save what a user pays
}

type leasebusStore interface {
	leasebus.Publisher
	leasebus.Source
	leasebus.Operator
}

type leasebusBus struct {
	store   leasebusStore
	queues  []queue
	options []leasebus.ProcessorOption
	settled atomic.Int64
	feed    leasebus.Feed // of Claim
	working atomic.Pointer[leasebus.Processor]

	// Of a store on PostgreSQL.
	pool  *pgxpool.Pool
	tx    func(pgx.Tx) leasebus.Publisher
	close func()
}

func (b *leasebusBus) open(o Options) error {
	makers := []queueMaker{taskQueue}
	if o.queues() > 1 {
		makers = manyQueues[:o.queues()]
	}
	for _, open := range makers {
		q, err := open(b.store)
		if err != nil {
			return err
		}
		b.queues = append(b.queues, q)
	}
	return nil
}

func (b *leasebusBus) Publish(ctx context.Context, m Message) error {
	return b.queues[m.Queue].publish(ctx, nil, m)
}

func (b *leasebusBus) PublishBatch(ctx context.Context, batch []Message) error {
	return b.queues[batch[0].Queue].publishBatch(ctx, batch)
}

func (b *leasebusBus) PublishTx(ctx context.Context, m Message) error {
	if b.tx == nil {
		return ErrUnsupported
	}
	return inTx(ctx, b.pool, func(tx pgx.Tx) error { return b.queues[m.Queue].publish(ctx, b.tx(tx), m) })
}

// Work has what a service has: decoding, a logger, and a hook that counts.
func (b *leasebusBus) Work(ctx context.Context, handle Handler) error {
	p, err := leasebus.NewProcessor(b.store, append([]leasebus.ProcessorOption{
		leasebus.WithLogger(discard()),
		leasebus.WithHooks(leasebus.Hooks{Settled: func(leasebus.Delivery, leasebus.Outcome) { b.settled.Add(1) }}),
	}, b.options...)...)
	if err != nil {
		return err
	}
	for _, q := range b.queues {
		if err := q.register(p, handle); err != nil {
			return err
		}
	}
	b.working.Store(p)
	return p.Run(ctx)
}

func (b *leasebusBus) Left(ctx context.Context) (left int64, err error) {
	for _, q := range b.queues {
		s, err := q.stats(ctx)
		if err != nil {
			return 0, err
		}
		left += s.Pending + s.Processing + s.Failed + s.DeadLettered
	}
	return left, nil
}

func (b *leasebusBus) Claim(ctx context.Context, n int, body string) (time.Duration, error) {
	if b.feed == nil {
		policy := benchv1leasebus.TaskPolicy()
		nothing := func() {}
		feed, err := b.store.Subscribe(ctx, leasebus.Subscription{
			Queue: policy.Queue, Types: []string{policy.Type}, Owner: "bench", Policy: &policy, Concurrency: n, Wake: nothing, Check: nothing,
		})
		if err != nil {
			return 0, err
		}
		b.feed = feed
	}
	batch := make([]Message, n)
	for i := range batch {
		batch[i].Body = body
	}
	if err := b.PublishBatch(ctx, batch); err != nil {
		return 0, err
	}
	leases := make([]leasebus.Lease, n)
	began := time.Now()
	got, err := b.feed.Lease(ctx, leases)
	took := time.Since(began)
	if err != nil {
		return 0, err
	}
	if got != n {
		return 0, fmt.Errorf("%d messages were claimed where %d are due", got, n)
	}
	settlements := make([]leasebus.Settlement, n)
	for i := range settlements {
		settlements[i] = leasebus.Settlement{Lease: &leases[i], Kind: leasebus.SettleComplete}
	}
	return took, b.feed.Settle(ctx, settlements)
}

func (b *leasebusBus) Close() {
	if b.feed != nil {
		_ = b.feed.Close()
	}
	if b.close != nil {
		b.close()
	}
	if b.pool != nil {
		b.pool.Close()
	}
}
