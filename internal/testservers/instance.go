//go:build unix

package testservers

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const startTimeout = 60 * time.Second

// instanceSettings suit tests. Without fsync a server that is killed still loses nothing: only the machine could.
var instanceSettings = []string{
	"listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=300",
	"fsync=off", "full_page_writes=off", "max_wal_size=2GB", "shared_buffers=128MB",
	"logging_collector=off", "log_min_messages=warning",
}

// instance is a PostgreSQL server started from binaries. It belongs to one goroutine at a time.
type instance struct {
	folder   string // data, postgres.log
	binaries string
	servant  servant
	port     int
	settings []string
	running  *process
}

// newInstance makes the files of a cluster; it does not start it.
func newInstance(ctx context.Context, folder string, settings ...string) (*instance, error) {
	binaries, err := installed(ctx, postgresBinaries, "postgresql")
	if err != nil {
		return nil, err
	}
	who, err := findServant()
	if err != nil {
		return nil, err
	}
	template, err := initialised(ctx, binaries, who)
	if err != nil {
		return nil, err
	}
	i := &instance{folder: folder, binaries: binaries, servant: who, settings: settings}
	if err := who.own(folder); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, "cp", "-Rp", template, i.data()).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("copy the cluster: %w: %s", err, out)
	}
	i.port, err = freePort()
	return i, err
}

// standby makes the files of a cluster that follows this one, which runs.
func (i *instance) standby(ctx context.Context, folder string) (*instance, error) {
	s := &instance{folder: folder, binaries: i.binaries, servant: i.servant, settings: i.settings}
	if err := s.servant.own(folder); err != nil {
		return nil, err
	}
	cmd := s.servant.command(ctx, filepath.Join(s.binaries, "pg_basebackup"),
		"-D", s.data(), "-d", i.dsn("postgres"), "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("pg_basebackup: %w\n%s", err, bytes.TrimSpace(out))
	}
	var err error
	s.port, err = freePort()
	return s, err
}

// sharedPostgres is the server that test processes share where there is no other.
var sharedPostgres = kind{
	name: "PostgreSQL",
	new: func(ctx context.Context, folder string) (kept, error) {
		return newInstance(ctx, folder, "max_connections=1000")
	},
	ping: ping,
	end:  syscall.SIGINT,
}

func (i *instance) address() string        { return i.dsn("postgres") }
func (i *instance) ended() <-chan struct{} { return i.running.done }
func (i *instance) log() string            { return filepath.Join(i.folder, "postgres.log") }

func (i *instance) data() string { return filepath.Join(i.folder, "data") }

func (i *instance) dsn(database string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", i.port, database)
}

// initialised is a cluster as initdb makes it, made once for each version: copying it is ten times as fast.
func initialised(ctx context.Context, binaries string, who servant) (string, error) {
	version, err := exec.CommandContext(ctx, filepath.Join(binaries, "postgres"), "--version").Output()
	if err != nil {
		return "", fmt.Errorf("ask postgres for its version: %w", err)
	}
	folder, err := stateFolder()
	if err != nil {
		return "", err
	}
	home := filepath.Join(folder, fmt.Sprintf("initdb-%x", sha256.Sum256(version)))
	template := filepath.Join(home, "data")
	if _, err := os.Stat(template); err == nil {
		return template, nil
	}
	unlock, err := lockExclusive(ctx, "initdb.lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(template); err == nil {
		return template, nil
	}
	if err := errors.Join(os.RemoveAll(home), os.Mkdir(home, 0o755), who.own(home)); err != nil {
		return "", err
	}
	unfinished := filepath.Join(home, "unfinished")
	cmd := who.command(ctx, filepath.Join(binaries, "initdb"),
		"-D", unfinished, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("initdb: %w\n%s", err, bytes.TrimSpace(out))
	}
	return template, os.Rename(unfinished, template)
}

// start starts the server and waits until it answers. A server that was killed takes some attempts: the remains of its
// processes must be gone first.
func (i *instance) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, errors.New("PostgreSQL did not start in time"))
	defer cancel()
	return eventually(ctx, func() error {
		if err := i.launch(); err != nil {
			return err
		}
		err := eventually(ctx, func() error {
			select {
			case <-i.running.done:
				return nil
			default:
				return ping(ctx, i.dsn("postgres"))
			}
		})
		select {
		case <-i.running.done:
			return fmt.Errorf("postgres ended (%w)\n%s", i.running.err, tail(i.log()))
		default:
			return err
		}
	})
}

func (i *instance) launch() error {
	args := []string{"-D", i.data(), "-p", strconv.Itoa(i.port)}
	for _, setting := range slices.Concat(instanceSettings, i.settings) {
		args = append(args, "-c", setting)
	}
	cmd := i.servant.command(context.Background(), filepath.Join(i.binaries, "postgres"), args...)
	log, err := os.OpenFile(i.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	i.running, err = run(cmd)
	return err
}

// stop ends the server: SIGINT rolls open transactions back, SIGQUIT does not even write a checkpoint, SIGKILL is a
// crash. It returns when the server's process is gone.
func (i *instance) stop(ctx context.Context, how syscall.Signal) error {
	if i.running == nil {
		return nil
	}
	defer func() { i.running = nil }()
	return i.running.stop(ctx, how)
}

// ping connects and asks one question.
func ping(ctx context.Context, dsn string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return conn.Ping(ctx)
}

// tail is the end of a log.
func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	const enough = 2000
	return string(text[max(0, len(text)-enough):])
}

// process is a child process that somebody waits for.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // of Wait, once done is closed
}

func run(cmd *exec.Cmd) (*process, error) {
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// stop sends a signal and waits for the end; when the context ends first, it kills.
func (p *process) stop(ctx context.Context, how syscall.Signal) error {
	_ = p.cmd.Process.Signal(how) // it may have ended already
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		_ = p.cmd.Process.Kill()
		<-p.done
		return fmt.Errorf("%s did not stop on %v and was killed", filepath.Base(p.cmd.Path), how)
	}
}
