package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// worker is a running processor, with a record of what it did.
type worker struct {
	*leasebus.Processor
	t    *trial
	stop context.CancelFunc
	ran  chan error

	mu       sync.Mutex
	runs     []run
	outcomes []outcome
	ended    bool
}

// run is one call of a handler.
type run struct {
	id      leasebus.ID
	value   string
	attempt int
	at      time.Time
}

// outcome is what a Settled hook saw.
type outcome struct {
	leasebus.Outcome
	id      leasebus.ID
	attempt int
}

type handlerFunc func(ctx context.Context, d leasebus.Delivery, value string) error

// newWorker makes a processor that does not run yet, over source, which is the store unless something is in between.
func (t *trial) newWorker(source leasebus.Source, opts ...leasebus.ProcessorOption) *worker {
	t.Helper()
	w := &worker{t: t, ran: make(chan error, 1)}
	opts = append([]leasebus.ProcessorOption{
		leasebus.WithLogger(t.log()), leasebus.WithConcurrency(8), leasebus.WithOwner("conformance"),
		leasebus.WithDrainTimeout(t.lease), leasebus.WithDrainGrace(t.lease),
		leasebus.WithHooks(leasebus.Hooks{Settled: func(d leasebus.Delivery, o leasebus.Outcome) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.outcomes = append(w.outcomes, outcome{o, d.ID(), d.Attempt()})
		}}),
	}, opts...)
	p, err := leasebus.NewProcessor(source, opts...)
	t.must(err, "make a processor")
	w.Processor = p
	return w
}

// register adds a handler for the trial's queue.
func (w *worker) register(handle handlerFunc, opts ...leasebus.HandlerOption) {
	w.t.Helper()
	w.t.must(leasebus.RegisterHandler(w.Processor, w.t.policy, func(ctx context.Context, m *wrapperspb.StringValue) error {
		return w.handle(ctx, m.GetValue(), handle)
	}, opts...), "register a handler")
}

// registerSecond adds a handler for another queue, and returns a trial that publishes there.
func (w *worker) registerSecond(handle handlerFunc) *trial {
	w.t.Helper()
	second := *w.t
	second.queue = w.t.newQueue()
	second.policy = w.t.policyFor(second.queue)
	second.policy.Type = "google.protobuf.BytesValue" // in binary, the same as a StringValue
	w.t.must(leasebus.RegisterHandler(w.Processor, second.policy, func(ctx context.Context, m *wrapperspb.BytesValue) error {
		return w.handle(ctx, string(m.GetValue()), handle)
	}), "register a handler for a second queue")
	return &second
}

func (w *worker) handle(ctx context.Context, value string, handle handlerFunc) error {
	d, ok := leasebus.DeliveryFrom(ctx)
	if !ok {
		w.t.Error("DeliveryFrom finds nothing in a handler's context")
		return errors.New("no delivery")
	}
	w.mu.Lock()
	w.runs = append(w.runs, run{d.ID(), value, d.Attempt(), time.Now()})
	w.mu.Unlock()
	return handle(ctx, d, value)
}

// start runs the processor until the end of the case, or until drained.
func (w *worker) start() *worker {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.ctx))
	w.stop = cancel
	go func() { w.ran <- w.Run(ctx) }()
	w.t.Cleanup(func() {
		if err := w.finish(); err != nil && !w.ended {
			w.t.Errorf("the processor ended with: %v", err)
		}
	})
	return w
}

// finish drains the processor, and returns what Run did.
func (w *worker) finish() error {
	w.stop()
	err := <-w.ran
	w.ran <- err
	return err
}

// drained is finish where nothing may be left.
func (w *worker) drained() {
	w.t.Helper()
	w.t.must(w.finish(), "drain")
}

// leftBehind is finish where something is left.
func (w *worker) leftBehind() *leasebus.DrainError {
	w.t.Helper()
	err := w.finish()
	w.ended = true
	var left *leasebus.DrainError
	if !errors.As(err, &left) {
		w.t.Fatalf("drain: got error %v, want a DrainError", err)
	}
	return left
}

// work runs a processor with one handler over the store.
func (t *trial) work(handle handlerFunc, opts ...leasebus.ProcessorOption) *worker {
	t.Helper()
	w := t.newWorker(t.store, opts...)
	w.register(handle)
	return w.start()
}

// recorded returns copies of the records.
func (w *worker) recorded() ([]run, []outcome) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.runs), slices.Clone(w.outcomes)
}

// untilRuns waits until n calls of handlers have begun.
func (w *worker) untilRuns(n int) []run {
	w.t.Helper()
	var runs []run
	w.t.until("handlers had been called as often as they should", func() bool {
		runs, _ = w.recorded()
		return len(runs) >= n
	})
	return runs
}

// untilSettled waits until n settlements were answered, and checks that there are no more.
func (w *worker) untilSettled(n int) []outcome {
	w.t.Helper()
	return w.untilOutcomes("everything was settled", n, func(outcome) bool { return true })
}

// untilHandled is untilSettled without what was released: a processor on a busy machine may give back what waits for its
// slots, and lease it again.
func (w *worker) untilHandled(n int) []outcome {
	w.t.Helper()
	return w.untilOutcomes("everything was handled", n, func(o outcome) bool { return o.Kind != leasebus.SettleRelease })
}

func (w *worker) untilOutcomes(what string, n int, counts func(outcome) bool) []outcome {
	w.t.Helper()
	var outcomes []outcome
	w.t.until(what, func() bool {
		_, outcomes = w.recorded()
		outcomes = slices.DeleteFunc(outcomes, func(o outcome) bool { return !counts(o) })
		return len(outcomes) >= n
	})
	if len(outcomes) > n {
		w.t.Errorf("%d settlements, want %d: %+v", len(outcomes), n, outcomes)
	}
	return outcomes
}

// attemptsOf lists the attempts at which a message's handler was called.
func (w *worker) attemptsOf(id leasebus.ID) []int {
	runs, _ := w.recorded()
	var attempts []int
	for _, r := range runs {
		if r.id == id {
			attempts = append(attempts, r.attempt)
		}
	}
	return attempts
}

// unreliable stands between a processor and the store, and makes calls fail.
type unreliable struct {
	leasebus.Source
	noSubscribe, noLease, noRenew, noSettle atomic.Bool
	// hang, if set, is what subscribing waits for, as long as its context allows.
	hang atomic.Pointer[gate]
	// lies: renewals are answered OK and never reach the store.
	lies atomic.Bool
	// mute: settlements reach the store, and its answers are lost.
	mute atomic.Bool
	// busy: settlements find their rows locked.
	busy atomic.Bool
	// cancelled: renewals are answered as if an operator had taken the messages away.
	cancelled atomic.Bool
	// refuses, if set, is true of what the store cannot store.
	refuses  func(*leasebus.Settlement) bool
	feed     atomic.Pointer[unreliableFeed] // the newest
	renewals atomic.Int64
	failures atomic.Int64
}

var errAway = errors.New("conformance: the store is away")

func (u *unreliable) Subscribe(ctx context.Context, s leasebus.Subscription) (leasebus.Feed, error) {
	if u.noSubscribe.Load() {
		u.failures.Add(1)
		return nil, errAway
	}
	if hang := u.hang.Load(); hang != nil {
		u.failures.Add(1)
		select {
		case <-hang.open:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	feed, err := u.Source.Subscribe(ctx, s)
	if err != nil {
		return nil, err
	}
	wrapped := &unreliableFeed{feed, u}
	u.feed.Store(wrapped)
	return wrapped, nil
}

type unreliableFeed struct {
	leasebus.Feed
	u *unreliable
}

func (f *unreliableFeed) away(off *atomic.Bool) error {
	if off.Load() {
		f.u.failures.Add(1)
		return errAway
	}
	return nil
}

func (f *unreliableFeed) Lease(ctx context.Context, dst []leasebus.Lease) (int, error) {
	if err := f.away(&f.u.noLease); err != nil {
		return 0, err
	}
	return f.Feed.Lease(ctx, dst)
}

func (f *unreliableFeed) Renew(ctx context.Context, batch []leasebus.Renewal) error {
	f.u.renewals.Add(1)
	if err := f.away(&f.u.noRenew); err != nil {
		return err
	}
	var answer leasebus.Result
	switch {
	case f.u.lies.Load():
		answer = leasebus.ResultOK
	case f.u.cancelled.Load():
		answer = leasebus.ResultCancelled
	default:
		return f.Feed.Renew(ctx, batch)
	}
	for i := range batch {
		batch[i].Result = answer
	}
	return nil
}

func (f *unreliableFeed) Settle(ctx context.Context, batch []leasebus.Settlement) error {
	if err := f.away(&f.u.noSettle); err != nil {
		return err
	}
	for i := range batch {
		if f.u.refuses != nil && f.u.refuses(&batch[i]) {
			f.u.failures.Add(1)
			return fmt.Errorf("conformance: element %d of %d: %w", i, len(batch), leasebus.ErrUnstorable)
		}
	}
	if f.u.busy.Load() {
		f.u.failures.Add(1)
		for i := range batch {
			batch[i].Result = leasebus.ResultBusy
		}
		return nil
	}
	err := f.Feed.Settle(ctx, batch)
	if !f.u.mute.Load() {
		return err
	}
	f.u.failures.Add(1)
	for i := range batch {
		batch[i].Result = leasebus.ResultUnknown
	}
	return errAway
}

// receive waits for what a handler has to tell.
func receive[T any](t *trial, what string, from <-chan T) (got T) {
	t.Helper()
	timer := time.NewTimer(t.patience())
	defer timer.Stop()
	select {
	case got = <-from:
	case <-timer.C:
		t.Fatalf("waited %v in vain for %s", t.patience(), what)
	}
	return got
}

// gate holds handlers until it is opened.
type gate struct {
	open chan struct{}
	once sync.Once
}

// newGate makes one that is open at the end of the case at the latest.
func (t *trial) newGate() *gate {
	g := &gate{open: make(chan struct{})}
	t.Cleanup(g.lift)
	return g
}

func (g *gate) lift() { g.once.Do(func() { close(g.open) }) }
