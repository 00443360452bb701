//go:build unix

package testservers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
)

// Cluster is a PostgreSQL server that belongs to one test, which may do to it what it likes, from one goroutine at a
// time. Its address stays the same throughout. PG is a database in it.
type Cluster struct {
	*PG
	instance *instance
}

// PrivatePostgres starts a server for the test alone, with settings on top of the usual: "max_connections=50". It takes
// about half a second.
func PrivatePostgres(t testing.TB, settings ...string) *Cluster {
	t.Helper()
	notInShort(t)
	folder := privateFolder(t)
	ctx, cancel := context.WithTimeout(t.Context(), setupTime)
	defer cancel()
	server, err := newInstance(ctx, folder, settings...)
	if err != nil {
		t.Fatalf("testservers: a PostgreSQL of the test's own: %v", err)
	}
	c := begin(t, server)
	(&PG{dsn: server.dsn("postgres")}).Exec(t, `CREATE DATABASE test`)
	return c
}

// begin starts a server, which is stopped after the test.
func begin(t testing.TB, server *instance) *Cluster {
	t.Helper()
	c := &Cluster{PG: &PG{dsn: server.dsn("test")}, instance: server}
	c.Start(t)
	t.Cleanup(func() { c.stop(t, syscall.SIGQUIT) })
	return c
}

// Standby starts a server that follows this one: from here on, what this one confirms is on both. It serves until
// [Cluster.Promote] as a standby. This one confirms nothing while there is no standby.
func (c *Cluster) Standby(t testing.TB) *Cluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), longEnough)
	defer cancel()
	server, err := c.instance.standby(ctx, privateFolder(t))
	if err != nil {
		t.Fatalf("testservers: a standby: %v", err)
	}
	standby := begin(t, server)
	c.admin().Exec(t, `ALTER SYSTEM SET synchronous_standby_names = '*'`)
	c.admin().Exec(t, `SELECT pg_reload_conf()`)
	if err := eventually(ctx, func() error {
		if !Value[bool](t, c.PG, `SELECT count(*) > 0 FROM pg_stat_replication WHERE sync_state = 'sync'`) {
			return errors.New("there is none that is waited for")
		}
		return nil
	}); err != nil {
		t.Fatalf("testservers: a standby: %v", err)
	}
	return standby
}

// Either is a database on whichever of two servers writes.
func Either(a, b *PG) *PG {
	other, err := pgx.ParseConfig(b.dsn)
	if err != nil {
		return b // nobody can connect to it, which tells
	}
	u, err := url.Parse(a.dsn)
	if err != nil {
		return a
	}
	u.Host += "," + net.JoinHostPort(other.Host, strconv.Itoa(int(other.Port)))
	return &PG{dsn: withSettings(u.String(), "target_session_attrs=read-write")}
}

// privateFolder is a folder for servers of one test: those end, and it goes, with the test or with its process.
func privateFolder(t testing.TB) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "leasebus-testserver-")
	if err != nil {
		t.Fatalf("testservers: %v", err)
	}
	release, err := guard(folder)
	if err != nil {
		t.Fatalf("testservers: %v", err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(folder); err != nil {
			t.Errorf("testservers: %v", err)
		}
		release()
	})
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatalf("testservers: %v", err)
	}
	return folder
}

// Start starts the server after a stop and returns when it answers.
func (c *Cluster) Start(t testing.TB) {
	t.Helper()
	if err := c.instance.start(context.Background()); err != nil {
		t.Fatalf("testservers: start PostgreSQL: %v", err)
	}
}

// Stop stops the server in order: open transactions are rolled back, clients are told.
func (c *Cluster) Stop(t testing.TB) {
	t.Helper()
	c.stop(t, syscall.SIGINT)
}

// Kill ends the server by SIGKILL; the next start recovers.
func (c *Cluster) Kill(t testing.TB) {
	t.Helper()
	c.stop(t, syscall.SIGKILL)
}

func (c *Cluster) stop(t testing.TB, how syscall.Signal) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	if err := c.instance.stop(ctx, how); err != nil {
		t.Errorf("testservers: stop PostgreSQL: %v", err)
	}
}

// ReadOnly makes every transaction that begins from here on read-only, in the sessions there are too, or ends that.
// A session can still ask for a transaction that writes; for a server that cannot, see [Cluster.Demote].
func (c *Cluster) ReadOnly(t testing.TB, on bool) {
	t.Helper()
	value := "off"
	if on {
		value = "on"
	}
	c.admin().Exec(t, `ALTER SYSTEM SET default_transaction_read_only = `+value)
	c.admin().Exec(t, `SELECT pg_reload_conf()`)
	c.awaitSetting(t, value)
}

func (c *Cluster) awaitSetting(t testing.TB, value string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	if err := eventually(ctx, func() error {
		if got := Value[string](t, c.PG, `SHOW default_transaction_read_only`); got != value {
			return fmt.Errorf("it is %s", got)
		}
		return nil
	}); err != nil {
		t.Fatalf("testservers: default_transaction_read_only = %s: %v", value, err)
	}
}

// Demote restarts the server as a standby, on which nothing can be written.
func (c *Cluster) Demote(t testing.TB) {
	t.Helper()
	c.Stop(t)
	signal := filepath.Join(c.instance.data(), "standby.signal")
	if err := os.WriteFile(signal, nil, 0o600); err != nil {
		t.Fatalf("testservers: %v", err)
	}
	if err := c.instance.servant.own(signal); err != nil {
		t.Fatalf("testservers: %v", err)
	}
	c.Start(t)
}

// Promote makes a standby writable again, without a restart.
func (c *Cluster) Promote(t testing.TB) {
	t.Helper()
	c.admin().Exec(t, `SELECT pg_promote(wait => false)`)
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	if err := eventually(ctx, func() error {
		return c.admin().do(func(ctx context.Context, conn *pgx.Conn) error {
			var standby bool
			err := conn.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&standby)
			if err == nil && standby {
				err = errors.New("it is still a standby")
			}
			return err
		})
	}); err != nil {
		t.Fatalf("testservers: promote the server: %v", err)
	}
}

func (c *Cluster) admin() *PG { return &PG{dsn: c.instance.dsn("postgres")} }
