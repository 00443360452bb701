package amqp

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	amqp091 "github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// The headers of a message, besides those of the application. The body is the payload, the property message_id the
// envelope's id, the property type its type. Numbers are 64-bit integers, times milliseconds since 1970, the rest text.
const (
	reservedPrefix = "x-leasebus-"

	// headerFirstDue is in every message of leasebus: one without it was published by another program.
	headerFirstDue = reservedPrefix + "first-due"
	// headerAgeFrom is when an operator requeued the message: its age counts from there.
	headerAgeFrom = reservedPrefix + "age-from"
	// headerAttempt is the number of the attempt that this message is for; without it, the first. In a dead letter it is
	// how many attempts were made.
	headerAttempt       = reservedPrefix + "attempt"
	headerCrashes       = reservedPrefix + "crashes"
	headerInterruptions = reservedPrefix + "interruptions"
	// headerRemaining is the wait that is left when the message comes out of a queue of the shared ladder.
	headerRemaining = reservedPrefix + "remaining"

	headerCorrelation = reservedPrefix + "correlation"
	headerCausation   = reservedPrefix + "causation"
	headerReplaces    = reservedPrefix + "replaces"
	headerKey         = reservedPrefix + "key"
	headerOrderingKey = reservedPrefix + "ordering-key"
)

// contentType is what the body of a message of leasebus is.
const contentType = "application/x-protobuf"

// maxHeaderTable bounds the headers that an application publishes, as they are encoded: what leasebus adds to a dead
// letter still fits into one frame of RabbitMQ's default size, 128 KiB.
const maxHeaderTable = 88 << 10

// stamps are what leasebus writes on a message to find it again at its next delivery.
type stamps struct {
	firstDue      time.Time
	ageFrom       time.Time // firstDue, unless an operator has requeued the message
	attempt       int       // 1 or more
	crashes       int
	interruptions int
	remaining     time.Duration
}

// spoiled says which stamps of a delivery could not be believed.
type spoiled struct{ attempt, firstDue bool }

// checkEnvelope refuses what could not travel, or would not arrive as it was sent. The envelope is valid otherwise.
func checkEnvelope(e *leasebus.Envelope) error {
	if len(e.Type) > leasebus.MaxNameBytes {
		return refused("type", fmt.Sprintf("is %d bytes; allowed are %d", len(e.Type), leasebus.MaxNameBytes))
	}
	if len(e.Queue) > leasebus.MaxNameBytes {
		return refused("queue", fmt.Sprintf("is %d bytes; allowed are %d", len(e.Queue), leasebus.MaxNameBytes))
	}
	size := 0
	for name, value := range e.Headers.All() {
		switch {
		case strings.HasPrefix(strings.ToLower(name), reservedPrefix):
			return refused("header "+name, "begins with "+reservedPrefix+", which is reserved")
		case isBrokers(name):
			return refused("header "+name, "is RabbitMQ's own, and would not arrive")
		}
		size += entryBytes(name, value)
	}
	if size > maxHeaderTable {
		return refused("headers", fmt.Sprintf("are %d bytes on the wire; allowed are %d", size, maxHeaderTable))
	}
	return nil
}

func refused(part, text string) error { return &leasebus.EnvelopeError{Part: part, Text: text} }

// isBrokers tells the headers that RabbitMQ writes or acts on. Copied into another message they would grow with every
// retry (x-death), be believed (x-delivery-count), or send it elsewhere (CC).
func isBrokers(name string) bool {
	switch name {
	case "x-death", "x-delivery-count", "x-acquired-count", "CC", "BCC":
		return true
	}
	return strings.HasPrefix(name, "x-first-death-") || strings.HasPrefix(name, "x-last-death-")
}

// entryBytes is what a text takes in an encoded table: its name and value with their lengths, and a byte for the type.
func entryBytes(name, value string) int { return 1 + len(name) + 1 + 4 + len(value) }

// publishing is an envelope as it is published first.
func publishing(e *leasebus.Envelope, s stamps) amqp091.Publishing {
	const usual = 5 // the stamp, the number of the publish, correlation, causation, trace
	table := make(amqp091.Table, usual)
	for name, value := range e.Headers.All() {
		table[wireName(name)] = value
	}
	putText(table, headerKey, e.IdempotencyKey)
	putText(table, headerOrderingKey, e.OrderingKey)
	s.put(table)
	return amqp091.Publishing{
		Headers: table, ContentType: contentType, DeliveryMode: amqp091.Persistent,
		MessageId: e.ID.String(), Type: e.Type, Body: e.Payload,
	}
}

func putText(table amqp091.Table, name, value string) {
	if value != "" {
		table[name] = value
	}
}

// wireName is how a header of an envelope is called in a message, envelopeName the way back.
func wireName(name string) string {
	switch name {
	case leasebus.HeaderCorrelation:
		return headerCorrelation
	case leasebus.HeaderCausation:
		return headerCausation
	case leasebus.HeaderReplaces:
		return headerReplaces
	}
	return name
}

func envelopeName(name string) (string, bool) {
	switch name {
	case headerCorrelation:
		return leasebus.HeaderCorrelation, true
	case headerCausation:
		return leasebus.HeaderCausation, true
	case headerReplaces:
		return leasebus.HeaderReplaces, true
	}
	return name, !strings.HasPrefix(name, reservedPrefix) && !isBrokers(name)
}

// put writes the stamps that say something.
func (s stamps) put(table amqp091.Table) {
	table[headerFirstDue] = s.firstDue.UnixMilli()
	putNumber(table, headerAttempt, int64(s.attempt), 1)
	putNumber(table, headerCrashes, int64(s.crashes), 0)
	putNumber(table, headerInterruptions, int64(s.interruptions), 0)
	putNumber(table, headerRemaining, s.remaining.Milliseconds(), 0)
	if s.ageFrom.IsZero() || s.ageFrom.Equal(s.firstDue) {
		delete(table, headerAgeFrom)
	} else {
		table[headerAgeFrom] = s.ageFrom.UnixMilli()
	}
}

func putNumber(table amqp091.Table, name string, n, meansNothing int64) {
	if n == meansNothing {
		delete(table, name)
	} else {
		table[name] = n
	}
}

// readStamps believes what can be true: a bad attempt is the first, a bad or future time is now. Only a message whose
// wait is not over may be due later, by as much as is left.
func readStamps(table amqp091.Table, now time.Time) (stamps, spoiled) {
	var bad spoiled
	s := stamps{attempt: 1}
	if n, ok := number(table[headerRemaining]); ok && n > 0 {
		s.remaining = time.Duration(min(n, maxRemaining.Milliseconds())) * time.Millisecond
	}
	latest := now.Add(s.remaining)
	s.firstDue = latest
	if given, there := table[headerAttempt]; there {
		if n, ok := number(given); ok && n >= 1 && n <= math.MaxInt32 {
			s.attempt = int(n)
		} else {
			bad.attempt = true
		}
	}
	if given, there := table[headerFirstDue]; there {
		s.firstDue, bad.firstDue = timeUpTo(given, latest)
	}
	s.ageFrom = s.firstDue
	if given, there := table[headerAgeFrom]; there {
		s.ageFrom, _ = timeUpTo(given, now)
	}
	s.crashes = counter(table, headerCrashes)
	s.interruptions = counter(table, headerInterruptions)
	return s, bad
}

// maxRemaining is the longest wait that is asked of any store.
const maxRemaining = 876_000 * time.Hour

func timeUpTo(given any, latest time.Time) (t time.Time, bad bool) {
	n, ok := number(given)
	if !ok || n <= 0 || n > latest.UnixMilli() {
		return latest, true
	}
	return time.UnixMilli(n).UTC(), false
}

func counter(table amqp091.Table, name string) int {
	n, _ := number(table[name])
	return int(min(max(n, 0), math.MaxInt32))
}

// number reads an integer, whichever width another program has given it.
func number(v any) (int64, bool) {
	switch n := v.(type) {
	case int64:
		return n, true
	case int32:
		return int64(n), true
	case int16:
		return int64(n), true
	case int8:
		return int64(n), true
	case uint8:
		return int64(n), true
	case uint16:
		return int64(n), true
	case uint32:
		return int64(n), true
	}
	return 0, false
}

// envelopeOf reads a delivery. Its memory is the delivery's own.
//
// A message of another program has the type that its property says, or the queue's own, and an id made of its
// message_id, so that every delivery of it has the same.
func envelopeOf(d *amqp091.Delivery, queue, queueType string, firstDue time.Time) leasebus.Envelope {
	e := leasebus.Envelope{
		ID: idOf(d.MessageId), Type: d.Type, Queue: queue, Payload: d.Body, FirstDue: firstDue,
		IdempotencyKey: text(d.Headers, headerKey), OrderingKey: text(d.Headers, headerOrderingKey),
	}
	if e.Type == "" {
		e.Type = queueType
	}
	e.Headers = headersOf(d)
	return e
}

// idOf is the id that a message_id stands for.
func idOf(messageID string) leasebus.ID {
	if messageID == "" {
		return leasebus.NewID()
	}
	if id, err := leasebus.ParseID(messageID); err == nil && id != (leasebus.ID{}) {
		return id
	}
	// A version 8 UUID: the first bits of a hash, but for those that name the version.
	sum := sha256.Sum256([]byte(messageID))
	id := leasebus.ID(sum[:16])
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}

// text reads a header that is a name or a key; "" if it could not be one.
func text(table amqp091.Table, name string) string {
	value, _ := table[name].(string)
	if !storable(value, leasebus.MaxNameBytes) {
		return ""
	}
	return value
}

// headersOf are the headers that an envelope can hold. What it cannot hold, such as a table that another program sent,
// is not shown, but travels on with retries and to the dead letters.
func headersOf(d *amqp091.Delivery) leasebus.Headers {
	var shown map[string]string
	show := func(name, value string) {
		if shown == nil {
			shown = make(map[string]string, len(d.Headers))
		}
		shown[name] = value
	}
	size := 0
	for name, value := range d.Headers {
		name, ok := envelopeName(name)
		if !ok || !storable(name, leasebus.MaxNameBytes) || name == "" {
			continue
		}
		value, ok := plainText(value)
		if !ok || !storable(value, leasebus.MaxHeaderBytes) {
			continue
		}
		if size += entryBytes(name, value); size <= leasebus.MaxHeadersBytes {
			show(name, value)
		}
	}
	if _, there := d.Headers[headerCorrelation]; !there && d.CorrelationId != "" && storable(d.CorrelationId, leasebus.MaxNameBytes) {
		show(leasebus.HeaderCorrelation, d.CorrelationId)
	}
	if shown == nil {
		return leasebus.Headers{}
	}
	return leasebus.NewHeaders(shown)
}

// plainText writes a value that has an obvious form as text.
func plainText(value any) (string, bool) {
	switch v := value.(type) {
	case string:
		return v, true
	case bool, int8, int16, int32, int64, uint8, uint16, uint32, float32, float64:
		return fmt.Sprint(v), true
	case time.Time:
		return v.UTC().Format(time.RFC3339), true
	}
	return "", false
}

func storable(s string, limit int) bool {
	return len(s) <= limit && utf8.ValidString(s) && strings.IndexByte(s, 0) < 0
}

// copyOf is a delivery as it is published again: the same body, properties and headers of the application, with other
// stamps. Of what the broker and leasebus have added to it, it keeps what a change puts back.
//
// The property user_id would have to be this connection's, and an expiration would cut a wait short.
func copyOf(d *amqp091.Delivery, id leasebus.ID, s stamps, change func(amqp091.Table)) amqp091.Publishing {
	table := maps.Clone(d.Headers)
	if table == nil {
		table = make(amqp091.Table)
	}
	maps.DeleteFunc(table, func(name string, _ any) bool { return isBrokers(name) })
	s.put(table)
	if change != nil {
		change(table)
	}
	p := amqp091.Publishing{
		Headers: table, ContentType: d.ContentType, ContentEncoding: d.ContentEncoding, DeliveryMode: amqp091.Persistent,
		Priority: d.Priority, CorrelationId: d.CorrelationId, ReplyTo: d.ReplyTo, MessageId: d.MessageId,
		Timestamp: d.Timestamp, Type: d.Type, AppId: d.AppId, Body: d.Body,
	}
	if p.MessageId == "" {
		p.MessageId = id.String()
	}
	return p
}

// tableBytes is how large a table is on the wire, at least where it holds texts and numbers; for what another program
// has sent, it is an estimate from above.
func tableBytes(table amqp091.Table) int {
	size := 0
	for name, value := range table {
		size += 1 + len(name) + valueBytes(value)
	}
	return size
}

func valueBytes(value any) int {
	const typeAndLength, widest = 5, 16
	switch v := value.(type) {
	case string:
		return typeAndLength + len(v)
	case []byte:
		return typeAndLength + len(v)
	case amqp091.Table:
		return typeAndLength + tableBytes(v)
	case []any:
		size := typeAndLength
		for _, element := range v {
			size += valueBytes(element)
		}
		return size
	}
	return widest
}

// fit takes headers out of table until it fits into limit bytes, and returns the names of those that do not count as
// expendable: what it has to drop of a message that another program has filled to the brim.
func fit(table amqp091.Table, limit int, expendable ...string) (dropped []string) {
	for _, name := range expendable {
		if tableBytes(table) <= limit {
			return nil
		}
		delete(table, name)
	}
	for tableBytes(table) > limit {
		name := largest(table)
		if name == "" {
			return dropped
		}
		delete(table, name)
		dropped = append(dropped, name)
	}
	slices.Sort(dropped)
	return dropped
}

// largest names the header of the application that takes the most room.
func largest(table amqp091.Table) (name string) {
	most := 0
	for n, value := range table {
		if size := valueBytes(value); size > most && !strings.HasPrefix(n, reservedPrefix) {
			name, most = n, size
		}
	}
	return name
}
