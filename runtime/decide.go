package leasebus

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// maxInterruptions is how many attempts are given back although their handler had started: a message whose handler is
// longer than every deploy must still come to an end.
const maxInterruptions = 10

// attemptResult is everything that the decision about an attempt rests on.
type attemptResult struct {
	attempt       int
	age           time.Duration // since first due, on the store's clock
	interruptions int
	err           error // what the handler returned
	ended         error // what ended the handler's context; nil = nothing did
}

// decide turns the result of an attempt and a policy into a settlement. It is pure but for the draw of the jitter.
func decide(p *Policy, r attemptResult) Settlement {
	if r.err == nil {
		return Settlement{Kind: SettleComplete}
	}
	var v verdict
	if found := (*verdict)(nil); errors.As(r.err, &found) {
		v = *found
	}
	interrupted := errors.Is(r.ended, ErrShutdown) && v.kind == verdictNone
	failure := r.failure()
	switch {
	case v.kind == verdictPermanent:
		return deadLetter(p, ReasonPermanent, r.attempt, failure)
	case v.kind == verdictInvalid:
		return deadLetter(p, ReasonInvalid, r.attempt, failure)
	case v.kind == verdictDefer:
		return Settlement{Kind: SettleDefer, Delay: v.delay}
	case interrupted && r.interruptions < maxInterruptions:
		return Settlement{Kind: SettleRelease, Started: true}
	case r.attempt >= p.Retry.MaxAttempts:
		return deadLetter(p, ReasonExhausted, r.attempt, failure)
	case p.Retry.GiveUpAfter > 0 && r.age > p.Retry.GiveUpAfter:
		return deadLetter(p, ReasonExpired, r.attempt, failure)
	case v.kind == verdictRetryAfter:
		return Settlement{Kind: SettleRetry, Delay: v.delay, Failure: failure}
	default:
		nominal := p.Retry.Delay(r.attempt)
		return Settlement{Kind: SettleRetry, Delay: p.Retry.jittered(nominal), Nominal: nominal, Failure: failure}
	}
}

// failure describes r for the history. A handler that gives up because its context ended says only "context canceled";
// why it ended is what a reader wants to know.
func (r attemptResult) failure() *Failure {
	err := r.err
	if r.ended != nil && !errors.Is(err, r.ended) && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		err = fmt.Errorf("%w: %w", r.ended, r.err)
	}
	return &Failure{Attempt: r.attempt, Text: errorText(err), ErrorType: errorType(r.err)}
}

// decideUnrun is for an envelope whose attempts were already spent when it was leased. nil = it may run.
func decideUnrun(p *Policy, l *Lease) *Settlement {
	if l.Attempt <= p.Retry.MaxAttempts {
		return nil
	}
	reason, text := ReasonExhausted, "attempts were spent before this lease"
	if l.Crashed {
		reason, text = ReasonCrashed, "the worker of the last attempt ended without an outcome"
	}
	s := deadLetter(p, reason, l.Attempt-1, &Failure{Attempt: l.Attempt - 1, Text: text, ErrorType: string(reason)})
	return &s
}

// decideUnhandled is for a type that no handler here knows: another process may, or a later version of this one.
func decideUnhandled(p *Policy, l *Lease, age, patience time.Duration) Settlement {
	if age < patience {
		return Settlement{Kind: SettleDefer, Delay: min(patience-age, unhandledDelay)}
	}
	return deadLetter(p, ReasonUnhandledType, l.Attempt-1, &Failure{
		Attempt:   l.Attempt - 1,
		Text:      storableText(fmt.Sprintf("no handler for type %s within %v", l.Type, patience), maxErrorText),
		ErrorType: string(ReasonUnhandledType),
	})
}

// unhandledDelay is how often a message of an unknown type is looked at again.
const unhandledDelay = 15 * time.Second

func deadLetter(p *Policy, reason Reason, attempts int, failure *Failure) Settlement {
	s := Settlement{Kind: SettleDeadLetter, Reason: reason, DeadLetterQueue: p.DeadLetter.Queue, Attempts: attempts, Failure: failure}
	if reason == ReasonInvalid && p.DeadLetter.InvalidQueue != "" {
		s.DeadLetterQueue = p.DeadLetter.InvalidQueue
	}
	if p.DeadLetter.Discard {
		s.Kind, s.DeadLetterQueue = SettleDiscard, ""
	}
	return s
}
