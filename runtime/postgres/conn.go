package postgres

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A connection can go silent without an end: what is between has lost it, or its server has vanished. Nothing but a bound
// tells. Every statement has one; these are for what comes before.
const (
	// connectBound is how long connecting to one host may take, unless the connection string has a connect_timeout.
	connectBound = 5 * time.Second
	// pingBound is how long a connection may take to say that it is there, after it was idle for as long as pingAfter.
	pingBound = 2 * time.Second
	pingAfter = time.Second
	// vanishedBound is how long the server waits for the next statement of a transaction of ours.
	vanishedBound = "5s"
)

// boundConnecting keeps a connection attempt from taking for ever.
func boundConnecting(config *pgx.ConnConfig) {
	if config.ConnectTimeout <= 0 {
		config.ConnectTimeout = connectBound
	}
}

// boundPings makes a pool leave it to acquire what becomes of a connection that does not answer.
func boundPings(config *pgxpool.Config) {
	due := config.ShouldPing
	if due == nil {
		due = func(_ context.Context, p pgxpool.ShouldPingParams) bool { return p.IdleDuration > pingAfter }
	}
	config.ShouldPing = func(ctx context.Context, p pgxpool.ShouldPingParams) bool {
		if due(ctx, p) {
			bound, cancel := context.WithTimeout(ctx, pingBound)
			defer cancel()
			_ = p.Conn.Ping(bound) // a failure closes it
		}
		return false
	}
}

// acquire takes a connection that is alive, as far as can be known.
func (c *caller) acquire(ctx context.Context, pool *pgxpool.Pool) (*pgxpool.Conn, error) {
	for {
		conn, err := pool.Acquire(ctx)
		if err != nil || !conn.Conn().IsClosed() {
			return conn, err
		}
		c.release(ctx, conn, nil)
		if ctx.Err() == nil {
			pool.Reset() // what was idle beside it is no better
		}
	}
}

// release gives a connection back, after an error or none. One that was given up makes room at once: the pool itself would keep its place until
// the server has heard of the end, and that of a silent one takes as long as the driver is ready to wait, 15 seconds. A
// lease may not have them.
func (c *caller) release(ctx context.Context, conn *pgxpool.Conn, err error) {
	if c.elsewhere && sqlState(err) == codeReadOnly {
		bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), pingBound)
		defer cancel()
		_ = conn.Conn().Close(bound) // what it can say does not matter
	}
	if !conn.Conn().IsClosed() {
		conn.Release()
		return
	}
	c.abandon(conn.Conn())
	conn.Hijack()
}

// leave gives up the connections to a server that is not the wanted one any more, those included that only read.
func (c *caller) leave() {
	for _, pool := range c.pools {
		pool.Reset()
	}
}

// abandon has Close wait for the end of a closed connection's goroutine, which tells the server. After Close nobody waits
// for the server any more.
func (c *caller) abandon(conn *pgx.Conn) {
	c.ending.Go(func() {
		told := conn.PgConn().CleanupDone()
		select {
		case <-told:
		case <-c.closed:
			_ = conn.PgConn().Conn().Close() // was an error before
			<-told
		}
	})
}

// transaction runs do in a transaction of several round trips, in read committed. If this process vanishes in the middle,
// the server ends it soon: others would wait for its locks.
func (c *caller) transaction(ctx context.Context, pool *pgxpool.Pool, do func(pgx.Tx) error) (err error) {
	conn, err := c.acquire(ctx, pool)
	if err != nil {
		return notSentError{err}
	}
	defer func() { c.release(ctx, conn, err) }()
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{
		BeginQuery: "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '" + vanishedBound + "'",
	}, do)
	if sqlState(err) == codeReadOnly {
		err = fmt.Errorf("%w: %w", ErrReadOnly, err)
	}
	return err
}
