package postgres

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// promoteSQL moves what has become due in front of every cursor. The answer is as that of an insert, with the number
	// of messages in the last column.
	promoteSQL = `WITH d AS (DELETE FROM {schema}.delayed WHERE ctid = ANY(ARRAY(
 SELECT x.ctid FROM unnest($1::int[]) AS u(queue), LATERAL (SELECT m.ctid FROM {schema}.delayed m
 WHERE m.queue = u.queue AND m.due_at <= statement_timestamp() ORDER BY m.due_at, m.pos LIMIT $2 FOR UPDATE SKIP LOCKED) x))
 RETURNING *),
 i AS (INSERT INTO {ready} (visible_at, first_due, id, queue, generation, attempt, type, headers, state, payload)
 SELECT due_at, first_due, id, queue, generation, attempt, type, headers, state, payload FROM d ORDER BY due_at, pos RETURNING queue, pos)
 SELECT queue, min(pos), count(*) FROM i GROUP BY queue`

	nextDueSQL = `SELECT ceil(extract(epoch FROM min(x.due_at) - statement_timestamp()) * 1000000)::bigint FROM unnest($1::int[]) AS u(queue), LATERAL
 (SELECT m.due_at FROM {schema}.delayed m WHERE m.queue = u.queue ORDER BY m.due_at LIMIT 1) x`

	// lookSQL tells for each queue whether something could be leased at or behind a position, and what the low-water mark
	// needs: the first message from there on, the sequence's position, the oldest and the next transaction.
	lookSQL = `SELECT u.n::int - 1,
 EXISTS (SELECT 1 FROM {ready} m WHERE m.queue = u.queue AND m.pos >= u.pos AND m.visible_at <= statement_timestamp()),
 coalesce((SELECT m.pos FROM {ready} m WHERE m.queue = u.queue AND m.pos >= u.pos ORDER BY m.pos LIMIT 1), 0),
 (SELECT last_value FROM {schema}.ready_pos_seq),
 pg_snapshot_xmin(pg_current_snapshot())::text::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint
 FROM unnest($1::int[], $2::bigint[]) WITH ORDINALITY AS u(queue, pos, n)`

	// Retention goes from the oldest positions, some at a time: what is dead or completed lies in the order of its time.
	pruneDeadSQL = `DELETE FROM {schema}.dead WHERE ctid = ANY(ARRAY(SELECT ctid FROM
 (SELECT ctid, dead_at FROM {schema}.dead WHERE queue = $1 ORDER BY pos LIMIT $3 FOR UPDATE SKIP LOCKED) x
 WHERE dead_at < statement_timestamp() - make_interval(secs => $2)))`
	pruneHistorySQL = `DELETE FROM {schema}.history WHERE ctid = ANY(ARRAY(SELECT ctid FROM
 (SELECT ctid, completed_at FROM {schema}.history WHERE queue = $1 ORDER BY pos LIMIT $3 FOR UPDATE SKIP LOCKED) x
 WHERE completed_at < statement_timestamp() - make_interval(secs => $2)))`
)

const (
	promoteBatch = 500
	// promoteSpacing is the least time between two promotions: what becomes due meanwhile goes together.
	promoteSpacing = 20 * time.Millisecond
	// dueLookEvery is how often the time of the next due message is asked for: another process may have added it.
	dueLookEvery = 2 * time.Second
	keeperBound  = 10 * time.Second
	keeperPause  = time.Second // after an error

	pruneBatch                   = 500
	pruneMostOften, pruneAtLeast = 250 * time.Millisecond, time.Minute
)

// keeper does what belongs to the queues and to no feed: it moves what has become due, looks for what nobody has told
// of, and deletes what its retention has passed. One for each inbox, whatever the number of its feeds: looking is one
// statement for all queues. It works while there are feeds.
type keeper struct {
	in *Inbox

	mu      sync.Mutex
	feeds   map[int32][]*feed
	running bool
	heard   bool // a listener was started

	hears atomic.Bool // notifications come
	kick  chan struct{}
	// dueAt is when something becomes due, as far as is known. Zero = look.
	dueAt time.Time
}

func (k *keeper) init(in *Inbox) {
	k.in, k.feeds, k.kick = in, make(map[int32][]*feed), make(chan struct{}, 1)
}

// deaf: what others publish is not told.
func (k *keeper) deaf() bool { return !k.hears.Load() }

// listening is called when the listener has begun to hear, and when it has ended. What was sent before is looked for.
func (k *keeper) listening(hears bool) {
	k.hears.Store(hears)
	if hears {
		for _, f := range k.all() {
			f.place.sweepSoon(true)
			f.wake()
		}
	}
	k.due(0)
}

// add is false if the inbox is closed.
func (k *keeper) add(f *feed) bool {
	k.mu.Lock()
	if !k.running {
		k.running = k.in.start(k.run)
	}
	if k.running && !k.heard && !k.in.options.deaf {
		k.heard = k.in.start((&listener{in: k.in}).run)
	}
	running := k.running
	if running {
		k.feeds[f.queue] = append(k.feeds[f.queue], f)
		k.dueAt = time.Time{}
	}
	k.mu.Unlock()
	k.nudge()
	return running
}

func (k *keeper) remove(f *feed) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var left []*feed
	for _, other := range k.feeds[f.queue] {
		if other != f {
			left = append(left, other)
		}
	}
	if left == nil {
		delete(k.feeds, f.queue)
	} else {
		k.feeds[f.queue] = left
	}
}

func (k *keeper) nudge() {
	select {
	case k.kick <- struct{}{}:
	default:
	}
}

// all returns the feeds that lease.
func (k *keeper) all() []*feed {
	k.mu.Lock()
	defer k.mu.Unlock()
	var all []*feed
	for _, feeds := range k.feeds {
		all = append(all, feeds...)
	}
	return all
}

// of returns the feeds of one queue; the slice is not changed afterwards.
func (k *keeper) of(queue int32) []*feed {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.feeds[queue]
}

// arrived tells the feeds of a queue that there is something, or when there will be.
func (k *keeper) arrived(a arrival) {
	feeds := k.of(a.queue)
	if len(feeds) == 0 {
		return
	}
	if a.pos == 0 {
		k.due(a.due)
		return
	}
	for _, f := range feeds {
		f.place.arrived(a.pos)
		f.wake()
	}
}

// due makes the keeper look no later than in d.
func (k *keeper) due(d time.Duration) {
	at := time.Now().Add(d)
	k.mu.Lock()
	earlier := at.Before(k.dueAt)
	if earlier {
		k.dueAt = at
	}
	k.mu.Unlock()
	if earlier {
		k.nudge()
	}
}

// rounds are when each of the keeper's tasks is due next.
type rounds struct{ promote, askDue, look, sweep, prune time.Time }

func (k *keeper) run() {
	in := k.in
	var next rounds
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-k.kick:
		case <-in.ctx.Done():
			return
		}
		feeds := k.all()
		if len(feeds) == 0 {
			timer.Reset(time.Hour) // a feed kicks
			next = rounds{}
			continue
		}
		wait := keeperPause
		if err := k.round(feeds, &next); err != nil {
			if in.ctx.Err() != nil {
				return
			}
			in.options.log.Warn("leasebus: upkeep of the inbox failed, will be tried again", "schema", in.options.schema, "error", err)
			select { // a kick is no reason to hurry
			case <-time.After(keeperPause):
			case <-in.ctx.Done():
				return
			}
		} else {
			wait = time.Until(k.earliest(&next))
		}
		timer.Reset(max(wait, time.Millisecond))
	}
}

func (k *keeper) earliest(next *rounds) time.Time {
	k.mu.Lock()
	due := k.dueAt
	k.mu.Unlock()
	if due.Before(next.promote) {
		due = next.promote
	}
	earliest := next.askDue
	for _, t := range []time.Time{due, next.sweep, next.prune} {
		if t.Before(earliest) {
			earliest = t
		}
	}
	if k.deaf() && next.look.Before(earliest) {
		earliest = next.look
	}
	return earliest
}

// round does what is due.
func (k *keeper) round(feeds []*feed, next *rounds) error {
	ctx, cancel := context.WithTimeout(k.in.ctx, keeperBound)
	defer cancel()
	now := time.Now()
	k.mu.Lock()
	due := k.dueAt
	k.mu.Unlock()
	if asked := !now.Before(next.askDue); asked || !now.Before(due) && !now.Before(next.promote) {
		next.promote, next.askDue = now.Add(promoteSpacing), now.Add(dueLookEvery)
		if err := k.promote(ctx, feeds); err != nil {
			return err
		}
	}
	sweep := !now.Before(next.sweep)
	if sweep || k.deaf() && !now.Before(next.look) {
		if sweep {
			next.sweep = now.Add(k.in.options.sweep)
			for _, f := range feeds {
				f.giveBack(ctx, now)
			}
		}
		next.look = now.Add(k.in.options.poll)
		if err := k.look(ctx, feeds, sweep); err != nil {
			return err
		}
	}
	if !now.Before(next.prune) {
		interval := pruneAtLeast
		for _, f := range feeds {
			every, err := k.prune(ctx, f)
			if err != nil {
				return err
			}
			interval = min(interval, every)
		}
		next.prune = now.Add(interval)
	}
	return nil
}

// promote moves what is due, and learns when the next is.
func (k *keeper) promote(ctx context.Context, feeds []*feed) error {
	in := k.in
	queues := queuesOf(feeds)
	// Anything that is told from here on is earlier than what the answer can know.
	k.mu.Lock()
	k.dueAt = time.Now().Add(maxDue)
	k.mu.Unlock()
	var came []arrival
	more, wait := false, maxDue
	err := in.caller.call(ctx, in.claims, func(b *pgx.Batch) {
		b.Queue(pinSQL)
		b.Queue(in.sql.promote, queues, promoteBatch)
		b.Queue(in.sql.nextDue, queues)
	}, func(results pgx.BatchResults) error {
		came, more, wait = nil, false, maxDue
		if err := skip(results); err != nil {
			return err
		}
		if err := each(results, func(r *row) error {
			came = append(came, arrival{queue: r.int32(0), pos: r.int64(1)})
			more = more || r.int(2) >= promoteBatch
			return r.err
		}); err != nil {
			return err
		}
		return each(results, func(r *row) error {
			if !r.null(0) {
				wait = time.Duration(min(max(r.int64(0), 0), int64(maxDue/time.Microsecond))) * time.Microsecond
			}
			return r.err
		})
	})
	if err != nil {
		k.due(0)
		return err
	}
	in.announce(came)
	if more {
		wait = 0
	}
	k.due(wait)
	return nil
}

// look wakes the feeds whose queue has something that nobody has told of. A feed that is busy finds it by itself; with
// sweep it is looked at all the same, for its low-water mark.
func (k *keeper) look(ctx context.Context, feeds []*feed, sweep bool) error {
	in := k.in
	var asked []*feed
	var queues []int32
	var from []int64
	now := time.Now()
	for _, f := range feeds {
		low, due := f.place.lowMark(now)
		switch {
		case sweep:
		case !f.hungry.Load():
			continue
		case !due:
			low = f.place.behind()
		}
		asked, queues, from = append(asked, f), append(queues, f.queue), append(from, low)
	}
	if len(asked) == 0 {
		return nil
	}
	return in.caller.call(ctx, in.claims, func(b *pgx.Batch) {
		b.Queue(pinSQL)
		b.Queue(in.sql.look, queues, from)
	}, func(results pgx.BatchResults) error {
		if err := skip(results); err != nil {
			return err
		}
		return each(results, func(r *row) error {
			n := r.int(0)
			if n < 0 || n >= len(asked) || r.err != nil {
				return r.err
			}
			f := asked[n]
			f.place.mark(from[n], r.int64(2), r.int64(3), r.int64(4), r.int64(5))
			if r.bool(1) && f.hungry.Load() {
				f.place.arrived(from[n])
				f.wake()
			}
			return r.err
		})
	})
}

func queuesOf(feeds []*feed) []int32 {
	seen := make(map[int32]bool, len(feeds))
	var queues []int32
	for _, f := range feeds {
		if !seen[f.queue] {
			seen[f.queue] = true
			queues = append(queues, f.queue)
		}
	}
	return queues
}

// prune deletes what the retentions of f's policy have passed, and says how soon to come again.
func (k *keeper) prune(ctx context.Context, f *feed) (again time.Duration, err error) {
	again = pruneAtLeast
	for _, p := range []struct {
		statement string
		retention time.Duration
	}{
		{k.in.sql.pruneDead, f.sub.Policy.DeadLetter.Retention},
		{k.in.sql.pruneHistory, f.sub.Policy.RetainCompleted},
	} {
		if p.retention <= 0 {
			continue
		}
		again = min(again, max(p.retention/4, pruneMostOften))
		for {
			var deleted int64
			err := k.in.caller.call(ctx, k.in.rest, func(b *pgx.Batch) {
				b.Queue(p.statement, f.queue, p.retention.Seconds(), pruneBatch)
			}, func(results pgx.BatchResults) error {
				tag, err := results.Exec()
				deleted = tag.RowsAffected()
				return err
			})
			if err != nil {
				return 0, err
			}
			if deleted < pruneBatch {
				break
			}
		}
	}
	return again, nil
}
