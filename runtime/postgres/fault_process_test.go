package postgres_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// statsOf adds up what workers said that their processors counted.
func statsOf(t *testing.T, workers []*testservers.Worker) (sum leasebus.ProcessorStats) {
	t.Helper()
	for _, w := range workers {
		for _, line := range w.Lines() {
			text, ok := strings.CutPrefix(line, "stats ")
			if !ok {
				continue
			}
			var s leasebus.ProcessorStats
			if err := json.Unmarshal([]byte(text), &s); err != nil {
				t.Fatal(err)
			}
			sum.Succeeded += s.Succeeded
			sum.DeadLettered += s.DeadLettered
			sum.PersistRejected += s.PersistRejected
			sum.PersistSkipped += s.PersistSkipped
			sum.SettleUnknown += s.SettleUnknown
			sum.LeaseLost += s.LeaseLost
			sum.LeaseErrors += s.LeaseErrors
			sum.RenewErrors += s.RenewErrors
			sum.SettleErrors += s.SettleErrors
		}
	}
	return sum
}

func TestInbox_S2_S12_ManyProcessesEndEachMessageOnce(t *testing.T) {
	t.Parallel()
	const total = 10_000
	for _, processes := range []int{4, 8} {
		t.Run(fmt.Sprint(processes), func(t *testing.T) {
			t.Parallel()
			pg := migrated(t, testservers.PrivatePostgres(t).PG)
			crew := testservers.StartCrew(t, processes, "numbers", envDSN+"="+pg.DSN(), envLease+"=30s")
			for _, w := range crew.Workers() {
				w.Await(t, "ready")
			}
			inbox := openInbox(t, pg.DSN())
			began := time.Now()
			publishNumbers(t, inbox, numbersPolicy(time.Minute), 0, total)
			wantEnded(t, pg, time.Minute, total, deadAmong(total))
			t.Logf("%d messages in %v", total, time.Since(began).Round(time.Millisecond))
			if err := crew.Stop(); err != nil {
				t.Error(err)
			}
			s := statsOf(t, crew.Workers())
			if s.Succeeded != int64(total-deadAmong(total)) || s.DeadLettered != int64(deadAmong(total)) ||
				s.PersistRejected != 0 || s.LeaseLost != 0 || s.SettleUnknown != 0 {
				t.Errorf("the processes count %+v", s)
			}
		})
	}
}

// Workers are killed as long as there is work. Nothing is lost, nothing ends twice, and no message that was in the hands
// of a dying worker fails for it.
func TestInbox_S9_S12_C2_2_C2_8_KilledInALoopWorkersLoseNothing(t *testing.T) {
	t.Parallel()
	const total, enough = 10_000, 12
	pg := migrated(t, testservers.PrivatePostgres(t).PG)
	inbox := openInbox(t, pg.DSN())
	publishNumbers(t, inbox, numbersPolicy(time.Minute), 0, total)
	crew := testservers.StartCrew(t, 3, "numbers", envDSN+"="+pg.DSN(), envLease+"=1s", envWork+"=30ms")
	killed, err := crew.Churn(t.Context(), func(ctx context.Context, killed int) bool {
		workers := crew.Workers()
		for _, w := range workers[len(workers)-3:] {
			w.Await(t, "ready")
		}
		pause := time.NewTimer(rand.N(400 * time.Millisecond))
		defer pause.Stop()
		select {
		case <-pause.C:
		case <-ctx.Done():
		}
		return killed < 2*enough && endsOf(t, pg).Waiting > 0
	})
	if err != nil {
		t.Fatal(err)
	}
	took := wantEnded(t, pg, 30*time.Second, total, deadAmong(total))
	// Without a state a message never failed: what it was attempted more than once for is that its worker died.
	crashed := testservers.Value[int](t, pg, `SELECT count(*) FROM leasebus.history WHERE attempts > 1 AND state IS NULL`)
	t.Logf("killed %d workers, %d messages in their hands; all ended %v later", killed, crashed, took.Round(time.Millisecond))
	if killed < enough || crashed == 0 {
		t.Errorf("%d workers were killed with %d messages in their hands, want %d and some", killed, crashed, enough)
	}
	if err := crew.Stop(); err != nil {
		t.Error(err)
	}
}

// A worker dies with 50 messages in its hands; another one with the same label, started at once, gets all of them when
// their leases end, not before, each on its second attempt.
func TestInbox_S3_S9_C2_1_C2_3_HeldByAKilledWorkerComeBackWithTheLease(t *testing.T) {
	t.Parallel()
	const (
		held  = 50
		lease = 3 * time.Second
		sweep = 2 * time.Second // and half of it, for the jitter
	)
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	publishNumbers(t, inbox, numbersPolicy(lease), 1000, 1000+held)
	start := func(work string) *testservers.Worker {
		w := testservers.StartWorker(t, "numbers", envDSN+"="+pg.DSN(), envLease+"="+lease.String(), envWork+"="+work,
			envOwner+"=same", envConcurrency+"=100", envTell+"=1")
		w.Await(t, "ready")
		return w
	}
	first := start(forEver)
	eventually(t, 10*time.Second, "the first worker holds them", func() error { return wantRuns(first, held, 1) })
	first.Kill()
	killed := time.Now()
	ends := testservers.Value[time.Duration](t, pg, `SELECT min(visible_at) - statement_timestamp() FROM leasebus.ready`)
	latest := testservers.Value[time.Duration](t, pg, `SELECT max(visible_at) - statement_timestamp() FROM leasebus.ready`)
	second := start("0s")
	early := time.Until(killed.Add(ends)) - 200*time.Millisecond
	time.Sleep(early) // that nothing comes can only be seen by waiting
	if err := wantRuns(second, 0, 0); err != nil {
		t.Errorf("%v before the first lease ended: %v", ends-early, err)
	}
	eventually(t, 20*time.Second, "the second worker gets them", func() error { return wantRuns(second, held, 0) })
	took := time.Since(killed)
	t.Logf("leases ended %v to %v after the kill; all was handled after %v", ends, latest, took)
	if limit := latest + sweep*3/2 + 500*time.Millisecond; took > limit {
		t.Errorf("it took %v from the kill until all was handled, want %v at most", took, limit)
	}
	for _, line := range second.Lines() {
		if strings.HasPrefix(line, "run ") && !strings.HasSuffix(line, " 2") {
			t.Errorf("%q: want the second attempt", line)
		}
	}
	wantEnded(t, pg, 5*time.Second, held, deadAmong(1000+held)-deadAmong(1000))
}

// wantRuns checks how many runs a worker told of, all of one attempt if that is given.
func wantRuns(w *testservers.Worker, want, attempt int) error {
	runs := 0
	for _, line := range w.Lines() {
		if strings.HasPrefix(line, "run ") && (attempt == 0 || strings.HasSuffix(line, fmt.Sprintf(" %d", attempt))) {
			runs++
		}
	}
	if runs != want {
		return fmt.Errorf("%d runs, want %d", runs, want)
	}
	return nil
}

// A message that kills every process that touches it is a dead letter after its attempts, and its neighbours are handled.
// It dies with everything its process holds: what runs beside it, what waits, and what is handled and not settled yet.
// None of that is taken along to the dead letters.
func TestInbox_S10_C2_7_MessageThatKillsItsWorkers(t *testing.T) {
	t.Parallel()
	const total, attempts = 300, 3
	pg := migrated(t, testservers.Postgres(t))
	publishNumbers(t, openInbox(t, pg.DSN()), numbersPolicy(time.Minute), poison-total/2, poison+total/2)
	crew := testservers.StartCrew(t, 2, "numbers", envDSN+"="+pg.DSN(), envLease+"=1s", envAttempts+"=3")
	died := 0
	eventually(t, 60*time.Second, "all messages have ended", func() error {
		died += crew.Replace(t)
		if e := endsOf(t, pg); e.Waiting > 0 {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
	if err := crew.Stop(); err != nil {
		t.Error(err)
	}
	if died != attempts {
		t.Errorf("%d workers died, want %d", died, attempts)
	}
	if got, want := testservers.Value[string](t, pg, `SELECT string_agg(format('%s after %s', reason, attempts), ', ') FROM leasebus.dead`),
		fmt.Sprintf("%s after %d", leasebus.ReasonCrashed, attempts); got != want {
		t.Errorf("the dead letters are: %s; want: %s", got, want)
	}
	wantEnded(t, pg, time.Second, total, 1)
}

// A worker is killed between CompleteTx and the commit. The effect and the completion are undone together, and done
// together by the next one.
func TestInbox_S9_S17_KilledBeforeTheCommit(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	done := effects(t, pg)
	publishNumbers(t, openInbox(t, pg.DSN()), numbersPolicy(time.Minute), 0, 1)
	start := func(hold string) *testservers.Worker {
		return testservers.StartWorker(t, "transaction", envDSN+"="+pg.DSN(), envLease+"=1s", envWork+"="+hold)
	}
	first := start(forEver)
	first.Await(t, "completed")
	first.Kill()
	if n := done(); n != 0 {
		t.Errorf("%d effects are there without a commit", n)
	}
	second := start("0s")
	second.Await(t, "committed")
	if err := second.Stop(); err != nil {
		t.Error(err)
	}
	wantEnded(t, pg, 5*time.Second, 1, 0)
	if n := done(); n != 1 {
		t.Errorf("%d effects are there, want 1", n)
	}
}

// Several processes migrate at the same time. One of them is killed while it holds the lock and the others wait.
func TestMigrate_S61_ProcessesAtOnceAndOneKilled(t *testing.T) {
	t.Parallel()
	const processes = 4
	pg := testservers.Postgres(t)
	// An open transaction that makes the schema keeps the first one in the middle of its migration.
	blocker := pg.Conn(t)
	if _, err := blocker.Exec(t.Context(), `BEGIN; CREATE SCHEMA leasebus`); err != nil {
		t.Fatal(err)
	}
	var workers []*testservers.Worker
	pids := make(map[string]*testservers.Worker)
	for i := range processes {
		name := fmt.Sprintf("migrator-%d", i)
		w := testservers.StartWorker(t, "migrate", envDSN+"="+pg.DSN("application_name="+name))
		pids[name] = w
		workers = append(workers, w)
	}
	eventually(t, 20*time.Second, "all of them wait", func() error {
		if n := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'migrator-%' AND wait_event_type = 'Lock'
			AND datname = current_database()`); n != processes {
			return fmt.Errorf("%d do", n)
		}
		return nil
	})
	holders := testservers.Value[[]string](t, pg, `SELECT array_agg(a.application_name) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
		WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database() AND a.application_name LIKE 'migrator-%'`)
	if len(holders) != 1 {
		t.Fatalf("the lock is held by %q, want one", holders)
	}
	pids[holders[0]].Kill()
	if _, err := blocker.Exec(t.Context(), `ROLLBACK`); err != nil {
		t.Fatal(err)
	}
	for _, w := range workers {
		if err := w.Wait(); err != nil && w != pids[holders[0]] {
			t.Error(err)
		}
	}
	if n := testservers.Value[int](t, pg, `SELECT count(*) FROM leasebus.schema_version`); n != 1 {
		t.Errorf("the schema has %d versions, want 1", n)
	}
}

// While the server is away a worker waits, instead of trying all the time, and comes back by itself.
func TestInbox_S54_C9_3_ProcessorTimeStaysFlatWhileTheServerIsAway(t *testing.T) {
	t.Parallel()
	const away = 3 * time.Second
	pg := testservers.PrivatePostgres(t)
	migrated(t, pg.PG)
	inbox := openInbox(t, pg.DSN())
	w := testservers.StartWorker(t, "numbers", envDSN+"="+pg.DSN(), envLease+"=5s", envTell+"=1")
	publishNumbers(t, inbox, numbersPolicy(time.Minute), 1, 2)
	w.Await(t, "run 1 1")
	pg.Stop(t)
	before := w.CPUTime()
	time.Sleep(away) // the time over which the use is measured
	used := w.CPUTime() - before
	pg.Start(t)
	began := time.Now()
	t.Logf("used %v in %v", used, away)
	if limit := away / 10; used > limit {
		t.Errorf("the worker used %v of processor time in %v without a server, want %v at most", used, away, limit)
	}
	eventually(t, 10*time.Second, "publishing works again", func() error {
		return publishOne(t.Context(), inbox, numbersPolicy(time.Minute), 2)
	})
	w.Await(t, "run 2 1")
	t.Logf("handled the next message %v after the server was back", time.Since(began).Round(time.Millisecond))
	if err := w.Stop(); err != nil {
		t.Error(err)
	}
}
