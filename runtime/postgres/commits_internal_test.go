package postgres

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestCommits_S62_AnnounceWhatHasCommitted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var c commits
		c.init(&Inbox{closed: true}) // nothing runs by itself
		c.await("7", []arrival{{queue: 1, pos: 50}, {queue: 2, due: time.Minute}})
		c.await("8", []arrival{{queue: 1, pos: 60}})
		c.await("9", []arrival{{queue: 1, pos: 70}})
		time.Sleep(10 * time.Second)
		c.await("7", []arrival{{queue: 1, pos: 80}, {queue: 2, due: 55 * time.Second}, {queue: 3, pos: 90}})
		transactions, hints := c.due()
		if want := []string{"1:0:50:0:0", "1:0:60:0:0", "1:0:70:0:0", "2:0:0:50000000:0", "3:0:90:0:0"}; len(transactions) != len(want) || !slices.Equal(slices.Sorted(slices.Values(hints)), want) {
			t.Errorf("hints %v for %v, want %v", hints, transactions, want)
		}
		got := c.ended(map[string]string{"7": "committed", "8": "aborted", "9": "in progress"})
		slices.SortFunc(got, func(a, b arrival) int { return int(a.queue - b.queue) })
		want := []arrival{{queue: 1, pos: 50}, {queue: 2, due: 50 * time.Second}, {queue: 3, pos: 90}}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(arrival{})); diff != "" {
			t.Errorf("announced (-want +got)\n%s", diff)
		}
		time.Sleep(time.Second)
		c.await("9", []arrival{{queue: 4, pos: 100}})
		if got := c.ended(map[string]string{"9": "committed"}); len(got) > 0 {
			t.Errorf("what was published after the question is forgotten with %v", got)
		}
		c.due()
		if got := c.ended(map[string]string{"9": ""}); len(got) != 2 {
			t.Errorf("of a transaction that nobody knows any more, %v is announced", got)
		}
		if len(c.open) > 0 {
			t.Errorf("%d transactions are waited for still", len(c.open))
		}
	})
}

// A transaction is looked for soon, and less often the longer it lasts; what comes meanwhile hurries that along.
func TestCommits_S62_LooksLessAndLessOften(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var c commits
		c.init(&Inbox{closed: true})
		began := time.Now()
		var looks []time.Duration
		lookUntil := func(end time.Duration) {
			for time.Since(began) < end {
				wait, open := c.wait()
				if !open {
					t.Fatal("nothing is waited for")
				}
				time.Sleep(wait)
				if transactions, _ := c.due(); len(transactions) == 1 {
					looks = append(looks, time.Since(began))
				}
			}
		}
		c.await("1", []arrival{{queue: 1, pos: 1}})
		lookUntil(4 * time.Second)
		if n := len(looks); n < 40 || n > 80 || looks[0] > 2*commitFirst || looks[n-1]-looks[n-2] != commitMost {
			t.Errorf("%d looks, the last of them %v apart: %v", n, looks[n-1]-looks[n-2], looks)
		}
		c.await("1", []arrival{{queue: 1, pos: 2}})
		looks = nil
		lookUntil(time.Since(began) + 100*time.Millisecond)
		if n := len(looks); n < 5 {
			t.Errorf("%d looks in the 100 ms after another publish: %v", n, looks)
		}
	})
}
