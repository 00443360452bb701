package postgres

import (
	"testing"
	"time"
)

// claimAt runs one claim and returns where it began; -1 if there was nothing to look for.
func (c *cursor) claimAt(top int64, full bool) int64 {
	p := c.begin(time.Now(), false)
	if p == nil {
		return -1
	}
	c.found(p, top, full, 0)
	return p.from
}

func TestCursor_FollowsTheClaims(t *testing.T) {
	t.Parallel()
	var c cursor
	for i, step := range []struct {
		arrived   int64 // 0 = nothing
		from, top int64
		full      bool
	}{
		{0, 0, 100, true},
		{0, 101, 150, false},
		{0, -1, 0, false}, // dry: nobody claims
		{40, 40, 45, true},
		{0, 46, 50, false},   // that was all of it,
		{160, 151, 0, false}, // so that the next claim begins where the cursor had been
		{0, -1, 0, false},
		{20, 20, 25, true}, // a late batch is drained at full speed
		{0, 26, 30, true},
	} {
		if step.arrived != 0 {
			c.arrived(step.arrived)
		}
		if from := c.claimAt(step.top, step.full); from != step.from {
			t.Fatalf("step %d: the claim begins at %d, want %d", i, from, step.from)
		}
	}
}

func TestCursor_AnArrivalDuringAClaimStands(t *testing.T) {
	t.Parallel()
	for _, full := range []bool{true, false} {
		c := cursor{next: 101, far: 101}
		p := c.begin(time.Now(), false)
		c.arrived(50) // committed late
		c.found(p, 200, full, 0)
		if from := c.claimAt(0, false); from != 50 {
			t.Errorf("full %t: the next claim begins at %d, want 50", full, from)
		}
		c.arrived(300)
		if from := c.claimAt(0, false); from != 101 {
			t.Errorf("full %t: an arrival in front moved the cursor to %d, want 101", full, from)
		}
	}
}

func TestCursor_TwoClaimsAtOnce(t *testing.T) {
	t.Parallel()
	var c cursor
	a, b := c.begin(time.Now(), false), c.begin(time.Now(), false)
	c.found(b, 1000, true, 0) // it has left out what the other one has
	c.found(a, 500, true, 0)
	if from := c.claimAt(1500, true); from != 1001 {
		t.Errorf("the next claim begins at %d, want 1001", from)
	}

	a = c.begin(time.Now(), false)
	c.arrived(700)
	b = c.begin(time.Now(), false)
	c.found(b, 720, true, 0)
	c.found(a, 2000, true, 0) // it may not have seen what is behind 720
	if from := c.claimAt(0, false); from != 721 {
		t.Errorf("the next claim begins at %d, want 721", from)
	}

	c.arrived(3000)
	a, b = c.begin(time.Now(), false), c.begin(time.Now(), false)
	c.found(a, 0, false, 0)
	c.failed(b)
	if from := c.claimAt(0, false); from != a.from || from > b.from {
		t.Errorf("after a claim that failed at %d the next one begins at %d, want %d", b.from, from, a.from)
	}
}

// A claim may jump to the front, but not over what this process has not looked at or has heard of.
func TestCursor_S9_FloorsHoldUntilTheyAreReached(t *testing.T) {
	t.Parallel()
	var c cursor
	claim := func(from, floor int64) *pass {
		t.Helper()
		p := c.begin(time.Now(), false)
		if p == nil {
			t.Fatal("nothing is looked for")
		}
		if p.from != from || p.floor != floor {
			t.Fatalf("a claim looks from %d, and jumps to %d at most; want %d and %d", p.from, p.floor, from, floor)
		}
		return p
	}
	c.found(claim(0, 0), 99, true, 5000)
	c.found(claim(100, 100), 5200, true, 5000) // others held all between
	c.found(claim(5201, noFloor), 7000, true, 6000)
	c.arrived(9000)
	c.found(claim(7001, 9000), 7500, true, 8000)
	c.found(claim(7501, 9000), 9000, true, 12000) // reached, but more of the same may be there
	c.found(claim(9001, 9001), 12000, true, 12000)

	// One goes to the front while another one looks at what came late.
	c.arrived(3000)
	late, ahead := claim(3000, 3000), claim(3000, noFloor)
	c.found(late, 3009, true, 15000)
	c.found(ahead, 15100, false, 15000)
	late = claim(3010, 3010)
	c.failed(late)
	c.found(claim(3010, 3010), 3015, false, 15000)
	if p := c.begin(time.Now(), false); p != nil && p.floor != noFloor {
		t.Errorf("after all was seen, a claim jumps to %d at most", p.floor)
	}

	deaf := cursor{next: 70, far: 70, floor: noFloor}
	if p := deaf.begin(time.Now(), true); p.floor != p.from {
		t.Errorf("a claim that hears nothing looks from %d, and jumps to %d", p.from, p.floor)
	}
}

func TestCursor_UnseenIsWhatNoClaimIsGoingToSee(t *testing.T) {
	t.Parallel()
	var c cursor
	want := func(wantFrom, wantBelow int64, recent bool) {
		t.Helper()
		if from, below := c.unseen(recent); from != wantFrom || below != wantBelow {
			t.Errorf("unseen (recent: %t) is [%d, %d), want [%d, %d)", recent, from, below, wantFrom, wantBelow)
		}
	}
	want(0, 0, false) // the first claim will look everywhere
	c.claimAt(100, true)
	want(0, 101, false)
	c.claimAt(150, false)
	want(0, maxPosition, false)
	want(0, maxPosition, true) // the cursor has not been here for long
	for i := range c.lookBack {
		c.lookBack[i] = 120 + int64(i)
	}
	want(120, maxPosition, true)
}

func TestCursor_LooksBackWhileDeaf(t *testing.T) {
	t.Parallel()
	var c cursor
	now := time.Now()
	for i := range lookBackSteps * 3 {
		now = now.Add(lookBackEvery)
		was := c.next
		p := c.begin(now, true)
		if lag := was - p.from; i > lookBackSteps && lag != int64(lookBackSteps)*10 {
			t.Fatalf("claim %d looks back by %d positions, want %d: those of %v ago", i, lag, lookBackSteps*10, lookBackSteps*lookBackEvery)
		}
		c.found(p, 0, false, 0) // nothing came late
		if c.next != was {
			t.Fatalf("after a look back that found nothing the cursor is at %d, want %d", c.next, was)
		}
		c.arrived(was)
		if p := c.begin(now, true); p.from != was {
			t.Fatalf("it looks back again at once, from %d to %d", was, p.from)
		} else {
			c.found(p, was+9, true, 0)
		}
	}
}
