package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
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
	claimSQL = `UPDATE {segment} SET lease_owner = $3, generation = generation + 1, attempt = attempt + 1,
 visible_at = (SELECT statement_timestamp() + make_interval(secs => $4))
 WHERE ctid = ANY((SELECT CASE WHEN setval($7::text::regclass, greatest(` + frontOfSQL + `, (max(c.pos) + 1 << 16) | ($1 & 65535))) > 0
 THEN array_agg(c.ctid) END FROM (SELECT ctid, pos FROM {segment}
 WHERE queue = $1 AND pos >= (SELECT greatest($5, least($6, coalesce(` + frontOfSQL + ` >> 16, 0))))
 AND visible_at <= statement_timestamp() ORDER BY pos LIMIT $2 FOR UPDATE SKIP LOCKED) c)::tid[])
 RETURNING pos, generation, attempt, id, type, headers, state, payload, timestamptz_send(first_due)`

	// frontOfSQL is the value of a queue's front, null if it is not known. See front.
	frontOfSQL = `(SELECT CASE WHEN v & 65535 = $1 & 65535 THEN v END FROM pg_sequence_last_value($7::text::regclass) v)`

	// before a claim; the last columns are when it came, the front's value and the time, about.
	pinClaimSQL  = pinSQL + claimTimeSQL
	claimTimeSQL = `, timestamptz_send(statement_timestamp()), pg_sequence_last_value($1::text::regclass), timestamptz_send(clock_timestamp())`

	// reclaimSQL gives back what a claim took whose answer was lost: the owner's number is of that claim alone.
	reclaimSQL = `WITH d AS (DELETE FROM {segment} WHERE queue = $1 AND pos >= $3 AND lease_owner = $2 RETURNING *),
 i AS (INSERT INTO {schema}.ready (segment, first_due, id, queue, generation, attempt, type, headers, state, payload)
 SELECT {head}, first_due, id, queue, generation, attempt - 1, type, headers, state, payload FROM d ORDER BY pos RETURNING queue, segment, pos)
 SELECT queue, segment, min(pos), NULL::bigint FROM i GROUP BY queue, segment`

	renewSQL = `WITH ` + fencedSQL + `, ` + lockedSQL + `,
 d AS (UPDATE {segment} m SET visible_at = (SELECT statement_timestamp() + make_interval(secs => $5)) WHERE m.ctid = ANY(ARRAY(SELECT ctid FROM k))
 RETURNING m.pos, m.generation) ` + answersSQL
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
	front  string // the name of its sequence
	types  interner
	// places are the feed's cursors, one in each segment.
	places [segments]cursor

	// hungry: the last Lease found less than it asked for.
	hungry atomic.Bool
	turns  turnTaker
	// claiming and settling are for alone.
	claiming, settling single

	stopped  atomic.Bool
	stopping chan struct{} // closed with stopped
	closed   atomic.Bool

	lost lostClaims
	// pruned is of the pruner.
	pruned pruning

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
		in: in, sub: sub, queue: queue, claiming: make(single, 1), settling: make(single, 1), stopping: make(chan struct{}),
		duration: sub.Policy.Lease.Duration.Seconds(), owner: rand.Int64(), //nolint:gosec // a fence against mistakes, no secret
	}
	f.front = f.frontName()
	f.turns.init(sub.Policy.Lease.Duration)
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
	bound, cancel := context.WithTimeout(ctx, f.claimBound())
	defer cancel()
	n := 0
	for _, seg := range f.in.ring.oldestFirst() {
		claimed, err := f.leaseFrom(bound, seg, dst[n:])
		n += claimed
		switch {
		case err != nil && n == 0:
			f.hungry.Store(true)
			return 0, f.failed("lease from", err)
		case err != nil: // there may be more
			f.wake()
			return n, nil
		case n == len(dst):
			return n, nil
		}
	}
	f.hungry.Store(true)
	return n, nil
}

// leaseFrom fills dst with messages of one segment. With an error, what was claimed all the same is there.
func (f *feed) leaseFrom(ctx context.Context, seg segment, dst []leasebus.Lease) (int, error) {
	place := &f.places[seg]
	p := place.begin(time.Now(), f.in.keeper.deaf())
	if p == nil {
		return 0, nil
	}
	c, err := f.claim(ctx, seg, dst, p)
	if err != nil {
		place.failed(p)
	} else if place.found(p, c.top, c.n == len(dst), f.frontOf(c.front)) {
		f.wake() // the answer to another call may say that there is nothing more
	}
	return c.n, err
}

// lookAgain makes the feed look everywhere for messages.
func (f *feed) lookAgain() {
	for i := range f.places {
		f.places[i].arrived(0)
	}
	f.wake()
}

// A queue's front is how far the claims of all processes have come, about. Without it each claim would walk over all that
// others have leased since the last one of its own process. It is kept in a sequence, whose value is seen at once and
// leaves no old versions behind, and shared by the queues that have the same name for it: the lower bits say whose it is.
//
// It is a hint as the cursor is one. What lies behind it has been leased, or is locked, or was not committed when a claim
// passed it: of that the cursors hear, and keep their claims from jumping over it.
const (
	fronts     = 8
	frontShift = 16
)

func (f *feed) frontName() string {
	return f.in.options.quoted + ".front_" + strconv.Itoa(int(f.queue)%fronts)
}

// frontOf is the position in a front's value: 0 if nobody has claimed yet, maxPosition if it is another queue's.
func (f *feed) frontOf(value int64) int64 {
	if value != 0 && uint16(value) != uint16(f.queue) { //nolint:gosec // the lower bits
		return maxPosition
	}
	return value >> frontShift
}

// claim fills dst with messages of a segment, in their order.
func (f *feed) claim(ctx context.Context, seg segment, dst []leasebus.Lease, p *pass) (claim, error) {
	c, err := f.claimInTurn(ctx, seg, dst, p)
	c.sort()
	return c, err
}

// claimInTurn has a large claim wait for a turn, and a small one not.
func (f *feed) claimInTurn(ctx context.Context, seg segment, dst []leasebus.Lease, p *pass) (claim, error) {
	if len(dst) < turnFrom {
		return f.claimOnce(ctx, seg, dst, p, nil)
	}
	defer f.alone(ctx, f.claiming, f.stopping)()
	for range turnTries {
		if f.stopped.Load() { // while this one waited
			return claim{feed: f, dst: dst}, leasebus.ErrFeedStopped
		}
		t := f.turns.next(time.Now())
		if t == nil {
			break
		}
		c, err := f.claimOnce(ctx, seg, dst, p, t)
		if sqlState(err) != codeLockTimeout {
			if err == nil {
				f.turns.waited(c.waited, time.Now())
			}
			return c, err
		}
		f.turns.inVain(t, time.Now())
	}
	return f.claimOnce(ctx, seg, dst, p, nil)
}

// claimOnce claims in a turn; nil = without one.
func (f *feed) claimOnce(ctx context.Context, seg segment, dst []leasebus.Lease, p *pass, t *turn) (claim, error) {
	owner := f.owner + f.claims.Add(1)
	ctx, quit := context.WithCancelCause(ctx)
	defer quit(nil)
	silence := f.claimSilence()
	patience := time.AfterFunc(silence, func() { quit(errSilent) })
	defer patience.Stop()
	var c claim
	err := f.in.caller.call(ctx, f.in.claims, func(b *pgx.Batch) {
		if t != nil {
			schema, first, then := f.turnKeys(seg, t)
			b.Queue(takeTurnSQL, f.front, schema, then, f.turns.lockTimeout(), first)
		} else {
			b.Queue(pinClaimSQL, f.front)
		}
		b.Queue(f.in.sql.in[seg].claim, f.queue, len(dst), owner, f.duration, p.from, p.floor, f.front)
	}, func(results pgx.BatchResults) error {
		c = claim{feed: f, seg: seg, dst: dst, bare: &claimed{feed: f, owner: owner}}
		if err := each(results, c.begin); err != nil {
			return err
		}
		return each(results, func(r *row) error {
			if c.n%rowsOfPatience == 0 {
				patience.Reset(silence)
			}
			return c.read(r)
		})
	})
	if err != nil {
		clear(dst[:c.n])
		if errors.Is(context.Cause(ctx), errSilent) {
			err = fmt.Errorf("%w: %w", errSilent, err)
		}
		if !undone(err) {
			f.lost.add(lostClaim{owner: owner, seg: seg, from: p.from, until: time.Now().Add(f.sub.Policy.Lease.Duration)})
		}
		return claim{feed: f, dst: dst}, err
	}
	return c, nil
}

// A claim that takes longer than the leases that it brings is of no use; on a connection that has gone silent it would
// take for ever. One whose answer does not go on for a part of the lease is given up, so that what it may have leased can
// be given back in time; a large answer may take its time.
const (
	claimLeast, claimMost = 5 * time.Second, 30 * time.Second
	claimSilenceMost      = 10 * time.Second
	// rowsOfPatience is after how many rows the answer is seen to go on.
	rowsOfPatience = 50
)

var errSilent = errors.New("the database went silent")

func (f *feed) claimBound() time.Duration {
	return min(max(f.sub.Policy.Lease.Duration, claimLeast), claimMost)
}

func (f *feed) claimSilence() time.Duration {
	return min(max(f.sub.Policy.Lease.Duration/3, claimLeast), claimSilenceMost)
}

// claim reads the rows of one claim into leases.
type claim struct {
	feed     *feed
	seg      segment
	dst      []leasebus.Lease
	n        int
	bare     *claimed
	arena    arena
	front    int64 // its value before the claim
	now      instant
	waited   time.Duration // before that, for a turn
	top      int64
	unsorted bool
}

// begin takes the answer to the statement before the claim.
func (c *claim) begin(r *row) error {
	if value := len(r.fields) - 2; !r.null(value) {
		c.front = r.int64(value)
	}
	c.now = r.instant(len(r.fields) - 1)
	c.waited = c.now.since(r.instant(len(r.fields) - 3))
	return r.err
}

func (c *claim) read(r *row) error {
	if c.n == len(c.dst) {
		return fmt.Errorf("more than %d rows were claimed", len(c.dst))
	}
	l := &c.dst[c.n]
	pos := r.int64(0)
	c.unsorted = c.unsorted || pos < c.top
	c.top = max(c.top, pos)
	l.Ref = leasebus.Ref{N: pos, Seg: int32(c.seg), P: c.bare} //nolint:gosec // below segments
	l.Generation = r.int64(1)
	l.Attempt = r.int(2)
	l.ID = r.id(3)
	l.Type = c.feed.types.intern(r.text(4))
	l.Queue = c.feed.sub.Queue
	expected := 2 * (len(c.dst) - c.n)
	l.Payload = c.arena.keep(r.bytes(7), expected)
	headers, err := readHeaders(r.bytes(5), l.ID, func(n int) []byte { return c.arena.take(n, expected) })
	if err != nil { // one damaged message is not to stop its queue
		c.feed.in.options.log.Error("leasebus: the headers of a stored message are damaged, it goes without", "id", l.ID, "error", err)
	}
	l.Headers = headers
	firstDue := r.instant(8)
	l.FirstDue = firstDue.time()
	l.IdempotencyKey, l.OrderingKey, l.Interruptions = "", "", 0
	l.Crashed = l.Attempt > 1
	if state := r.bytes(6); state != nil {
		firstDue = c.remember(l, state, firstDue)
	}
	l.Age = max(c.now.since(firstDue), 0)
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
	if !c.unsorted {
		return
	}
	order := make([]placed, c.n)
	for i := range order {
		order[i] = placed{c.dst[i].Ref.N, i}
	}
	slices.SortFunc(order, func(a, b placed) int { return cmp.Compare(a.pos, b.pos) })
	// A lease is long, so that each is to move once: along the cycles of the permutation.
	for i := range order {
		if order[i].from == i {
			continue
		}
		at, first := i, exportedOf(&c.dst[i])
		for order[at].from != i {
			from := order[at].from
			exportedOf(&c.dst[from]).to(&c.dst[at])
			order[at].from, at = at, from
		}
		first.to(&c.dst[at])
		order[at].from = at
	}
}

// placed is a lease's position, and where it is.
type placed struct {
	pos  int64
	from int
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

func exportedOf(l *leasebus.Lease) exported {
	return exported{l.Envelope, l.Attempt, l.Interruptions, l.Generation, l.Age, l.Crashed, l.Ref}
}

func (e exported) to(l *leasebus.Lease) {
	l.Envelope, l.Attempt, l.Interruptions, l.Generation = e.Envelope, e.attempt, e.interruptions, e.generation
	l.Age, l.Crashed, l.Ref = e.age, e.crashed, e.ref
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
	kept := a.take(len(b), expected)
	copy(kept, b)
	return kept
}

// take returns n bytes, expecting so many more like them; nil for none.
func (a *arena) take(n, expected int) []byte {
	switch {
	case n == 0:
		return nil
	case n > arenaShare:
		return make([]byte, n)
	case n > len(a.free):
		a.free = make([]byte, min(n*max(expected, 1), arenaBlock))
	}
	taken := a.free[:n:n]
	a.free = a.free[n:]
	return taken
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
	owner int64
	seg   segment
	from  int64
	until time.Time
	again time.Time
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
			b.Queue(f.in.sql.in[c.seg].reclaim, f.queue, c.owner, c.from)
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
	if err := f.renew(ctx, batch, false); err != nil {
		return err
	}
	return elsewhere(f, batch, func(r *leasebus.Renewal) (*leasebus.Lease, *leasebus.Result) { return r.Lease, &r.Result },
		func(moved []leasebus.Renewal) error { return f.renew(ctx, moved, true) })
}

// renew looks for the messages where they were leased or, with cold, in the cold segment.
func (f *feed) renew(ctx context.Context, batch []leasebus.Renewal, cold bool) error {
	var leases [segments]*fences
	var order []segment
	for i := range batch {
		l := batch[i].Lease
		if !f.gave(l) {
			batch[i].Result = leasebus.ResultLost
			continue
		}
		seg := segmentOf(l)
		if cold {
			seg = coldSegment
		}
		if leases[seg] == nil {
			leases[seg], order = newFences(len(batch)), append(order, seg)
		}
		leases[seg].add(l, i)
	}
	if len(order) == 0 {
		return nil
	}
	for _, seg := range order {
		leases[seg].sort()
	}
	var answers [segments]fenceAnswers
	err := f.in.caller.call(ctx, f.in.renewals, func(b *pgx.Batch) {
		b.Queue(pinSettleSQL)
		for _, seg := range order {
			b.Queue(f.in.sql.in[seg].renew, append(leases[seg].args(f.queue), f.duration)...)
		}
	}, func(results pgx.BatchResults) error {
		if err := skip(results); err != nil {
			return err
		}
		for _, seg := range order {
			answers[seg].begin(leases[seg], leasebus.ResultLost)
			if err := each(results, answers[seg].read); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return f.failed("renew in", err)
	}
	for _, seg := range order {
		for at, result := range answers[seg].results {
			batch[leases[seg].list[at].index].Result = result
		}
	}
	return nil
}

// elsewhere lets again have the elements that are not where they were leased, because they may have been moved to the
// cold segment, and takes its answers. Those of which of returns no lease are left alone.
func elsewhere[T any](f *feed, batch []T, of func(*T) (*leasebus.Lease, *leasebus.Result), again func([]T) error) error {
	var moved []T
	var index []int
	for i := range batch {
		l, result := of(&batch[i])
		if l != nil && *result == leasebus.ResultLost && f.gave(l) && segmentOf(l) != coldSegment {
			*result = leasebus.ResultUnknown
			moved, index = append(moved, batch[i]), append(index, i)
		}
	}
	if len(moved) == 0 {
		return nil
	}
	if err := again(moved); err != nil {
		return err
	}
	for at, i := range index {
		batch[i] = moved[at]
	}
	return nil
}

// gave is false for a lease that is another feed's.
func (f *feed) gave(l *leasebus.Lease) bool {
	c, ok := l.Ref.P.(*claimed)
	return ok && c.feed == f
}

// segmentOf is where a lease was given. Its message may have moved to the cold segment since.
func segmentOf(l *leasebus.Lease) segment { return segment(l.Ref.Seg) }

// Stop implements [leasebus.Feed]. Nothing is buffered here, so there is nothing to hand back.
func (f *feed) Stop(context.Context) error {
	if !f.stopped.Swap(true) {
		close(f.stopping)
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
