package amqp

import (
	"context"
	"fmt"

	amqp091 "github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var (
	_ leasebus.Operator = (*Broker)(nil)
	_ leasebus.Learner  = (*Broker)(nil)
)

// places are the queues that belong to a queue.
type places struct {
	dead  []string
	rungs []string
}

// Learn implements [leasebus.Learner]: it tells where the dead letters of a queue are. Subscribing does so too. Without
// it they are looked for under the usual names, {queue}.dlq and {queue}.invalid.
func (b *Broker) Learn(p *leasebus.Policy) {
	known := places{}
	if !p.DeadLetter.Discard {
		known.dead = append(known.dead, p.DeadLetter.Queue)
		if p.DeadLetter.InvalidQueue != "" && p.DeadLetter.InvalidQueue != p.DeadLetter.Queue {
			known.dead = append(known.dead, p.DeadLetter.InvalidQueue)
		}
	}
	for _, r := range rungsOf(p.Queue, p.Retry) {
		known.rungs = append(known.rungs, r.name)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.places == nil {
		b.places = make(map[string]places)
	}
	b.places[p.Queue] = known
}

func (b *Broker) placesOf(queue string) places {
	b.mu.Lock()
	defer b.mu.Unlock()
	if known, ok := b.places[queue]; ok {
		return known
	}
	return places{dead: []string{queue + leasebus.DeadLetterSuffix, queue + leasebus.InvalidSuffix}}
}

// operating is the connection that operators work on. It is opened when it is needed first.
func (b *Broker) operating(ctx context.Context) (*epoch, error) {
	b.mu.Lock()
	l := b.operators
	b.mu.Unlock()
	if l == nil {
		opened, err := b.connect("operate")
		if err != nil {
			return nil, err
		}
		b.mu.Lock()
		if b.operators == nil {
			b.operators = opened
		}
		l = b.operators
		b.mu.Unlock()
		if l != opened {
			b.disconnect(opened)
		}
	}
	return l.await(ctx)
}

// DeadLetters implements [leasebus.Operator]. A limit below 1 is refused.
//
// RabbitMQ lets messages be looked at only by taking them and giving them back: all of them, for each page that is not
// read soon after the one before. Meanwhile other operators do not see them. Dead letters are ordered by the time of
// dead-lettering, as the clock of the consumer had it.
func (b *Broker) DeadLetters(ctx context.Context, queue string, f leasebus.Filter, after leasebus.Cursor, limit int) ([]leasebus.DeadLetter, error) {
	letters, err := b.deadLetters(ctx, queue, f, after, limit)
	if err != nil {
		return nil, fmt.Errorf("amqp: dead letters of %q: %w", queue, err)
	}
	return letters, nil
}

func (b *Broker) deadLetters(ctx context.Context, queue string, f leasebus.Filter, after leasebus.Cursor, limit int) ([]leasebus.DeadLetter, error) {
	if limit < 1 {
		return nil, fmt.Errorf("limit %d is out of range; allowed is 1 or more", limit)
	}
	wanted, err := pageOf(f, after, limit)
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if letters, ok := b.ahead.next(queue, f, after, limit); ok {
		return letters, nil
	}
	err = b.eachLetter(ctx, queue, func(letter *leasebus.DeadLetter) {
		if f.Match(letter) {
			wanted.add(letter)
		}
	})
	if err != nil {
		return nil, err
	}
	return b.ahead.keep(queue, f, wanted), nil
}

// LastDeadLetter implements [leasebus.Operator].
func (b *Broker) LastDeadLetter(ctx context.Context, queue string) (leasebus.Cursor, error) {
	last := position{}
	err := b.eachLetter(ctx, queue, func(letter *leasebus.DeadLetter) {
		if p := positionOf(letter); p.compare(last) > 0 {
			last = p
		}
	})
	if err != nil {
		return "", fmt.Errorf("amqp: last dead letter of %q: %w", queue, err)
	}
	return last.cursor(), nil
}

// eachLetter visits the dead letters of a queue, in no order that could be relied on.
func (b *Broker) eachLetter(ctx context.Context, queue string, visit func(*leasebus.DeadLetter)) error {
	for _, in := range b.placesOf(queue).dead {
		err := b.scan(ctx, in, func(_ *scan, d *amqp091.Delivery) bool {
			if letter := letterOf(d, queue, in); letter.Queue == queue {
				visit(&letter)
			}
			return true
		}, nil)
		if err != nil {
			return err
		}
	}
	return nil
}

// Completed implements [leasebus.Operator]: RabbitMQ keeps none.
func (b *Broker) Completed(ctx context.Context, queue string, _ leasebus.Cursor, limit int) ([]leasebus.CompletedMessage, error) {
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("amqp: completed messages of %q: %w", queue, context.Cause(ctx))
	case limit < 1:
		return nil, fmt.Errorf("amqp: completed messages of %q: limit %d is out of range; allowed is 1 or more", queue, limit)
	}
	return nil, nil
}

// Stats implements [leasebus.Operator], as far as RabbitMQ tells: Pending (and Due) are the messages that are ready in the
// queue, Failed those that wait in its retry queues, DeadLettered those that are ready in its dead-letter queues, other
// queues' among them where queues share one. What consumers hold is not counted, nor what waits on the shared ladder.
func (b *Broker) Stats(ctx context.Context, queue string) (leasebus.QueueStats, error) {
	var stats leasebus.QueueStats
	known := b.placesOf(queue)
	for _, part := range []struct {
		into   *int64
		queues []string
	}{{&stats.Pending, []string{queue}}, {&stats.Failed, known.rungs}, {&stats.DeadLettered, known.dead}} {
		for _, name := range part.queues {
			n, err := b.depth(ctx, name)
			if err != nil {
				return leasebus.QueueStats{}, fmt.Errorf("amqp: stats of %q: %w", queue, err)
			}
			*part.into += int64(n)
		}
	}
	stats.Due = stats.Pending
	return stats, nil
}

func (b *Broker) depth(ctx context.Context, queue string) (int, error) {
	e, err := b.operating(ctx)
	if err != nil {
		return 0, err
	}
	depth, _, err := depthOf(ctx, e, queue)
	return depth, err
}
