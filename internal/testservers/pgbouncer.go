//go:build unix

package testservers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
)

// PgBouncer starts a PgBouncer in transaction mode in front of a database, for the test alone, and returns the database
// as seen through it. Settings go on top of its defaults: "default_pool_size=2". None of its allowances is used: a
// startup parameter that it does not know is refused.
func PgBouncer(t testing.TB, pg *PG, settings ...string) *PG {
	t.Helper()
	folder := privateFolder(t)
	ctx, cancel := context.WithTimeout(t.Context(), setupTime)
	defer cancel()
	port, stop, err := startBouncer(ctx, folder, pg, settings)
	if err != nil {
		t.Fatalf("testservers: PgBouncer: %v", err)
	}
	t.Cleanup(stop)
	return pg.At(fmt.Sprintf("127.0.0.1:%d", port))
}

func startBouncer(ctx context.Context, folder string, pg *PG, settings []string) (port int, stop func(), err error) {
	program, err := installed(ctx, pgbouncerBinary, "pgbouncer")
	if err != nil {
		return 0, nil, err
	}
	who, err := findServant()
	if err != nil {
		return 0, nil, err
	}
	if port, err = freePort(); err != nil {
		return 0, nil, err
	}
	config, err := bouncerConfig(folder, port, pg, settings)
	if err != nil {
		return 0, nil, err
	}
	file := filepath.Join(folder, "pgbouncer.ini")
	if err := errors.Join(os.WriteFile(file, []byte(config), 0o600), who.own(file), who.own(folder)); err != nil {
		return 0, nil, err
	}
	bouncer, err := run(who.command(context.Background(), program, "-q", file))
	if err != nil {
		return 0, nil, err
	}
	stop = func() { _ = bouncer.stop(context.Background(), syscall.SIGQUIT) }
	dsn := pg.At(fmt.Sprintf("127.0.0.1:%d", port)).dsn
	ctx, cancel := context.WithTimeout(ctx, longEnough)
	defer cancel()
	err = eventually(ctx, func() error {
		select {
		case <-bouncer.done:
			cancel()
			return fmt.Errorf("pgbouncer ended: %w", bouncer.err)
		default:
			return ping(ctx, dsn)
		}
	})
	if err != nil {
		stop()
		return 0, nil, fmt.Errorf("%w\n%s", err, tail(filepath.Join(folder, "pgbouncer.log")))
	}
	return port, stop, nil
}

func bouncerConfig(folder string, port int, pg *PG, settings []string) (string, error) {
	to, err := pgx.ParseConfig(pg.dsn)
	if err != nil {
		return "", err
	}
	quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	database := fmt.Sprintf("* = host=%s port=%d user=%s", quote(to.Host), to.Port, quote(to.User))
	if to.Password != "" { // an empty one is a syntax error
		database += " password=" + quote(to.Password)
	}
	lines := []string{
		"[databases]",
		database,
		"[pgbouncer]",
		"listen_addr = 127.0.0.1",
		fmt.Sprintf("listen_port = %d", port),
		"unix_socket_dir =",
		"auth_type = any",
		"pool_mode = transaction",
		"max_client_conn = 500",
		"pidfile = " + filepath.Join(folder, "pgbouncer.pid"),
		"logfile = " + filepath.Join(folder, "pgbouncer.log"),
	}
	return strings.Join(append(lines, settings...), "\n") + "\n", nil
}
