package postgres_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// The fault tests publish numbers and look at what becomes of each, whatever happens to processes, connections and the
// server meanwhile. They see the tables by SQL, past everything that is broken on purpose.

const numbersQueue = "numbers"

// numbersPolicy keeps completed messages, so that every end leaves a row, and retries at once and without end.
func numbersPolicy(lease time.Duration) *leasebus.Policy {
	p := leasebus.DefaultPolicy("google.protobuf.Int64Value", numbersQueue)
	p.Lease = leasebus.LeasePolicy{Duration: lease, Heartbeat: lease / 4}
	p.Retry = leasebus.FixedRetry(1000, 20*time.Millisecond)
	p.RetainCompleted = time.Hour
	return &p
}

func migrated(t *testing.T, pg *testservers.PG) *testservers.PG {
	t.Helper()
	pool := pg.Pool(t)
	defer pool.Close()
	if err := postgres.Migrate(t.Context(), pool); err != nil {
		t.Fatalf("migrate: %v", err)
	}
	return pg
}

// quiet keeps what is expected out of the test's output.
var quiet = slog.New(slog.DiscardHandler)

func openInbox(t *testing.T, dsn string, opts ...postgres.Option) *postgres.Inbox {
	t.Helper()
	inbox, err := newInbox(t.Context(), dsn, opts...)
	if err != nil {
		t.Fatalf("open the inbox: %v", err)
	}
	t.Cleanup(func() {
		if err := inbox.Close(); err != nil {
			t.Errorf("close the inbox: %v", err)
		}
	})
	return inbox
}

func newInbox(ctx context.Context, dsn string, opts ...postgres.Option) (*postgres.Inbox, error) {
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	return postgres.NewInbox(ctx, pool, append([]postgres.Option{postgres.WithLogger(quiet)}, opts...)...)
}

// publishNumbers publishes the numbers from first up to, not including, end.
func publishNumbers(t *testing.T, to leasebus.Publisher, policy *leasebus.Policy, first, end int64, opts ...leasebus.PublishOption) {
	t.Helper()
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.Int64Value](policy, to)
	if err != nil {
		t.Fatal(err)
	}
	var messages []*wrapperspb.Int64Value
	for n := first; n < end; n++ {
		messages = append(messages, wrapperspb.Int64(n))
	}
	if _, err := publisher.PublishBatch(t.Context(), messages, opts...); err != nil {
		t.Fatalf("publish: %v", err)
	}
}

// handling is one run of the handler.
type handling struct {
	n       int64
	attempt int
	at      time.Time
}

// tally records runs of handlers.
type tally struct {
	mu   sync.Mutex
	runs map[int64][]handling
}

func (c *tally) note(n int64, d leasebus.Delivery) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.runs == nil {
		c.runs = make(map[int64][]handling)
	}
	c.runs[n] = append(c.runs[n], handling{n, d.Attempt(), time.Now()})
}

func (c *tally) of(n int64) []handling {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.runs[n])
}

// numbers counts how many different numbers were handled.
func (c *tally) numbers() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.runs)
}

// wantOnce checks that no number was handled twice, nor on another attempt than its first.
func (c *tally) wantOnce(t *testing.T, total int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.runs) != total {
		t.Errorf("%d numbers were handled, want %d", len(c.runs), total)
	}
	more := 0
	for n, runs := range c.runs {
		if len(runs) == 1 && runs[0].attempt == 1 {
			continue
		}
		if more++; more <= 5 {
			t.Errorf("number %d was handled %d times, on attempts %v; want once, on the first", n, len(runs), attemptsOf(runs))
		}
	}
	if more > 5 {
		t.Errorf("… and so were %d more", more-5)
	}
}

func attemptsOf(runs []handling) (attempts []int) {
	for _, r := range runs {
		attempts = append(attempts, r.attempt)
	}
	return attempts
}

type numberHandler func(ctx context.Context, n int64, d leasebus.Delivery) error

// running is a processor at work.
type running struct {
	*leasebus.Processor
	cancel context.CancelFunc
	done   chan error
	once   sync.Once
	err    error
}

// subscribed tells when a processor has what it begins with.
type subscribed struct {
	leasebus.Source
	once sync.Once
	yes  chan struct{}
}

func (s *subscribed) Subscribe(ctx context.Context, sub leasebus.Subscription) (leasebus.Feed, error) {
	feed, err := s.Source.Subscribe(ctx, sub)
	if err == nil {
		s.once.Do(func() { close(s.yes) })
	}
	return feed, err
}

// startProcessor runs handle for the numbers, and returns when it leases; it is drained before the test ends.
func startProcessor(t *testing.T, source leasebus.Source, policy *leasebus.Policy, handle numberHandler, opts ...leasebus.ProcessorOption) *running {
	t.Helper()
	begun := &subscribed{Source: source, yes: make(chan struct{})}
	p, err := newProcessor(begun, policy, handle, opts...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	r := &running{Processor: p, cancel: cancel, done: make(chan error, 1)}
	go func() { r.done <- p.Run(ctx) }()
	t.Cleanup(func() { _ = r.stop() })
	select {
	case <-begun.yes:
	case err := <-r.done:
		r.once.Do(func() { r.err = err })
		t.Fatalf("run the processor: %v", err)
	}
	return r
}

func newProcessor(source leasebus.Source, policy *leasebus.Policy, handle numberHandler, opts ...leasebus.ProcessorOption) (*leasebus.Processor, error) {
	opts = append([]leasebus.ProcessorOption{
		leasebus.WithLogger(quiet), leasebus.WithDrainTimeout(2 * time.Second), leasebus.WithDrainGrace(time.Second),
	}, opts...)
	p, err := leasebus.NewProcessor(source, opts...)
	if err != nil {
		return nil, err
	}
	return p, leasebus.RegisterHandler(p, policy, func(ctx context.Context, m *wrapperspb.Int64Value) error {
		d, _ := leasebus.DeliveryFrom(ctx)
		return handle(ctx, m.GetValue(), d)
	})
}

// stop drains and returns what Run returned.
func (r *running) stop() error {
	r.once.Do(func() {
		r.cancel()
		r.err = <-r.done
	})
	return r.err
}

// eventually waits for a condition that nobody announces.
func eventually(t *testing.T, limit time.Duration, what string, try func() error) time.Duration {
	t.Helper()
	began := time.Now()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		took := time.Since(began)
		if err == nil {
			return took
		}
		if took > limit {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
		<-tick.C
	}
}

// ends are the ends that messages came to.
type ends struct{ Waiting, Completed, Dead, Distinct int }

func endsOf(t *testing.T, pg *testservers.PG) ends {
	t.Helper()
	text := testservers.Value[string](t, pg, `SELECT json_build_object(
		'waiting', (SELECT count(*) FROM leasebus.ready) + (SELECT count(*) FROM leasebus.delayed),
		'completed', (SELECT count(*) FROM leasebus.history), 'dead', (SELECT count(*) FROM leasebus.dead),
		'distinct', (SELECT count(*) FROM (SELECT id FROM leasebus.history UNION SELECT id FROM leasebus.dead) AS ended))`)
	var e ends
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		t.Fatal(err)
	}
	return e
}

// wantEnded waits until nothing waits any more, and checks that each of total messages has ended once, dead of them as
// dead letters.
func wantEnded(t *testing.T, pg *testservers.PG, limit time.Duration, total, dead int) time.Duration {
	t.Helper()
	took := eventually(t, limit, fmt.Sprintf("the end of all %d messages", total), func() error {
		if e := endsOf(t, pg); e.Waiting > 0 || e.Distinct < total {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
	if got, want := endsOf(t, pg), (ends{0, total - dead, dead, total}); got != want {
		t.Errorf("the messages ended as %+v, want %+v", got, want)
	}
	return took
}

// wantNoRejections checks that the store refused no settlement: nobody had taken a message from this processor.
func wantNoRejections(t *testing.T, p *running) {
	t.Helper()
	if s := p.Stats(); s.PersistRejected != 0 || s.PersistSkipped != 0 || s.LeaseLost != 0 {
		t.Errorf("leases were lost: %+v", s)
	}
}

// faultRoles are what worker processes of these tests do; TestMain hands them to [testservers.RunWorker].
var faultRoles = map[string]func(context.Context) error{
	"numbers":     numbersWorker,
	"transaction": transactionWorker,
	"migrate":     migrateWorker,
}

// Settings of worker processes.
const (
	envDSN         = "FAULT_DSN"
	envLease       = "FAULT_LEASE"
	envWork        = "FAULT_WORK"        // how long a handler works; "for ever" = until it is killed
	envOwner       = "FAULT_OWNER"       // default as the processor's
	envConcurrency = "FAULT_CONCURRENCY" // default 16
	envTell        = "FAULT_TELL"        // tell each run: "run <number> <attempt>"
	envAttempts    = "FAULT_ATTEMPTS"    // default without end; given, the number poison kills the process
	envFastRing    = "FAULT_FAST_RING"   // let the ring turn fast
)

const (
	forEver = "for ever"
	poison  = 50_050
)

// numbersWorker handles numbers until it is stopped, and says in the end what its processor counted. Some numbers fail
// for ever, and some once.
func numbersWorker(ctx context.Context) error {
	lease, err := time.ParseDuration(os.Getenv(envLease))
	if err != nil {
		return err
	}
	concurrency := 16
	if given := os.Getenv(envConcurrency); given != "" {
		if concurrency, err = strconv.Atoi(given); err != nil {
			return err
		}
	}
	opts := []postgres.Option{postgres.WithConnections(4)}
	if os.Getenv(envFastRing) != "" {
		opts = append(opts, fastRing())
	}
	inbox, err := newInbox(ctx, os.Getenv(envDSN), opts...)
	if err != nil {
		return err
	}
	policy := numbersPolicy(lease)
	handle := workerHandler(os.Getenv(envWork), os.Getenv(envTell) != "")
	if given := os.Getenv(envAttempts); given != "" {
		if policy.Retry.MaxAttempts, err = strconv.Atoi(given); err != nil {
			return err
		}
		handle = poisoned
	}
	p, err := newProcessor(inbox, policy, handle, leasebus.WithConcurrency(concurrency), leasebus.WithOwner(os.Getenv(envOwner)))
	if err != nil {
		return err
	}
	testservers.Sayf("ready")
	go testservers.SayCPUTime(ctx)
	err = p.Run(ctx)
	counted, jsonErr := json.Marshal(p.Stats())
	testservers.Sayf("stats %s", counted)
	return errors.Join(err, jsonErr, inbox.Close())
}

func workerHandler(work string, tell bool) numberHandler {
	duration, _ := time.ParseDuration(work) // "" and for ever are 0
	return func(_ context.Context, n int64, d leasebus.Delivery) error {
		if tell {
			testservers.Sayf("run %d %d", n, d.Attempt())
		}
		if work == forEver {
			select {}
		}
		time.Sleep(duration)
		switch {
		case failsForEver(n):
			return leasebus.Permanent(errors.New("never"))
		case n%10 == 3 && d.Attempt() == 1:
			return errors.New("not yet")
		}
		return nil
	}
}

// poisoned kills the process for one number, in the middle of all that the process has in hand.
func poisoned(_ context.Context, n int64, _ leasebus.Delivery) error {
	if n == poison {
		os.Exit(1)
	}
	return nil
}

// transactionWorker completes numbers in transactions, and says so before and after the commit.
func transactionWorker(ctx context.Context) error {
	lease, err := time.ParseDuration(os.Getenv(envLease))
	if err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, os.Getenv(envDSN))
	if err != nil {
		return err
	}
	defer pool.Close()
	inbox, err := newInbox(ctx, os.Getenv(envDSN))
	if err != nil {
		return err
	}
	p, err := newProcessor(inbox, numbersPolicy(lease), func(ctx context.Context, n int64, _ leasebus.Delivery) error {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer rollBack(ctx, tx)
		if err := takeEffect(ctx, tx, n); err != nil {
			return err
		}
		testservers.Sayf("completed")
		if os.Getenv(envWork) == forEver {
			select {}
		}
		err = tx.Commit(ctx)
		testservers.Sayf("committed")
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(p.Run(ctx), inbox.Close())
}

func failsForEver(n int64) bool { return n%100 == 7 }

// wokenBy is an error unless that is how an inbox learns of what others publish.
func wokenBy(t *testing.T, in *postgres.Inbox, want string) error {
	if got := in.CheckHealth(t.Context())[0].Details["wake"]; got != want {
		return fmt.Errorf("it is woken by %v, want %s", got, want)
	}
	return nil
}

// deadAmong is how many of the numbers below n fail for ever.
func deadAmong(n int) int { return (n + 92) / 100 }

// migrateWorker migrates, and opens the inbox.
func migrateWorker(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv(envDSN))
	if err != nil {
		return err
	}
	defer pool.Close()
	testservers.Sayf("ready")
	if err := postgres.Migrate(ctx, pool); err != nil {
		return err
	}
	inbox, err := postgres.NewInbox(ctx, pool)
	if err != nil {
		return err
	}
	return inbox.Close()
}
