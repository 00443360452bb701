package postgres

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
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

// The inserts answer with a row for each queue: the segment, and a position that none of its messages that are due now lies
// before, or, of messages for later, in how many microseconds the first one is due. The position is where the sequence was
// before: to find the first one itself would cost a quarter of the insert.
const (
	insertHead = `WITH s AS MATERIALIZED (SELECT {head} AS segment, last_value AS pos FROM {schema}.ready_pos),
 i AS (INSERT INTO {schema}.ready (segment, queue, id, type, headers, state, payload) SELECT segment, `

	// insertParts is for messages that have little in common, insertAlikeParts for those of one queue, type, headers and
	// state: most batches are such, and cost the server and this process less.
	insertParts = insertHead + `unnest($1::int[]), unnest($2::uuid[]), unnest($3::text[]), unnest($4::bytea[]), unnest($5::bytea[]), unnest($6::bytea[]) FROM s),
 a(queue, segment, pos, due) AS (SELECT queue, segment, pos, NULL::bigint FROM s, unnest($7::int[]) AS queue)`

	insertAlikeParts = insertHead + `$1::int, unnest($2::uuid[]), $3::text, $4::bytea, $5::bytea, unnest($6::bytea[]) FROM s),
 a(queue, segment, pos, due) AS (SELECT $1::int, segment, pos, NULL::bigint FROM s)`

	insertLaterParts = `WITH u AS (SELECT u.*, due * interval '1 microsecond' +
 CASE WHEN absolute THEN timestamptz '2000-01-01 00:00:00+00' ELSE statement_timestamp() END AS due_at
 FROM unnest($1::int[], $2::uuid[], $3::text[], $4::bytea[], $5::bytea[], $6::bytea[], $7::bigint[], $8::bool[])
 AS u(queue, id, type, headers, state, payload, due, absolute)),
 i AS (INSERT INTO {schema}.ready (segment, queue, id, type, headers, state, payload)
 SELECT {head}, queue, id, type, headers, state, payload FROM u WHERE due_at <= statement_timestamp() RETURNING queue, segment, pos),
 l AS (INSERT INTO {schema}.delayed (due_at, first_due, queue, id, type, headers, state, payload)
 SELECT due_at, due_at AS first_due, queue, id, type, headers, state, payload FROM u WHERE due_at > statement_timestamp() RETURNING queue, due_at),
 a(queue, segment, pos, due) AS (SELECT queue, segment, min(pos), NULL::bigint FROM i GROUP BY queue, segment
 UNION ALL SELECT queue, NULL, NULL::bigint, ceil(extract(epoch FROM min(due_at) - statement_timestamp()) * 1000000)::bigint FROM l GROUP BY queue)`

	arrivalsSQL = ` SELECT queue, segment, pos, due FROM a`
)

// inserts are the statements for arrivals of every kind.
type inserts struct{ mixed, alike, later string }

// insertsOf are those that answer with the columns of a that what follows selects.
func insertsOf(n names, answer string) inserts {
	return inserts{n.render(insertParts + answer), n.render(insertAlikeParts + answer), n.render(insertLaterParts + answer)}
}

// of is the statement whose arguments are those of a.
func (s *inserts) of(a *arrivals) string {
	switch {
	case a.forLater():
		return s.later
	case a.alike:
		return s.alike
	default:
		return s.mixed
	}
}

// Columns of an insert. The last two are of messages for later only: microseconds, from the store's now or, if absolute,
// from the year 2000.
const (
	columnQueue = iota
	columnID
	columnType
	columnHeaders
	columnState
	columnPayload
	columnDue
	columnAbsolute
	columns
)

const columnsNow = columnDue

// shared reports whether a column is kept once while all messages are alike.
func shared(column int) bool {
	return column < columnsNow && column != columnID && column != columnPayload
}

//nolint:gochecknoglobals // a constant
var columnTypes = [columns]uint32{
	pgtype.Int4OID, pgtype.UUIDOID, pgtype.TextOID, pgtype.ByteaOID, pgtype.ByteaOID, pgtype.ByteaOID, pgtype.Int8OID, pgtype.BoolOID,
}

// arrivals are messages on their way in, as the arrays of an insert.
type arrivals struct {
	columns [columns]array
	// alike: all have the queue, type, headers and state of the first one, which alone are in the columns.
	alike  bool
	queues []int32 // each once
	bytes  int
}

func (a *arrivals) len() int { return a.columns[columnID].n }

// clear forgets the messages and keeps the memory.
func (a *arrivals) clear() {
	for c := range a.columns {
		a.columns[c].start(columnTypes[c])
	}
	a.alike, a.queues, a.bytes = true, a.queues[:0], 0
}

func (a *arrivals) add(queue int32, e *leasebus.Envelope) {
	c := &a.columns
	headers, state := headersOf(e), keysOf(e).encode(false)
	first := a.len() == 0
	if a.alike && !first && !a.like(queue, e.Type, headers, state) {
		a.spread()
	}
	if first || !a.alike {
		c[columnQueue].addInt32(queue)
		c[columnType].addText(e.Type)
		c[columnHeaders].addBytes(headers)
		c[columnState].addBytes(state)
		a.note(queue)
	}
	c[columnID].addID(e.ID)
	c[columnPayload].addBytes(payloadOf(e))
	a.bytes += len(e.Payload)
}

// like reports whether these are the first message's.
func (a *arrivals) like(queue int32, kind string, headers, state []byte) bool {
	c := &a.columns
	return a.queues[0] == queue && string(c[columnType].first()) == kind &&
		same(c[columnHeaders].first(), headers) && same(c[columnState].first(), state)
}

// same tells null from empty.
func same(a, b []byte) bool { return (a == nil) == (b == nil) && bytes.Equal(a, b) }

// spread gives each message what it had in common with the first.
func (a *arrivals) spread() {
	a.alike = false
	for c := range columnsNow {
		if shared(c) {
			for column := &a.columns[c]; column.n < a.len(); {
				column.addBytes(column.first())
			}
		}
	}
}

func (a *arrivals) note(queue int32) {
	if !slices.Contains(a.queues, queue) {
		a.queues = append(a.queues, queue)
	}
}

func (a *arrivals) addLater(queue int32, out *leasebus.Outgoing) {
	a.alike = false // they are few
	a.add(queue, &out.Envelope)
	absolute := !out.At.IsZero()
	due := microseconds(out.Delay)
	if absolute {
		due = dueAt(out.At)
	}
	a.columns[columnDue].addInt64(due)
	a.columns[columnAbsolute].addBool(absolute)
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

func scheduled(out *leasebus.Outgoing) bool { return out.Delay > 0 || !out.At.IsZero() }

// payloadOf is e's payload, which is never null.
func payloadOf(e *leasebus.Envelope) []byte {
	if e.Payload == nil {
		return []byte{}
	}
	return e.Payload
}

func keysOf(e *leasebus.Envelope) *past {
	if e.IdempotencyKey == "" && e.OrderingKey == "" {
		return nil
	}
	return &past{idempotencyKey: e.IdempotencyKey, orderingKey: e.OrderingKey}
}

// args are what an insert of all of a takes.
func (a *arrivals) args() []any {
	args := make([]any, 0, columns)
	for c := range columnsNow {
		if a.alike && shared(c) {
			args = append(args, a.common(c))
		} else {
			args = append(args, &a.columns[c])
		}
	}
	switch {
	case a.alike:
		return args
	case a.forLater():
		return append(args, &a.columns[columnDue], &a.columns[columnAbsolute])
	}
	var queues array
	queues.start(pgtype.Int4OID)
	for _, queue := range a.queues {
		queues.addInt32(queue)
	}
	return append(args, &queues)
}

// common is what all messages have in a shared column.
func (a *arrivals) common(column int) any {
	switch first := a.columns[column].first(); column {
	case columnQueue:
		return a.queues[0]
	case columnType:
		return string(first)
	default:
		return first
	}
}

func (a *arrivals) forLater() bool { return a.columns[columnDue].n > 0 }

// statements divides a into what one statement is to hold each.
func (a *arrivals) statements() []*arrivals {
	switch {
	case a.len() == 0:
		return nil
	case a.len() <= flushRows && a.bytes <= flushBytes:
		return []*arrivals{a}
	}
	var parts []*arrivals
	for r := a.reader(); r.left() > 0; {
		rows, size := 0, 0
		payloads := &a.columns[columnPayload]
		for at := r.at[columnPayload]; rows < min(r.left(), flushRows); rows++ {
			var payload []byte
			payload, at = payloads.next(at)
			if size += len(payload); rows > 0 && size > flushBytes {
				break
			}
		}
		parts = append(parts, r.take(rows))
	}
	return parts
}

// arrivalsReader takes arrivals apart again.
type arrivalsReader struct {
	of    *arrivals
	at    [columns]int
	taken int
}

func (a *arrivals) reader() arrivalsReader {
	r := arrivalsReader{of: a}
	for c := range r.at {
		r.at[c] = arrayHeader
	}
	return r
}

func (r *arrivalsReader) left() int { return r.of.len() - r.taken }

// take copies the next n messages.
func (r *arrivalsReader) take(n int) *arrivals {
	part := &arrivals{}
	part.clear()
	part.alike = r.of.alike
	for i := range n {
		for c := range r.at {
			column := &r.of.columns[c]
			common := part.alike && shared(c)
			if column.n == 0 || common && i > 0 { // a column of messages for later, or there already
				continue
			}
			element, behind := column.next(r.at[c])
			if !common {
				r.at[c] = behind
			}
			part.columns[c].addBytes(element)
			switch c {
			case columnQueue:
				part.note(int32(binary.BigEndian.Uint32(element))) //nolint:gosec // two's complement
			case columnPayload:
				part.bytes += len(element)
			}
		}
	}
	r.taken += n
	return part
}

// outbound is what goes into one transaction: what is due now and what comes later.
type outbound struct{ now, later arrivals }

// outbounds keeps the memory of those that are done with.
//
//nolint:gochecknoglobals // as memory is
var outbounds = sync.Pool{New: func() any { return new(outbound) }}

func newOutbound() *outbound {
	o := outbounds.Get().(*outbound) //nolint:forcetypeassert // nothing else is in there
	o.now.clear()
	o.later.clear()
	return o
}

// free is for an outbound that nobody uses any more.
func (o *outbound) free() {
	const most = 2 << 20
	if o.now.bytes+o.later.bytes <= most {
		outbounds.Put(o)
	}
}

// add takes the messages of one call and holds no memory of theirs afterwards. It returns how many are due now.
func (o *outbound) add(out []leasebus.Outgoing, queues *queueIDs) (now int) {
	for i := range out {
		if scheduled(&out[i]) {
			o.later.addLater(queues.of(i), &out[i])
		} else {
			o.now.add(queues.of(i), &out[i].Envelope)
			now++
		}
	}
	return now
}

// arrival is what came of an insert for one queue.
type arrival struct {
	queue int32
	seg   segment
	pos   int64 // that none lies before; 0 = none is due now
	due   time.Duration
}

// readArrival takes a row of queue, segment, position and microseconds.
func readArrival(r *row) arrival {
	return arrival{r.int32(0), segment(r.int(1)), r.int64(2), dueIn(r.int64(3))}
}

// dueIn is so many microseconds, as far as anyone looks ahead.
func dueIn(microseconds int64) time.Duration {
	return time.Duration(min(microseconds, int64(maxDue/time.Microsecond))) * time.Microsecond
}

func readArrivals(results pgx.BatchResults, answers int) ([]arrival, error) {
	var all []arrival
	for range answers {
		if err := each(results, func(r *row) error {
			all = append(all, readArrival(r))
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
		queues, size, err := in.admit(ctx, out)
		if err != nil || len(out) == 0 {
			return err
		}
		return in.publisher.publish(ctx, out, queues, size)
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

// queueIDs are the numbers of the queues of a call's messages.
type queueIDs struct {
	first int32
	each  []int32 // nil = all are in the first
}

func (q *queueIDs) of(i int) int32 {
	if q.each == nil {
		return q.first
	}
	return q.each[i]
}

// admit checks what is to be published. size is that of the payloads.
func (in *Inbox) admit(ctx context.Context, out []leasebus.Outgoing) (queues queueIDs, size int, err error) {
	if ctx.Err() != nil {
		return queues, 0, context.Cause(ctx)
	}
	for i := range out {
		if err := admit(&out[i].Envelope, in.options.maxPayload); err != nil {
			return queues, 0, fmt.Errorf("envelope %d of %d: %w", i, len(out), err)
		}
		size += len(out[i].Payload)
	}
	for i := range out {
		if i > 0 && out[i].Queue == out[i-1].Queue {
			if queues.each != nil {
				queues.each[i] = queues.each[i-1]
			}
			continue
		}
		id, err := in.register(ctx, out[i].Queue)
		switch {
		case err != nil:
			return queues, 0, fmt.Errorf("queue %q: %w", out[i].Queue, err)
		case i == 0:
			queues.first = id
			continue
		case queues.each == nil:
			queues.each = slices.Repeat([]int32{queues.first}, len(out))
		}
		queues.each[i] = id
	}
	return queues, size, nil
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
	// What is to be sent: messages, of which the one who sends makes arrays when the time has come, or, of a large call,
	// the arrays.
	out    []leasebus.Outgoing
	queues queueIDs
	own    *outbound

	rows, bytes int
	// now is how many of the rows are due now.
	now   int
	taken bool // guarded by the publisher's lock
	err   error
	done  chan struct{} // has one element when err stands
}

//nolint:gochecknoglobals // as memory is
var publications = sync.Pool{New: func() any { return &publication{done: make(chan struct{}, 1)} }}

// free is for a publication whose done was received.
func (pub *publication) free() {
	*pub = publication{done: pub.done}
	publications.Put(pub)
}

// large is from how many rows or bytes a call makes its own arrays: it would hold up others.
const (
	largeRows  = flushRows / 4
	largeBytes = flushBytes / 32
)

func (p *publisher) publish(ctx context.Context, out []leasebus.Outgoing, queues queueIDs, size int) error {
	pub := publications.Get().(*publication) //nolint:forcetypeassert // nothing else is in there
	pub.out, pub.queues, pub.rows, pub.bytes = out, queues, len(out), size
	if pub.rows >= largeRows || pub.bytes >= largeBytes {
		pub.own = newOutbound()
		pub.now = pub.own.add(out, &pub.queues)
	}
	if !p.enqueue(pub) {
		return ErrClosed
	}
	select {
	case <-pub.done:
		err := pub.err
		pub.free()
		return err
	case <-ctx.Done():
		return p.abandon(ctx, pub)
	}
}

// enqueue is false when the publisher is closed.
func (p *publisher) enqueue(pub *publication) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	if p.active < flushers && p.in.start(p.flushAll) {
		p.active++
	}
	if p.active == 0 { // closed at this moment
		return false
	}
	p.waiting = append(p.waiting, pub)
	return true
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
	var group []*publication
	for {
		var all *outbound
		if group, all = p.take(group[:0]); len(group) == 0 {
			return
		}
		p.flush(group, all)
		clear(group)
	}
}

// take gathers what waits into group, as far as it fits one transaction. The arrays of small calls are made here, with the
// lock held: a call whose context ends is then either not taken or not looked at any more.
func (p *publisher) take(group []*publication) ([]*publication, *outbound) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.waiting) == 0 {
		p.active--
		return nil, nil
	}
	n := 0
	all := p.waiting[0].own
	if all == nil {
		all = newOutbound()
		for rows, size := 0, 0; n < len(p.waiting) && p.waiting[n].own == nil && rows < flushRows && size < flushBytes; n++ {
			pub := p.waiting[n]
			pub.now = all.add(pub.out, &pub.queues)
			rows, size = rows+pub.rows, size+pub.bytes
		}
	}
	n = max(n, 1)
	for _, pub := range p.waiting[:n] {
		pub.taken, pub.out = true, nil
	}
	group = append(group, p.waiting[:n]...)
	rest := copy(p.waiting, p.waiting[n:])
	clear(p.waiting[rest:])
	p.waiting = p.waiting[:rest]
	return group, all
}

// flush stores a group. What the server refuses for one of them is refused for that one alone.
func (p *publisher) flush(group []*publication, all *outbound) {
	err := p.in.store(all)
	if refusesData(err) && len(group) > 1 {
		now, later := all.now.reader(), all.later.reader()
		for i, pub := range group {
			p.flush(group[i:i+1], &outbound{now: *now.take(pub.now), later: *later.take(pub.rows - pub.now)})
		}
		return
	}
	all.free()
	if err != nil && !undone(err) {
		err = fmt.Errorf("%w: %w", leasebus.ErrOutcomeUnknown, err)
	}
	for _, pub := range group {
		pub.err = err
		pub.done <- struct{}{}
	}
}

// store inserts in one transaction and tells those who wait for messages.
func (in *Inbox) store(o *outbound) error {
	ctx, cancel := context.WithTimeout(context.Background(), flushBound)
	defer cancel()
	parts := slices.Concat(o.now.statements(), o.later.statements())
	var came []arrival
	err := in.caller.call(ctx, in.rest, func(b *pgx.Batch) {
		for _, part := range parts {
			b.Queue(in.sql.insert.of(part), part.args()...)
		}
	}, func(results pgx.BatchResults) (err error) {
		came, err = readArrivals(results, len(parts))
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
