package postgres

import (
	"testing"
	"time"
)

func testCursor() *cursor {
	c := &cursor{sweepEvery: time.Hour}
	c.claimFrom(time.Now(), false) // the first claim is a sweep
	return c
}

func TestCursor_FollowsTheClaims(t *testing.T) {
	t.Parallel()
	c := testCursor()
	for _, step := range []struct {
		top  int64
		full bool
		next int64
	}{
		{100, true, 101},
		{150, false, 151},
		{40, false, 151}, // what was found behind was all there is
		{40, true, 41},   // there may be more: a late batch is drained at full speed
	} {
		_, was := c.claimFrom(time.Now(), false)
		c.advance(was, step.top, step.full)
		if from, _ := c.claimFrom(time.Now(), false); from != step.next {
			t.Errorf("after a claim up to %d (full: %t) the next one begins at %d, want %d", step.top, step.full, from, step.next)
		}
	}
}

func TestCursor_AnArrivalDuringAClaimStands(t *testing.T) {
	t.Parallel()
	c := testCursor()
	c.advance(0, 100, true)
	_, was := c.claimFrom(time.Now(), false)
	c.arrived(50) // committed late
	c.advance(was, 200, true)
	if from, _ := c.claimFrom(time.Now(), false); from != 50 {
		t.Errorf("the next claim begins at %d, want 50", from)
	}
	c.arrived(70)
	if from, _ := c.claimFrom(time.Now(), false); from != 50 {
		t.Errorf("an arrival in front moved the cursor to %d", from)
	}
}

// Nothing is ever below the low-water mark: not what a transaction that is still open will add.
func TestCursor_LowWaterWaitsForOpenTransactions(t *testing.T) {
	t.Parallel()
	c := testCursor()
	want := func(low int64) {
		t.Helper()
		if got, _ := c.lowMark(time.Now()); got != low {
			t.Fatalf("low-water mark %d, want %d", got, low)
		}
	}
	c.mark(0, 0, 1000, 500, 501) // transaction 500 is open: it may hold any position below 1000
	want(0)
	c.mark(0, 0, 1500, 500, 600)
	want(0)
	c.mark(0, 700, 2000, 600, 601) // it has ended, and left something at 700
	want(700)
	c.mark(0, 0, 9000, 700, 701) // an answer to an older question
	want(700)
	c.mark(700, 0, 3000, 700, 701) // 2000 was reached when 600 was the newest
	want(2000)
	c.mark(2000, 1, 4000, 800, 801) // marks never go back
	want(2000)
}

func TestCursor_SweepsFromTheMarkAndSometimesFromTheBeginning(t *testing.T) {
	t.Parallel()
	c := testCursor()
	c.low, c.next = 500, 900
	c.sweepSoon(false)
	if from, _ := c.claimFrom(time.Now(), false); from != 500 {
		t.Errorf("a sweep begins at %d, want the low-water mark 500", from)
	}
	if from, _ := c.claimFrom(time.Now(), false); from != 900 {
		t.Errorf("after a sweep claims begin at %d, want the cursor 900", from)
	}
	c.sweepSoon(true)
	if from, _ := c.claimFrom(time.Now(), false); from != 0 {
		t.Errorf("a whole sweep begins at %d, want 0", from)
	}
	c.sweepSoon(false)
	if from, _ := c.claimFrom(time.Now().Add(2*wholeEvery), false); from != 0 {
		t.Errorf("after %v a sweep begins at %d, want 0", 2*wholeEvery, from)
	}
}

func TestCursor_LooksBackWhileDeaf(t *testing.T) {
	t.Parallel()
	c := testCursor()
	now := time.Now()
	for i := range lookBackSteps * 3 {
		now = now.Add(lookBackEvery)
		from, was := c.claimFrom(now, true)
		if lag := was - from; i > lookBackSteps && lag != int64(lookBackSteps)*10 {
			t.Fatalf("claim %d looks back by %d positions, want %d: those of %v ago", i, lag, lookBackSteps*10, lookBackSteps*lookBackEvery)
		}
		if from, was := c.claimFrom(now, true); from != was {
			t.Fatalf("it looks back again at once, from %d to %d", was, from)
		}
		c.advance(was, was+9, true)
	}
}
