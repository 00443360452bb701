//go:build unix

package testservers

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// PostgresEnv names the variable with the connection string of the server to test on.
const PostgresEnv = "LEASEBUS_TEST_POSTGRES"

const (
	usualPostgres = "postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable"
	oldestVersion = 130000
	// enoughRoom is how many connections several test processes at once can come to need. A server has 100 by default.
	enoughRoom = 400
	// longEnough for anything that is done for a test; setting up with an installation takes longer.
	longEnough = time.Minute
	setupTime  = 10 * time.Minute
)

// PG is a database that belongs to a test.
type PG struct{ dsn string }

// Postgres gives the test a database of its own, empty, on the shared server. The database is dropped after the test,
// whoever is still connected.
func Postgres(t testing.TB) *PG {
	t.Helper()
	notInShort(t)
	server, err := sharedServer()
	if err != nil {
		t.Fatalf("testservers: PostgreSQL: %v", err)
	}
	return server.newDatabase(t)
}

// notInShort skips a test that needs a server when only quick ones are wanted: go test -short.
func notInShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs a server, and -short is set")
	}
}

// Ready makes the shared servers answer and installs what is missing of the other servers' programs.
func Ready(ctx context.Context) error {
	if _, err := SharedPostgres(); err != nil {
		return err
	}
	if _, err := SharedRabbitMQ(); err != nil {
		return err
	}
	if _, err := installed(ctx, postgresBinaries, "postgresql"); err != nil {
		return fmt.Errorf("PostgreSQL for the tests that stop it: %w", err)
	}
	if _, err := installed(ctx, pgbouncerBinary, "pgbouncer"); err != nil {
		return fmt.Errorf("PgBouncer: %w", err)
	}
	if _, err := installed(ctx, rabbitScripts, "rabbitmq-server"); err != nil {
		return fmt.Errorf("RabbitMQ for the tests that stop it: %w", err)
	}
	return nil
}

// SharedPostgres makes the shared PostgreSQL answer and returns its connection string. A server that was started for
// this stays as long as the process.
func SharedPostgres() (dsn string, err error) {
	server, err := sharedServer()
	if err != nil {
		return "", fmt.Errorf("PostgreSQL: %w", err)
	}
	return server.admin.dsn, nil
}

// DSN is the connection string, with settings added: "application_name=x", "default_transaction_isolation=serializable".
func (p *PG) DSN(settings ...string) string { return withSettings(p.dsn, settings...) }

// Addr is the server's host:port.
func (p *PG) Addr() string {
	config, err := pgx.ParseConfig(p.dsn)
	if err != nil {
		return err.Error()
	}
	return net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
}

// At is the same database by way of another address: a proxy's, a pooler's.
func (p *PG) At(addr string) *PG {
	host, port, _ := net.SplitHostPort(addr)
	return &PG{dsn: withSettings(p.dsn, "host="+host, "port="+port, "sslmode=disable")}
}

// Pool is a pool that is closed after the test.
func (p *PG) Pool(t testing.TB, settings ...string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), p.DSN(settings...))
	if err != nil {
		t.Fatalf("testservers: pool: %v", err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// Conn is a connection that is closed after the test.
func (p *PG) Conn(t testing.TB, settings ...string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), p.DSN(settings...))
	if err != nil {
		t.Fatalf("testservers: connect: %v", err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// Exec executes one statement on a connection of its own.
func (p *PG) Exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	if err := p.do(func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, sql, args...)
		return err
	}); err != nil {
		t.Fatalf("testservers: %s: %v", sql, err)
	}
}

// Value asks for one value on a connection of its own.
func Value[T any](t testing.TB, p *PG, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := p.do(func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, sql, args...).Scan(&v)
	}); err != nil {
		t.Fatalf("testservers: %s: %v", sql, err)
	}
	return v
}

// Terminate ends the connections to the database that a condition on pg_stat_activity selects, and returns how many.
func (p *PG) Terminate(t testing.TB, condition string) int {
	t.Helper()
	return Value[int](t, p, `SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND (`+condition+`)`)
}

func (p *PG) do(f func(context.Context, *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	conn, err := pgx.Connect(ctx, p.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return f(ctx, conn)
}

// withSettings adds to a connection string, in whichever of its two forms it is.
func withSettings(dsn string, settings ...string) string {
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme == "" {
		for _, setting := range settings {
			key, value, _ := strings.Cut(setting, "=")
			dsn += fmt.Sprintf(" %s='%s'", key, strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(value))
		}
		return dsn
	}
	query := u.Query()
	for _, setting := range settings {
		switch key, value, _ := strings.Cut(setting, "="); key {
		case "host":
			u.Host = net.JoinHostPort(value, u.Port())
		case "port":
			u.Host = net.JoinHostPort(u.Hostname(), value)
		case "dbname":
			u.Path = "/" + value
		default:
			query.Set(key, value)
		}
	}
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // a plus is a plus in these
	return u.String()
}

// server is where databases for tests are made.
type server struct {
	admin PG
	run   uint64 // marks this process's databases
	alive *pgx.Conn
	made  atomic.Int64
}

var sharedServer = sync.OnceValues(func() (*server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), setupTime)
	defer cancel()
	dsn, err := findPostgres(ctx)
	if err != nil {
		return nil, err
	}
	return newServer(ctx, dsn)
})

func findPostgres(ctx context.Context) (string, error) {
	if dsn := os.Getenv(PostgresEnv); dsn != "" {
		if _, err := usable(ctx, dsn); err != nil {
			return "", fmt.Errorf("%s is set, but %w", PostgresEnv, err) // pgx leaves passwords out of its errors
		}
		return dsn, nil
	}
	room, usualErr := usable(ctx, usualPostgres)
	if usualErr == nil && room >= enoughRoom {
		return usualPostgres, nil
	}
	dsn, err := joinShared(ctx)
	switch {
	case err == nil:
		return dsn, nil
	case usualErr == nil: // better a small one than none
		return usualPostgres, nil
	case !errors.Is(err, errNoBinaries):
		return "", err
	}
	composeErr := compose(ctx, "postgres")
	if composeErr == nil {
		composeErr = eventually(ctx, func() error {
			_, err := usable(ctx, usualPostgres)
			return err
		})
	}
	if composeErr != nil {
		return "", fmt.Errorf("%w\nDocker Compose instead: %w\nInstall PostgreSQL 13 or newer, or set %s to the connection string "+
			"of a role that may create databases, as in postgres://postgres:secret@db.example:5432/postgres", err, composeErr, PostgresEnv)
	}
	return usualPostgres, nil
}

// joinShared keeps the shared server for as long as this process lives.
func joinShared(ctx context.Context) (string, error) {
	if _, err := installed(ctx, postgresBinaries, "postgresql"); err != nil {
		return "", err
	}
	folder, err := stateFolder()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*startTimeout)
	defer cancel()
	dsn, leave, err := shared{folder, sharedPostgres}.join(ctx)
	if err != nil {
		return "", err
	}
	leaveShared.Store(&leave)
	return dsn, nil
}

// leaveShared is kept reachable, as long as the process lives: it holds the lock.
var leaveShared atomic.Pointer[func()]

// compose starts a server of compose.yaml, which stands beside this file.
func compose(ctx context.Context, service string) error {
	if err := exec.CommandContext(ctx, "docker", "compose", "version").Run(); err != nil {
		return fmt.Errorf("docker compose version: %w", err)
	}
	_, here, _, ok := runtime.Caller(0)
	if !ok {
		return errors.New("the program does not know where its source is")
	}
	out, err := exec.CommandContext(ctx, "docker", "compose", "-f", filepath.Join(filepath.Dir(here), "compose.yaml"), "up", "-d", "--wait", service).CombinedOutput()
	if err != nil {
		return fmt.Errorf("docker compose up: %w\n%s", err, out)
	}
	return nil
}

// usable checks a server, and returns how many connections it allows.
func usable(ctx context.Context, dsn string) (room int, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return 0, fmt.Errorf("does not answer: %w", err)
	}
	defer conn.Close(ctx)
	var version int
	var mayCreate bool
	if err := conn.QueryRow(ctx, `SELECT current_setting('server_version_num')::int, current_setting('max_connections')::int,
		rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user`).Scan(&version, &room, &mayCreate); err != nil {
		return 0, err
	}
	switch {
	case version < oldestVersion:
		return 0, fmt.Errorf("is version %d.%d; 13 is the oldest supported", version/10000, version%10000)
	case !mayCreate:
		return 0, errors.New("its role may not create databases")
	}
	return room, nil
}

// newServer opens a server for this process: it marks its databases as in use, and drops those of processes that died.
func newServer(ctx context.Context, dsn string) (*server, error) {
	var random [8]byte
	_, _ = rand.Read(random[:])                    // never fails
	run := binary.BigEndian.Uint64(random[:]) >> 1 // advisory locks are signed
	alive, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, err
	}
	s := &server{admin: PG{dsn: dsn}, run: run, alive: alive}
	if _, err := alive.Exec(ctx, `SELECT pg_advisory_lock($1)`, int64(run)); err != nil {
		return nil, err
	}
	return s, s.sweep(ctx)
}

const databasePrefix = "leasebus_test_"

// newDatabase makes a database for a test. template0 is the one that nobody can be connected to.
func (s *server) newDatabase(t testing.TB) *PG {
	t.Helper()
	name := fmt.Sprintf("%s%016x_%d", databasePrefix, s.run, s.made.Add(1))
	s.admin.Exec(t, `CREATE DATABASE `+name+` TEMPLATE template0 ENCODING 'UTF8'`)
	t.Cleanup(func() { s.admin.Exec(t, `DROP DATABASE `+name+` WITH (FORCE)`) })
	return &PG{dsn: withSettings(s.admin.dsn, "dbname="+name)}
}

// sweep drops the databases of processes that no longer hold the lock of their run.
func (s *server) sweep(ctx context.Context) error {
	rows, err := s.alive.Query(ctx, `SELECT datname FROM pg_database WHERE starts_with(datname, $1)`, databasePrefix)
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, name := range names {
		run, err := strconv.ParseUint(strings.SplitN(strings.TrimPrefix(name, databasePrefix), "_", 2)[0], 16, 63)
		if err != nil || run == s.run {
			continue
		}
		if err := s.dropAbandoned(ctx, name, int64(run)); err != nil {
			return err
		}
	}
	return nil
}

func (s *server) dropAbandoned(ctx context.Context, name string, run int64) error {
	var abandoned bool
	if err := s.alive.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, run).Scan(&abandoned); err != nil || !abandoned {
		return err
	}
	_, err := s.alive.Exec(ctx, `DROP DATABASE IF EXISTS `+pgx.Identifier{name}.Sanitize()+` WITH (FORCE)`)
	_, unlockErr := s.alive.Exec(ctx, `SELECT pg_advisory_unlock($1)`, run)
	return errors.Join(err, unlockErr)
}
