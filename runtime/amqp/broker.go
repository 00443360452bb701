package amqp

import (
	"context"
	"sync"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var (
	_ leasebus.Publisher = (*Broker)(nil)
	_ leasebus.Source    = (*Broker)(nil)
)

// Broker is a service's hold on one virtual host of RabbitMQ. It may be used concurrently. Make one with [Dial] for each
// process, and close it.
type Broker struct {
	options options
	target  *target

	// publishing is the connection that messages are published on, and nothing is consumed on: RabbitMQ stops reading
	// from it while memory or disk run short.
	publishing *link
	publisher  *publisher
	ladder     sync.Map // of the queues to which the shared ladder is known to lead back

	counters counters
	ahead    readAhead

	mu        sync.Mutex
	links     map[*link]struct{}
	operators *link             // nil = not needed yet
	places    map[string]places // by queue, as far as policies are known
	closed    bool
}

// Dial connects to RabbitMQ. The URL is amqp:// or amqps://user:password@host:port/vhost; a missing part is RabbitMQ's
// default. An error says what the server refused, or that there is none; it never holds the password.
//
// From then on the broker comes back by itself from every loss of its connections.
func Dial(ctx context.Context, url string, opts ...Option) (*Broker, error) {
	o, err := optionsOf(opts)
	if err != nil {
		return nil, err
	}
	to, err := targetOf(url, &o)
	if err != nil {
		return nil, err
	}
	b := &Broker{options: o, target: to, links: make(map[*link]struct{})}
	b.publishing = newLink("publish", to, &b.options)
	first, err := b.publishing.connect(ctx)
	if err != nil {
		return nil, err
	}
	b.links[b.publishing] = struct{}{}
	b.publishing.start(first)
	b.publisher = newPublisher(b.publishing, &b.options)
	return b, nil
}

// connect opens a connection of its own for a purpose, such as "consume orders". It does not wait for it:
// [link.await] does. It is to be closed by [Broker.disconnect].
func (b *Broker) connect(purpose string) (*link, error) {
	l := newLink(purpose, b.target, &b.options)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		l.quit()
		return nil, ErrClosed
	}
	b.links[l] = struct{}{}
	l.start(nil)
	return l, nil
}

// disconnect closes a connection that connect has opened. Closing it twice is no error.
func (b *Broker) disconnect(l *link) {
	b.mu.Lock()
	delete(b.links, l)
	b.mu.Unlock()
	l.close()
}

// Close lets go of everything: messages that are being published are waited for, for a moment; feeds answer errors
// from here on, and what they hold goes back to its queues. Close the processors first. Closing twice is no error.
func (b *Broker) Close() error {
	b.mu.Lock()
	b.closed = true
	links := b.links
	b.links = nil
	b.mu.Unlock()
	b.publisher.close()
	var all sync.WaitGroup
	for l := range links {
		all.Go(l.close)
	}
	all.Wait()
	return nil
}
