package amqp

import (
	"sync/atomic"
)

// DefaultCrashLimit is how often a message may be delivered again before it counts as one that kills its workers.
const DefaultCrashLimit = 20

// consumeOptions are those of feeds.
type consumeOptions struct {
	budget     int // 0 = twice the concurrency
	crashLimit int
}

// WithHoldBudget sets how many messages a consumer may hold while they wait for their next attempt, or for RabbitMQ to
// take what was decided about them. It is added to what RabbitMQ sends ahead, and never more than half of the whole.
// Waits beyond it are spent in the broker. At least 1. Default twice the concurrency of the queue, which is also the
// most.
func WithHoldBudget(n int) Option {
	return optionFunc(func(o *options) {
		o.consume.budget = n
		if n < 1 {
			o.refusef("WithHoldBudget: %d is out of range; allowed is 1 or more", n)
		}
	})
}

// WithCrashLimit sets how often in a row a message may come to a worker that was delivered before without an outcome:
// past it, it is dead-lettered as crashed. Drains and lost connections count too, since RabbitMQ does not tell them
// apart. At least 1. Default [DefaultCrashLimit].
func WithCrashLimit(n int) Option {
	return optionFunc(func(o *options) {
		o.consume.crashLimit = n
		if n < 1 {
			o.refusef("WithCrashLimit: %d is out of range; allowed is 1 or more", n)
		}
	})
}

// budgetFor is the hold budget of a consumer with this concurrency.
func (c consumeOptions) budgetFor(concurrency int) int {
	most := 2 * concurrency
	if c.budget == 0 {
		return most
	}
	return min(c.budget, most)
}

// Counters tells how often feeds met what should be rare.
type Counters struct {
	// BadAttempts and BadFirstDues count messages whose headers said what cannot be: an attempt that is no number, or a
	// first due time in the future. They were taken for the first attempt, and for due now.
	BadAttempts, BadFirstDues int64
	// Crashes counts messages that came to a worker although another consumer had them before.
	Crashes int64
	// Spilled counts short waits that were spent in the broker because the hold budget was used up.
	Spilled int64
	// MissingRungs counts waits whose queue was not there: it was declared again, or the wait spent in the consumer.
	MissingRungs int64
	// FailedMoves counts publishes of retries and dead letters that RabbitMQ did not confirm. Each was tried again.
	FailedMoves int64
}

type counters struct {
	badAttempts, badFirstDues, crashes, spilledWaits, missingRungs, failedMoves atomic.Int64
}

// Counters returns the counts since Dial. They are read one by one.
func (b *Broker) Counters() Counters {
	c := &b.counters
	return Counters{
		BadAttempts: c.badAttempts.Load(), BadFirstDues: c.badFirstDues.Load(), Crashes: c.crashes.Load(),
		Spilled: c.spilledWaits.Load(), MissingRungs: c.missingRungs.Load(), FailedMoves: c.failedMoves.Load(),
	}
}

func (c *counters) spoiled(bad spoiled) {
	if bad.attempt {
		c.badAttempts.Add(1)
	}
	if bad.firstDue {
		c.badFirstDues.Add(1)
	}
}
