package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// promoteSQL moves what has become due in front of every cursor. It begins to look at a time of each queue. The answer
	// is as that of an insert, with the number of messages and the time of the last one behind it.
	promoteSQL = `WITH d AS (DELETE FROM {schema}.delayed WHERE ctid = ANY(ARRAY(
 SELECT x.ctid FROM unnest($1::int[], $2::bigint[]) AS u(queue, since), LATERAL (SELECT m.ctid FROM {schema}.delayed m
 WHERE m.queue = u.queue AND m.due_at >= timestamptz '2000-01-01 00:00:00+00' + u.since * interval '1 microsecond'
 AND m.due_at <= statement_timestamp() ORDER BY m.due_at, m.pos LIMIT $3 FOR UPDATE SKIP LOCKED) x))
 RETURNING *),
 i AS (INSERT INTO {schema}.ready (segment, visible_at, first_due, id, queue, generation, attempt, type, headers, state, payload)
 SELECT {head}, due_at, first_due, id, queue, generation, attempt, type, headers, state, payload FROM d ORDER BY due_at, pos
 RETURNING queue, segment, pos, visible_at)
 SELECT queue, segment, min(pos), NULL::bigint, count(*), timestamptz_send(max(visible_at)) FROM i GROUP BY queue, segment`

	// nextDueSQL is sent with promoteSQL: what became due since their transaction began is what that has left.
	nextDueSQL = `SELECT ceil(extract(epoch FROM min(x.due_at) - statement_timestamp()) * 1000000)::bigint FROM unnest($1::int[]) AS u(queue), LATERAL
 (SELECT m.due_at FROM {schema}.delayed m WHERE m.queue = u.queue AND m.due_at > transaction_timestamp() ORDER BY m.due_at LIMIT 1) x`

	pinPromoteSQL = pinSQL + `, timestamptz_send(statement_timestamp())`
	pinnedTime    = 5 // its column with the time
)

const (
	promoteBatch = 500
	// promoteSpacing is the least time between two promotions: what becomes due meanwhile goes together.
	promoteSpacing = 20 * time.Millisecond
	// dueLookEvery is how often delayed messages are looked for from the first one on: another process may have added
	// one, or a transaction that was committed late. If that takes long, it is done so seldom that it takes the dueLookShare-th
	// part of the time.
	dueLookEvery = 2 * time.Second
	dueLookShare = 20
	// promotedSlack is how late a transaction may commit whose message is found without that.
	promotedSlack = 200 * time.Millisecond

	maxInstant = instant(1<<63 - 1)
)

// promote moves what is due, and learns when the next is. It goes on where it was last time: what was promoted before
// lies dead in the index until it is vacuumed, which an old snapshot can hinder for long. With whole, it begins at the
// first one.
func (k *keeper) promote(ctx context.Context, feeds []*feed, whole bool) error {
	in := k.in
	queues := queuesOf(feeds)
	// Anything that is told from here on is earlier than what the answer can know.
	since := k.beginPromotion(queues, whole)
	var came []arrival
	var now instant
	reached := make(map[int32]instant) // by queues of which there is more
	wait := maxDue
	err := in.caller.call(ctx, in.claims, func(b *pgx.Batch) {
		b.Queue(pinPromoteSQL)
		b.Queue(in.sql.promote, queues, since, promoteBatch)
		b.Queue(in.sql.nextDue, queues)
	}, func(results pgx.BatchResults) error {
		came, wait = nil, maxDue
		clear(reached)
		if err := each(results, func(r *row) error {
			now = r.instant(pinnedTime)
			return r.err
		}); err != nil {
			return err
		}
		if err := each(results, func(r *row) error {
			a := readArrival(r)
			came = append(came, a)
			if r.int(4) >= promoteBatch {
				reached[a.queue] = r.instant(5)
			}
			return r.err
		}); err != nil {
			return err
		}
		return each(results, func(r *row) error {
			if !r.null(0) {
				wait = dueIn(max(r.int64(0), 0))
			}
			return r.err
		})
	})
	if err != nil {
		for _, queue := range queues {
			k.promotedLess(queue)
		}
		k.due(0)
		return err
	}
	in.announce(came)
	k.endPromotion(queues, now, reached)
	if len(reached) > 0 {
		wait = 0
	}
	k.due(wait)
	return nil
}

// beginPromotion returns from which time on each queue is to be looked through.
func (k *keeper) beginPromotion(queues []int32, whole bool) (since []int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dueAt = time.Now().Add(maxDue)
	since = make([]int64, len(queues))
	for i, queue := range queues {
		if !whole {
			since[i] = int64(k.promoted[queue])
		}
		k.promoted[queue] = maxInstant // unless somebody tells of less
	}
	return since
}

// endPromotion notes how far a promotion has come that began at a time.
func (k *keeper) endPromotion(queues []int32, now instant, reached map[int32]instant) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, queue := range queues {
		upTo, more := reached[queue]
		if !more {
			upTo = now - instant(promotedSlack/time.Microsecond)
		}
		k.promoted[queue] = max(min(k.promoted[queue], upTo), 0)
	}
}

// promotedLess makes the next promotion look through the queue from its first message on: one that is due has come later
// than it became so.
func (k *keeper) promotedLess(queue int32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.promoted[queue] = 0
}
