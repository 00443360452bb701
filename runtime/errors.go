package leasebus

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Causes for which the engine ends a handler's context; [context.Cause] tells them apart.
var (
	// ErrLeaseLost: the message no longer belongs to this worker. Also what a fenced call answers a stale worker.
	ErrLeaseLost = errors.New("leasebus: lease lost")
	// ErrShutdown: the processor is draining and its drain timeout is over.
	ErrShutdown = errors.New("leasebus: shutting down")
	// ErrCancelled: an operator cancelled the message.
	ErrCancelled = errors.New("leasebus: cancelled by an operator")
	// ErrHandlerTimeout: the handler ran longer than the timeout of its message.
	ErrHandlerTimeout = errors.New("leasebus: handler timed out")
)

// What publishers answer.
var (
	// ErrPublishingPaused is what a [PublishGate] answers while it is closed.
	ErrPublishingPaused = errors.New("leasebus: publishing is paused")
	// ErrInvalidEnvelope is matched by the error of a publish that was refused for what it was given.
	// Nothing of it is stored.
	ErrInvalidEnvelope = errors.New("leasebus: invalid envelope")
	// ErrOutcomeUnknown: the envelope may have been stored or not; publishing it again with the same id is safe.
	ErrOutcomeUnknown = errors.New("leasebus: outcome of publishing is unknown")
)

// Answers of a backend.
var (
	// ErrFeedStopped is what Lease answers after Stop.
	ErrFeedStopped = errors.New("leasebus: feed is stopped")
	// ErrUnstorable is matched by an error of [Feed.Settle] that refuses the batch for its data: the engine splits it
	// until the offender stands alone.
	ErrUnstorable = errors.New("leasebus: the store refuses the data")
)

// Permanent marks err as one that no retry can mend: the message is dead-lettered at once.
// Permanent(nil) is nil, so a call can be wrapped as it is.
func Permanent(err error) error { return verdictOf(verdictPermanent, 0, err) }

// Invalid marks err as one of the message itself: it takes the invalid route at once.
// Invalid(nil) is nil.
func Invalid(err error) error { return verdictOf(verdictInvalid, 0, err) }

// RetryAfter is a failure whose next attempt is due after d instead of the policy's delay. The attempt is spent, and
// the attempts' limit holds. A negative d counts as 0. RetryAfter(d, nil) is nil.
func RetryAfter(d time.Duration, err error) error { return verdictOf(verdictRetryAfter, d, err) }

// Defer asks for the message again after d, without a failure: the attempt is given back and a counter of its own
// grows. A negative d counts as 0.
func Defer(d time.Duration) error {
	return &verdict{kind: verdictDefer, delay: clampDelay(d)}
}

type verdictKind uint8

const (
	verdictNone verdictKind = iota
	verdictPermanent
	verdictInvalid
	verdictRetryAfter
	verdictDefer
)

// verdict is a handler's answer about its message. The outermost one in an error's tree counts.
type verdict struct {
	kind  verdictKind
	delay time.Duration
	err   error
}

func verdictOf(kind verdictKind, delay time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return &verdict{kind: kind, delay: clampDelay(delay), err: err}
}

func (v *verdict) Error() string {
	if v.err == nil {
		return fmt.Sprintf("leasebus: deferred by %v", v.delay)
	}
	return v.err.Error()
}

func (v *verdict) Unwrap() error { return v.err }

func clampDelay(d time.Duration) time.Duration { return min(max(d, 0), maxDelay) }

// PanicError is the error of a handler that panicked or called [runtime.Goexit].
type PanicError struct {
	// Value is what was passed to panic; nil for Goexit.
	Value any
	// Stack is the handler's stack, at most 2 KiB of it.
	Stack string
}

func (e *PanicError) Error() string {
	if e.Value == nil {
		return "handler called runtime.Goexit\n" + e.Stack
	}
	return fmt.Sprintf("handler panicked: %v\n%s", e.Value, e.Stack)
}

// maxErrorText bounds the text of an error that is stored with a message.
const maxErrorText = 4 << 10

// storableText makes a text that every backend can store: valid UTF-8, no NUL, at most limit bytes, cut between runes.
func storableText(s string, limit int) string {
	if len(s) > limit {
		cut := limit
		for back := 0; back < utf8.UTFMax-1 && !utf8.RuneStart(s[cut]); back++ {
			cut--
		}
		s = s[:cut]
	}
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.ReplaceAll(s, "\x00", "\uFFFD")
	if len(s) > limit { // a replacement is longer than what it replaced
		return storableText(s, limit)
	}
	return s
}

// errorText is err's message, whatever its Error method does.
func errorText(err error) (text string) {
	defer func() {
		if p := recover(); p != nil {
			text = fmt.Sprintf("%T (its Error method panicked)", err)
		}
	}()
	return storableText(err.Error(), maxErrorText)
}

// errorType names the type of the error that a handler returned, below the wrapping that says nothing about its kind.
func errorType(err error) string {
	for {
		name := fmt.Sprintf("%T", err)
		inner := errors.Unwrap(err)
		if inner == nil || name != "*leasebus.verdict" && name != "*fmt.wrapError" {
			return storableText(name, MaxNameBytes)
		}
		err = inner
	}
}
