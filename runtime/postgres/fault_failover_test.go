package postgres_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// Another server takes the place of the one that everybody works with. Its connection strings name both.
func TestInbox_S9_S12_S41_S54_C9_9_AStandbyTakesOver(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(t *testing.T, primary, standby *testservers.Cluster){
		"after a crash": func(t *testing.T, primary, standby *testservers.Cluster) {
			t.Helper()
			primary.Kill(t)
			standby.Promote(t)
		},
		// The old one stays there with its connections, among them those that listen.
		"in order": func(t *testing.T, primary, standby *testservers.Cluster) {
			t.Helper()
			primary.ReadOnly(t, true)
			standby.Promote(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			primary := testservers.PrivatePostgres(t)
			migrated(t, primary.PG)
			standby := primary.Standby(t)
			takeOver(t, testservers.Either(primary.PG, standby.PG), standby.PG, func() { change(t, primary, standby) })
		})
	}
}

func takeOver(t *testing.T, either, standby *testservers.PG, change func()) {
	t.Helper()
	policy := numbersPolicy(10 * time.Second)
	inbox := openInbox(t, either.DSN(), postgres.WithPace(100*time.Millisecond, 64<<10, time.Second))
	crew := testservers.StartCrew(t, 2, "numbers", envDSN+"="+either.DSN(), envLease+"=10s", envWork+"=5ms")
	for _, w := range crew.Workers() {
		w.Await(t, "ready")
	}
	// A lease from before, whose holder does not hear of what happens.
	stale := subscribe(t, inbox, ordersPolicy(func(p *leasebus.Policy) {
		p.Lease = leasebus.LeasePolicy{Duration: 2 * time.Second, Heartbeat: time.Second}
	}))
	send(t, inbox, order("held"))
	before := stale.take(1)[0]

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var told outcomes
	publishing := told.publishUntil(ctx, inbox, policy, 8)
	ended := func(at *testservers.PG, more int) func() error {
		begin := endsOf(t, at).Distinct
		return func() error {
			if n := endsOf(t, at).Distinct - begin; n < more {
				return fmt.Errorf("%d", n)
			}
			return nil
		}
	}
	eventually(t, 20*time.Second, "work begins", ended(either, 50))
	given := testservers.Value[int64](t, either, `SELECT last_value FROM leasebus.ready_pos`)
	eventually(t, 20*time.Second, "work goes on", ended(either, 300))
	change()
	took := eventually(t, 20*time.Second, "work goes on elsewhere", ended(standby, 300))
	t.Logf("300 messages were handled %v after the change", took.Round(time.Millisecond))
	wantNotified(t, inbox, standby)

	cancel()
	publishing.Wait()
	after := stale.take(1)[0]
	if after.ID != before.ID || after.Generation <= before.Generation || after.Attempt != 2 {
		t.Errorf("leased again: %v, attempt %d, generation %d after %d", after.ID == before.ID, after.Attempt, after.Generation, before.Generation)
	}
	stale.settle(leasebus.ResultLost, leasebus.Settlement{Lease: before, Kind: leasebus.SettleComplete})
	stale.settle(leasebus.ResultOK, leasebus.Settlement{Lease: after, Kind: leasebus.SettleComplete})
	told.wantTrue(t, standby)
	if err := crew.Stop(); err != nil {
		t.Error(err)
	}
	wantSaneSequences(t, standby, given)
}

// wantNotified waits until everybody listens on the server that writes now.
func wantNotified(t *testing.T, of *postgres.Inbox, at *testservers.PG) {
	t.Helper()
	eventually(t, 30*time.Second, "the inbox listens", func() error {
		if err := wokenBy(t, of, "notifications"); err != nil {
			return err
		}
		// Two workers, and this process.
		if n := testservers.Value[int](t, at, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'listen%'`); n != 3 {
			return fmt.Errorf("%d connections listen", n)
		}
		return nil
	})
}

// wantSaneSequences checks that new positions lie behind all there were, that which was given long before the change
// included, and that the head is a segment.
func wantSaneSequences(t *testing.T, pg *testservers.PG, given int64) {
	t.Helper()
	policy := numbersPolicy(time.Minute)
	inbox := openInbox(t, pg.DSN())
	publishNumbers(t, inbox, policy, 0, 1)
	pos := testservers.Value[int64](t, pg, `SELECT pos FROM leasebus.ready`)
	if pos <= given {
		t.Errorf("a new message has position %d; %d was given before", pos, given)
	}
	publishNumbers(t, inbox, policy, 1, 2, leasebus.Delay(time.Hour))
	for table, sequence := range map[string]string{
		"ready": "ready_pos", "delayed": "delayed_pos_seq", "dead": "dead_pos_seq", "history": "history_pos_seq",
	} {
		if !testservers.Value[bool](t, pg, `SELECT coalesce(max(pos), 0) <= (SELECT last_value FROM leasebus.`+sequence+`) FROM leasebus.`+table) {
			t.Errorf("%s has positions that %s has not given yet", table, sequence)
		}
	}
	head := testservers.Value[int64](t, pg, `SELECT last_value % 8 FROM leasebus.ring`)
	if got := testservers.Value[int64](t, pg, `SELECT segment FROM leasebus.ready WHERE pos = $1`, pos); got != head {
		t.Errorf("published into segment %d, want the head, %d", got, head)
	}
	if testservers.Value[int64](t, pg, `SELECT last_value FROM leasebus.ring`) == 0 {
		t.Error("the ring never turned")
	}
}
