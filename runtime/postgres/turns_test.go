package postgres_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// Processes that have stopped in the middle of their turns hold up the others for a moment. Then these take other turns,
// and not just none, which would have all of them fall over each other.
func TestTurns_S9_WhoHasStoppedInATurnHoldsUpNobody(t *testing.T) {
	t.Parallel()
	const batch = 100
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	c := subscribe(t, inbox, ordersPolicy())
	stopped, err := pgx.Connect(t.Context(), pg.DSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stopped.Close(t.Context()) })
	stopIn := func(turns ...int) {
		t.Helper()
		for _, turn := range turns {
			schema, keys := postgres.TurnLocks(c.Feed, turn)
			if _, err := stopped.Exec(t.Context(), `SELECT pg_advisory_lock($1, k) FROM unnest($2::int[]) k`, schema, keys); err != nil {
				t.Fatal(err)
			}
		}
	}
	send(t, inbox, someOrders(2*batch)...)
	stopIn(0, 1)
	c.take(batch)

	stopIn(2, 3)
	taken := make(chan error)
	go func() {
		_, err := c.Lease(t.Context(), make([]leasebus.Lease, batch))
		taken <- err
	}()
	schema, keys := postgres.TurnLocks(c.Feed, 2)
	_, more := postgres.TurnLocks(c.Feed, 3)
	eventually(t, 15*time.Second, "a claim waits for another turn", func() error {
		waiting := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
			AND classid::int4 = $1 AND objid::int4 = ANY($2)`, schema, slices.Concat(keys, more))
		if waiting != 1 {
			return fmt.Errorf("%d do", waiting)
		}
		return nil
	})
	if err := <-taken; err != nil {
		t.Error(err)
	}
}
