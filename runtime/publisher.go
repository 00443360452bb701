package leasebus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
)

// TypedPublisher publishes messages of one type. Generated code makes one for each annotated message.
// It may be used concurrently.
type TypedPublisher[M proto.Message] struct {
	policy     *Policy
	to         Publisher
	maxPayload int
}

// PublisherOption changes what [NewTypedPublisher] makes.
type PublisherOption interface{ applyPublisher(*publisherOptions) }

type publisherOptions struct{ maxPayload int }

type publisherOptionFunc func(*publisherOptions)

func (f publisherOptionFunc) applyPublisher(o *publisherOptions) { f(o) }

// WithMaxPayload sets the largest payload that is published, in bytes. Default [DefaultMaxPayload].
func WithMaxPayload(bytes int) PublisherOption {
	return publisherOptionFunc(func(o *publisherOptions) { o.maxPayload = bytes })
}

// NewTypedPublisher binds a message type to the place its messages go to. It fails if the policy is invalid or asks
// for what this version cannot do ([ErrUnsupported]).
func NewTypedPublisher[M proto.Message](policy *Policy, to Publisher, opts ...PublisherOption) (*TypedPublisher[M], error) {
	o := publisherOptions{maxPayload: DefaultMaxPayload}
	for _, opt := range opts {
		opt.applyPublisher(&o)
	}
	if to == nil {
		return nil, fmt.Errorf("leasebus: publisher of %s: the place to publish to is nil", policy.Type)
	}
	if o.maxPayload <= 0 {
		return nil, fmt.Errorf("leasebus: publisher of %s: max payload %d is out of range; allowed is 1 or more", policy.Type, o.maxPayload)
	}
	if err := errors.Join(policy.Validate(), policy.supported(), matchesPolicy[M](policy)); err != nil {
		return nil, err
	}
	return &TypedPublisher[M]{policy: policy, to: to, maxPayload: o.maxPayload}, nil
}

// Via is the same publisher on another way in, such as the caller's transaction on the same store.
func (p *TypedPublisher[M]) Via(to Publisher) *TypedPublisher[M] {
	return &TypedPublisher[M]{policy: p.policy, to: to, maxPayload: p.maxPayload}
}

// Publish stores m for its handler. A nil error means that it is stored.
//
// Inside a handler, correlation and trace of the message being handled are passed on, and it becomes the causation.
// An error matching [ErrInvalidEnvelope] says what was refused; nothing is stored then.
func (p *TypedPublisher[M]) Publish(ctx context.Context, m M, opts ...PublishOption) (Receipt, error) {
	var (
		out      [1]Outgoing
		receipts [1]Receipt
	)
	if err := p.prepare(ctx, []M{m}, opts, out[:]); err != nil {
		return Receipt{}, err
	}
	if err := p.publish(ctx, out[:], receipts[:]); err != nil {
		return receipts[0], err
	}
	return receipts[0], nil
}

// PublishBatch stores all of messages, the options applying to each. If one of them is invalid, none is stored.
// The receipts stand in the order of messages; with an error, each tells its own ([Publisher]).
func (p *TypedPublisher[M]) PublishBatch(ctx context.Context, messages []M, opts ...PublishOption) ([]Receipt, error) {
	if len(messages) == 0 {
		return nil, ctx.Err()
	}
	out := make([]Outgoing, len(messages))
	if err := p.prepare(ctx, messages, opts, out); err != nil {
		return nil, err
	}
	receipts := make([]Receipt, len(out))
	return receipts, p.publish(ctx, out, receipts)
}

func (p *TypedPublisher[M]) publish(ctx context.Context, out []Outgoing, receipts []Receipt) error {
	if ctx.Err() != nil {
		return fmt.Errorf("leasebus: publish %s: %w", p.policy.Type, refuseAll(receipts, context.Cause(ctx)))
	}
	if err := p.to.Publish(ctx, out, receipts); err != nil {
		return fmt.Errorf("leasebus: publish %s: %w", p.policy.Type, err)
	}
	return nil
}

// prepare makes the envelopes of messages, which have the options in common.
func (p *TypedPublisher[M]) prepare(ctx context.Context, messages []M, opts []PublishOption, out []Outgoing) error {
	var set publishOptions
	for _, opt := range opts {
		opt.applyPublish(&set)
	}
	if set.err != nil {
		return fmt.Errorf("leasebus: publish %s: %w", p.policy.Type, set.err)
	}
	if set.idGiven && len(messages) > 1 {
		return fmt.Errorf("leasebus: publish %s: %w", p.policy.Type, &EnvelopeError{"id", "is one for the whole batch; publish one by one to choose ids"})
	}
	headers, err := set.headersFor(ctx)
	if err != nil {
		return fmt.Errorf("leasebus: publish %s: %w", p.policy.Type, err)
	}
	memory := arena{expected: len(messages)}
	now := time.Now()
	for i, m := range messages {
		payload, err := memory.marshal(m)
		if err == nil && len(payload) > p.maxPayload {
			err = &EnvelopeError{"payload", fmt.Sprintf("is %d bytes; allowed are %d", len(payload), p.maxPayload)}
		}
		if err != nil {
			return p.refusal(i, len(messages), err)
		}
		id := set.id
		if !set.idGiven {
			id = newID(now)
		}
		o := &out[i]
		o.ID, o.Type, o.Queue, o.Payload, o.Headers = id, p.policy.Type, p.policy.Queue, payload, headers.of(id, &memory)
		o.Delay, o.At = set.delay, set.at
	}
	return nil
}

// refusal says which of the messages cannot be published.
func (p *TypedPublisher[M]) refusal(i, of int, err error) error {
	if !errors.Is(err, ErrInvalidEnvelope) {
		err = fmt.Errorf("%w: %w", ErrInvalidEnvelope, err)
	}
	err = fmt.Errorf("leasebus: publish %s: %w", p.policy.Type, err)
	if of > 1 {
		err = fmt.Errorf("message %d of %d: %w", i, of, err)
	}
	return err
}

// PublishOption changes one publish.
type PublishOption interface{ applyPublish(*publishOptions) }

type publishOptions struct {
	id                     ID
	idGiven                bool
	delay                  time.Duration
	at                     time.Time
	headers                map[string]string
	correlation, causation string
	err                    error
}

type publishOptionFunc func(*publishOptions)

func (f publishOptionFunc) applyPublish(o *publishOptions) { f(o) }

// Delay makes the message due d from now, by the store's clock. A d of 0 or less = at once.
func Delay(d time.Duration) PublishOption {
	return publishOptionFunc(func(o *publishOptions) { o.delay = clampDelay(d) })
}

// At makes the message due at t, by the store's clock. A t in the past = at once. At wins over [Delay].
func At(t time.Time) PublishOption {
	return publishOptionFunc(func(o *publishOptions) { o.at = t })
}

// WithID sets the envelope's id: for publishing again after an unknown outcome. With a batch it is refused.
func WithID(id ID) PublishOption {
	return publishOptionFunc(func(o *publishOptions) { o.id, o.idGiven = id, true })
}

// WithHeader adds a header. Names beginning with "leasebus-" are refused.
func WithHeader(name, value string) PublishOption {
	return publishOptionFunc(func(o *publishOptions) {
		if strings.HasPrefix(strings.ToLower(name), reservedHeaderPrefix) {
			o.err = errors.Join(o.err, &EnvelopeError{"header " + name, "begins with " + reservedHeaderPrefix + ", which is reserved"})
			return
		}
		o.header(name, value)
	})
}

// WithCorrelation sets the correlation id. Without it a message passes on that of the message being handled, or starts
// one of its own: its id.
func WithCorrelation(id string) PublishOption {
	return publishOptionFunc(func(o *publishOptions) { o.correlation = id })
}

// WithCausation sets the causation id. Without it, it is the id of the message being handled, if any.
func WithCausation(id string) PublishOption {
	return publishOptionFunc(func(o *publishOptions) { o.causation = id })
}

func (o *publishOptions) header(name, value string) {
	if o.headers == nil {
		o.headers = make(map[string]string, 4)
	}
	o.headers[name] = value
}

// headersFor adds what S59 asks of every envelope to the caller's headers, which win.
func (o *publishOptions) headersFor(ctx context.Context) (headerTemplate, error) {
	correlation, causation := o.correlation, o.causation
	if parent, ok := DeliveryFrom(ctx); ok {
		correlation = firstNonEmpty(correlation, parent.Correlation())
		causation = firstNonEmpty(causation, parent.ID().String())
		for _, name := range []string{HeaderTraceparent, HeaderTracestate} {
			if value := parent.Headers().Get(name); value != "" && o.headers[name] == "" {
				o.header(name, value)
			}
		}
	}
	if causation != "" {
		o.header(HeaderCausation, causation)
	}
	if correlation != "" {
		o.header(HeaderCorrelation, correlation)
	}
	return templateOf(o.headers)
}

func firstNonEmpty(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// PublishGate lets publishing be paused: for a maintenance window, or while a store is full.
type PublishGate struct {
	to     Publisher
	paused atomic.Bool
}

// NewPublishGate puts a gate in front of to. It is open.
func NewPublishGate(to Publisher) *PublishGate { return &PublishGate{to: to} }

// Pause makes every publish from here on fail with [ErrPublishingPaused]; those under way go on.
func (g *PublishGate) Pause() { g.paused.Store(true) }

// Resume opens the gate again.
func (g *PublishGate) Resume() { g.paused.Store(false) }

// Publish implements [Publisher].
func (g *PublishGate) Publish(ctx context.Context, out []Outgoing, receipts []Receipt) error {
	if g.paused.Load() {
		return refuseAll(receipts, ErrPublishingPaused)
	}
	return g.to.Publish(ctx, out, receipts)
}

// refuseAll answers err for every envelope of a publish, and returns it.
func refuseAll(receipts []Receipt, err error) error {
	for i := range receipts {
		receipts[i].Err = err
	}
	return err
}
