package memory_test

import (
	"fmt"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// TestModel runs random operations against the store and against the simplest thing that obeys the same rules: a slice
// of rows that is searched from end to end each time. Whatever the operations were,
//
//   - the answers of the two are the same, so a stale lease changes nothing and each message ends once;
//   - a generation only grows;
//   - every row that has not ended is leased at a finite time, without anyone's help.
func TestModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // for a clock that stands still between two operations
		// rapid would ask t for its deadline, which a bubble does not have.
		rapid.Check(struct{ rapid.TB }{t}, func(rt *rapid.T) {
			m := newModel(t, rt)
			defer m.close()
			rt.Repeat(map[string]func(*rapid.T){
				"":        m.check,
				"publish": m.publish,
				"lease":   m.lease,
				"renew":   m.renew,
				"settle":  m.settle,
				"advance": m.advance,
				"requeue": m.requeue,
				"discard": m.discard,
				"replace": m.replace,
			})
			m.finish()
		})
	})
}

type modelState string

const (
	waiting  modelState = "waiting"
	working  modelState = "working"
	dead     modelState = "dead"
	finished modelState = "finished" // completed or discarded
)

type modelRow struct {
	id            leasebus.ID
	state         modelState
	failed        bool // of waiting
	due           time.Time
	ageFrom       time.Time
	generation    int64
	attempt       int
	interruptions int
	crashed       bool
	failures      int
	cursor        leasebus.Cursor // of dead
	replaced      bool
}

type modelLease struct {
	row   int
	lease *leasebus.Lease
	feed  int
}

type model struct {
	t      *testing.T
	rt     *rapid.T
	store  *memory.Store
	feeds  []leasebus.Feed
	rows   []*modelRow // a row's index is its message's payload
	leases []modelLease
}

func newModel(t *testing.T, rt *rapid.T) *model {
	m := &model{t: t, rt: rt, store: memory.New()}
	for range 2 {
		feed, err := m.store.Subscribe(t.Context(), leasebus.Subscription{Queue: orders, Owner: "same#1", Policy: policy()})
		if err != nil {
			rt.Fatal(err)
		}
		m.feeds = append(m.feeds, feed)
	}
	return m
}

func (m *model) close() {
	for _, f := range m.feeds {
		_ = f.Close()
	}
}

func (m *model) fail(err error) {
	if err != nil {
		m.rt.Fatal(err)
	}
}

func (m *model) publish(rt *rapid.T) {
	n := rapid.IntRange(1, 20).Draw(rt, "n")
	out := make([]leasebus.Outgoing, n)
	for i := range out {
		out[i] = message(strconv.Itoa(len(m.rows)))
		if len(m.rows) > 0 && rapid.IntRange(0, 4).Draw(rt, "twin") == 0 {
			out[i].ID = m.rows[rapid.IntRange(0, len(m.rows)-1).Draw(rt, "of")].id
		}
		out[i].Delay = m.delay(rt)
		due := m.store.Now().Add(max(0, out[i].Delay))
		m.rows = append(m.rows, &modelRow{id: out[i].ID, state: waiting, due: due, ageFrom: due})
	}
	m.fail(m.store.Publish(m.t.Context(), out, make([]leasebus.Receipt, n)))
}

func (m *model) delay(rt *rapid.T) time.Duration {
	return time.Duration(rapid.IntRange(-10, 60).Draw(rt, "seconds")) * time.Second
}

func (m *model) leasable(r *modelRow) bool {
	return (r.state == waiting || r.state == working) && !r.due.After(m.store.Now())
}

func (m *model) lease(rt *rapid.T) {
	feed := rapid.IntRange(0, 1).Draw(rt, "feed")
	m.leaseFrom(feed, rapid.IntRange(1, 8).Draw(rt, "room"))
}

func (m *model) leaseFrom(feed, room int) []modelLease {
	want := 0
	for _, r := range m.rows {
		if m.leasable(r) {
			want++
		}
	}
	dst := make([]leasebus.Lease, room)
	n, err := m.feeds[feed].Lease(m.t.Context(), dst)
	m.fail(err)
	if n != min(want, room) {
		m.rt.Fatalf("leased %d with room for %d, but %d rows can be leased", n, room, want)
	}
	now := m.store.Now()
	for i := range n {
		index, err := strconv.Atoi(string(dst[i].Payload))
		m.fail(err)
		r := m.rows[index]
		if !m.leasable(r) {
			m.rt.Fatalf("leased row %d, which is %s until %v", index, r.state, r.due)
		}
		r.crashed = r.crashed || r.state == working
		r.state, r.due = working, now.Add(lease)
		r.generation++
		r.attempt++
		got := fmt.Sprint(dst[i].ID, dst[i].Generation, dst[i].Attempt, dst[i].Crashed, dst[i].Interruptions, dst[i].Age)
		if want := fmt.Sprint(r.id, r.generation, r.attempt, r.crashed, r.interruptions, now.Sub(r.ageFrom)); got != want {
			m.rt.Fatalf("row %d: leased as %s, want %s (id, generation, attempt, crashed, interruptions, age)", index, got, want)
		}
		m.leases = append(m.leases, modelLease{index, &dst[i], feed})
	}
	return m.leases[len(m.leases)-n:]
}

// anyLease is one that was given at some time: mostly a stale one.
func (m *model) anyLease(rt *rapid.T) (held modelLease, valid bool) {
	if len(m.leases) == 0 {
		rt.Skip("no lease was given yet")
	}
	// The newest ones are the likeliest to be held.
	i := len(m.leases) - 1 - rapid.IntRange(0, len(m.leases)-1).Draw(rt, "lease")
	held = m.leases[i]
	r := m.rows[held.row]
	return held, r.state == working && r.generation == held.lease.Generation
}

func expect(valid bool) leasebus.Result {
	if valid {
		return leasebus.ResultOK
	}
	return leasebus.ResultLost
}

func (m *model) renew(rt *rapid.T) {
	held, valid := m.anyLease(rt)
	batch := []leasebus.Renewal{{Lease: held.lease}}
	m.fail(m.feeds[held.feed].Renew(m.t.Context(), batch))
	if batch[0].Result != expect(valid) {
		rt.Fatalf("renewal of row %d: result %d, want %d", held.row, batch[0].Result, expect(valid))
	}
	if valid {
		m.rows[held.row].due = m.store.Now().Add(lease)
	}
}

func (m *model) settle(rt *rapid.T) {
	held, valid := m.anyLease(rt)
	s := leasebus.Settlement{
		Lease: held.lease,
		Kind: rapid.SampledFrom([]leasebus.SettlementKind{
			leasebus.SettleComplete, leasebus.SettleRetry, leasebus.SettleDefer, leasebus.SettleRelease,
			leasebus.SettleDeadLetter, leasebus.SettleDeadLetter, leasebus.SettleDiscard,
		}).Draw(rt, "kind"),
		Delay:    m.delay(rt),
		Started:  rapid.Bool().Draw(rt, "started"),
		Attempts: held.lease.Attempt,
	}
	if rapid.Bool().Draw(rt, "fails") {
		s.Failure = failure("x")
	}
	batch := []leasebus.Settlement{s}
	m.fail(m.feeds[held.feed].Settle(m.t.Context(), batch))
	if batch[0].Result != expect(valid) {
		rt.Fatalf("%v of row %d: result %d, want %d", s.Kind, held.row, batch[0].Result, expect(valid))
	}
	if valid {
		m.settled(held.row, s)
	}
}

func (m *model) settled(row int, s leasebus.Settlement) {
	r, now := m.rows[row], m.store.Now()
	if s.Failure != nil {
		r.failures = min(r.failures+1, leasebus.HistoryLimit)
	}
	r.state, r.failed = waiting, false
	r.due = now.Add(max(0, s.Delay))
	switch s.Kind {
	case leasebus.SettleComplete, leasebus.SettleDiscard:
		r.state = finished
	case leasebus.SettleRetry:
		r.failed, r.crashed = true, false
	case leasebus.SettleDefer:
		r.attempt--
	case leasebus.SettleRelease:
		r.attempt--
		r.due = now
		if s.Started {
			r.interruptions++
		}
	case leasebus.SettleDeadLetter:
		r.state = dead
		last, err := m.store.LastDeadLetter(m.t.Context(), orders)
		m.fail(err)
		r.cursor = last
	case leasebus.SettleVerify: // is not drawn
	}
}

func (m *model) advance(rt *rapid.T) {
	m.store.Advance(time.Duration(rapid.IntRange(0, 40).Draw(rt, "seconds")) * time.Second)
}

// anyRef names some message, dead or not, with or without its last position.
func (m *model) anyRef(rt *rapid.T) leasebus.DeadLetterRef {
	if len(m.rows) == 0 {
		rt.Skip("nothing was published yet")
	}
	r := m.rows[rapid.IntRange(0, len(m.rows)-1).Draw(rt, "row")]
	ref := leasebus.DeadLetterRef{ID: r.id}
	if rapid.Bool().Draw(rt, "by position") {
		ref.Cursor = r.cursor
	}
	return ref
}

// act finds what ref names and what an operator must be told.
func (m *model) act(ref leasebus.DeadLetterRef, replacedToo bool, do func(*modelRow)) leasebus.Disposition {
	there, found, done := false, false, false
	for _, r := range m.rows {
		if r.id != ref.ID || r.state == finished {
			continue
		}
		there = true
		if r.state != dead || ref.Cursor != "" && ref.Cursor != r.cursor {
			continue
		}
		found = true
		if !r.replaced || replacedToo {
			done = true
			do(r)
		}
	}
	switch {
	case done:
		return leasebus.DispositionDone
	case found:
		return leasebus.DispositionReplaced
	case !there:
		return leasebus.DispositionNotFound
	case ref.Cursor != "":
		return leasebus.DispositionMoved
	}
	return leasebus.DispositionNotDeadLettered
}

func (m *model) requeue(rt *rapid.T) {
	ref := m.anyRef(rt)
	got, err := m.store.Requeue(m.t.Context(), orders, []leasebus.DeadLetterRef{ref}, "ann")
	m.fail(err)
	now := m.store.Now()
	want := m.act(ref, false, func(r *modelRow) {
		r.state, r.failed, r.due, r.ageFrom = waiting, false, now, now
		r.attempt, r.interruptions, r.crashed = 0, 0, false
		r.generation++
	})
	if got[0] != want {
		rt.Fatalf("requeue of %+v: %v, want %v", ref, got[0], want)
	}
}

func (m *model) discard(rt *rapid.T) {
	ref := m.anyRef(rt)
	got, err := m.store.Discard(m.t.Context(), orders, []leasebus.DeadLetterRef{ref}, "ann")
	m.fail(err)
	want := m.act(ref, true, func(r *modelRow) { r.state = finished })
	if got[0] != want {
		rt.Fatalf("discard of %+v: %v, want %v", ref, got[0], want)
	}
}

func (m *model) replace(rt *rapid.T) {
	ref := m.anyRef(rt)
	edited := message(strconv.Itoa(len(m.rows))).Envelope
	got, err := m.store.Replace(m.t.Context(), orders, ref, &edited, "ann")
	m.fail(err)
	want := m.act(ref, false, func(r *modelRow) {
		r.replaced = true
		r.generation++
	})
	if got != want {
		rt.Fatalf("replace of %+v: %v, want %v", ref, got, want)
	}
	if got == leasebus.DispositionDone {
		now := m.store.Now()
		m.rows = append(m.rows, &modelRow{id: edited.ID, state: waiting, due: now, ageFrom: now})
	}
}

// check compares all that an operator can see.
func (m *model) check(rt *rapid.T) {
	now := m.store.Now()
	var want leasebus.QueueStats
	letters := make(map[leasebus.Cursor]*modelRow)
	for _, r := range m.rows {
		late := now.Sub(r.due)
		switch r.state {
		case waiting:
			if r.failed {
				want.Failed++
			} else {
				want.Pending++
			}
			if late >= 0 {
				want.Due++
				want.OldestDueAge = max(want.OldestDueAge, late)
			}
		case working:
			want.Processing++
			if late >= 0 {
				want.Stuck++
			}
		case dead:
			want.DeadLettered++
			letters[r.cursor] = r
		case finished:
		}
	}
	got, err := m.store.Stats(m.t.Context(), orders)
	m.fail(err)
	if got != want {
		rt.Fatalf("stats\n got %+v\nwant %+v", got, want)
	}
	listed, err := m.store.DeadLetters(m.t.Context(), orders, leasebus.Filter{}, "", len(m.rows)+1)
	m.fail(err)
	for i := range listed {
		d := &listed[i]
		r := letters[d.Cursor]
		if r == nil {
			rt.Fatalf("a dead letter at %s that is none, or is listed twice", d.Cursor)
		}
		delete(letters, d.Cursor)
		if d.ID != r.id || d.Generation != r.generation || len(d.History) != r.failures || (d.ReplacedBy != leasebus.ID{}) != r.replaced {
			rt.Fatalf("dead letter at %s: id %v, generation %d, %d failures, replaced by %v; want %+v", d.Cursor, d.ID, d.Generation, len(d.History), d.ReplacedBy, *r)
		}
	}
	if len(letters) > 0 {
		rt.Fatalf("%d dead letters are not listed", len(letters))
	}
}

// finish completes everything that has not ended, waiting only as long as the store says. Whoever holds a lease is gone.
func (m *model) finish() {
	for {
		for _, held := range m.leaseFrom(0, len(m.rows)+1) {
			batch := []leasebus.Settlement{{Lease: held.lease, Kind: leasebus.SettleComplete}}
			m.fail(m.feeds[0].Settle(m.t.Context(), batch))
			if batch[0].Result != leasebus.ResultOK {
				m.rt.Fatalf("completion of row %d: result %d", held.row, batch[0].Result)
			}
			m.rows[held.row].state = finished
		}
		wait, ok := m.store.NextDue(orders)
		if !ok {
			break
		}
		m.store.Advance(wait)
	}
	for i, r := range m.rows {
		if r.state != dead && r.state != finished {
			m.rt.Fatalf("row %d is stuck: %+v", i, *r)
		}
	}
	m.check(m.rt)
}
