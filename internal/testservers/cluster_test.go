//go:build unix

package testservers

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

func TestPrivatePostgres_SurvivesWhatIsDoneToIt(t *testing.T) {
	t.Parallel()
	began := time.Now()
	pg := PrivatePostgres(t, "max_connections=42")
	t.Logf("ready after %v", time.Since(began))
	if got := Value[string](t, pg.PG, `SHOW max_connections`); got != "42" {
		t.Errorf("max_connections = %s, want 42", got)
	}
	pg.Exec(t, `CREATE TABLE kept AS SELECT 7 AS n`)
	kept := func(after string) {
		t.Helper()
		if got := Value[int](t, pg.PG, `SELECT n FROM kept`); got != 7 {
			t.Errorf("after %s: %d, want 7", after, got)
		}
	}
	pg.Stop(t)
	if err := ping(t.Context(), pg.DSN()); err == nil {
		t.Error("a stopped server answers")
	}
	pg.Start(t)
	kept("a stop")
	pg.Kill(t)
	pg.Start(t)
	kept("a kill")
}

// readOnly is the SQLSTATE of a write where nothing can be written.
const readOnly = "25006"

func TestPrivatePostgres_ReadOnly(t *testing.T) {
	t.Parallel()
	pg := PrivatePostgres(t)
	old := pg.Conn(t)
	write := func() string {
		t.Helper()
		_, err := old.Exec(t.Context(), `CREATE TABLE IF NOT EXISTS written ()`)
		var refused *pgconn.PgError
		if errors.As(err, &refused) {
			return refused.Code
		}
		if err != nil {
			t.Fatal(err)
		}
		return ""
	}
	if got := write(); got != "" {
		t.Fatalf("at first: %s", got)
	}
	pg.ReadOnly(t, true)
	within(t, "a session from before is read-only", func() error {
		if write() != readOnly {
			return errors.New("it writes")
		}
		return nil
	})
	pg.ReadOnly(t, false)
	within(t, "a session from before writes", func() error {
		if code := write(); code != "" {
			return errors.New(code)
		}
		return nil
	})
}

func TestPrivatePostgres_DemoteAndPromote(t *testing.T) {
	t.Parallel()
	pg := PrivatePostgres(t)
	pg.Exec(t, `CREATE TABLE kept ()`)
	pg.Demote(t)
	conn := pg.Conn(t)
	_, err := conn.Exec(t.Context(), `BEGIN READ WRITE`)
	if err == nil || !strings.Contains(err.Error(), "recovery") {
		t.Errorf("a standby begins a transaction that writes: %v", err)
	}
	_, _ = conn.Exec(t.Context(), `ROLLBACK`)
	pg.Promote(t)
	if _, err := conn.Exec(t.Context(), `INSERT INTO kept DEFAULT VALUES`); err != nil {
		t.Errorf("after the promotion, on a session from before: %v", err)
	}
}

func TestPrivatePostgres_Standby(t *testing.T) {
	t.Parallel()
	primary := PrivatePostgres(t)
	primary.Exec(t, `CREATE TABLE kept (n int)`)
	standby := primary.Standby(t)
	either := Either(primary.PG, standby.PG)
	if got := Value[string](t, either, `INSERT INTO kept VALUES (1) RETURNING current_setting('port')`); !strings.HasSuffix(primary.Addr(), ":"+got) {
		t.Errorf("the server at port %s writes, want that of %s", got, primary.Addr())
	}
	primary.Kill(t)
	standby.Promote(t)
	if got := Value[string](t, either, `INSERT INTO kept VALUES (2) RETURNING current_setting('port')`); !strings.HasSuffix(standby.Addr(), ":"+got) {
		t.Errorf("the server at port %s writes, want that of %s", got, standby.Addr())
	}
	if got := Value[int](t, either, `SELECT count(*) FROM kept`); got != 2 {
		t.Errorf("%d rows, want 2", got)
	}
}

func TestPrivatePostgres_EndsWithAProcessThatIsKilled(t *testing.T) {
	t.Parallel()
	endsWithItsWorker(t, "cluster", "dsn ", ping)
}

// endsWithItsWorker kills a worker that has a server, whose address it says.
func endsWithItsWorker(t *testing.T, role, says string, ping func(context.Context, string) error) {
	t.Helper()
	notInShort(t)
	folder, err := os.MkdirTemp("", "leasebus-testserver-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	w := StartWorker(t, role, "HOLD="+folder)
	address := w.Await(t, says)
	if err := ping(t.Context(), address); err != nil {
		t.Fatal(err)
	}
	w.Kill()
	within(t, "the server ends", func() error {
		if ping(context.Background(), address) == nil {
			return errors.New("it still answers")
		}
		if _, err := os.Stat(folder); err == nil {
			return errors.New("its folder is still there")
		}
		return nil
	})
}

func TestPG_Terminate(t *testing.T) {
	t.Parallel()
	pg := Postgres(t)
	victim, bystander := pg.Conn(t, "application_name=victim"), pg.Conn(t)
	if n := pg.Terminate(t, `application_name = 'victim'`); n != 1 {
		t.Errorf("terminated %d, want 1", n)
	}
	if err := victim.Ping(t.Context()); err == nil {
		t.Error("the victim lives")
	}
	if err := bystander.Ping(t.Context()); err != nil {
		t.Errorf("the bystander: %v", err)
	}
}

func TestPgBouncer_PoolsByTransaction(t *testing.T) {
	t.Parallel()
	pg := Postgres(t)
	pooled := PgBouncer(t, pg, "default_pool_size=1")
	a, b := pooled.Conn(t), pooled.Conn(t)
	var first, second int
	if err := a.QueryRow(t.Context(), `SELECT pg_backend_pid()`, pgx.QueryExecModeExec).Scan(&first); err != nil {
		t.Fatal(err)
	}
	if err := b.QueryRow(t.Context(), `SELECT pg_backend_pid()`, pgx.QueryExecModeExec).Scan(&second); err != nil {
		t.Fatal(err)
	}
	if first != second {
		t.Errorf("two clients have backends %d and %d; a pool of one has one", first, second)
	}
	if err := ping(t.Context(), pooled.DSN("statement_timeout=1000")); err == nil {
		t.Error("a startup parameter that PgBouncer does not know was let through")
	}
}
