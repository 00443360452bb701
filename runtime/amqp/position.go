package amqp

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// position orders the dead letters of a queue: by the time of dead-lettering, in milliseconds, then by id. RabbitMQ has
// no names for places in a queue. Twins that were dead-lettered together have one position.
type position struct {
	at int64
	id leasebus.ID
}

func positionOf(d *leasebus.DeadLetter) position {
	if d.DeadLetteredAt.IsZero() {
		return position{0, d.ID}
	}
	return position{d.DeadLetteredAt.UnixMilli(), d.ID}
}

func (p position) compare(other position) int {
	if c := cmp.Compare(p.at, other.at); c != 0 {
		return c
	}
	return bytes.Compare(p.id[:], other.id[:])
}

func (p position) cursor() leasebus.Cursor {
	return leasebus.Cursor(strconv.FormatInt(p.at, 10) + "." + p.id.String())
}

// parsePosition reads a cursor; "" is the position before all.
func parsePosition(c leasebus.Cursor) (position, error) {
	if c == "" {
		return position{at: -1}, nil
	}
	at, id, _ := strings.Cut(string(c), ".")
	n, err := strconv.ParseInt(at, 10, 64)
	parsed, bad := leasebus.ParseID(id)
	if err != nil || bad != nil || n < 0 {
		return position{}, fmt.Errorf("amqp: %q is no cursor of dead letters", c)
	}
	return position{n, parsed}, nil
}

// lastPosition is behind all.
func lastPosition() position { return position{at: math.MaxInt64} }
