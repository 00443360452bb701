package postgres

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// lookSQL finds for each feed the first message within a range of one segment that could be leased. One for each
	// segment are put together.
	lookSQL = `SELECT u.n, {number}::int, m.pos FROM unnest($1::int[], $2::int[], $3::int[], $4::bigint[], $5::bigint[]) AS u(n, segment, queue, pos, below),
 LATERAL (SELECT m.pos FROM {segment} m WHERE m.queue = u.queue AND m.pos >= u.pos AND m.pos < u.below AND m.visible_at <= statement_timestamp()
 ORDER BY m.pos LIMIT 1) m WHERE u.segment = {number}`

	headSQL = `SELECT {head}`
)

const (
	keeperBound = 10 * time.Second
	keeperPause = time.Second // after an error
)

// keeper does what belongs to the queues and to no feed: it moves what has become due, and looks for what nobody has told
// of. One for each inbox, whatever the number of its feeds: looking is one statement for all queues. It works while there
// are feeds.
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
	// promoted are the times up to which everything that was due has been promoted, as far as is known.
	promoted map[int32]instant
}

func (k *keeper) init(in *Inbox) {
	k.in, k.feeds, k.kick = in, make(map[int32][]*feed), make(chan struct{}, 1)
	k.promoted = make(map[int32]instant)
}

// deaf: what others publish is not told.
func (k *keeper) deaf() bool { return !k.hears.Load() }

// listening is called when the listener has begun to hear, and when it has ended. What was sent before is looked for.
func (k *keeper) listening(hears bool) {
	k.hears.Store(hears)
	if hears {
		for _, f := range k.all() {
			f.lookAgain()
		}
	}
	k.due(0)
}

// add is false if the inbox is closed.
func (k *keeper) add(f *feed) bool {
	k.mu.Lock()
	if !k.running {
		k.running = k.in.start(k.run) && k.in.start(k.in.ring.run) && k.in.start(k.in.pruner.run)
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
	nudge(k.kick)
	nudge(k.in.pruner.kick)
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

func nudge(kick chan struct{}) {
	select {
	case kick <- struct{}{}:
	default:
	}
}

// idle: there are no feeds.
func (k *keeper) idle() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.feeds) == 0
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
		if a.due <= 0 {
			k.promotedLess(a.queue)
		}
		k.due(a.due)
		return
	}
	k.in.ring.heard(a.seg)
	for _, f := range feeds {
		f.places[a.seg].arrived(a.pos)
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
		nudge(k.kick)
	}
}

// rounds are when each of the keeper's tasks is due next.
type rounds struct{ promote, askDue, look, sweep time.Time }

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
	for _, t := range []time.Time{due, next.sweep} {
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
	if whole := !now.Before(next.askDue); whole || !now.Before(due) && !now.Before(next.promote) {
		next.promote = now.Add(promoteSpacing)
		if err := k.promote(ctx, feeds, whole); err != nil {
			return err
		}
		if whole {
			next.askDue = now.Add(max(dueLookEvery, dueLookShare*time.Since(now)))
		}
	}
	sweep := !now.Before(next.sweep)
	if sweep || k.deaf() && !now.Before(next.look) {
		if sweep {
			next.sweep = now.Add(k.in.options.sweep*3/4 + rand.N(k.in.options.sweep/2)) //nolint:gosec // a jitter, to keep processes apart
			for _, f := range feeds {
				f.giveBack(ctx, now)
			}
		}
		next.look = now.Add(k.in.options.poll)
		if err := k.look(ctx, feeds, sweep); err != nil {
			return err
		}
	}
	return nil
}

// look finds what nobody has told of, and tells the feeds. A sweep looks at all that no claim is going to see; otherwise
// only idle feeds are asked for, where something may have been published a moment ago.
func (k *keeper) look(ctx context.Context, feeds []*feed, sweep bool) error {
	for {
		head := k.in.ring.head.Load()
		if err := k.lookOnce(ctx, feeds, sweep); err != nil || sweep || head == k.in.ring.head.Load() {
			return err
		}
	}
}

func (k *keeper) lookOnce(ctx context.Context, feeds []*feed, sweep bool) error {
	in := k.in
	asked := in.ring.recent()
	if sweep {
		asked = in.ring.inUse()
	}
	var index, numbers, queues []int32
	var from, below []int64
	for i, f := range feeds {
		if !sweep && !f.hungry.Load() {
			continue
		}
		for _, seg := range asked {
			begin, end := f.places[seg].unseen(!sweep)
			if begin >= end {
				continue
			}
			index, numbers, queues = append(index, int32(i)), append(numbers, int32(seg)), append(queues, f.queue) //nolint:gosec // small
			from, below = append(from, begin), append(below, end)
		}
	}
	if len(index) == 0 {
		return nil
	}
	return in.caller.call(ctx, in.claims, func(b *pgx.Batch) {
		b.Queue(pinSQL)
		b.Queue(in.sql.head)
		b.Queue(in.sql.look, index, numbers, queues, from, below)
	}, func(results pgx.BatchResults) error {
		if err := skip(results); err != nil {
			return err
		}
		if err := each(results, func(r *row) error {
			in.ring.heard(segment(r.int(0)))
			return r.err
		}); err != nil {
			return err
		}
		return each(results, func(r *row) error {
			n, seg := r.int(0), r.int(1)
			if n < 0 || n >= len(feeds) || seg < 0 || seg >= segments || r.err != nil {
				return r.err
			}
			feeds[n].places[seg].arrived(r.int64(2))
			feeds[n].wake()
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
