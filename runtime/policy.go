package leasebus

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Defaults of a message's policy: what holds where no annotation says otherwise.
const (
	DefaultLeaseDuration = 30 * time.Second
	DefaultMaxAttempts   = 5
	DefaultInitialDelay  = 5 * time.Second
	DefaultMaxDelay      = 5 * time.Minute
	DefaultMultiplier    = 2.0
	DefaultJitter        = 0.2

	// DefaultInProgressDelay is how long a message waits whose idempotency key another delivery is working on.
	DefaultInProgressDelay = 5 * time.Second
	// DefaultIdempotencyRetention is how long a confirmed idempotency key is remembered.
	DefaultIdempotencyRetention = 7 * 24 * time.Hour
	// DefaultWaitInBrokerFrom is the shortest retry delay that is spent in the broker instead of in the consumer.
	DefaultWaitInBrokerFrom = 30 * time.Second
)

// Suffixes of the queues that leasebus derives from a message's queue.
const (
	DeadLetterSuffix = ".dlq"
	InvalidSuffix    = ".invalid"
)

// Limits that hold on every backend; the narrowest one decides, so that a message accepted by one travels on all.
const (
	// MaxNameBytes bounds queue names with their suffixes, type names and keys: a short string of AMQP.
	MaxNameBytes = 255
	// longestRungSuffix is the room that a queue name must leave for the retry queues derived from it:
	// a rung is named after its delay, and no delay is written longer than this.
	longestRungSuffix = len(".retry.") + len("876000h59m59s")
	// maxDelay is the longest wait that is ever asked of a store: 100 years, within every backend's time range.
	maxDelay = 876_000 * time.Hour
)

// Policy is everything that is decided about a message type before the first message is published.
// Generated code holds it as a literal; [DefaultPolicy] is the place to start for one built by hand.
type Policy struct {
	// Type is the full proto name of the message, such as "orders.v1.OrderPlaced".
	Type string
	// Aliases are former full names: envelopes stored under one of them reach the same handler.
	Aliases []string
	// Queue holds the messages of this type and of no other: up to 255 bytes with its suffixes,
	// of letters, digits, '.', '_' and '-', beginning with a letter or digit.
	Queue string
	// Timeout bounds one run of the handler. 0 = unbounded, as long as the lease can be renewed.
	Timeout time.Duration
	// RetainCompleted keeps completed messages for this long, for queries. 0 = not kept.
	RetainCompleted time.Duration

	Lease      LeasePolicy
	Retry      RetryPolicy
	DeadLetter DeadLetterPolicy
	// Idempotency, if set, makes the handler run once for each key within the retention.
	Idempotency *IdempotencyPolicy
	// Ordering, if set, keeps messages of one key in publish order, one in flight at a time.
	Ordering *OrderingPolicy
}

// LeasePolicy says how long a message belongs to a worker and how often that is renewed.
type LeasePolicy struct {
	// Duration of a lease; after it, without a renewal, anyone may lease the message again.
	Duration time.Duration
	// Heartbeat is the interval of renewals: above 0 and at most half of Duration.
	Heartbeat time.Duration
}

// RetryPolicy says how often a message is tried and what lies between two attempts.
// [NoRetry], [FixedRetry] and [ExponentialRetry] build the usual ones.
type RetryPolicy struct {
	// MaxAttempts includes the first one: 1 = no retries.
	MaxAttempts int
	// Initial is the delay after the first failure.
	Initial time.Duration
	// Max caps every delay, jitter included. 0 = no cap, allowed for a Multiplier of 1 only.
	Max time.Duration
	// Multiplier is the growth from one delay to the next, 1 or more; 1 = always Initial.
	Multiplier float64
	// Jitter j spreads a delay d evenly over [d(1-j), min(d(1+j), Max)]; 0 = exact, at most 1.
	Jitter float64
	// GiveUpAfter dead-letters a message at its first failure past this age, counted from when it was first due.
	// 0 = never.
	GiveUpAfter time.Duration
	// WaitInBrokerFrom moves delays of this length and more into the broker, where the backend is one. 0 = all of them.
	// nil = [DefaultWaitInBrokerFrom]. Other backends store every delay, and pay no heed to it.
	WaitInBrokerFrom *time.Duration
}

// DeadLetterPolicy says where messages go that cannot be handled.
type DeadLetterPolicy struct {
	// Queue takes rejected messages. Empty only with Discard.
	Queue string
	// InvalidQueue takes messages that cannot be decoded or fail validation. Empty = Queue.
	InvalidQueue string
	// Discard deletes what would be dead-lettered, with a warning and a counter. For messages nobody will miss.
	Discard bool
	// Retention deletes dead letters after this time. 0 = kept until an operator acts.
	Retention time.Duration
}

// IdempotencyPolicy says which key makes two messages the same.
type IdempotencyPolicy struct {
	// Field is the proto name of the scalar field that holds the key. Empty = the key is given when publishing.
	Field string
	// Retention is how long a handled key is remembered.
	Retention time.Duration
	// InProgressDelay is the wait of a message whose key another delivery is working on.
	InProgressDelay time.Duration
}

// OrderingPolicy says which key keeps messages in order.
type OrderingPolicy struct {
	// Field is the proto name of the scalar field that holds the key. Empty = the key is given when publishing.
	Field string
	// Halt stops a key's messages when one of them exhausts its attempts, until an operator acts.
	// Without it that message is dead-lettered and the next one runs.
	Halt bool
}

// DefaultPolicy is what a message has that is annotated with nothing but a queue.
func DefaultPolicy(typeName, queue string) Policy {
	return Policy{
		Type:       typeName,
		Queue:      queue,
		Lease:      LeasePolicy{Duration: DefaultLeaseDuration, Heartbeat: DefaultLeaseDuration / 4},
		Retry:      ExponentialRetry(DefaultMaxAttempts, DefaultInitialDelay, DefaultMaxDelay, DefaultMultiplier),
		DeadLetter: DeadLetterPolicy{Queue: queue + DeadLetterSuffix},
	}
}

// NoRetry is one attempt.
func NoRetry() RetryPolicy { return RetryPolicy{MaxAttempts: 1, Multiplier: 1} }

// FixedRetry is up to maxAttempts attempts, d apart, with [DefaultJitter].
func FixedRetry(maxAttempts int, d time.Duration) RetryPolicy {
	return RetryPolicy{MaxAttempts: maxAttempts, Initial: d, Multiplier: 1, Jitter: DefaultJitter}
}

// ExponentialRetry is up to maxAttempts attempts, the delays growing by multiplier from initial to maxDelay,
// with [DefaultJitter].
func ExponentialRetry(maxAttempts int, initial, maxDelay time.Duration, multiplier float64) RetryPolicy {
	return RetryPolicy{
		MaxAttempts: maxAttempts, Initial: initial, Max: maxDelay,
		Multiplier: multiplier, Jitter: DefaultJitter,
	}
}

// A PolicyProblem is one setting that cannot stand.
type PolicyProblem struct {
	// Setting names it by its path in the annotation, such as "lease.heartbeat".
	Setting string
	// Text says what was given and what is allowed.
	Text string
}

func (p PolicyProblem) Error() string { return p.Setting + ": " + p.Text }

// Problems lists every setting of p that cannot stand, in the order of the annotation. None = p is valid.
func (p *Policy) Problems() []PolicyProblem {
	var c policyCheck
	c.name("type", p.Type, p.Type)
	c.queue("queue", p.Queue)
	seen := []string{p.Type}
	for _, alias := range p.Aliases {
		c.name("aliases", alias, alias)
		c.rulef(!slices.Contains(seen, alias), "aliases", "%q is listed twice or is the message's own name; each former name stands once", alias)
		seen = append(seen, alias)
	}
	c.atLeastZero("timeout", p.Timeout)
	c.atLeastZero("retain_completed", p.RetainCompleted)
	c.lease(p.Lease)
	c.retry(p.Retry)
	c.deadLetter(p)
	if p.Idempotency != nil {
		c.positive("idempotency.retention", p.Idempotency.Retention)
		c.positive("idempotency.in_progress_delay", p.Idempotency.InProgressDelay)
		// S46: a claim lasts as long as the lease; a key forgotten earlier would let a second delivery in.
		c.rulef(p.Idempotency.Retention >= p.Lease.Duration, "idempotency.retention",
			"%v is shorter than lease.duration %v: the key would be forgotten while its message may still be worked on; make it at least as long",
			p.Idempotency.Retention, p.Lease.Duration)
		// S31: a key must outlive the dead letter that may be requeued with it.
		c.rulef(p.DeadLetter.Retention == 0 || p.Idempotency.Retention >= p.DeadLetter.Retention, "idempotency.retention",
			"%v is shorter than dead_letter.retention %v: a requeued dead letter would no longer be known as handled; make it at least as long",
			p.Idempotency.Retention, p.DeadLetter.Retention)
	}
	return c.problems
}

// Validate returns every problem of p joined to one error, or nil.
func (p *Policy) Validate() error {
	problems := p.Problems()
	if len(problems) == 0 {
		return nil
	}
	errs := make([]error, len(problems))
	for i, problem := range problems {
		errs[i] = problem
	}
	return fmt.Errorf("leasebus: policy of %s: %w", p.Type, errors.Join(errs...))
}

// ErrUnsupported is matched by the error of a publisher or processor that meets a setting it cannot honour.
var ErrUnsupported = errors.New("not supported")

// supported refuses the settings that can be declared but that the engine does not act on yet:
// a setting that is ignored in silence is a promise broken.
func (p *Policy) supported() error {
	var settings []string
	if p.Idempotency != nil {
		settings = append(settings, "idempotency")
	}
	if p.Ordering != nil {
		settings = append(settings, "ordering")
	}
	if len(settings) == 0 {
		return nil
	}
	return fmt.Errorf("leasebus: message %s: %s: %w by this version; take it out of the annotation or use a later leasebus",
		p.Type, strings.Join(settings, ", "), ErrUnsupported)
}

type policyCheck struct{ problems []PolicyProblem }

func (c *policyCheck) rulef(ok bool, setting, format string, args ...any) {
	if !ok {
		c.problems = append(c.problems, PolicyProblem{setting, fmt.Sprintf(format, args...)})
	}
}

func (c *policyCheck) positive(setting string, d time.Duration) {
	c.rulef(d > 0 && d <= maxDelay, setting, "%v is out of range; allowed is more than 0 and at most %v", d, maxDelay)
}

func (c *policyCheck) atLeastZero(setting string, d time.Duration) {
	c.rulef(d >= 0 && d <= maxDelay, setting, "%v is out of range; allowed is 0 to %v", d, maxDelay)
}

func (c *policyCheck) name(setting, given, longest string) {
	switch {
	case given == "":
		c.rulef(false, setting, "is empty; a name is needed")
	case len(longest) > MaxNameBytes:
		c.rulef(false, setting, "%q is %d bytes long; allowed are %d", given, len(longest), MaxNameBytes)
	case !utf8.ValidString(given) || strings.ContainsRune(given, 0):
		c.rulef(false, setting, "%q holds a NUL or is not valid UTF-8", given)
	}
}

// queue checks the grammar and the length with the longest suffix: %.invalid, .dlq and .retry.{delay}.
func (c *policyCheck) queue(setting, queue string) {
	if queue == "" {
		c.rulef(false, setting, "is empty; a name is needed")
		return
	}
	c.queueGrammar(setting, queue)
	c.rulef(len(queue)+longestRungSuffix <= MaxNameBytes, setting,
		"%q is %d bytes long; allowed are %d, so that the suffixes %s, %s and .retry.{delay} fit into %d",
		queue, len(queue), MaxNameBytes-longestRungSuffix, DeadLetterSuffix, InvalidSuffix, MaxNameBytes)
}

func (c *policyCheck) queueGrammar(setting, queue string) {
	wrong := strings.IndexFunc(queue, func(r rune) bool { return !isQueueRune(r) })
	c.rulef(wrong < 0 && !strings.ContainsRune("._-", rune(queue[0])), setting,
		"%q is not a queue name; allowed are letters, digits, '.', '_' and '-', beginning with a letter or digit", queue)
}

func isQueueRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
}

func (c *policyCheck) lease(l LeasePolicy) {
	c.positive("lease.duration", l.Duration)
	c.rulef(l.Heartbeat > 0 && l.Heartbeat <= l.Duration/2, "lease.heartbeat",
		"%v is out of range; allowed is more than 0 and at most half of lease.duration %v", l.Heartbeat, l.Duration)
}

func (c *policyCheck) retry(r RetryPolicy) {
	c.rulef(r.MaxAttempts >= 1 && r.MaxAttempts <= math.MaxInt32, "retry.max_attempts",
		"%d is out of range; allowed is 1 (no retries) to %d", r.MaxAttempts, math.MaxInt32)
	c.rulef(r.Multiplier >= 1 && !math.IsInf(r.Multiplier, 0), "retry.exponential.multiplier", "%v is out of range; allowed is 1 or more", r.Multiplier)
	c.rulef(r.Jitter >= 0 && r.Jitter <= 1, "retry.jitter", "%v is out of range; allowed is 0 to 1", r.Jitter)
	c.atLeastZero("retry.give_up_after", r.GiveUpAfter)
	if r.WaitInBrokerFrom != nil {
		c.atLeastZero("retry.wait_in_broker_from", *r.WaitInBrokerFrom)
	}
	if r.MaxAttempts == 1 && r.Initial == 0 {
		return // no retries, no delays
	}
	initial, limit := "retry.exponential.initial", "retry.exponential.max"
	if r.Multiplier == 1 {
		initial, limit = "retry.fixed.delay", "retry.exponential.max"
	}
	c.positive(initial, r.Initial)
	c.atLeastZero(limit, r.Max)
	c.rulef(r.Max > 0 || r.Multiplier <= 1, limit, "is not set; delays that grow need a cap")
	c.rulef(r.Max == 0 || r.Initial <= r.Max, initial, "%v is more than retry.exponential.max %v", r.Initial, r.Max)
}

func (c *policyCheck) deadLetter(p *Policy) {
	d := p.DeadLetter
	c.atLeastZero("dead_letter.retention", d.Retention)
	if d.Discard {
		c.rulef(d.Queue == "" && d.InvalidQueue == "", "dead_letter.discard", "is set together with a dead-letter queue; choose one")
		return
	}
	c.rulef(d.Queue != "", "dead_letter.queue", "is empty; name a queue, or set dead_letter.discard to delete what fails")
	for _, q := range []struct{ setting, name string }{{"dead_letter.queue", d.Queue}, {"dead_letter.invalid_queue", d.InvalidQueue}} {
		if q.name == "" {
			continue
		}
		c.queueGrammar(q.setting, q.name)
		c.rulef(len(q.name) <= MaxNameBytes, q.setting, "%q is %d bytes long; allowed are %d", q.name, len(q.name), MaxNameBytes)
		c.rulef(q.name != p.Queue, q.setting, "%q is the message's own queue; a dead letter would be handled again for ever", q.name)
	}
}
