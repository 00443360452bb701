package postgres_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// The planner's statistics are from when the tables were empty, as after a quiet night. No statement may take that for a
// reason to read the queue instead of the rows that it is about.
func TestPlans_StatisticsOfAnEmptyQueue(t *testing.T) {
	t.Parallel()
	const standing, worked = 20_000, 20
	analyzed := []string{`INSERT INTO leasebus.ready (queue, id, type, payload) VALUES (1000, gen_random_uuid(), 't', '')`, `ANALYZE leasebus.ready`}
	// The table keeps its pages, so that the planner takes their number times nothing for the number of rows.
	vacuumed := []string{
		`INSERT INTO leasebus.ready (queue, id, type, payload) SELECT 1000, gen_random_uuid(), 't', '' FROM generate_series(1, 1000)`,
		`DELETE FROM leasebus.ready`, `VACUUM leasebus.ready`, `VACUUM ANALYZE leasebus.ready`,
	}
	for _, tt := range []struct {
		mode       string
		statistics []string
	}{{"cache_statement", analyzed}, {"exec", analyzed}, {"cache_statement", vacuumed}, {"exec", vacuumed}} {
		mode := tt.mode
		t.Run(fmt.Sprintf("%s %d", mode, len(tt.statistics)), func(t *testing.T) {
			t.Parallel()
			pg := migrated(t, testservers.Postgres(t))
			for i := range 8 {
				pg.Exec(t, fmt.Sprintf(`ALTER TABLE leasebus.ready_%d SET (autovacuum_enabled = off)`, i))
			}
			for _, statement := range tt.statistics {
				pg.Exec(t, statement)
			}
			before := testservers.Value[int64](t, pg, `SELECT sum(seq_tup_read)::bigint FROM pg_stat_user_tables WHERE relname LIKE 'ready%'`)
			inbox := openInbox(t, pg.DSN("default_query_exec_mode="+mode), postgres.WithSweep(time.Hour))
			c := subscribe(t, inbox, ordersPolicy())
			const batch = 1000
			for range standing / batch {
				send(t, inbox, someOrders(batch)...)
			}
			for range 8 { // past the first executions, which are planned one by one
				l := c.take(worked)
				renewals := make([]leasebus.Renewal, len(l))
				for i := range renewals {
					renewals[i].Lease = l[i]
				}
				if err := c.Renew(t.Context(), renewals); err != nil || renewals[0].Result != leasebus.ResultOK {
					t.Fatal(renewals[0].Result, err)
				}
				for i := range l {
					c.settle(leasebus.ResultStillLeased, leasebus.Settlement{Lease: l[i], Kind: leasebus.SettleVerify})
					kinds := []leasebus.SettlementKind{leasebus.SettleComplete, leasebus.SettleRelease, leasebus.SettleRetry, leasebus.SettleDeadLetter}
					c.settle(leasebus.ResultOK, leasebus.Settlement{Lease: l[i], Kind: kinds[i%len(kinds)], Delay: time.Hour, Reason: leasebus.ReasonPermanent})
				}
			}
			if err := inbox.Close(); err != nil { // sessions that end report what they read
				t.Fatal(err)
			}
			eventually(t, 20*time.Second, "the sessions have ended", func() error { return sessionsEnded(t, pg) })
			read := testservers.Value[int64](t, pg, `SELECT coalesce(sum(idx_tup_read), 0)::bigint FROM pg_stat_user_indexes WHERE relname LIKE 'ready%'`)
			scanned := testservers.Value[int64](t, pg, `SELECT sum(seq_tup_read)::bigint FROM pg_stat_user_tables WHERE relname LIKE 'ready%'`)
			if most := int64(standing / 2); read < worked || read > most || scanned-before > 10 {
				t.Errorf("%d index entries were read, and %d rows by scans; want a few for each of %d messages, at most %d, and 0", read, scanned-before, 8*worked, most)
			}
		})
	}
}

func sessionsEnded(t *testing.T, pg *testservers.PG) error {
	t.Helper()
	if n := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`); n > 1 { // the pool of migrated
		return fmt.Errorf("%d are left", n)
	}
	return nil
}
