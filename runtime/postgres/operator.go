package postgres

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	leasebus "github.com/leasebus/leasebus/runtime"
)

const (
	deadColumns = `pos, id, type, headers, state, payload, timestamptz_send(first_due), timestamptz_send(dead_at),
 generation, attempts, dead_letter_queue, reason, error, error_type, last_owner, replaced_by`

	deadFilter = ` AND pos > $2 AND pos <= $3 AND ($4 = '' OR type = $4) AND ($5 = '' OR reason = $5) AND ($6 = '' OR dead_letter_queue = $6)
 AND ($7 = '' OR strpos(error, $7) > 0) AND ($8::timestamptz IS NULL OR dead_at >= $8) AND ($9::timestamptz IS NULL OR dead_at < $9) ORDER BY pos LIMIT $10`

	listDeadSQL     = `SELECT ` + deadColumns + ` FROM {schema}.dead WHERE queue = $1` + deadFilter
	listDeadByIDSQL = `SELECT ` + deadColumns + ` FROM {schema}.dead WHERE queue = $1 AND id = ANY($11::uuid[])` + deadFilter

	lastDeadSQL = `SELECT coalesce(max(pos), 0) FROM {schema}.dead WHERE queue = $1`

	// findDeadSQL locks what is acted on, in the order of the positions.
	findDeadSQL = `SELECT pos, id, state, replaced_by, timestamptz_send(statement_timestamp()) FROM {schema}.dead
 WHERE queue = $1 AND (pos = ANY($2::bigint[]) OR id = ANY($3::uuid[])) ORDER BY pos FOR UPDATE`

	requeueSQL = `WITH u AS MATERIALIZED (SELECT $1::int AS queue, u.* FROM unnest($2::bigint[], $3::bytea[]) AS u(pos, past)),
 d AS (DELETE FROM {schema}.dead m USING u WHERE m.queue = u.queue AND m.pos = u.pos RETURNING m.*, u.past),
 i AS (INSERT INTO {schema}.ready (segment, first_due, id, queue, generation, type, headers, state, payload)
 SELECT {head}, first_due, id, queue, generation + 1, type, headers, past, payload FROM d ORDER BY pos RETURNING queue, segment, pos)
 SELECT queue, segment, min(pos), NULL::bigint FROM i GROUP BY queue, segment`

	discardSQL = `DELETE FROM {schema}.dead WHERE queue = $1 AND pos = ANY($2::bigint[])`

	replaceSQL = `UPDATE {schema}.dead m SET replaced_by = $4, generation = generation + 1, state = u.past
 FROM unnest($2::bigint[], $3::bytea[]) AS u(pos, past) WHERE m.queue = $1 AND m.pos = u.pos`

	// whereIsSQL finds those of the ids that the queue has anywhere. It reads the queue: live messages are looked for by
	// their id only here, and an index would cost every publish.
	whereIsSQL = `SELECT id FROM {schema}.ready WHERE queue = $1 AND id = ANY($2::uuid[])
 UNION SELECT id FROM {schema}.delayed WHERE queue = $1 AND id = ANY($2::uuid[])
 UNION SELECT id FROM {schema}.dead WHERE queue = $1 AND id = ANY($2::uuid[])
 UNION SELECT id FROM {schema}.history WHERE queue = $1 AND id = ANY($2::uuid[])`

	// statsSQL reads the flag "failed" where state keeps it.
	statsSQL = `SELECT r.pending + d.pending, r.processing, r.failed + d.failed, (SELECT count(*) FROM {schema}.dead WHERE queue = $1),
 (SELECT count(*) FROM {schema}.history WHERE queue = $1), r.due + d.due,
 coalesce((extract(epoch FROM statement_timestamp() - least(r.oldest, d.oldest)) * 1000000)::bigint, 0), r.stuck
 FROM (SELECT count(*) FILTER (WHERE lease_owner IS NULL AND NOT failed) AS pending, count(*) FILTER (WHERE lease_owner IS NOT NULL) AS processing,
 count(*) FILTER (WHERE lease_owner IS NULL AND failed) AS failed, count(*) FILTER (WHERE lease_owner IS NULL) AS due,
 min(visible_at) FILTER (WHERE lease_owner IS NULL) AS oldest, count(*) FILTER (WHERE lease_owner IS NOT NULL AND visible_at <= statement_timestamp()) AS stuck
 FROM (SELECT lease_owner, visible_at, coalesce(get_byte(state, 1) & 1, 0) = 1 AS failed FROM {schema}.ready WHERE queue = $1) x) r,
 (SELECT count(*) FILTER (WHERE NOT failed) AS pending, count(*) FILTER (WHERE failed) AS failed,
 count(*) FILTER (WHERE due_at <= statement_timestamp()) AS due, min(due_at) FILTER (WHERE due_at <= statement_timestamp()) AS oldest
 FROM (SELECT due_at, coalesce(get_byte(state, 1) & 1, 0) = 1 AS failed FROM {schema}.delayed WHERE queue = $1) x) d`
)

// ids are an array of uuid.
type ids = []pgtype.UUID

func idsOf(list []leasebus.ID) ids {
	all := make(ids, len(list))
	for i, id := range list {
		all[i] = pgtype.UUID{Bytes: id, Valid: true}
	}
	return all
}

// DeadLetters implements [leasebus.Operator]. A limit below 1 is refused.
func (in *Inbox) DeadLetters(ctx context.Context, queue string, f leasebus.Filter, after leasebus.Cursor, limit int) ([]leasebus.DeadLetter, error) {
	const what = "dead letters of"
	if limit < 1 {
		return nil, fmt.Errorf("postgres: %s %q: limit %d is out of range; allowed is 1 or more", what, queue, limit)
	}
	behind, err := positionOf(after)
	if err != nil {
		return nil, err
	}
	upTo := int64(1<<63 - 1)
	if f.UpTo != "" {
		if upTo, err = positionOf(f.UpTo); err != nil {
			return nil, err
		}
	}
	id, ok, err := in.operate(ctx, what, queue)
	if err != nil || !ok {
		return nil, err
	}
	for _, text := range []string{f.Type, string(f.Reason), f.DeadLetterQueue, f.ErrorContains} {
		if storable(text) != text { // no stored text holds it, and the server would refuse the question
			return nil, nil
		}
	}
	statement := in.sql.listDead
	args := []any{id, behind, upTo, f.Type, string(f.Reason), f.DeadLetterQueue, f.ErrorContains, timeOrNull(f.Since), timeOrNull(f.Before), limit}
	if len(f.IDs) > 0 {
		statement, args = in.sql.listDeadByID, append(args, idsOf(f.IDs))
	}
	var letters []leasebus.DeadLetter
	err = in.caller.call(ctx, in.rest, func(b *pgx.Batch) { b.Queue(statement, args...) }, func(results pgx.BatchResults) error {
		letters = nil
		return each(results, func(r *row) error {
			letter, err := readDeadLetter(r)
			letter.Queue = queue
			letters = append(letters, letter)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("postgres: %s %q: %w", what, queue, err)
	}
	return letters, nil
}

// timeOrNull rounds up, as the store's times have microseconds: t ≤ x holds for the same x then.
func timeOrNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.Add(time.Microsecond - 1).Truncate(time.Microsecond)
	return &t
}

func readDeadLetter(r *row) (leasebus.DeadLetter, error) {
	d := leasebus.DeadLetter{
		Envelope:        leasebus.Envelope{ID: r.id(1), Type: string(r.text(2)), Payload: slices.Clone(r.bytes(5)), FirstDue: r.instant(6).time()},
		Cursor:          cursorOf(r.int64(0)),
		DeadLetteredAt:  r.instant(7).time(),
		Generation:      r.int64(8),
		Attempts:        r.int(9),
		DeadLetterQueue: string(r.text(10)),
		Reason:          leasebus.Reason(r.text(11)),
		Error:           string(r.text(12)),
		ErrorType:       string(r.text(13)),
		LastOwner:       string(r.text(14)),
		ReplacedBy:      r.id(15),
	}
	if err := readPast(r, &d); err != nil {
		return d, fmt.Errorf("message %s: %w", d.ID, err)
	}
	return d, r.err
}

// readPast reads the columns headers and state, the fourth and fifth.
func readPast(r *row, d *leasebus.DeadLetter) (err error) {
	if d.Headers, err = readHeaders(r.bytes(3), d.ID, newBytes); err != nil {
		return err
	}
	p, err := decodePast(r.bytes(4))
	if err == nil && p != nil {
		p.describe(d)
	}
	return err
}

// describe adds to a dead letter what its state knows.
func (p *past) describe(d *leasebus.DeadLetter) {
	d.IdempotencyKey, d.OrderingKey = p.idempotencyKey, p.orderingKey
	if first := p.failedFirst(); first != 0 {
		d.FirstFailed = first.time()
	}
	for _, f := range p.failures {
		d.History = append(d.History, leasebus.FailureRecord{
			Failure: leasebus.Failure{Attempt: f.attempt, Text: f.text, ErrorType: f.errorType}, At: f.at.time(), Owner: f.owner,
		})
	}
	for _, r := range p.requeues {
		d.Requeues = append(d.Requeues, leasebus.RequeueRecord{By: r.by, At: r.at.time()})
	}
}

// LastDeadLetter implements [leasebus.Operator]. Of a queue without dead letters it is a position before all.
func (in *Inbox) LastDeadLetter(ctx context.Context, queue string) (leasebus.Cursor, error) {
	const what = "last dead letter of"
	id, ok, err := in.operate(ctx, what, queue)
	if err != nil || !ok {
		return cursorOf(0), err
	}
	var last int64
	err = in.caller.call(ctx, in.rest, func(b *pgx.Batch) { b.Queue(in.sql.lastOf, id) }, func(results pgx.BatchResults) error {
		return each(results, func(r *row) error {
			last = r.int64(0)
			return r.err
		})
	})
	if err != nil {
		return cursorOf(0), fmt.Errorf("postgres: %s %q: %w", what, queue, err)
	}
	return cursorOf(last), nil
}

// Requeue implements [leasebus.Operator].
func (in *Inbox) Requeue(ctx context.Context, queue string, refs []leasebus.DeadLetterRef, by string) ([]leasebus.Disposition, error) {
	return in.act(ctx, "requeue in", queue, refs, func(ctx context.Context, a *action) error {
		found := a.apply(func(d *deadRow) leasebus.Disposition {
			if d.replaced {
				return leasebus.DispositionReplaced
			}
			d.past.actedOn(storable(by), d.now)
			d.past.failed, d.past.recorded, d.past.interruptions = false, 0, 0
			return leasebus.DispositionDone
		}, true)
		if len(found.pos) == 0 {
			return nil
		}
		came, err := a.insert(ctx, in.sql.requeue, a.queue, found.pos, found.states)
		a.came = came
		return err
	})
}

// Discard implements [leasebus.Operator].
func (in *Inbox) Discard(ctx context.Context, queue string, refs []leasebus.DeadLetterRef, _ string) ([]leasebus.Disposition, error) {
	return in.act(ctx, "discard in", queue, refs, func(ctx context.Context, a *action) error {
		found := a.apply(func(*deadRow) leasebus.Disposition { return leasebus.DispositionDone }, true)
		_, err := a.tx.Exec(ctx, in.sql.discard, a.queue, found.pos)
		return err
	})
}

// Replace implements [leasebus.Operator]. Without a cursor, all twins are marked and one envelope takes their place.
// An edited envelope with the id of the dead letter, or for another queue, is refused.
func (in *Inbox) Replace(ctx context.Context, queue string, ref leasebus.DeadLetterRef, edited *leasebus.Envelope, by string) (leasebus.Disposition, error) {
	if err := in.admitEdited(queue, ref, edited); err != nil {
		return leasebus.DispositionNotFound, err
	}
	dispositions, err := in.act(ctx, "replace in", queue, []leasebus.DeadLetterRef{ref}, func(ctx context.Context, a *action) error {
		var first *deadRow
		found := a.apply(func(d *deadRow) leasebus.Disposition {
			if d.replaced {
				return leasebus.DispositionReplaced
			}
			if first == nil {
				first = d
			}
			d.past.actedOn(storable(by), d.now)
			d.replaced = true
			return leasebus.DispositionDone
		}, false)
		if first == nil {
			return nil
		}
		if _, err := a.tx.Exec(ctx, in.sql.replace, a.queue, found.pos, found.states, pgtype.UUID{Bytes: edited.ID, Valid: true}); err != nil {
			return err
		}
		e := *edited
		e.IdempotencyKey = first.past.idempotencyKey
		var out arrivals
		out.clear()
		out.add(a.queue, &e)
		came, err := a.insert(ctx, in.sql.insert.of(&out), out.args()...)
		a.came = came
		return err
	})
	if err != nil {
		return leasebus.DispositionNotFound, err
	}
	return dispositions[0], nil
}

func (in *Inbox) admitEdited(queue string, ref leasebus.DeadLetterRef, edited *leasebus.Envelope) error {
	err := admit(edited, in.options.maxPayload)
	switch {
	case err != nil:
	case edited.ID == ref.ID || edited.ID == leasebus.ID{}:
		err = &leasebus.EnvelopeError{Part: "id", Text: "is that of the dead letter, or none; an edited message needs a new one"}
	case edited.Queue != queue:
		err = &leasebus.EnvelopeError{Part: "queue", Text: "is not that of the dead letter; an edited message stays in its queue"}
	}
	if err != nil {
		return fmt.Errorf("postgres: replace in %q: %w", queue, err)
	}
	return nil
}

// Stats implements [leasebus.Operator]. It reads the queue: its cost grows with what is pending.
func (in *Inbox) Stats(ctx context.Context, queue string) (leasebus.QueueStats, error) {
	var s leasebus.QueueStats
	id, ok, err := in.operate(ctx, "stats of", queue)
	if err != nil || !ok {
		return s, err
	}
	err = in.caller.call(ctx, in.rest, func(b *pgx.Batch) { b.Queue(in.sql.stats, id) }, func(results pgx.BatchResults) error {
		return each(results, func(r *row) error {
			s = leasebus.QueueStats{
				Pending: r.int64(0), Processing: r.int64(1), Failed: r.int64(2), DeadLettered: r.int64(3), Completed: r.int64(4),
				Due: r.int64(5), OldestDueAge: time.Duration(r.int64(6)) * time.Microsecond, Stuck: r.int64(7),
			}
			return r.err
		})
	})
	if err != nil {
		return leasebus.QueueStats{}, fmt.Errorf("postgres: stats of %q: %w", queue, err)
	}
	return s, nil
}

// operate finds a queue for an operator. Without an error, ok = false means that there is none of that name.
func (in *Inbox) operate(ctx context.Context, what, queue string) (id int32, ok bool, err error) {
	if ctx.Err() != nil {
		return 0, false, fmt.Errorf("postgres: %s %q: %w", what, queue, context.Cause(ctx))
	}
	if storable(queue) != queue {
		return 0, false, nil
	}
	id, ok, err = in.lookup(ctx, queue)
	if err != nil {
		return 0, false, fmt.Errorf("postgres: %s %q: %w", what, queue, err)
	}
	return id, ok, nil
}

func cursorOf(pos int64) leasebus.Cursor { return leasebus.Cursor(strconv.FormatInt(pos, 10)) }

// positionOf reads a cursor. 0 = before all.
func positionOf(c leasebus.Cursor) (int64, error) {
	if c == "" {
		return 0, nil
	}
	pos, err := strconv.ParseInt(string(c), 10, 64)
	if err != nil || pos < 0 {
		return 0, fmt.Errorf("postgres: %q is no cursor of this store", string(c))
	}
	return pos, nil
}

// action is one act of an operator on the dead letters that references name, in one transaction.
type action struct {
	tx           pgx.Tx
	queue        int32
	targets      []target
	rows         []*deadRow
	dispositions []leasebus.Disposition
	came         []arrival
}

// target is a reference with its cursor read.
type target struct {
	id  leasebus.ID
	one bool
	pos int64 // if one
}

// deadRow is a dead letter under lock.
type deadRow struct {
	pos      int64
	id       leasebus.ID
	past     *past
	replaced bool
	now      instant
	gone     bool
	acted    bool
}

// acted are the rows that an action changes.
type acted struct {
	pos    []int64
	states [][]byte
}

// act finds what refs name, twins together (S33), lets do act on it, and says for the others why not.
func (in *Inbox) act(ctx context.Context, what, queue string, refs []leasebus.DeadLetterRef,
	do func(context.Context, *action) error,
) ([]leasebus.Disposition, error) {
	targets, err := targetsOf(refs)
	if err != nil {
		return nil, err
	}
	id, ok, err := in.operate(ctx, what, queue)
	if err != nil {
		return nil, err
	}
	dispositions := make([]leasebus.Disposition, len(refs))
	for i := range dispositions {
		dispositions[i] = leasebus.DispositionNotFound
	}
	if !ok || len(refs) == 0 {
		return dispositions, nil
	}
	var a *action
	for try := 1; ; try++ {
		a = &action{queue: id, targets: targets, dispositions: slices.Clone(dispositions)}
		err = in.caller.transaction(ctx, in.rest, func(tx pgx.Tx) error {
			a.tx = tx
			return in.run(ctx, a, do)
		})
		if sqlState(err) != codeDeadlock || try == serializationTries {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("postgres: %s %q: %w", what, queue, err)
	}
	in.announce(a.came)
	return a.dispositions, nil
}

func targetsOf(refs []leasebus.DeadLetterRef) ([]target, error) {
	targets := make([]target, len(refs))
	for i, ref := range refs {
		pos, err := positionOf(ref.Cursor)
		if err != nil {
			return nil, err
		}
		targets[i] = target{ref.ID, ref.Cursor != "", pos}
	}
	return targets, nil
}

func (in *Inbox) run(ctx context.Context, a *action, do func(context.Context, *action) error) error {
	positions, idList := []int64{}, []leasebus.ID{}
	for _, t := range a.targets {
		if t.one {
			positions = append(positions, t.pos)
		} else {
			idList = append(idList, t.id)
		}
	}
	rows, err := a.tx.Query(ctx, in.sql.findDead, a.queue, positions, idsOf(idList))
	if err := eachOf(rows, err, func(r *row) error {
		p, err := decodePast(r.bytes(2))
		if err != nil {
			return fmt.Errorf("message %s: %w", r.id(1), err)
		}
		a.rows = append(a.rows, &deadRow{pos: r.int64(0), id: r.id(1), past: p.clone(), replaced: !r.null(3), now: r.instant(4)})
		return r.err
	}); err != nil {
		return err
	}
	if err := do(ctx, a); err != nil {
		return err
	}
	return in.explain(ctx, a)
}

// apply lets judge decide about each row that is named, in the order of the references, and returns those that it has
// done something with. With remove, a row that is done is not there for the next reference.
func (a *action) apply(judge func(*deadRow) leasebus.Disposition, remove bool) acted {
	for i, t := range a.targets {
		for _, d := range a.rows {
			if d.gone || d.id != t.id || t.one && d.pos != t.pos {
				continue
			}
			disposition := judge(d)
			if disposition == leasebus.DispositionDone {
				d.acted, d.gone = true, remove
			}
			if a.dispositions[i] == leasebus.DispositionNotFound || disposition == leasebus.DispositionDone {
				a.dispositions[i] = disposition // done, if one of the twins is
			}
		}
	}
	done := acted{pos: []int64{}, states: [][]byte{}}
	for _, d := range a.rows {
		if d.acted {
			done.pos, done.states = append(done.pos, d.pos), append(done.states, d.past.encode(false))
		}
	}
	return done
}

// insert runs a statement that answers with arrivals.
func (a *action) insert(ctx context.Context, statement string, args ...any) (came []arrival, err error) {
	rows, err := a.tx.Query(ctx, statement, args...)
	err = eachOf(rows, err, func(r *row) error {
		came = append(came, readArrival(r))
		return r.err
	})
	return came, err
}

// explain tells for the references that named nothing whether the message is somewhere else.
func (in *Inbox) explain(ctx context.Context, a *action) error {
	var missing []leasebus.ID
	for i, t := range a.targets {
		if a.dispositions[i] == leasebus.DispositionNotFound {
			missing = append(missing, t.id)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	there := make(map[leasebus.ID]bool)
	rows, err := a.tx.Query(ctx, in.sql.whereIs, a.queue, idsOf(missing))
	if err := eachOf(rows, err, func(r *row) error {
		there[r.id(0)] = true
		return r.err
	}); err != nil {
		return err
	}
	for i, t := range a.targets {
		switch {
		case a.dispositions[i] != leasebus.DispositionNotFound || !there[t.id]:
		case t.one:
			a.dispositions[i] = leasebus.DispositionMoved
		default:
			a.dispositions[i] = leasebus.DispositionNotDeadLettered
		}
	}
	return nil
}
