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
	// completeSQL waits for a renewal that is under way, within lock_timeout. What it waited for is checked again: a row's
	// lease is found by binary search then.
	completeSQL = `WITH ` + fencedSQL + `,
 d AS (DELETE FROM {ready} m WHERE m.ctid = ANY(ARRAY(SELECT x.ctid FROM u, LATERAL (SELECT r.ctid ` + heldSQL + ` OFFSET 0) x))
 AND m.lease_owner = ($4::bigint[])[width_bucket(m.pos, $2::bigint[])] AND m.generation = ($3::int[])[width_bucket(m.pos, $2::bigint[])]
 RETURNING m.pos, m.generation)
 SELECT 1, pos, generation FROM d UNION ALL ` + restSQL

	// completeBusySQL leaves out what is locked.
	completeBusySQL = `WITH ` + fencedSQL + `, ` + lockedSQL + `,
 d AS (DELETE FROM {ready} m WHERE m.ctid = ANY(ARRAY(SELECT ctid FROM k)) RETURNING m.pos, m.generation)
 SELECT 1, pos, generation FROM d UNION ALL ` + restSQL

	// moveSQL ends leases by taking their messages elsewhere: one statement, so that nothing is lost between. It leaves
	// out what is locked, as completeBusySQL does. The database writes the time of a failure behind the state (stamp).
	moveSQL = `WITH u AS (SELECT * FROM unnest($2::bigint[], $3::int[], $4::bigint[], $5::int[], $6::bigint[], $7::int[],
 $8::bytea[], $9::bool[], $10::text[], $11::text[], $12::text[], $13::text[], $14::int[])
 AS u(pos, generation, owner, route, delay, refund, state, stamp, dead_letter_queue, reason, error, error_type, attempts)), ` + lockedSQL + `,
 taken AS (DELETE FROM {ready} m WHERE m.ctid = ANY(ARRAY(SELECT ctid FROM k))
 RETURNING m.pos, m.first_due, m.id, m.queue, m.generation, m.attempt, m.type, m.headers, m.payload),
 d AS MATERIALIZED (SELECT taken.*, u.route, u.delay, u.refund, u.dead_letter_queue, u.reason, u.error, u.error_type, u.attempts,
 CASE WHEN u.stamp THEN u.state || timestamptz_send(statement_timestamp()) ELSE u.state END AS past
 FROM taken JOIN u ON u.pos = taken.pos AND u.generation = taken.generation),
 ready AS (INSERT INTO {ready} (first_due, id, queue, generation, attempt, type, headers, state, payload)
 SELECT first_due, id, queue, generation, attempt - refund, type, headers, past, payload FROM d WHERE route = 1 ORDER BY pos RETURNING pos),
 delayed AS (INSERT INTO {schema}.delayed (due_at, first_due, id, queue, generation, attempt, type, headers, state, payload)
 SELECT statement_timestamp() + delay * interval '1 microsecond', first_due, id, queue, generation, attempt - refund, type, headers, past, payload
 FROM d WHERE route = 2),
 dead AS (INSERT INTO {schema}.dead (first_due, id, queue, generation, attempts, type, dead_letter_queue, reason, error, error_type, last_owner,
 headers, state, payload)
 SELECT first_due, id, queue, generation, attempts, type, dead_letter_queue, reason, error, error_type, $15, headers, past, payload
 FROM d WHERE route = 3 ORDER BY pos),
 history AS (INSERT INTO {schema}.history (first_due, id, queue, generation, attempts, type, owner, headers, state, payload)
 SELECT first_due, id, queue, generation, attempt, type, $15, headers, past, payload FROM d WHERE route = 4 ORDER BY pos)
 SELECT 1, pos, generation FROM d
 UNION ALL ` + restSQL + `
 UNION ALL SELECT 3, min(pos), 0 FROM ready HAVING count(*) > 0`

	// verifySQL answers for the rows that are there: 1 = mine, 2 = mine and locked, 0 = another's.
	verifySQL = `WITH ` + fencedSQL + `, ` + lockedSQL + `
 SELECT CASE WHEN m.lease_owner IS DISTINCT FROM u.owner OR m.generation <> u.generation THEN 0
 WHEN m.ctid = ANY(ARRAY(SELECT ctid FROM k)) THEN 1 ELSE 2 END, u.pos, u.generation
 FROM u, LATERAL (SELECT r.ctid, r.lease_owner, r.generation FROM {ready} r WHERE r.queue = $1 AND r.pos = u.pos OFFSET 0) m`
)

// Routes of moveSQL.
const (
	toReady   = 1
	toDelayed = 2
	toDead    = 3
	toHistory = 4
)

// settling is one Settle call, sorted by what is to be done.
type settling struct {
	feed  *feed
	batch []leasebus.Settlement

	completed, moved, verified fences
	moves                      moves
	// soonest is the shortest delay of a message that waits now. 0 = none does.
	soonest time.Duration
	// Answers, beside the fences.
	completions, movings, verifications fenceAnswers
}

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
	if len(batch) == 0 {
		return nil
	}
	s := settling{feed: f, batch: batch}
	s.sort()
	busy := false
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
	if s.movings.back > 0 {
		f.in.announce([]arrival{{queue: f.queue, pos: s.movings.back}})
	}
	if s.soonest > 0 {
		f.in.keeper.arrived(arrival{queue: f.queue, due: s.soonest})
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
		case !seen.add(s.feed, st.Lease, i):
			st.Result = leasebus.ResultLost
		}
	}
	seen.sort()
	s.completed = newFences(seen.Len())
	for at, i := range seen.index {
		st := &s.batch[i]
		switch {
		case st.Kind == leasebus.SettleVerify:
			s.verified.add(s.feed, st.Lease, i)
		case at > 0 && seen.pos[at-1] == seen.pos[at] && seen.generation[at-1] == seen.generation[at]:
			st.Result = leasebus.ResultLost // a second end of one lease
		case st.Kind == leasebus.SettleComplete && !keep, st.Kind == leasebus.SettleDiscard:
			s.completed.add(s.feed, st.Lease, i)
		default:
			s.moved.add(s.feed, st.Lease, i)
			s.move(st)
		}
	}
}

func storableSettlement(st *leasebus.Settlement) bool {
	ok := func(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }
	if st.Failure != nil && (!ok(st.Failure.Text) || !ok(st.Failure.ErrorType)) {
		return false
	}
	return ok(string(st.Reason)) && ok(st.DeadLetterQueue)
}

// move adds what moveSQL is to do with a message.
func (s *settling) move(st *leasebus.Settlement) {
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
	m := &s.moves
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
	b.Queue(pinSettleSQL)
	if c := &s.completed; c.Len() > 0 {
		complete := f.in.sql.complete
		if busy {
			complete = f.in.sql.completeBusy
		}
		b.Queue(complete, f.queue, c.pos, c.generation, c.owner)
	}
	if c, m := &s.moved, &s.moves; c.Len() > 0 {
		b.Queue(f.in.sql.move, f.queue, c.pos, c.generation, c.owner, m.routes, m.delays, m.refunds, m.states, m.stamps,
			m.deadLetterQueues, m.reasons, m.errors, m.errorTypes, m.attempts, f.sub.Owner)
	}
	if c := &s.verified; c.Len() > 0 {
		b.Queue(f.in.sql.verify, f.queue, c.pos, c.generation, c.owner)
	}
}

func (s *settling) read(results pgx.BatchResults) error {
	if err := skip(results); err != nil {
		return err
	}
	for _, part := range []struct {
		fences  *fences
		answers *fenceAnswers
	}{{&s.completed, &s.completions}, {&s.moved, &s.movings}, {&s.verified, &s.verifications}} {
		if part.fences.Len() == 0 {
			continue
		}
		absent, read := leasebus.ResultLost, part.answers.read
		if part.fences == &s.verified {
			absent, read = leasebus.ResultOK, part.answers.readVerified
		}
		part.answers.begin(part.fences, absent)
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
		if a.leases.pos[at] == pos && a.leases.generation[at] == generation {
			a.results[at] = result[kind]
		}
	}
	return r.err
}

func (s *settling) answer() {
	for _, a := range []*fenceAnswers{&s.completions, &s.movings, &s.verifications} {
		for at, result := range a.results {
			s.batch[a.leases.index[at]].Result = result
		}
	}
}
