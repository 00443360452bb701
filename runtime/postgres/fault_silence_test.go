package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// A connection can go silent without an end: a machine in between has lost it, or the server's has vanished. Only a bound
// on answers tells.

// The connection that listens goes silent. Messages are found by the sweep until that is noticed, by polling until
// another connection listens, and none is lost.
func TestInbox_S54_C5_3_SilentListenerIsNoticed(t *testing.T) {
	t.Parallel()
	const (
		noticed = 8 * time.Second // as docs/postgres.md says
		sweep   = time.Second
		poll    = 50 * time.Millisecond
	)
	direct := migrated(t, testservers.Postgres(t))
	proxy, throughProxy := direct.Proxy(t)
	policy := numbersPolicy(30 * time.Second)
	consumer := openInbox(t, direct.DSN(), postgres.WithListenDSN(throughProxy.DSN()), postgres.WithSweep(sweep), postgres.WithPollInterval(poll))
	var seen tally
	startProcessor(t, consumer, policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		return nil
	})
	producer := openInbox(t, direct.DSN())
	var sent int64
	latency := func() time.Duration {
		t.Helper()
		publishNumbers(t, producer, policy, sent, sent+1)
		sent++
		return eventually(t, 10*time.Second, "the message is handled", func() error {
			if len(seen.of(sent-1)) == 0 {
				return errors.New("it is not")
			}
			return nil
		})
	}
	wake := func(want string) func() error {
		return func() error { return wokenBy(t, consumer, want) }
	}
	eventually(t, 10*time.Second, "the inbox listens", wake("notifications"))
	latency() // connections are made

	proxy.Silence() // and nobody can listen anew
	if n := proxy.Forget(); n != 1 {
		t.Fatalf("%d connections went silent, want the one that listens", n)
	}
	silent := time.Now()
	longest := time.Duration(0)
	for wake("polling")() != nil {
		longest = max(longest, latency())
		if since := time.Since(silent); since > noticed+time.Second {
			t.Fatalf("not noticed within %v", since)
		}
	}
	t.Logf("noticed after %v; until then a message took %v at most", time.Since(silent).Round(time.Millisecond), longest.Round(time.Millisecond))
	if limit := sweep*3/2 + 500*time.Millisecond; longest > limit {
		t.Errorf("before it was noticed a message took %v, want %v at most", longest, limit)
	}
	longest = 0
	for range 10 {
		longest = max(longest, latency())
	}
	if limit := poll + 500*time.Millisecond; longest > limit {
		t.Errorf("while polling a message took %v, want %v at most", longest, limit)
	}
	// Those that tried to listen meanwhile stay dead.
	proxy.Forget()
	proxy.Speak()
	took := eventually(t, 30*time.Second, "the inbox listens again", wake("notifications"))
	t.Logf("listens again after %v", took.Round(time.Millisecond))
	latency()
	wantEnded(t, direct, 10*time.Second, int(sent), 0)
	seen.wantOnce(t, int(sent))
}

// Every connection of the inbox goes silent at once, in the middle of claims, renewals, settlements and publishing. All of
// it goes on over new connections, before any lease ends; nothing is handled twice, and nothing is left behind.
func TestInbox_S6_S16_S54_SilentConnectionsAreReplaced(t *testing.T) {
	t.Parallel()
	const (
		total = 300
		held  = 50 // are in hand for longer than a lease
		lease = 10 * time.Second
	)
	direct := migrated(t, testservers.Postgres(t))
	proxy, pg := direct.Proxy(t)
	inbox := openInbox(t, pg.DSN())
	policy := numbersPolicy(lease)
	var seen tally
	release := make(chan struct{})
	p := startProcessor(t, inbox, policy, func(ctx context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		if n < held {
			select {
			case <-release:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		return nil
	}, leasebus.WithConcurrency(2*held))
	publishNumbers(t, inbox, policy, 0, held)
	eventually(t, 10*time.Second, "the first ones are in hand", func() error {
		if n := p.InFlight(); n != held {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	// One statement of each kind is under way when all goes silent: the server does it, and the answer does not come.
	var lost []<-chan struct{}
	for _, match := range []func(string) bool{isClaim, isSettle, isRenewal, isInsert} {
		lost = append(lost, proxy.ForgetAt(match))
	}
	var told outcomes
	publishing, stop := context.WithCancel(t.Context())
	defer stop()
	var publishers sync.WaitGroup
	for i := range 4 {
		publishers.Go(func() {
			for n := int64(1000 * (i + 1)); publishing.Err() == nil; n++ {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				id := leasebus.NewID()
				told.note(id, publishOne(ctx, inbox, policy, n, leasebus.WithID(id)))
				cancel()
				select {
				case <-time.After(20 * time.Millisecond):
				case <-publishing.Done():
				}
			}
		})
	}
	for _, l := range lost {
		awaitLoss(t, l, "a statement")
	}
	silent := time.Now()
	t.Logf("%d connections more went silent", proxy.Forget())
	stop()
	publishers.Wait()
	// Renewals outlast the leases that were there when all went silent.
	if wait := time.Until(silent.Add(lease + 2*time.Second)); wait > 0 {
		time.Sleep(wait) // that nobody loses a lease can only be seen by waiting
	}
	close(release)
	told.wantTrue(t, direct)
	t.Logf("all has ended %v after the silence began", time.Since(silent).Round(time.Millisecond))
	seen.wantOnce(t, seen.numbers())
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	wantNoRejections(t, p)
	t.Logf("%+v", p.Stats())
	// The publish whose answer did not come is waited for, and nothing else is.
	if err := inbox.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(silent); took > 35*time.Second {
		t.Errorf("closing was over %v after the silence began", took)
	}
}

// A process vanishes in the middle of truncating a segment, with a lock that nothing passes: the server lets go of it soon.
func TestInbox_S9_S54_VanishedWhileTruncating(t *testing.T) {
	t.Parallel()
	direct := migrated(t, testservers.Postgres(t))
	proxy, pg := direct.Proxy(t)
	policy := numbersPolicy(30 * time.Second)
	policy.RetainCompleted = 0
	tiny := postgres.WithPace(50*time.Millisecond, 1, time.Hour)
	vanishing := openInbox(t, pg.DSN(), tiny)
	startProcessor(t, vanishing, policy, func(context.Context, int64, leasebus.Delivery) error { return nil })
	publisher := openInbox(t, direct.DSN())
	vanished := proxy.ForgetAt(testservers.Containing("LOCK TABLE", "ACCESS EXCLUSIVE"))
	for n := int64(0); ; n++ {
		publishNumbers(t, publisher, policy, 100*n, 100*n+100)
		select {
		case <-vanished:
		case <-time.After(50 * time.Millisecond):
			if n < 300 {
				continue
			}
			t.Fatal("no segment was truncated")
		}
		break
	}
	locked := func() int {
		return testservers.Value[int](t, direct, `SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
			WHERE l.mode = 'AccessExclusiveLock' AND l.granted AND c.relname LIKE 'ready%'
			AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	}
	if n := locked(); n == 0 {
		t.Error("no segment is locked")
	}
	took := eventually(t, 10*time.Second, "the lock is gone", func() error {
		if n := locked(); n > 0 {
			return fmt.Errorf("%d segments are locked", n)
		}
		return nil
	})
	t.Logf("the lock was gone after %v", took.Round(time.Millisecond))
	startProcessor(t, openInbox(t, direct.DSN()), policy, func(context.Context, int64, leasebus.Delivery) error { return nil })
	wantNothingLeft(t, direct)
}

// wantNothingLeft waits until all messages have ended, of queues that keep none.
func wantNothingLeft(t *testing.T, pg *testservers.PG) {
	t.Helper()
	eventually(t, 20*time.Second, "all messages have ended", func() error {
		if e := endsOf(t, pg); e.Waiting > 0 {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
}
