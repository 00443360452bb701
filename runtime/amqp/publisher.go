package amqp

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// publisher publishes on one channel of one connection, and opens it again whenever it is lost.
type publisher struct {
	link    *link
	options *options

	sessions *latest[session]

	// declared is what is declared again on each new connection.
	declared []*Topology

	// ctx ends when nothing new is taken; quit ends it.
	ctx   context.Context //nolint:containedctx // of the publisher itself
	quit  context.CancelFunc
	jobs  sync.WaitGroup
	calls sync.WaitGroup

	mu    sync.RWMutex // guards ended, with what calls begins with, and declared
	ended bool
}

func newPublisher(l *link, o *options) *publisher {
	p := &publisher{link: l, options: o, sessions: newLatest[session](errNoAnswerYet)}
	p.ctx, p.quit = context.WithCancel(context.Background())
	p.jobs.Go(p.keep)
	return p
}

// keep opens a session whenever there is none.
func (p *publisher) keep() {
	var failures int
	var known *epoch
	for {
		e, err := p.link.await(p.ctx)
		if err != nil {
			return
		}
		if known != nil && known != e {
			p.restore(e)
		}
		known = e
		s, err := openSession(p.ctx, e, p.options.window)
		if err != nil {
			p.sessions.set(nil, err)
			if !sleep(p.ctx, p.options.pace.wait(failures, err)) {
				return
			}
			failures++
			continue
		}
		failures = 0
		p.sessions.set(s, nil)
		select {
		case <-s.over:
		case <-s.retired:
			p.sessions.set(nil, errWindowFull)
			continue
		case <-p.ctx.Done():
			return
		}
		p.sessions.set(nil, s.reason())
		if !e.conn.IsClosed() {
			p.options.log.Warn("amqp: RabbitMQ closed the publishing channel", "error", s.reason())
		}
	}
}

// remember has t declared again on each new connection.
func (p *publisher) remember(t *Topology) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.ContainsFunc(p.declared, func(known *Topology) bool { return reflect.DeepEqual(known, t) }) {
		p.declared = append(p.declared, t)
	}
}

// restore declares what was declared before. A publish says so if it is not there, and so does the log.
func (p *publisher) restore(e *epoch) {
	p.mu.RLock()
	declared := p.declared
	p.mu.RUnlock()
	for _, t := range declared {
		if err := p.options.declare(p.ctx, e, t); err != nil && p.ctx.Err() == nil {
			p.options.log.Error("amqp: the topology is not as it was declared before the connection was lost", "error", err)
		}
	}
}

func (c *channel) reason() error {
	if c.err == nil {
		return ErrClosed
	}
	return c.err
}

// close takes nothing new, waits for what is on its way, for as long as [farewell], and answers what waits to be sent
// with [ErrClosed].
func (p *publisher) close() {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.quit()
	p.jobs.Wait()
	landed := make(chan struct{})
	go func() {
		p.calls.Wait()
		close(landed)
	}()
	select {
	case <-landed:
	case <-time.After(farewell):
	}
}

// begin counts a call in; false when the publisher is closed.
func (p *publisher) begin() bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.ended {
		return false
	}
	p.calls.Add(1)
	return true
}

// Publish implements [leasebus.Publisher]. A message is taken when RabbitMQ has confirmed that its queue has it: quorum
// queues then hold it on a majority of their nodes. An error of a receipt matches [ErrUnroutable], [ErrRefused] or
// [leasebus.ErrInvalidEnvelope] when the message is not stored, [leasebus.ErrOutcomeUnknown] when it may be; any other
// means that it was not sent, such as [ErrDisconnected] and [ErrBlocked]. The error returned for several messages is that
// of one whose outcome is unknown, if there is one. While there is no connection, Publish waits for one, up to the
// publish timeout.
//
// A delayed message is due when it asks to be, by the clock of this process, or up to a second later. While nobody
// consumes its queue, it may wait there with the rest of its delay before it.
func (b *Broker) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	failed := 0
	b.publisher.publish(ctx, len(out), func(i int, m *message) error {
		return b.prepare(ctx, &out[i], m)
	}, func(i int, err error) {
		if errors.Is(err, ErrRefused) {
			b.ladder.Clear() // somebody may have deleted it
		}
		receipts[i] = leasebus.Receipt{ID: out[i].ID, Err: err}
		if err != nil {
			failed++
		}
	})
	switch {
	case failed == 0:
		return nil
	case len(out) == 1:
		return fmt.Errorf("amqp: publish: %w", receipts[0].Err)
	}
	return fmt.Errorf("amqp: publish: %d of %d messages failed: %w", failed, len(out), gravest(receipts))
}

// gravest is the error to tell of: an unknown outcome, if there is one, for what the caller does then is right for all.
func gravest(receipts []leasebus.Receipt) (err error) {
	for _, r := range receipts {
		if errors.Is(r.Err, leasebus.ErrOutcomeUnknown) {
			return r.Err
		}
		if err == nil {
			err = r.Err
		}
	}
	return err
}

// prepare makes the message that an envelope travels as.
func (b *Broker) prepare(ctx context.Context, out *leasebus.Outgoing, m *message) error {
	if err := out.Validate(b.options.maxPayload); err != nil {
		return err
	}
	if err := checkEnvelope(&out.Envelope); err != nil {
		return err
	}
	now := time.Now()
	delay := out.Delay
	if !out.At.IsZero() {
		delay = out.At.Sub(now)
	}
	s := stamps{attempt: 1, firstDue: now}
	m.exchange, m.key = b.options.exchange.Name, out.Queue
	if delay > 0 {
		if err := b.declareLadder(ctx, out.Queue); err != nil {
			return err
		}
		step := ladderStep(out.Queue, delay)
		m.exchange, m.key = step.exchange, step.key
		s.firstDue, s.remaining = now.Add(delay), step.remaining
	}
	m.Publishing = publishing(&out.Envelope, s)
	return nil
}

// declareLadder makes sure of the queues in which messages wait that are published for later, and of their way back to
// queue.
func (b *Broker) declareLadder(ctx context.Context, queue string) error {
	if _, there := b.ladder.Load(queue); there {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, b.options.publishTimeout)
	defer cancel()
	var shared Topology
	shared.addLadder()
	if err := b.Declare(ctx, &shared); err != nil {
		return err
	}
	if err := b.Declare(ctx, &Topology{Bindings: []Binding{{ladderDue, queue, queue}}}); err != nil {
		var refusal *amqp091.Error
		if errors.As(err, &refusal) && refusal.Code == amqp091.NotFound {
			return fmt.Errorf("%w: %w", ErrUnroutable, err)
		}
		return err
	}
	b.ladder.Store(queue, true)
	return nil
}

// leave gives a place back when its message has landed, for whom nobody waits any more.
func (s *session) leave(p *publisher, f flight) {
	s.mu.Lock()
	s.stuck++
	many := s.stuck > len(s.places)/2
	s.mu.Unlock()
	s.epoch.start(func() {
		<-f.confirmed.Done()
		s.mu.Lock()
		s.takeReturns()
		s.stuck--
		s.mu.Unlock()
		s.free <- f.at
	})
	if many {
		s.retire(p)
	}
}

// retire opens another session in place of one whose window is taken up by messages that are never confirmed. What is on
// its way there has as long to land as it had anyway.
func (s *session) retire(p *publisher) {
	if s.epoch.blockade.Load() != nil {
		return // it would be the same with every other
	}
	s.once.Do(func() {
		close(s.retired)
		p.options.log.Warn("amqp: RabbitMQ does not confirm; opening another channel for publishing")
		s.epoch.start(func() {
			late := time.After(p.options.publishTimeout)
			for range s.places {
				select {
				case <-s.free:
				case <-late:
					_ = s.Close() // nothing depends on it
					return
				case <-s.over:
					return
				}
			}
			_ = s.Close()
		})
	})
}

// usable reports whether messages can be sent.
func (s *session) usable() bool {
	select {
	case <-s.retired:
		return false
	default:
		return !s.IsClosed() && !s.epoch.conn.IsClosed()
	}
}
