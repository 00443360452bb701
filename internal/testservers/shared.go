//go:build unix

package testservers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	// linger is how long the shared server outlives its last user: packages of one run follow each other.
	linger    = time.Minute
	keeperEnv = "LEASEBUS_TESTSERVERS_KEEPER"
)

// The process that keeps the shared server is the program that first needed it, started again. So that no test package
// can forget it, it begins here.
func init() { //nolint:gochecknoinits // see above
	folder := os.Getenv(keeperEnv)
	if folder == "" {
		return
	}
	wait := linger
	if given, err := time.ParseDuration(os.Getenv(keeperEnv + "_LINGER")); err == nil {
		wait = given
	}
	if err := keep(folder, wait); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// shared is the server of a user's test processes. Each user holds its users.lock shared, for as long as it lives.
type shared struct{ folder string }

func (s shared) path(name string) string { return filepath.Join(s.folder, name) }

// join finds the shared server, or starts it, and returns its connection string. The server stays until leave.
func (s shared) join(ctx context.Context) (dsn string, leave func(), err error) {
	users, err := lockFile(ctx, s.path("users.lock"), syscall.LOCK_SH)
	if err != nil {
		return "", nil, err
	}
	dsn, err = s.find(ctx)
	if err != nil {
		_ = users.Close()
		return "", nil, err
	}
	return dsn, func() { _ = users.Close() }, nil
}

func (s shared) find(ctx context.Context) (string, error) {
	starting, err := lockFile(ctx, s.path("start.lock"), syscall.LOCK_EX)
	if err != nil {
		return "", err
	}
	defer starting.Close()
	if dsn, err := s.answering(ctx); err == nil {
		return dsn, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	log, err := os.Create(s.path("keeper.log"))
	if err != nil {
		return "", err
	}
	defer log.Close()
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), keeperEnv+"="+s.folder)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	if err := cmd.Process.Release(); err != nil {
		return "", err
	}
	var dsn string
	err = eventually(ctx, func() (err error) {
		dsn, err = s.answering(ctx)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("start the shared PostgreSQL: %w\n%s", err, tail(s.path("keeper.log")))
	}
	return dsn, nil
}

func (s shared) answering(ctx context.Context) (string, error) {
	dsn, err := os.ReadFile(s.path("dsn"))
	if err != nil {
		return "", err
	}
	return string(dsn), ping(ctx, string(dsn))
}

// keep runs the shared server until nobody has used it for a while.
func keep(folder string, wait time.Duration) error {
	s, ctx := shared{folder}, context.Background()
	only, err := lockFile(ctx, s.path("keeper.lock"), syscall.LOCK_EX)
	if err != nil {
		return err
	}
	defer only.Close()
	server, err := s.begin(ctx)
	if err != nil {
		return err
	}
	unused := time.Now()
	tick := time.NewTicker(min(wait/4+1, time.Second))
	defer tick.Stop()
	for {
		select {
		case <-server.running.done:
			return fmt.Errorf("postgres ended: %w\n%s", server.running.err, tail(filepath.Join(server.folder, "postgres.log")))
		case <-tick.C:
		}
		over, err := s.end(ctx, server, time.Since(unused) > wait)
		switch {
		case err != nil:
			return err
		case over:
			return nil
		}
		if s.used() {
			unused = time.Now()
		}
	}
}

// begin starts a new server in place of what a keeper may have left that was killed.
func (s shared) begin(ctx context.Context) (*instance, error) {
	home := s.path("server")
	if text, err := os.ReadFile(filepath.Join(home, "data", "postmaster.pid")); err == nil {
		if pid, err := strconv.Atoi(strings.SplitN(string(text), "\n", 2)[0]); err == nil {
			_ = syscall.Kill(pid, syscall.SIGQUIT)
		}
	}
	if err := errors.Join(os.RemoveAll(s.path("dsn")), os.RemoveAll(home), os.Mkdir(home, 0o755)); err != nil {
		return nil, err
	}
	server, err := newInstance(ctx, home, "max_connections=1000")
	if err != nil {
		return nil, err
	}
	if err := server.start(ctx); err != nil {
		return nil, err
	}
	unfinished := s.path("dsn.unfinished")
	if err := os.WriteFile(unfinished, []byte(server.dsn("postgres")), 0o644); err != nil {
		return nil, err
	}
	return server, os.Rename(unfinished, s.path("dsn"))
}

// used reports whether any process uses the server now.
func (s shared) used() bool {
	f, err := tryLock(s.path("users.lock"))
	if err != nil {
		return true
	}
	_ = f.Close()
	return false
}

// end stops the server if it is due and nobody uses it. Who comes meanwhile waits, and starts another one.
func (s shared) end(ctx context.Context, server *instance, due bool) (bool, error) {
	if !due {
		return false, nil
	}
	f, err := tryLock(s.path("users.lock"))
	if err != nil {
		return false, nil // somebody uses it
	}
	defer f.Close()
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return true, errors.Join(os.Remove(s.path("dsn")), server.stop(ctx, syscall.SIGINT), os.RemoveAll(server.folder))
}

func tryLock(path string) (*os.File, error) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return lockFile(ctx, path, syscall.LOCK_EX)
}
