//go:build unix

package testservers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
)

func TestPostgres_EachTestHasADatabaseOfItsOwn(t *testing.T) {
	t.Parallel()
	a, b := Postgres(t), Postgres(t)
	a.Exec(t, `CREATE TABLE only_here ()`)
	if Value[bool](t, b, `SELECT to_regclass('only_here') IS NOT NULL`) {
		t.Error("the table of one database is in the other")
	}
	if got := Value[string](t, a, `SHOW server_encoding`); got != "UTF8" {
		t.Errorf("encoding %s, want UTF8", got)
	}
}

func TestPostgres_IsDroppedAfterTheTestThoughConnected(t *testing.T) { //nolint:tparallel // what follows looks at what the subtest left behind
	t.Parallel()
	notInShort(t)
	var name string
	var conn *pgx.Conn
	t.Run("test", func(t *testing.T) {
		pg := Postgres(t)
		name = Value[string](t, pg, `SELECT current_database()`)
		var err error
		if conn, err = pgx.Connect(context.Background(), pg.DSN()); err != nil {
			t.Fatal(err)
		}
	})
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("the connection outlived its database")
	}
	_ = conn.Close(context.Background())
	server, err := sharedServer()
	if err != nil {
		t.Fatal(err)
	}
	if Value[bool](t, &server.admin, `SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)`, name) {
		t.Errorf("database %s is still there", name)
	}
}

func TestPostgres_DropsDatabasesOfProcessesThatDied(t *testing.T) {
	t.Parallel()
	cluster := PrivatePostgres(t)
	admin := cluster.admin()
	died, lives := databasePrefix+"0000000000000001_1", databasePrefix+"0000000000000002_1"
	admin.Exec(t, `CREATE DATABASE `+died)
	admin.Exec(t, `CREATE DATABASE `+lives)
	conn := admin.Conn(t)
	if _, err := conn.Exec(t.Context(), `SELECT pg_advisory_lock(2)`); err != nil {
		t.Fatal(err)
	}
	server, err := newServer(t.Context(), admin.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer server.alive.Close(context.Background())
	left := Value[[]string](t, admin, `SELECT array_agg(datname::text) FROM pg_database WHERE starts_with(datname, $1)`, databasePrefix)
	if len(left) != 1 || left[0] != lives {
		t.Errorf("left are %q, want only %q", left, lives)
	}
}

func TestPostgres_ServerOfTheEnvironment(t *testing.T) {
	secret := "postgres://somebody:not-for-logs@127.0.0.1:1/nowhere"
	t.Setenv(PostgresEnv, secret)
	_, err := findPostgres(t.Context())
	if err == nil || !strings.Contains(err.Error(), PostgresEnv) || strings.Contains(err.Error(), "not-for-logs") {
		t.Errorf("error %v; want one that names %s and no password", err, PostgresEnv)
	}

	cluster := PrivatePostgres(t)
	t.Setenv(PostgresEnv, cluster.DSN())
	if dsn, err := findPostgres(t.Context()); err != nil || dsn != cluster.DSN() {
		t.Errorf("found %q, %v; want %q", dsn, err, cluster.DSN())
	}
	cluster.Exec(t, `CREATE ROLE nobody LOGIN`)
	t.Setenv(PostgresEnv, strings.Replace(cluster.DSN(), "postgres@", "nobody@", 1))
	if _, err := findPostgres(t.Context()); err == nil || !strings.Contains(err.Error(), "may not create databases") {
		t.Errorf("error %v; want one that says what the role lacks", err)
	}
}

func TestWithSettings(t *testing.T) {
	t.Parallel()
	for _, form := range []string{
		"postgres://ann:s%20t@db.example:5433/home?sslmode=disable",
		`host=db.example port=5433 user=ann password='s t' dbname=home sslmode=disable`,
	} {
		config, err := pgx.ParseConfig(withSettings(form, "dbname=other", `application_name=it's \ x`, "host=127.0.0.1", "port=7"))
		if err != nil {
			t.Fatal(err)
		}
		if config.Host != "127.0.0.1" || config.Port != 7 || config.User != "ann" || config.Password != "s t" || config.Database != "other" ||
			config.RuntimeParams["application_name"] != `it's \ x` || config.TLSConfig != nil {
			t.Errorf("%s\n became %+v", form, config.Config)
		}
	}
}

func TestVersionIn(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]int{
		"/usr/lib/postgresql/15/bin": 15, "/opt/homebrew/opt/postgresql@9.6/bin": 9, "/usr/local/pgsql/bin": 0,
	} {
		if got := versionIn(path); got != want {
			t.Errorf("%s: %d, want %d", path, got, want)
		}
	}
}

func TestShared_OneServerForAllUsersThatEndsAfterThem(t *testing.T) {
	notInShort(t)
	t.Setenv(keeperEnv+"_LINGER", "1s")
	for _, kind := range []kind{sharedPostgres, sharedRabbitMQ} {
		t.Run(kind.name, func(t *testing.T) {
			folder := privateFolder(t)
			user := func() *Worker { return StartWorker(t, "shared", "HOLD="+folder, "KIND="+kind.name) }
			users := []*Worker{user(), user()}
			address := users[0].Await(t, "address ")
			if second := users[1].Await(t, "address "); second != address {
				t.Errorf("two users have two servers: %s, %s", address, second)
			}
			users[0].Kill()
			third := user()
			if again := third.Await(t, "address "); again != address {
				t.Errorf("a server that was in use was replaced: %s, then %s", address, again)
			}
			pids := pidsIn(t, shared{folder, kind}.path("server"))
			users[1].Kill()
			third.Kill()
			within(t, "the server ends", func() error {
				for _, pid := range pids {
					if syscall.Kill(pid, 0) == nil {
						return fmt.Errorf("process %d still runs", pid)
					}
				}
				if kind.ping(t.Context(), address) == nil {
					return errors.New("it still answers")
				}
				if _, err := os.Stat(shared{folder, kind}.path("server")); err == nil {
					return errors.New("its files are still there")
				}
				return nil
			})
		})
	}
}

// pidsIn are the processes that a server's folder names.
func pidsIn(t *testing.T, folder string) (pids []int) {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(folder, "*.pid")) // the pattern is well-formed
	for _, file := range append(files, filepath.Join(folder, "data", "postmaster.pid")) {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		pid, parseErr := strconv.Atoi(strings.SplitN(string(text), "\n", 2)[0])
		if err = errors.Join(err, parseErr); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if len(pids) == 0 {
		t.Fatal("the server's folder names no process")
	}
	return pids
}
