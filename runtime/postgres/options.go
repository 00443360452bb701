package postgres

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Defaults of an [Inbox].
const (
	DefaultSchema       = "leasebus"
	DefaultConnections  = 8
	DefaultPollInterval = 200 * time.Millisecond
	DefaultSweep        = 2 * time.Second
)

// minConnections is one each for claims, settlements, heartbeats, and everything else.
const minConnections = 4

// Option changes what [NewInbox], [Migrate] and [Validate] work on.
type Option interface{ apply(*options) }

type optionFunc func(*options)

func (f optionFunc) apply(o *options) { f(o) }

type options struct {
	names
	connections int
	own         *pgxpool.Config // instead of the caller's pool's
	listen      *pgx.ConnConfig // instead of own's
	// prepareListen comes before each connection that listens: own's BeforeConnect, if listen is own's.
	prepareListen func(context.Context, *pgx.ConnConfig) error
	deaf          bool
	poll, sweep   time.Duration
	maxPayload    int
	pace          pace
	log           *slog.Logger
	err           error
}

// WithSchema sets the schema of the tables. Any name of up to 63 bytes; it is quoted. Default [DefaultSchema].
func WithSchema(name string) Option {
	return optionFunc(func(o *options) {
		n, err := namesOf(name)
		o.names, o.err = n, errors.Join(o.err, err)
	})
}

// WithConnections sets how many connections the inbox opens at most, besides the one that listens. They are shared out:
// heartbeats have one, claims and settlements a quarter each, the rest is for publishing, for operators and for
// notifications. At least 4. Default [DefaultConnections].
func WithConnections(n int) Option {
	return optionFunc(func(o *options) {
		o.connections = n
		if n < minConnections {
			o.refusef("WithConnections: %d is too few; the inbox needs %d at least: one each for claims, settlements, heartbeats and the rest", n, minConnections)
		}
	})
}

// WithDSN sets where the inbox opens its connections, such as past a pooler. Default as the pool does.
// A pool_max_conns in it counts as WithConnections.
func WithDSN(dsn string) Option {
	return optionFunc(func(o *options) {
		config, err := pgxpool.ParseConfig(dsn)
		if err != nil { // its text may hold the password
			o.refusef("WithDSN: the connection string cannot be parsed")
			return
		}
		o.own = config
	})
}

// WithListenDSN sets where the connection for notifications is opened: a server, not a pooler in transaction mode.
// Default as the others are.
func WithListenDSN(dsn string) Option {
	return optionFunc(func(o *options) {
		config, err := pgx.ParseConfig(dsn)
		if err != nil { // its text may hold the password
			o.refusef("WithListenDSN: the connection string cannot be parsed")
			return
		}
		o.listen = config
	})
}

// WithoutListen saves the connection that listens: what other processes publish is found by polling.
func WithoutListen() Option { return optionFunc(func(o *options) { o.deaf = true }) }

// WithPollInterval sets how often idle queues are looked at while notifications do not come. One look is one statement
// for all of them. At least 1 ms. Default [DefaultPollInterval].
func WithPollInterval(d time.Duration) Option {
	return optionFunc(func(o *options) {
		o.poll = d
		if d < time.Millisecond {
			o.refusef("WithPollInterval: %v is out of range; allowed is 1ms or more", d)
		}
	})
}

// WithSweep sets how often a queue is read from its beginning, for leases that expired and transactions that committed
// late. An expired lease is noticed within this time. At least 10 ms. Default [DefaultSweep].
func WithSweep(d time.Duration) Option {
	return optionFunc(func(o *options) {
		o.sweep = d
		if d < minSweep {
			o.refusef("WithSweep: %v is out of range; allowed is %v or more", d, minSweep)
		}
	})
}

const minSweep = 10 * time.Millisecond

// WithMaxPayload sets the largest payload that is taken, in bytes. At least 1. Default [leasebus.DefaultMaxPayload].
func WithMaxPayload(bytes int) Option {
	return optionFunc(func(o *options) {
		o.maxPayload = bytes
		if bytes < 1 {
			o.refusef("WithMaxPayload: %d is out of range; allowed is 1 or more", bytes)
		}
	})
}

// WithLogger sets where the inbox tells what happens. Default [slog.Default]. Payloads and passwords are never logged.
func WithLogger(log *slog.Logger) Option {
	return optionFunc(func(o *options) { o.log = log })
}

func (o *options) refusef(format string, args ...any) {
	o.err = errors.Join(o.err, fmt.Errorf("postgres: "+format, args...))
}

func optionsOf(opts []Option) (options, error) {
	o := options{
		connections: DefaultConnections, poll: DefaultPollInterval, sweep: DefaultSweep,
		maxPayload: leasebus.DefaultMaxPayload, pace: usualPace(),
	}
	o.names, o.err = namesOf(DefaultSchema)
	for _, opt := range opts {
		opt.apply(&o)
	}
	if o.log == nil {
		o.log = slog.Default()
	}
	return o, o.err
}
