package postgres_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver for database/sql
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

const orders = "orders"

func ordersPolicy(change ...func(*leasebus.Policy)) *leasebus.Policy {
	p := leasebus.DefaultPolicy("google.protobuf.StringValue", orders)
	p.Lease = leasebus.LeasePolicy{Duration: 10 * time.Second, Heartbeat: time.Second}
	for _, c := range change {
		c(&p)
	}
	return &p
}

// consumer drives a feed by hand.
type consumer struct {
	leasebus.Feed
	t     *testing.T
	woken chan struct{}
}

func subscribe(t *testing.T, in leasebus.Source, policy *leasebus.Policy) *consumer {
	t.Helper()
	c := &consumer{t: t, woken: make(chan struct{}, 1)}
	feed, err := in.Subscribe(t.Context(), leasebus.Subscription{
		Queue: policy.Queue, Owner: "host:1#a", Policy: policy, Types: []string{policy.Type}, Check: func() {},
		Wake: func() {
			select {
			case c.woken <- struct{}{}:
			default:
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = feed.Close() })
	c.Feed = feed
	return c
}

// take leases until it has n.
func (c *consumer) take(n int) []*leasebus.Lease {
	c.t.Helper()
	var all []*leasebus.Lease
	eventually(c.t, 15*time.Second, fmt.Sprintf("%d leases", n), func() error {
		dst := make([]leasebus.Lease, n-len(all))
		got, err := c.Lease(c.t.Context(), dst)
		if err != nil {
			c.t.Fatal(err)
		}
		for i := range got {
			all = append(all, &dst[i])
		}
		if len(all) < n {
			return fmt.Errorf("%d", len(all))
		}
		return nil
	})
	return all
}

func (c *consumer) settle(want leasebus.Result, batch ...leasebus.Settlement) {
	c.t.Helper()
	if err := c.Settle(c.t.Context(), batch); err != nil {
		c.t.Fatal(err)
	}
	for i := range batch {
		if batch[i].Result != want {
			c.t.Fatalf("%v of element %d answers %d, want %d", batch[i].Kind, i, batch[i].Result, want)
		}
	}
}

func order(payload string) leasebus.Outgoing {
	return leasebus.Outgoing{Envelope: leasebus.Envelope{ID: leasebus.NewID(), Type: "google.protobuf.StringValue", Queue: orders, Payload: []byte(payload)}}
}

func send(t *testing.T, to leasebus.Publisher, out ...leasebus.Outgoing) {
	t.Helper()
	if err := to.Publish(t.Context(), out, make([]leasebus.Receipt, len(out))); err != nil {
		t.Fatal(err)
	}
}

func allBytes() []byte {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

// oneLife takes a message with everything in it through every statement of the inbox, and compares all along.
//
//nolint:gocyclo // one story, told in its order
func oneLife(t *testing.T, pg *testservers.PG, mode string, opts ...postgres.Option) {
	t.Helper()
	pool := poolOf(t.Context(), t, pg.DSN("default_query_exec_mode="+mode))
	defer pool.Close()
	if err := postgres.Migrate(t.Context(), pool, opts...); err != nil {
		t.Fatalf("%s: migrate: %v", mode, err)
	}
	inbox, err := postgres.NewInbox(t.Context(), pool, append(opts, logTo(t), postgres.WithConnections(4), postgres.WithSweep(50*time.Millisecond))...)
	if err != nil {
		t.Fatalf("%s: %v", mode, err)
	}
	defer func() { _ = inbox.Close() }()
	policy := ordersPolicy(func(p *leasebus.Policy) { p.RetainCompleted = time.Hour })
	policy.Queue = orders + "-" + mode
	c := subscribe(t, inbox, policy)
	defer func() { _ = c.Close() }()
	tricky := string([]byte("quote ' double \" back \\ dollar $1 {schema} brace {} comma , ünïcødé 漢字 \n\t"))
	out := order("")
	out.Queue, out.Payload, out.IdempotencyKey, out.OrderingKey = policy.Queue, allBytes(), "key "+tricky, "lane "+tricky
	out.Headers = leasebus.NewHeaders(map[string]string{"tricky": tricky, "empty": ""})
	later := out
	later.ID, later.Delay = leasebus.NewID(), 20*time.Millisecond
	send(t, inbox, out, later)
	same := func(what string, e *leasebus.Envelope) {
		t.Helper()
		if !bytes.Equal(e.Payload, out.Payload) || e.IdempotencyKey != out.IdempotencyKey || e.OrderingKey != out.OrderingKey ||
			!bytes.Equal(e.Headers.Encoded(), out.Headers.Encoded()) || e.Type != out.Type || e.Queue != out.Queue {
			t.Fatalf("%s, %s: the envelope has changed: %+v", mode, what, e)
		}
	}
	failure := &leasebus.Failure{Attempt: 1, Text: "failed: " + tricky, ErrorType: "*errors." + tricky}
	for i, l := range c.take(2) {
		same("leased", &l.Envelope)
		if want := [2]leasebus.ID{out.ID, later.ID}[i]; l.ID != want || l.Attempt != 1 || l.Generation != 1 || l.FirstDue.IsZero() {
			t.Fatalf("%s: lease %+v, want id %v", mode, l, want)
		}
		renewals := []leasebus.Renewal{{Lease: l}}
		if err := c.Renew(t.Context(), renewals); err != nil || renewals[0].Result != leasebus.ResultOK {
			t.Fatalf("%s: renew: %v, %v", mode, renewals, err)
		}
		c.settle(leasebus.ResultStillLeased, leasebus.Settlement{Lease: l, Kind: leasebus.SettleVerify})
		delay := time.Duration(i) * 10 * time.Millisecond
		c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Failure: failure, Delay: delay})
	}
	again := c.take(2)
	same("retried", &again[0].Envelope)
	c.settle(leasebus.ResultOK,
		leasebus.Settlement{Lease: again[0], Kind: leasebus.SettleComplete},
		leasebus.Settlement{Lease: again[1], Kind: leasebus.SettleDeadLetter, Failure: failure, Reason: leasebus.ReasonPermanent, DeadLetterQueue: "dlq", Attempts: 2})
	letters, err := inbox.DeadLetters(t.Context(), policy.Queue, leasebus.Filter{
		IDs: []leasebus.ID{again[1].ID}, Type: out.Type, Reason: leasebus.ReasonPermanent, ErrorContains: tricky, Since: time.Now().Add(-time.Hour), Before: time.Now().Add(time.Hour),
	}, "", 10)
	if err != nil || len(letters) != 1 {
		t.Fatalf("%s: %d dead letters, %v", mode, len(letters), err)
	}
	same("buried", &letters[0].Envelope)
	if d := letters[0]; d.Error != failure.Text || d.ErrorType != failure.ErrorType || len(d.History) != 2 || d.LastOwner != "host:1#a" || d.FirstFailed.IsZero() {
		t.Fatalf("%s: dead letter %+v", mode, d)
	}
	edited := out.Envelope
	edited.ID = leasebus.NewID()
	ref := leasebus.DeadLetterRef{ID: again[1].ID}
	if d, err := inbox.Replace(t.Context(), policy.Queue, ref, &edited, tricky); err != nil || d != leasebus.DispositionDone {
		t.Fatalf("%s: replace: %v, %v", mode, d, err)
	}
	if d, err := inbox.Requeue(t.Context(), policy.Queue, []leasebus.DeadLetterRef{ref}, tricky); err != nil || d[0] != leasebus.DispositionReplaced {
		t.Fatalf("%s: requeue: %v, %v", mode, d, err)
	}
	last := c.take(1)[0]
	same("edited", &last.Envelope)
	c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: last, Kind: leasebus.SettleRelease, Started: true})
	if l := c.take(1)[0]; l.Interruptions != 1 || l.Attempt != 1 {
		t.Fatalf("%s: after an interruption: %+v", mode, l)
	}
	stats, err := inbox.Stats(t.Context(), policy.Queue)
	if want := (leasebus.QueueStats{Processing: 1, DeadLettered: 1, Completed: 1}); err != nil || stats != want {
		t.Fatalf("%s: stats %+v, %v; want %+v", mode, stats, err, want)
	}
	if d, err := inbox.Discard(t.Context(), policy.Queue, []leasebus.DeadLetterRef{ref}, tricky); err != nil || d[0] != leasebus.DispositionDone {
		t.Fatalf("%s: discard: %v, %v", mode, d, err)
	}
}

func TestInbox_S60_EveryWayOfExecutingStatements(t *testing.T) {
	t.Parallel()
	for mode := range execModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			pg := testservers.Postgres(t)
			oneLife(t, pg, mode)
			pg.Exec(t, `DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET bytea_output = escape', current_database());
				EXECUTE format('ALTER DATABASE %I SET datestyle = German', current_database()); END$$`)
			oneLife(t, pg, mode, postgres.WithSchema("other"))
		})
	}
}

// A message of another process arrives by its notification, long before anybody polls.
func TestInbox_WakesAcrossProcesses(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	slow := []postgres.Option{postgres.WithPollInterval(time.Hour), postgres.WithSweep(time.Hour)}
	consumerInbox, producer := openInbox(t, pg.DSN(), slow...), openInbox(t, pg.DSN(), slow...)
	policy := ordersPolicy()
	c := subscribe(t, consumerInbox, policy)
	eventually(t, 10*time.Second, "the inbox listens", func() error {
		if n := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'listen%' AND state = 'idle'`); n != 1 {
			return fmt.Errorf("%d connections do", n)
		}
		return nil
	})
	db, err := sql.Open("pgx", pg.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	for name, publish := range map[string]func(out leasebus.Outgoing){
		"publish": func(out leasebus.Outgoing) { send(t, producer, out) },
		"pgx transaction": func(out leasebus.Outgoing) {
			tx, err := pg.Pool(t).Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			send(t, producer.Tx(tx), out)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
		"sql transaction": func(out leasebus.Outgoing) {
			tx, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			send(t, producer.SQLTx(tx), out)
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
		},
		"long transaction": func(out leasebus.Outgoing) {
			tx, err := pg.Pool(t).Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			send(t, producer.Tx(tx), out)
			if _, err := tx.Exec(t.Context(), `SELECT pg_sleep(0.5)`); err != nil {
				t.Fatal(err)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
		"transaction that was rolled back, and one that was not": func(out leasebus.Outgoing) {
			for _, end := range []func(tx pgx.Tx) error{
				func(tx pgx.Tx) error { return tx.Rollback(t.Context()) },
				func(tx pgx.Tx) error { return tx.Commit(t.Context()) },
			} {
				tx, err := pg.Pool(t).Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				send(t, producer.Tx(tx), out)
				if err := end(tx); err != nil {
					t.Fatal(err)
				}
			}
		},
		"delayed": func(out leasebus.Outgoing) {
			out.Delay = 30 * time.Millisecond
			send(t, producer, out)
		},
		"delayed in a transaction": func(out leasebus.Outgoing) {
			out.Delay = 30 * time.Millisecond
			tx, err := pg.Pool(t).Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			send(t, producer.Tx(tx), out)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for {
			n, err := c.Lease(t.Context(), make([]leasebus.Lease, 1))
			if err != nil {
				t.Fatal(err)
			}
			if n == 0 {
				break
			}
		}
		select {
		case <-c.woken:
		default:
		}
		began := time.Now()
		out := order(name)
		publish(out)
		eventually(t, 10*time.Second, name+" was leased", func() error {
			select {
			case <-c.woken:
			case <-time.After(10 * time.Second):
				t.Fatalf("%s: not woken", name)
			}
			dst := make([]leasebus.Lease, 1)
			if n, err := c.Lease(t.Context(), dst); n != 1 || err != nil {
				return fmt.Errorf("%d, %w", n, err)
			}
			if dst[0].ID != out.ID {
				t.Errorf("%s: leased %s", name, dst[0].Payload)
			}
			return nil
		})
		t.Logf("%s took %v", name, time.Since(began))
	}
}

func TestPublish_ConcurrentCallsShareTransactions(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	const callers, each = 64, 10
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for i := range each {
				out := []leasebus.Outgoing{order(fmt.Sprint(i))}
				receipts := make([]leasebus.Receipt, 1)
				if err := inbox.Publish(t.Context(), out, receipts); err != nil || receipts[0].ID != out[0].ID {
					t.Errorf("publish: %+v, %v", receipts, err)
				}
			}
		})
	}
	all.Wait()
	type counts struct{ messages, transactions int }
	var got counts
	conn := pg.Conn(t)
	err := conn.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT xmin::text) FROM leasebus.ready`).Scan(&got.messages, &got.transactions)
	if err != nil || got.messages != callers*each || got.transactions > callers*each/4 {
		t.Errorf("%+v, %v; want %d messages in far fewer transactions", got, err, callers*each)
	}
}

// A call whose context ends while others hold the database up returns at once, and says what is true.
func TestPublish_S41_ContextEndsWhileWaiting(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	send(t, inbox, order("first"))
	blocker := pg.Conn(t)
	tx, err := blocker.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `LOCK leasebus.ready IN EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	var mu sync.Mutex
	unknown, refused := map[leasebus.ID]bool{}, map[leasebus.ID]bool{}
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("waited enough")
	publish := func() {
		out := []leasebus.Outgoing{order("waits")}
		err := inbox.Publish(ctx, out, make([]leasebus.Receipt, 1))
		if !errors.Is(err, enough) {
			t.Errorf("publish returned %v", err)
		}
		mu.Lock()
		defer mu.Unlock()
		if errors.Is(err, leasebus.ErrOutcomeUnknown) {
			unknown[out[0].ID] = true
		} else {
			refused[out[0].ID] = true
		}
	}
	const flushers = 2
	for sent := range flushers { // one by one, or the second shares the first one's transaction
		all.Go(publish)
		eventually(t, 10*time.Second, "it waits in the database", func() error {
			n := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)
			if n != sent+1 {
				return fmt.Errorf("%d do", n)
			}
			return nil
		})
	}
	for range 20 {
		all.Go(publish)
	}
	time.AfterFunc(50*time.Millisecond, func() { cancel(enough) })
	all.Wait()
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(unknown) != flushers || len(refused) != 20 {
		t.Errorf("%d outcomes are unknown, %d were taken back; want %d and 20", len(unknown), len(refused), flushers)
	}
	send(t, inbox, order("last"))
	for _, l := range subscribe(t, inbox, ordersPolicy()).take(2 + len(unknown)) {
		if refused[l.ID] {
			t.Errorf("message %v was published, though its publisher was told that it was not", l.ID)
		}
	}
}

func TestPublish_AfterClose(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	c := subscribe(t, inbox, ordersPolicy())
	send(t, inbox, order("before"))
	if err := inbox.Close(); err != nil {
		t.Fatal(err)
	}
	if err := inbox.Close(); err != nil {
		t.Errorf("a second close: %v", err)
	}
	receipts := make([]leasebus.Receipt, 1)
	if err := inbox.Publish(t.Context(), []leasebus.Outgoing{order("after")}, receipts); err == nil || errors.Is(err, leasebus.ErrOutcomeUnknown) {
		t.Errorf("publish: %v", err)
	}
	if _, err := c.Lease(t.Context(), make([]leasebus.Lease, 1)); err == nil {
		t.Error("lease: no error")
	}
	if _, err := inbox.Subscribe(t.Context(), leasebus.Subscription{Queue: "x", Owner: "y", Policy: ordersPolicy()}); err == nil {
		t.Error("subscribe: no error")
	}
}

// S15: what cannot be stored is told apart by element; the database is not even asked.
func TestSettle_S15_UnstorableTextAmidGoodOnes(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	c := subscribe(t, inbox, ordersPolicy())
	send(t, inbox, order("1"), order("2"), order("3"), order("4"))
	l := c.take(4)
	bad := &leasebus.Failure{Attempt: 1, Text: "a\x00b"}
	worse := &leasebus.Failure{Attempt: 1, Text: "a\xffb"}
	batch := []leasebus.Settlement{
		{Lease: l[0], Kind: leasebus.SettleComplete},
		{Lease: l[1], Kind: leasebus.SettleDeadLetter, Failure: bad, Reason: leasebus.ReasonPermanent},
		{Lease: l[2], Kind: leasebus.SettleRetry, Failure: worse},
		{Lease: l[3], Kind: leasebus.SettleDefer, Delay: time.Hour},
	}
	if err := c.Settle(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	for i, want := range []leasebus.Result{leasebus.ResultOK, leasebus.ResultRejected, leasebus.ResultRejected, leasebus.ResultOK} {
		if batch[i].Result != want {
			t.Errorf("element %d answers %d, want %d", i, batch[i].Result, want)
		}
	}
}

// A policy's retentions delete by themselves.
func TestRetention_S31(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	c := subscribe(t, inbox, ordersPolicy(func(p *leasebus.Policy) {
		p.RetainCompleted, p.DeadLetter.Retention = time.Second, time.Second
	}))
	send(t, inbox, order("1"), order("2"))
	l := c.take(2)
	c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: l[0]}, leasebus.Settlement{Lease: l[1], Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonPermanent})
	if stats, err := inbox.Stats(t.Context(), orders); err != nil || stats.Completed != 1 || stats.DeadLettered != 1 {
		t.Fatalf("%+v, %v", stats, err)
	}
	eventually(t, 15*time.Second, "retention", func() error {
		if stats, err := inbox.Stats(t.Context(), orders); err != nil || stats.Completed+stats.DeadLettered > 0 {
			return fmt.Errorf("%+v, %w", stats, err)
		}
		return nil
	})
}

// A message whose correlation is its own id has it wherever it goes, though the id is kept once.
func TestInbox_S59_OwnCorrelation(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	c := subscribe(t, inbox, ordersPolicy(func(p *leasebus.Policy) { p.RetainCompleted = time.Hour }))
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](ordersPolicy(), inbox)
	if err != nil {
		t.Fatal(err)
	}
	want := func(where string, e *leasebus.Envelope) {
		t.Helper()
		if got := e.Headers.Get(leasebus.HeaderCorrelation); got != e.ID.String() {
			t.Errorf("%s: the correlation is %q, want %q", where, got, e.ID)
		}
	}
	if _, err := publisher.PublishBatch(t.Context(), []*wrapperspb.StringValue{wrapperspb.String("1"), wrapperspb.String("2")}); err != nil {
		t.Fatal(err)
	}
	leases := c.take(2)
	want("leased", &leases[0].Envelope)
	c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: leases[0]},
		leasebus.Settlement{Lease: leases[1], Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonPermanent})
	completed, err := inbox.Completed(t.Context(), orders, "", 10)
	if err != nil || len(completed) != 1 {
		t.Fatalf("%d are completed, %v", len(completed), err)
	}
	want("completed", &completed[0].Envelope)
	dead, err := inbox.DeadLetters(t.Context(), orders, leasebus.Filter{}, "", 10)
	if err != nil || len(dead) != 1 {
		t.Fatalf("%d are dead letters, %v", len(dead), err)
	}
	want("dead letter", &dead[0].Envelope)
}

// The same through database/sql: publish and complete, commit and roll back, ignore the error of a lost lease.
func TestSQLTx_S17_S62(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN(), postgres.WithSweep(100*time.Millisecond))
	db, err := sql.Open("pgx", pg.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	for _, commit := range []bool{false, true} {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		out := []leasebus.Outgoing{order(fmt.Sprint("now ", commit)), order(fmt.Sprint("later ", commit))}
		out[0].Payload, out[1].Delay = append(out[0].Payload, allBytes()...), 20*time.Millisecond
		send(t, inbox.SQLTx(tx), out...)
		if commit {
			err = tx.Commit()
		} else {
			err = tx.Rollback()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	policy := ordersPolicy(func(p *leasebus.Policy) {
		p.Lease = leasebus.LeasePolicy{Duration: 2 * time.Second, Heartbeat: 500 * time.Millisecond}
		p.Retry = leasebus.FixedRetry(5, 10*time.Millisecond)
	})
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](policy, inbox)
	if err != nil {
		t.Fatal(err)
	}
	c := subscribe(t, inbox, policy)
	var payloads []string
	leases := c.take(2)
	for _, l := range leases {
		payloads = append(payloads, string(l.Payload))
		c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: l})
	}
	if all := strings.Join(payloads, " "); !strings.HasPrefix(all, "now true"+string(allBytes())) || !strings.Contains(all, "later true") {
		t.Errorf("published by the transaction that committed: %q", payloads)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}

	pg.Exec(t, `CREATE TABLE effects (value text)`)
	p, err := leasebus.NewProcessor(inbox, leasebus.WithLogger(quiet))
	if err != nil {
		t.Fatal(err)
	}
	var lostErr, commitErr error
	err = leasebus.RegisterHandler(p, policy, func(ctx context.Context, m *wrapperspb.StringValue) error {
		d, _ := leasebus.DeliveryFrom(ctx)
		stolen := m.GetValue() == "stolen" && d.Attempt() == 1
		begin := func() (*sql.Tx, error) {
			return postgres.BeginSQLTx(ctx, db, &sql.TxOptions{Isolation: sql.LevelSerializable})
		}
		if stolen {
			begin = func() (*sql.Tx, error) { return db.BeginTx(ctx, nil) } // which holds no lease
		}
		tx, err := begin()
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if _, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES ($1)`, m.GetValue()); err != nil {
			return err
		}
		if stolen {
			pg.Exec(t, `UPDATE leasebus.ready SET generation = generation + 1 WHERE id = $1`, d.ID().String())
			lostErr = postgres.CompleteSQLTx(ctx, tx)
			commitErr = tx.Commit() // whatever it said
			return nil
		}
		if err := postgres.CompleteSQLTx(ctx, tx); err != nil {
			return err
		}
		if m.GetValue() == "rolled back" && d.Attempt() == 1 {
			return nil // and does not commit
		}
		return tx.Commit()
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, value := range []string{"plain", "rolled back", "stolen"} {
		if _, err := publisher.Publish(t.Context(), wrapperspb.String(value)); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	eventually(t, 30*time.Second, "all took effect", func() error {
		if n := testservers.Value[int](t, pg, `SELECT count(*) FROM effects`); n != 3 {
			return fmt.Errorf("%d did", n)
		}
		return nil
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if !errors.Is(lostErr, leasebus.ErrLeaseLost) || commitErr == nil {
		t.Errorf("completing without the lease answers %v, and the commit after it %v", lostErr, commitErr)
	}
	if n := testservers.Value[int](t, pg, `SELECT count(*) FROM leasebus.ready`); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

func TestCompleteTx_OutsideAHandler(t *testing.T) {
	t.Parallel()
	if err := postgres.CompleteTx(t.Context(), nil); err == nil {
		t.Error("no error")
	}
}

// A large claim is made of two at the same time; what comes of them is one batch, in order, each message once.
func TestLease_S1_S2_LargeBatchesKeepTheirOrder(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	out := make([]leasebus.Outgoing, 2300)
	for i := range out {
		out[i] = order(fmt.Sprint(i))
	}
	send(t, inbox, out...)
	c := subscribe(t, inbox, ordersPolicy())
	next := 0
	for _, size := range []int{500, 201, 199, 1000, 1, 900} {
		dst := make([]leasebus.Lease, size)
		n, err := c.Lease(t.Context(), dst)
		if err != nil || n != min(size, len(out)-next) {
			t.Fatalf("leased %d of %d, %v", n, size, err)
		}
		seen := make(map[leasebus.ID]bool)
		for i := range n {
			if i > 0 && dst[i].Ref.N <= dst[i-1].Ref.N {
				t.Fatalf("lease %d of %d is before the one in front of it", i, size)
			}
			seen[dst[i].ID] = true
		}
		for i := range n {
			if !seen[out[next+i].ID] {
				t.Fatalf("batch of %d: message %d is not in it", size, next+i)
			}
		}
		for i := n; i < size; i++ {
			if dst[i].ID != (leasebus.ID{}) || dst[i].Payload != nil {
				t.Fatalf("something is left at %d, behind the %d that were leased", i, n)
			}
		}
		next += n
	}
}
