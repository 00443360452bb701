package leasebus

import (
	"context"
	"time"
)

// HandlerFunc handles a decoded message: what a [Middleware] wraps.
type HandlerFunc func(ctx context.Context, d Delivery) error

// Middleware wraps the handling of every message of a processor, decoding done. The first one given is the outermost.
type Middleware func(next HandlerFunc) HandlerFunc

// Hooks are called around every message of a processor. Any of them may be nil. A hook that panics has failed.
type Hooks struct {
	// Before runs before the handler. If it fails, the handler does not run, and OnFailure says what follows.
	Before func(ctx context.Context, d Delivery) error
	// After runs when the handler has returned err, before anything is settled. If it fails after a handler that
	// succeeded, OnFailure says what follows; after one that failed, the handler's error decides.
	After func(ctx context.Context, d Delivery, err error) error
	// Settled runs when the store has answered, with what was decided. It holds up other settlements, and a drain: keep it
	// short, and do not call Drain in it.
	Settled func(d Delivery, o Outcome)
	// OnFailure is for a failing Before or After. Default [HookFailureRetry].
	OnFailure HookFailure
}

// HookFailure says what becomes of a message whose hook failed.
type HookFailure uint8

const (
	// HookFailureRetry treats it as a failure of the handler, verdicts included.
	HookFailureRetry HookFailure = iota
	// HookFailureDeadLetter dead-letters the message as permanent.
	HookFailureDeadLetter
	// HookFailureIgnore goes on as if the hook had succeeded, with a warning in the log.
	HookFailureIgnore
)

// Outcome is what the engine decided about a message and what the store answered.
type Outcome struct {
	// Kind is what became of the message: any but SettleVerify.
	Kind SettlementKind
	// Reason is set for dead letters and what is discarded, Delay for what comes again.
	Reason Reason
	Delay  time.Duration
	// DeadLetterQueue is where a dead letter went.
	DeadLetterQueue string
	// Err is what the handler returned, or what was wrong with the message.
	Err error
	// Result is ResultOK if the store did it, ResultLost if the lease was gone, ResultUnknown if it could not be told.
	Result Result
}
