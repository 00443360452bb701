//go:build unix

package testservers

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const roleEnv = "LEASEBUS_TESTSERVERS_ROLE"

// RunWorker is called first thing in TestMain. In a test it does nothing. In a process that [StartWorker] started, it
// runs the worker's role and ends the process: with status 0 if the role returned nil. The role's context ends when the
// test asks for it, and when the test's process is gone.
func RunWorker(roles map[string]func(ctx context.Context) error) {
	name := os.Getenv(roleEnv)
	if name == "" {
		return
	}
	role, ok := roles[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "there is no role %q\n", name)
		os.Exit(2)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // ends with the test, or when it wants
		cancel()
		time.Sleep(longEnough)
		fmt.Fprintln(os.Stderr, "the worker did not stop")
		os.Exit(3)
	}()
	if err := role(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Sayf tells the test a line, from a worker.
func Sayf(format string, args ...any) {
	// One write for each line: those of several goroutines do not mix, and a killed worker leaves no half of one.
	_, _ = os.Stdout.WriteString(fmt.Sprintf(format, args...) + "\n")
}

// Worker is a process that runs a role of the test's own program.
type Worker struct {
	process *process
	input   io.Closer
	errors  bytes.Buffer

	mu    sync.Mutex
	lines []string
	more  chan struct{} // closed and replaced with each line
	over  bool
}

// StartWorker starts a process that runs a role, with NAME=value added to its environment. It is killed after the test
// if it still runs.
func StartWorker(t testing.TB, role string, env ...string) *Worker {
	t.Helper()
	w, err := startWorker(role, env)
	if err != nil {
		t.Fatalf("testservers: start a worker: %v", err)
	}
	t.Cleanup(w.Kill)
	return w
}

func startWorker(role string, env []string) (*Worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	w := &Worker{more: make(chan struct{})}
	cmd := exec.Command(self)
	cmd.Env = append(append(os.Environ(), roleEnv+"="+role), env...)
	cmd.Stderr = &w.errors
	cmd.WaitDelay = longEnough
	if w.input, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	lines, output := io.Pipe()
	cmd.Stdout = output
	if w.process, err = run(cmd); err != nil {
		return nil, err
	}
	go func() {
		<-w.process.done
		_ = output.Close()
	}()
	go w.read(lines)
	return w, nil
}

func (w *Worker) read(from io.Reader) {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		w.note(func() { w.lines = append(w.lines, lines.Text()) })
	}
	_, _ = io.Copy(io.Discard, from) // what follows a line that is too long
	w.note(func() { w.over = true })
}

func (w *Worker) note(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
	close(w.more)
	w.more = make(chan struct{})
}

func (w *Worker) seen() (lines []string, over bool, more <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lines, w.over, w.more
}

// PID is the worker's process id.
func (w *Worker) PID() int { return w.process.cmd.Process.Pid }

// Kill ends the worker by SIGKILL and returns when it is gone and all its lines are read.
func (w *Worker) Kill() {
	_ = w.process.stop(context.Background(), syscall.SIGKILL)
	w.gone()
}

// gone waits for the last line.
func (w *Worker) gone() {
	<-w.process.done
	for {
		_, over, more := w.seen()
		if over {
			return
		}
		<-more
	}
}

// Stop ends the role's context and waits for the process. The error tells its exit status and what it wrote to stderr.
func (w *Worker) Stop() error {
	_ = w.input.Close()
	return w.Wait()
}

// Wait waits for the process to end by itself.
func (w *Worker) Wait() error {
	w.gone()
	if w.process.err != nil {
		return fmt.Errorf("worker %d: %w\n%s", w.PID(), w.process.err, w.errors.Bytes())
	}
	return nil
}

// Lines is what the worker said so far.
func (w *Worker) Lines() []string {
	lines, _, _ := w.seen()
	return slices.Clip(lines)
}

// Await waits until the worker has said a line that begins with prefix, and returns what follows there.
func (w *Worker) Await(t testing.TB, prefix string) string {
	t.Helper()
	timeout := time.NewTimer(longEnough)
	defer timeout.Stop()
	for read := 0; ; {
		lines, over, more := w.seen()
		for ; read < len(lines); read++ {
			if rest, ok := strings.CutPrefix(lines[read], prefix); ok {
				return rest
			}
		}
		if over {
			t.Fatalf("testservers: the worker ended without saying %q; it said %q\n%v", prefix, lines, w.Wait())
		}
		select {
		case <-more:
		case <-timeout.C:
			t.Fatalf("testservers: the worker did not say %q within %v; it said %q", prefix, longEnough, lines)
		}
	}
}

// Crew is a number of workers of one role.
type Crew struct {
	role string
	env  []string

	mu      sync.Mutex
	at      []*Worker
	retired []*Worker
}

// StartCrew starts n workers.
func StartCrew(t testing.TB, n int, role string, env ...string) *Crew {
	t.Helper()
	c := &Crew{role: role, env: env}
	for range n {
		c.at = append(c.at, StartWorker(t, role, env...))
	}
	t.Cleanup(func() {
		for _, w := range c.Workers() {
			w.Kill()
		}
	})
	return c
}

// Churn kills a worker at random each time that next says so, and puts a new one in its place, until the context ends
// or next answers false. It returns how many it killed.
func (c *Crew) Churn(ctx context.Context, next func(ctx context.Context, killed int) bool) (killed int, err error) {
	for next(ctx, killed) && ctx.Err() == nil {
		i := rand.IntN(len(c.at))
		c.at[i].Kill()
		killed++
		if err := c.replace(i); err != nil {
			return killed, err
		}
	}
	return killed, nil
}

// Replace starts new workers in place of those that ended by themselves, and returns how many.
func (c *Crew) Replace(t testing.TB) (ended int) {
	t.Helper()
	for i, w := range c.at {
		select {
		case <-w.process.done:
		default:
			continue
		}
		if err := c.replace(i); err != nil {
			t.Fatalf("testservers: start a worker: %v", err)
		}
		ended++
	}
	return ended
}

// replace puts a new worker in the place of one that has ended.
func (c *Crew) replace(i int) error {
	fresh, err := startWorker(c.role, c.env)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.retired = append(c.retired, c.at[i])
	c.at[i] = fresh
	return nil
}

// Workers are all workers that there were, the killed ones first.
func (c *Crew) Workers() []*Worker {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Concat(c.retired, c.at)
}

// Stop stops the workers that are left. The error joins theirs.
func (c *Crew) Stop() error {
	c.mu.Lock()
	at := c.at
	c.mu.Unlock()
	errs := make([]error, len(at))
	var all sync.WaitGroup
	for i, w := range at {
		all.Go(func() { errs[i] = w.Stop() })
	}
	all.Wait()
	return errors.Join(errs...)
}
