package amqp

import (
	"math/bits"
	"math/rand/v2"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

const (
	// suspectFrom is how many crashes in a row are somebody's fault: one is nobody's (a deploy, the network).
	suspectFrom = 2
	// suspectSlots is over how many seconds suspects are spread at most.
	suspectSlots = 16
	// suspectPause is how long a copy waits that has a crash counted: a death before its original was acknowledged would
	// leave both, and more of them at each death.
	suspectPause = 100 * time.Millisecond
)

// countCrash is for a delivery that another consumer had: it is published again with one more crash, or, after too many,
// handed out as one whose attempts are spent.
//
// One that kills its process makes suspects of all that were with it, and would do so again and again. So suspects come
// back at any of some seconds, of more at each crash: their groups fall apart, the innocent ones are handled in another's
// absence, and what kills is soon alone. They wait in the broker, where no crash can reach them.
func (f *feed) countCrash(d *delivery) bool {
	f.broker.counters.crashes.Add(1)
	s := d.stamp
	if s.crashes++; s.crashes > f.broker.options.consume.crashLimit {
		d.spent = true
		return false
	}
	d.id = idOf(d.msg.MessageId)
	wait := suspectWait(s.crashes)
	m := &move{d: d, kind: leasebus.SettleDefer, until: time.Now().Add(wait), deadly: true}
	if wait == 0 {
		m.message = f.toQueue(d, s, nil)
	} else {
		f.waitInBroker(m, s, ladderStep(f.sub.Queue, wait), nil)
	}
	f.carryOut(m)
	return true
}

func suspectWait(crashes int) time.Duration {
	if crashes < suspectFrom {
		return 0
	}
	slots := suspectSlots
	if crashes < bits.Len(suspectSlots) {
		slots = 1 << crashes
	}
	return time.Duration(rand.N(slots)) * time.Second //nolint:gosec // spreads them, guards nothing
}

// pause is for a delivery that has a crash counted.
func (f *feed) pause(d *delivery, now time.Time) {
	f.keep(&move{d: d, kind: leasebus.SettleDefer, local: true}, now.Add(suspectPause))
}
