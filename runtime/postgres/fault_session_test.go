package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// story is everything that can be done with an inbox, over connections that are unusual in some way: two processes'
// worth of inboxes that publish, handle, retry, defer, dead-letter, requeue, complete in transactions. direct is the
// same database without what is unusual.
func story(t *testing.T, dsn string, direct *testservers.PG) {
	t.Helper()
	const total = 300
	pool, err := pgxpool.New(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := postgres.Migrate(t.Context(), pool); err != nil {
		t.Fatalf("migrate: %v", err)
	}
	if err := postgres.Validate(t.Context(), pool); err != nil {
		t.Fatalf("validate: %v", err)
	}
	done := effects(t, direct)
	policy := numbersPolicy(10 * time.Second)
	var seen tally
	handle := storyHandler(pool, &seen)
	inbox, other := openInbox(t, dsn), openInbox(t, dsn)
	processors := []*running{startProcessor(t, inbox, policy, handle), startProcessor(t, other, policy, handle)}

	publishNumbers(t, inbox, policy, 0, total)
	publishNumbers(t, other, policy, total, total+5, leasebus.Delay(300*time.Millisecond))
	for i, end := range []func(pgx.Tx, context.Context) error{pgx.Tx.Commit, pgx.Tx.Rollback} {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		first := int64(total + 5 + 5*i)
		publishNumbers(t, inbox.Tx(tx), policy, first, first+5)
		if err := end(tx, t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	wantEnded(t, direct, 20*time.Second, total+10, 7)
	if n := done(); n != 7 {
		t.Errorf("%d transactions took effect, want 7", n)
	}

	letters, err := inbox.DeadLetters(t.Context(), numbersQueue, leasebus.Filter{Reason: leasebus.ReasonPermanent}, "", 100)
	if err != nil || len(letters) != 7 {
		t.Fatalf("%d dead letters are listed, %v; want 7", len(letters), err)
	}
	var refs []leasebus.DeadLetterRef
	for _, l := range letters {
		refs = append(refs, leasebus.DeadLetterRef{ID: l.ID, Cursor: l.Cursor})
	}
	what, err := other.Requeue(t.Context(), numbersQueue, refs, "the test")
	if err != nil {
		t.Fatalf("requeue: %v", err)
	}
	for i, d := range what {
		if d != leasebus.DispositionDone {
			t.Errorf("dead letter %d was not requeued: %v", i, d)
		}
	}
	wantEnded(t, direct, 20*time.Second, total+10, 0)
	// Across processes, with nobody to notify where that does not work.
	began := time.Now()
	publishNumbers(t, other, policy, total+20, total+21)
	wantEnded(t, direct, 10*time.Second, total+11, 0)
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("a message took %v", took)
	}
	stats, err := inbox.Stats(t.Context(), numbersQueue)
	if err != nil || stats.Pending != 0 || stats.DeadLettered != 0 {
		t.Errorf("stats %+v, %v", stats, err)
	}
	for _, p := range processors {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
		wantNoRejections(t, p)
		if s := p.Stats(); s.SettleErrors+s.RenewErrors+s.LeaseErrors > 0 {
			t.Errorf("calls failed: %+v", s)
		}
	}
}

// storyHandler fails, defers and refuses some numbers the first time, and completes some in transactions.
func storyHandler(pool *pgxpool.Pool, seen *tally) numberHandler {
	return func(ctx context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		first := len(seen.of(n)) == 1
		switch {
		case n%50 == 7 && first:
			return leasebus.Permanent(errors.New("not before an operator says so"))
		case n%50 == 11 && first:
			return leasebus.Defer(50 * time.Millisecond)
		case n%10 == 3 && first:
			return errors.New("not yet")
		case n%50 != 9:
			return nil
		}
		tx, err := postgres.BeginTx(ctx, pool, pgx.TxOptions{})
		if err != nil {
			return err
		}
		defer rollBack(ctx, tx)
		return commitEffect(ctx, tx, n)
	}
}

func TestInbox_C9_5_C9_6_PgBouncerInTransactionMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"exec", "simple_protocol", "cache_describe", "describe_exec"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			direct := testservers.Postgres(t)
			pooled := testservers.PgBouncer(t, direct, "default_pool_size=6")
			story(t, pooled.DSN("default_query_exec_mode="+mode), direct)
		})
	}
}

// Only the connection that listens goes past the pooler: notifications work again.
func TestInbox_C9_6_ListensPastThePooler(t *testing.T) {
	t.Parallel()
	direct := migrated(t, testservers.Postgres(t))
	dsn := testservers.PgBouncer(t, direct).DSN("default_query_exec_mode=exec")
	policy := numbersPolicy(30 * time.Second)
	inbox := openInbox(t, dsn, postgres.WithListenDSN(direct.DSN()), postgres.WithPollInterval(time.Hour), postgres.WithSweep(time.Hour))
	arrived := make(chan struct{}, 1)
	startProcessor(t, inbox, policy, func(context.Context, int64, leasebus.Delivery) error {
		arrived <- struct{}{}
		return nil
	})
	eventually(t, 10*time.Second, "the inbox listens", func() error {
		if n := testservers.Value[int](t, direct, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'listen%'`); n != 1 {
			return fmt.Errorf("%d connections do", n)
		}
		return nil
	})
	producer := openInbox(t, dsn)
	for n := range int64(3) {
		publishNumbers(t, producer, policy, n, n+1)
		select {
		case <-arrived:
		case <-time.After(5 * time.Second):
			t.Fatalf("message %d did not arrive", n)
		}
	}
}

// What the pool does before it connects, such as to get a password that is good for minutes, is done before listening, too.
func TestInbox_ListensAsThePoolConnects(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	config, err := pgxpool.ParseConfig(pg.DSN())
	if err != nil {
		t.Fatal(err)
	}
	config.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		c.RuntimeParams["application_name"] = "prepared"
		return nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	inbox, err := postgres.NewInbox(t.Context(), pool, postgres.WithLogger(quiet))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = inbox.Close() })
	startProcessor(t, inbox, numbersPolicy(time.Minute), func(context.Context, int64, leasebus.Delivery) error { return nil })
	eventually(t, 10*time.Second, "the inbox listens", func() error {
		if n := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND application_name = 'prepared' AND query ILIKE 'listen%'`); n != 1 {
			return fmt.Errorf("%d connections do", n)
		}
		return nil
	})
}

func TestInbox_C9_4_UnusualSessions(t *testing.T) {
	t.Parallel()
	for name, setting := range map[string]string{
		"repeatable read":   "default_transaction_isolation=repeatable read",
		"serializable":      "default_transaction_isolation=serializable",
		"statement timeout": "statement_timeout=2000",
		"lock timeout":      "lock_timeout=100",
		"seqscan only":      "enable_indexscan=off",
		"search path":       "search_path=pg_catalog",
		"time zone":         "timezone=Pacific/Kiritimati",
		"date style":        "datestyle=German",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := testservers.Postgres(t)
			story(t, direct.DSN(setting), direct)
		})
	}
}

// What the session allows for a statement is not what the inbox has: a claim that takes longer than that is one.
func TestInbox_C9_4_StatementTimeoutOfTheSession(t *testing.T) {
	t.Parallel()
	direct := migrated(t, testservers.Postgres(t))
	direct.Exec(t, `CREATE FUNCTION public.dawdle() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NEW; END'`)
	direct.Exec(t, `CREATE TRIGGER dawdle BEFORE UPDATE ON leasebus.ready FOR EACH ROW EXECUTE FUNCTION public.dawdle()`)
	policy := numbersPolicy(20 * time.Second)
	inbox := openInbox(t, direct.DSN("statement_timeout=300"))
	publishNumbers(t, inbox, policy, 0, 1)
	var seen tally
	p := startProcessor(t, inbox, policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		return nil
	})
	wantEnded(t, direct, 10*time.Second, 1, 0)
	seen.wantOnce(t, 1)
	wantNoRejections(t, p)
	if s := p.Stats(); s.LeaseErrors > 0 {
		t.Errorf("claims failed: %+v", s)
	}
}
