package memory_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

func deadLetters(t *testing.T, store *memory.Store, f leasebus.Filter) []leasebus.DeadLetter {
	t.Helper()
	d, err := store.DeadLetters(t.Context(), orders, f, "", 1000)
	if err != nil {
		t.Fatalf("dead letters: %v", err)
	}
	return d
}

// bury publishes messages and makes dead letters of them, in their order.
func bury(t *testing.T, store *memory.Store, out ...leasebus.Outgoing) []leasebus.DeadLetter {
	t.Helper()
	c := subscribe(t, store, "undertaker#1")
	publish(t, store, out...)
	for _, l := range c.lease(len(out)) {
		c.mustSettle(leasebus.Settlement{
			Lease: l, Kind: leasebus.SettleDeadLetter, Failure: failure("no stock"),
			Reason: leasebus.ReasonExhausted, DeadLetterQueue: "orders.dlq", Attempts: 1,
		})
	}
	all := deadLetters(t, store, leasebus.Filter{})
	return all[len(all)-len(out):]
}

func refs(letters ...leasebus.DeadLetter) []leasebus.DeadLetterRef {
	var r []leasebus.DeadLetterRef
	for _, d := range letters {
		r = append(r, leasebus.DeadLetterRef{ID: d.ID, Cursor: d.Cursor})
	}
	return r
}

func requeue(t *testing.T, store *memory.Store, refs ...leasebus.DeadLetterRef) []leasebus.Disposition {
	t.Helper()
	d, err := store.Requeue(t.Context(), orders, refs, "ann")
	if err != nil {
		t.Fatalf("requeue: %v", err)
	}
	return d
}

func wantDispositions(t *testing.T, got []leasebus.Disposition, want ...leasebus.Disposition) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("dispositions (-want +got):\n%s", diff)
	}
}

func TestDeadLetters_S32_PagesByCursor(t *testing.T) {
	t.Parallel()
	store := memory.New()
	var out []leasebus.Outgoing
	for i := range 7 {
		out = append(out, message(fmt.Sprint(i)))
	}
	all := bury(t, store, out...)

	// What happens between two pages neither hides a neighbour nor shows one twice.
	var seen []string
	var after leasebus.Cursor
	for page := 0; ; page++ {
		letters, err := store.DeadLetters(t.Context(), orders, leasebus.Filter{}, after, 3)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range letters {
			seen = append(seen, string(d.Payload))
		}
		if len(letters) < 3 {
			break
		}
		after = letters[2].Cursor
		if page == 0 {
			wantDispositions(t, requeue(t, store, refs(all[2], all[4])...), leasebus.DispositionDone, leasebus.DispositionDone)
		}
	}
	if want := []string{"0", "1", "2", "3", "5", "6"}; !slices.Equal(seen, want) {
		t.Errorf("saw %q, want %q", seen, want)
	}
	if letters, err := store.DeadLetters(t.Context(), orders, leasebus.Filter{}, all[6].Cursor, 3); err != nil || len(letters) != 0 {
		t.Errorf("behind the last: %d, %v; want none", len(letters), err)
	}
}

func TestDeadLetters_S32_Filters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		c := subscribe(t, store, "a#1")
		var ids []leasebus.ID
		for i, s := range []leasebus.Settlement{
			{Reason: leasebus.ReasonExhausted, DeadLetterQueue: "orders.dlq", Failure: failure("no stock")},
			{Reason: leasebus.ReasonInvalid, DeadLetterQueue: "orders.invalid", Failure: failure("no customer")},
			{Reason: leasebus.ReasonExhausted, DeadLetterQueue: "orders.dlq", Failure: failure("No stock")},
		} {
			out := message(fmt.Sprint(i))
			if i == 2 {
				out.Type = "orders.v1.Old"
			}
			publish(t, store, out)
			s.Lease, s.Kind = c.one(), leasebus.SettleDeadLetter
			ids = append(ids, s.Lease.ID)
			c.mustSettle(s)
			time.Sleep(time.Second)
		}
		all := deadLetters(t, store, leasebus.Filter{})
		for name, tt := range map[string]struct {
			filter leasebus.Filter
			want   string
		}{
			"all":                  {leasebus.Filter{}, "012"},
			"ids":                  {leasebus.Filter{IDs: []leasebus.ID{ids[2], ids[0], leasebus.NewID()}}, "02"},
			"type":                 {leasebus.Filter{Type: "orders.v1.Old"}, "2"},
			"reason":               {leasebus.Filter{Reason: leasebus.ReasonInvalid}, "1"},
			"route":                {leasebus.Filter{DeadLetterQueue: "orders.dlq"}, "02"},
			"error":                {leasebus.Filter{ErrorContains: "no stock"}, "0"},
			"since, included":      {leasebus.Filter{Since: all[1].DeadLetteredAt}, "12"},
			"before, excluded":     {leasebus.Filter{Before: all[1].DeadLetteredAt}, "0"},
			"up to, included":      {leasebus.Filter{UpTo: all[1].Cursor}, "01"},
			"up to the very first": {leasebus.Filter{UpTo: "0"}, ""},
			"several":              {leasebus.Filter{Reason: leasebus.ReasonExhausted, UpTo: all[1].Cursor}, "0"},
		} {
			got := ""
			for _, d := range deadLetters(t, store, tt.filter) {
				got += string(d.Payload)
			}
			if got != tt.want {
				t.Errorf("%s: found %q, want %q", name, got, tt.want)
			}
		}
	})
}

func TestDeadLetters_S34_TheCutOffLeavesOutWhatComesLater(t *testing.T) {
	t.Parallel()
	store := memory.New()
	cutOff := func() leasebus.Cursor {
		c, err := store.LastDeadLetter(t.Context(), orders)
		if err != nil || c == "" {
			t.Fatalf("last dead letter: %q, %v; want a position that is not empty", c, err)
		}
		return c
	}
	none := cutOff() // of a queue that does not exist
	first := bury(t, store, message("1"))
	one := cutOff()
	if one != first[0].Cursor {
		t.Errorf("cut-off %q, the newest is at %q", one, first[0].Cursor)
	}
	requeue(t, store, refs(first...)...)
	if gone := cutOff(); gone != one {
		t.Errorf("cut-off %q, want %q after the newest is gone", gone, one)
	}
	bury(t, store, message("2")) // takes "1" along: it is due
	if d := deadLetters(t, store, leasebus.Filter{UpTo: none}); len(d) != 0 {
		t.Errorf("%d dead letters up to a cut-off at none", len(d))
	}
	if d := deadLetters(t, store, leasebus.Filter{UpTo: one}); len(d) != 0 {
		t.Errorf("%d dead letters up to a cut-off before them", len(d))
	}
}

func TestDeadLetters_AreCopies(t *testing.T) {
	t.Parallel()
	store := memory.New()
	first := bury(t, store, message("m"))
	before := first[0].History[0]
	requeue(t, store, refs(first...)...)
	c := subscribe(t, store, "a#1")
	for i := range leasebus.HistoryLimit + 1 {
		c.mustSettle(leasebus.Settlement{Lease: c.one(), Kind: leasebus.SettleRetry, Failure: failure(fmt.Sprint(i))})
	}
	if first[0].History[0] != before || len(first[0].Requeues) != 0 {
		t.Errorf("a listing changed under its reader: %+v", first[0])
	}
}

func TestOperator_BadInputIsAnError(t *testing.T) {
	t.Parallel()
	store := memory.New()
	letter := bury(t, store, message("m"))[0]
	bad := []leasebus.DeadLetterRef{{ID: letter.ID}, {ID: letter.ID, Cursor: "x"}}
	edited, twin, elsewhere := message("new").Envelope, message("new").Envelope, message("new").Envelope
	twin.ID = letter.ID
	elsewhere.Queue = "invoices"
	var none leasebus.Envelope
	none.Queue = orders
	replace := func(ref leasebus.DeadLetterRef, e leasebus.Envelope) error {
		_, err := store.Replace(t.Context(), orders, ref, &e, "ann")
		return err
	}
	for name, err := range map[string]error{
		"limit 0":             second(store.DeadLetters(t.Context(), orders, leasebus.Filter{}, "", 0)),
		"cursor":              second(store.DeadLetters(t.Context(), orders, leasebus.Filter{}, "-1", 1)),
		"cut-off":             second(store.DeadLetters(t.Context(), orders, leasebus.Filter{UpTo: "1.5"}, "", 1)),
		"requeue":             second(store.Requeue(t.Context(), orders, bad, "ann")),
		"discard":             second(store.Discard(t.Context(), orders, bad, "ann")),
		"replace":             replace(bad[1], edited),
		"edited with its id":  replace(bad[0], twin),
		"edited without id":   replace(bad[0], none),
		"edited of elsewhere": replace(bad[0], elsewhere),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for name, e := range map[string]leasebus.Envelope{"its id": twin, "no id": none, "elsewhere": elsewhere} {
		if err := replace(bad[0], e); !errors.Is(err, leasebus.ErrInvalidEnvelope) {
			t.Errorf("%s: %v, want ErrInvalidEnvelope", name, err)
		}
	}
	wantStats(t, store, leasebus.QueueStats{DeadLettered: 1})
}

func second[T any](_ T, err error) error { return err }

func TestOperator_AQueueThatIsNotThereHasNothing(t *testing.T) {
	t.Parallel()
	store := memory.New()
	wantStats(t, store, leasebus.QueueStats{})
	if d := deadLetters(t, store, leasebus.Filter{}); len(d) != 0 {
		t.Errorf("%d dead letters", len(d))
	}
	wantDispositions(t, requeue(t, store, leasebus.DeadLetterRef{ID: leasebus.NewID()}), leasebus.DispositionNotFound)
	edited := message("new").Envelope
	if d, err := store.Replace(t.Context(), orders, leasebus.DeadLetterRef{ID: leasebus.NewID()}, &edited, "ann"); err != nil || d != leasebus.DispositionNotFound {
		t.Errorf("replace: %v, %v; want not found", d, err)
	}
}

func TestRequeue_S33_WorkBeginsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		c := subscribe(t, store, "a#1")
		publishText(t, store, "m")
		published := time.Now()
		time.Sleep(time.Minute)
		l := c.one()
		c.mustSettle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRelease, Started: true})
		l = c.one()
		c.mustSettle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleDeadLetter, Failure: failure("no stock"), Attempts: 1})
		time.Sleep(time.Minute)
		requeued := time.Now()
		wantDispositions(t, requeue(t, store, leasebus.DeadLetterRef{ID: l.ID}), leasebus.DispositionDone)
		wantStats(t, store, leasebus.QueueStats{Pending: 1, Due: 1})
		time.Sleep(time.Second)

		again := c.one()
		if again.Attempt != 1 || again.Interruptions != 0 || again.Crashed || again.Age != time.Second || !again.FirstDue.Equal(published) {
			t.Errorf("attempt %d, interruptions %d, crashed %t, age %v, first due %v; want 1, 0, false, 1s, %v",
				again.Attempt, again.Interruptions, again.Crashed, again.Age, again.FirstDue, published)
		}
		if want := l.Generation + 2; again.Generation != want { // the operator's action and the lease
			t.Errorf("generation %d, want %d", again.Generation, want)
		}
		if got := c.settle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleComplete}); got != leasebus.ResultLost {
			t.Errorf("completion by the worker of before: result %d, want Lost", got)
		}
		c.mustSettle(leasebus.Settlement{Lease: again, Kind: leasebus.SettleDeadLetter, Failure: failure("again"), Attempts: 1})
		d := deadLetters(t, store, leasebus.Filter{})[0]
		if len(d.History) != 2 || d.History[0].Text != "no stock" || d.History[1].Text != "again" {
			t.Errorf("history %+v, want both failures", d.History)
		}
		if diff := cmp.Diff([]leasebus.RequeueRecord{{By: "ann", At: requeued.UTC()}}, d.Requeues); diff != "" {
			t.Errorf("requeues (-want +got):\n%s", diff)
		}
		if d.Cursor != "2" {
			t.Errorf("cursor %q, want a new position: 2", d.Cursor)
		}
	})
}

func TestRequeue_S33_SaysWhyNot(t *testing.T) {
	t.Parallel()
	store := memory.New()
	letters := bury(t, store, message("listed"), message("gone"), message("gone for good"))
	requeue(t, store, refs(letters[1])...)
	if _, err := store.Discard(t.Context(), orders, refs(letters[2]), "ann"); err != nil {
		t.Fatal(err)
	}
	live, leased, later := message("pending"), message("leased"), message("later")
	later.Delay = time.Hour
	c := subscribe(t, store, "a#1", func(p *leasebus.Policy) { p.RetainCompleted = time.Hour })
	publish(t, store, leased)
	l := c.lease(2) // "gone", requeued, and "leased"
	c.mustSettle(leasebus.Settlement{Lease: l[0], Kind: leasebus.SettleRelease})
	publish(t, store, later, live)

	got := requeue(t, store,
		refs(letters[0])[0],
		refs(letters[0])[0], // a second time in one call
		leasebus.DeadLetterRef{ID: letters[0].ID},
		refs(letters[1])[0],
		leasebus.DeadLetterRef{ID: letters[1].ID},
		refs(letters[2])[0],
		leasebus.DeadLetterRef{ID: letters[2].ID},
		leasebus.DeadLetterRef{ID: live.ID},
		leasebus.DeadLetterRef{ID: leased.ID},
		leasebus.DeadLetterRef{ID: later.ID},
		leasebus.DeadLetterRef{ID: leasebus.NewID()},
		leasebus.DeadLetterRef{ID: leasebus.NewID(), Cursor: letters[0].Cursor},
	)
	wantDispositions(t, got,
		leasebus.DispositionDone,
		leasebus.DispositionMoved,
		leasebus.DispositionNotDeadLettered,
		leasebus.DispositionMoved,
		leasebus.DispositionNotDeadLettered,
		leasebus.DispositionNotFound,
		leasebus.DispositionNotFound,
		leasebus.DispositionNotDeadLettered,
		leasebus.DispositionNotDeadLettered,
		leasebus.DispositionNotDeadLettered,
		leasebus.DispositionNotFound,
		leasebus.DispositionNotFound,
	)
	c.mustSettle(leasebus.Settlement{Lease: l[1], Kind: leasebus.SettleComplete})
	wantDispositions(t, requeue(t, store, leasebus.DeadLetterRef{ID: leased.ID}), leasebus.DispositionNotDeadLettered) // completed, retained
	if got := requeue(t, store); len(got) != 0 {
		t.Errorf("%d dispositions of no references", len(got))
	}
}

// Two rows with one id: published again after an unknown outcome.
func TestTwins_S33_AreActedOnTogether(t *testing.T) {
	synctest.Test(t, twinsAreActedOnTogether)
}

func twinsAreActedOnTogether(t *testing.T) {
	store := memory.New()
	twin := message("twin")
	c := subscribe(t, store, "a#1")
	publish(t, store, twin, message("other"), twin)
	all := c.lease(5)
	wantPayloads(t, all, "twin", "other", "twin")
	for _, l := range all { // each on its own, as far as leases go
		c.mustSettle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Failure: failure("x")})
	}
	for _, l := range c.lease(5) {
		if l.Attempt != 2 || l.Generation != 2 {
			t.Errorf("%s: attempt %d, generation %d; want 2, 2", l.Payload, l.Attempt, l.Generation)
		}
		c.mustSettle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleDeadLetter, Failure: failure("x")})
	}

	letters := deadLetters(t, store, leasebus.Filter{IDs: []leasebus.ID{twin.ID}})
	if len(letters) != 2 || letters[0].Cursor == letters[1].Cursor {
		t.Fatalf("%d dead letters %+v, want 2 at positions of their own", len(letters), letters)
	}
	ref := leasebus.DeadLetterRef{ID: twin.ID}
	wantDispositions(t, requeue(t, store, ref), leasebus.DispositionDone)
	wantStats(t, store, leasebus.QueueStats{Pending: 2, Due: 2, DeadLettered: 1})
	for _, l := range c.lease(5) {
		c.mustSettle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleDeadLetter})
	}

	// One of them by its position only.
	letters = deadLetters(t, store, leasebus.Filter{IDs: []leasebus.ID{twin.ID}})
	wantDispositions(t, requeue(t, store, refs(letters[0])...), leasebus.DispositionDone)
	wantStats(t, store, leasebus.QueueStats{Pending: 1, Due: 1, DeadLettered: 2})
	c.mustSettle(leasebus.Settlement{Lease: c.one(), Kind: leasebus.SettleDeadLetter})

	edited := message("edited").Envelope
	if d, err := store.Replace(t.Context(), orders, ref, &edited, "ann"); err != nil || d != leasebus.DispositionDone {
		t.Fatalf("replace: %v, %v", d, err)
	}
	for _, d := range deadLetters(t, store, leasebus.Filter{IDs: []leasebus.ID{twin.ID}}) {
		if d.ReplacedBy != edited.ID {
			t.Errorf("the twin at %s is replaced by %v, want %v", d.Cursor, d.ReplacedBy, edited.ID)
		}
	}
	wantPayloads(t, c.lease(5), "edited")
	if d, err := store.Discard(t.Context(), orders, []leasebus.DeadLetterRef{ref}, "ann"); err != nil || d[0] != leasebus.DispositionDone {
		t.Fatalf("discard: %v, %v", d, err)
	}
	if d := deadLetters(t, store, leasebus.Filter{}); len(d) != 1 || string(d[0].Payload) != "other" {
		t.Errorf("%d dead letters are left, want the other one", len(d))
	}
}

func TestReplace_S35_OnceAndForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		original := message("wrong")
		original.IdempotencyKey = "order 7"
		letter := bury(t, store, original)[0]
		time.Sleep(time.Minute)

		edited := message("right").Envelope
		edited.Headers = leasebus.NewHeaders(map[string]string{leasebus.HeaderReplaces: letter.ID.String()})
		edited.IdempotencyKey = "something else"
		d, err := store.Replace(t.Context(), orders, refs(letter)[0], &edited, "ann")
		if err != nil || d != leasebus.DispositionDone {
			t.Fatalf("replace: %v, %v; want done", d, err)
		}
		wantStats(t, store, leasebus.QueueStats{Pending: 1, Due: 1, DeadLettered: 1})
		now := deadLetters(t, store, leasebus.Filter{})[0]
		if now.ReplacedBy != edited.ID || now.Cursor != letter.Cursor || now.Generation != letter.Generation+1 {
			t.Errorf("replaced by %v at %s, generation %d; want %v at %s, %d",
				now.ReplacedBy, now.Cursor, now.Generation, edited.ID, letter.Cursor, letter.Generation+1)
		}
		if len(now.Requeues) != 1 || now.Requeues[0].By != "ann" {
			t.Errorf("operator actions %+v, want one by ann", now.Requeues)
		}

		wantDispositions(t, requeue(t, store, refs(letter)[0], leasebus.DeadLetterRef{ID: letter.ID}),
			leasebus.DispositionReplaced, leasebus.DispositionReplaced)
		once := message("twice").Envelope
		if d, err := store.Replace(t.Context(), orders, refs(letter)[0], &once, "bob"); err != nil || d != leasebus.DispositionReplaced {
			t.Errorf("a second replacement: %v, %v; want replaced", d, err)
		}

		c := subscribe(t, store, "a#1")
		l := c.one()
		if string(l.Payload) != "right" || l.ID != edited.ID || l.IdempotencyKey != "order 7" || l.Attempt != 1 || l.Generation != 1 || l.Age != 0 {
			t.Errorf("leased %q, key %q, attempt %d, generation %d, age %v; want right, order 7, 1, 1, 0",
				l.Payload, l.IdempotencyKey, l.Attempt, l.Generation, l.Age)
		}
		if l.Headers.Get(leasebus.HeaderReplaces) != letter.ID.String() {
			t.Errorf("the edited message does not name what it replaces")
		}
		if d, err := store.Discard(t.Context(), orders, refs(letter), "ann"); err != nil || d[0] != leasebus.DispositionDone {
			t.Errorf("discarding what was replaced: %v, %v; want done", d, err)
		}
	})
}

func TestStats_CountsByState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		c := subscribe(t, store, "a#1", func(p *leasebus.Policy) { p.RetainCompleted = time.Hour })
		publishText(t, store, "completed", "dead", "failed", "failed and due", "stuck", "processing", "deferred")
		l := c.lease(7)
		for i, s := range []leasebus.Settlement{
			{Kind: leasebus.SettleComplete},
			{Kind: leasebus.SettleDeadLetter},
			{Kind: leasebus.SettleRetry, Delay: time.Hour},
			{Kind: leasebus.SettleRetry, Delay: time.Second},
		} {
			s.Lease = l[i]
			c.mustSettle(s)
		}
		c.mustSettle(leasebus.Settlement{Lease: l[6], Kind: leasebus.SettleDefer, Delay: time.Hour})
		time.Sleep(lease - time.Second)
		c.renew(l[5])
		publishText(t, store, "pending")
		time.Sleep(time.Second)
		wantStats(t, store, leasebus.QueueStats{
			Pending: 2, Processing: 2, Failed: 2, DeadLettered: 1, Completed: 1,
			Due: 2, OldestDueAge: lease - time.Second, Stuck: 1,
		})
	})
}

func TestCompleted_S32_PagesWithWhatHappened(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		keep := func(p *leasebus.Policy) { p.RetainCompleted = time.Hour }
		dead := bury(t, store, message("first"))
		c := subscribe(t, store, "worker#1", keep)
		requeue(t, store, refs(dead...)...)
		publishText(t, store, "second", "third")

		first := c.lease(1)[0]
		c.mustSettle(leasebus.Settlement{Lease: first, Kind: leasebus.SettleRetry, Failure: failure("no stock")})
		for _, l := range c.lease(3) {
			c.mustSettle(leasebus.Settlement{Lease: l, Kind: leasebus.SettleComplete})
		}

		var seen []leasebus.CompletedMessage
		for after := leasebus.Cursor(""); ; {
			page, err := store.Completed(t.Context(), orders, after, 2)
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, page...)
			if len(page) < 2 {
				break
			}
			after = page[1].Cursor
		}
		if len(seen) != 3 || string(seen[0].Payload) != "second" || string(seen[2].Payload) != "first" {
			t.Fatalf("completed: %+v, want second, third, first", seen)
		}
		if m := seen[2]; m.ID != dead[0].ID || m.Attempts != 2 || len(m.History) != 2 || len(m.Requeues) != 1 ||
			m.Requeues[0].By != "ann" || !m.CompletedAt.Equal(store.Now()) {
			t.Errorf("requeued and retried, but completed as %+v", m)
		}

		store.Advance(time.Hour)
		if page, err := store.Completed(t.Context(), orders, "", 9); err != nil || len(page) > 0 {
			t.Errorf("after the retention: %+v, %v", page, err)
		}
	})
}
