package amqp

import (
	"slices"
	"strconv"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// A rung is a queue that nobody consumes: its messages wait there for its delay, and are dead-lettered to where they
// have to be then. There is one for each delay, because RabbitMQ lets only the head of a queue expire: behind a long
// wait, a short one would be long.
type rung struct {
	name  string
	delay time.Duration
	// target is the queue that the messages return to; "" = the one named by their routing key.
	target string
}

const (
	rungInfix    = ".retry."
	ladderPrefix = "leasebus.delay."

	// ladderDue is the exchange that gives the messages of the shared ladder back to their queues, by bindings. What has
	// no queue any more goes to ladderLost: in a rung that keeps what it cannot pass on, some of it would be in the way of
	// all others.
	ladderDue  = ladderPrefix + "due"
	ladderLost = ladderPrefix + "lost"

	// shortestRung: for less, a way through the broker is not worth it, unless wait_in_broker_from asks for it.
	shortestRung = time.Second
	// longestRung is the longest time to live that RabbitMQ takes: 2³²-1 ms, about 49 days.
	longestRung = 4294967295 * time.Millisecond
)

// ladderDelays are those of the rungs that all queues share, for delays that no policy names.
//
//nolint:gochecknoglobals // Go has no constant slices
var ladderDelays = [...]time.Duration{time.Second, 10 * time.Second, time.Minute, 10 * time.Minute, time.Hour}

// rungsOf are the rungs that a policy's delays need: those that may be spent in the broker, because they are long enough
// or because the consumer holds too many already.
func rungsOf(queue string, r leasebus.RetryPolicy) []rung {
	var rungs []rung
	for _, delay := range r.Rungs(min(shortestRung, waitInBrokerFrom(r))) {
		delay = wholeMilliseconds(delay)
		if delay > longestRung {
			break // spent on the shared ladder
		}
		if n := len(rungs); n > 0 && rungs[n-1].delay == delay {
			continue
		}
		rungs = append(rungs, rung{name: queue + rungInfix + delayName(delay), delay: delay, target: queue})
	}
	return rungs
}

// sharedLadder are the rungs of [ladderDelays]. A message is published to the exchange that has the rung's name, with
// the queue it is for as its routing key.
func sharedLadder() []rung {
	rungs := make([]rung, len(ladderDelays))
	for i, delay := range ladderDelays {
		rungs[i] = rung{name: ladderPrefix + delayName(delay), delay: delay}
	}
	return rungs
}

// arguments are those that make a queue a rung, besides the arguments of its type.
func (r rung) arguments() amqp091.Table {
	args := amqp091.Table{"x-message-ttl": r.delay.Milliseconds()}
	if r.target == "" {
		args[argDeadExchange] = ladderDue
	} else {
		args[argDeadExchange], args[argDeadKey] = "", r.target
	}
	return args
}

// delayName writes a delay in its largest whole unit: 30s, 90s, 5m, 2h, 1500ms.
func delayName(d time.Duration) string {
	for _, unit := range []struct {
		size time.Duration
		name string
	}{{time.Hour, "h"}, {time.Minute, "m"}, {time.Second, "s"}} {
		if d%unit.size == 0 {
			return strconv.FormatInt(int64(d/unit.size), 10) + unit.name
		}
	}
	return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
}

// wholeMilliseconds rounds up: a wait may be a little long, never short.
func wholeMilliseconds(d time.Duration) time.Duration {
	return (d + time.Millisecond - 1).Truncate(time.Millisecond)
}

func waitInBrokerFrom(r leasebus.RetryPolicy) time.Duration {
	if r.WaitInBrokerFrom == nil {
		return leasebus.DefaultWaitInBrokerFrom
	}
	return *r.WaitInBrokerFrom
}

// waits says where the waits of one queue's messages are spent.
type waits struct {
	rungs  []rung // of the policy, shortest first
	inside time.Duration
}

func waitsOf(queue string, r leasebus.RetryPolicy) waits {
	return waits{rungs: rungsOf(queue, r), inside: waitInBrokerFrom(r)}
}

// here reports whether a wait is one for the consumer, as long as it has room. The nominal delay decides, where the
// policy has given one: jitter does not move a wait from one place to the other.
func (w waits) here(nominal, delay time.Duration) bool {
	if nominal > 0 {
		return nominal < w.inside
	}
	return delay < w.inside
}

// step is the next part of a wait that is spent in the broker.
type step struct {
	exchange, key string
	rung          rung
	// remaining is the part that is left when the message comes back.
	remaining time.Duration
}

// there plans a wait in the broker: on the policy's rung, whose delay is never jittered, or along the shared ladder.
// What lies between two rungs is rounded up.
func (w waits) there(queue string, nominal, delay time.Duration) step {
	if nominal > 0 {
		at, _ := slices.BinarySearchFunc(w.rungs, nominal, func(r rung, d time.Duration) int { return int(r.delay - d) })
		if at < len(w.rungs) {
			return step{key: w.rungs[at].name, rung: w.rungs[at]}
		}
		delay = nominal
	}
	return ladderStep(queue, delay)
}

// ladderStep takes the longest rung of the shared ladder that is not too long.
func ladderStep(queue string, delay time.Duration) step {
	delay = wholeMilliseconds(min(delay, maxRemaining))
	at := len(ladderDelays) - 1
	for at > 0 && ladderDelays[at] > delay {
		at--
	}
	r := rung{name: ladderPrefix + delayName(ladderDelays[at]), delay: ladderDelays[at]}
	return step{exchange: r.name, key: queue, rung: r, remaining: max(delay-r.delay, 0)}
}
