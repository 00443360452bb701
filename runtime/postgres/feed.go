package postgres

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// statement_timestamp() and not now(): behind a wait, now() would be old, and leases be born expired.
const (
	claimSQL = `UPDATE {ready} SET lease_owner = $3, generation = generation + 1, attempt = attempt + 1,
 visible_at = statement_timestamp() + make_interval(secs => $4)
 WHERE ctid = ANY(ARRAY(SELECT ctid FROM {ready} WHERE queue = $1 AND pos >= $5 AND visible_at <= statement_timestamp()
 ORDER BY pos LIMIT $2 FOR UPDATE SKIP LOCKED))
 RETURNING pos, generation, attempt, id, type, headers, state, payload, timestamptz_send(first_due), timestamptz_send(statement_timestamp())`

	// reclaimSQL gives back what a claim took whose answer was lost: the owner's number is of that claim alone.
	reclaimSQL = `WITH d AS (DELETE FROM {ready} WHERE queue = $1 AND pos >= $3 AND lease_owner = $2 RETURNING *),
 i AS (INSERT INTO {ready} (first_due, id, queue, generation, attempt, type, headers, state, payload)
 SELECT first_due, id, queue, generation, attempt - 1, type, headers, state, payload FROM d ORDER BY pos RETURNING pos)
 SELECT $1::int, min(pos), NULL::bigint FROM i HAVING count(*) > 0`

	// renewSQL answers 1 for a lease that was renewed and, only if some were not, 2 for every one that is this owner's.
	renewSQL = `WITH ` + fencedSQL + `, ` + lockedSQL + `,
 d AS (UPDATE {ready} m SET visible_at = statement_timestamp() + make_interval(secs => $5) WHERE m.ctid = ANY(ARRAY(SELECT ctid FROM k))
 RETURNING m.pos, m.generation)
 SELECT 1, pos, generation FROM d UNION ALL ` + restSQL

	// fencedSQL are the leases that a statement is about: queue $1, positions $2 in their order, generations, owners.
	fencedSQL = `u AS (SELECT * FROM unnest($2::bigint[], $3::int[], $4::bigint[]) AS u(pos, generation, owner))`

	// heldSQL finds the row of the lease u, and nothing else. It stands in a lateral subquery that the planner cannot
	// dissolve, and the rows are then taken by their address: joined in any other way, or by pos = ANY, the planner would
	// read the whole queue and look up the leases, if its statistics are from when the queue was empty. A row that moved
	// meanwhile is not found at its address; it is answered as this owner's, which means busy, and tried again.
	heldSQL = `FROM {ready} r WHERE r.queue = $1 AND r.pos = u.pos AND r.lease_owner = u.owner AND r.generation = u.generation`

	// lockedSQL locks the rows in the order of their positions, leaving out those that another transaction has.
	lockedSQL = `k AS MATERIALIZED (SELECT x.ctid FROM u, LATERAL (SELECT r.ctid ` + heldSQL + ` FOR UPDATE SKIP LOCKED) x)`

	// restSQL answers 2 for every lease that is this owner's, if not all are done.
	restSQL = `SELECT 2, u.pos, u.generation FROM u, LATERAL (SELECT 1 ` + heldSQL + ` OFFSET 0) x WHERE (SELECT count(*) FROM d) < cardinality($2::bigint[])`
)

const (
	answerDone = 1
	answerMine = 2 // and locked, if it was not done
	answerBack = 3 // a position where something was put back
)

// feed is one processor's hold on a queue.
type feed struct {
	in       *Inbox
	sub      leasebus.Subscription
	queue    int32
	duration float64 // of a lease, in seconds
	// owner is a random number; each claim adds one, so that what a lost answer took can be told apart.
	owner  int64
	claims atomic.Int64
	place  cursor
	types  interner

	// hungry: the last Lease found less than it asked for.
	hungry  atomic.Bool
	stopped atomic.Bool
	closed  atomic.Bool

	lost lostClaims

	// waking is held while Wake runs, so that Close can wait for it.
	waking sync.Mutex
	mute   bool
}

// claimed is what a lease's Ref leads to: shared by the leases of one Lease call but for those with a past.
type claimed struct {
	feed  *feed
	owner int64
	past  *past
}

// Subscribe implements [leasebus.Source]. The first subscription of an inbox starts its background work.
//
// The policy's retentions of completed messages and dead letters hold for the whole queue; if those of several
// subscriptions differ, each deletes by its own.
func (in *Inbox) Subscribe(ctx context.Context, sub leasebus.Subscription) (leasebus.Feed, error) {
	if err := admitSubscription(ctx, &sub); err != nil {
		return nil, err
	}
	queue, err := in.register(ctx, sub.Queue)
	if err != nil {
		return nil, fmt.Errorf("postgres: subscribe to %q: %w", sub.Queue, err)
	}
	f := &feed{
		in: in, sub: sub, queue: queue, duration: sub.Policy.Lease.Duration.Seconds(), owner: rand.Int64(), //nolint:gosec // a fence against mistakes, no secret
		place: cursor{sweepEvery: in.options.sweep},
	}
	if !in.keeper.add(f) {
		return nil, fmt.Errorf("postgres: subscribe to %q: %w", sub.Queue, ErrClosed)
	}
	return f, nil
}

func admitSubscription(ctx context.Context, sub *leasebus.Subscription) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("postgres: subscribe to %q: %w", sub.Queue, context.Cause(ctx))
	case sub.Queue == "":
		return errors.New("postgres: subscribe: the queue is empty; a name is needed")
	case !utf8.ValidString(sub.Queue) || strings.ContainsRune(sub.Queue, 0) || len(sub.Queue) > leasebus.MaxNameBytes:
		return fmt.Errorf("postgres: subscribe to %q: this is no name; allowed are %d bytes of UTF-8 without NUL", sub.Queue, leasebus.MaxNameBytes)
	case sub.Owner == "":
		return fmt.Errorf("postgres: subscribe to %q: the owner is empty; a name is needed", sub.Queue)
	case sub.Policy == nil:
		return fmt.Errorf("postgres: subscribe to %q: the policy is nil", sub.Queue)
	case sub.Policy.Lease.Duration <= 0:
		return fmt.Errorf("postgres: subscribe to %q: lease.duration %v is out of range; allowed is more than 0", sub.Queue, sub.Policy.Lease.Duration)
	}
	sub.Owner = storable(sub.Owner)
	return nil
}

// guard refuses a call that cannot be made.
func (f *feed) guard(ctx context.Context, what string) error {
	switch {
	case ctx.Err() != nil:
		return f.failed(what, context.Cause(ctx))
	case f.closed.Load():
		return f.failed(what, leasebus.ErrFeedStopped)
	}
	return nil
}

func (f *feed) failed(what string, err error) error {
	return fmt.Errorf("postgres: %s %q: %w", what, f.sub.Queue, err)
}

func (f *feed) wake() {
	f.waking.Lock()
	defer f.waking.Unlock()
	if !f.mute && f.sub.Wake != nil {
		f.sub.Wake()
	}
}

// Lease implements [leasebus.Feed].
func (f *feed) Lease(ctx context.Context, dst []leasebus.Lease) (int, error) {
	if err := f.guard(ctx, "lease from"); err != nil {
		return 0, err
	}
	if f.stopped.Load() {
		return 0, f.failed("lease from", leasebus.ErrFeedStopped)
	}
	if len(dst) == 0 {
		return 0, nil
	}
	f.giveBack(ctx, time.Now())
	f.hungry.Store(false)
	from, was := f.place.claimFrom(time.Now(), f.in.keeper.deaf())
	bound, cancel := context.WithTimeout(ctx, f.claimBound())
	defer cancel()
	c, err := f.claim(bound, dst, from)
	if err != nil && c.n == 0 {
		f.hungry.Store(true)
		return 0, f.failed("lease from", err)
	}
	if c.n > 0 {
		f.place.advance(was, c.top, c.n == len(dst))
	}
	if c.n < len(dst) {
		f.hungry.Store(true)
	}
	if err != nil { // of one half: there may be more
		f.wake()
	}
	return c.n, nil
}

// splitFrom is how large a claim is whose halves are made at the same time, on two connections: claiming is what takes a
// full queue longest, and one session of the server uses one processor.
const splitFrom = 200

// claim fills dst from a position on, sorted. With an error, what was claimed all the same is there.
func (f *feed) claim(ctx context.Context, dst []leasebus.Lease, from int64) (claim, error) {
	if len(dst) < splitFrom || f.in.options.connections/4 < 2 {
		c, err := f.claimOnce(ctx, dst, from)
		c.sort()
		return c, err
	}
	half := len(dst) / 2
	var second claim
	var secondErr error
	var other sync.WaitGroup
	other.Go(func() { second, secondErr = f.claimOnce(ctx, dst[half:], from) })
	first, err := f.claimOnce(ctx, dst[:half], from)
	other.Wait()
	first.join(&second, dst)
	return first, errors.Join(err, secondErr)
}

func (f *feed) claimOnce(ctx context.Context, dst []leasebus.Lease, from int64) (claim, error) {
	owner := f.owner + f.claims.Add(1)
	var c claim
	err := f.in.caller.call(ctx, f.in.claims, func(b *pgx.Batch) {
		b.Queue(pinSQL)
		b.Queue(f.in.sql.claim, f.queue, len(dst), owner, f.duration, from)
	}, func(results pgx.BatchResults) error {
		c = claim{feed: f, dst: dst, bare: &claimed{feed: f, owner: owner}}
		if err := skip(results); err != nil {
			return err
		}
		return each(results, c.read)
	})
	if err != nil {
		clear(dst[:c.n])
		if !undone(err) {
			f.lost.add(lostClaim{owner: owner, from: from, until: time.Now().Add(f.sub.Policy.Lease.Duration)})
		}
		return claim{feed: f, dst: dst}, err
	}
	return c, nil
}

// A claim that takes longer than the leases that it brings is of no use; on a connection that has gone silent it would
// take for ever.
const claimLeast, claimMost = 5 * time.Second, 30 * time.Second

func (f *feed) claimBound() time.Duration {
	return min(max(f.sub.Policy.Lease.Duration, claimLeast), claimMost)
}

// claim reads the rows of one claim into leases.
type claim struct {
	feed     *feed
	dst      []leasebus.Lease
	n        int
	bare     *claimed
	arena    arena
	top      int64
	unsorted bool
}

func (c *claim) read(r *row) error {
	if c.n == len(c.dst) {
		return fmt.Errorf("more than %d rows were claimed", len(c.dst))
	}
	l := &c.dst[c.n]
	pos := r.int64(0)
	c.unsorted = c.unsorted || pos < c.top
	c.top = max(c.top, pos)
	l.Ref = leasebus.Ref{N: pos, P: c.bare}
	l.Generation = r.int64(1)
	l.Attempt = r.int(2)
	l.ID = r.id(3)
	l.Type = c.feed.types.intern(r.text(4))
	l.Queue = c.feed.sub.Queue
	headers, payload := r.bytes(5), r.bytes(7)
	expected := len(c.dst) - c.n
	l.Payload = c.arena.keep(payload, 2*expected)
	l.Headers = leasebus.Headers{}
	if len(headers) > 0 {
		decoded, err := leasebus.DecodeHeaders(c.arena.keep(headers, 2*expected))
		if err != nil { // one damaged message is not to stop its queue
			c.feed.in.options.log.Error("leasebus: the headers of a stored message are damaged, it goes without", "id", l.ID, "error", err)
		}
		l.Headers = decoded
	}
	firstDue, now := r.instant(8), r.instant(9)
	l.FirstDue = firstDue.time()
	l.IdempotencyKey, l.OrderingKey, l.Interruptions = "", "", 0
	l.Crashed = l.Attempt > 1
	if state := r.bytes(6); state != nil {
		firstDue = c.remember(l, state, firstDue)
	}
	l.Age = max(now.since(firstDue), 0)
	c.n++
	return r.err
}

// remember adds what the message carries from earlier attempts, and returns where its age begins.
func (c *claim) remember(l *leasebus.Lease, state []byte, firstDue instant) instant {
	p, err := decodePast(state)
	if err != nil {
		c.feed.in.options.log.Error("leasebus: what a stored message carries of its past is damaged, it goes without", "id", l.ID, "error", err)
		return firstDue
	}
	l.Ref.P = &claimed{feed: c.feed, owner: c.bare.owner, past: p}
	l.IdempotencyKey, l.OrderingKey = p.idempotencyKey, p.orderingKey
	l.Interruptions = p.interruptions
	l.Crashed = l.Attempt-1 > p.recorded
	return p.ageFrom(firstDue)
}

// sort brings the leases into the order of their positions: the server answers in the order in which they lie.
func (c *claim) sort() {
	if c.unsorted {
		all := appendExported(nil, c.dst[:c.n])
		slices.SortFunc(all, func(a, b exported) int { return compare(a.ref.N, b.ref.N) })
		setExported(c.dst, all)
	}
}

// join puts the leases of both into dst, of which they have a part each.
func (c *claim) join(other *claim, dst []leasebus.Lease) {
	all := make([]exported, 0, c.n+other.n)
	all = appendExported(appendExported(all, c.dst[:c.n]), other.dst[:other.n])
	slices.SortFunc(all, func(a, b exported) int { return compare(a.ref.N, b.ref.N) })
	clear(other.dst[:other.n])
	setExported(dst, all)
	c.dst, c.n, c.top = dst, len(all), max(c.top, other.top)
}

// exported is a lease without the engine's part of it, which is not to be copied.
type exported struct {
	leasebus.Envelope
	attempt, interruptions int
	generation             int64
	age                    time.Duration
	crashed                bool
	ref                    leasebus.Ref
}

func appendExported(all []exported, leases []leasebus.Lease) []exported {
	for i := range leases {
		l := &leases[i]
		all = append(all, exported{l.Envelope, l.Attempt, l.Interruptions, l.Generation, l.Age, l.Crashed, l.Ref})
	}
	return all
}

func setExported(leases []leasebus.Lease, all []exported) {
	for i := range all {
		l, e := &leases[i], &all[i]
		l.Envelope, l.Attempt, l.Interruptions, l.Generation = e.Envelope, e.attempt, e.interruptions, e.generation
		l.Age, l.Crashed, l.Ref = e.age, e.crashed, e.ref
	}
}

func compare(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// arena keeps bytes together in blocks. Blocks are small, because one lease that lasts keeps a whole one in memory.
type arena struct{ free []byte }

const (
	arenaBlock = 64 << 10
	// arenaShare is the largest part of a block that one message takes; larger ones stand alone.
	arenaShare = arenaBlock / 4
)

// keep copies b, expecting so many more like it.
func (a *arena) keep(b []byte, expected int) []byte {
	switch {
	case len(b) == 0:
		return nil
	case len(b) > arenaShare:
		return slices.Clone(b)
	case len(b) > len(a.free):
		a.free = make([]byte, min(len(b)*max(expected, 1), arenaBlock))
	}
	kept := a.free[:len(b):len(b)]
	a.free = a.free[len(b):]
	copy(kept, b)
	return kept
}

// interner makes one string of equal names.
type interner struct {
	mu    sync.Mutex
	last  string
	names map[string]string
}

// maxInterned bounds what strangers' names can cost.
const maxInterned = 1000

func (t *interner) intern(name []byte) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if string(name) == t.last {
		return t.last
	}
	s, ok := t.names[string(name)]
	if !ok {
		if t.names == nil || len(t.names) >= maxInterned {
			t.names = make(map[string]string)
		}
		s = string(name)
		t.names[s] = s
	}
	t.last = s
	return s
}

// lostClaims are claims whose answer did not come: what they took is leased, and nobody here knows. It is given back,
// or every lost answer would spend an attempt and a lease's time (S25).
type lostClaims struct {
	some atomic.Bool
	mu   sync.Mutex
	list []lostClaim
}

type lostClaim struct {
	owner, from int64
	until       time.Time
	again       time.Time
}

const (
	// giveBackAgain is when a lost claim is looked for once more: the server may have been at it still.
	giveBackAgain = time.Second
	giveBackBound = 5 * time.Second
)

func (l *lostClaims) add(c lostClaim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, c)
	l.some.Store(true)
}

// take returns those that are to be looked for now, and forgets those whose lease is over.
func (l *lostClaims) take(now time.Time) (due []lostClaim) {
	if !l.some.Load() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	kept := l.list[:0]
	for _, c := range l.list {
		if !now.Before(c.again) {
			due = append(due, c)
			c.again = now.Add(giveBackAgain)
		}
		if now.Before(c.until) {
			kept = append(kept, c)
		}
	}
	l.list = kept
	l.some.Store(len(kept) > 0)
	return due
}

// giveBack releases what lost claims took and what is due to be looked for at now. A failure is no one's: it is tried
// again.
func (f *feed) giveBack(ctx context.Context, now time.Time) {
	for _, c := range f.lost.take(now) {
		bound, cancel := context.WithTimeout(ctx, giveBackBound)
		var came []arrival
		err := f.in.caller.call(bound, f.in.claims, func(b *pgx.Batch) {
			b.Queue(pinSQL)
			b.Queue(f.in.sql.reclaim, f.queue, c.owner, c.from)
		}, func(results pgx.BatchResults) (err error) {
			if err = skip(results); err != nil {
				return err
			}
			came, err = readArrivals(results, 1)
			return err
		})
		cancel()
		if err != nil {
			return
		}
		f.in.announce(came)
	}
}

// Renew implements [leasebus.Feed]. A lease that has expired, but that nobody took, is renewed like any other.
func (f *feed) Renew(ctx context.Context, batch []leasebus.Renewal) error {
	if err := f.guard(ctx, "renew in"); err != nil {
		return err
	}
	if len(batch) == 0 {
		return nil
	}
	leases := newFences(len(batch))
	for i := range batch {
		if !leases.add(f, batch[i].Lease, i) {
			batch[i].Result = leasebus.ResultLost
		}
	}
	leases.sort()
	var answers fenceAnswers
	err := f.in.caller.call(ctx, f.in.renewals, func(b *pgx.Batch) {
		b.Queue(pinSettleSQL)
		b.Queue(f.in.sql.renew, f.queue, leases.pos, leases.generation, leases.owner, f.duration)
	}, func(results pgx.BatchResults) error {
		answers.begin(&leases, leasebus.ResultLost)
		if err := skip(results); err != nil {
			return err
		}
		return each(results, answers.read)
	})
	if err != nil {
		return f.failed("renew in", err)
	}
	for at, result := range answers.results {
		batch[leases.index[at]].Result = result
	}
	return nil
}

// fences name leases to the database: row, generation, owner; sorted by position, so that nobody's locks cross.
type fences struct {
	pos        []int64
	generation []int32
	owner      []int64
	index      []int // in the batch
	ascending  bool
}

func newFences(n int) fences {
	numbers := make([]int64, 2*n)
	return fences{
		pos: numbers[:0:n], owner: numbers[n:n], generation: make([]int32, 0, n), index: make([]int, 0, n), ascending: true,
	}
}

// add is false for a lease that this feed has not given.
func (s *fences) add(f *feed, l *leasebus.Lease, index int) bool {
	c, ok := l.Ref.P.(*claimed)
	if !ok || c.feed != f {
		return false
	}
	if n := len(s.pos); n > 0 && l.Ref.N < s.pos[n-1] {
		s.ascending = false
	}
	s.pos = append(s.pos, l.Ref.N)
	s.generation = append(s.generation, int32(l.Generation)) //nolint:gosec // of an int column
	s.owner = append(s.owner, c.owner)
	s.index = append(s.index, index)
	return true
}

func (s *fences) Len() int { return len(s.pos) }
func (s *fences) Less(i, j int) bool {
	switch {
	case s.pos[i] != s.pos[j]:
		return s.pos[i] < s.pos[j]
	case s.generation[i] != s.generation[j]:
		return s.generation[i] < s.generation[j]
	}
	return s.index[i] < s.index[j]
}

func (s *fences) Swap(i, j int) {
	s.pos[i], s.pos[j] = s.pos[j], s.pos[i]
	s.generation[i], s.generation[j] = s.generation[j], s.generation[i]
	s.owner[i], s.owner[j] = s.owner[j], s.owner[i]
	s.index[i], s.index[j] = s.index[j], s.index[i]
}

func (s *fences) sort() {
	if !s.ascending {
		sort.Sort(s)
	}
}

// fenceAnswers collects the server's answers for leases, which come about in the order of the positions.
type fenceAnswers struct {
	leases  *fences
	results []leasebus.Result // beside the fences
	at      int
	back    int64 // the first position where something was put back; 0 = none
}

// begin starts with the answer for rows that are not answered for.
func (a *fenceAnswers) begin(leases *fences, absent leasebus.Result) {
	*a = fenceAnswers{leases: leases, results: make([]leasebus.Result, leases.Len())}
	for i := range a.results {
		a.results[i] = absent
	}
}

// read takes a row of kind, position and generation.
func (a *fenceAnswers) read(r *row) error {
	kind, pos, generation := r.int(0), r.int64(1), r.int32(2)
	switch kind {
	case answerDone:
		a.set(pos, generation, leasebus.ResultOK)
	case answerMine:
		a.set(pos, generation, leasebus.ResultBusy)
	case answerBack:
		a.back = pos
	}
	return r.err
}

// set gives a result to the lease that has none yet: several leases of one row can be asked for, old ones among them.
func (a *fenceAnswers) set(pos int64, generation int32, result leasebus.Result) {
	s := a.leases
	if a.at >= len(s.pos) || s.pos[a.at] != pos {
		a.at, _ = slices.BinarySearch(s.pos, pos)
	}
	for a.at < len(s.pos) && s.pos[a.at] == pos && s.generation[a.at] != generation {
		a.at++
	}
	if a.at < len(s.pos) && s.pos[a.at] == pos {
		if a.results[a.at] == leasebus.ResultLost {
			a.results[a.at] = result
		}
		a.at++
	}
}

// Stop implements [leasebus.Feed]. Nothing is buffered here, so there is nothing to hand back.
func (f *feed) Stop(context.Context) error {
	if !f.stopped.Swap(true) {
		f.in.keeper.remove(f)
	}
	return nil
}

// Close implements [leasebus.Feed]. When it has returned, Wake is not called any more; it must not be called from Wake.
func (f *feed) Close() error {
	_ = f.Stop(context.Background()) // cannot fail
	if f.closed.Swap(true) {
		return nil
	}
	// The last chance: after this nobody looks for what a lost claim took.
	ctx, cancel := context.WithTimeout(context.Background(), giveBackBound)
	defer cancel()
	f.giveBack(ctx, time.Now().Add(giveBackAgain))
	f.waking.Lock()
	defer f.waking.Unlock()
	f.mute = true
	return nil
}
