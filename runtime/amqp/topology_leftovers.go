package amqp

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Leftover is a queue in which retries waited under an earlier policy, and that no policy needs any more. Messages in it
// still go back to their queue when their time has come; an empty one can be deleted.
type Leftover struct {
	Queue    string
	Messages int
}

// Leftovers looks for queues that earlier policies of the same queues have left behind. RabbitMQ cannot be asked for a
// list, so it is asked for each queue that a usual delay would have made: from a second to a day, in the steps in which
// delays are written and doubled. It changes nothing. It takes about half a millisecond for each of some hundred names,
// for each policy.
func (b *Broker) Leftovers(ctx context.Context, policies ...*leasebus.Policy) ([]Leftover, error) {
	e, err := b.publishing.await(ctx)
	if err != nil {
		return nil, fmt.Errorf("amqp: leftovers: %w", err)
	}
	var found []Leftover
	for _, p := range policies {
		names := usualRungs(p.Queue)
		for _, r := range rungsOf(p.Queue, p.Retry) {
			delete(names, r.name)
		}
		for _, name := range slices.Sorted(maps.Keys(names)) {
			messages, there, err := depthOf(ctx, e, name)
			if err != nil {
				return nil, fmt.Errorf("amqp: leftovers: %w", err)
			}
			if there {
				found = append(found, Leftover{name, messages})
			}
		}
	}
	return found, nil
}

// usualRungs are the names of queues for the delays that people write, and for what they grow to.
func usualRungs(queue string) map[string]struct{} {
	const day = 24 * time.Hour
	names := make(map[string]struct{})
	for _, unit := range []time.Duration{time.Second, time.Minute, time.Hour} {
		for _, written := range []int64{1, 2, 3, 5, 10, 15, 20, 30, 45} {
			for _, factor := range []int64{2, 3, 10} {
				for n := written; n <= int64(day/unit); n *= factor {
					d := time.Duration(n) * unit
					names[queue+rungInfix+delayName(d)] = struct{}{}
				}
			}
		}
	}
	return names
}
