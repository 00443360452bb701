package postgres_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// wantHealth waits until the inbox says that it is so, and that the reason holds the words.
func wantHealth(t *testing.T, in *postgres.Inbox, want leasebus.HealthStatus, words string) {
	t.Helper()
	health := leasebus.Health{Timeout: 5 * time.Second}
	health.Add("inbox", in)
	eventually(t, 30*time.Second, "health is "+want.String(), func() error {
		report := health.Check(t.Context())
		if report.Status != want || !strings.Contains(fmt.Sprint(report.Components[0].Details["error"]), words) {
			return fmt.Errorf("%+v", report)
		}
		return nil
	})
}

func TestHealth_S54_S56_says_when_the_server_is_away_or_read_only(t *testing.T) {
	t.Parallel()
	cluster := testservers.PrivatePostgres(t)
	in := openInbox(t, migrated(t, cluster.PG).DSN())
	wantHealth(t, in, leasebus.HealthUp, "")
	cluster.ReadOnly(t, true)
	wantHealth(t, in, leasebus.HealthDegraded, "read-only")
	cluster.ReadOnly(t, false)
	wantHealth(t, in, leasebus.HealthUp, "")
	cluster.Stop(t)
	wantHealth(t, in, leasebus.HealthDown, "connect")
	cluster.Start(t)
	wantHealth(t, in, leasebus.HealthUp, "")
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	wantHealth(t, in, leasebus.HealthDown, "closed")
}

func TestHealth_S56_is_bounded_when_the_server_is_silent(t *testing.T) {
	t.Parallel()
	proxy, pg := migrated(t, testservers.Postgres(t)).Proxy(t)
	in := openInbox(t, pg.DSN())
	wantHealth(t, in, leasebus.HealthUp, "")
	proxy.Silence()
	defer proxy.Speak()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	began := time.Now()
	answer := in.CheckHealth(ctx)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the check took %v; its context ended after 500ms", took)
	}
	if len(answer) != 1 || answer[0].Status != leasebus.HealthDown {
		t.Errorf("%+v, want down", answer)
	}
}

func TestHealth_S56_busy_connections_are_no_closed_ones(t *testing.T) {
	t.Parallel()
	in := openInbox(t, migrated(t, testservers.Postgres(t)).DSN())
	release, err := in.OccupyRenewals(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if answer := in.CheckHealth(ctx); answer[0].Status != leasebus.HealthDegraded {
		t.Errorf("%+v, want degraded", answer)
	}
	release()
	wantHealth(t, in, leasebus.HealthUp, "")
}
