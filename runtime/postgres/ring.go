package postgres

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// sizesSQL tells of each segment the bytes of its messages, the same with what is stored beside them, and how many
	// versions of rows are alive and dead, about; and the number of the head.
	sizesSQL = `SELECT pg_relation_size(c.oid), pg_table_size(c.oid), pg_stat_get_live_tuples(c.oid), pg_stat_get_dead_tuples(c.oid),
 (SELECT last_value FROM {schema}.ring) FROM unnest($2::text[]) WITH ORDINALITY AS t(name, n) JOIN pg_catalog.pg_class c ON c.relname = t.name
 AND c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $1) ORDER BY t.n`

	// advanceSQL moves the head on, if it is where it was. It is seen by everyone at once.
	advanceSQL = `SELECT setval($1::text::regclass, $2) FROM {schema}.ring WHERE last_value = $3`

	// emptySQL finds a message at or behind an address.
	emptySQL = `SELECT ctid::text FROM {segment} WHERE ctid >= $1::text::tid LIMIT 1`

	// A segment is truncated when nobody has anything to do with it, and only if nothing is left under that lock.
	lockSQL     = `LOCK TABLE {segment} IN ACCESS EXCLUSIVE MODE NOWAIT`
	truncateSQL = `TRUNCATE {segment}`

	// evacuateSQL moves messages to the cold segment as they are: position, generation and owner stay, and with them
	// every lease. What is locked stays.
	evacuateSQL = `WITH d AS (DELETE FROM {segment} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {segment} LIMIT $1 FOR UPDATE SKIP LOCKED)) RETURNING *),
 i AS (INSERT INTO {cold} (segment, pos, visible_at, lease_owner, first_due, id, queue, generation, attempt, type, headers, state, payload)
 SELECT {cold number}, pos, visible_at, lease_owner, first_due, id, queue, generation, attempt, type, headers, state, payload FROM d ORDER BY queue, pos
 RETURNING queue, segment, pos)
 SELECT queue, segment, min(pos), NULL::bigint, count(*) FROM i GROUP BY queue, segment`
)

// pace says when the ring moves on.
type pace struct {
	// every is how often the ring is looked after.
	every time.Duration
	// headBytes is how large the head becomes before another takes its place. Small enough to stay in memory: what is
	// truncated before it was written to the disk never has to be.
	headBytes int64
	// coldAfter is how long a segment has not been the head before its messages are moved, if the ring needs it.
	coldAfter time.Duration
}

func usualPace() pace {
	return pace{every: time.Second, headBytes: 64 << 20, coldAfter: 30 * time.Second}
}

const (
	// A head moves on only if this part of it is dead, in percent: a mere backlog is nothing to tidy up.
	deadShare = 10
	turnBound = 10 * time.Second
	// evacuateBatch is how many messages move in one statement, evacuateFor how long that goes on in one turn.
	evacuateBatch = 1000
	evacuateFor   = 500 * time.Millisecond
)

// ring looks after the segments: it moves the head on when it has grown, truncates segments that have become empty, and
// moves away what keeps others from becoming so. Any number of processes may do that at the same time, and any of them
// may stop at any step: what is done is done for good, the rest is found again.
type ring struct {
	in *Inbox
	// head is the segment that messages are published into, as far as is known here. A hint, for where to look first.
	head atomic.Int64
	// filled has a bit for each segment that may hold something.
	filled atomic.Uint64

	// The rest is of the one goroutine that run is.
	//
	// sealed is since when a segment is known not to be the head.
	sealed [segments]time.Time
	// livesAt is where the last message was found that keeps a segment from being truncated.
	livesAt [segments]string
	// refused: the database does not let this user truncate.
	refused bool
}

func (r *ring) init(in *Inbox) {
	r.in = in
	r.filled.Store(1<<segments - 1)
}

// heard takes a segment that something has come into.
func (r *ring) heard(s segment) {
	r.filled.Or(1 << s)
	if s != coldSegment {
		r.head.Store(int64(s))
	}
}

// oldestFirst are all segments, about in the order in which they were filled.
func (r *ring) oldestFirst() (order [segments]segment) {
	order[0] = coldSegment
	for i := range ringSegments {
		order[1+i] = segment(r.head.Load()).behind(1 + i)
	}
	return order
}

// recent are the segments that something may have been published into a moment ago.
func (r *ring) recent() []segment {
	head := segment(r.head.Load())
	return []segment{head, head.behind(-1)}
}

// inUse are the segments that may hold something.
func (r *ring) inUse() []segment {
	var list []segment
	head, filled := segment(r.head.Load()), r.filled.Load()
	for s := range segment(segments) {
		if s == head || filled&(1<<s) != 0 {
			list = append(list, s)
		}
	}
	return list
}

func (r *ring) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-r.in.ctx.Done():
			return
		}
		wait := r.in.options.pace.every
		if r.in.keeper.idle() { // this process is not what makes segments grow
			timer.Reset(wait)
			continue
		}
		again, err := r.turn()
		switch {
		case r.in.ctx.Err() != nil:
			return
		case err != nil:
			r.in.options.log.Warn("leasebus: upkeep of the ring failed, will be tried again", "schema", r.in.options.schema, "error", err)
		case again:
			wait /= 10
		}
		timer.Reset(wait*3/4 + rand.N(wait/2)) //nolint:gosec // a jitter, to keep processes apart
	}
}

// segmentSize is what is known of a segment.
type segmentSize struct{ heap, table, live, dead int64 }

// turn does what there is to do. again: there is more.
func (r *ring) turn() (again bool, err error) {
	ctx, cancel := context.WithTimeout(r.in.ctx, turnBound)
	defer cancel()
	number, sizes, err := r.sizes(ctx)
	if err != nil {
		return false, err
	}
	head := segment(number % ringSegments)
	r.note(head, sizes)
	for s := range segment(segments) {
		if s == head || sizes[s].heap == 0 || r.refused {
			continue
		}
		truncated, err := r.clear(ctx, s)
		if err != nil {
			return false, err
		}
		if truncated {
			sizes[s] = segmentSize{}
		}
	}
	if h := sizes[head]; r.refused || h.table < r.in.options.pace.headBytes || h.dead*100 < (h.live+h.dead)*deadShare {
		return false, nil
	}
	for i := 1; i < ringSegments; i++ {
		if s := head.behind(i); sizes[s].heap == 0 {
			r.heard(s)
			return false, r.advance(ctx, number, number+int64(i))
		}
	}
	for i := 1; i < ringSegments; i++ {
		if s := head.behind(i); time.Since(r.sealed[s]) >= r.in.options.pace.coldAfter {
			return r.evacuate(ctx, s)
		}
	}
	return false, nil
}

func (r *ring) sizes(ctx context.Context) (number int64, sizes [segments]segmentSize, err error) {
	tables := make([]string, segments)
	for s := range segment(segments) {
		tables[s] = s.table()
	}
	at := 0
	err = r.in.caller.call(ctx, r.in.rest, func(b *pgx.Batch) {
		b.Queue(r.in.sql.sizes, r.in.options.schema, tables)
	}, func(results pgx.BatchResults) error {
		at = 0
		return each(results, func(row *row) error {
			if at < segments {
				sizes[at] = segmentSize{row.int64(0), row.int64(1), row.int64(2), row.int64(3)}
			}
			number = row.int64(4)
			at++
			return row.err
		})
	})
	if err == nil && at != segments {
		err = fmt.Errorf("the hot table has %d segments, want %d", at, segments)
	}
	return number, sizes, err
}

// note keeps what others ask for.
func (r *ring) note(head segment, sizes [segments]segmentSize) {
	r.heard(head)
	var filled uint64
	now := time.Now()
	for s := range segment(segments) {
		if sizes[s].heap > 0 {
			filled |= 1 << s
		}
		switch {
		case s == head:
			r.sealed[s] = now
			r.livesAt[s] = ""
		case r.sealed[s].IsZero():
			r.sealed[s] = now
		}
	}
	r.filled.Store(filled)
}

// advance makes another segment the head, unless somebody has done so.
func (r *ring) advance(ctx context.Context, from, to int64) error {
	return r.in.caller.call(ctx, r.in.rest, func(b *pgx.Batch) {
		b.Queue(r.in.sql.advance, r.in.options.quoted+".ring", to, from)
	}, skip)
}

const firstAddress = "(0,0)"

// clear truncates a segment, if it has no messages and nobody is at it.
func (r *ring) clear(ctx context.Context, s segment) (truncated bool, err error) {
	from := r.livesAt[s]
	if from == "" {
		from = firstAddress
	}
	err = r.in.caller.transaction(ctx, r.in.rest, func(tx pgx.Tx) error {
		// Most have something: that is seen without the lock, and from where it was seen last time.
		if found, err := r.find(ctx, tx, s, from); err != nil || found {
			return err
		}
		statements := &r.in.sql.in[s]
		if _, err := tx.Exec(ctx, statements.lock); err != nil {
			return err
		}
		if found, err := r.find(ctx, tx, s, firstAddress); err != nil || found {
			return err
		}
		truncated = true
		_, err := tx.Exec(ctx, statements.truncate)
		return err
	})
	switch code := sqlState(err); {
	case err == nil:
		return truncated, nil
	case code == codeLockTimeout: // another time
		return false, nil
	case code == codePrivilege:
		r.refused = true
		r.in.options.log.Warn("leasebus: this user may not truncate the tables of the queue, so that they depend on vacuum; "+
			"grant TRUNCATE on them", "schema", r.in.options.schema, "error", err)
		return false, nil
	}
	return false, fmt.Errorf("truncate %s: %w", s.table(), err)
}

// find looks for a message at or behind an address.
func (r *ring) find(ctx context.Context, tx pgx.Tx, s segment, from string) (found bool, err error) {
	rows, err := tx.Query(ctx, r.in.sql.in[s].empty, from)
	err = eachOf(rows, err, func(row *row) error {
		found = true
		r.livesAt[s] = string(row.text(0))
		return row.err
	})
	return found, err
}

// evacuate moves the messages of a segment to the cold one, some of them at least. again: more are left.
func (r *ring) evacuate(ctx context.Context, s segment) (again bool, err error) {
	until := time.Now().Add(evacuateFor)
	for time.Now().Before(until) {
		var came []arrival
		var moved int64
		err := r.in.caller.call(ctx, r.in.rest, func(b *pgx.Batch) {
			b.Queue(r.in.sql.in[s].evacuate, evacuateBatch)
		}, func(results pgx.BatchResults) error {
			came, moved = nil, 0
			return each(results, func(row *row) error {
				came = append(came, readArrival(row))
				moved += row.int64(4)
				return row.err
			})
		})
		if err != nil {
			return false, fmt.Errorf("evacuate %s: %w", s.table(), err)
		}
		r.in.announce(came)
		if moved == 0 {
			r.sealed[s] = time.Now() // what is left is locked; others may be easier
			return false, nil
		}
	}
	return true, nil
}
