package memory

import (
	"context"
	"fmt"
	"slices"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// DeadLetters implements [leasebus.Operator]. A limit below 1 is refused.
func (s *Store) DeadLetters(ctx context.Context, name string, f leasebus.Filter, after leasebus.Cursor, limit int) ([]leasebus.DeadLetter, error) {
	if limit < 1 {
		return nil, fmt.Errorf("memory: dead letters of %q: limit %d is out of range; allowed is 1 or more", name, limit)
	}
	behind, err := positionOf(after)
	if err != nil {
		return nil, err
	}
	upTo, err := positionOf(f.UpTo)
	if err != nil {
		return nil, err
	}
	q, now, err := s.operate(ctx, "dead letters of", name)
	if q == nil {
		return nil, err
	}
	defer q.unlock(now)

	var letters []leasebus.DeadLetter
	q.dead.from(behind, func(r *row) bool {
		if f.UpTo != "" && r.dead.position > upTo {
			return false
		}
		if letter := r.deadLetter(); f.Match(&letter) {
			letter.History, letter.Requeues = slices.Clone(letter.History), slices.Clone(letter.Requeues)
			letters = append(letters, letter)
		}
		return len(letters) < limit
	})
	return letters, nil
}

// LastDeadLetter implements [leasebus.Operator]. It is the position given last, whether or not a dead letter is still
// there, and never empty: as a cut-off it always leaves out what comes later.
func (s *Store) LastDeadLetter(ctx context.Context, name string) (leasebus.Cursor, error) {
	q, now, err := s.operate(ctx, "last dead letter of", name)
	if q == nil {
		return cursorOf(0), err
	}
	defer q.unlock(now)
	return cursorOf(q.dead.last), nil
}

// Requeue implements [leasebus.Operator].
func (s *Store) Requeue(ctx context.Context, name string, refs []leasebus.DeadLetterRef, by string) ([]leasebus.Disposition, error) {
	return s.act(ctx, "requeue in", name, refs, func(q *queue, r *row, now int64) leasebus.Disposition {
		if r.replaced() {
			return leasebus.DispositionReplaced
		}
		q.unbury(r)
		r.actedOn(by, now)
		r.attempt, r.interruptions, r.crashed = 0, 0, false
		r.due, r.ageFrom = now, now
		q.wait(r, pending, now)
		return leasebus.DispositionDone
	})
}

// Discard implements [leasebus.Operator].
func (s *Store) Discard(ctx context.Context, name string, refs []leasebus.DeadLetterRef, _ string) ([]leasebus.Disposition, error) {
	return s.act(ctx, "discard in", name, refs, func(q *queue, r *row, _ int64) leasebus.Disposition {
		q.unbury(r)
		r.state = discarded
		return leasebus.DispositionDone
	})
}

// Replace implements [leasebus.Operator]. Without a cursor, all twins are marked and one envelope takes their place.
// An edited envelope with the id of the dead letter, or for another queue, is refused.
func (s *Store) Replace(ctx context.Context, name string, ref leasebus.DeadLetterRef, edited *leasebus.Envelope, by string) (leasebus.Disposition, error) {
	if err := s.admitEdited(name, ref, edited); err != nil {
		return leasebus.DispositionNotFound, err
	}
	out := [1]leasebus.Outgoing{{Envelope: *edited}}
	marked := false
	dispositions, err := s.act(ctx, "replace in", name, []leasebus.DeadLetterRef{ref}, func(q *queue, r *row, now int64) leasebus.Disposition {
		if r.replaced() {
			return leasebus.DispositionReplaced
		}
		r.actedOn(by, now)
		r.dead.replacedBy = edited.ID
		if !marked {
			marked = true
			out[0].IdempotencyKey = r.env.IdempotencyKey
			var fresh list
			q.copyIn(out[:], &fresh)
			q.arrive(fresh.popFront(), now, now)
		}
		return leasebus.DispositionDone
	})
	if err != nil {
		return leasebus.DispositionNotFound, err
	}
	return dispositions[0], nil
}

func (s *Store) admitEdited(name string, ref leasebus.DeadLetterRef, edited *leasebus.Envelope) error {
	err := edited.Validate(s.maxPayload)
	switch {
	case edited.ID == ref.ID || edited.ID == leasebus.ID{}:
		err = &leasebus.EnvelopeError{Part: "id", Text: "is that of the dead letter, or none; an edited message needs a new one"}
	case edited.Queue != name:
		err = &leasebus.EnvelopeError{Part: "queue", Text: "is not that of the dead letter; an edited message stays in its queue"}
	}
	if err != nil {
		return fmt.Errorf("memory: replace in %q: %w", name, err)
	}
	return nil
}

// Completed implements [leasebus.Operator]. A limit below 1 is refused.
func (s *Store) Completed(ctx context.Context, name string, after leasebus.Cursor, limit int) ([]leasebus.CompletedMessage, error) {
	if limit < 1 {
		return nil, fmt.Errorf("memory: completed messages of %q: limit %d is out of range; allowed is 1 or more", name, limit)
	}
	behind, err := positionOf(after)
	if err != nil {
		return nil, err
	}
	q, now, err := s.operate(ctx, "completed messages of", name)
	if q == nil {
		return nil, err
	}
	defer q.unlock(now)

	var messages []leasebus.CompletedMessage
	for r := q.history.head; r != nil && len(messages) < limit; r = r.next {
		if r.completion > behind {
			messages = append(messages, r.completedMessage())
		}
	}
	return messages, nil
}

func (r *row) completedMessage() leasebus.CompletedMessage {
	m := leasebus.CompletedMessage{
		Envelope:    r.env,
		Cursor:      cursorOf(r.completion),
		Attempts:    int(r.attempt),
		Generation:  r.generation,
		CompletedAt: r.queue.store.timeOf(r.due),
		LastOwner:   r.owner,
	}
	if p := r.past; p != nil {
		m.History, m.Requeues = slices.Clone(p.failures), slices.Clone(p.requeues)
	}
	return m
}

// Stats implements [leasebus.Operator].
func (s *Store) Stats(ctx context.Context, name string) (leasebus.QueueStats, error) {
	q, now, err := s.operate(ctx, "stats of", name)
	if q == nil {
		return leasebus.QueueStats{}, err
	}
	defer q.unlock(now)
	stats := leasebus.QueueStats{
		Pending:      q.counts[pending],
		Processing:   q.counts[processing],
		Failed:       q.counts[failed],
		DeadLettered: q.counts[deadLettered],
		Completed:    q.counts[completed],
		Due:          int64(q.released.len) + int64(q.ready.len),
	}
	for _, oldest := range []*row{q.released.head, q.ready.head} {
		if oldest != nil {
			stats.OldestDueAge = max(stats.OldestDueAge, time.Duration(now-oldest.due))
		}
	}
	for r := q.leased.head; r != nil && r.due <= now; r = r.next {
		stats.Stuck++
	}
	return stats, nil
}

// operate locks a queue for an operator. Without an error, a nil queue means that there is none of that name.
func (s *Store) operate(ctx context.Context, what, name string) (q *queue, now int64, err error) {
	if ctx.Err() != nil {
		return nil, 0, fmt.Errorf("memory: %s %q: %w", what, name, context.Cause(ctx))
	}
	q = s.lookup(name)
	if q == nil {
		return nil, 0, nil
	}
	now = q.lock()
	q.prune(now)
	return q, now, nil
}

// target is a reference with its cursor read.
type target struct {
	id       leasebus.ID
	one      bool
	position int64 // if one
}

func targetsOf(refs []leasebus.DeadLetterRef) ([]target, error) {
	targets := make([]target, len(refs))
	for i, ref := range refs {
		position, err := positionOf(ref.Cursor)
		if err != nil {
			return nil, err
		}
		targets[i] = target{ref.ID, ref.Cursor != "", position}
	}
	return targets, nil
}

// act does something to each dead letter that refs name, twins together (S33), and says for the others why not.
func (s *Store) act(ctx context.Context, what, name string, refs []leasebus.DeadLetterRef,
	do func(q *queue, r *row, now int64) leasebus.Disposition,
) ([]leasebus.Disposition, error) {
	targets, err := targetsOf(refs)
	if err != nil {
		return nil, err
	}
	q, now, err := s.operate(ctx, what, name)
	if err != nil {
		return nil, err
	}
	dispositions := make([]leasebus.Disposition, len(refs))
	if q == nil {
		for i := range dispositions {
			dispositions[i] = leasebus.DispositionNotFound
		}
		return dispositions, nil
	}
	defer q.unlock(now)

	missing := make(map[leasebus.ID]bool) // to whether the id is anywhere in the queue
	var found []*row
	for i, t := range targets {
		if found = q.dead.find(found[:0], t); len(found) == 0 {
			missing[t.id] = false
			dispositions[i] = leasebus.DispositionNotFound
			continue
		}
		dispositions[i] = leasebus.DispositionReplaced
		for _, r := range found {
			dispositions[i] = min(dispositions[i], do(q, r, now)) // done, if one of the twins is
		}
	}
	q.look(missing)
	for i, t := range targets {
		switch {
		case dispositions[i] != leasebus.DispositionNotFound || !missing[t.id]:
		case t.one:
			dispositions[i] = leasebus.DispositionMoved
		default:
			dispositions[i] = leasebus.DispositionNotDeadLettered
		}
	}
	return dispositions, nil
}

// look marks the ids that some row has. It reads the whole queue: a live row is looked for by its id only here, and
// an index would cost every publish.
func (q *queue) look(ids map[leasebus.ID]bool) {
	if len(ids) == 0 {
		return
	}
	mark := func(r *row) {
		if _, asked := ids[r.env.ID]; asked {
			ids[r.env.ID] = true
		}
	}
	for _, l := range []*list{&q.released, &q.ready, &q.leased, &q.history} {
		for r := l.head; r != nil; r = r.next {
			mark(r)
		}
	}
	for _, waiting := range q.later.rows {
		mark(waiting.row)
	}
	for id := range ids {
		if q.dead.byID[id].len > 0 {
			ids[id] = true
		}
	}
}

func (r *row) replaced() bool { return r.dead.replacedBy != leasebus.ID{} }

// actedOn records an operator's action, after which no older lease or view of r is true.
func (r *row) actedOn(by string, now int64) {
	r.generation++
	p := r.record()
	p.requeues = appendNewest(p.requeues, leasebus.RequeueRecord{By: by, At: r.queue.store.timeOf(now)})
}

// unbury takes r off the shelf.
func (q *queue) unbury(r *row) {
	q.dead.remove(r)
	q.leave(r)
	r.dead = nil
}
