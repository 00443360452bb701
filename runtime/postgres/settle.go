package postgres

import (
	"context"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	leasebus "github.com/leasebus/leasebus/runtime"
)

const (
	// completeSQL waits for a renewal that is under way, within lock_timeout. What it waited for is looked at again: it can
	// have become another claim's lease, but of none of those that are completed here, because they were all over before.
	completeSQL = `WITH ` + fencedSQL + `,
 d AS (DELETE FROM {segment} m WHERE m.ctid = ANY(ARRAY(SELECT x.ctid FROM u, LATERAL (SELECT r.ctid ` + heldSQL + ` OFFSET 0) x))
 AND m.lease_owner = ANY($5::bigint[]) RETURNING m.pos, m.generation) ` + answersSQL

	// completeBusySQL leaves out what is locked.
	completeBusySQL = `WITH ` + fencedSQL + `, ` + lockedSQL + `,
 d AS (DELETE FROM {segment} m WHERE m.ctid = ANY(ARRAY(SELECT ctid FROM k)) RETURNING m.pos, m.generation) ` + answersSQL

	// moveSQL ends leases by taking their messages elsewhere: one statement, so that nothing is lost between. It leaves
	// out what is locked, as completeBusySQL does. The database writes the time of a failure behind the state (stamp).
	moveSQL = `WITH u AS (SELECT * FROM unnest($2::bigint[], $3::int[], $4::bigint[], $5::int[], $6::bigint[], $7::int[],
 $8::bytea[], $9::bool[], $10::text[], $11::text[], $12::text[], $13::text[], $14::int[])
 AS u(pos, generation, owner, route, delay, refund, state, stamp, dead_letter_queue, reason, error, error_type, attempts)), ` + lockedSQL + `,
 taken AS (DELETE FROM {segment} m WHERE m.ctid = ANY(ARRAY(SELECT ctid FROM k))
 RETURNING m.pos, m.first_due, m.id, m.queue, m.generation, m.attempt, m.type, m.headers, m.payload),
 d AS MATERIALIZED (SELECT taken.*, u.route, u.delay, u.refund, u.dead_letter_queue, u.reason, u.error, u.error_type, u.attempts,
 CASE WHEN u.stamp THEN u.state || timestamptz_send(statement_timestamp()) ELSE u.state END AS past
 FROM taken JOIN u ON u.pos = taken.pos AND u.generation = taken.generation),
 back AS (INSERT INTO {schema}.ready (segment, first_due, id, queue, generation, attempt, type, headers, state, payload)
 SELECT {head}, first_due, id, queue, generation, attempt - refund, type, headers, past, payload FROM d WHERE route = 1 ORDER BY pos RETURNING segment, pos),
 delayed AS (INSERT INTO {schema}.delayed (due_at, first_due, id, queue, generation, attempt, type, headers, state, payload)
 SELECT statement_timestamp() + delay * interval '1 microsecond', first_due, id, queue, generation, attempt - refund, type, headers, past, payload
 FROM d WHERE route = 2),
 dead AS (INSERT INTO {schema}.dead (first_due, id, queue, generation, attempts, type, dead_letter_queue, reason, error, error_type, last_owner,
 headers, state, payload)
 SELECT first_due, id, queue, generation, attempts, type, dead_letter_queue, reason, error, error_type, $15, headers, past, payload
 FROM d WHERE route = 3 ORDER BY pos),
 history AS (INSERT INTO {schema}.history (first_due, id, queue, generation, attempts, type, owner, headers, state, payload)
 SELECT first_due, id, queue, generation, attempt, type, $15, headers, past, payload FROM d WHERE route = 4 ORDER BY pos)
 ` + answersSQL + `
 UNION ALL SELECT 3, min(pos), segment FROM back GROUP BY segment`

	// verifySQL answers for the rows that are there: 1 = mine, 2 = mine and locked, 0 = another's. It looks into the cold
	// segment with the same snapshot, or a message on its way there would seem to be gone.
	verifySQL = `WITH ` + fencedSQL + `,
 k AS MATERIALIZED (SELECT x.pos, x.generation FROM u, LATERAL (SELECT r.pos, r.generation FROM {schema}.ready r WHERE r.segment IN ({number}, {cold number})
 AND r.queue = $1 AND r.pos = u.pos AND r.lease_owner = u.owner AND r.generation = u.generation FOR UPDATE SKIP LOCKED) x)
 SELECT CASE WHEN m.lease_owner IS DISTINCT FROM u.owner OR m.generation <> u.generation THEN 0
 WHEN EXISTS (SELECT FROM k WHERE k.pos = u.pos AND k.generation = u.generation) THEN 1 ELSE 2 END, u.pos, u.generation
 FROM u, LATERAL (SELECT r.lease_owner, r.generation FROM {schema}.ready r WHERE r.segment IN ({number}, {cold number})
 AND r.queue = $1 AND r.pos = u.pos OFFSET 0) m`
)

// Routes of moveSQL.
const (
	toReady   = 1
	toDelayed = 2
	toDead    = 3
	toHistory = 4
)

// settling is one Settle call, sorted by what is to be done and where.
type settling struct {
	feed  *feed
	batch []leasebus.Settlement
	// cold: the messages are looked for in the cold segment, wherever they were leased.
	cold  bool
	parts []*settlingPart
	// soonest is the shortest delay of a message that waits now. 0 = none does.
	soonest time.Duration
}

// settlingPart is what one statement does.
type settlingPart struct {
	kind    partKind
	seg     segment
	leases  *fences
	moves   moves // of a moving part
	answers fenceAnswers
}

type partKind uint8

const (
	completing partKind = iota
	moving
	verifying
)

// moves are the arrays of moveSQL besides the fences, in the order in which they were added.
type moves struct {
	routes, refunds, attempts                     []int32
	delays                                        []int64
	states                                        [][]byte
	stamps                                        []bool
	deadLetterQueues, reasons, errors, errorTypes []string
}

// Settle implements [leasebus.Feed].
//
// An element whose texts cannot be stored is answered Rejected, and the others go on without it.
func (f *feed) Settle(ctx context.Context, batch []leasebus.Settlement) error {
	if err := f.guard(ctx, "settle in"); err != nil {
		return err
	}
	if err := f.settle(ctx, batch, false); err != nil {
		return err
	}
	return elsewhere(f, batch, func(st *leasebus.Settlement) (*leasebus.Lease, *leasebus.Result) {
		if st.Kind == leasebus.SettleVerify { // has looked there
			return nil, nil
		}
		return st.Lease, &st.Result
	}, func(moved []leasebus.Settlement) error { return f.settle(ctx, moved, true) })
}

func (f *feed) settle(ctx context.Context, batch []leasebus.Settlement, cold bool) error {
	s := settling{feed: f, batch: batch, cold: cold}
	s.sort()
	if len(s.parts) == 0 {
		return nil
	}
	defer f.alone(ctx, f.settling, nil)()
	busy, sent := false, time.Now()
	err := f.in.caller.call(ctx, f.in.settles, func(b *pgx.Batch) { s.queue(b, busy) }, s.read)
	if sqlState(err) == codeLockTimeout {
		busy = true
		err = f.in.caller.call(ctx, f.in.settles, func(b *pgx.Batch) { s.queue(b, busy) }, s.read)
	}
	if refusesData(err) {
		return f.failed("settle in", unstorableError{err})
	}
	if err != nil {
		return f.failed("settle in", err)
	}
	s.answer()
	if s.soonest > 0 {
		f.in.keeper.arrived(arrival{queue: f.queue, due: max(s.soonest-time.Since(sent), 0)})
	}
	return nil
}

// unstorableError makes the engine look for the element that the server refuses.
type unstorableError struct{ error }

func (e unstorableError) Unwrap() error        { return e.error }
func (e unstorableError) Is(target error) bool { return target == leasebus.ErrUnstorable }

// sort decides for each element which statement it goes to.
func (s *settling) sort() {
	keep := s.feed.sub.Policy.RetainCompleted > 0
	seen := newFences(len(s.batch))
	for i := range s.batch {
		st := &s.batch[i]
		switch {
		case !storableSettlement(st):
			st.Result = leasebus.ResultRejected
		case !s.feed.gave(st.Lease):
			st.Result = leasebus.ResultLost
		default:
			seen.add(st.Lease, i)
		}
	}
	seen.sort()
	for at := range seen.list {
		i := int(seen.list[at].index)
		st := &s.batch[i]
		switch {
		case st.Kind == leasebus.SettleVerify:
			s.part(verifying, st.Lease).leases.add(st.Lease, i)
		case at > 0 && seen.list[at-1].pos == seen.list[at].pos && seen.list[at-1].generation == seen.list[at].generation:
			st.Result = leasebus.ResultLost // a second end of one lease
		case st.Kind == leasebus.SettleComplete && !keep, st.Kind == leasebus.SettleDiscard:
			s.part(completing, st.Lease).leases.add(st.Lease, i)
		default:
			p := s.part(moving, st.Lease)
			p.leases.add(st.Lease, i)
			s.move(&p.moves, st)
		}
	}
}

// part returns the part that ends l in this way.
func (s *settling) part(kind partKind, l *leasebus.Lease) *settlingPart {
	seg := segmentOf(l)
	if s.cold {
		seg = coldSegment
	}
	for _, p := range s.parts {
		if p.kind == kind && p.seg == seg {
			return p
		}
	}
	p := &settlingPart{kind: kind, seg: seg, leases: newFences(len(s.batch))}
	s.parts = append(s.parts, p)
	return p
}

func storableSettlement(st *leasebus.Settlement) bool {
	ok := func(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }
	if st.Failure != nil && (!ok(st.Failure.Text) || !ok(st.Failure.ErrorType)) {
		return false
	}
	return ok(string(st.Reason)) && ok(st.DeadLetterQueue)
}

// move adds what moveSQL is to do with a message.
func (s *settling) move(m *moves, st *leasebus.Settlement) {
	p := st.Lease.Ref.P.(*claimed).past.clone() //nolint:forcetypeassert // fences has looked
	p.failed = false
	route, refund, delay := int32(toDelayed), int32(0), microseconds(st.Delay)
	switch st.Kind {
	case leasebus.SettleRetry:
		p.failed = true
		p.recorded = st.Lease.Attempt
	case leasebus.SettleDefer:
		p.deferrals++
		refund = 1
	case leasebus.SettleRelease:
		if st.Started {
			p.interruptions++
		}
		refund, delay = 1, 0
	case leasebus.SettleDeadLetter:
		p.recorded = st.Lease.Attempt
		route = toDead
	default: // a completion that is kept
		route = toHistory
	}
	if route == toDelayed && delay == 0 {
		route = toReady
	}
	if route == toDelayed && (s.soonest == 0 || st.Delay < s.soonest) {
		s.soonest = st.Delay
	}
	stamp := st.Failure != nil
	if stamp {
		p.fail(st.Failure, s.feed.sub.Owner)
	}
	m.routes, m.refunds, m.delays = append(m.routes, route), append(m.refunds, refund), append(m.delays, min(delay, maxDelay))
	m.states, m.stamps = append(m.states, p.encode(stamp)), append(m.stamps, stamp)
	m.deadLetterQueues, m.reasons = append(m.deadLetterQueues, st.DeadLetterQueue), append(m.reasons, string(st.Reason))
	m.attempts = append(m.attempts, int32(min(max(st.Attempts, 0), maxAttempts)))
	text, errorType := p.lastError()
	m.errors, m.errorTypes = append(m.errors, storable(text)), append(m.errorTypes, storable(errorType))
}

const (
	// maxDelay is 100 years in microseconds: as long as anyone can wait.
	maxDelay    = 876_000 * int64(time.Hour/time.Microsecond)
	maxAttempts = 1<<31 - 1
)

func (p *past) lastError() (text, errorType string) {
	if len(p.failures) == 0 {
		return "", ""
	}
	last := &p.failures[len(p.failures)-1]
	return last.text, last.errorType
}

func (s *settling) queue(b *pgx.Batch, busy bool) {
	f := s.feed
	if busy {
		b.Queue(pinBusySQL)
	} else {
		b.Queue(pinSettleSQL)
	}
	for _, p := range s.parts {
		statement, args := &f.in.sql.in[p.seg], p.leases.args(f.queue)
		switch {
		case p.kind == moving:
			m := &p.moves
			b.Queue(statement.move, append(args, m.routes, m.delays, m.refunds, m.states, m.stamps,
				m.deadLetterQueues, m.reasons, m.errors, m.errorTypes, m.attempts, f.sub.Owner)...)
		case p.kind == verifying:
			b.Queue(statement.verify, args...)
		case busy:
			b.Queue(statement.completeBusy, args...)
		default:
			b.Queue(statement.complete, append(args, p.leases.owners())...)
		}
	}
}

func (s *settling) read(results pgx.BatchResults) error {
	if err := skip(results); err != nil {
		return err
	}
	for _, p := range s.parts {
		absent, read := leasebus.ResultLost, p.answers.read
		if p.kind == verifying {
			absent, read = leasebus.ResultOK, p.answers.readVerified
		}
		p.answers.begin(p.leases, absent)
		if err := each(results, read); err != nil {
			return err
		}
	}
	return nil
}

// readVerified takes a row of verifySQL. A row that is not there was completed: nobody but its owner could end it while
// the owner's transaction held it (S17).
func (a *fenceAnswers) readVerified(r *row) error {
	result := [...]leasebus.Result{leasebus.ResultLost, leasebus.ResultStillLeased, leasebus.ResultBusy}
	kind, pos, generation := r.int(0), r.int64(1), r.int32(2)
	for at := range a.results {
		if a.leases[at].pos == pos && a.leases[at].generation == generation {
			a.results[at] = result[kind]
		}
	}
	return r.err
}

func (s *settling) answer() {
	for _, p := range s.parts {
		for at, result := range p.answers.results {
			s.batch[p.leases.list[at].index].Result = result
		}
		if p.answers.back.pos > 0 {
			p.answers.back.queue = s.feed.queue
			s.feed.in.announce([]arrival{p.answers.back})
		}
	}
}
