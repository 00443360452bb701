package leasebus

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
)

// Delivery is what a handler, a middleware or a hook may know about the message at hand, besides the message.
// It is valid until the handler has returned.
type Delivery struct{ lease *Lease }

type deliveryKey struct{}

// DeliveryFrom returns the delivery that a handler's context, or one derived from it, belongs to.
func DeliveryFrom(ctx context.Context) (Delivery, bool) {
	lease, ok := ctx.Value(deliveryKey{}).(*Lease)
	return Delivery{lease}, ok
}

// LeaseFrom is for backends whose calls take part in a handler's transaction.
func LeaseFrom(ctx context.Context) (*Lease, bool) {
	d, ok := DeliveryFrom(ctx)
	return d.lease, ok
}

// ID is the message's id, the same over retries and requeues.
func (d Delivery) ID() ID { return d.lease.ID }

// Type is the full name under which the message was published: the handler's own, or an alias.
func (d Delivery) Type() string { return d.lease.Type }

// Queue is the queue the message was taken from.
func (d Delivery) Queue() string { return d.lease.Queue }

// Attempt counts from 1, over crashes too.
func (d Delivery) Attempt() int { return d.lease.Attempt }

// FirstDue is when the message was first due, by the store's clock.
func (d Delivery) FirstDue() time.Time { return d.lease.FirstDue }

// Headers are those of the publisher, with the ones that leasebus adds.
func (d Delivery) Headers() Headers { return d.lease.Headers }

// Correlation is the id that the messages of one flow share.
func (d Delivery) Correlation() string { return d.lease.Headers.Get(HeaderCorrelation) }

// Causation is the id of the message in whose handler this one was published; "" if there was none.
func (d Delivery) Causation() string { return d.lease.Headers.Get(HeaderCausation) }

// FencingToken grows with every lease of the message: a system that remembers the highest one it has seen can refuse
// a stale worker. ok = false where the backend has no token that outlives its connection.
func (d Delivery) FencingToken() (token int64, ok bool) {
	return d.lease.Generation, d.lease.Generation > 0
}

// Message is the decoded message; nil in an OnSettled hook of one that could not be decoded.
func (d Delivery) Message() proto.Message { return d.lease.run.message }

// A lease moves through these states by compare-and-swap: whoever moves it on owns what follows.
const (
	stateHeld     uint32 = iota // leased, waiting for a worker
	stateRunning                // its handler runs
	stateInTx                   // the handler's own transaction completes it: not renewed, "lost" not believed
	stateSettling               // a settlement is on its way: "lost" from a renewal not believed
	stateDone                   // settled, dropped or given up
)

// run is the engine's part of a lease.
type run struct {
	queue   *queue // of the processor
	session *session
	slab    *slab
	message proto.Message
	ctx     handlerContext
	state   atomic.Uint32
	// arrivedAt is when the lease came, on the processor's monotonic clock.
	arrivedAt time.Duration
	// suspect: its last attempts crashed, and it counts in the processor's quarantine.
	suspect bool
	// replaced: the handler was abandoned and its worker's place is taken or gone.
	replaced atomic.Bool
	// validUntil is when the lease ends if no renewal succeeds, counted from when the request was sent
	// (nanoseconds on the processor's monotonic clock).
	validUntil atomic.Int64
	// lost is set when the processor knows, or must assume, that the lease is gone.
	lost atomic.Bool
}

func (l *Lease) advance(from, to uint32) bool { return l.run.state.CompareAndSwap(from, to) }

// BeginComplete is what a backend calls before the statement that completes the lease inside the handler's own
// transaction. From then on the lease is not renewed, and the processor asks after the handler what came of it.
func (l *Lease) BeginComplete() error {
	if l.advance(stateRunning, stateInTx) {
		return nil
	}
	if l.run.state.Load() == stateInTx {
		return fmt.Errorf("leasebus: message %s is completed in a transaction already", l.ID)
	}
	return fmt.Errorf("leasebus: message %s: %w", l.ID, ErrLeaseLost)
}

// AbortComplete takes BeginComplete back, when the statement refused: the handler goes on under its lease, or without
// one if the refusal said so.
func (l *Lease) AbortComplete(err error) {
	if !l.advance(stateInTx, stateRunning) {
		return
	}
	if err != nil {
		l.run.lost.Store(true)
		l.run.ctx.end(err)
	}
}

// handlerContext is a context that becomes a real, cancellable one only when somebody looks: most handlers never do,
// and building one for each message costs more than all the rest of the engine.
type handlerContext struct {
	base  context.Context
	lease *Lease
	// deadline is set before the handler sees the context; zero = that of base.
	deadline time.Time
	mu       sync.Mutex
	real     context.Context
	cancel   context.CancelCauseFunc
	ended    bool
	cause    error
}

func (c *handlerContext) materialise() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.real == nil {
		c.real, c.cancel = context.WithCancelCause(c.base)
		if c.ended {
			c.cancel(c.cause)
		}
	}
	return c.real
}

// end cancels the context; the first cause stays.
func (c *handlerContext) end(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	c.ended, c.cause = true, cause
	if c.cancel != nil {
		c.cancel(cause)
	}
}

// endedBy returns the cause that ended the context, nil while it goes on.
func (c *handlerContext) endedBy() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

func (c *handlerContext) Deadline() (time.Time, bool) {
	if c.deadline.IsZero() {
		return c.base.Deadline()
	}
	return c.deadline, true
}

func (c *handlerContext) Done() <-chan struct{} { return c.materialise().Done() }
func (c *handlerContext) Err() error            { return c.materialise().Err() }

func (c *handlerContext) Value(key any) any {
	if _, ok := key.(deliveryKey); ok {
		return c.lease
	}
	// The context package looks up its own key to find a parent it can attach children to without a goroutine.
	return c.materialise().Value(key)
}
