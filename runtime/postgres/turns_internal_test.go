package postgres

import (
	"testing"
	"testing/synctest"
	"time"
)

// waitsOf says how often each turn is waited for by n claims, and fails if one takes first what is not among want.
func waitsOf(t *testing.T, taker *turnTaker, now time.Time, n int) map[turn]int {
	t.Helper()
	got := make(map[turn]int)
	for range n {
		next := taker.next(now)
		if next == nil {
			t.Fatal("no turn is left")
		}
		got[*next]++
	}
	return got
}

func TestTurnTaker_SpreadsOverTwoThatAreOpen(t *testing.T) {
	t.Parallel()
	now := time.Now()
	var taker turnTaker
	taker.init(time.Minute)
	want := func(now time.Time, a, b int32) {
		t.Helper()
		got := waitsOf(t, &taker, now, 100)
		if got[turn{a, b}] != 50 || got[turn{b, a}] != 50 {
			t.Errorf("turns %v, want %d and %d alike", got, a, b)
		}
	}
	want(now, 0, 1)
	taker.inVain(&turn{1, 0}, now)
	want(now, 1, 2)
	for i := range int32(turns) {
		taker.inVain(&turn{0, i}, now)
	}
	if next := taker.next(now); next != nil {
		t.Errorf("turn %v, though all were waited for in vain", *next)
	}
	const last = turns - 1
	taker.inVain(&turn{0, last}, now.Add(-shunned))
	if got := waitsOf(t, &taker, now, 10); got[turn{last, last}] != 10 {
		t.Errorf("turns %v, want the only one that is left, the last", got)
	}
	want(now.Add(shunned), 0, 1)
}

func TestTurnTaker_WaitsForAPartOfTheLease(t *testing.T) {
	t.Parallel()
	for lease, want := range map[time.Duration]string{
		time.Nanosecond: "1", 500 * time.Millisecond: "50", 5 * time.Second: "500", time.Hour: "1000",
	} {
		var taker turnTaker
		taker.init(lease)
		if got := taker.lockTimeout(); got != want {
			t.Errorf("with a lease of %v the wait is %s ms, want %s", lease, got, want)
		}
	}
}

func TestTurnTaker_IsCrowdedWhileItHasToWait(t *testing.T) {
	t.Parallel()
	now := time.Now()
	var taker turnTaker
	taker.init(time.Minute)
	taker.waited(crowdedFrom-1, now)
	if taker.crowded(now) {
		t.Error("crowded without a wait")
	}
	taker.waited(crowdedFrom, now)
	if !taker.crowded(now.Add(crowdedFor-1)) || taker.crowded(now.Add(crowdedFor)) {
		t.Error("want it crowded for a while after a wait")
	}
	taker.waited(0, now)
	if taker.crowded(now) {
		t.Error("crowded after a turn without a wait")
	}
	taker.inVain(&turn{0, 1}, now)
	if !taker.crowded(now) {
		t.Error("not crowded after a wait in vain")
	}
}

// In a crowded queue the calls of one process go one after the other, and none waits for long for one that hangs.
func TestFeed_S8_OneCallAtATimeWhileCrowded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var f feed
		f.turns.init(5 * time.Second)
		calls, enough := make(single, 1), make(chan struct{})
		enter := func() (leave func(), after time.Duration) {
			begun := time.Now()
			leave = f.alone(t.Context(), calls, enough)
			return leave, time.Since(begun)
		}
		for range 3 { // nobody waits, nobody leaves
			if _, after := enter(); after != 0 {
				t.Errorf("entered after %v, though it is not crowded", after)
			}
		}
		f.turns.waited(time.Second, time.Now())
		first, after := enter()
		if after != 0 {
			t.Errorf("the first entered after %v", after)
		}
		time.AfterFunc(100*time.Millisecond, first)
		second, after := enter()
		if after != 100*time.Millisecond {
			t.Errorf("the second entered after %v, want it when the first left", after)
		}
		third, after := enter()
		if after != f.turns.wait {
			t.Errorf("the third entered after %v, want it after %v beside the second", after, f.turns.wait)
		}
		third()
		second()
		if _, after := enter(); after != 0 {
			t.Errorf("entered after %v, though all have left", after)
		}
		time.AfterFunc(100*time.Millisecond, func() { close(enough) })
		if _, after := enter(); after != 100*time.Millisecond {
			t.Errorf("entered after %v, want it when it was enough", after)
		}
	})
}
