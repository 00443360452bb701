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
	// linger is how long a shared server outlives its last user: packages of one run follow each other.
	linger    = time.Minute
	keeperEnv = "LEASEBUS_TESTSERVERS_KEEPER"
	kindEnv   = keeperEnv + "_KIND"
)

// The process that keeps a shared server is the program that first needed it, started again. So that no test package
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
	keeper := shared{folder, sharedPostgres}
	if os.Getenv(kindEnv) == sharedRabbitMQ.name {
		keeper.kind = sharedRabbitMQ
	}
	if err := keeper.keep(wait); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// kept is a server that was started from binaries.
type kept interface {
	start(ctx context.Context) error
	stop(ctx context.Context, how syscall.Signal) error
	address() string        // a connection string
	ended() <-chan struct{} // closed when its process is over
	log() string            // the file's path
}

// kind is what there can be one of for all test processes of a user.
type kind struct {
	name string
	new  func(ctx context.Context, folder string) (kept, error)
	ping func(ctx context.Context, address string) error
	// end is the signal to stop it by, when nobody is connected.
	end syscall.Signal
}

// shared is the server of a user's test processes. Each user holds its users.lock shared, for as long as it lives.
type shared struct {
	folder string
	kind   kind
}

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
	cmd.Env = append(os.Environ(), keeperEnv+"="+s.folder, kindEnv+"="+s.kind.name)
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
		return "", fmt.Errorf("start the shared %s: %w\n%s", s.kind.name, err, tail(s.path("keeper.log")))
	}
	return dsn, nil
}

func (s shared) answering(ctx context.Context) (string, error) {
	dsn, err := os.ReadFile(s.path("dsn"))
	if err != nil {
		return "", err
	}
	return string(dsn), s.kind.ping(ctx, string(dsn))
}

// keep runs the shared server until nobody has used it for a while.
func (s shared) keep(wait time.Duration) error {
	ctx := context.Background()
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
		case <-server.ended():
			return fmt.Errorf("%s ended\n%s", s.kind.name, tail(server.log()))
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
func (s shared) begin(ctx context.Context) (kept, error) { //nolint:ireturn // there are two of them
	home := s.path("server")
	left, _ := filepath.Glob(filepath.Join(home, "*.pid")) // the pattern is well-formed
	for _, file := range append(left, filepath.Join(home, "data", "postmaster.pid")) {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		if pid, err := strconv.Atoi(strings.SplitN(string(text), "\n", 2)[0]); err == nil {
			_ = syscall.Kill(pid, syscall.SIGQUIT)
		}
	}
	if err := errors.Join(os.RemoveAll(s.path("dsn")), os.RemoveAll(home), os.Mkdir(home, 0o755)); err != nil {
		return nil, err
	}
	server, err := s.kind.new(ctx, home)
	if err != nil {
		return nil, err
	}
	if err := server.start(ctx); err != nil {
		return nil, err
	}
	unfinished := s.path("dsn.unfinished")
	if err := os.WriteFile(unfinished, []byte(server.address()), 0o644); err != nil {
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
func (s shared) end(ctx context.Context, server kept, due bool) (bool, error) {
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
	return true, errors.Join(os.Remove(s.path("dsn")), server.stop(ctx, s.kind.end), os.RemoveAll(s.path("server")))
}

func tryLock(path string) (*os.File, error) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return lockFile(ctx, path, syscall.LOCK_EX)
}
