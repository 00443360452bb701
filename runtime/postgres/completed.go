package postgres

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	leasebus "github.com/leasebus/leasebus/runtime"
)

const listCompletedSQL = `SELECT pos, id, type, headers, state, payload, timestamptz_send(first_due), timestamptz_send(completed_at),
 generation, attempts, owner FROM {schema}.history WHERE queue = $1 AND pos > $2 ORDER BY pos LIMIT $3`

// Completed implements [leasebus.Operator]. A limit below 1 is refused.
func (in *Inbox) Completed(ctx context.Context, queue string, after leasebus.Cursor, limit int) ([]leasebus.CompletedMessage, error) {
	const what = "completed messages of"
	if limit < 1 {
		return nil, fmt.Errorf("postgres: %s %q: limit %d is out of range; allowed is 1 or more", what, queue, limit)
	}
	behind, err := positionOf(after)
	if err != nil {
		return nil, err
	}
	id, ok, err := in.operate(ctx, what, queue)
	if err != nil || !ok {
		return nil, err
	}
	var messages []leasebus.CompletedMessage
	err = in.caller.call(ctx, in.rest, func(b *pgx.Batch) { b.Queue(in.sql.listCompleted, id, behind, limit) }, func(results pgx.BatchResults) error {
		messages = nil
		return each(results, func(r *row) error {
			message, err := readCompleted(r)
			message.Queue = queue
			messages = append(messages, message)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("postgres: %s %q: %w", what, queue, err)
	}
	return messages, nil
}

func readCompleted(r *row) (leasebus.CompletedMessage, error) {
	m := leasebus.CompletedMessage{
		Envelope:    leasebus.Envelope{ID: r.id(1), Type: string(r.text(2)), Payload: slices.Clone(r.bytes(5)), FirstDue: r.instant(6).time()},
		Cursor:      cursorOf(r.int64(0)),
		CompletedAt: r.instant(7).time(),
		Generation:  r.int64(8),
		Attempts:    r.int(9),
		LastOwner:   string(r.text(10)),
	}
	// What the state of a message tells is the same, completed or dead.
	told := leasebus.DeadLetter{Envelope: leasebus.Envelope{ID: m.ID}}
	if err := readPast(r, &told); err != nil {
		return m, fmt.Errorf("message %s: %w", m.ID, err)
	}
	m.Headers, m.IdempotencyKey, m.OrderingKey = told.Headers, told.IdempotencyKey, told.OrderingKey
	m.History, m.Requeues = told.History, told.Requeues
	return m, r.err
}
