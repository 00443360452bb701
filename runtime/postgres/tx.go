package postgres

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Inside a caller's transaction an insert is the only statement. It also notifies for the queues that it is told, in the
// form of [arrival.hint]: the server sends that when the transaction commits.
const (
	insertTxSQL = insertParts + ` SELECT queue, CASE WHEN queue = ANY($7::int[]) THEN
 pg_notify($8::text, concat(queue, ':', coalesce(pos, 0), ':', least(coalesce(due, 0), 86400000000), ':0')) END FROM a`
	insertLaterTxSQL = insertLaterParts + ` SELECT queue, CASE WHEN queue = ANY($9::int[]) THEN
 pg_notify($10::text, concat(queue, ':', coalesce(pos, 0), ':', least(coalesce(due, 0), 86400000000), ':0')) END FROM a`
)

// Tx publishes inside the caller's transaction: the messages exist if and only if it commits. Use one for all that a
// transaction publishes, so that it notifies once for each queue ([WithoutTxNotify]).
//
// It changes no setting of the transaction and waits for nothing in it. A queue that is new to the database is
// registered by a connection of the inbox. If the commit's outcome is unknown, the receipts have the ids to ask for.
// An error of a statement aborts the transaction, as any would.
func (in *Inbox) Tx(tx pgx.Tx) leasebus.Publisher {
	return &txPublisher{in: in, insert: func(ctx context.Context, statement string, args []any) error {
		rows, err := tx.Query(ctx, statement, args...)
		if err != nil {
			return err
		}
		rows.Close()
		return rows.Err()
	}}
}

// SQLTx is [Inbox.Tx] for database/sql, with any driver for PostgreSQL.
func (in *Inbox) SQLTx(tx *sql.Tx) leasebus.Publisher {
	return &txPublisher{in: in, insert: func(ctx context.Context, statement string, args []any) error {
		rows, err := tx.QueryContext(ctx, statement, literals(args)...)
		if err != nil {
			return err
		}
		defer func() { _ = rows.Close() }() // what there was to read is read
		for rows.Next() {
			continue // to the end, where errors show
		}
		return rows.Err()
	}}
}

type txPublisher struct {
	in     *Inbox
	insert func(ctx context.Context, statement string, args []any) error

	mu sync.Mutex
	// notified are the queues for which this transaction notifies already: what comes later has higher positions.
	notified map[arrivalKey]bool
}

// Publish implements [leasebus.Publisher]. It takes all of out or, with an error, nothing.
func (t *txPublisher) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	return publishWith(out, receipts, func() error {
		o, err := t.in.outbound(ctx, out, false)
		if err != nil || o == nil {
			return err
		}
		if err := t.insertAll(ctx, &o.now, t.in.sql.insertTx); err != nil {
			return err
		}
		return t.insertAll(ctx, &o.later, t.in.sql.insertLaterTx)
	})
}

func (t *txPublisher) insertAll(ctx context.Context, a *arrivals, statement string) error {
	for a.len() > 0 {
		later := a.due != nil
		queues := a.queues
		args := a.cut()
		notify := t.toNotify(queues[:len(queues)-a.len()], later)
		if err := t.insert(ctx, statement, append(args, notify, t.in.options.channel())); err != nil {
			return err
		}
	}
	return nil
}

// toNotify returns the queues for which the next insert is to notify.
func (t *txPublisher) toNotify(queues []int32, later bool) []int32 {
	notify := []int32{}
	if t.in.options.quietTx {
		return notify
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.notified == nil {
		t.notified = make(map[arrivalKey]bool)
	}
	for i, queue := range queues {
		key := arrivalKey{queue, later}
		if slices.Contains(notify, queue) || i > 0 && queue == queues[i-1] || !later && t.notified[key] {
			continue // of messages for later, a new one can be the first that is due
		}
		notify = append(notify, queue)
		t.notified[key] = true
	}
	return notify
}

// literals are arrays in PostgreSQL's text form, which every driver can pass on.
func literals(args []any) []any {
	out := make([]any, len(args))
	for i, arg := range args {
		switch a := arg.(type) {
		case []int32:
			out[i] = literal(len(a), func(b []byte, i int) []byte { return strconv.AppendInt(b, int64(a[i]), 10) })
		case []int64:
			out[i] = literal(len(a), func(b []byte, i int) []byte { return strconv.AppendInt(b, a[i], 10) })
		case []bool:
			out[i] = literal(len(a), func(b []byte, i int) []byte { return strconv.AppendBool(b, a[i]) })
		case []string:
			out[i] = literal(len(a), func(b []byte, i int) []byte { return appendQuoted(b, a[i]) })
		case [][]byte:
			out[i] = literal(len(a), func(b []byte, i int) []byte { return appendBytea(b, a[i]) })
		case ids:
			out[i] = literal(len(a), func(b []byte, i int) []byte { return append(b, uuid.UUID(a[i].Bytes).String()...) })
		default:
			out[i] = arg
		}
	}
	return out
}

func literal(n int, element func(b []byte, i int) []byte) string {
	b := []byte{'{'}
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = element(b, i)
	}
	return string(append(b, '}'))
}

//nolint:gochecknoglobals // a constant
var arrayQuoter = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

func appendQuoted(b []byte, s string) []byte {
	b = append(b, '"')
	b = append(b, arrayQuoter.Replace(s)...)
	return append(b, '"')
}

func appendBytea(b, v []byte) []byte {
	if v == nil {
		return append(b, "NULL"...)
	}
	b = append(b, `"\\x`...)
	b = hex.AppendEncode(b, v)
	return append(b, '"')
}

const (
	// completeTxSQL raises when the lease is gone, so that a caller who ignores the error cannot commit (S17).
	completeTxSQL = `WITH d AS (DELETE FROM {ready} WHERE queue = $1 AND pos = $2 AND lease_owner = $3 AND generation = $4 RETURNING pos)
 SELECT CASE WHEN (SELECT count(*) FROM d) = 1 THEN 1 ELSE {schema}.lease_lost() END`
	completeTxKeptSQL = `WITH d AS (DELETE FROM {ready} WHERE queue = $1 AND pos = $2 AND lease_owner = $3 AND generation = $4 RETURNING *),
 h AS (INSERT INTO {schema}.history (first_due, id, queue, generation, attempts, type, owner, headers, state, payload)
 SELECT first_due, id, queue, generation, attempt, type, $5, headers, state, payload FROM d)
 SELECT CASE WHEN (SELECT count(*) FROM d) = 1 THEN 1 ELSE {schema}.lease_lost() END`

	lockTxSQL = `SELECT pos FROM {ready} WHERE queue = $1 AND pos = $2 AND lease_owner = $3 AND generation = $4 FOR UPDATE`
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
	return completeTx(ctx, func(statement string, args []any) error {
		_, err := tx.Exec(ctx, statement, args...)
		return err
	})
}

// CompleteSQLTx is [CompleteTx] for database/sql, with any driver for PostgreSQL.
func CompleteSQLTx(ctx context.Context, tx *sql.Tx) error {
	return completeTx(ctx, func(statement string, args []any) error {
		_, err := tx.ExecContext(ctx, statement, args...)
		return err
	})
}

func completeTx(ctx context.Context, exec func(statement string, args []any) error) error {
	lease, held, err := leaseAtHand(ctx, "complete in a transaction")
	if err != nil {
		return err
	}
	if err := lease.BeginComplete(); err != nil {
		return fmt.Errorf("postgres: complete in a transaction: %w", err)
	}
	f := held.feed
	statement, args := f.in.sql.completeTx, []any{f.queue, lease.Ref.N, held.owner, int32(lease.Generation)} //nolint:gosec // of an int column
	if f.sub.Policy.RetainCompleted > 0 {
		statement, args = f.in.sql.completeTxKept, append(args, f.sub.Owner)
	}
	switch err := exec(statement, args); {
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
		if err = db.lock(tx, held.feed.in.sql.lockTx, lockArgs(lease, held)); err == nil {
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
