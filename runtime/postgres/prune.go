package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// pruneSQL deletes from the oldest positions on, some at a time: what is dead or completed lies in the order of its time.
// It answers how many were old enough, and the last of them. What is locked it leaves: another process is deleting it, or
// an operator is at it. So any number of processes can prune at the same time.
const pruneSQL = `WITH old AS MATERIALIZED (SELECT x.pos FROM (SELECT pos, {time} AS ended FROM {table} WHERE queue = $1 AND pos > $4 ORDER BY pos LIMIT $3) x
 WHERE x.ended < statement_timestamp() - make_interval(secs => $2)),
 d AS (DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT m.ctid FROM old, LATERAL (SELECT t.ctid FROM {table} t
 WHERE t.queue = $1 AND t.pos = old.pos FOR UPDATE SKIP LOCKED) m)))
 SELECT count(*), coalesce(max(pos), 0) FROM old`

const (
	pruneBatch                   = 500
	pruneBound                   = 10 * time.Second
	pruneMostOften, pruneAtLeast = 250 * time.Millisecond, time.Minute
)

// pruner deletes what the retentions of the feeds' policies have passed. It shares its connections with those who publish
// and with operators, and has a goroutine of its own: nobody is to wait for it, nor for what it waits for.
type pruner struct {
	in   *Inbox
	kick chan struct{}
}

// pruning is how far a feed has come. The next batch begins behind: what was deleted lies dead in the index until it is
// vacuumed, and every batch would walk over it. Once in a while it begins anew, for what was locked or came late.
type pruning struct {
	dead, history int64
	anew          time.Time
}

func (p *pruner) init(in *Inbox) { p.in, p.kick = in, make(chan struct{}, 1) }

func (p *pruner) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-p.kick:
		case <-p.in.ctx.Done():
			return
		}
		wait := pruneAtLeast
		for _, f := range p.in.keeper.all() {
			again, err := p.prune(f)
			if p.in.ctx.Err() != nil {
				return
			}
			if err != nil {
				p.in.options.log.Warn("leasebus: deleting what its retention has passed failed, will be tried again", "queue", f.sub.Queue, "error", err)
				again = keeperPause
			}
			wait = min(wait, again)
		}
		timer.Reset(wait)
	}
}

// prune says how soon to come again.
func (p *pruner) prune(f *feed) (again time.Duration, err error) {
	again = pruneAtLeast
	if now := time.Now(); !now.Before(f.pruned.anew) {
		f.pruned = pruning{anew: now.Add(pruneAtLeast)}
	}
	for _, part := range []struct {
		statement string
		from      *int64
		retention time.Duration
	}{
		{p.in.sql.pruneDead, &f.pruned.dead, f.sub.Policy.DeadLetter.Retention},
		{p.in.sql.pruneHistory, &f.pruned.history, f.sub.Policy.RetainCompleted},
	} {
		if part.retention <= 0 {
			continue
		}
		again = min(again, max(part.retention/4, pruneMostOften))
		for more := true; more; {
			if more, err = p.pruneSome(f, part.statement, part.retention, part.from); err != nil {
				return 0, err
			}
		}
	}
	return again, nil
}

// pruneSome deletes one batch behind from, and moves from behind it. more: it was a full one.
func (p *pruner) pruneSome(f *feed, statement string, retention time.Duration, from *int64) (more bool, err error) {
	ctx, cancel := context.WithTimeout(p.in.ctx, pruneBound)
	defer cancel()
	var old, last int64
	err = p.in.caller.call(ctx, p.in.rest, func(b *pgx.Batch) {
		b.Queue(pinSQL)
		b.Queue(statement, f.queue, retention.Seconds(), pruneBatch, *from)
	}, func(results pgx.BatchResults) error {
		if err := skip(results); err != nil {
			return err
		}
		return each(results, func(r *row) error {
			old, last = r.int64(0), r.int64(1)
			return r.err
		})
	})
	if err != nil {
		return false, err
	}
	*from = max(*from, last)
	return old == pruneBatch, nil
}
