package amqp

import (
	"context"
	"fmt"
	"maps"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Requeue implements [leasebus.Operator]. Each dead letter is published to its queue and, once that is confirmed, taken
// out of the dead-letter queue: a crash in between leaves both. What is no dead letter is not found, wherever it may be.
func (b *Broker) Requeue(ctx context.Context, queue string, refs []leasebus.DeadLetterRef, by string) ([]leasebus.Disposition, error) {
	return b.act(ctx, "requeue in", queue, refs, func(ctx context.Context, found []chosen) error {
		now := time.Now()
		return b.move(ctx, found, func(t *chosen) (message, leasebus.Disposition) {
			if t.replaced() {
				return message{}, leasebus.DispositionReplaced
			}
			return message{key: queue, Publishing: requeued(t.d, t.letter.ID, by, now)}, leasebus.DispositionDone
		})
	})
}

// Discard implements [leasebus.Operator].
func (b *Broker) Discard(ctx context.Context, queue string, refs []leasebus.DeadLetterRef, _ string) ([]leasebus.Disposition, error) {
	return b.act(ctx, "discard in", queue, refs, func(_ context.Context, found []chosen) error {
		for i := range found {
			if err := found[i].end(leasebus.DispositionDone); err != nil {
				return err
			}
		}
		return nil
	})
}

// Replace implements [leasebus.Operator]. The edited message is published first, then a copy of the dead letter that says
// so takes its place; a crash in between leaves a dead letter that does not know of its edited message.
func (b *Broker) Replace(ctx context.Context, queue string, ref leasebus.DeadLetterRef, edited *leasebus.Envelope, by string) (leasebus.Disposition, error) {
	if err := b.admitEdited(queue, ref, edited); err != nil {
		return leasebus.DispositionNotFound, fmt.Errorf("amqp: replace in %q: %w", queue, err)
	}
	published := false
	dispositions, err := b.act(ctx, "replace in", queue, []leasebus.DeadLetterRef{ref}, func(ctx context.Context, found []chosen) error {
		now := time.Now()
		for i := range found {
			if t := &found[i]; !published && !t.replaced() {
				if err := b.publishEdited(ctx, edited, t.letter.IdempotencyKey, now); err != nil {
					return err
				}
				published = true
			}
		}
		return b.move(ctx, found, func(t *chosen) (message, leasebus.Disposition) {
			if t.replaced() {
				return message{}, leasebus.DispositionReplaced
			}
			return message{key: t.scan.queue, Publishing: replaced(t.d, t.letter.ID, edited.ID, by, now)}, leasebus.DispositionDone
		})
	})
	if err != nil {
		return leasebus.DispositionNotFound, err
	}
	return dispositions[0], nil
}

func (b *Broker) admitEdited(queue string, ref leasebus.DeadLetterRef, edited *leasebus.Envelope) error {
	switch {
	case edited.ID == ref.ID || edited.ID == leasebus.ID{}:
		return refused("id", "is that of the dead letter, or none; an edited message needs a new one")
	case edited.Queue != queue:
		return refused("queue", "is not that of the dead letter; an edited message stays in its queue")
	}
	if err := edited.Validate(b.options.maxPayload); err != nil {
		return err
	}
	return checkEnvelope(edited)
}

func (b *Broker) publishEdited(ctx context.Context, edited *leasebus.Envelope, key string, now time.Time) error {
	e := *edited
	e.IdempotencyKey = key
	return b.publishAll(ctx, 1, func(int) message {
		return message{key: e.Queue, Publishing: publishing(&e, stamps{firstDue: now, attempt: 1})}
	}, func(int) error { return nil })
}

// chosen is a dead letter that an action names.
type chosen struct {
	scan   *scan
	d      *amqp091.Delivery
	letter leasebus.DeadLetter
	answer func(leasebus.Disposition)
}

func (t *chosen) replaced() bool { return t.letter.ReplacedBy != leasebus.ID{} }

// end takes the dead letter out of its queue.
func (t *chosen) end(d leasebus.Disposition) error {
	if err := t.scan.ack(t.d); err != nil {
		return err
	}
	t.answer(d)
	return nil
}

// move publishes what becomes of dead letters, and takes those out that are confirmed. A disposition other than done
// leaves one where it is.
func (b *Broker) move(ctx context.Context, found []chosen, become func(*chosen) (message, leasebus.Disposition)) error {
	var moving []*chosen
	var messages []message
	for i := range found {
		m, d := become(&found[i])
		if d != leasebus.DispositionDone {
			found[i].answer(d)
			continue
		}
		moving, messages = append(moving, &found[i]), append(messages, m)
	}
	return b.publishAll(ctx, len(moving),
		func(i int) message { return messages[i] },
		func(i int) error { return moving[i].end(leasebus.DispositionDone) })
}

// publishAll publishes n messages, calls confirmed for each that RabbitMQ has, and returns the first error.
func (b *Broker) publishAll(ctx context.Context, n int, build func(int) message, confirmed func(int) error) (first error) {
	b.publisher.publish(ctx, n, func(i int, m *message) error {
		*m = build(i)
		return nil
	}, func(i int, err error) {
		if err == nil {
			err = confirmed(i)
		}
		if first == nil {
			first = err
		}
	})
	return first
}

// act does something to each dead letter that refs name, twins together (S33). The answers stand in the order of refs.
func (b *Broker) act(ctx context.Context, what, queue string, refs []leasebus.DeadLetterRef,
	do func(ctx context.Context, found []chosen) error,
) ([]leasebus.Disposition, error) {
	a, err := actionOf(queue, refs)
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	for _, in := range b.placesOf(queue).dead {
		if err == nil && !a.complete() {
			err = b.scan(ctx, in, func(s *scan, d *amqp091.Delivery) bool {
				a.look(s, d, in)
				return !a.complete()
			}, func() error { return a.flush(ctx, do) })
		}
	}
	if err != nil {
		return nil, fmt.Errorf("amqp: %s %q: %w", what, queue, err)
	}
	b.ahead.forget(a.wanted)
	return a.dispositions, nil
}

// action is what an operator asks for, and how far it has come.
type action struct {
	queue        string
	refs         []leasebus.DeadLetterRef
	positions    []position             // of refs with a cursor
	wanted       map[leasebus.ID][]int  // to the indices of refs
	dispositions []leasebus.Disposition // by index
	found        []chosen               // not acted on yet
	missing      int                    // refs with a cursor that were not found yet, and all without one
}

func actionOf(queue string, refs []leasebus.DeadLetterRef) (*action, error) {
	a := &action{
		queue: queue, refs: refs, positions: make([]position, len(refs)), wanted: make(map[leasebus.ID][]int, len(refs)),
		dispositions: make([]leasebus.Disposition, len(refs)), missing: len(refs),
	}
	for i, ref := range refs {
		var err error
		if a.positions[i], err = parsePosition(ref.Cursor); err != nil {
			return nil, err
		}
		a.wanted[ref.ID] = append(a.wanted[ref.ID], i)
		a.dispositions[i] = leasebus.DispositionNotFound
	}
	return a, nil
}

// complete reports whether nothing more can be found: only a reference by its position is found once.
func (a *action) complete() bool { return a.missing == 0 }

// look notes a dead letter if it is one that was asked for.
func (a *action) look(s *scan, d *amqp091.Delivery, in string) {
	indices := a.wanted[letterID(d)]
	if indices == nil {
		return
	}
	letter := letterOf(d, a.queue, in)
	if letter.Queue != a.queue {
		return
	}
	at := positionOf(&letter)
	var asked []int
	for _, i := range indices {
		switch {
		case a.refs[i].Cursor == "":
			asked = append(asked, i)
		case a.positions[i] == at:
			asked = append(asked, i)
			a.missing--
		}
	}
	if asked == nil {
		return
	}
	a.found = append(a.found, chosen{scan: s, d: d, letter: letter, answer: func(answer leasebus.Disposition) {
		for _, i := range asked {
			if a.dispositions[i] != leasebus.DispositionDone { // done, if one of the twins is
				a.dispositions[i] = answer
			}
		}
	}})
}

func (a *action) flush(ctx context.Context, do func(context.Context, []chosen) error) error {
	found := a.found
	a.found = nil
	if len(found) == 0 {
		return nil
	}
	return do(ctx, found)
}

// requeued is a dead letter as it goes back to work: attempts and age begin anew, the history stays.
func requeued(d *amqp091.Delivery, id leasebus.ID, by string, now time.Time) amqp091.Publishing {
	was, _ := readStamps(d.Headers, now)
	return copyOf(d, id, stamps{firstDue: was.firstDue, ageFrom: now, attempt: 1}, func(table amqp091.Table) {
		maps.DeleteFunc(table, func(name string, _ any) bool {
			switch name {
			case headerOriginQueue, headerReason, headerError, headerErrorType, headerDeadLetteredAt, headerLastOwner, headerReplacedBy:
				return true
			}
			return false
		})
		putRequeue(table, by, now)
	})
}

// replaced is a dead letter that an edited message has taken the place of.
func replaced(d *amqp091.Delivery, id, edited leasebus.ID, by string, now time.Time) amqp091.Publishing {
	was, _ := readStamps(d.Headers, now)
	attempts, there := d.Headers[headerAttempt]
	return copyOf(d, id, was, func(table amqp091.Table) {
		if there {
			table[headerAttempt] = attempts // 0 too
		}
		table[headerReplacedBy] = edited.String()
		putRequeue(table, by, now)
	})
}

func putRequeue(table amqp091.Table, by string, now time.Time) {
	putRecords(table, headerRequeues, append(records[requeueRecord](table, headerRequeues),
		requeueRecord{cut(by, leasebus.MaxNameBytes), now.UnixMilli()}))
}
