// Package engine holds the ways of keeping messages in PostgreSQL that are compared, behind one interface.
package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Message is what every engine carries, encoded its own way.
type Message struct {
	// PublishedAt is when it was published, or, if it was scheduled, when it was due: in nanoseconds since 1970.
	PublishedAt int64
	Body        string
	// Queue is the number of its queue, from 0.
	Queue int
	// Delay puts it off.
	Delay time.Duration
	// Fails is how many of its attempts fail, for engines that were opened for that.
	Fails int
}

// Handler takes a message that an engine hands out. It is called concurrently. The raw engines decode nothing, and hand
// out empty messages.
type Handler func(ctx context.Context, m Message)

// Bus is an open connection to an engine's tables. All methods but Work and Close may be called concurrently.
type Bus interface {
	// Publish stores one message.
	Publish(ctx context.Context, m Message) error
	// PublishBatch stores messages of one queue and one delay together.
	PublishBatch(ctx context.Context, batch []Message) error
	// PublishTx stores one message in a transaction that writes something else.
	PublishTx(ctx context.Context, m Message) error
	// Work hands messages to handle until ctx ends and those under way are done.
	Work(ctx context.Context, handle Handler) error
	// Left counts the messages that are not completed.
	Left(ctx context.Context) (int64, error)
	Close()
}

// Claimer is a Bus that can time its claims.
type Claimer interface {
	// Claim publishes, claims and completes n messages, and returns how long the claim took.
	Claim(ctx context.Context, n int, body string) (time.Duration, error)
}

// ErrUnsupported is what a Bus answers that has no such thing.
var ErrUnsupported = errors.New("not supported")

// MaxQueues is how many queues a Bus can have.
const MaxQueues = 100

// Options are what a case asks of a Bus.
type Options struct {
	// Queues is how many there are; 0 = 1.
	Queues int
	// Failing is for messages whose attempts may fail. Each waits two seconds for the next.
	Failing bool
}

func (o Options) queues() int { return max(o.Queues, 1) }

// Engine is one way of keeping messages, with its settings.
type Engine struct {
	Name string
	// About names the settings for the reader of a report.
	About string
	// Setup makes the tables in an empty database.
	Setup func(ctx context.Context, pool *pgxpool.Pool) error
	Open  func(ctx context.Context, dsn string, o Options) (Bus, error)
	// Clear deletes what another trial has left, of an engine on a broker; nil = it is one on a database.
	Clear func(ctx context.Context, url string) error
}

// Names of the engines.
const (
	Leasebus     = "leasebus"
	LeasebusBest = "leasebus-best"
	Memory       = "leasebus-memory"
	River        = "river"
	RiverBest    = "river-best"
	Watermill    = "watermill"
	WatermillMax = "watermill-best"
	Raw          = "raw"
	BareLoop     = "bare-loop"
)

// All are the engines.
func All() []Engine {
	return []Engine{
		leasebusEngine(Leasebus, "the generated API, default settings", nil, nil),
		leasebusEngine(LeasebusBest, bestAbout, bestInbox(), bestProcessor()),
		memoryEngine(),
		riverEngine(River, riverDefault),
		riverEngine(RiverBest, riverBest),
		watermillEngine(Watermill, watermillDefaultBatch),
		watermillEngine(WatermillMax, watermillBestBatch),
		rawEngine(),
		bareLoopEngine(),
	}
}

// ByName finds an engine.
func ByName(name string) (Engine, error) {
	for _, e := range slices.Concat(All(), OnRabbitMQ()) {
		if e.Name == name {
			return e, nil
		}
	}
	return Engine{}, fmt.Errorf("there is no engine %q", name)
}

// Prepare makes an engine's tables in an empty database, and the one that stands for the caller's own.
func (e Engine) Prepare(ctx context.Context, dsn string) error {
	pool, err := openPool(ctx, dsn, 0)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := e.Setup(ctx, pool); err != nil {
		return fmt.Errorf("set up %s: %w", e.Name, err)
	}
	if _, err := pool.Exec(ctx, "CREATE TABLE other (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text NOT NULL)"); err != nil {
		return fmt.Errorf("set up %s: %w", e.Name, err)
	}
	return nil
}

// openPool opens a pool of so many connections; 0 = as many as pgx takes by default.
func openPool(ctx context.Context, dsn string, connections int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, errors.New("the connection string cannot be parsed") // its text may hold a password
	}
	if connections > 0 {
		config.MaxConns = connections
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return pool, nil
}

// inTx runs publish in a transaction of the caller's that writes a row of its own.
func inTx(ctx context.Context, pool *pgxpool.Pool, publish func(tx pgx.Tx) error) error {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO other (note) VALUES ('an order')"); err != nil {
			return fmt.Errorf("the caller's own row: %w", err)
		}
		return publish(tx)
	})
	if err != nil {
		return fmt.Errorf("publish in a transaction: %w", err)
	}
	return nil
}

func noFailing(o Options) error {
	if o.Failing {
		return fmt.Errorf("messages that fail: %w", ErrUnsupported)
	}
	return nil
}

func onlyOneQueue(o Options) error {
	if o.queues() > 1 {
		return fmt.Errorf("%d queues: %w", o.queues(), ErrUnsupported)
	}
	return nil
}

func count(ctx context.Context, pool *pgxpool.Pool, sql string) (n int64, err error) {
	if err := pool.QueryRow(ctx, sql).Scan(&n); err != nil {
		return 0, fmt.Errorf("count what is left: %w", err)
	}
	return n, nil
}
