// Package server gives the benchmarks a PostgreSQL to measure on: one of their own, so that nobody else's work is
// counted, or one that the caller names.
package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// Settings are those of a server of our own: what PostgreSQL comes with, fsync and autovacuum included, but for memory
// and WAL as a small production server has them; and so is the WAL kept ready (see warm).
var Settings = []string{ //nolint:gochecknoglobals // a list that the report prints
	"shared_buffers=512MB",
	"max_wal_size=4GB",
	"min_wal_size=1GB",
	"max_connections=200",
}

const (
	startTime = 30 * time.Second
	stopTime  = 30 * time.Second
)

// Server is a PostgreSQL server.
type Server struct {
	dsn    string
	own    *exec.Cmd // nil = the caller's
	ended  chan error
	folder string
}

// Named is a server that runs already; dsn is of a role that may create databases.
func Named(dsn string) *Server { return &Server{dsn: dsn} }

// Start makes and starts a server of our own, from the newest binaries that are installed.
func Start(ctx context.Context) (*Server, error) {
	binaries, err := findBinaries()
	if err != nil {
		return nil, err
	}
	who, err := findServant()
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "leasebus-bench-")
	if err != nil {
		return nil, fmt.Errorf("a folder for PostgreSQL: %w", err)
	}
	s := &Server{folder: folder, ended: make(chan error, 1)}
	if err := s.begin(ctx, binaries, who); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Server) begin(ctx context.Context, binaries string, who servant) error {
	if err := who.own(s.folder); err != nil {
		return err
	}
	files := filepath.Join(s.folder, "data")
	initdb := who.command(ctx, filepath.Join(binaries, "initdb"),
		"-D", files, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	if out, err := initdb.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w\n%s", err, bytes.TrimSpace(out))
	}
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	args := []string{"-D", files, "-p", strconv.Itoa(port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="}
	for _, setting := range Settings {
		args = append(args, "-c", setting)
	}
	log, err := os.Create(filepath.Join(s.folder, "postgres.log"))
	if err != nil {
		return fmt.Errorf("the server's log: %w", err)
	}
	defer log.Close()
	// It outlives ctx: Close stops it in order.
	s.own = who.command(context.WithoutCancel(ctx), filepath.Join(binaries, "postgres"), args...)
	s.own.Stdout, s.own.Stderr = log, log
	if err := s.own.Start(); err != nil {
		s.own = nil
		return fmt.Errorf("start postgres: %w", err)
	}
	go func() { s.ended <- s.own.Wait() }()
	s.dsn = fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port)
	if err := s.answers(ctx); err != nil {
		return err
	}
	return s.warm(ctx)
}

// warm makes the files of the WAL. A server that has been up for a while uses its old ones again; a new one makes them
// while the others wait, which would be measured instead, for the first few gigabytes.
func (s *Server) warm(ctx context.Context) error {
	const files = 64 // of 16 MB
	for _, sql := range []string{
		fmt.Sprintf("SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal() FROM generate_series(1, %d)", files), "CHECKPOINT",
	} {
		if err := s.exec(ctx, sql); err != nil {
			return fmt.Errorf("make the files of the WAL: %w", err)
		}
	}
	return nil
}

func (s *Server) answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, s.dsn)
		if err == nil {
			_ = conn.Close(ctx)
			return nil
		}
		select {
		case ended := <-s.ended:
			s.own = nil
			text, _ := os.ReadFile(filepath.Join(s.folder, "postgres.log")) // without it there is still ended
			return fmt.Errorf("postgres ended: %w\n%s", ended, text)
		case <-ctx.Done():
			return fmt.Errorf("postgres does not answer: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// DSN is the connection string of the server's own database.
func (s *Server) DSN() string { return s.dsn }

// Database makes an empty database, as a copy of template unless that is "", and returns its connection string. One of
// that name that there is goes first.
func (s *Server) Database(ctx context.Context, name, template string) (string, error) {
	if template == "" {
		template = "template0"
	}
	if err := s.Drop(ctx, name); err != nil {
		return "", err
	}
	sql := "CREATE DATABASE " + pgx.Identifier{name}.Sanitize() + " TEMPLATE " + pgx.Identifier{template}.Sanitize()
	if err := s.exec(ctx, sql); err != nil {
		return "", fmt.Errorf("make database %s: %w", name, err)
	}
	config, err := pgx.ParseConfig(s.dsn)
	if err != nil {
		return "", errors.New("the connection string cannot be parsed")
	}
	return strings.Replace(s.dsn, "/"+config.Database+"?", "/"+name+"?", 1), nil
}

// Drop drops a database, whoever is connected.
func (s *Server) Drop(ctx context.Context, name string) error {
	if err := s.exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	return nil
}

func (s *Server) exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, s.dsn)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, sql)
	return err
}

// Close stops a server of our own and deletes its files.
func (s *Server) Close() error {
	if s.own != nil {
		_ = s.own.Process.Signal(syscall.SIGINT) // it may have ended
		select {
		case <-s.ended: //nolint:errcheck // how it ended does not matter any more
		case <-time.After(stopTime):
			_ = s.own.Process.Kill()
			<-s.ended //nolint:errcheck // the same
		}
	}
	if s.folder == "" {
		return nil
	}
	if err := os.RemoveAll(s.folder); err != nil {
		return fmt.Errorf("delete the server's files: %w", err)
	}
	return nil
}

// findBinaries looks where pg_config says, and where Debian and its kin put them.
func findBinaries() (string, error) {
	if path, err := exec.LookPath("initdb"); err == nil {
		return filepath.Dir(path), nil
	}
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb") // the pattern is a good one
	if len(found) == 0 {
		return "", errors.New("PostgreSQL's programs are not installed (Debian: apt-get install postgresql); or name a server with -dsn")
	}
	newest := slices.MaxFunc(found, func(a, b string) int { return version(a) - version(b) })
	return filepath.Dir(newest), nil
}

func version(path string) int {
	v, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path)))) // what is no number is old
	return v
}

func freePort(ctx context.Context) (int, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil //nolint:forcetypeassert // it listens on TCP
}

// servant is who the server runs as: postgres where the caller is root, whom it refuses.
type servant struct {
	uid, gid uint32
	other    bool
}

func findServant() (servant, error) {
	if os.Getuid() != 0 {
		return servant{}, nil
	}
	found, err := user.Lookup("postgres")
	if err != nil {
		return servant{}, fmt.Errorf("PostgreSQL refuses to run as root: %w", err)
	}
	uid, uidErr := strconv.ParseUint(found.Uid, 10, 32)
	gid, gidErr := strconv.ParseUint(found.Gid, 10, 32)
	if err := errors.Join(uidErr, gidErr); err != nil {
		return servant{}, fmt.Errorf("the user postgres: %w", err)
	}
	return servant{uid: uint32(uid), gid: uint32(gid), other: true}, nil
}

func (s servant) own(path string) error {
	if !s.other {
		return nil
	}
	if err := os.Chown(path, int(s.uid), int(s.gid)); err != nil {
		return fmt.Errorf("give the server its folder: %w", err)
	}
	return nil
}

// command is a program that runs as the servant, in a session of its own: an interrupt from the terminal is for us.
func (s servant) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // PostgreSQL's own programs
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if s.other {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: s.uid, Gid: s.gid}
	}
	return cmd
}
