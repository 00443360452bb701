package engine

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// riverSettings are what River can be told that bears on speed.
type riverSettings struct {
	about string
	// workers is QueueConfig.MaxWorkers, which has no default; River's own examples say 100.
	workers int
	// cooldown and poll are FetchCooldown and FetchPollInterval; 0 = River's default: 100 ms and 1 s.
	cooldown, poll time.Duration
	// connections of the pool; 0 = pgx's default.
	connections int32
	// fast publishes batches by InsertManyFast (COPY) instead of InsertMany.
	fast bool
}

var riverDefault = riverSettings{ //nolint:gochecknoglobals // a constant that Go cannot have
	about:   "100 workers as in its examples, fetch cooldown 100 ms, InsertMany",
	workers: 100,
}

var riverBest = riverSettings{ //nolint:gochecknoglobals // a constant that Go cannot have
	about:   "2,000 workers, fetch cooldown 1 ms, poll 5 ms, 16 connections, InsertManyFast",
	workers: 2000, cooldown: time.Millisecond, poll: 5 * time.Millisecond, connections: 16, fast: true,
}

// riverTask is the same message as the proto's Task, in River's encoding.
type riverTask struct {
	PublishedAt int64  `json:"publishedAt"`
	Body        string `json:"body"`
}

func (riverTask) Kind() string { return "task" }

type riverWorker struct {
	river.WorkerDefaults[riverTask]

	handle Handler
}

func (w *riverWorker) Work(ctx context.Context, job *river.Job[riverTask]) error {
	w.handle(ctx, Message{PublishedAt: job.Args.PublishedAt, Body: job.Args.Body})
	return nil
}

func riverEngine(name string, s riverSettings) Engine {
	return Engine{
		Name: name, About: s.about,
		Setup: func(ctx context.Context, pool *pgxpool.Pool) error {
			migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
			if err != nil {
				return fmt.Errorf("river: %w", err)
			}
			_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
			return err //nolint:wrapcheck // the caller names the engine
		},
		Open: func(ctx context.Context, dsn string, o Options) (Bus, error) {
			pool, err := openPool(ctx, dsn, s.connections)
			if err != nil {
				return nil, err
			}
			client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
				Logger: discard(), FetchCooldown: s.cooldown, FetchPollInterval: s.poll,
			})
			if err != nil {
				pool.Close()
				return nil, fmt.Errorf("river: %w", err)
			}
			return &riverBus{settings: s, pool: pool, client: client, queues: o.queues()}, nil
		},
	}
}

type riverBus struct {
	settings riverSettings
	pool     *pgxpool.Pool
	client   *river.Client[pgx.Tx] // publishes only
	queues   int
}

func (b *riverBus) Publish(ctx context.Context, m Message) error {
	args, opts := riverInsert(m)
	_, err := b.client.Insert(ctx, args, opts)
	return riverError(err)
}

func (b *riverBus) PublishBatch(ctx context.Context, batch []Message) error {
	params := make([]river.InsertManyParams, len(batch))
	for i := range batch {
		params[i].Args, params[i].InsertOpts = riverInsert(batch[i])
	}
	var err error
	if b.settings.fast {
		_, err = b.client.InsertManyFast(ctx, params)
	} else {
		_, err = b.client.InsertMany(ctx, params)
	}
	return riverError(err)
}

func (b *riverBus) PublishTx(ctx context.Context, m Message) error {
	return inTx(ctx, b.pool, func(tx pgx.Tx) error {
		args, opts := riverInsert(m)
		_, err := b.client.InsertTx(ctx, tx, args, opts)
		return riverError(err)
	})
}

func riverInsert(m Message) (riverTask, *river.InsertOpts) {
	var opts *river.InsertOpts
	if m.Queue > 0 || m.Delay > 0 {
		opts = &river.InsertOpts{Queue: riverQueue(m.Queue)}
		if m.Delay > 0 {
			opts.ScheduledAt = time.Now().Add(m.Delay)
		}
	}
	return riverTask{PublishedAt: m.PublishedAt, Body: m.Body}, opts
}

func riverQueue(number int) string {
	if number == 0 {
		return river.QueueDefault
	}
	return "queue" + strconv.Itoa(number)
}

func riverError(err error) error {
	if err != nil {
		return fmt.Errorf("river: %w", err)
	}
	return nil
}

const riverStop = 30 * time.Second

func (b *riverBus) Work(ctx context.Context, handle Handler) error {
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{handle: handle})
	queues := make(map[string]river.QueueConfig, b.queues)
	for i := range b.queues {
		queues[riverQueue(i)] = river.QueueConfig{MaxWorkers: b.settings.workers}
	}
	client, err := river.NewClient(riverpgxv5.New(b.pool), &river.Config{
		Logger: discard(), Queues: queues, Workers: workers,
		FetchCooldown: b.settings.cooldown, FetchPollInterval: b.settings.poll,
	})
	if err != nil {
		return riverError(err)
	}
	background := context.WithoutCancel(ctx)
	if err := client.Start(background); err != nil {
		return riverError(err)
	}
	<-ctx.Done()
	bound, cancel := context.WithTimeout(background, riverStop)
	defer cancel()
	return riverError(client.Stop(bound))
}

func (b *riverBus) Left(ctx context.Context) (int64, error) {
	return count(ctx, b.pool, "SELECT count(*) FROM river_job WHERE state <> 'completed'")
}

func (b *riverBus) Close() { b.pool.Close() }
