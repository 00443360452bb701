package leasebus

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Defaults of a [Processor].
const (
	DefaultConcurrency    = 64
	DefaultLookAhead      = 1024
	DefaultDrainTimeout   = 20 * time.Second
	DefaultDrainGrace     = 5 * time.Second
	DefaultUnhandledAfter = 15 * time.Minute
	DefaultSettleLinger   = 2 * time.Millisecond
)

// Processor runs the handlers of queues over one [Source]. Make one with [NewProcessor], register handlers, call Run.
type Processor struct {
	source      Source
	options     processorOptions
	owner       string
	log         *slog.Logger
	started     time.Time
	base        context.Context // of every handler
	opening     context.Context // of subscriptions after a pause; ends with leasing
	stopOpening context.CancelFunc

	dispatcher dispatcher
	suspects   quarantine
	queues     []*queue
	byLimit    []*queue // the same, smallest limit first
	stats      processorStats
	abandoned  atomic.Int64
	workers    sync.WaitGroup

	closing sync.Mutex // held by the one who ends everything

	mu         sync.Mutex
	state      processorState
	failed     error // of registration: Run refuses with it
	paused     bool
	live       map[*session]struct{} // opened and not closed
	helpers    sync.WaitGroup        // goroutines that end sessions after a pause or open them after it
	leftovers  DrainError
	asking     sync.Once
	drainAsked chan struct{} // closed when a handler asks for a drain
	draining   chan struct{} // closed when leasing has ended for good
	drained    chan struct{} // closed when everything is over
}

type processorState uint8

const (
	processorNew processorState = iota
	processorRunning
	processorDraining
	processorDone
)

// queue is a registered queue: its handler, its policy and its present session.
type queue struct {
	backlog

	policy     *Policy
	types      []string
	handler    handler
	inFlight   atomic.Int64 // leased and not handled yet
	finished   atomic.Int64 // handled, ever
	contending atomic.Bool  // it has more to do than it may lease
	current    atomic.Pointer[session]
}

// ProcessorOption changes what [NewProcessor] makes. Values out of range are refused there.
type ProcessorOption interface{ applyProcessor(*processorOptions) }

type processorOptions struct {
	concurrency    int
	lookAhead      int64
	owner          string
	drainTimeout   time.Duration
	drainGrace     time.Duration
	unhandledAfter time.Duration
	settleLinger   time.Duration
	log            *slog.Logger
	middleware     []Middleware
	hooks          []Hooks
	settledHooks   []func(Delivery, Outcome)
	validate       func(context.Context, Delivery) error
}

type processorOptionFunc func(*processorOptions)

func (f processorOptionFunc) applyProcessor(o *processorOptions) { f(o) }

// WithConcurrency sets how many handlers run at once, over all queues. Default [DefaultConcurrency]; at least 1.
func WithConcurrency(n int) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.concurrency = n })
}

// WithLookAhead caps how many messages a queue may hold leased beyond its free slots. The actual number follows what
// the handlers finish in the time of a few round trips. Default [DefaultLookAhead]; 0 = free slots only, as it always is
// for messages with a single attempt.
func WithLookAhead(n int) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.lookAhead = int64(n) })
}

// WithOwner sets the label under which leases are seen in the store. It is for people; two processors may share one.
// Default host:pid.
func WithOwner(label string) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.owner = label })
}

// WithDrainTimeout sets how long a drain waits for running handlers before it cancels them.
// Default [DefaultDrainTimeout]; 0 = cancel at once.
func WithDrainTimeout(d time.Duration) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.drainTimeout = d })
}

// WithDrainGrace sets how long a cancelled handler may take to return before it is abandoned, in a drain and after its
// own timeout. Default [DefaultDrainGrace].
func WithDrainGrace(d time.Duration) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.drainGrace = d })
}

// WithUnhandledAfter sets how long a message whose type no handler knows is left for others before it is
// dead-lettered. Default [DefaultUnhandledAfter].
func WithUnhandledAfter(d time.Duration) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.unhandledAfter = d })
}

// WithSettleLinger sets how long a settlement may wait for others to share a round trip with.
// Default [DefaultSettleLinger]; 0 = not at all.
func WithSettleLinger(d time.Duration) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.settleLinger = d })
}

// WithLogger sets where the processor tells what happens. Default [slog.Default]. Payloads are never logged.
func WithLogger(log *slog.Logger) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.log = log })
}

// WithMiddleware adds middleware; the first one given is the outermost.
func WithMiddleware(m ...Middleware) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.middleware = append(o.middleware, m...) })
}

// WithHooks adds hooks; they are called in the order given.
func WithHooks(h ...Hooks) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.hooks = append(o.hooks, h...) })
}

// WithValidator checks every decoded message before its handler; an error takes the invalid route.
func WithValidator(validate func(ctx context.Context, d Delivery) error) ProcessorOption {
	return processorOptionFunc(func(o *processorOptions) { o.validate = validate })
}

// NewProcessor makes a processor over source. It fails if an option is out of range.
func NewProcessor(source Source, opts ...ProcessorOption) (*Processor, error) {
	o := processorOptions{
		concurrency: DefaultConcurrency, lookAhead: DefaultLookAhead,
		drainTimeout: DefaultDrainTimeout, drainGrace: DefaultDrainGrace,
		unhandledAfter: DefaultUnhandledAfter, settleLinger: DefaultSettleLinger,
	}
	for _, opt := range opts {
		opt.applyProcessor(&o)
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	if source == nil {
		return nil, errors.New("leasebus: processor: the source is nil")
	}
	for _, h := range o.hooks {
		if h.Settled != nil {
			o.settledHooks = append(o.settledHooks, h.Settled)
		}
	}
	p := &Processor{
		source: source, options: o, owner: ownerName(o.owner), log: o.log, started: time.Now(),
		base: context.Background(), live: make(map[*session]struct{}),
		drainAsked: make(chan struct{}), draining: make(chan struct{}), drained: make(chan struct{}),
	}
	if p.log == nil {
		p.log = slog.Default()
	}
	return p, nil
}

func (o *processorOptions) check() error {
	var problems []error
	refuse := func(wrong bool, option string, given any, allowed string) {
		if wrong {
			problems = append(problems, fmt.Errorf("leasebus: processor: %s: %v is out of range; allowed is %s", option, given, allowed))
		}
	}
	refuse(o.concurrency < 1, "WithConcurrency", o.concurrency, "1 or more")
	refuse(o.lookAhead < 0, "WithLookAhead", o.lookAhead, "0 or more")
	refuse(o.drainTimeout < 0, "WithDrainTimeout", o.drainTimeout, "0 or more")
	refuse(o.drainGrace < 0, "WithDrainGrace", o.drainGrace, "0 or more")
	refuse(o.unhandledAfter < 0, "WithUnhandledAfter", o.unhandledAfter, "0 or more")
	refuse(o.settleLinger < 0 || o.settleLinger > time.Second, "WithSettleLinger", o.settleLinger, "0 to 1s")
	if err := validateText("WithOwner", o.owner, MaxNameBytes-1-2*ownerRandomBytes); err != nil {
		problems = append(problems, fmt.Errorf("leasebus: processor: %w", err))
	}
	for _, h := range o.hooks {
		refuse(h.OnFailure > HookFailureIgnore, "Hooks.OnFailure", h.OnFailure, "one of the HookFailure constants")
	}
	return errors.Join(problems...)
}

const ownerRandomBytes = 8

// ownerName makes a label unique among processors, whatever their labels are.
func ownerName(label string) string {
	if label == "" {
		label = processLabel()
	}
	var random [ownerRandomBytes]byte
	_, _ = rand.Read(random[:]) // never fails
	return label + "#" + hex.EncodeToString(random[:])
}

// processLabel is host:pid.
func processLabel() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s:%d", host, os.Getpid())
}

// register adds a queue. An error stays with the processor, so that one that was not looked at is not lost.
func (p *Processor) register(policy *Policy, h handler, o handlerOptions) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.registrable(policy, o); err != nil {
		p.failed = errors.Join(p.failed, err)
		return err
	}
	limit := p.options.concurrency
	if o.maxConcurrency > 0 {
		limit = min(limit, o.maxConcurrency)
	}
	p.queues = append(p.queues, &queue{
		policy: policy, types: append([]string{policy.Type}, policy.Aliases...), handler: h,
		backlog: backlog{limit: limit},
	})
	return nil
}

// refuse keeps an error of registration.
func (p *Processor) refuse(err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed = errors.Join(p.failed, err)
	return err
}

func (p *Processor) registrable(policy *Policy, o handlerOptions) error {
	if p.state != processorNew {
		return fmt.Errorf("leasebus: handler of %s: the processor runs already; register before Run", policy.Type)
	}
	if o.maxConcurrency < 0 {
		return fmt.Errorf("leasebus: handler of %s: MaxConcurrency: %d is out of range; allowed is 1 or more", policy.Type, o.maxConcurrency)
	}
	if err := errors.Join(policy.Validate(), policy.supported()); err != nil {
		return err
	}
	types := append([]string{policy.Type}, policy.Aliases...)
	for _, other := range p.queues {
		if other.policy.Queue == policy.Queue {
			return fmt.Errorf("leasebus: handler of %s: queue %q has the handler of %s already; each message type has a queue of its own",
				policy.Type, policy.Queue, other.policy.Type)
		}
		for _, name := range types {
			if slices.Contains(other.types, name) {
				return fmt.Errorf("leasebus: handler of %s: type %s is handled by the handler of %s already", policy.Type, name, other.policy.Type)
			}
		}
	}
	return nil
}

// Run starts the handlers and returns when the processor has been drained: because ctx ended, because Drain was called,
// or because a handler asked for it. It returns nil if every message that was started was also settled, else a
// [*DrainError]. A processor runs once.
func (p *Processor) Run(ctx context.Context) error {
	if err := p.start(ctx); err != nil {
		return err
	}
	if err := p.subscribe(ctx); err != nil {
		return errors.Join(err, p.Drain(context.WithoutCancel(ctx)))
	}
	select {
	case <-ctx.Done():
	case <-p.drainAsked:
	case <-p.drained:
		return p.report()
	}
	return p.Drain(context.WithoutCancel(ctx))
}

// start makes the processor a running one, once.
func (p *Processor) start(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.state != processorNew:
		return errors.New("leasebus: processor: Run or Drain was called before; a processor runs once")
	case p.failed != nil:
		return p.failed
	case len(p.queues) == 0:
		return errors.New("leasebus: processor: no handler is registered")
	}
	p.state = processorRunning
	// Handlers see the values of Run's context, not its end: a drain lets them finish.
	p.base = context.WithoutCancel(ctx)
	p.opening, p.stopOpening = context.WithCancel(p.base)
	p.byLimit = slices.SortedStableFunc(slices.Values(p.queues), func(a, b *queue) int { return a.limit - b.limit })
	for range p.options.concurrency {
		p.hire()
	}
	return nil
}

// subscribe opens every queue, until ctx or the processor ends. It does not hold the lock: a store that hangs is not to
// hold up a drain.
func (p *Processor) subscribe(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.opening, cancel)()
	opened := make([]*session, 0, len(p.queues))
	for _, q := range p.queues {
		s, err := p.openSession(ctx, q)
		if err != nil {
			each(opened, (*session).close)
			if p.opening.Err() != nil {
				return nil // drained meanwhile
			}
			return fmt.Errorf("leasebus: processor: subscribe to queue %s: %w", q.policy.Queue, err)
		}
		opened = append(opened, s)
	}
	for i, s := range opened {
		p.install(p.queues[i], s)
	}
	return nil
}

// begin makes s the session that supplies q. Call it with the lock held.
func (p *Processor) begin(q *queue, s *session) {
	p.live[s] = struct{}{}
	q.current.Store(s)
	s.run()
}

// now is the processor's monotonic clock.
func (p *Processor) now() time.Duration { return time.Since(p.started) }

// slotsFor is how many of the workers a queue may fill: all of them, while no other queue wants more than it has; else
// an equal share of what is left by those whose own limit is smaller than theirs.
func (p *Processor) slotsFor(q *queue) int {
	free, sharers := p.options.concurrency, 1
	for _, other := range p.byLimit {
		if other != q && other.contending.Load() {
			sharers++
		}
	}
	for _, other := range p.byLimit {
		if other == q || !other.contending.Load() || sharers == 1 {
			continue
		}
		if other.limit*sharers > free {
			break // its share is smaller than its limit, and so are those of all that follow
		}
		free -= other.limit
		sharers--
	}
	return max(1, min((free+sharers-1)/sharers, q.limit))
}

// InFlight counts the handlers that run now, abandoned ones left out.
func (p *Processor) InFlight() int { return p.dispatcher.inFlight() }

// Held counts the messages that are leased without a handler running: waiting for one, or being settled.
func (p *Processor) Held() int { return max(int(p.stats.held.Load())-p.InFlight(), 0) }

// Pause stops taking messages: no handler is started from here on, running ones go on. Messages that are leased and
// not started go back to the queue after one heartbeat, unless Resume comes first. Before Run, it makes Run begin paused.
func (p *Processor) Pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paused {
		return
	}
	p.paused = true
	for _, q := range p.queues {
		p.dispatcher.pause(q)
		if s := q.current.Swap(nil); s != nil {
			s.halt()
			p.helpers.Go(s.retire)
		}
	}
}

// Resume goes on after Pause. It subscribes again in the background, for as long as that takes.
func (p *Processor) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.paused {
		return
	}
	p.paused = false
	for _, q := range p.queues {
		p.dispatcher.resume(q)
		if p.state == processorRunning {
			p.helpers.Go(func() { p.reopen(q) })
		}
	}
}

// reopen subscribes a queue until it works.
func (p *Processor) reopen(q *queue) {
	retry := backoff{first: 100 * time.Millisecond, max: 10 * time.Second}
	for p.wanted(q) {
		s, err := p.openSession(p.opening, q)
		if err == nil {
			p.install(q, s)
			return
		}
		p.log.Warn("leasebus: subscribing failed", "queue", q.policy.Queue, "error", err)
		if !retry.wait(p.draining) {
			return
		}
	}
}

// wanted reports whether q is without a session and should have one.
func (p *Processor) wanted(q *queue) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lacks(q)
}

// lacks is wanted with the lock held.
func (p *Processor) lacks(q *queue) bool {
	return p.state == processorRunning && !p.paused && q.current.Load() == nil
}

func (p *Processor) install(q *queue, s *session) {
	p.mu.Lock()
	wanted := p.lacks(q)
	if wanted {
		p.begin(q, s)
	}
	p.mu.Unlock()
	if !wanted {
		s.close()
	}
}

// retire ends a session for a pause: after one heartbeat its waiting leases go back; when its last lease has ended, it
// is closed.
func (s *session) retire() {
	s.stop()
	timer := time.NewTimer(s.queue.policy.Lease.Heartbeat)
	defer timer.Stop()
	select {
	case <-s.empty:
	case <-s.ctx.Done():
	case <-timer.C:
		s.release(0)
		select {
		case <-s.empty:
		case <-s.ctx.Done():
		}
	}
	s.close()
}
