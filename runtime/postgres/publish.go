package postgres

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	leasebus "github.com/leasebus/leasebus/runtime"
)

const (
	// flushers is how many inserts may be under way: what comes meanwhile is gathered for the next one.
	flushers = 2
	// flushRows and flushBytes end the gathering for one transaction, and are the most that one statement inserts.
	flushRows  = 1000
	flushBytes = 8 << 20
	// flushBound is the longest that one transaction of the publisher may take.
	flushBound = 30 * time.Second
)

// The answers of the inserts: for each queue the first position that was inserted, or, of messages for later, in how
// many microseconds the first one is due.
const (
	insertParts = `WITH i AS (INSERT INTO {ready} (queue, id, type, headers, state, payload)
 SELECT * FROM unnest($1::int[], $2::uuid[], $3::text[], $4::bytea[], $5::bytea[], $6::bytea[]) RETURNING queue, pos),
 a(queue, pos, due) AS (SELECT queue, min(pos), NULL::bigint FROM i GROUP BY queue)`

	insertLaterParts = `WITH u AS (SELECT u.*, due * interval '1 microsecond' +
 CASE WHEN absolute THEN timestamptz '2000-01-01 00:00:00+00' ELSE statement_timestamp() END AS due_at
 FROM unnest($1::int[], $2::uuid[], $3::text[], $4::bytea[], $5::bytea[], $6::bytea[], $7::bigint[], $8::bool[])
 AS u(queue, id, type, headers, state, payload, due, absolute)),
 i AS (INSERT INTO {ready} (queue, id, type, headers, state, payload)
 SELECT queue, id, type, headers, state, payload FROM u WHERE due_at <= statement_timestamp() RETURNING queue, pos),
 l AS (INSERT INTO {schema}.delayed (due_at, first_due, queue, id, type, headers, state, payload)
 SELECT due_at, due_at AS first_due, queue, id, type, headers, state, payload FROM u WHERE due_at > statement_timestamp() RETURNING queue, due_at),
 a(queue, pos, due) AS (SELECT queue, min(pos), NULL::bigint FROM i GROUP BY queue
 UNION ALL SELECT queue, NULL, ceil(extract(epoch FROM min(due_at) - statement_timestamp()) * 1000000)::bigint FROM l GROUP BY queue)`

	insertSQL      = insertParts + ` SELECT queue, pos, due FROM a`
	insertLaterSQL = insertLaterParts + ` SELECT queue, pos, due FROM a`
)

// arrivals are messages on their way in, as the arrays of an insert.
type arrivals struct {
	queues                    []int32
	ids                       ids
	types                     []string
	headers, states, payloads [][]byte
	bytes                     int

	// Of messages for later only: microseconds, from the store's now or, with absolute, from the year 2000.
	due      []int64
	absolute []bool
}

func (a *arrivals) len() int { return len(a.queues) }

func (a *arrivals) add(queue int32, e *leasebus.Envelope, payload []byte) {
	a.queues = append(a.queues, queue)
	a.ids = append(a.ids, pgtype.UUID{Bytes: e.ID, Valid: true})
	a.types = append(a.types, e.Type)
	a.headers = append(a.headers, headersOf(e))
	a.states = append(a.states, keysOf(e).encode(false))
	if payload == nil {
		payload = []byte{}
	}
	a.payloads = append(a.payloads, payload)
	a.bytes += len(payload)
}

func (a *arrivals) addLater(queue int32, out *leasebus.Outgoing, payload []byte) {
	a.add(queue, &out.Envelope, payload)
	absolute := !out.At.IsZero()
	due := microseconds(out.Delay)
	if absolute {
		due = dueAt(out.At)
	}
	a.due, a.absolute = append(a.due, due), append(a.absolute, absolute)
}

// dueAt keeps a time within what the server can count, rounded up.
func dueAt(t time.Time) int64 {
	const farFuture = 200_000
	switch {
	case t.Before(epoch):
		return 0
	case t.Year() > farFuture:
		t = time.Date(farFuture, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	return int64(instantOf(t.Add(time.Microsecond - 1)))
}

// headersOf are the bytes of e's headers, null if there are none.
func headersOf(e *leasebus.Envelope) []byte {
	if encoded := e.Headers.Encoded(); len(encoded) > 0 {
		return encoded
	}
	return nil
}

func keysOf(e *leasebus.Envelope) *past {
	if e.IdempotencyKey == "" && e.OrderingKey == "" {
		return nil
	}
	return &past{idempotencyKey: e.IdempotencyKey, orderingKey: e.OrderingKey}
}

// appendAll moves b's elements behind a's.
func (a *arrivals) appendAll(b *arrivals) {
	a.queues = append(a.queues, b.queues...)
	a.ids = append(a.ids, b.ids...)
	a.types = append(a.types, b.types...)
	a.headers = append(a.headers, b.headers...)
	a.states = append(a.states, b.states...)
	a.payloads = append(a.payloads, b.payloads...)
	a.due = append(a.due, b.due...)
	a.absolute = append(a.absolute, b.absolute...)
	a.bytes += b.bytes
}

// cut takes as many elements off the front as one statement is to hold.
func (a *arrivals) cut() (args []any) {
	n, size := 0, 0
	for n < a.len() && n < flushRows && (n == 0 || size+len(a.payloads[n]) <= flushBytes) {
		size += len(a.payloads[n])
		n++
	}
	args = []any{a.queues[:n], a.ids[:n], a.types[:n], a.headers[:n], a.states[:n], a.payloads[:n]}
	a.queues, a.ids, a.types = a.queues[n:], a.ids[n:], a.types[n:]
	a.headers, a.states, a.payloads = a.headers[n:], a.states[n:], a.payloads[n:]
	if a.due != nil {
		args = append(args, a.due[:n], a.absolute[:n])
		a.due, a.absolute = a.due[n:], a.absolute[n:]
	}
	return args
}

// outbound is what one call publishes: what is due now and what comes later.
type outbound struct{ now, later arrivals }

// queue puts the inserts into a batch and returns how many answers there will be.
func (o *outbound) queue(b *pgx.Batch, insert, insertLater string) int {
	answers := 0
	for now := o.now; now.len() > 0; answers++ {
		b.Queue(insert, now.cut()...)
	}
	for later := o.later; later.len() > 0; answers++ {
		b.Queue(insertLater, later.cut()...)
	}
	return answers
}

// arrival is what came of an insert for one queue.
type arrival struct {
	queue int32
	pos   int64 // of the first one; 0 = none is due now
	due   time.Duration
}

func readArrivals(results pgx.BatchResults, answers int) ([]arrival, error) {
	var all []arrival
	for range answers {
		if err := each(results, func(r *row) error {
			all = append(all, arrival{queue: r.int32(0), pos: r.int64(1), due: time.Duration(r.int64(2)) * time.Microsecond})
			return r.err
		}); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// Publish implements [leasebus.Publisher]. It takes all of out in one transaction or, with an error, nothing; with
// [leasebus.ErrOutcomeUnknown] one of the two. Messages of one call are leased in the order of out.
//
// Calls at the same time share statements. A call whose context ends returns at once: with the context's error if
// nothing was sent, else with an unknown outcome.
func (in *Inbox) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	return publishWith(out, receipts, func() error {
		o, err := in.outbound(ctx, out, ctx.Done() != nil)
		if err != nil || o == nil {
			return err
		}
		return in.publisher.publish(ctx, o)
	})
}

// publishWith gives every envelope the receipt of the whole.
func publishWith(out []leasebus.Outgoing, receipts []leasebus.Receipt, publish func() error) error {
	if len(receipts) != len(out) {
		return fmt.Errorf("postgres: publish: %d receipts for %d envelopes; allowed are as many", len(receipts), len(out))
	}
	err := publish()
	if err != nil {
		err = fmt.Errorf("postgres: publish: %w", err)
	}
	for i := range receipts {
		receipts[i] = leasebus.Receipt{ID: out[i].ID, Err: err}
	}
	return err
}

// outbound checks what is to be published and makes the arrays of it; nil if there is nothing. With keep, it holds no
// memory of the caller's when it has returned.
func (in *Inbox) outbound(ctx context.Context, out []leasebus.Outgoing, keep bool) (*outbound, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	size := 0
	for i := range out {
		if err := admit(&out[i].Envelope, in.options.maxPayload); err != nil {
			return nil, fmt.Errorf("envelope %d of %d: %w", i, len(out), err)
		}
		size += len(out[i].Payload)
	}
	if len(out) == 0 {
		return nil, nil //nolint:nilnil // nothing is not an error
	}
	var arena []byte
	if keep {
		arena = make([]byte, 0, size)
	}
	o := &outbound{}
	var queue int32
	for i := range out {
		if i == 0 || out[i].Queue != out[i-1].Queue {
			id, err := in.register(ctx, out[i].Queue)
			if err != nil {
				return nil, fmt.Errorf("queue %q: %w", out[i].Queue, err)
			}
			queue = id
		}
		payload := out[i].Payload
		if keep && len(payload) > 0 {
			from := len(arena)
			arena = append(arena, payload...)
			payload = arena[from:len(arena):len(arena)]
		}
		if out[i].Delay > 0 || !out[i].At.IsZero() {
			o.later.addLater(queue, &out[i], payload)
		} else {
			o.now.add(queue, &out[i].Envelope, payload)
		}
	}
	return o, nil
}

// admit checks an envelope against every limit, those of text columns included.
func admit(e *leasebus.Envelope, maxPayload int) error {
	for _, name := range []struct{ part, value string }{{"queue", e.Queue}, {"type", e.Type}} {
		switch {
		case name.value == "":
			return &leasebus.EnvelopeError{Part: name.part, Text: "is empty; a name is needed"}
		case len(name.value) > leasebus.MaxNameBytes:
			return &leasebus.EnvelopeError{Part: name.part, Text: fmt.Sprintf("is %d bytes; allowed are %d", len(name.value), leasebus.MaxNameBytes)}
		case !utf8.ValidString(name.value) || strings.ContainsRune(name.value, 0):
			return &leasebus.EnvelopeError{Part: name.part, Text: "holds a NUL or is not valid UTF-8"}
		}
	}
	return e.Validate(maxPayload)
}

// publisher gathers what is published at the same time into few transactions.
type publisher struct {
	in *Inbox

	mu      sync.Mutex
	waiting []*publication
	active  int
	closed  bool
}

// publication is one call's part of a transaction.
type publication struct {
	*outbound
	taken bool // guarded by the publisher's lock
	done  chan struct{}
	err   error // when done
}

func (p *publisher) publish(ctx context.Context, o *outbound) error {
	pub := &publication{outbound: o, done: make(chan struct{})}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return ErrClosed
	}
	if p.active < flushers && p.in.start(p.flushAll) {
		p.active++
	}
	if p.active == 0 { // closed at this moment
		p.mu.Unlock()
		return ErrClosed
	}
	p.waiting = append(p.waiting, pub)
	p.mu.Unlock()
	select {
	case <-pub.done:
		return pub.err
	case <-ctx.Done():
		return p.abandon(ctx, pub)
	}
}

// abandon takes back what was not sent yet.
func (p *publisher) abandon(ctx context.Context, pub *publication) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pub.taken {
		return fmt.Errorf("%w: %w", leasebus.ErrOutcomeUnknown, context.Cause(ctx))
	}
	for i := range p.waiting {
		if p.waiting[i] == pub {
			p.waiting = append(p.waiting[:i], p.waiting[i+1:]...)
			break
		}
	}
	return context.Cause(ctx)
}

// flushAll sends until nothing waits.
func (p *publisher) flushAll() {
	for {
		group := p.take()
		if group == nil {
			return
		}
		p.flush(group)
	}
}

func (p *publisher) take() []*publication {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, rows, size := 0, 0, 0
	for n < len(p.waiting) && (n == 0 || rows < flushRows && size < flushBytes) {
		pub := p.waiting[n]
		pub.taken = true
		rows += pub.now.len() + pub.later.len()
		size += pub.now.bytes + pub.later.bytes
		n++
	}
	if n == 0 {
		p.active--
		return nil
	}
	group := make([]*publication, n)
	copy(group, p.waiting)
	rest := copy(p.waiting, p.waiting[n:])
	clear(p.waiting[rest:])
	p.waiting = p.waiting[:rest]
	return group
}

// flush stores a group. What the server refuses for one of them is refused for that one alone.
func (p *publisher) flush(group []*publication) {
	all := group[0].outbound
	if len(group) > 1 {
		all = &outbound{}
		for _, pub := range group {
			all.now.appendAll(&pub.now)
			all.later.appendAll(&pub.later)
		}
	}
	err := p.in.store(all)
	if refusesData(err) && len(group) > 1 {
		for _, pub := range group {
			p.flush([]*publication{pub})
		}
		return
	}
	if err != nil && !undone(err) {
		err = fmt.Errorf("%w: %w", leasebus.ErrOutcomeUnknown, err)
	}
	for _, pub := range group {
		pub.err = err
		close(pub.done)
	}
}

// store inserts in one transaction and tells those who wait for messages.
func (in *Inbox) store(o *outbound) error {
	ctx, cancel := context.WithTimeout(context.Background(), flushBound)
	defer cancel()
	var came []arrival
	answers := 0
	err := in.caller.call(ctx, in.rest,
		func(b *pgx.Batch) { answers = o.queue(b, in.sql.insert, in.sql.insertLater) },
		func(results pgx.BatchResults) (err error) {
			came, err = readArrivals(results, answers)
			return err
		})
	if err == nil {
		in.announce(came)
	}
	return err
}

// announce wakes whoever waits for the queues of came, here and in other processes.
func (in *Inbox) announce(came []arrival) {
	for _, a := range came {
		in.keeper.arrived(a)
		in.notifier.add(a)
	}
}

// close refuses what comes, and waits for nothing: the flushers end by themselves.
func (p *publisher) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
}
