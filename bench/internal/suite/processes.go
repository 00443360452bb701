package suite

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
	"github.com/leasebus/leasebus/bench/internal/meter"
)

// Processes drains with several worker processes.
type Processes struct {
	Count    int
	Messages int
	Limit    time.Duration
	Body     int
}

// Run implements Load.
func (p Processes) Run(ctx context.Context, t *Trial) (Outcome, error) {
	bus, err := t.Engine.Open(ctx, t.DSN, engine.Options{})
	if err != nil {
		return Outcome{}, err
	}
	defer bus.Close()
	if err := t.fill(ctx, bus, p.Messages, 1, engine.Message{Body: bodyOf(p.Body)}); err != nil {
		return Outcome{}, err
	}
	crew, err := startWorkers(ctx, p.Count, t, 0)
	if err != nil {
		return Outcome{}, err
	}
	defer crew.kill()
	began := time.Now()
	crew.begin()
	for crew.handled() < int64(p.Messages) && time.Since(began) < p.Limit {
		if err := crew.failed(); err != nil {
			return Outcome{}, err
		}
		time.Sleep(tellEvery / 4)
	}
	handled, took := crew.handled(), time.Since(began)
	if handled >= int64(p.Messages) {
		if err := expectLeft(ctx, bus, 0); err != nil {
			return Outcome{}, err
		}
	}
	return Outcome{Sample: Sample{Rate: float64(handled) / took.Seconds()}}, nil
}

// Footprint is the memory of a worker process whose handlers are slow, in front of a backlog.
type Footprint struct {
	Backlog int
	Handler time.Duration
	For     time.Duration
	Body    int
}

// Run implements Load.
func (f Footprint) Run(ctx context.Context, t *Trial) (Outcome, error) {
	bus, err := t.Engine.Open(ctx, t.DSN, engine.Options{})
	if err != nil {
		return Outcome{}, err
	}
	defer bus.Close()
	if err := t.fill(ctx, bus, f.Backlog, 1, engine.Message{Body: bodyOf(f.Body)}); err != nil {
		return Outcome{}, err
	}
	crew, err := startWorkers(ctx, 1, t, f.Handler)
	if err != nil {
		return Outcome{}, err
	}
	defer crew.kill()
	crew.begin()
	largest := int64(0)
	for until := time.Now().Add(f.For); time.Now().Before(until); time.Sleep(tellEvery) {
		if err := crew.failed(); err != nil {
			return Outcome{}, err
		}
		largest = max(largest, meter.Resident(crew.workers[0].cmd.Process.Pid))
	}
	rate := float64(crew.handled()) / f.For.Seconds()
	return Outcome{Sample: Sample{Rate: rate, Resident: float64(largest) / megabyte}}, nil
}

// WorkCommand is the argument that makes the program a worker process: what follows is for [Work].
const WorkCommand = "work"

// workerReady is what a worker process says before it waits for its start.
const workerReady = "ready"

// tellEvery is how often a worker process tells how much it has done.
const tellEvery = 20 * time.Millisecond

// Work is a worker process: it opens the engine, says so, waits for a line on its input, and works until its input ends,
// printing how many messages it has handled.
func Work(ctx context.Context, name, dsn string, handler time.Duration) error {
	e, err := engine.ByName(name)
	if err != nil {
		return err
	}
	bus, err := e.Open(ctx, dsn, engine.Options{})
	if err != nil {
		return err
	}
	defer bus.Close()
	input := bufio.NewReader(os.Stdin)
	if _, err := fmt.Fprintln(os.Stdout, workerReady); err != nil {
		return fmt.Errorf("worker process: %w", err)
	}
	if _, err := input.ReadString('\n'); err != nil {
		return nil // nobody wants us to begin
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, input) // until it ends
		stop()
	}()
	var handled atomic.Int64
	workers := hire(ctx, bus, func(ctx context.Context, _ engine.Message) {
		work(ctx, handler)
		handled.Add(1)
	})
	ticker := time.NewTicker(tellEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			_, _ = fmt.Fprintln(os.Stdout, handled.Load()) // if nobody reads any more, the input ends too
		case <-ctx.Done():
			return workers.dismiss()
		}
	}
}

type workers struct{ workers []*worker }

// worker is a process at the other end of [Work].
type worker struct {
	cmd     *exec.Cmd
	input   io.WriteCloser
	ready   chan struct{}
	handled atomic.Int64
	ended   chan struct{}
	err     error // once ended
}

func startWorkers(ctx context.Context, n int, t *Trial, handler time.Duration) (*workers, error) {
	all := &workers{}
	for range n {
		w, err := startWorker(ctx, t, handler)
		if err != nil {
			all.kill()
			return nil, err
		}
		all.workers = append(all.workers, w)
	}
	for _, w := range all.workers {
		select {
		case <-w.ready:
		case <-w.ended:
			all.kill()
			return nil, fmt.Errorf("a worker process ended before it was ready: %w", w.err)
		}
	}
	return all, nil
}

func startWorker(ctx context.Context, t *Trial, handler time.Duration) (*worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start a worker process: %w", err)
	}
	w := &worker{ready: make(chan struct{}), ended: make(chan struct{})}
	w.cmd = exec.CommandContext(ctx, self, WorkCommand, t.Engine.Name, t.DSN, handler.String()) //nolint:gosec // this program
	w.cmd.Stderr = os.Stderr
	output, outErr := w.cmd.StdoutPipe()
	input, inErr := w.cmd.StdinPipe()
	if err := errors.Join(outErr, inErr); err != nil {
		return nil, fmt.Errorf("start a worker process: %w", err)
	}
	w.input = input
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a worker process: %w", err)
	}
	go w.listen(output)
	return w, nil
}

func (w *worker) listen(output io.Reader) {
	lines := bufio.NewScanner(output)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == workerReady {
			close(w.ready)
			continue
		}
		if n, err := strconv.ParseInt(line, 10, 64); err == nil {
			w.handled.Store(n)
		}
	}
	w.err = w.cmd.Wait()
	close(w.ended)
}

func (ws *workers) begin() {
	for _, w := range ws.workers {
		_, _ = io.WriteString(w.input, "go\n") // a worker that has ended is noticed by failed
	}
}

func (ws *workers) handled() (n int64) {
	for _, w := range ws.workers {
		n += w.handled.Load()
	}
	return n
}

// failed is the error of a worker that has ended by itself.
func (ws *workers) failed() error {
	for _, w := range ws.workers {
		select {
		case <-w.ended:
			return fmt.Errorf("a worker process ended: %w", w.err)
		default:
		}
	}
	return nil
}

// kill ends the workers; their databases go with the trial.
func (ws *workers) kill() {
	for _, w := range ws.workers {
		_ = w.cmd.Process.Kill() // it may have ended
		<-w.ended
		_ = w.input.Close()
	}
}
