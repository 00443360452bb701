package leasebus

import (
	"context"
	"time"
)

// The roles below are the waist of leasebus: the engine and the typed shells talk through them, every backend
// implements them. Package conformance holds the tests that each implementation must pass.

// Publisher takes envelopes into a store or a broker.
type Publisher interface {
	// Publish takes all of out that it can and answers for each element in receipts, which has the same length.
	// A nil error means that every one was taken. Otherwise an element whose receipt has no error was taken, and
	// one whose error is [ErrOutcomeUnknown] may have been: publishing it again with the same id is safe.
	// A context that is done is refused before any I/O.
	Publish(ctx context.Context, out []Outgoing, receipts []Receipt) error
}

// Outgoing is an envelope on its way in, with the time it is for.
type Outgoing struct {
	Envelope
	// Delay counts from the store's now. At is an instant, read on the store's clock; it wins over Delay.
	Delay time.Duration
	At    time.Time
}

// Receipt is what a publisher answers for one envelope.
type Receipt struct {
	ID ID
	// AlreadyAccepted: an envelope with the same idempotency key and payload was there; ID is its id.
	AlreadyAccepted bool
	Err             error
}

// Source hands out the envelopes of queues.
type Source interface {
	// Subscribe opens a queue for one processor. The queue need not exist yet.
	Subscribe(ctx context.Context, s Subscription) (Feed, error)
}

// Subscription is everything that a backend may know about a consumer.
type Subscription struct {
	Queue string
	// Types are the full names that the handler knows, aliases included.
	Types []string
	// Owner names the processor: a label for people, then '#' and a random number.
	Owner string
	// Policy gives the lease's length, ordering and topology. It is never for decisions: those come as settlements.
	Policy *Policy
	// Concurrency is how many handlers may run at once: what a broker takes its prefetch from.
	Concurrency int
	// Wake says that Lease may return something now. Check asks for Renew now, because something happened to a lease
	// (a channel died, an operator cancelled). Neither ever blocks; both may be called at any time until Close returns.
	Wake, Check func()
}

// Feed is one processor's hold on one queue. Its methods may be called concurrently.
//
// Lease, Renew and Settle honour their context. An error from them means that nothing is known about the elements
// whose result is [ResultUnknown].
type Feed interface {
	// Lease fills dst[:n] with due envelopes, like an [io.Reader] fills bytes, approximately in order of arrival.
	// It never waits for messages to come: n = 0 with a nil error means that there is nothing, and that Wake will be
	// called when there may be something again. After n < len(dst) the same holds.
	// It sets the exported fields of a Lease and nothing else.
	Lease(ctx context.Context, dst []Lease) (n int, err error)
	// Renew extends leases to the policy's duration from the store's now; results in place: OK, Lost, Busy, Cancelled.
	Renew(ctx context.Context, batch []Renewal) error
	// Settle ends leases; results in place: OK, Lost, Busy, Rejected, and StillLeased for [SettleVerify].
	// An error that matches [ErrUnstorable] says that nothing was written because of the data of some element.
	Settle(ctx context.Context, batch []Settlement) error
	// Stop ends intake: Lease answers [ErrFeedStopped] from here on, and what the backend buffered unleased goes back.
	// Renew and Settle go on. Stopping twice is no error.
	Stop(ctx context.Context) error
	// Close lets go of everything. Leases that are not settled expire. Closing twice is no error.
	Close() error
}

// Ref is the backend's own handle of a lease: position and segment, or delivery tag and epoch. The engine never looks
// inside.
type Ref struct {
	N   int64
	Seg int32
	P   any
}

// Lease is a time-bounded right to work on one stored envelope.
type Lease struct {
	Envelope
	// Attempt counts how often the envelope was handed to work, this time included.
	Attempt int
	// Generation is the fence: it grows with each lease and each operator action, and never restarts.
	// 0 = the backend has none that outlives its connection.
	Generation int64
	// Age is the store's now less FirstDue, or less the last requeue, when the lease was given.
	Age time.Duration
	// Crashed: the previous attempt ended without any recorded outcome.
	Crashed bool
	// Interruptions counts the attempts that were given back after their handler had started.
	Interruptions int
	Ref           Ref

	run run
}

// Result is the answer for one element of a batch.
type Result uint8

const (
	// ResultUnknown: not answered. Tried again while the lease can be valid.
	ResultUnknown Result = iota
	// ResultOK: done. For [SettleVerify]: the envelope is gone, its transaction committed.
	ResultOK
	// ResultLost: the lease is someone else's, or no one's.
	ResultLost
	// ResultBusy: mine, but locked by another transaction. Neither extended nor lost.
	ResultBusy
	// ResultCancelled: an operator took the envelope away.
	ResultCancelled
	// ResultRejected: this element can never be stored as it is.
	ResultRejected
	// ResultStillLeased answers SettleVerify: the envelope is still there and still mine.
	ResultStillLeased
)

// Renewal asks to keep one lease.
type Renewal struct {
	Lease  *Lease
	Result Result
}

// SettlementKind says how a lease ends.
type SettlementKind uint8

const (
	// SettleComplete: handled.
	SettleComplete SettlementKind = iota
	// SettleRetry: due again after Delay; the attempt stays spent.
	SettleRetry
	// SettleDefer: due again after Delay; the attempt is given back, and a counter of deferrals grows.
	SettleDefer
	// SettleRelease: due now, at once visible to others; the attempt is given back. With Started, Interruptions grows.
	SettleRelease
	// SettleDeadLetter: moved to DeadLetterQueue for Reason, keeping everything.
	SettleDeadLetter
	// SettleDiscard: deleted where a dead letter would be, by explicit opt-out.
	SettleDiscard
	// SettleVerify asks whether the handler's own transaction has completed the envelope; it changes nothing.
	SettleVerify
)

func (k SettlementKind) String() string {
	return [...]string{"complete", "retry", "defer", "release", "dead-letter", "discard", "verify"}[k]
}

// Settlement asks to end one lease, conditional on its row, owner and generation.
type Settlement struct {
	Lease *Lease
	Kind  SettlementKind
	Delay time.Duration
	// Nominal is the policy's delay without jitter, where Delay was drawn from it: what a broker chooses the place of the
	// wait by. 0 = Delay is nobody's choice but the handler's.
	Nominal time.Duration
	// Failure is appended to the envelope's history. nil for Complete, Release without Started, and most of Defer.
	Failure *Failure
	// Reason and DeadLetterQueue are for DeadLetter and Discard.
	Reason          Reason
	DeadLetterQueue string
	// Attempts is how many attempts a dead letter had.
	Attempts int
	// Started is for Release: the handler had begun.
	Started bool

	Result Result

	state settlementState
}

// Failure is what went wrong with one attempt. Its texts are storable: valid UTF-8 without NUL, bounded.
type Failure struct {
	Attempt   int
	Text      string
	ErrorType string
}

// Reason says why a message is a dead letter.
type Reason string

const (
	// ReasonExhausted: every attempt failed.
	ReasonExhausted Reason = "exhausted"
	// ReasonExpired: failed past give_up_after.
	ReasonExpired Reason = "expired"
	// ReasonPermanent: the handler said so.
	ReasonPermanent Reason = "permanent"
	// ReasonInvalid: the message cannot be decoded or fails validation.
	ReasonInvalid Reason = "invalid"
	// ReasonCrashed: its workers died without an outcome until no attempt was left.
	ReasonCrashed Reason = "crashed"
	// ReasonUnhandledType: no handler for its type appeared in time.
	ReasonUnhandledType Reason = "unhandled_type"
	// ReasonOperator: an operator cancelled it.
	ReasonOperator Reason = "operator"
)

// Operator is what people do to stored messages. All of it acts on one queue, named as the messages' own queue.
type Operator interface {
	// DeadLetters lists what matches, oldest first, beginning behind after; "" = from the start.
	// It returns at most limit elements, fewer only when there are no more.
	DeadLetters(ctx context.Context, queue string, f Filter, after Cursor, limit int) ([]DeadLetter, error)
	// LastDeadLetter is the position of the newest dead letter: a cut-off for acting on what is there now. Where there is
	// none, it is a position before all; it is never empty.
	LastDeadLetter(ctx context.Context, queue string) (Cursor, error)
	// Requeue makes dead letters pending again: due now, attempts restarted, history kept, generation grown.
	// The answers stand in the order of refs.
	Requeue(ctx context.Context, queue string, refs []DeadLetterRef, by string) ([]Disposition, error)
	// Replace stores edited as a new pending envelope that takes over the dead letter's idempotency key, and marks the
	// dead letter as replaced by it, in one step.
	Replace(ctx context.Context, queue string, ref DeadLetterRef, edited *Envelope, by string) (Disposition, error)
	// Discard deletes dead letters. The answers stand in the order of refs.
	Discard(ctx context.Context, queue string, refs []DeadLetterRef, by string) ([]Disposition, error)
	// Completed lists the completed messages that are kept ([Policy.RetainCompleted]), oldest first, beginning behind
	// after; "" = from the start. It returns at most limit elements, fewer only when there are no more. A backend that
	// cannot keep them has none.
	Completed(ctx context.Context, queue string, after Cursor, limit int) ([]CompletedMessage, error)
	// Stats counts a queue's messages; dead letters that an edit replaced are among them. A queue that does not exist has none.
	Stats(ctx context.Context, queue string) (QueueStats, error)
}

// Learner is an [Operator] that cannot look up where a queue's dead letters are, and has to be told.
type Learner interface {
	// Learn tells of the policy that messages of its queue are handled by. A manager does so when it is made.
	Learn(p *Policy)
}
