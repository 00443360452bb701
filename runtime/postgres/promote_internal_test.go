package postgres

import (
	"testing"
	"time"
)

// A promotion goes on where the last one was, and begins anew when somebody tells of a message that came late.
func TestKeeper_S24_PromotionGoesOnWhereItWas(t *testing.T) {
	t.Parallel()
	const (
		now   = instant(1_000_000_000)
		slack = instant(promotedSlack / time.Microsecond)
	)
	k := &keeper{promoted: make(map[int32]instant)}
	queues := []int32{1, 2}
	want := func(what string, whole bool, first, second instant) {
		t.Helper()
		if since := k.beginPromotion(queues, whole); since[0] != int64(first) || since[1] != int64(second) {
			t.Errorf("%s: begins at %d, want %d and %d", what, since, first, second)
		}
	}
	want("at first", false, 0, 0)
	k.endPromotion(queues, now, map[int32]instant{2: now / 2})
	want("then", false, now-slack, now/2)
	k.endPromotion(queues, now, nil)
	k.feeds = map[int32][]*feed{1: {{}}}
	k.arrived(arrival{queue: 1, due: time.Millisecond})
	want("told of one in time", false, now-slack, now-slack)
	k.arrived(arrival{queue: 1}) // during the promotion
	k.endPromotion(queues, now, nil)
	want("told of a late one meanwhile", false, 0, now-slack)
	k.endPromotion(queues, now, nil)
	want("whole", true, 0, 0)
	k.promotedLess(2) // it failed
	want("after a failure", false, maxInstant, 0)
}
