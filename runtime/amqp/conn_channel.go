package amqp

import (
	"context"
	"fmt"

	"github.com/rabbitmq/amqp091-go"
)

// channel is one of an epoch. What was received on it is acknowledged on it, or not at all.
type channel struct {
	*amqp091.Channel
	epoch *epoch
	// over is closed when the channel is no more; err says why then, nil if we closed it.
	over chan struct{}
	err  *amqp091.Error
}

// open makes a new channel, ready for what the caller has in mind: prepare runs before the channel is handed over.
func (e *epoch) open(ctx context.Context, prepare func(*amqp091.Channel) error) (*channel, error) {
	return ask(ctx, e, func() (*channel, error) {
		ch, err := e.conn.Channel()
		if err != nil {
			return nil, err
		}
		c := newChannel(e, ch)
		if err := prepare(ch); err != nil {
			_ = ch.Close() // nothing depends on it
			return nil, err
		}
		return c, nil
	}, func(c *channel) { _ = c.Close() })
}

func newChannel(e *epoch, ch *amqp091.Channel) *channel {
	c := &channel{Channel: ch, epoch: e, over: make(chan struct{})}
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	wait := func() {
		c.err = <-closed
		close(c.over)
	}
	if !e.start(wait) {
		wait() // the epoch is over, and so is the channel
	}
	return c
}

// aside runs f on a channel of its own, which the server may close: what it refuses there disturbs nothing else. f is
// left to itself when ctx ends.
func (e *epoch) aside(ctx context.Context, f func(ch *amqp091.Channel) error) error {
	_, err := ask(ctx, e, func() (struct{}, error) {
		ch, err := e.conn.Channel()
		if err != nil {
			return struct{}{}, err
		}
		err = f(ch)
		_ = ch.Close() // nothing depends on it
		return struct{}{}, err
	}, func(struct{}) {})
	return err
}

// ask runs f, which waits for an answer of the server, as the library does: without end. An answer that does not come
// within ctx is left to come, or to the end of the epoch, and is dropped then; who asks meanwhile waits behind it.
func ask[T any](ctx context.Context, e *epoch, f func() (T, error), drop func(T)) (T, error) {
	var none T
	if e.isOver() {
		return none, e.lost()
	}
	select {
	case e.asking <- struct{}{}:
	case <-ctx.Done():
		return none, context.Cause(ctx)
	case <-e.over:
		return none, e.lost()
	}
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer)
	started := e.start(func() {
		var a answer
		a.value, a.err = f()
		if a.err != nil && e.conn.IsClosed() {
			a.err = fmt.Errorf("%w: %w", ErrDisconnected, a.err)
		}
		<-e.asking
		select {
		case answers <- a:
		case <-ctx.Done():
			if a.err == nil {
				drop(a.value)
			}
		}
	})
	if !started {
		<-e.asking
		return none, e.lost()
	}
	select {
	case a := <-answers:
		return a.value, a.err
	case <-ctx.Done():
		return none, context.Cause(ctx)
	}
}
