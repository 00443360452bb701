package options

import (
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	leasebusv1 "github.com/leasebus/leasebus/options/leasebus/v1"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// defaultHeartbeats is how many heartbeats there are in a lease unless the annotation says otherwise.
const defaultHeartbeats = 4

// policyOf turns merged options into a policy, filling in the built-in defaults.
func policyOf(name protoreflect.FullName, from *leasebusv1.MessageOptions) leasebus.Policy {
	queue := string(name)
	set(&queue, from.Queue)
	p := leasebus.DefaultPolicy(string(name), queue)
	p.Aliases = from.GetAliases()
	setDuration(&p.Timeout, from.GetTimeout())
	setDuration(&p.RetainCompleted, from.GetRetainCompleted())

	lease := from.GetLease()
	setDuration(&p.Lease.Duration, lease.GetDuration())
	p.Lease.Heartbeat = p.Lease.Duration / defaultHeartbeats
	setDuration(&p.Lease.Heartbeat, lease.GetHeartbeat())

	p.Retry = retryOf(from.GetRetry())
	p.DeadLetter = deadLetterOf(from.GetDeadLetter(), p.DeadLetter)
	if from.GetIdempotency() != nil {
		p.Idempotency = idempotencyOf(from.GetIdempotency())
	}
	if from.GetOrdering() != nil {
		p.Ordering = &leasebus.OrderingPolicy{
			Halt: from.GetOrdering().GetOnExhausted() == leasebusv1.OnExhausted_ON_EXHAUSTED_HALT,
		}
	}
	return p
}

func retryOf(from *leasebusv1.Retry) leasebus.RetryPolicy {
	var r leasebus.RetryPolicy
	switch {
	case from.GetNone() != nil:
		r = leasebus.NoRetry()
	case from.GetFixed() != nil:
		r = leasebus.FixedRetry(leasebus.DefaultMaxAttempts, leasebus.DefaultInitialDelay)
		setDuration(&r.Initial, from.GetFixed().GetDelay())
	default:
		r = leasebus.ExponentialRetry(leasebus.DefaultMaxAttempts,
			leasebus.DefaultInitialDelay, leasebus.DefaultMaxDelay, leasebus.DefaultMultiplier)
		exponential := from.GetExponential()
		setDuration(&r.Initial, exponential.GetInitial())
		setDuration(&r.Max, exponential.GetMax())
		if exponential != nil {
			set(&r.Multiplier, exponential.Multiplier)
		}
	}
	if from == nil {
		return r
	}
	if from.MaxAttempts != nil {
		r.MaxAttempts = int(from.GetMaxAttempts())
	}
	set(&r.Jitter, from.Jitter)
	setDuration(&r.GiveUpAfter, from.GetGiveUpAfter())
	if from.GetWaitInBrokerFrom() != nil {
		shortest := from.GetWaitInBrokerFrom().AsDuration()
		r.WaitInBrokerFrom = &shortest
	}
	return r
}

func deadLetterOf(from *leasebusv1.DeadLetter, defaults leasebus.DeadLetterPolicy) leasebus.DeadLetterPolicy {
	d := defaults
	if from == nil {
		return d
	}
	if d.Discard = from.GetDiscard(); d.Discard {
		d.Queue = "" // the default one; a queue that is asked for beside discard is set below, and refused
	}
	set(&d.Queue, from.Queue)
	set(&d.InvalidQueue, from.InvalidQueue)
	setDuration(&d.Retention, from.GetRetention())
	return d
}

// idempotencyOf fills in the defaults; from may be nil.
func idempotencyOf(from *leasebusv1.Idempotency) *leasebus.IdempotencyPolicy {
	policy := &leasebus.IdempotencyPolicy{
		Retention:       leasebus.DefaultIdempotencyRetention,
		InProgressDelay: leasebus.DefaultInProgressDelay,
	}
	setDuration(&policy.Retention, from.GetRetention())
	setDuration(&policy.InProgressDelay, from.GetInProgressDelay())
	return policy
}

func set[T any](to, given *T) {
	if given != nil {
		*to = *given
	}
}

// setDuration saturates a duration that is too long for Go, 292 years; the policy's own check refuses it.
func setDuration(to *time.Duration, given *durationpb.Duration) {
	if given != nil {
		*to = given.AsDuration()
	}
}

// checkDurations reports the durations whose parts contradict each other, which no later check could see.
func (a *Annotation) checkDurations(m protoreflect.Message, prefix string) {
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		setting := prefix + string(field.Name())
		if field.Kind() != protoreflect.MessageKind {
			return true
		}
		if isSection(field) {
			a.checkDurations(value.Message(), setting+".")
			return true
		}
		duration, ok := value.Message().Interface().(*durationpb.Duration)
		if ok && duration.CheckValid() != nil {
			a.Problems = append(a.Problems, a.Problem(setting,
				"seconds %d and nanos %d are no duration; allowed are up to 315576000000 seconds and 999999999 nanos, both of one sign",
				duration.GetSeconds(), duration.GetNanos()))
		}
		return true
	})
}
