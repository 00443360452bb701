package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

func publishOne(ctx context.Context, to leasebus.Publisher, policy *leasebus.Policy, n int64, opts ...leasebus.PublishOption) error {
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.Int64Value](policy, to)
	if err != nil {
		return err
	}
	_, err = publisher.Publish(ctx, wrapperspb.Int64(n), opts...)
	return err
}

// outcomes are what a publisher was told of each of its ids.
type outcomes struct {
	mu                       sync.Mutex
	stored, refused, unknown []string
}

func (o *outcomes) note(id leasebus.ID, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case err == nil:
		o.stored = append(o.stored, id.String())
	case errors.Is(err, leasebus.ErrOutcomeUnknown):
		o.unknown = append(o.unknown, id.String())
	default:
		o.refused = append(o.refused, id.String())
	}
}

// publishUntil publishes from several goroutines, each as fast as it is answered but for a breath, until the context
// ends.
func (o *outcomes) publishUntil(ctx context.Context, to leasebus.Publisher, policy *leasebus.Policy, publishers int) *sync.WaitGroup {
	var all sync.WaitGroup
	var next atomic.Int64
	for range publishers {
		all.Go(func() {
			for ctx.Err() == nil {
				id := leasebus.NewID()
				o.note(id, publishOne(context.WithoutCancel(ctx), to, policy, next.Add(1), leasebus.WithID(id)))
				select {
				case <-time.After(5 * time.Millisecond):
				case <-ctx.Done():
				}
			}
		})
	}
	return &all
}

// wantTrue checks that what the publisher was told is what happened, once everything has been handled.
func (o *outcomes) wantTrue(t *testing.T, pg *testservers.PG) {
	t.Helper()
	eventually(t, 30*time.Second, "everything is handled", func() error {
		if e := endsOf(t, pg); e.Waiting > 0 {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
	count := func(having string, ids []string) int {
		return testservers.Value[int](t, pg, `SELECT count(*) FROM (SELECT u.id FROM unnest($1::uuid[]) AS u(id)
			LEFT JOIN (SELECT id FROM leasebus.history UNION ALL SELECT id FROM leasebus.dead) h ON h.id = u.id GROUP BY u.id HAVING `+having+`) AS bad`, ids)
	}
	if n := count(`count(h.id) <> 1`, o.stored); n > 0 {
		t.Errorf("%d of %d messages that were said to be stored did not end exactly once", n, len(o.stored))
	}
	if n := count(`count(h.id) > 0`, o.refused); n > 0 {
		t.Errorf("%d of %d messages that were said not to be stored were", n, len(o.refused))
	}
	if n := count(`count(h.id) > 1`, o.unknown); n > 0 {
		t.Errorf("%d of %d messages of unknown outcome ended more than once", n, len(o.unknown))
	}
	t.Logf("%d stored, %d refused, %d unknown", len(o.stored), len(o.refused), len(o.unknown))
}

// Connections are terminated, the server is restarted and killed, while messages are published and handled, directly and
// through a pooler. What the publishers were told is what happened, and nothing is handled twice.
func TestInbox_S41_S54_RestartsAndTerminatedConnections(t *testing.T) {
	t.Parallel()
	for name, pooled := range map[string]bool{"direct": false, "pooled": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := testservers.PrivatePostgres(t)
			migrated(t, pg.PG)
			dsn := pg.DSN()
			if pooled {
				dsn = testservers.PgBouncer(t, pg.PG, "server_login_retry=1").DSN("default_query_exec_mode=exec")
			}
			restartWhileWorking(t, pg, openInbox(t, dsn))
		})
	}
}

func restartWhileWorking(t *testing.T, pg *testservers.Cluster, inbox *postgres.Inbox) {
	t.Helper()
	policy := numbersPolicy(20 * time.Second)
	var seen tally
	p := startProcessor(t, inbox, policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		time.Sleep(2 * time.Millisecond)
		return nil
	}, leasebus.WithConcurrency(16))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var told outcomes
	publishing := told.publishUntil(ctx, inbox, policy, 8)
	progress := func(after string) {
		t.Helper()
		before := seen.numbers()
		took := eventually(t, 15*time.Second, "work goes on after "+after, func() error {
			if n := seen.numbers() - before; n < 50 {
				return fmt.Errorf("%d were handled", n)
			}
			return nil
		})
		t.Logf("after %s: 50 messages in %v", after, took.Round(time.Millisecond))
	}
	progress("the start")
	for i := range 5 {
		n := pg.Terminate(t, `backend_type = 'client backend'`)
		progress(fmt.Sprintf("the end of %d connections (%d)", n, i))
	}
	pg.Stop(t)
	pg.Start(t)
	progress("a restart")
	pg.Kill(t)
	pg.Start(t)
	progress("a crash")
	cancel()
	publishing.Wait()
	told.wantTrue(t, pg.PG)
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	wantNoRejections(t, p)
	seen.wantOnce(t, seen.numbers())
	t.Logf("%+v", p.Stats())
}

// readOnlyBy are the ways in which a server comes to write nothing, and to write again.
var readOnlyBy = map[string]func(t *testing.T, c *testservers.Cluster, writable bool){
	"by setting": func(t *testing.T, c *testservers.Cluster, writable bool) {
		t.Helper()
		c.ReadOnly(t, !writable)
	},
	"as a standby": func(t *testing.T, c *testservers.Cluster, writable bool) {
		t.Helper()
		if writable {
			c.Promote(t)
		} else {
			c.Demote(t)
		}
	},
}

// The server is read-only for three seconds while handlers complete.
func TestInbox_S16_C2_4_ReadOnlyWhileCompleting(t *testing.T) {
	t.Parallel()
	for name, writable := range readOnlyBy {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const total = 200
			pg := testservers.PrivatePostgres(t)
			migrated(t, pg.PG)
			policy := numbersPolicy(15 * time.Second)
			inbox := openInbox(t, pg.DSN())
			var seen tally
			release := make(chan struct{})
			p := startProcessor(t, inbox, policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
				seen.note(n, d)
				<-release
				return nil
			}, leasebus.WithConcurrency(total/2), leasebus.WithLookAhead(0))
			publishNumbers(t, inbox, policy, 0, total)
			eventually(t, 10*time.Second, "half of them are in hand", func() error {
				if n := seen.numbers(); n != total/2 {
					return fmt.Errorf("%d are", n)
				}
				return nil
			})
			writable(t, pg, false)
			close(release)
			time.Sleep(3 * time.Second) // the fault's length
			if e := endsOf(t, pg.PG); e.Completed > 0 {
				t.Errorf("%d messages were completed on a server that writes nothing", e.Completed)
			}
			writable(t, pg, true)
			took := wantEnded(t, pg.PG, 15*time.Second, total, 0)
			t.Logf("all ended %v after the fault", took.Round(time.Millisecond))
			seen.wantOnce(t, total)
			if err := p.stop(); err != nil {
				t.Error(err)
			}
			wantNoRejections(t, p)
		})
	}
}

// The server is read-only for seconds while messages are published and handled, fail and wait. Publishers are told what it
// is, processors wait without hurry and go on by themselves, and nothing is lost.
func TestInbox_S16_S41_S54_ReadOnlyWhileWorking(t *testing.T) {
	t.Parallel()
	const away = 4 * time.Second
	for name, writable := range readOnlyBy {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := testservers.PrivatePostgres(t)
			migrated(t, pg.PG)
			policy := numbersPolicy(20 * time.Second)
			inbox := openInbox(t, pg.DSN())
			w := testservers.StartWorker(t, "numbers", envDSN+"="+pg.DSN(), envLease+"=20s", envWork+"=2ms")
			w.Await(t, "ready")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var told outcomes
			publishing := told.publishUntil(ctx, inbox, policy, 4)
			completed := func(more int) func() error {
				begin := endsOf(t, pg.PG).Completed
				return func() error {
					if n := endsOf(t, pg.PG).Completed - begin; n < more {
						return fmt.Errorf("%d", n)
					}
					return nil
				}
			}
			eventually(t, 15*time.Second, "work goes on at first", completed(100))
			later := leasebus.NewID()
			if err := publishOne(t.Context(), inbox, policy, 1, leasebus.WithID(later), leasebus.Delay(away/2)); err != nil {
				t.Fatal(err)
			}
			told.note(later, nil)

			writable(t, pg, false)
			before, frozen := w.CPUTime(), endsOf(t, pg.PG)
			began := time.Now()
			for time.Since(began) < away { // the fault's length
				if err := publishOne(t.Context(), inbox, policy, 1); !errors.Is(err, postgres.ErrReadOnly) || errors.Is(err, leasebus.ErrOutcomeUnknown) {
					t.Errorf("publish answers %v, want %v", err, postgres.ErrReadOnly)
				}
				time.Sleep(100 * time.Millisecond)
			}
			if used := w.CPUTime() - before; used > away/10 {
				t.Errorf("the worker used %v of processor time in %v without a server that writes, want %v at most", used, away, away/10)
			}
			if now := endsOf(t, pg.PG); now != frozen {
				t.Errorf("a server that writes nothing changed from %+v to %+v", frozen, now)
			}
			writable(t, pg, true)
			took := eventually(t, 15*time.Second, "work goes on again", completed(100))
			t.Logf("100 messages were handled %v after the fault", took.Round(time.Millisecond))
			cancel()
			publishing.Wait()
			if err := w.Stop(); err != nil {
				t.Error(err)
			}
			startProcessor(t, openInbox(t, pg.DSN()), policy, func(context.Context, int64, leasebus.Delivery) error { return nil })
			told.wantTrue(t, pg.PG)
			s := statsOf(t, []*testservers.Worker{w})
			if s.PersistRejected != 0 || s.LeaseLost != 0 {
				t.Errorf("leases were lost: %+v", s)
			}
			t.Logf("%+v", s)
		})
	}
}

// A network that goes silent, without a reset, takes the leases with it: the handlers are told before anyone else can
// have their messages, and what they do later changes nothing.
func TestInbox_S6_S12_SilentNetworkHandsOver(t *testing.T) {
	t.Parallel()
	const (
		total = 20
		lease = 2 * time.Second
	)
	direct := migrated(t, testservers.Postgres(t))
	proxy, pg := direct.Proxy(t)
	policy := numbersPolicy(lease)
	publishNumbers(t, openInbox(t, direct.DSN()), policy, 0, total)

	var mu sync.Mutex
	var told []time.Time
	var causes []error
	cutOff := openInbox(t, pg.DSN())
	a := startProcessor(t, cutOff, policy, func(ctx context.Context, n int64, _ leasebus.Delivery) error {
		if n == total { // of after the silence
			return nil
		}
		<-ctx.Done()
		mu.Lock()
		defer mu.Unlock()
		told, causes = append(told, time.Now()), append(causes, context.Cause(ctx))
		return nil // it tries to complete all the same
	}, leasebus.WithConcurrency(total))
	eventually(t, 10*time.Second, "the first processor has them", func() error {
		if n := a.InFlight(); n != total {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	proxy.Silence()
	silent := time.Now()

	var seen tally
	startProcessor(t, openInbox(t, direct.DSN()), policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		return nil
	})
	eventually(t, 15*time.Second, "the second processor takes over", func() error {
		if n := seen.numbers(); n != total {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	mu.Lock()
	if len(told) != total {
		t.Errorf("%d of %d handlers were told when their messages were handled elsewhere", len(told), total)
	}
	for i := range told {
		if first := seen.of(int64(i))[0].at; len(told) == total && told[i].After(first) {
			t.Errorf("handler %d was told %v after its message was taken over", i, told[i].Sub(first))
		}
		if !errors.Is(causes[i], leasebus.ErrLeaseLost) {
			t.Errorf("handler %d was told %v, want %v", i, causes[i], leasebus.ErrLeaseLost)
		}
	}
	if len(told) > 0 {
		t.Logf("told %v after the silence began", slices.MaxFunc(told, time.Time.Compare).Sub(silent).Round(time.Millisecond))
	}
	mu.Unlock()
	proxy.Speak()
	wantEnded(t, direct, 5*time.Second, total, 0)
	if err := publishOne(t.Context(), cutOff, policy, total); err != nil {
		t.Errorf("publish after the silence: %v", err)
	}
	wantEnded(t, direct, 15*time.Second, total+1, 0)
	if s := a.Stats(); s.Succeeded > 1 {
		t.Errorf("the processor that was cut off counts %d successes", s.Succeeded)
	}
}

// The connection that listens dies: polling covers for it, and another one listens again.
func TestInbox_S54_C9_1_ListenerIsKilled(t *testing.T) {
	t.Parallel()
	const poll = 500 * time.Millisecond
	pg := migrated(t, testservers.Postgres(t))
	policy := numbersPolicy(30 * time.Second)
	consumer := openInbox(t, pg.DSN(), postgres.WithPollInterval(poll), postgres.WithSweep(time.Hour))
	arrived := make(chan time.Time, 1)
	startProcessor(t, consumer, policy, func(context.Context, int64, leasebus.Delivery) error {
		arrived <- time.Now()
		return nil
	})
	producer := openInbox(t, pg.DSN())
	latency := func() time.Duration {
		t.Helper()
		began := time.Now()
		if err := publishOne(t.Context(), producer, policy, 1); err != nil {
			t.Fatal(err)
		}
		select {
		case at := <-arrived:
			return at.Sub(began)
		case <-time.After(10 * time.Second):
			t.Fatal("the message did not arrive")
			return 0
		}
	}
	median := func() time.Duration {
		t.Helper()
		var all []time.Duration
		for range 7 {
			all = append(all, latency())
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	listening := func() int {
		return testservers.Value[int](t, pg, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'listen%'`)
	}
	eventually(t, 10*time.Second, "the consumer listens", func() error {
		if listening() != 1 {
			return errors.New("nobody does")
		}
		return nil
	})
	latency() // connections are made
	if m := median(); m > poll/4 {
		t.Errorf("with notifications a message takes %v, want less than %v", m, poll/4)
	} else {
		t.Logf("with notifications: %v", m)
	}
	if n := pg.Terminate(t, `query ILIKE 'listen%'`); n != 1 {
		t.Fatalf("terminated %d connections that listen, want 1", n)
	}
	if l := latency(); l > 2*poll+time.Second {
		t.Errorf("just after the listener's end a message took %v, want %v at most", l, 2*poll+time.Second)
	} else {
		t.Logf("just after its end: %v", l)
	}
	took := eventually(t, 15*time.Second, "the consumer listens again", func() error {
		if listening() != 1 {
			return errors.New("nobody does")
		}
		return nil
	})
	if m := median(); m > poll/4 {
		t.Errorf("listening again, a message takes %v, want less than %v", m, poll/4)
	} else {
		t.Logf("listening again (after %v): %v", took.Round(time.Millisecond), m)
	}
}
