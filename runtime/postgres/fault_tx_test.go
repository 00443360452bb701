package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// effects is a table for what handlers do in their transactions.
func effects(t *testing.T, pg *testservers.PG) func() int {
	t.Helper()
	pg.Exec(t, `CREATE TABLE public.effects (n bigint)`)
	return func() int { return testservers.Value[int](t, pg, `SELECT count(*) FROM public.effects`) }
}

// takeEffect has an effect and completes the message in a handler's transaction; commitEffect commits it too.
func takeEffect(ctx context.Context, tx pgx.Tx, n int64) error {
	if _, err := tx.Exec(ctx, `INSERT INTO public.effects VALUES ($1)`, n); err != nil {
		return err
	}
	return postgres.CompleteTx(ctx, tx)
}

func commitEffect(ctx context.Context, tx pgx.Tx, n int64) error {
	if err := takeEffect(ctx, tx, n); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// rollBack ends a transaction that was not committed; after a commit it does nothing.
func rollBack(ctx context.Context, tx pgx.Tx) { _ = tx.Rollback(context.WithoutCancel(ctx)) }

// A handler holds its transaction open after CompleteTx for longer than two leases: its own message is not handled again, and none
// of its neighbours, which run as long, is lost or stolen, though a rival looks for expired leases all the time.
func TestInbox_S13_S17_OpenTransactionCostsNoLease(t *testing.T) {
	t.Parallel()
	const (
		total = 41
		lease = 2 * time.Second
		hold  = 2*lease + lease/2
	)
	for name, begin := range map[string]func(context.Context, postgres.Beginner) (pgx.Tx, error){
		"read committed": func(ctx context.Context, db postgres.Beginner) (pgx.Tx, error) {
			return db.BeginTx(ctx, pgx.TxOptions{})
		},
		"serializable": func(ctx context.Context, db postgres.Beginner) (pgx.Tx, error) {
			return postgres.BeginTx(ctx, db, pgx.TxOptions{IsoLevel: pgx.Serializable})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := migrated(t, testservers.Postgres(t))
			done := effects(t, pg)
			pool := pg.Pool(t)
			policy := numbersPolicy(lease)
			inbox := openInbox(t, pg.DSN())
			var seen tally
			handle := func(ctx context.Context, n int64, d leasebus.Delivery) error {
				seen.note(n, d)
				wait := time.NewTimer(hold)
				defer wait.Stop()
				if n > 0 {
					select {
					case <-wait.C:
						return nil
					case <-ctx.Done():
						return context.Cause(ctx)
					}
				}
				tx, err := begin(ctx, pool)
				if err != nil {
					return err
				}
				defer rollBack(ctx, tx)
				if err := takeEffect(ctx, tx, n); err != nil {
					return err
				}
				<-wait.C
				return tx.Commit(ctx)
			}
			p := startProcessor(t, inbox, policy, handle, leasebus.WithConcurrency(total))
			publishNumbers(t, inbox, policy, 0, total)
			eventually(t, 10*time.Second, "all are in hand", func() error {
				if n := p.InFlight(); n != total {
					return fmt.Errorf("%d", n)
				}
				return nil
			})
			startProcessor(t, openInbox(t, pg.DSN(), postgres.WithSweep(100*time.Millisecond)), policy, handle)
			wantEnded(t, pg, hold+10*time.Second, total, 0)
			seen.wantOnce(t, total)
			if err := p.stop(); err != nil {
				t.Error(err)
			}
			wantNoRejections(t, p)
			if s := p.Stats(); s.Succeeded != total {
				t.Errorf("%d succeeded, want %d: %+v", s.Succeeded, total, s)
			}
			if n := done(); n != 1 {
				t.Errorf("the transaction took effect %d times, want once", n)
			}
		})
	}
}

// A handler that works for longer than two leases between BeginTx and CompleteTx keeps its lease: nobody else can take it.
func TestInbox_S17_BeginTxHoldsTheLease(t *testing.T) {
	t.Parallel()
	const lease = 2 * time.Second
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pg := migrated(t, testservers.Postgres(t))
			done := effects(t, pg)
			pool := pg.Pool(t)
			policy := numbersPolicy(lease)
			var seen tally
			handle := func(ctx context.Context, n int64, d leasebus.Delivery) error {
				seen.note(n, d)
				tx, err := postgres.BeginTx(ctx, pool, pgx.TxOptions{IsoLevel: level})
				if err != nil {
					return err
				}
				defer rollBack(ctx, tx)
				select {
				case <-time.After(2*lease + lease/2):
				case <-ctx.Done():
					return context.Cause(ctx)
				}
				return commitEffect(ctx, tx, n)
			}
			p := startProcessor(t, openInbox(t, pg.DSN()), policy, handle)
			publishNumbers(t, openInbox(t, pg.DSN()), policy, 0, 1)
			wantEnded(t, pg, 15*time.Second, 1, 0)
			seen.wantOnce(t, 1)
			wantNoRejections(t, p)
			if n := done(); n != 1 {
				t.Errorf("the transaction took effect %d times, want once", n)
			}
		})
	}
}

// The transaction is rolled back after CompleteTx, and the handler says nothing of it: the message is retried.
func TestInbox_S17_RolledBackTransactionIsRetried(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	done := effects(t, pg)
	pool := pg.Pool(t)
	policy := numbersPolicy(5 * time.Second)
	var seen tally
	inbox := openInbox(t, pg.DSN())
	policy.Retry = leasebus.FixedRetry(2, 20*time.Millisecond)
	startProcessor(t, inbox, policy, func(ctx context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		if err := takeEffect(ctx, tx, n); err != nil {
			return err
		}
		if d.Attempt() == 1 || n == 1 {
			return tx.Rollback(ctx)
		}
		return tx.Commit(ctx)
	})
	publishNumbers(t, inbox, policy, 0, 2)
	wantEnded(t, pg, 10*time.Second, 2, 1)
	for n := range int64(2) {
		if runs := seen.of(n); len(runs) != 2 || runs[1].attempt != 2 {
			t.Errorf("number %d was handled on attempts %v, want 1 and 2", n, attemptsOf(runs))
		}
	}
	if n := done(); n != 1 {
		t.Errorf("transactions took effect %d times, want once", n)
	}
	if text := testservers.Value[string](t, pg, `SELECT error FROM leasebus.dead`); !strings.Contains(text, "did not commit") {
		t.Errorf("the dead letter says %q, want that the transaction did not commit", text)
	}
}

// The lease has passed to another when CompleteTx is called. The handler ignores the error: it cannot commit.
func TestInbox_S17_IgnoredErrorCannotCommit(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	done := effects(t, pg)
	pool := pg.Pool(t)
	policy := numbersPolicy(20 * time.Second)
	inbox := openInbox(t, pg.DSN(), postgres.WithSweep(100*time.Millisecond))
	var seen tally
	var completeErr, commitErr atomic.Value
	startProcessor(t, inbox, policy, func(ctx context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `INSERT INTO public.effects VALUES ($1)`, n); err != nil {
			return err
		}
		if len(seen.of(n)) > 1 {
			return errors.Join(postgres.CompleteTx(ctx, tx), tx.Commit(ctx))
		}
		// Somebody takes the message over, and lets go of it in a moment.
		if _, err := pool.Exec(ctx, `UPDATE leasebus.ready SET generation = generation + 1, lease_owner = 7,
			visible_at = statement_timestamp() + interval '300ms'`); err != nil {
			return err
		}
		if err := postgres.CompleteTx(ctx, tx); err != nil {
			completeErr.Store(err)
		}
		if err := tx.Commit(context.WithoutCancel(ctx)); err != nil {
			commitErr.Store(err)
		}
		return nil
	})
	publishNumbers(t, inbox, policy, 0, 1)
	wantEnded(t, pg, 10*time.Second, 1, 0)
	if err, _ := completeErr.Load().(error); !errors.Is(err, leasebus.ErrLeaseLost) {
		t.Errorf("CompleteTx answers %v, want %v", err, leasebus.ErrLeaseLost)
	}
	if commitErr.Load() == nil {
		t.Error("the transaction committed")
	}
	if n := done(); n != 1 {
		t.Errorf("transactions took effect %d times, want once", n)
	}
	if runs := seen.of(0); len(runs) != 2 {
		t.Errorf("it was handled on attempts %v, want two of them", attemptsOf(runs))
	}
}

// A transaction publishes 10,000 messages and commits five seconds later, when the cursors have long passed their
// positions. They are handled promptly all the same, and even if the one who has published them cannot tell any more.
func TestInbox_S9_S62_LateCommitIsHandledPromptly(t *testing.T) {
	t.Parallel()
	const (
		total = 10_000
		late  = 5 * time.Second
	)
	for name, gone := range map[string]bool{"told": false, "swept": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := migrated(t, testservers.PrivatePostgres(t).PG)
			policy := numbersPolicy(30 * time.Second)
			limit := 6 * time.Second // for working through them, with the race detector
			if gone {
				limit += 3 * time.Second // the longest sweep
			}
			producer := openInbox(t, pg.DSN())
			var handled atomic.Int64
			var others atomic.Int64
			p := startProcessor(t, openInbox(t, pg.DSN()), policy, func(_ context.Context, n int64, _ leasebus.Delivery) error {
				if n < total {
					handled.Add(1)
				} else {
					others.Add(1)
				}
				return nil
			})
			publishNumbers(t, producer, policy, total, total+1)
			tx, err := pg.Conn(t).Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			publishNumbers(t, producer.Tx(tx), policy, 0, total)
			commitAt := time.Now().Add(late)
			count := int64(1)
			for ; time.Now().Before(commitAt); count++ {
				publishNumbers(t, producer, policy, total+count, total+count+1)
				time.Sleep(10 * time.Millisecond) // a steady flow that draws the cursors on
			}
			if n := handled.Load(); n > 0 {
				t.Errorf("%d messages were handled before they were committed", n)
			}
			eventually(t, 5*time.Second, "the flow is handled", func() error {
				if n := others.Load(); n != count {
					return fmt.Errorf("%d of %d", n, count)
				}
				return nil
			})
			if gone {
				if err := producer.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			took := eventually(t, 30*time.Second, "the late ones are handled", func() error {
				if n := handled.Load(); n != total {
					return fmt.Errorf("%d", n)
				}
				return nil
			})
			t.Logf("handled %v after the commit", took.Round(time.Millisecond))
			if took > limit {
				t.Errorf("it took %v, want %v at most", took, limit)
			}
			wantEnded(t, pg, 10*time.Second, total+int(count), 0)
			wantNoRejections(t, p)
		})
	}
}

// Publishing inside a transaction changes none of its settings, takes no lock that another publisher would wait for, and
// vanishes with it, a queue's registration excepted.
func TestInbox_S62_TxLeavesNoTrace(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	policy := numbersPolicy(30 * time.Second)
	conn := pg.Conn(t)
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	settings := func() (text string) {
		t.Helper()
		if err := tx.QueryRow(t.Context(), `SELECT string_agg(name || '=' || coalesce(setting, ''), E'\n' ORDER BY name) FROM pg_settings`).Scan(&text); err != nil {
			t.Fatal(err)
		}
		return text
	}
	before := settings()
	publishNumbers(t, inbox.Tx(tx), policy, 0, 10) // registers the queue
	publishNumbers(t, inbox.Tx(tx), policy, 10, 20, leasebus.Delay(time.Hour))
	if after := settings(); after != before {
		t.Errorf("settings changed from\n%s\nto\n%s", before, after)
	}
	publishing := make(chan error, 1)
	go func() { publishing <- publishOne(t.Context(), openInboxOnce(t, pg), policy, 20) }()
	select {
	case err := <-publishing:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Error("another publisher waits for the transaction")
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := endsOf(t, pg).Waiting; n != 1 {
		t.Errorf("%d messages are stored after the rollback, want 1", n)
	}
}

func openInboxOnce(t *testing.T, pg *testservers.PG) *postgres.Inbox {
	inbox, err := newInbox(t.Context(), pg.DSN())
	if err != nil {
		t.Error(err)
		return nil
	}
	t.Cleanup(func() { _ = inbox.Close() })
	return inbox
}
