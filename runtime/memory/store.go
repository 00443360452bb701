// Package memory keeps messages in the process: for tests, for demos and for work that need not survive a restart.
//
// A [Store] plays every role that a backend has in leasebus, by the same rules, and is the model that the other
// backends are held against. Nothing is written to disk: what is pending when the process ends is lost.
//
// The store starts no goroutines and does not poll. One timer for each queue with a waiting feed fires when the next
// message becomes due or the next lease expires.
package memory

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var (
	_ leasebus.Publisher = (*Store)(nil)
	_ leasebus.Source    = (*Store)(nil)
	_ leasebus.Operator  = (*Store)(nil)
)

// Store holds any number of queues. It may be used concurrently; each queue has a lock of its own.
type Store struct {
	maxPayload int

	// The store's clock counts nanoseconds from start, where it showed wall, plus what Advance added.
	start  time.Time
	wall   time.Time
	offset atomic.Int64

	mu     sync.RWMutex
	queues map[string]*queue
}

// Option changes what [New] makes.
type Option interface{ apply(*Store) }

type optionFunc func(*Store)

func (f optionFunc) apply(s *Store) { f(s) }

// WithMaxPayload sets the largest payload that is taken, in bytes: 1 or more, anything else panics.
// Default [leasebus.DefaultMaxPayload].
func WithMaxPayload(bytes int) Option {
	if bytes < 1 {
		panic(fmt.Sprintf("memory: max payload %d is out of range; allowed is 1 or more", bytes))
	}
	return optionFunc(func(s *Store) { s.maxPayload = bytes })
}

// New makes an empty store. It needs no closing.
func New(opts ...Option) *Store {
	now := time.Now()
	s := &Store{
		maxPayload: leasebus.DefaultMaxPayload,
		start:      now,
		wall:       now.Round(0).UTC(), // without the monotonic reading: these times are shown, stored and compared
		queues:     make(map[string]*queue),
	}
	for _, opt := range opts {
		opt.apply(s)
	}
	return s
}

// Publish implements [leasebus.Publisher]. It takes all of out or, with an error, nothing.
//
// The store copies payloads and headers, so the caller may reuse its buffers. Messages of one call become due in the
// order of out. A Delay below 0 or an At in the past makes a message due, and its FirstDue, now.
func (s *Store) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	if len(receipts) != len(out) {
		return fmt.Errorf("memory: publish: %d receipts for %d envelopes; allowed are as many", len(receipts), len(out))
	}
	if err := s.admit(ctx, out); err != nil {
		for i := range receipts {
			receipts[i] = leasebus.Receipt{ID: out[i].ID, Err: err}
		}
		return err
	}
	for i := range receipts {
		receipts[i] = leasebus.Receipt{ID: out[i].ID}
	}
	for len(out) > 0 {
		n := 1
		for n < len(out) && out[n].Queue == out[0].Queue {
			n++
		}
		s.open(out[0].Queue).publish(out[:n])
		out = out[n:]
	}
	return nil
}

func (s *Store) admit(ctx context.Context, out []leasebus.Outgoing) error {
	if ctx.Err() != nil {
		return fmt.Errorf("memory: publish: %w", context.Cause(ctx))
	}
	for i := range out {
		if err := out[i].Validate(s.maxPayload); err != nil {
			return fmt.Errorf("memory: publish: envelope %d of %d: %w", i, len(out), err)
		}
	}
	return nil
}

// Subscribe implements [leasebus.Source]. A nil Wake or Check is never called.
//
// The policy's retentions of completed messages and dead letters hold for the whole queue, those of the newest
// subscription if they differ.
func (s *Store) Subscribe(ctx context.Context, sub leasebus.Subscription) (leasebus.Feed, error) {
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("memory: subscribe to %q: %w", sub.Queue, context.Cause(ctx))
	case sub.Queue == "":
		return nil, errors.New("memory: subscribe: the queue is empty; a name is needed")
	case sub.Owner == "":
		return nil, fmt.Errorf("memory: subscribe to %q: the owner is empty; a name is needed", sub.Queue)
	case sub.Policy == nil:
		return nil, fmt.Errorf("memory: subscribe to %q: the policy is nil", sub.Queue)
	case sub.Policy.Lease.Duration <= 0:
		return nil, fmt.Errorf("memory: subscribe to %q: lease.duration %v is out of range; allowed is more than 0",
			sub.Queue, sub.Policy.Lease.Duration)
	}
	return s.open(sub.Queue).subscribe(sub), nil
}

// Advance moves the store's clock forward by d: messages become due, leases expire and waiting feeds are woken, as if
// the time had passed. It is for tests that do not want to wait; the time of the process stays as it is, so that
// heartbeats and timeouts of a processor do not notice. A d below 0 panics.
func (s *Store) Advance(d time.Duration) {
	if d < 0 {
		panic(fmt.Sprintf("memory: advance by %v is out of range; allowed is 0 or more", d))
	}
	s.offset.Add(int64(d))
	for _, q := range s.all() {
		q.reconsider()
	}
}

// Now is the store's clock, in UTC.
func (s *Store) Now() time.Time { return s.timeOf(s.now()) }

// NextDue is how long it takes until a message of the queue can be leased: 0 if one can be now. A message that is being
// worked on counts with the expiry of its lease. ok is false if the queue has no message that will ever be leased.
func (s *Store) NextDue(queue string) (wait time.Duration, ok bool) {
	q := s.lookup(queue)
	if q == nil {
		return 0, false
	}
	return q.nextDue()
}

// now is the store's clock: nanoseconds from its start.
func (s *Store) now() int64 { return after(int64(time.Since(s.start)), s.offset.Load()) }

func (s *Store) timeOf(instant int64) time.Time { return s.wall.Add(time.Duration(instant)) }

// after is instant + d, at most the end of time.
func after(instant, d int64) int64 {
	if d > math.MaxInt64-instant {
		return math.MaxInt64
	}
	return instant + d
}

// open finds the queue of that name, or makes it.
func (s *Store) open(name string) *queue {
	if q := s.lookup(name); q != nil {
		return q
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[name]
	if q == nil {
		q = newQueue(s, name)
		s.queues[name] = q
	}
	return q
}

func (s *Store) lookup(name string) *queue {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.queues[name]
}

func (s *Store) all() []*queue {
	s.mu.RLock()
	defer s.mu.RUnlock()
	queues := make([]*queue, 0, len(s.queues))
	for _, q := range s.queues {
		queues = append(queues, q)
	}
	return queues
}
