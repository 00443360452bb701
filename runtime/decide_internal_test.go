package leasebus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func decidePolicy(change func(*Policy)) *Policy {
	p := DefaultPolicy("test.Message", "queue")
	p.Retry = RetryPolicy{MaxAttempts: 3, Initial: time.Second, Max: time.Minute, Multiplier: 2}
	p.DeadLetter.InvalidQueue = "queue.bad"
	if change != nil {
		change(&p)
	}
	return &p
}

func TestDecide(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, tt := range map[string]struct {
		policy func(*Policy)
		result attemptResult
		want   Settlement
	}{
		"success": {nil, attemptResult{attempt: 1}, Settlement{Kind: SettleComplete}},
		"S19 an error is retried": {
			nil, attemptResult{attempt: 1, err: boom}, Settlement{Kind: SettleRetry, Delay: time.Second, Nominal: time.Second},
		},
		"S21 the second delay": {
			nil, attemptResult{attempt: 2, err: boom}, Settlement{Kind: SettleRetry, Delay: 2 * time.Second, Nominal: 2 * time.Second},
		},
		"S21 the last attempt": {
			nil,
			attemptResult{attempt: 3, err: boom},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonExhausted, DeadLetterQueue: "queue.dlq", Attempts: 3},
		},
		"S21 no retries": {
			func(p *Policy) { p.Retry = NoRetry() },
			attemptResult{attempt: 1, err: boom},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonExhausted, DeadLetterQueue: "queue.dlq", Attempts: 1},
		},
		"S19 permanent": {
			nil,
			attemptResult{attempt: 1, err: Permanent(boom)},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonPermanent, DeadLetterQueue: "queue.dlq", Attempts: 1},
		},
		"S28 invalid has a route of its own": {
			nil,
			attemptResult{attempt: 1, err: Invalid(boom)},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonInvalid, DeadLetterQueue: "queue.bad", Attempts: 1},
		},
		"S28 invalid without one goes with the others": {
			func(p *Policy) { p.DeadLetter.InvalidQueue = "" },
			attemptResult{attempt: 1, err: Invalid(boom)},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonInvalid, DeadLetterQueue: "queue.dlq", Attempts: 1},
		},
		"S28 no dead letters by opt-out": {
			func(p *Policy) { p.DeadLetter = DeadLetterPolicy{Discard: true} },
			attemptResult{attempt: 1, err: Invalid(boom)},
			Settlement{Kind: SettleDiscard, Reason: ReasonInvalid, Attempts: 1},
		},
		"S19 retry after": {
			nil,
			attemptResult{attempt: 1, err: RetryAfter(time.Hour, boom)},
			Settlement{Kind: SettleRetry, Delay: time.Hour},
		},
		"S19 retry after, attempts spent": {
			nil,
			attemptResult{attempt: 3, err: RetryAfter(time.Hour, boom)},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonExhausted, DeadLetterQueue: "queue.dlq", Attempts: 3},
		},
		"S19 defer spends nothing": {
			nil, attemptResult{attempt: 3, err: Defer(time.Hour)}, Settlement{Kind: SettleDefer, Delay: time.Hour},
		},
		"S19 a wrapped verdict counts": {
			nil,
			attemptResult{attempt: 1, err: fmt.Errorf("while paying: %w", Permanent(boom))},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonPermanent, DeadLetterQueue: "queue.dlq", Attempts: 1},
		},
		"S19 the outermost verdict counts": {
			nil,
			attemptResult{attempt: 1, err: RetryAfter(time.Hour, Permanent(boom))},
			Settlement{Kind: SettleRetry, Delay: time.Hour},
		},
		"S23 too old": {
			func(p *Policy) { p.Retry.GiveUpAfter = time.Hour },
			attemptResult{attempt: 1, age: time.Hour + 1, err: boom},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonExpired, DeadLetterQueue: "queue.dlq", Attempts: 1},
		},
		"S23 not too old": {
			func(p *Policy) { p.Retry.GiveUpAfter = time.Hour },
			attemptResult{attempt: 1, age: time.Hour, err: boom},
			Settlement{Kind: SettleRetry, Delay: time.Second, Nominal: time.Second},
		},
		"S23 0 is never": {
			nil, attemptResult{attempt: 1, age: 1e6 * time.Hour, err: boom}, Settlement{Kind: SettleRetry, Delay: time.Second, Nominal: time.Second},
		},
		"S50 C5_9 interrupted by a shutdown": {
			nil,
			attemptResult{attempt: 3, err: context.Canceled, ended: ErrShutdown},
			Settlement{Kind: SettleRelease, Started: true},
		},
		"S50 C5_1 a verdict after the shutdown counts": {
			nil,
			attemptResult{attempt: 1, err: Permanent(boom), ended: ErrShutdown},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonPermanent, DeadLetterQueue: "queue.dlq", Attempts: 1},
		},
		"S50 success after the shutdown counts": {
			nil, attemptResult{attempt: 1, ended: ErrShutdown}, Settlement{Kind: SettleComplete},
		},
		"S25 interrupted too often": {
			nil,
			attemptResult{attempt: 1, interruptions: 10, err: context.Canceled, ended: ErrShutdown},
			Settlement{Kind: SettleRetry, Delay: time.Second, Nominal: time.Second},
		},
		"S7 a cancellation of the handler's own": {
			nil, attemptResult{attempt: 1, err: context.DeadlineExceeded}, Settlement{Kind: SettleRetry, Delay: time.Second, Nominal: time.Second},
		},
		"S7 a handler timeout": {
			nil,
			attemptResult{attempt: 3, err: context.Canceled, ended: ErrHandlerTimeout},
			Settlement{Kind: SettleDeadLetter, Reason: ReasonExhausted, DeadLetterQueue: "queue.dlq", Attempts: 3},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := decide(decidePolicy(tt.policy), tt.result)
			got.Failure = nil
			if got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
		})
	}
}

func TestDecide_S7_tells_why_the_context_ended(t *testing.T) {
	t.Parallel()
	s := decide(decidePolicy(nil), attemptResult{attempt: 1, err: context.Canceled, ended: ErrHandlerTimeout})
	if want := ErrHandlerTimeout.Error() + ": context canceled"; s.Failure.Text != want {
		t.Errorf("failure text %q, want %q", s.Failure.Text, want)
	}
}

func TestDecideUnrun_S10(t *testing.T) {
	t.Parallel()
	policy := decidePolicy(nil)
	for _, tt := range []struct {
		attempt int
		crashed bool
		want    Reason
	}{{3, true, ""}, {4, true, ReasonCrashed}, {4, false, ReasonExhausted}, {90, true, ReasonCrashed}} {
		s := decideUnrun(policy, &Lease{Attempt: tt.attempt, Crashed: tt.crashed})
		if (s == nil) != (tt.want == "") {
			t.Fatalf("attempt %d: settlement %+v", tt.attempt, s)
		}
		if s != nil && (s.Reason != tt.want || s.Kind != SettleDeadLetter || s.Attempts != tt.attempt-1) {
			t.Errorf("attempt %d, crashed %v: %+v", tt.attempt, tt.crashed, *s)
		}
	}
}

func TestDecideUnhandled_S20(t *testing.T) {
	t.Parallel()
	policy, l := decidePolicy(nil), &Lease{Envelope: Envelope{Type: "test.New"}, Attempt: 1}
	for _, tt := range []struct {
		age  time.Duration
		kind SettlementKind
		wait time.Duration
	}{
		{0, SettleDefer, unhandledDelay},
		{15*time.Minute - time.Second, SettleDefer, time.Second},
		{15 * time.Minute, SettleDeadLetter, 0},
	} {
		s := decideUnhandled(policy, l, tt.age, 15*time.Minute)
		if s.Kind != tt.kind || s.Delay != tt.wait || (s.Kind == SettleDeadLetter) != (s.Reason == ReasonUnhandledType) {
			t.Errorf("age %v: %+v", tt.age, s)
		}
	}
}

func TestVerdicts_S19_nil_stays_nil(t *testing.T) {
	t.Parallel()
	for _, err := range []error{Permanent(nil), Invalid(nil), RetryAfter(time.Second, nil)} {
		if err != nil {
			t.Errorf("%v is not nil", err)
		}
	}
	if s := decide(decidePolicy(nil), attemptResult{attempt: 1, err: Defer(-time.Hour)}); s.Delay != 0 {
		t.Errorf("a negative delay became %v", s.Delay)
	}
	if s := decide(decidePolicy(nil), attemptResult{attempt: 1, err: Defer(1<<63 - 1)}); s.Delay != maxDelay {
		t.Errorf("an endless delay became %v", s.Delay)
	}
}

type rudeError struct{}

func (rudeError) Error() string { panic("no text") }

func TestErrorText_S15_C3_1_is_storable(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ given, want string }{
		"NUL":           {"a\x00b", "a\uFFFDb"},
		"invalid UTF-8": {"a\xffb", "a\uFFFDb"},
		"plain":         {"order 7: sold out", "order 7: sold out"},
	} {
		if got := errorText(errors.New(tt.given)); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
	if got := errorText(rudeError{}); !strings.Contains(got, "rudeError") {
		t.Errorf("an Error method that panics: %q", got)
	}
}

func FuzzErrorText_S15(f *testing.F) {
	f.Add("a\x00b", 10)
	f.Add(strings.Repeat("ä", 40), 7)
	f.Add(strings.Repeat("\x80", 40), 7)
	f.Fuzz(func(t *testing.T, s string, limit int) {
		limit = 4 + limit&0xff
		got := storableText(s, limit)
		if len(got) > limit || !utf8.ValidString(got) || strings.ContainsRune(got, 0) {
			t.Errorf("storableText(%q, %d) = %q", s, limit, got)
		}
		if len(s) <= limit && utf8.ValidString(s) && !strings.ContainsRune(s, 0) && got != s {
			t.Errorf("a storable text was changed: %q became %q", s, got)
		}
	})
}

func TestErrorType(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want string
	}{
		{errors.New("x"), "*errors.errorString"},
		{Permanent(rudeError{}), "leasebus.rudeError"},
		{fmt.Errorf("a: %w", fmt.Errorf("b: %w", rudeError{})), "leasebus.rudeError"},
		{Defer(time.Second), "*leasebus.verdict"},
		{&PanicError{}, "*leasebus.PanicError"},
	} {
		if got := errorType(tt.err); got != tt.want {
			t.Errorf("%T: %q, want %q", tt.err, got, tt.want)
		}
	}
}
