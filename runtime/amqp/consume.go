package amqp

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

type received = amqp091.Delivery

const (
	// subscribeBound is how long a subscription waits for its consumer.
	subscribeBound = 15 * time.Second
	// mostPrefetch is what a number of 16 bits can say.
	mostPrefetch = 1<<16 - 1
)

// Subscribe implements [leasebus.Source]: it opens a connection for the queue, declares what the policy needs, and
// consumes. It fails if there is no connection in time, or if the server refuses.
//
// RabbitMQ sends up to twice the concurrency ahead, plus the hold budget ([WithHoldBudget]). When the connection or the
// channel is lost, or the queue is deleted, it begins again by itself.
func (b *Broker) Subscribe(ctx context.Context, sub leasebus.Subscription) (leasebus.Feed, error) {
	f, err := b.newFeed(ctx, sub)
	if err != nil {
		return nil, fmt.Errorf("amqp: subscribe to %q: %w", sub.Queue, err)
	}
	bound, cancel := context.WithTimeout(ctx, subscribeBound)
	defer cancel()
	first, err := f.open(bound)
	for failures := 0; err != nil && !isConfiguration(err) && !errors.Is(err, ErrMismatch) && bound.Err() == nil; failures++ {
		if sleep(bound, b.options.pace.wait(failures, err)) {
			first, err = f.open(bound)
		}
	}
	if err != nil {
		_ = f.Close() // there is nothing in it
		return nil, fmt.Errorf("amqp: subscribe to %q: %w", sub.Queue, err)
	}
	f.life = first
	f.link.feed.Store(f)
	f.jobs.Go(func() { f.consume(first) }) //nolint:contextcheck // the consumer outlives this call
	return f, nil
}

func (b *Broker) newFeed(ctx context.Context, sub leasebus.Subscription) (*feed, error) {
	if err := checkSubscription(ctx, &sub); err != nil {
		return nil, err
	}
	topology, err := b.Topology(sub.Policy)
	if err != nil {
		return nil, err
	}
	link, err := b.connect("consume " + sub.Queue)
	if err != nil {
		return nil, err
	}
	concurrency := min(max(sub.Concurrency, 1), mostPrefetch)
	budget := min(b.options.consume.budgetFor(concurrency), mostPrefetch/2)
	f := &feed{
		broker: b, sub: sub, topology: topology, link: link, log: b.options.log.With("queue", sub.Queue),
		waits: waitsOf(sub.Queue, sub.Policy.Retry), budget: budget, prefetch: min(2*concurrency+budget, mostPrefetch),
	}
	f.ctx, f.quit = context.WithCancel(context.Background())
	b.Learn(sub.Policy)
	if sub.Policy.DeadLetter.Retention > 0 {
		f.log.WarnContext(ctx, "amqp: dead_letter.retention is not acted on: RabbitMQ keeps dead letters until an operator acts",
			"retention", sub.Policy.DeadLetter.Retention)
	}
	return f, nil
}

func checkSubscription(ctx context.Context, sub *leasebus.Subscription) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case sub.Queue == "":
		return errors.New("the queue is empty; a name is needed")
	case sub.Owner == "":
		return errors.New("the owner is empty; a name is needed")
	case sub.Policy == nil:
		return errors.New("the policy is nil")
	case sub.Policy.Lease.Duration <= 0:
		return fmt.Errorf("lease.duration %v is out of range; allowed is more than 0", sub.Policy.Lease.Duration)
	}
	return nil
}

// life is one consumer, from its beginning to the end of its channel. Deliveries are settled in their own life or not
// at all: in the next one, their tags are others'.
type life struct {
	channel    *channel
	ledger     ledger
	tag        string
	deliveries <-chan received
	over       atomic.Bool
	// drained is closed when no delivery will come any more.
	drained chan struct{}
}

// open begins a life: on the connection that there is, or the next one.
func (f *feed) open(ctx context.Context) (*life, error) {
	e, err := f.link.await(ctx)
	if err != nil {
		return nil, err
	}
	if err := f.broker.options.declare(ctx, e, f.topology); err != nil {
		return nil, err
	}
	l := &life{tag: cut(f.sub.Owner, leasebus.MaxNameBytes), drained: make(chan struct{})}
	l.channel, err = e.open(ctx, func(ch *amqp091.Channel) error {
		if err := ch.Qos(f.prefetch, 0, false); err != nil {
			return err
		}
		var err error
		l.deliveries, err = ch.Consume(f.sub.Queue, l.tag, false, false, false, false, nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("consume: %w", err)
	}
	l.ledger.channel = l.channel
	return l, nil
}

// consume lives one life after the other, the first one given, until the feed is stopped.
func (f *feed) consume(l *life) {
	for failures := 0; ; failures++ {
		began := time.Now()
		err := f.live(l)
		if f.isStopped() {
			return
		}
		f.log.Warn("amqp: consuming was interrupted", "error", err)
		err = nil // whatever it was, such as a handler that outlasted consumer_timeout: it is no refusal to consume
		if time.Since(began) > f.broker.options.pace.most {
			failures = 0
		}
		for l = nil; l == nil; failures++ {
			if !sleep(f.ctx, f.broker.options.pace.wait(failures, err)) || f.isStopped() {
				return
			}
			l, err = f.open(f.ctx)
			switch {
			case errors.Is(err, ErrClosed): // the whole broker, or the feed
				f.orphan()
				return
			case err != nil:
				f.log.Error("amqp: cannot consume", "failures", failures+1, "error", err)
			}
		}
	}
}

// orphan is for a feed whose broker was closed before it: nothing will come any more, and whoever leases is to know.
func (f *feed) orphan() {
	f.mu.Lock()
	f.orphaned = true
	f.mu.Unlock()
	f.wake()
}

func (f *feed) isStopped() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stopped
}

// live takes deliveries for as long as they come, waits for the end of the channel, and says what that was.
func (f *feed) live(l *life) error {
	f.mu.Lock()
	late := f.stopped && f.life != l // stopped while the consumer was being opened, which Stop knew nothing of
	f.life = l
	f.mu.Unlock()
	if late {
		l.close()
	}
	for d := range l.deliveries {
		f.arrive(l, d)
	}
	close(l.drained)
	var err error
	if f.isStopped() {
		select { // what is leased goes on
		case <-l.channel.over:
		case <-f.ctx.Done():
		}
	} else {
		err = l.channel.interrupted()
		l.close()
	}
	f.end(l)
	return err
}

// interrupted is why the deliveries of a channel have ended, which we have not asked for.
func (c *channel) interrupted() error {
	if !c.IsClosed() {
		return errors.New("RabbitMQ has cancelled the consumer: its queue was deleted, or has moved")
	}
	<-c.over
	return c.reason()
}

// close ends the channel of a life, for which nobody waits.
func (l *life) close() {
	l.channel.epoch.start(func() { _ = l.channel.Close() }) // what matters is that it is closed
}

// end is the end of a life: what was delivered in it will be delivered again, and no decision about it counts any more.
func (f *feed) end(l *life) {
	l.over.Store(true)
	l.ledger.close()
	f.mu.Lock()
	f.life = nil
	f.buffer = fifo{}
	for _, m := range f.moves.clear() {
		f.finish(m, dropped)
	}
	f.mu.Unlock()
	f.check()
}

// cancel ends the consumer, and waits until no delivery comes any more. The channel stays.
func (l *life) cancel(ctx context.Context) error {
	_, err := ask(ctx, l.channel.epoch, func() (struct{}, error) {
		return struct{}{}, l.channel.Cancel(l.tag, false)
	}, func(struct{}) {})
	if err != nil && !l.channel.IsClosed() {
		return err
	}
	select {
	case <-l.drained:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// requeue hands a delivery back. Where that fails, its channel has ended, and it goes back by itself.
func (l *life) requeue(d *delivery) {
	d.state = settled
	_ = l.ledger.requeue(&d.entry)
}

// arrive takes a delivery in: for a worker, unless its wait is not over yet.
func (f *feed) arrive(l *life, msg received) {
	d := &delivery{entry: entry{tag: msg.DeliveryTag}, life: l, msg: msg}
	now := time.Now()
	var bad spoiled
	d.stamp, bad = readStamps(msg.Headers, now)
	f.broker.counters.spoiled(bad)
	l.ledger.delivered(&d.entry)

	f.mu.Lock()
	wake := false
	switch {
	case f.stopped: // it goes back with the others when the consumer is cancelled
		f.buffer.push(d)
	case d.stamp.remaining > 0:
		f.goOnWaiting(d, now)
	case d.stamp.crashes > 0 && !msg.Redelivered:
		f.pause(d, now)
	default:
		f.buffer.push(d)
		wake, f.hungry = f.hungry, false
	}
	f.mu.Unlock()
	if wake {
		f.wake()
	}
}
