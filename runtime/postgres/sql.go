package postgres

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// names are the identifiers of one schema, quoted once.
type names struct {
	schema string // as given
	quoted string
	key    int64 // the same for everyone who means this schema
}

// maxIdentifier is PostgreSQL's limit; it cuts longer names without an error.
const maxIdentifier = 63

func namesOf(schema string) (names, error) {
	switch {
	case schema == "":
		return names{}, errors.New("postgres: the schema's name is empty; a name is needed")
	case len(schema) > maxIdentifier:
		return names{}, fmt.Errorf("postgres: the schema's name %q is %d bytes long; allowed are %d", schema, len(schema), maxIdentifier)
	case !utf8.ValidString(schema) || strings.ContainsRune(schema, 0):
		return names{}, fmt.Errorf("postgres: the schema's name %q holds a NUL or is not valid UTF-8", schema)
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte("leasebus schema " + schema))                                                 // never fails
	return names{schema: schema, quoted: pgx.Identifier{schema}.Sanitize(), key: int64(h.Sum64())}, nil //nolint:gosec // any 64 bits will do
}

// channel is what the schema's notifications are sent on.
func (n names) channel() string { return fmt.Sprintf("leasebus_%016x", uint64(n.key)) } //nolint:gosec // for its bits

// render fills in the schema, and for {head} the segment that messages are published into.
func (n names) render(statement string) string {
	return strings.NewReplacer("{schema}", n.quoted, "{head}", n.head()).Replace(statement)
}

// renderFor fills in one segment, too.
func (n names) renderFor(seg segment, statement string) string {
	return n.render(strings.NewReplacer("{segment}", "{schema}."+seg.table(), "{cold}", "{schema}."+coldSegment.table(),
		"{number}", strconv.Itoa(int(seg)), "{cold number}", strconv.Itoa(int(coldSegment))).Replace(statement))
}

// The planner is told what is known: that the statements below walk the one index. With statistics of an empty table
// it would choose a scan and a sort, and compile them. The settings end with the transaction.
const (
	pinSQL = `SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
 set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true), set_config('statement_timeout', '30s', true)`
	// pinSettleSQL lets no settlement wait long behind a row that another transaction has locked.
	pinSettleSQL = pinSQL + `, set_config('lock_timeout', '50ms', true)`
	// pinBusySQL is for settlements that pass over such rows. A table that is being truncated is locked until the disk has
	// it, which may take a moment.
	pinBusySQL = pinSQL + `, set_config('lock_timeout', '5s', true)`
)

// SQLSTATE codes that are acted on.
const (
	codeSerialization  = "40001"
	codeDeadlock       = "40P01"
	codeLockTimeout    = "55P03"
	codeLeaseLost      = "LB001"
	codeUndefinedTable = "42P01"
	codeInvalidSchema  = "3F000"
	codePrivilege      = "42501"
	codeReadOnly       = "25006"
	classData          = "22"
	classIntegrity     = "23"
)

func sqlState(err error) string {
	var refused *pgconn.PgError
	if errors.As(err, &refused) {
		return refused.Code
	}
	return ""
}

// refusesData reports whether err is about what was to be stored.
func refusesData(err error) bool {
	code := sqlState(err)
	return strings.HasPrefix(code, classData) || strings.HasPrefix(code, classIntegrity)
}

// notSentError is of a call whose statements never left.
type notSentError struct{ error }

func (e notSentError) Unwrap() error { return e.error }

// undone reports whether err is certain to have changed nothing: it never left, or the server refused it.
func undone(err error) bool {
	var unsent notSentError
	return errors.As(err, &unsent) || pgconn.SafeToRetry(err) || refusedByServer(sqlState(err))
}

// refusedByServer reports whether a code is the server's answer to the statements. Those about the connection are not: a
// pooler sends them for a server that it has lost, which may have done everything.
func refusedByServer(code string) bool {
	for _, prefix := range []string{"08", "57P", "58"} {
		if strings.HasPrefix(code, prefix) {
			return false
		}
	}
	return code != ""
}

// serializationTries bounds how often a call is tried that the server refused for its isolation or a deadlock.
const serializationTries = 5

// rollbackBound is for ending a transaction whose statements failed.
const rollbackBound = 5 * time.Second

// caller sends statements in one round trip each time, as one transaction that reads what is committed.
type caller struct {
	// framed: the sessions' own default isolation is a stricter one, so that a transaction is opened by name.
	framed atomic.Bool
	// elsewhere: the connection string names the kind of server that is wanted, so that it can be another one from now on.
	elsewhere bool
	pools     []*pgxpool.Pool
	// ending are the connections that were given up and are being closed; closed makes them hurry.
	ending sync.WaitGroup
	closed chan struct{}
}

// ErrReadOnly is the answer of a server that writes nothing at present: it was made read-only, or it is a standby.
// Nothing was stored. An inbox goes on by itself when it can write again.
var ErrReadOnly = errors.New("the database is read-only")

// call sends what queue puts into a batch and lets read take the answers. Refused for its isolation, it begins anew:
// read must then set everything again.
func (c *caller) call(ctx context.Context, pool *pgxpool.Pool, queue func(*pgx.Batch), read func(pgx.BatchResults) error) error {
	for try := 1; ; try++ {
		err := c.once(ctx, pool, queue, read)
		code := sqlState(err)
		switch {
		case code == codeReadOnly && c.elsewhere && try == 1:
			c.leave()
			continue
		case code == codeReadOnly:
			return fmt.Errorf("%w: %w", ErrReadOnly, err)
		case code != codeSerialization && code != codeDeadlock || try == serializationTries || ctx.Err() != nil:
			return err
		}
		if code == codeSerialization {
			c.framed.Store(true)
		}
	}
}

func (c *caller) once(ctx context.Context, pool *pgxpool.Pool, queue func(*pgx.Batch), read func(pgx.BatchResults) error) (err error) {
	conn, err := c.acquire(ctx, pool)
	if err != nil {
		return notSentError{err}
	}
	defer func() { c.release(ctx, conn, err) }()
	var batch pgx.Batch
	framed := c.framed.Load()
	if framed {
		batch.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	}
	queue(&batch)
	if framed {
		batch.Queue("COMMIT")
	}
	results := conn.SendBatch(ctx, &batch)
	if framed {
		_, err = results.Exec()
	}
	if err == nil {
		err = read(results)
	}
	if closing := results.Close(); err == nil {
		err = closing // the commit's answer is in here
	}
	if err != nil && framed && !conn.Conn().IsClosed() && conn.Conn().PgConn().TxStatus() != 'I' {
		bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackBound)
		defer cancel()
		_, _ = conn.Exec(bound, "ROLLBACK") // fails only with its connection, which ends the transaction too
	}
	return err
}

// skip takes the answer of a statement that has nothing to say.
func skip(results pgx.BatchResults) error {
	_, err := results.Exec()
	return err
}

// each calls visit for every row of the next answer.
func each(results pgx.BatchResults, visit func(*row) error) error {
	rows, err := results.Query()
	return eachOf(rows, err, visit)
}

// eachOf calls visit for every row of a query's answer.
func eachOf(rows pgx.Rows, err error, visit func(*row) error) error {
	if err != nil {
		return err
	}
	defer rows.Close()
	r := row{rows: rows}
	for rows.Next() {
		r.take()
		if err := visit(&r); err != nil {
			return err
		}
	}
	return rows.Err()
}
