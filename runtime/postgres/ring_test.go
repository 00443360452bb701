package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// The tests of the ring let it turn within milliseconds and at some dozens of messages, so that it goes round often.

const fastHead = 48 << 10

func fastRing() postgres.Option {
	return postgres.WithPace(20*time.Millisecond, fastHead, 50*time.Millisecond)
}

// stillRing does not turn: the test moves messages itself.
func stillRing() postgres.Option { return postgres.WithPace(20*time.Millisecond, 1<<40, time.Hour) }

// evacuate moves everything out of the ring's segments, as the ring would in its time.
func evacuate(t testing.TB, pg *testservers.PG) {
	t.Helper()
	for seg := range 8 {
		pg.Exec(t, postgres.EvacuateSQL("leasebus", seg), 1000)
	}
}

// turns is how often the head has moved on; a skipped segment counts.
func turns(t *testing.T, pg *testservers.PG) int {
	t.Helper()
	return testservers.Value[int](t, pg, `SELECT last_value FROM leasebus.ring`)
}

// ringBytes is what the segments of the ring and the cold one occupy.
func ringBytes(t *testing.T, pg *testservers.PG) (ring, cold int) {
	t.Helper()
	const size = `SELECT coalesce(sum(pg_relation_size(oid)), 0)::int FROM pg_class WHERE relname ~ '%s' AND relnamespace = 'leasebus'::regnamespace`
	return testservers.Value[int](t, pg, fmt.Sprintf(size, "^ready_[0-7]$")), testservers.Value[int](t, pg, fmt.Sprintf(size, "^ready_cold$"))
}

func inCold(t *testing.T, pg *testservers.PG) int {
	t.Helper()
	return testservers.Value[int](t, pg, `SELECT count(*) FROM leasebus.ready_cold`)
}

// idleInCold is how many of those are of a queue that nobody works on, which stay there.
func idleInCold(t *testing.T, pg *testservers.PG, queue string) int {
	t.Helper()
	const count = `SELECT count(*) FROM leasebus.ready_cold WHERE queue = (SELECT id FROM leasebus.queue WHERE name = $1)`
	return testservers.Value[int](t, pg, count, queue)
}

// A message that is moved stays what it was: its lease is renewed and ended by its owner, and by nobody else.
func TestRing_S12_LeasesStayValidWhenTheirMessagesMove(t *testing.T) {
	t.Parallel()
	settlements := map[string]leasebus.Settlement{
		"complete":    {Kind: leasebus.SettleComplete},
		"retry":       {Kind: leasebus.SettleRetry, Delay: time.Millisecond, Failure: &leasebus.Failure{Attempt: 1, Text: "no"}},
		"defer":       {Kind: leasebus.SettleDefer, Delay: time.Millisecond},
		"release":     {Kind: leasebus.SettleRelease},
		"dead-letter": {Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonPermanent, DeadLetterQueue: "orders.dlq"},
		"discard":     {Kind: leasebus.SettleDiscard},
	}
	for _, keep := range []time.Duration{0, time.Hour} {
		pg := migrated(t, testservers.Postgres(t))
		inbox := openInbox(t, pg.DSN(), stillRing())
		c := subscribe(t, inbox, ordersPolicy(func(p *leasebus.Policy) { p.RetainCompleted = keep }))
		for name, st := range settlements {
			send(t, inbox, order("m"))
			l := c.take(1)[0]
			st.Lease = l
			evacuate(t, pg)
			if n := inCold(t, pg); n != 1 {
				t.Fatalf("%d messages were moved, want 1", n)
			}
			c.settle(leasebus.ResultStillLeased, leasebus.Settlement{Lease: l, Kind: leasebus.SettleVerify})
			renewals := []leasebus.Renewal{{Lease: l}}
			if err := c.Renew(t.Context(), renewals); err != nil || renewals[0].Result != leasebus.ResultOK {
				t.Fatalf("%s: renewal of a message that was moved: %d, %v", name, renewals[0].Result, err)
			}
			c.settle(leasebus.ResultOK, st)
			c.settle(leasebus.ResultLost, st)
			if n := inCold(t, pg); n != 0 {
				t.Fatalf("%s left %d messages in the cold segment", name, n)
			}
			if name == "retry" || name == "defer" || name == "release" {
				c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: c.take(1)[0], Kind: leasebus.SettleComplete})
			}
			c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: l, Kind: leasebus.SettleVerify})
		}
	}
}

// A lease that expired in one segment and was taken over in another is the new owner's alone.
func TestRing_S12_TakenOverAfterTheMove(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN(), stillRing(), postgres.WithSweep(20*time.Millisecond))
	policy := ordersPolicy(func(p *leasebus.Policy) {
		p.Lease = leasebus.LeasePolicy{Duration: 200 * time.Millisecond, Heartbeat: 50 * time.Millisecond}
	})
	late, next := subscribe(t, inbox, policy), subscribe(t, inbox, policy)
	send(t, inbox, order("m"))
	old := late.take(1)[0]
	evacuate(t, pg)
	taken := next.take(1)[0] // when it has expired
	if taken.Attempt != 2 || taken.Generation != old.Generation+1 || taken.ID != old.ID {
		t.Fatalf("taken over as attempt %d, generation %d", taken.Attempt, taken.Generation)
	}
	renewals := []leasebus.Renewal{{Lease: old}}
	if err := late.Renew(t.Context(), renewals); err != nil || renewals[0].Result != leasebus.ResultLost {
		t.Errorf("a stale renewal answers %d, %v", renewals[0].Result, err)
	}
	for _, kind := range []leasebus.SettlementKind{leasebus.SettleComplete, leasebus.SettleRetry, leasebus.SettleRelease, leasebus.SettleVerify} {
		late.settle(leasebus.ResultLost, leasebus.Settlement{Lease: old, Kind: kind})
	}
	next.settle(leasebus.ResultOK, leasebus.Settlement{Lease: taken, Kind: leasebus.SettleComplete})
}

// Handlers complete in their transactions what was moved while they worked.
func TestRing_S17_TransactionsFindWhatWasMoved(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]func(context.Context, postgres.Beginner) (pgx.Tx, error){
		"read committed": func(ctx context.Context, db postgres.Beginner) (pgx.Tx, error) {
			return db.BeginTx(ctx, pgx.TxOptions{})
		},
		"serializable": func(ctx context.Context, db postgres.Beginner) (pgx.Tx, error) {
			return postgres.BeginTx(ctx, db, pgx.TxOptions{IsoLevel: pgx.Serializable})
		},
	} {
		for _, keep := range []time.Duration{0, time.Hour} {
			t.Run(fmt.Sprintf("%s, kept for %v", name, keep), func(t *testing.T) {
				t.Parallel()
				pg := migrated(t, testservers.Postgres(t))
				done, pool, policy := effects(t, pg), pg.Pool(t), numbersPolicy(10*time.Second)
				policy.RetainCompleted = keep
				handle := func(ctx context.Context, n int64, _ leasebus.Delivery) error {
					evacuate(t, pg)
					tx, err := begin(ctx, pool)
					if err != nil {
						return err
					}
					defer rollBack(ctx, tx)
					return commitEffect(ctx, tx, n)
				}
				inbox := openInbox(t, pg.DSN(), stillRing())
				p := startProcessor(t, inbox, policy, handle)
				const total = 20
				publishNumbers(t, inbox, policy, 0, total)
				eventually(t, 15*time.Second, "all have succeeded", func() error {
					if s := p.Stats(); s.Succeeded < total {
						return fmt.Errorf("%+v", s)
					}
					return nil
				})
				if err := p.stop(); err != nil {
					t.Error(err)
				}
				wantNoRejections(t, p)
				if n := done(); n != total {
					t.Errorf("the transactions took effect %d times, want %d", n, total)
				}
			})
		}
	}
}

// Everything at once while the ring goes round: three inboxes publish and work, messages fail, are retried and die, a
// handler works all the time, a queue has nobody who works on it, and another session holds an old snapshot, so that
// vacuum could clean up nothing.
func TestRing_GoesRoundUnderLoadWhateverStays(t *testing.T) {
	t.Parallel()
	const atOnce, idleAtOnce, enough = 500, 10, 100_000
	pg := migrated(t, testservers.PrivatePostgres(t).PG)
	snapshot, err := pg.Pool(t).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer rollBack(t.Context(), snapshot)
	if _, err := snapshot.Exec(t.Context(), `SELECT 1`); err != nil {
		t.Fatal(err)
	}
	policy := numbersPolicy(5 * time.Second)
	var inboxes []*postgres.Inbox
	for range 3 {
		inboxes = append(inboxes, openInbox(t, pg.DSN(), fastRing(), postgres.WithSweep(100*time.Millisecond)))
	}
	nobody := numbersPolicy(time.Minute)
	nobody.Queue = "nobody"
	const patient = 3
	letGo := make(chan struct{})
	var once sync.Once
	finish := func() { once.Do(func() { close(letGo) }) }
	defer finish()
	var seen tally
	handle := func(ctx context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		switch {
		case n == patient:
			select {
			case <-letGo:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		case failsForEver(n):
			return leasebus.Permanent(errors.New("never"))
		case n%10 == 1 && d.Attempt() == 1:
			return errors.New("not yet")
		}
		return nil
	}
	var processors []*running
	for _, inbox := range inboxes {
		processors = append(processors, startProcessor(t, inbox, policy, handle, leasebus.WithConcurrency(16)))
	}
	total, idle, rounds, moved, largest := 0, 0, 0, 0, 0
	for rounds < 2 || moved < idle/2 { // a busy machine turns the ring seldom
		if total == enough {
			t.Fatalf("after %d messages, the ring has gone round %d times and moved %d of %d messages that nobody works on", total, rounds, moved, idle)
		}
		publishNumbers(t, inboxes[0], nobody, int64(idle), int64(idle+idleAtOnce))
		publishNumbers(t, inboxes[total/atOnce%len(inboxes)], policy, int64(total), int64(total+atOnce))
		total, idle = total+atOnce, idle+idleAtOnce
		eventually(t, 30*time.Second, "most of it is done", func() error {
			if n := seen.numbers(); n < total-2*atOnce {
				return fmt.Errorf("%d of %d", n, total)
			}
			return nil
		})
		ring, _ := ringBytes(t, pg)
		largest, rounds, moved = max(largest, ring), turns(t, pg)/8, idleInCold(t, pg, nobody.Queue)
	}
	eventually(t, 30*time.Second, "all but one message of the busy queue are done", func() error {
		if e := endsOf(t, pg); e.Waiting > idle+1 || e.Distinct < total-1 {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
	ring, cold := ringBytes(t, pg)
	t.Logf("%d messages in %d rounds; the ring had at most %d KiB, and has %d KiB now; the cold segment has %d KiB",
		total, rounds, largest>>10, ring>>10, cold>>10)
	// Between two turns a busy machine publishes some heads at once, and one is truncated only when it has been drained.
	if most := 100 * fastHead; largest > most {
		t.Errorf("the ring had %d bytes, want at most %d", largest, most)
	}
	if n := inCold(t, pg); n < moved || n > idle+1 {
		t.Errorf("the cold segment has %d messages, want %d to %d: those that nobody works on, and the one in hand", n, moved, idle+1)
	}
	finish()
	dead := deadAmong(total)
	eventually(t, 10*time.Second, "the patient handler's message is done", func() error {
		if e := endsOf(t, pg); e != (ends{idle, total - dead, dead, total}) {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
	for _, p := range processors {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
		wantNoRejections(t, p)
	}
	if runs := seen.of(patient); len(runs) != 1 {
		t.Errorf("the patient handler ran %d times, want once", len(runs))
	}
	wantEach(t, inboxes[1], nobody, idle)
}

// wantEach works on a queue and wants each of its numbers once.
func wantEach(t *testing.T, inbox *postgres.Inbox, policy *leasebus.Policy, total int) {
	t.Helper()
	var seen tally
	startProcessor(t, inbox, policy, func(_ context.Context, n int64, d leasebus.Delivery) error {
		seen.note(n, d)
		return nil
	})
	eventually(t, 20*time.Second, "the queue is worked on", func() error {
		if n := seen.numbers(); n < total {
			return fmt.Errorf("%d of %d", n, total)
		}
		return nil
	})
	seen.wantOnce(t, total)
}

// Another session reads all segments in one long transaction, as a dump does: nothing can be truncated, the work goes
// on, and when it has ended the ring tidies up.
func TestRing_ALongReaderHoldsAllSegments(t *testing.T) {
	t.Parallel()
	const total = 4000
	pg := migrated(t, testservers.Postgres(t))
	reader, err := pg.Pool(t).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer rollBack(t.Context(), reader)
	if _, err := reader.Exec(t.Context(), `SELECT count(*) FROM leasebus.ready`); err != nil {
		t.Fatal(err)
	}
	inbox := openInbox(t, pg.DSN(), fastRing(), postgres.WithSweep(100*time.Millisecond))
	policy := numbersPolicy(5 * time.Second)
	p := startProcessor(t, inbox, policy, func(context.Context, int64, leasebus.Delivery) error { return nil })
	for first := int64(0); first < total; first += 200 {
		publishNumbers(t, inbox, policy, first, first+200)
	}
	wantEnded(t, pg, 20*time.Second, total, 0)
	if ring, _ := ringBytes(t, pg); ring == 0 {
		t.Error("something was truncated under the reader")
	}
	rollBack(t.Context(), reader)
	eventually(t, 10*time.Second, "the ring is tidy", func() error {
		publishNumbers(t, inbox, policy, total, total+1) // one more for the head to have something
		if ring, _ := ringBytes(t, pg); ring > 4*fastHead {
			return fmt.Errorf("%d bytes", ring)
		}
		return nil
	})
	wantNoRejections(t, p)
}

// Workers are killed at whatever step of a rotation they are, and nothing is lost nor ends twice.
func TestRing_S9_S12_KilledAtAnyStepOfARotation(t *testing.T) {
	t.Parallel()
	const total, enough = 10_000, 12
	pg := migrated(t, testservers.PrivatePostgres(t).PG)
	inbox := openInbox(t, pg.DSN())
	crew := testservers.StartCrew(t, 3, "numbers", envDSN+"="+pg.DSN(), envLease+"=1s", envFastRing+"=yes", envWork+"=1ms")
	published := int64(0)
	if _, err := crew.Churn(t.Context(), func(_ context.Context, killed int) bool {
		workers := crew.Workers()
		for _, w := range workers[len(workers)-3:] {
			w.Await(t, "ready")
		}
		next := min(published+total/enough, total)
		publishNumbers(t, inbox, numbersPolicy(time.Minute), published, next)
		published = next
		was := turns(t, pg)
		eventually(t, 20*time.Second, "the ring turns", func() error {
			if now := turns(t, pg); now == was && endsOf(t, pg).Waiting > 0 {
				return fmt.Errorf("it is at %d", now)
			}
			return nil
		})
		return killed < enough
	}); err != nil {
		t.Fatal(err)
	}
	publishNumbers(t, inbox, numbersPolicy(time.Minute), published, total)
	wantEnded(t, pg, 30*time.Second, total, deadAmong(total))
	t.Logf("%d rounds", turns(t, pg)/8)
	if n := turns(t, pg); n < enough {
		t.Errorf("the head moved on %d times, want %d at least", n, enough)
	}
	if err := crew.Stop(); err != nil {
		t.Error(err)
	}
}

// What lies in a segment that nobody publishes into is found all the same, as after a crash that took the head back.
func TestRing_S9_FindsWhatLiesAnywhere(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN(), postgres.WithSweep(50*time.Millisecond), postgres.WithPace(50*time.Millisecond, 1<<40, time.Hour))
	c := subscribe(t, inbox, ordersPolicy())
	send(t, inbox, order("first"))
	c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: c.take(1)[0], Kind: leasebus.SettleComplete})
	for seg := range 9 {
		pg.Exec(t, `INSERT INTO leasebus.ready (segment, queue, id, type, payload) SELECT $1, id, gen_random_uuid(), 'google.protobuf.StringValue', ''
			FROM leasebus.queue WHERE name = 'orders'`, seg)
		c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: c.take(1)[0], Kind: leasebus.SettleComplete})
	}
}

// A user who may not truncate is told so once, and the queue works without.
func TestRing_WithoutTheRightToTruncate(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.PrivatePostgres(t).PG)
	pg.Exec(t, `CREATE ROLE clerk LOGIN`)
	pg.Exec(t, `GRANT USAGE ON SCHEMA leasebus TO clerk`)
	pg.Exec(t, `GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA leasebus TO clerk`)
	pg.Exec(t, `GRANT SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA leasebus TO clerk`)
	var told lines
	inbox := openInbox(t, pg.DSN("user=clerk"), fastRing(),
		postgres.WithLogger(slog.New(slog.NewTextHandler(&told, nil))))
	policy := numbersPolicy(5 * time.Second)
	startProcessor(t, inbox, policy, func(context.Context, int64, leasebus.Delivery) error { return nil })
	done := int64(0)
	eventually(t, 20*time.Second, "it is told", func() error {
		publishNumbers(t, inbox, policy, done, done+200)
		done += 200
		if told.count("grant TRUNCATE") == 0 {
			return errors.New("nothing is told")
		}
		return nil
	})
	publishNumbers(t, inbox, policy, done, done+1000)
	wantEnded(t, pg, 20*time.Second, int(done)+1000, 0)
	if n := told.count("grant TRUNCATE"); n != 1 {
		t.Errorf("it is told %d times, want once", n)
	}
}

// lines is a log that can be asked while it is written.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), what)
}
