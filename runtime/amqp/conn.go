package amqp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// link is a connection that comes back by itself, for as long as it is not closed. Each time it is up is an [epoch];
// what was opened in one does not outlive it.
type link struct {
	purpose string // for people: "publish", "consume orders"
	target  *target
	options *options

	// ctx ends with close; quit ends it.
	ctx  context.Context //nolint:containedctx // of the link itself
	quit context.CancelFunc
	jobs sync.WaitGroup

	current *latest[epoch]
	epochs  atomic.Int64

	// feed is what consumes on it, if it is for that.
	feed atomic.Pointer[feed]
}

// linkState is what a link says about itself.
type linkState struct {
	Up bool
	// Since is when that began.
	Since time.Time
	// Err is why it is down.
	Err error
	// Blocked is why RabbitMQ takes no messages, "" if it does.
	Blocked string
}

// pace says how long a link waits before it connects again: evenly spread between nothing and a ceiling that doubles
// from first to most ("full jitter"), so that many clients do not return together. Where the server refused, waiting
// seldom mends it: the spread is between refused and refusedMost then.
type pace struct{ first, most, refused, refusedMost time.Duration }

//nolint:gochecknoglobals // a constant of a struct
var usualPace = pace{100 * time.Millisecond, 10 * time.Second, 5 * time.Second, time.Minute}

// newLink makes a link that is down until start.
func newLink(purpose string, to *target, o *options) *link {
	l := &link{purpose: purpose, target: to, options: o, current: newLatest[epoch](errNoAnswerYet)}
	l.ctx, l.quit = context.WithCancel(context.Background())
	return l
}

// start keeps the link up from here on. e is an epoch that is there already, or nil.
func (l *link) start(e *epoch) {
	if e != nil {
		l.current.set(e, nil)
	}
	l.jobs.Go(func() { l.keep(e) })
}

var errNoAnswerYet = errors.New("the server has not answered yet")

// keep connects whenever the link is down, without end.
func (l *link) keep(e *epoch) {
	var failures int
	for {
		var err error
		if e == nil {
			if e, err = l.connect(l.ctx); err == nil {
				l.current.set(e, nil)
				l.options.log.Info("amqp: connected", "connection", l.purpose, "epoch", e.number)
			} else if l.ctx.Err() == nil {
				l.current.set(nil, err)
				l.options.log.Warn("amqp: cannot connect", "connection", l.purpose, "failures", failures+1, "error", err)
			}
		}
		if e != nil {
			began := time.Now()
			err = l.last(e)
			e = nil
			// One that ends as soon as it is there has mended nothing.
			if time.Since(began) > l.options.pace.most {
				failures = 0
			}
		}
		if !sleep(l.ctx, l.options.pace.wait(failures, err)) {
			return
		}
		failures++
	}
}

// last waits until e is over, or the link is closed, and says why.
func (l *link) last(e *epoch) error {
	err := ErrClosed
	select {
	case <-e.over:
		err = e.err
		l.options.log.Warn("amqp: connection lost", "connection", l.purpose, "epoch", e.number, "error", err)
	case <-l.ctx.Done():
	}
	l.current.set(nil, err)
	l.jobs.Go(e.close)
	return err
}

func (p pace) wait(failures int, last error) time.Duration {
	low, ceiling, most := time.Duration(0), p.first, p.most
	if isConfiguration(last) {
		low, ceiling, most = p.refused, 2*p.refused, p.refusedMost
	}
	for range failures {
		if ceiling *= 2; ceiling >= most {
			ceiling = most
			break
		}
	}
	return low + rand.N(ceiling-low+1) //nolint:gosec // spreads load, guards nothing
}

// sleep waits for d, or for ctx and answers false then.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// await returns the epoch that is now, or waits for the next one. While there is none, its error matches
// [ErrDisconnected] and says why.
func (l *link) await(ctx context.Context) (*epoch, error) {
	either, stop := withEnd(ctx, l.ctx)
	defer stop()
	e, why := l.current.await(either, func(e *epoch) bool { return !e.isOver() })
	switch {
	case l.ctx.Err() != nil:
		return nil, ErrClosed
	case e == nil:
		return nil, fmt.Errorf("%w: %w: %w", context.Cause(ctx), ErrDisconnected, why)
	}
	return e, nil
}

// withEnd is ctx, ended by the end of other too.
func withEnd(ctx, other context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(other, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// state says how the link is.
func (l *link) state() linkState {
	e, err, since, _ := l.current.get()
	s := linkState{Up: e != nil, Since: since, Err: err}
	if e != nil {
		if b := e.blockade.Load(); b != nil {
			s.Blocked = b.reason
		}
	}
	return s
}

// close ends the link, within [farewell].
func (l *link) close() {
	l.quit()
	l.jobs.Wait()
}

// farewell is how long the server has to answer that a connection is closed.
const farewell = 2 * time.Second

// epoch is one connection, from when it is up to when it is over.
type epoch struct {
	number int64
	conn   *amqp091.Connection
	raw    *netConn
	// over is closed when the connection is no more; err says why then.
	over chan struct{}
	err  error

	// asking is held by who waits for an answer of the server: one that does not answer keeps only one waiting.
	asking chan struct{}

	// blockade is there while RabbitMQ takes no messages from this connection. It says so only to one that publishes.
	blockade atomic.Pointer[blockade]

	mu    sync.Mutex
	ended bool // no more tasks
	tasks sync.WaitGroup
}

type blockade struct {
	reason string
	over   chan struct{} // closed with it
}

func newEpoch(number int64, conn *amqp091.Connection, raw *netConn) *epoch {
	e := &epoch{number: number, conn: conn, raw: raw, over: make(chan struct{}), asking: make(chan struct{}, 1)}
	// Their events are taken at once, whatever else happens: the library stops reading while nobody takes them.
	closed := conn.NotifyClose(make(chan *amqp091.Error, 1))
	blocked := conn.NotifyBlocked(make(chan amqp091.Blocking, 1))
	e.start(func() { e.watch(closed, blocked) })
	return e
}

func (e *epoch) watch(closed <-chan *amqp091.Error, blocked <-chan amqp091.Blocking) {
	for {
		select {
		case b, ok := <-blocked:
			if !ok {
				blocked = nil
				continue
			}
			e.block(b)
		case reason := <-closed:
			e.err = ErrClosed
			if reason != nil {
				e.err = reason
			}
			close(e.over)
			e.block(amqp091.Blocking{})
			e.raw.cut() // whatever the library still does with it
			if blocked != nil {
				for range blocked {
					continue // until it is closed
				}
			}
			return
		}
	}
}

func (e *epoch) block(b amqp091.Blocking) {
	next := (*blockade)(nil)
	if b.Active {
		next = &blockade{b.Reason, make(chan struct{})}
	}
	if last := e.blockade.Swap(next); last != nil {
		close(last.over)
	}
}

// start runs task beside the epoch; false if that is over. A task ends soon after the epoch does.
func (e *epoch) start(task func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended {
		return false
	}
	e.tasks.Go(task)
	return true
}

func (e *epoch) isOver() bool {
	select {
	case <-e.over:
		return true
	default:
		return false
	}
}

// lost is why nothing can be done in an epoch that is over.
func (e *epoch) lost() error { return fmt.Errorf("%w: %w", ErrDisconnected, e.err) }

// close says goodbye to the server and cuts the connection if it does not answer.
func (e *epoch) close() {
	late := time.AfterFunc(farewell, e.raw.cut)
	_ = e.conn.CloseDeadline(time.Now().Add(farewell)) // it is closed afterwards, whatever this says
	late.Stop()
	e.mu.Lock()
	e.ended = true
	e.mu.Unlock()
	e.tasks.Wait()
	<-e.raw.sent
}

// serverMajor is the first number of the server's version, 0 if it does not say.
func (e *epoch) serverMajor() int {
	version, _ := e.conn.Properties["version"].(string)
	var major int
	_, _ = fmt.Sscanf(version, "%d.", &major) // 0 without
	return major
}
