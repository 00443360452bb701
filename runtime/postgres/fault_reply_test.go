package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// Statements as the proxy sees them.
var (
	isClaim   = testservers.Containing("lease_owner", "attempt + 1")
	isSettle  = testservers.Containing("DELETE FROM", "unnest", "lease_owner")
	isRenewal = testservers.Containing("UPDATE", "unnest", "visible_at", "generation")
	isInsert  = testservers.Containing("INSERT INTO", "unnest", "payload", "last_value")
)

// losing opens an inbox whose connections pass through a proxy.
func losing(t *testing.T) (direct *testservers.PG, proxy *testservers.Proxy, inbox *postgres.Inbox) {
	t.Helper()
	direct = migrated(t, testservers.Postgres(t))
	proxy, pg := direct.Proxy(t)
	return direct, proxy, openInbox(t, pg.DSN())
}

func awaitLoss(t *testing.T, lost <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-lost:
	case <-time.After(15 * time.Second):
		t.Fatalf("no reply to %s was lost", what)
	}
}

// A claim whose answer is lost has leased messages that nobody knows of: they come back at once, the attempt not spent.
func TestInbox_S25_LostClaimIsGivenBack(t *testing.T) {
	t.Parallel()
	const total = 100
	direct, proxy, inbox := losing(t)
	policy := numbersPolicy(30 * time.Second)
	publishNumbers(t, openInbox(t, direct.DSN()), policy, 0, total)
	lost := proxy.LoseReply(isClaim)
	var seen tally
	began := time.Now()
	p := startProcessor(t, inbox, policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		return nil
	})
	awaitLoss(t, lost, "a claim")
	wantEnded(t, direct, 20*time.Second, total, 0)
	took := time.Since(began)
	t.Logf("all ended after %v", took.Round(time.Millisecond))
	if took > policy.Lease.Duration/3 {
		t.Errorf("it took %v: the leases were waited for", took)
	}
	seen.wantOnce(t, total)
	if s := p.Stats(); s.LeaseErrors == 0 {
		t.Errorf("no failed claim was counted: %+v", s)
	}
}

// The last claim of a processor that stops is given back, too.
func TestInbox_S25_S50_LostClaimIsGivenBackThoughTheProcessorStops(t *testing.T) {
	t.Parallel()
	const total = 10
	direct, proxy, inbox := losing(t)
	policy := numbersPolicy(30 * time.Second)
	lost := proxy.LoseReply(isClaim)
	publishNumbers(t, openInbox(t, direct.DSN()), policy, 0, total)
	p := startProcessor(t, inbox, policy, func(context.Context, int64, leasebus.Delivery) error { return nil })
	awaitLoss(t, lost, "a claim")
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	if err := inbox.Close(); err != nil {
		t.Error(err)
	}
	e := endsOf(t, direct)
	if n := testservers.Value[int](t, direct, `SELECT count(*) FROM leasebus.ready WHERE attempt = 0 AND visible_at <= statement_timestamp()`); n+e.Completed != total {
		t.Errorf("%d messages are free again and %d handled, want %d together: the others wait for the end of a lease that nobody holds", n, e.Completed, total)
	}
}

// Settlements whose answer is lost were stored: none is counted as refused, and none is handled again.
func TestInbox_S14_LostSettlementsAreNotRejections(t *testing.T) {
	t.Parallel()
	for name, retained := range map[string]time.Duration{"kept": time.Hour, "deleted": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const total, losses = 300, 4
			direct, proxy, inbox := losing(t)
			policy := numbersPolicy(30 * time.Second)
			policy.RetainCompleted = retained
			publishNumbers(t, openInbox(t, direct.DSN()), policy, 0, total)
			var seen tally
			p := startProcessor(t, inbox, policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
				seen.note(n, d)
				time.Sleep(2 * time.Millisecond)
				return nil
			}, leasebus.WithConcurrency(4), leasebus.WithLookAhead(8))
			for range losses {
				awaitLoss(t, proxy.LoseReply(isSettle), "a settlement")
			}
			eventually(t, 20*time.Second, "all is settled", func() error {
				if e := endsOf(t, direct); e.Waiting > 0 {
					return fmt.Errorf("%+v", e)
				}
				return nil
			})
			if err := p.stop(); err != nil {
				t.Error(err)
			}
			seen.wantOnce(t, total)
			wantNoRejections(t, p)
			s := p.Stats()
			if s.SettleUnknown == 0 || s.Succeeded+s.SettleUnknown != total {
				t.Errorf("%d succeeded and %d unknown, want %d together, some of them unknown: %+v", s.Succeeded, s.SettleUnknown, total, s)
			}
			t.Logf("%d succeeded, %d unknown", s.Succeeded, s.SettleUnknown)
		})
	}
}

// Renewals whose answer is lost, time and again, cost no lease.
func TestInbox_S6_LostRenewalsCostNoLease(t *testing.T) {
	t.Parallel()
	const total, lease = 20, 2 * time.Second
	direct, proxy, inbox := losing(t)
	policy := numbersPolicy(lease)
	publishNumbers(t, openInbox(t, direct.DSN()), policy, 0, total)
	var seen tally
	release := make(chan struct{})
	p := startProcessor(t, inbox, policy, func(ctx context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}, leasebus.WithConcurrency(total))
	for range 6 {
		awaitLoss(t, proxy.LoseReply(isRenewal), "a renewal")
	}
	close(release)
	wantEnded(t, direct, 10*time.Second, total, 0)
	seen.wantOnce(t, total)
	wantNoRejections(t, p)
	if s := p.Stats(); s.RenewErrors == 0 {
		t.Errorf("no failed renewal was counted: %+v", s)
	}
}

// A publish whose answer is lost is neither stored nor refused for the one who publishes: it is unknown.
func TestInbox_S41_LostPublishIsUnknown(t *testing.T) {
	t.Parallel()
	direct, proxy, inbox := losing(t)
	policy := numbersPolicy(30 * time.Second)
	publishNumbers(t, inbox, policy, 0, 1)
	lost := proxy.LoseReply(isInsert)
	if err := publishOne(t.Context(), inbox, policy, 1); !errors.Is(err, leasebus.ErrOutcomeUnknown) {
		t.Errorf("publish answers %v, want %v", err, leasebus.ErrOutcomeUnknown)
	}
	awaitLoss(t, lost, "a publish")
	if n := testservers.Value[int](t, direct, `SELECT count(*) FROM leasebus.ready`); n != 2 {
		t.Errorf("%d messages are stored, want 2", n)
	}
}

// Behind a pooler, what a lost server leaves is an error of the pooler's. It says nothing about what the server did.
func TestInbox_S41_LostPublishBehindPgBouncerIsUnknown(t *testing.T) {
	t.Parallel()
	direct := migrated(t, testservers.Postgres(t))
	proxy, behind := direct.Proxy(t)
	pooled := testservers.PgBouncer(t, behind)
	inbox := openInbox(t, pooled.DSN("default_query_exec_mode=exec"))
	policy := numbersPolicy(30 * time.Second)
	publishNumbers(t, inbox, policy, 0, 1)
	lost := proxy.LoseReply(isInsert)
	if err := publishOne(t.Context(), inbox, policy, 1); !errors.Is(err, leasebus.ErrOutcomeUnknown) {
		t.Errorf("publish answers %v, want %v", err, leasebus.ErrOutcomeUnknown)
	}
	awaitLoss(t, lost, "a publish")
	if n := testservers.Value[int](t, direct, `SELECT count(*) FROM leasebus.ready`); n != 2 {
		t.Errorf("%d messages are stored, want 2", n)
	}
}

// The same for a claim: what the pooler answers does not say that nothing was leased.
func TestInbox_S25_LostClaimBehindPgBouncerIsGivenBack(t *testing.T) {
	t.Parallel()
	const total = 50
	direct := migrated(t, testservers.Postgres(t))
	proxy, behind := direct.Proxy(t)
	pooled := testservers.PgBouncer(t, behind)
	policy := numbersPolicy(30 * time.Second)
	publishNumbers(t, openInbox(t, direct.DSN()), policy, 0, total)
	inbox := openInbox(t, pooled.DSN("default_query_exec_mode=exec"))
	lost := proxy.LoseReply(isClaim)
	var seen tally
	began := time.Now()
	startProcessor(t, inbox, policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		return nil
	})
	awaitLoss(t, lost, "a claim")
	wantEnded(t, direct, 40*time.Second, total, 0)
	if took := time.Since(began); took > policy.Lease.Duration/3 {
		t.Errorf("it took %v: the leases were waited for", took)
	}
	seen.wantOnce(t, total)
}

// Replies of every kind are lost and connections cut at random, under two processors that fail, defer and complete.
func TestInbox_S14_S25_S41_RandomLosses(t *testing.T) {
	t.Parallel()
	const length = 5 * time.Second
	direct, proxy, inbox := losing(t)
	policy := numbersPolicy(20 * time.Second)
	var seen tally
	handle := func(_ context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		switch {
		case n%7 == 1 && d.Attempt() == 1:
			return errors.New("not yet")
		case n%7 == 2 && len(seen.of(n)) == 1:
			return leasebus.Defer(30 * time.Millisecond)
		}
		return nil
	}
	processors := []*running{
		startProcessor(t, inbox, policy, handle),
		startProcessor(t, openInbox(t, direct.At(proxy.Addr()).DSN()), policy, handle),
	}
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var told outcomes
	publishing := told.publishUntil(ctx, inbox, policy, 4)
	anything := func(statement string) bool { return !strings.Contains(statement, "pg_notify") }
	faults := 0
	for ; ctx.Err() == nil; faults++ {
		match := []func(string) bool{isClaim, isSettle, isInsert, anything}[rand.IntN(4)]
		if rand.IntN(8) == 0 {
			proxy.Cut()
		}
		select {
		case <-proxy.LoseReply(match):
		case <-ctx.Done():
		}
		select {
		case <-time.After(rand.N(60 * time.Millisecond)):
		case <-ctx.Done():
		}
	}
	publishing.Wait()
	told.wantTrue(t, direct)
	t.Logf("%d faults", faults)
	for _, p := range processors {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
		wantNoRejections(t, p)
		t.Logf("%+v", p.Stats())
	}
	seen.mu.Lock()
	defer seen.mu.Unlock()
	for n, runs := range seen.runs {
		want := 1
		if n%7 == 1 || n%7 == 2 {
			want = 2
		}
		if len(runs) != want {
			t.Errorf("number %d was handled on attempts %v, want %d times", n, attemptsOf(runs), want)
		}
	}
}
