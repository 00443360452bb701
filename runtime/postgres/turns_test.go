package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// turnStage is a queue in whose turns others have stopped.
type turnStage struct {
	*testing.T
	pg      *testservers.PG
	inbox   *postgres.Inbox
	c       *consumer
	stopped *pgx.Conn
}

func turnsOf(t *testing.T) *turnStage {
	t.Helper()
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN())
	stopped, err := pgx.Connect(t.Context(), pg.DSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stopped.Close(context.Background()) })
	return &turnStage{T: t, pg: pg, inbox: inbox, c: subscribe(t, inbox, ordersPolicy()), stopped: stopped}
}

// stopIn takes turns and keeps them.
func (s *turnStage) stopIn(turns ...int) {
	s.Helper()
	schema, keys := s.locks(turns...)
	if _, err := s.stopped.Exec(s.Context(), `SELECT pg_advisory_lock($1, k) FROM unnest($2::int[]) k`, schema, keys); err != nil {
		s.Fatal(err)
	}
}

func (s *turnStage) locks(turns ...int) (schema int32, keys []int32) {
	for _, turn := range turns {
		var more []int32
		schema, more = postgres.TurnLocks(s.c.Feed, turn)
		keys = append(keys, more...)
	}
	return schema, keys
}

// claim leases n messages and tells how that ended.
func (s *turnStage) claim(n int) <-chan error {
	ended := make(chan error, 1)
	go func() {
		_, err := s.c.Lease(s.Context(), make([]leasebus.Lease, n))
		ended <- err
	}()
	return ended
}

func (s *turnStage) untilOneWaitsFor(turns ...int) {
	s.Helper()
	schema, keys := s.locks(turns...)
	eventually(s.T, 15*time.Second, fmt.Sprint("a claim waits for one of the turns ", turns), func() error {
		waiting := testservers.Value[int](s, s.pg, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
			AND classid::int4 = $1 AND objid::int4 = ANY($2)`, schema, keys)
		if waiting != 1 {
			return fmt.Errorf("%d do", waiting)
		}
		return nil
	})
}

const aTurnsWorth = 100 // the least that claims take turns for

// Processes that have stopped in the middle of their turns hold up the others for a moment. Then these take other turns,
// and not just none, which would have all of them fall over each other.
func TestTurns_S9_WhoHasStoppedInATurnHoldsUpNobody(t *testing.T) {
	t.Parallel()
	s := turnsOf(t)
	send(t, s.inbox, someOrders(2*aTurnsWorth)...)
	s.stopIn(0, 1)
	s.c.take(aTurnsWorth)

	s.stopIn(2, 3)
	ended := s.claim(aTurnsWorth)
	s.untilOneWaitsFor(2, 3)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n := testservers.Value[int](t, s.pg, `SELECT count(*) FROM leasebus.ready WHERE lease_owner IS NOT NULL`); n != 2*aTurnsWorth {
		t.Errorf("%d messages are leased, want all %d", n, 2*aTurnsWorth)
	}
}

// Who is to stop while it waits for its turn takes nothing any more.
func TestTurns_S50_StoppedWhileWaiting(t *testing.T) {
	t.Parallel()
	s := turnsOf(t)
	send(t, s.inbox, someOrders(aTurnsWorth)...)
	s.stopIn(0, 1)
	ended := s.claim(aTurnsWorth)
	s.untilOneWaitsFor(0, 1)
	if err := s.c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, leasebus.ErrFeedStopped) {
		t.Errorf("the claim ended with %v, want ErrFeedStopped", err)
	}
	if n := testservers.Value[int](t, s.pg, `SELECT count(*) FROM leasebus.ready WHERE lease_owner IS NOT NULL`); n != 0 {
		t.Errorf("%d messages are leased", n)
	}
}
