package amqp

import (
	"context"
	"errors"
	"fmt"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

const (
	// scanChunk is how many messages are read ahead of who looks at them.
	scanChunk = 100
	// scanSilence is how long nothing may come before it is asked whether there is anything at all.
	scanSilence = 100 * time.Millisecond
	// scanReturn is how long it may take until what was read is in the queue again.
	scanReturn = 2 * time.Second
	scanPause  = 2 * time.Millisecond
)

// scan reads a queue from its head, on a channel of its own, and gives everything back that is not acknowledged: RabbitMQ
// has no other way to look at messages. While it lasts, others do not see them; if this process dies, they are back at
// once. They keep their places, but count as delivered once more.
type scan struct {
	channel *channel
	queue   string
	left    int // messages to read
	taken   int
	chunks  int
	open    <-chan amqp091.Delivery // of the present chunk
	inChunk int
	acked   int
}

// scan visits the messages that are in a queue now, until visit answers false. Now and then, and at the end, it calls
// pause, if any: only then may messages be acknowledged. Without such a queue there are none.
func (b *Broker) scan(ctx context.Context, queue string, visit func(*scan, *amqp091.Delivery) (more bool), pause func() error) error {
	e, err := b.operating(ctx)
	if err != nil {
		return err
	}
	depth, _, err := depthOf(ctx, e, queue)
	if err != nil || depth == 0 {
		return err
	}
	s := &scan{queue: queue, left: depth}
	s.channel, err = e.open(ctx, func(ch *amqp091.Channel) error { return ch.Qos(scanChunk, 0, false) })
	if err != nil {
		return fmt.Errorf("read %q: %w", queue, err)
	}
	defer s.close() //nolint:contextcheck // what was read goes back, whatever ended the reading
	for more := true; more; {
		d, ok, err := s.next(ctx)
		if err != nil {
			return err
		}
		if !ok {
			break
		}
		more = visit(s, &d)
		if s.open == nil && pause != nil {
			if err := pause(); err != nil {
				return err
			}
		}
	}
	if pause == nil {
		return nil
	}
	if err := s.end(ctx); err != nil {
		return err
	}
	return pause()
}

// depthOf is how many messages of a queue are ready; false if there is no such queue.
func depthOf(ctx context.Context, e *epoch, queue string) (depth int, ok bool, err error) {
	depth, err = ask(ctx, e, func() (int, error) {
		ch, err := e.conn.Channel()
		if err != nil {
			return 0, err
		}
		q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		if err == nil {
			_ = ch.Close() // nothing depends on it
		}
		return q.Messages, err
	}, func(int) {})
	var refusal *amqp091.Error
	if errors.As(err, &refusal) && refusal.Code == amqp091.NotFound {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("look at %q: %w", queue, err)
	}
	return depth, true, nil
}

// next returns the next message; false at the end.
func (s *scan) next(ctx context.Context) (d amqp091.Delivery, ok bool, err error) {
	for s.left > 0 {
		if s.open == nil {
			if err := s.begin(ctx); err != nil {
				return d, false, err
			}
		}
		timer := time.NewTimer(scanSilence)
		select {
		case d, ok = <-s.open:
			timer.Stop()
			if !ok {
				return d, false, fmt.Errorf("read %q: %w", s.queue, s.channel.interrupted())
			}
			s.left--
			s.inChunk++
			s.taken++
			if s.inChunk == scanChunk || s.left == 0 {
				err = s.end(ctx)
			}
			return d, err == nil, err
		case <-ctx.Done():
			timer.Stop()
			return d, false, context.Cause(ctx)
		case <-timer.C: // others have taken what was counted, or RabbitMQ is slow
			depth, _, err := depthOf(ctx, s.channel.epoch, s.queue)
			if err != nil || depth == 0 {
				return d, false, err
			}
		}
	}
	return d, false, nil
}

// begin consumes one chunk: each consumer is sent what its prefetch allows, and all that is read stays unacknowledged.
func (s *scan) begin(ctx context.Context) error {
	s.chunks++
	s.inChunk = 0
	var err error
	s.open, err = ask(ctx, s.channel.epoch, func() (<-chan amqp091.Delivery, error) {
		return s.channel.Consume(s.queue, s.tag(), false, false, false, false, nil)
	}, func(<-chan amqp091.Delivery) {})
	if err != nil {
		return fmt.Errorf("read %q: %w", s.queue, err)
	}
	return nil
}

func (s *scan) tag() string { return fmt.Sprintf("scan-%d", s.chunks) }

// end cancels the consumer of a chunk, if there is one. What came beyond what is read, such as a new message, goes back
// with the rest.
func (s *scan) end(ctx context.Context) error {
	open := s.open
	if open == nil {
		return nil
	}
	s.open = nil
	_, err := ask(ctx, s.channel.epoch, func() (struct{}, error) {
		return struct{}{}, s.channel.Cancel(s.tag(), false)
	}, func(struct{}) {})
	if err != nil {
		return fmt.Errorf("read %q: %w", s.queue, err)
	}
	for range open {
		s.taken++
	}
	return nil
}

// ack takes a message out of the queue for good. While there is a consumer, it would be sent another message for it, and
// a quorum queue loses sight of one that it sends while the consumer is cancelled, until the channel ends.
func (s *scan) ack(d *amqp091.Delivery) error {
	s.acked++
	if err := s.channel.Ack(d.DeliveryTag, false); err != nil {
		return fmt.Errorf("acknowledge in %q: %w", s.queue, err)
	}
	return nil
}

// close gives back what is not acknowledged, and waits until it is there, so that who looks next finds it.
func (s *scan) close() {
	ctx, cancel := context.WithTimeout(context.Background(), scanReturn)
	defer cancel()
	e := s.channel.epoch
	_ = s.end(ctx)                                                                                           // the end of the channel is that of its consumer too
	_, _ = ask(ctx, e, func() (struct{}, error) { return struct{}{}, s.channel.Close() }, func(struct{}) {}) // it goes back in any case
	for s.taken > s.acked {
		depth, ok, err := depthOf(ctx, e, s.queue)
		if err != nil || !ok || depth >= s.taken-s.acked || !sleep(ctx, scanPause) {
			return
		}
	}
}
