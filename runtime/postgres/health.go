package postgres

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var _ leasebus.HealthChecker = (*Inbox)(nil)

const writableSQL = `SELECT current_setting('transaction_read_only') = 'off'`

// CheckHealth implements [leasebus.HealthChecker]. It asks the database one question, on a connection that neither
// handlers nor publishers use. A database that cannot be reached is down; one in which nothing can be written is
// degraded, and so is one whose answer other questions hold up.
func (in *Inbox) CheckHealth(ctx context.Context) []leasebus.HealthComponent {
	wake := "notifications"
	if in.keeper.deaf() {
		wake = "polling"
	}
	c := leasebus.HealthComponent{Details: map[string]any{"schema": in.options.schema, "wake": wake}}
	writable, err := in.writable(ctx)
	switch {
	case in.ctx.Err() != nil:
		c.Status, c.Details["error"] = leasebus.HealthDown, ErrClosed.Error()
	case err != nil && in.busy(err):
		c.Status, c.Details["error"] = leasebus.HealthDegraded, "all connections are busy: "+err.Error()
	case err != nil:
		c.Status, c.Details["error"] = leasebus.HealthDown, err.Error()
	case !writable:
		c.Status, c.Details["error"] = leasebus.HealthDegraded, "the database is read-only"
	}
	return []leasebus.HealthComponent{c}
}

// busy reports whether a question was not asked because every connection had another one.
func (in *Inbox) busy(err error) bool {
	var unsent notSentError
	pool := in.renewals.Stat()
	return errors.As(err, &unsent) && pool.AcquiredConns() >= pool.MaxConns()
}

func (in *Inbox) writable(ctx context.Context) (yes bool, err error) {
	err = in.caller.call(ctx, in.renewals,
		func(b *pgx.Batch) { b.Queue(writableSQL) },
		func(results pgx.BatchResults) error { return results.QueryRow().Scan(&yes) })
	return yes, err
}
