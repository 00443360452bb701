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

// wantNoDeadlocks checks that the server had to resolve none, once everybody has gone and has told what it counted.
func wantNoDeadlocks(t *testing.T, pg *testservers.PG) {
	t.Helper()
	eventually(t, 20*time.Second, "all connections have ended", func() error {
		if n := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`); n > 0 {
			return fmt.Errorf("%d are there", n)
		}
		return nil
	})
	if n := testservers.Value[int](t, pg, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`); n > 0 {
		t.Errorf("there were %d deadlocks", n)
	}
}

// fillEnded puts old and fresh messages into the tables of those that have ended, of the queue and of another one.
func fillEnded(t *testing.T, pg *testservers.PG, old, fresh int) {
	t.Helper()
	pg.Exec(t, `INSERT INTO leasebus.queue (name) VALUES ($1), ('another') ON CONFLICT DO NOTHING`, numbersQueue)
	ages := `(SELECT q.id AS queue, n, statement_timestamp() - CASE WHEN n <= $1 THEN interval '2 hours' ELSE interval '0' END AS ended, statement_timestamp() - interval '3 hours' * (n <= $1)::int AS due
		FROM leasebus.queue q, generate_series(1, $1::int + $2::int) n ORDER BY n) ages`
	pg.Exec(t, `INSERT INTO leasebus.history (completed_at, first_due, id, queue, generation, attempts, type, owner, payload)
		SELECT ended, due, gen_random_uuid(), queue, 1, 1, 'google.protobuf.Int64Value', 'host', repeat('x', 200)::bytea FROM `+ages, old, fresh)
	pg.Exec(t, `INSERT INTO leasebus.dead (dead_at, first_due, id, queue, generation, attempts, type, dead_letter_queue, reason, error, error_type, last_owner, payload)
		SELECT ended, due, gen_random_uuid(), queue, 1, 1, 'google.protobuf.Int64Value', 'dlq', 'permanent', 'no', 'error', 'host', repeat('x', 200)::bytea FROM `+ages, old, fresh)
}

// Many processes delete what their retention has passed, all at the same time: exactly that, soon, without a deadlock, and
// without holding up what else goes on. An old snapshot, which keeps everything deleted from being cleaned up, changes
// nothing in that.
func TestInbox_S31_C10_5_C11_4_ManyProcessesPrune(t *testing.T) {
	t.Parallel()
	const (
		old, fresh = 50_000, 1000 // in each of two tables
		processes  = 4
	)
	for name, snapshot := range map[string]bool{"usual": false, "under an old snapshot": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := migrated(t, testservers.Postgres(t))
			fillEnded(t, pg, old, fresh)
			if snapshot {
				conn := pg.Conn(t)
				if _, err := conn.Exec(t.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM leasebus.history`); err != nil {
					t.Fatal(err)
				}
				defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
			}
			policy := numbersPolicy(30 * time.Second)
			policy.DeadLetter.Retention = time.Hour
			var handled atomic.Int64
			var inboxes []*postgres.Inbox
			var processors []*running
			began := time.Now()
			for range processes {
				inbox := openInbox(t, pg.DSN(), postgres.WithConnections(4))
				inboxes = append(inboxes, inbox)
				processors = append(processors, startProcessor(t, inbox, policy, func(context.Context, int64, leasebus.Delivery) error {
					handled.Add(1)
					return nil
				}))
			}
			pruned := make(chan struct{})
			longest := make(chan time.Duration, 1)
			go func() { longest <- slowestOf(t, inboxes[0], policy, &handled, pruned) }()
			left := func(table, queue string) int {
				return testservers.Value[int](t, pg, `SELECT count(*) FROM leasebus.`+table+` m JOIN leasebus.queue q ON q.id = m.queue
					WHERE q.name = $1 AND m.first_due < statement_timestamp() - interval '1 hour'`, queue)
			}
			eventually(t, 60*time.Second, "what is old has been deleted", func() error {
				if history, dead := left("history", numbersQueue), left("dead", numbersQueue); history+dead > 0 {
					return fmt.Errorf("%d completed messages and %d dead letters are left", history, dead)
				}
				return nil
			})
			took := time.Since(began)
			close(pruned)
			slowest := <-longest
			t.Logf("%d rows were deleted in %v, %.0f/s; meanwhile a message took %v at most", 2*old, took.Round(time.Millisecond), 2*old/took.Seconds(), slowest)
			if slowest > 2*time.Second {
				t.Errorf("while that went on, a message took %v", slowest)
			}
			for i, p := range processors {
				if err := p.stop(); err != nil {
					t.Error(err)
				}
				if err := inboxes[i].Close(); err != nil {
					t.Error(err)
				}
			}
			for table, want := range map[string]int{"history": fresh + int(handled.Load()), "dead": fresh} {
				if got := testservers.Value[int](t, pg, `SELECT count(*) FROM leasebus.`+table+` m JOIN leasebus.queue q ON q.id = m.queue WHERE q.name = $1`, numbersQueue); got != want {
					t.Errorf("%s has %d messages of the queue, want the %d that are not old", table, got, want)
				}
				if got := left(table, "another"); got != old {
					t.Errorf("%s has %d old messages of a queue that nobody handles, want all %d", table, got, old)
				}
			}
			if !snapshot {
				wantNoDeadlocks(t, pg)
			}
		})
	}
}

// slowestOf publishes and handles one message after another, and returns the longest that one took from its publishing to
// its handler.
func slowestOf(t *testing.T, inbox *postgres.Inbox, policy *leasebus.Policy, handled *atomic.Int64, until <-chan struct{}) (slowest time.Duration) {
	for n := int64(1); ; n++ {
		began := time.Now()
		if err := publishOne(t.Context(), inbox, policy, n, leasebus.Delay(time.Millisecond)); err != nil {
			t.Error(err)
			return slowest
		}
		for handled.Load() < n && time.Since(began) < 10*time.Second {
			time.Sleep(time.Millisecond)
		}
		slowest = max(slowest, time.Since(began))
		select {
		case <-until:
			return slowest
		default:
		}
	}
}

// An old snapshot keeps all that was delayed, and has long been handled, in the index. Retries do not read it again each
// time.
func TestInbox_S24_C11_1_OldSnapshotDoesNotSlowRetries(t *testing.T) {
	t.Parallel()
	const past, retries = 200_000, 40
	pg := migrated(t, testservers.Postgres(t))
	conn := pg.Conn(t)
	if _, err := conn.Exec(t.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM leasebus.queue`); err != nil {
		t.Fatal(err)
	}
	policy := numbersPolicy(30 * time.Second)
	inbox := openInbox(t, pg.DSN())
	publishNumbers(t, inbox, policy, 0, 1) // registers the queue
	pg.Exec(t, `INSERT INTO leasebus.delayed (due_at, first_due, id, queue, type, payload)
		SELECT statement_timestamp() - interval '1 hour' + n * interval '1 millisecond', statement_timestamp(), gen_random_uuid(), q.id, 'past', ''
		FROM generate_series(1, $1::int) n, leasebus.queue q`, past)
	pg.Exec(t, `DELETE FROM leasebus.delayed`)
	read := func() int {
		return testservers.Value[int](t, pg, `SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'delayed_pkey'`)
	}
	before := read()
	ended := make(chan struct{}, retries)
	startProcessor(t, inbox, policy, func(_ context.Context, _ int64, d leasebus.Delivery) error {
		if d.Attempt() == 1 {
			return errors.New("not yet")
		}
		ended <- struct{}{}
		return nil
	})
	for n := range int64(retries) {
		if n > 0 {
			publishNumbers(t, inbox, policy, n, n+1)
		}
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Fatalf("message %d was not retried", n)
		}
	}
	if err := inbox.Close(); err != nil { // the server is told what was read
		t.Error(err)
	}
	eventually(t, 20*time.Second, "the connections have ended", func() error {
		if n := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`); n > 1 {
			return fmt.Errorf("%d are there", n)
		}
		return nil
	})
	// Every promotion would read it all, and asking when the next is due again.
	n := read() - before
	t.Logf("%d index entries were read for %d retries", n, retries)
	if n > retries*past/4 {
		t.Errorf("%d index entries were read for %d retries, with %d dead ones in front", n, retries, past)
	}
}

// A delayed message of which nobody has told, such as of a transaction that committed late in a process that died, is
// found all the same.
func TestInbox_S9_S24_UntoldDelayedMessageIsFound(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	policy := numbersPolicy(30 * time.Second)
	inbox := openInbox(t, pg.DSN())
	var seen tally
	startProcessor(t, inbox, policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		return nil
	})
	publishNumbers(t, inbox, policy, 0, 1, leasebus.Delay(time.Millisecond))
	wantEnded(t, pg, 10*time.Second, 1, 0) // something was promoted
	pg.Exec(t, `INSERT INTO leasebus.delayed (due_at, first_due, id, queue, type, payload)
		SELECT statement_timestamp() - interval '1 minute', statement_timestamp(), gen_random_uuid(), id, $1, '\x0805' FROM leasebus.queue`, policy.Type)
	if took := wantEnded(t, pg, 10*time.Second, 2, 0); took > 5*time.Second {
		t.Errorf("it was found after %v", took)
	}
	if len(seen.of(5)) != 1 {
		t.Error("it was not handled")
	}
}
