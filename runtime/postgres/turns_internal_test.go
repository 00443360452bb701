package postgres

import (
	"testing"
	"time"
)

// numbersOf takes n turns.
func numbersOf(t *testing.T, taker *turnTaker, now time.Time, n int) map[int32]int {
	t.Helper()
	got := make(map[int32]int)
	for range n {
		next := taker.next(now, time.Minute)
		if next == nil {
			t.Fatal("no turn is left")
		}
		got[next.number]++
	}
	return got
}

func TestTurnTaker(t *testing.T) {
	t.Parallel()
	now := time.Now()
	var taker turnTaker
	if got := numbersOf(t, &taker, now, 100); got[0] != 50 || got[1] != 50 {
		t.Errorf("turns %v, want the first two alike", got)
	}
	taker.inVain(&turn{number: 0}, now)
	if got := numbersOf(t, &taker, now, 100); got[1] != 50 || got[2] != 50 {
		t.Errorf("turns %v, want the second and the third", got)
	}
	for i := range int32(turns) {
		taker.inVain(&turn{number: i}, now)
	}
	if next := taker.next(now, time.Minute); next != nil {
		t.Errorf("turn %d, though all were waited for in vain", next.number)
	}
	taker.inVain(&turn{number: turns - 1}, now.Add(-shunned))
	if got := numbersOf(t, &taker, now, 10); got[turns-1] != 10 {
		t.Errorf("turns %v, want the only one that is left, the last", got)
	}
	if got := numbersOf(t, &taker, now.Add(shunned), 100); got[0] != 50 || got[1] != 50 {
		t.Errorf("turns %v, want the first two again, after a while", got)
	}
}

func TestTurnTaker_WaitsForAPartOfTheLease(t *testing.T) {
	t.Parallel()
	for lease, want := range map[time.Duration]string{
		time.Nanosecond: "1", 500 * time.Millisecond: "50", 5 * time.Second: "500", time.Hour: "1000",
	} {
		var taker turnTaker
		if got := taker.next(time.Now(), lease).wait; got != want {
			t.Errorf("with a lease of %v the wait is %s ms, want %s", lease, got, want)
		}
	}
}
