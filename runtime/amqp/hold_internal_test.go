package amqp

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestHold_S40_moves_leave_when_they_are_due_and_as_they_came(t *testing.T) {
	t.Parallel()
	start := time.Unix(1000, 0)
	rapid.Check(t, func(t *rapid.T) {
		var h hold
		type kept struct {
			due  time.Time
			move *move
		}
		var model []kept // in order of their coming
		now := start
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"add", "take", "local"}).Draw(t, "step") {
			case "add":
				m := &move{local: rapid.Bool().Draw(t, "local")}
				due := start.Add(time.Duration(rapid.IntRange(0, 20).Draw(t, "due")) * time.Second)
				h.add(m, due)
				model = append(model, kept{due, m})
			case "take":
				now = now.Add(time.Duration(rapid.IntRange(0, 3).Draw(t, "pass")) * time.Second)
				slices.SortStableFunc(model, func(a, b kept) int { return a.due.Compare(b.due) })
				for m := h.take(now); m != nil; m = h.take(now) {
					if len(model) == 0 || model[0].move != m || model[0].due.After(now) {
						t.Fatalf("took a move that is not the next one")
					}
					model = model[1:]
				}
				if len(model) > 0 && !model[0].due.After(now) {
					t.Fatalf("a move that is due at %v stays at %v", model[0].due, now)
				}
			case "local":
				slices.SortStableFunc(model, func(a, b kept) int { return a.due.Compare(b.due) })
				var want []*move
				model = slices.DeleteFunc(model, func(k kept) bool {
					if k.move.local {
						want = append(want, k.move)
					}
					return k.move.local
				})
				if got := h.takeAll(func(m *move) bool { return m.local }); !slices.Equal(got, want) {
					t.Fatalf("took %d local moves, want %d, the first one first", len(got), len(want))
				}
			}
			if h.len() != len(model) {
				t.Fatalf("holds %d, want %d", h.len(), len(model))
			}
			next, ok := h.next()
			slices.SortStableFunc(model, func(a, b kept) int { return a.due.Compare(b.due) })
			if ok != (len(model) > 0) || ok && !next.Equal(model[0].due) {
				t.Fatalf("next is %v (%v), want that of %d moves", next, ok, len(model))
			}
		}
	})
}

func TestConsumeOptions_S40_budget_is_half_of_the_prefetch_at_most(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ asked, concurrency, want int }{{0, 64, 128}, {10, 64, 10}, {500, 64, 128}, {1, 1, 1}, {0, 1, 2}} {
		if got := (consumeOptions{budget: tt.asked}).budgetFor(tt.concurrency); got != tt.want {
			t.Errorf("budget of %d asked for, concurrency %d: %d, want %d", tt.asked, tt.concurrency, got, tt.want)
		}
	}
	for name, opt := range map[string]Option{"hold budget": WithHoldBudget(0), "crash limit": WithCrashLimit(0)} {
		if _, err := optionsOf([]Option{opt}); err == nil {
			t.Errorf("%s of 0 was taken", name)
		}
	}
}

func TestSuspectWait_S10_suspects_are_spread_ever_wider(t *testing.T) {
	t.Parallel()
	for crashes, slots := range map[int]int{0: 1, 1: 1, 2: 4, 3: 8, 4: 16, 5: 16, 20: 16, 1 << 30: 16} {
		seen := make(map[time.Duration]bool)
		for range 2000 {
			seen[suspectWait(crashes)] = true
		}
		if len(seen) != slots {
			t.Errorf("after %d crashes: %d different waits, want %d", crashes, len(seen), slots)
		}
		for wait := range seen {
			if wait < 0 || wait%time.Second != 0 || wait >= time.Duration(slots)*time.Second {
				t.Errorf("after %d crashes: a wait of %v, want whole seconds below %d", crashes, wait, slots)
			}
		}
	}
}
