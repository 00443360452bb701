package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Inside a caller's transaction an insert is the only statement. It answers with the transaction's number too: the
// messages can be leased when that has committed.
const (
	arrivalsTxSQL = ` SELECT queue, segment, pos, due, pg_current_xact_id()::text FROM a`

	// insertOneTxSQL is for what most transactions publish: one message, due now.
	insertOneTxSQL = `INSERT INTO {schema}.ready (segment, queue, id, type, headers, state, payload) VALUES ({head}, $1, $2, $3, $4, $5, $6)
 RETURNING queue, segment, pos, NULL::bigint, pg_current_xact_id()::text`
)

// Tx publishes inside the caller's transaction: the messages exist if and only if it commits.
//
// It changes no setting of the transaction, waits for nothing in it and adds nothing to its commit: that it has committed
// is looked for aside, and whoever waits for messages is told then. A queue that is new to the database is registered by
// a connection of the inbox. If the commit's outcome is unknown, the receipts have the ids to ask for. An error of a
// statement aborts the transaction, as any would.
func (in *Inbox) Tx(tx pgx.Tx) leasebus.Publisher {
	return &txPublisher{in: in, query: func(ctx context.Context, statement string, args []any) (rowsOfTx, error) {
		rows, err := tx.Query(ctx, statement, args...)
		return pgxRows{rows}, err
	}}
}

// SQLTx is [Inbox.Tx] for database/sql, with any driver for PostgreSQL.
func (in *Inbox) SQLTx(tx *sql.Tx) leasebus.Publisher {
	return &txPublisher{in: in, query: func(ctx context.Context, statement string, args []any) (rowsOfTx, error) {
		return tx.QueryContext(ctx, statement, args...) //nolint:rowserrcheck // insert does
	}}
}

// rowsOfTx is what the rows of the two libraries have in common.
type rowsOfTx interface {
	Next() bool
	Scan(dest ...any) error
	Err() error
	Close() error
}

type pgxRows struct{ pgx.Rows }

func (r pgxRows) Close() error {
	r.Rows.Close()
	return nil
}

type txPublisher struct {
	in    *Inbox
	query func(ctx context.Context, statement string, args []any) (rowsOfTx, error)
}

// Publish implements [leasebus.Publisher]. It takes all of out or, with an error, nothing.
func (t *txPublisher) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	return publishWith(out, receipts, func() error {
		queues, _, err := t.in.admit(ctx, out)
		if err != nil || len(out) == 0 {
			return err
		}
		if len(out) == 1 && !scheduled(&out[0]) {
			e := &out[0].Envelope
			return t.insert(ctx, t.in.sql.insertOneTx, []any{
				queues.first, e.ID.String(), e.Type, headersOf(e), keysOf(e).encode(false), payloadOf(e),
			})
		}
		o := newOutbound()
		defer o.free()
		o.add(out, &queues)
		for _, part := range slices.Concat(o.now.statements(), o.later.statements()) {
			if err := t.insert(ctx, t.in.sql.insertTx.of(part), literals(part.args())); err != nil {
				return err
			}
		}
		return nil
	})
}

func (t *txPublisher) insert(ctx context.Context, statement string, args []any) error {
	rows, err := t.query(ctx, statement, args)
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }() // what there was to read is read
	var came []arrival
	var transaction string
	for rows.Next() {
		var a arrival
		var seg, pos, due sql.NullInt64
		if err := rows.Scan(&a.queue, &seg, &pos, &due, &transaction); err != nil {
			return err
		}
		a.seg, a.pos, a.due = segment(seg.Int64), pos.Int64, dueIn(due.Int64)
		came = append(came, a)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if len(came) > 0 {
		t.in.commits.await(transaction, came)
	}
	return nil
}

const (
	heldRowSQL = ` WHERE queue = $1 AND pos = $2 AND lease_owner = $3 AND generation = $4`

	// A message is looked for where it was leased, then in the cold segment; that is the last place, so that the second
	// statement raises when the lease is gone: a caller who ignores the error cannot commit (S17).
	completeTxSQL     = `DELETE FROM {segment}` + heldRowSQL
	completeTxKeptSQL = `WITH d AS (DELETE FROM {segment}` + heldRowSQL + ` RETURNING *) ` + keepSQL
	completeColdSQL   = `WITH d AS (DELETE FROM {schema}.ready_cold` + heldRowSQL + ` RETURNING pos) ` + raiseSQL

	completeColdKeptSQL = `WITH d AS (DELETE FROM {schema}.ready_cold` + heldRowSQL + ` RETURNING *), h AS (` + keepSQL + `) ` + raiseSQL

	keepSQL = `INSERT INTO {schema}.history (first_due, id, queue, generation, attempts, type, owner, headers, state, payload)
 SELECT first_due, id, queue, generation, attempt, type, $5, headers, state, payload FROM d`
	raiseSQL = `SELECT CASE WHEN (SELECT count(*) FROM d) = 1 THEN 1 ELSE {schema}.lease_lost() END`

	lockTxSQL = `SELECT pos FROM {segment}` + heldRowSQL + ` FOR UPDATE`
)

// CompleteTx completes the message at hand inside the handler's transaction: what the handler did and the completion
// commit together or not at all. ctx is the handler's. Call it last, and return nil when the transaction has committed.
//
// If the lease is gone, the error matches [leasebus.ErrLeaseLost], and the transaction cannot be committed any more,
// whether or not the error is looked at. If the transaction does not commit, the message is retried.
//
// The transaction holds the message's row until it ends. In repeatable read and serializable, begin it with [BeginTx].
// Do not call it inside a savepoint: rolling back to that takes the refusal away, too.
func CompleteTx(ctx context.Context, tx pgx.Tx) error {
	return completeTx(ctx, func(statement string, args []any) (int64, error) {
		tag, err := tx.Exec(ctx, statement, args...)
		return tag.RowsAffected(), err
	})
}

// CompleteSQLTx is [CompleteTx] for database/sql, with any driver for PostgreSQL.
func CompleteSQLTx(ctx context.Context, tx *sql.Tx) error {
	return completeTx(ctx, func(statement string, args []any) (int64, error) {
		result, err := tx.ExecContext(ctx, statement, args...)
		if err != nil {
			return 0, err
		}
		return result.RowsAffected()
	})
}

func completeTx(ctx context.Context, exec func(statement string, args []any) (rows int64, err error)) error {
	lease, held, err := leaseAtHand(ctx, "complete in a transaction")
	if err != nil {
		return err
	}
	if err := lease.BeginComplete(); err != nil {
		return fmt.Errorf("postgres: complete in a transaction: %w", err)
	}
	f := held.feed
	seg := segmentOf(lease)
	here, cold, args := f.in.sql.in[seg].completeTx, f.in.sql.completeCold, lockArgs(lease, held)
	if f.sub.Policy.RetainCompleted > 0 {
		here, cold, args = f.in.sql.in[seg].completeTxKept, f.in.sql.completeColdKept, append(args, f.sub.Owner)
	}
	var rows int64
	if seg != coldSegment {
		rows, err = exec(here, args)
	}
	if err == nil && rows == 0 {
		_, err = exec(cold, args)
	}
	switch {
	case err == nil:
		return nil
	case isLeaseLost(err):
		lease.AbortComplete(leasebus.ErrLeaseLost)
		return fmt.Errorf("postgres: complete message %s in a transaction: %w: %w", lease.ID, leasebus.ErrLeaseLost, err)
	default:
		// The transaction cannot commit this any more: the statement was refused, or its connection is gone.
		lease.AbortComplete(nil)
		return fmt.Errorf("postgres: complete message %s in a transaction: %w", lease.ID, err)
	}
}

// isLeaseLost knows the error by its code; drivers of database/sql other than pgx have types of their own for it.
func isLeaseLost(err error) bool {
	if sqlState(err) == codeLeaseLost {
		return true
	}
	var coded interface{ SQLState() string }
	return errors.As(err, &coded) && coded.SQLState() == codeLeaseLost
}

func leaseAtHand(ctx context.Context, what string) (*leasebus.Lease, *claimed, error) {
	lease, ok := leasebus.LeaseFrom(ctx)
	if !ok {
		return nil, nil, fmt.Errorf("postgres: %s: the context is not that of a handler", what)
	}
	held, ok := lease.Ref.P.(*claimed)
	if !ok {
		return nil, nil, fmt.Errorf("postgres: %s: message %s is not from a PostgreSQL inbox", what, lease.ID)
	}
	return lease, held, nil
}

// Beginner is a pool or a connection of pgx.
type Beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// lockTries bounds how often BeginTx begins anew because a heartbeat came between.
const lockTries = 10

// BeginTx begins a transaction for [CompleteTx] in an isolation above read committed: it locks the message's row before
// anything else, so that no heartbeat can change it behind the transaction's snapshot. The lease cannot pass to another
// while the transaction lasts. If it has passed already, the error matches [leasebus.ErrLeaseLost].
func BeginTx(ctx context.Context, db Beginner, options pgx.TxOptions) (pgx.Tx, error) {
	return beginLocked(ctx, pgx.ErrNoRows, transactions[pgx.Tx]{
		begin: func() (pgx.Tx, error) { return db.BeginTx(ctx, options) },
		lock: func(tx pgx.Tx, statement string, args []any) error {
			var pos int64
			return tx.QueryRow(ctx, statement, args...).Scan(&pos)
		},
		rollback: func(tx pgx.Tx) { _ = tx.Rollback(context.WithoutCancel(ctx)) }, // the error that counts is there already
	})
}

// BeginSQLTx is [BeginTx] for database/sql.
func BeginSQLTx(ctx context.Context, db *sql.DB, options *sql.TxOptions) (*sql.Tx, error) {
	return beginLocked(ctx, sql.ErrNoRows, transactions[*sql.Tx]{
		begin: func() (*sql.Tx, error) { return db.BeginTx(ctx, options) },
		lock: func(tx *sql.Tx, statement string, args []any) error {
			var pos int64
			return tx.QueryRowContext(ctx, statement, args...).Scan(&pos)
		},
		rollback: func(tx *sql.Tx) { _ = tx.Rollback() }, // the error that counts is there already
	})
}

// transactions are what the two libraries do each in its own way.
type transactions[T any] struct {
	begin    func() (T, error)
	lock     func(tx T, statement string, args []any) error
	rollback func(tx T)
}

// beginLocked begins a transaction that holds the row of the message at hand.
func beginLocked[T any](ctx context.Context, noRows error, db transactions[T]) (none T, _ error) {
	lease, held, err := leaseAtHand(ctx, "begin a transaction")
	if err != nil {
		return none, err
	}
	for try := 1; ; try++ {
		tx, err := db.begin()
		if err != nil {
			return none, fmt.Errorf("postgres: begin a transaction for message %s: %w", lease.ID, err)
		}
		seg, args := segmentOf(lease), lockArgs(lease, held)
		err = db.lock(tx, held.feed.in.sql.in[seg].lockTx, args)
		if errors.Is(err, noRows) && seg != coldSegment {
			err = db.lock(tx, held.feed.in.sql.in[coldSegment].lockTx, args)
		}
		if err == nil {
			return tx, nil
		}
		db.rollback(tx)
		if again, err := lockFailed(lease, err, noRows); !again || try == lockTries {
			return none, err
		}
	}
}

func lockArgs(lease *leasebus.Lease, held *claimed) []any {
	return []any{held.feed.queue, lease.Ref.N, held.owner, int32(lease.Generation)} //nolint:gosec // of an int column
}

func lockFailed(lease *leasebus.Lease, err, noRows error) (again bool, _ error) {
	if errors.Is(err, noRows) {
		return false, fmt.Errorf("postgres: begin a transaction for message %s: %w", lease.ID, leasebus.ErrLeaseLost)
	}
	var coded interface{ SQLState() string }
	again = errors.As(err, &coded) && coded.SQLState() == codeSerialization
	return again, fmt.Errorf("postgres: begin a transaction for message %s: %w", lease.ID, err)
}
