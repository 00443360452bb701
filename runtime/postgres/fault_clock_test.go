package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// skewed makes the database's clock wrong by an interval, as it looks from this process: the functions that tell the
// time are hidden behind others.
func skewed(t *testing.T, pg *testservers.PG, interval string) (dsn string) {
	t.Helper()
	pg.Exec(t, `CREATE SCHEMA skew`)
	for _, name := range []string{"statement_timestamp", "clock_timestamp", "transaction_timestamp", "now"} {
		pg.Exec(t, fmt.Sprintf(`CREATE FUNCTION skew.%[1]s() RETURNS timestamptz LANGUAGE sql STABLE AS
			$$ SELECT pg_catalog.%[1]s() + interval '%[2]s' $$`, name, interval))
	}
	return pg.DSN("search_path=skew,pg_catalog,public")
}

// The clocks of the database and of this process are ten years apart. Nothing is leased early or late, renewed for
// nothing, or expired: every time that decides is the database's, and what this process counts are durations.
func TestInbox_S4_S24_C10_6_TenYearsOfSkewChangeNothing(t *testing.T) {
	t.Parallel()
	for _, interval := range []string{"10 years", "-10 years"} {
		t.Run(interval, func(t *testing.T) {
			t.Parallel()
			pg := testservers.Postgres(t)
			dsn := skewed(t, pg, interval)
			if err := postgres.Migrate(t.Context(), poolOf(t.Context(), t, dsn)); err != nil {
				t.Fatal(err)
			}
			inbox := openInbox(t, dsn)
			policy := numbersPolicy(2 * time.Second)
			policy.Retry = leasebus.RetryPolicy{MaxAttempts: 3, Initial: 500 * time.Millisecond, Multiplier: 1, GiveUpAfter: time.Minute}

			const failing, slow, delayed = 1, 2, 3
			begun := time.Now()
			runs := make(chan string, 100)
			p := startProcessor(t, inbox, policy, func(ctx context.Context, n int64, d leasebus.Delivery) error {
				runs <- fmt.Sprintf("%d attempt %d", n, d.Attempt())
				switch {
				case n == failing && d.Attempt() == 1:
					return errors.New("again")
				case n == failing && time.Since(begun) < 500*time.Millisecond:
					t.Errorf("retried after %v", time.Since(begun))
				case n == slow: // outlives two leases
					select {
					case <-time.After(5 * time.Second):
					case <-ctx.Done():
						t.Errorf("the lease was given up: %v", context.Cause(ctx))
					}
				case n == delayed && time.Since(begun) < time.Second:
					t.Errorf("delayed by a second, run after %v", time.Since(begun))
				}
				return nil
			})
			publishNumbers(t, inbox, policy, failing, slow+1)
			publishNumbers(t, inbox, policy, delayed, delayed+1, leasebus.Delay(time.Second))
			wantEnded(t, pg, 20*time.Second, 3, 0)
			if err := p.stop(); err != nil {
				t.Error(err)
			}
			if n := len(runs); n != 4 {
				t.Errorf("%d runs, want one each and one retry", n)
			}
			if s := p.Stats(); s.LeaseLost != 0 || s.PersistRejected != 0 {
				t.Errorf("%+v", s)
			}
			// What is stored is the database's time.
			if years := testservers.Value[int](t, pg, `SELECT round(abs(extract(epoch FROM max(completed_at) - clock_timestamp())) / 31557600)::int FROM leasebus.history`); years != 10 {
				t.Errorf("completed %d years away from the server's own clock, want 10: the skew did not work", years)
			}
		})
	}
}

// All workers are stuck in transactions, and the service's own pool has no connection left. Leases are renewed and
// outcomes are stored all the same, on connections of the inbox's own.
func TestInbox_S8_HandlersThatTakeAllConnectionsCostNoLease(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	pool := pg.Pool(t, "pool_max_conns=2")
	inbox, err := postgres.NewInbox(t.Context(), pool, postgres.WithLogger(quiet), postgres.WithConnections(4))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := inbox.Close(); err != nil {
			t.Error(err)
		}
	})
	const lease = 2 * time.Second
	policy := numbersPolicy(lease)
	release := make(chan struct{})
	p := startProcessor(t, inbox, policy, func(ctx context.Context, n int64, d leasebus.Delivery) error {
		if d.Attempt() != 1 {
			t.Errorf("message %d was leased again, attempt %d", n, d.Attempt())
		}
		if n == 4 {
			return nil // its outcome has to get past the others
		}
		tx, err := pool.Begin(ctx) // two get one; the others wait for them
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
		<-release
		return ctx.Err()
	}, leasebus.WithConcurrency(5))
	publishNumbers(t, inbox, policy, 0, 5)
	eventually(t, 10*time.Second, "the outcome of the one that is not stuck", func() error {
		if e := endsOf(t, pg); e.Completed != 1 {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
	time.Sleep(2 * lease)
	close(release)
	wantEnded(t, pg, 10*time.Second, 5, 0)
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	if s := p.Stats(); s.LeaseLost != 0 || s.PersistRejected != 0 || s.Succeeded != 5 {
		t.Errorf("%+v", s)
	}
}

// Handlers take what they can get of the inbox's own connections, too: each waits in an operator's action for a row that
// somebody has locked. What is left are those for claims, settlements and heartbeats: leases are kept, outcomes stored,
// and what has become due is handled.
func TestInbox_S8_S26_HandlersThatTakeTheInboxsConnectionsCostNoLease(t *testing.T) {
	t.Parallel()
	const lease, stuck, rounds = 2 * time.Second, 4, 4
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN(), postgres.WithConnections(4))
	policy := numbersPolicy(lease)
	policy.RetainCompleted = time.Second // so that there is pruning to be done
	dead := make(chan leasebus.ID, 1)
	var retried atomic.Int64
	p := startProcessor(t, inbox, policy, func(ctx context.Context, n int64, d leasebus.Delivery) error {
		switch {
		case n == 7:
			dead <- d.ID()
			return leasebus.Permanent(errors.New("never"))
		case n > 10 && d.Attempt() == 1:
			return leasebus.RetryAfter(50*time.Millisecond, errors.New("not yet"))
		case n > 10:
			retried.Add(1)
			return nil
		case d.Attempt() != 1:
			t.Errorf("message %d was leased again, attempt %d", n, d.Attempt())
		}
		id := <-dead
		dead <- id
		_, err := inbox.Discard(ctx, numbersQueue, []leasebus.DeadLetterRef{{ID: id}}, "a handler")
		return err
	}, leasebus.WithConcurrency(stuck+1))
	publishNumbers(t, inbox, policy, 7, 8)
	wantEnded(t, pg, 10*time.Second, 1, 1)
	holder := pg.Conn(t)
	if _, err := holder.Exec(t.Context(), `BEGIN; SELECT FROM leasebus.dead FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	publishNumbers(t, inbox, policy, 0, stuck)
	eventually(t, 10*time.Second, "all but one worker is stuck, one of them in the database", func() error {
		if n := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`); n == 0 || p.InFlight() != stuck {
			return fmt.Errorf("%d handlers run, %d connections wait for the row", p.InFlight(), n)
		}
		return nil
	})
	other := openInbox(t, pg.DSN())
	for n := int64(1); n <= rounds; n++ { // over many leases
		publishNumbers(t, other, policy, 10+n, 11+n)
		took := eventually(t, 10*time.Second, "a message is retried and handled", func() error {
			if got := retried.Load(); got != n {
				return fmt.Errorf("%d were", got)
			}
			return nil
		})
		if took > 5*time.Second {
			t.Errorf("it took %v", took)
		}
		time.Sleep(lease) // the stuck ones are to outlive it
	}
	if _, err := holder.Exec(t.Context(), `ROLLBACK`); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "all has ended", func() error {
		if e := endsOf(t, pg); e.Waiting > 0 || e.Dead > 0 {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	wantNoRejections(t, p)
	if s := p.Stats(); s.Succeeded != stuck+rounds {
		t.Errorf("%+v", s)
	}
}
