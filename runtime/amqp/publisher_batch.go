package amqp

import (
	"context"
	"errors"
	"fmt"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// publish publishes n messages, as build makes them, and calls answer once for each: with nil when RabbitMQ has
// confirmed it, with an error of build, with one that matches [ErrUnroutable] or [ErrRefused] when it is not stored, with
// [leasebus.ErrOutcomeUnknown] when it may be. Any other error means that it was not sent.
//
// As many as the window has room for are on their way at the same time; their order is kept. Both functions are called
// by the caller's goroutine.
func (p *publisher) publish(ctx context.Context, n int, build func(int, *message) error, answer func(int, error)) {
	if !p.begin() {
		answerAll(0, n, answer, ErrClosed)
		return
	}
	defer p.calls.Done()
	b := batch{p: p, answer: answer}
	defer b.stop()
	for i := range n {
		if ctx.Err() != nil {
			answerAll(i, n, answer, context.Cause(ctx))
			break
		}
		var m message
		if err := build(i, &m); err != nil {
			answer(i, err)
			continue
		}
		if err := b.launch(ctx, i, &m); err != nil {
			answerAll(i, n, answer, err)
			break
		}
	}
	b.land(ctx)
}

func answerAll(from, to int, answer func(int, error), err error) {
	for i := from; i < to; i++ {
		answer(i, err)
	}
}

// batch is one call of publish.
type batch struct {
	p      *publisher
	answer func(int, error)

	session *session
	flights []flight // oldest first
	timer   *time.Timer
	// deadline is when to give up; zero = there has been progress since the last wait.
	deadline time.Time
}

func (b *batch) stop() {
	if b.timer != nil {
		b.timer.Stop()
	}
}

// launch sends a message as soon as it may be sent. What is wrong with this message alone is answered; an error means
// that no other can be sent either.
func (b *batch) launch(ctx context.Context, i int, m *message) error {
	for {
		if err := b.ready(ctx); err != nil {
			return err
		}
		if err := b.session.fits(m); err != nil {
			b.answer(i, err)
			return nil
		}
		at, err := b.place(ctx)
		if err != nil {
			return err
		}
		if at < 0 { // the session is over
			continue
		}
		f, err := b.session.send(i, at, m)
		if err == nil {
			b.flights = append(b.flights, f)
			return nil
		}
		if invalid := m.Headers.Validate(); invalid != nil {
			b.answer(i, fmt.Errorf("%w: %w", leasebus.ErrInvalidEnvelope, invalid))
			return nil
		}
		select { // the channel is closed, or about to be
		case <-b.session.over:
		case <-ctx.Done():
		}
	}
}

// ready waits for a session that takes messages.
func (b *batch) ready(caller context.Context) error {
	if b.session == nil {
		b.session, _, _, _ = b.p.sessions.get()
	}
	if s := b.session; s != nil && s.usable() && s.epoch.blockade.Load() == nil && s.epoch.raw.roomy() {
		return nil
	}
	ctx, stop := b.bounded(caller)
	defer stop()
	for {
		s, why := b.p.sessions.await(ctx, (*session).usable)
		if s == nil {
			if reason := b.p.link.state().Err; reason != nil {
				why = reason
			}
			return b.gaveUp(caller, fmt.Errorf("%w: %w", ErrDisconnected, why))
		}
		b.session = s
		if wall := s.epoch.blockade.Load(); wall != nil {
			select {
			case <-wall.over:
				continue
			case <-ctx.Done():
				return b.gaveUp(caller, fmt.Errorf("%w: %s", ErrBlocked, wall.reason))
			}
		}
		switch err := s.epoch.raw.room(ctx); {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return b.gaveUp(caller, errors.New("RabbitMQ reads nothing from the connection"))
		}
	}
}

// place takes a place in the window; -1 if the session is over.
func (b *batch) place(ctx context.Context) (int, error) {
	s := b.session
	select {
	case at := <-s.free:
		return at, nil
	default:
	}
	for {
		var landed <-chan struct{}
		if len(b.flights) > 0 {
			landed = b.flights[0].confirmed.Done()
		}
		select {
		case at := <-s.free:
			return at, nil
		case <-landed:
			b.settle(len(b.flights))
		case <-s.over:
			return -1, nil
		case <-s.retired:
			return -1, nil
		case <-ctx.Done():
			return 0, b.gaveUp(ctx, errWindowFull)
		case <-b.p.ctx.Done():
			return 0, ErrClosed
		case <-b.patience():
			if b.late() {
				s.retire(b.p)
				return 0, b.gaveUp(ctx, errWindowFull)
			}
			b.sweep()
		}
	}
}

var errWindowFull = errors.New("RabbitMQ confirms nothing, and as many messages as may be are on their way")

// land waits for the outcome of all that was sent.
func (b *batch) land(ctx context.Context) {
	for len(b.flights) > 0 {
		select {
		case <-b.flights[0].confirmed.Done():
			b.settle(len(b.flights))
		case <-ctx.Done():
			b.sweep()
			b.abandon(context.Cause(ctx))
		case <-b.patience():
			b.sweep()
			if b.late() {
				b.abandon(fmt.Errorf("RabbitMQ has not confirmed it within %v", b.p.options.publishTimeout))
			}
		}
	}
}

// settle answers for the flights that have landed, up to the first that has not.
func (b *batch) settle(most int) {
	n := 0
	for n < most && b.flights[n].landed() {
		b.answer(b.flights[n].index, b.flights[n].outcome())
		n++
	}
	b.flights = b.flights[n:]
	b.deadline = time.Time{}
}

// sweep answers for all flights that have landed: queues confirm each at its own pace, and the places of the fast ones
// are not to wait for the slow ones.
func (b *batch) sweep() {
	open := b.flights[:0]
	for _, f := range b.flights {
		if f.landed() {
			b.answer(f.index, f.outcome())
			b.deadline = time.Time{}
		} else {
			open = append(open, f)
		}
	}
	b.flights = open
}

// abandon gives up waiting for what is still on its way.
func (b *batch) abandon(reason error) {
	for _, f := range b.flights {
		err := reason
		if wall := f.session.epoch.blockade.Load(); wall != nil {
			err = fmt.Errorf("%w: %w: %s", reason, ErrBlocked, wall.reason)
		}
		b.answer(f.index, fmt.Errorf("%w: %w", leasebus.ErrOutcomeUnknown, err))
		f.session.leave(b.p, f)
	}
	b.flights = nil
}

// sweepEvery is how long a fast queue's place may wait for a slow one's.
const sweepEvery = 20 * time.Millisecond

// patience fires when it is time to sweep, or too late.
func (b *batch) patience() <-chan time.Time {
	now := time.Now()
	if b.deadline.IsZero() {
		b.deadline = now.Add(b.p.options.publishTimeout)
	}
	d := b.deadline.Sub(now)
	if len(b.flights) > 1 {
		d = min(d, sweepEvery)
	}
	if b.timer == nil {
		b.timer = time.NewTimer(d)
	} else {
		b.timer.Reset(d)
	}
	return b.timer.C
}

func (b *batch) late() bool { return !b.deadline.IsZero() && !time.Now().Before(b.deadline) }

// bounded is the call's context until it is too late, or the publisher is closed.
func (b *batch) bounded(caller context.Context) (context.Context, func()) {
	if b.deadline.IsZero() {
		b.deadline = time.Now().Add(b.p.options.publishTimeout)
	}
	ctx, cancel := context.WithDeadline(caller, b.deadline)
	stop := context.AfterFunc(b.p.ctx, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// gaveUp is why a message was not sent.
func (b *batch) gaveUp(ctx context.Context, reason error) error {
	switch {
	case b.p.ctx.Err() != nil:
		return ErrClosed
	case ctx.Err() != nil:
		return fmt.Errorf("%w: %w", context.Cause(ctx), reason)
	}
	return fmt.Errorf("nothing sent within %v: %w", b.p.options.publishTimeout, reason)
}
