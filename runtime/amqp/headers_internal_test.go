package amqp

import (
	"errors"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// delivered is a publishing as it arrives.
func delivered(p amqp091.Publishing) *amqp091.Delivery {
	return &amqp091.Delivery{
		Headers: p.Headers, ContentType: p.ContentType, ContentEncoding: p.ContentEncoding, DeliveryMode: p.DeliveryMode,
		Priority: p.Priority, CorrelationId: p.CorrelationId, ReplyTo: p.ReplyTo, Expiration: p.Expiration,
		MessageId: p.MessageId, Timestamp: p.Timestamp, Type: p.Type, UserId: p.UserId, AppId: p.AppId, Body: p.Body,
	}
}

// millisecond is an instant that the wire can carry.
func millisecond() time.Time { return time.Now().UTC().Truncate(time.Millisecond) }

func fullEnvelope() leasebus.Envelope {
	return leasebus.Envelope{
		ID: leasebus.NewID(), Type: "shop.v1.OrderPlaced", Queue: "orders", Payload: []byte{0, 1, 0xff},
		IdempotencyKey: "key ä", OrderingKey: "lane",
		Headers: leasebus.NewHeaders(map[string]string{
			leasebus.HeaderCorrelation: "c", leasebus.HeaderCausation: "d", leasebus.HeaderReplaces: "e",
			leasebus.HeaderTraceparent: "00-1-1-01", leasebus.HeaderTracestate: "v=1",
			"x": "y", "empty": "", "unicode-ключ": "漢字 🚌", "long": strings.Repeat("x", leasebus.MaxHeaderBytes),
		}),
	}
}

func TestHeaders_S60_envelope_comes_back(t *testing.T) {
	t.Parallel()
	e := fullEnvelope()
	if err := checkEnvelope(&e); err != nil {
		t.Fatal(err)
	}
	now := millisecond()
	p := publishing(&e, stamps{firstDue: now, attempt: 1})
	if p.DeliveryMode != amqp091.Persistent || p.Type != e.Type || p.MessageId != e.ID.String() || p.ContentType != "application/x-protobuf" {
		t.Errorf("properties: got %+v", p)
	}
	got := envelopeOf(delivered(p), e.Queue, "other.Type", now)
	e.FirstDue = now
	if got.ID != e.ID || got.Type != e.Type || got.Queue != e.Queue || got.IdempotencyKey != e.IdempotencyKey ||
		got.OrderingKey != e.OrderingKey || !got.FirstDue.Equal(e.FirstDue) || !slices.Equal(got.Payload, e.Payload) {
		t.Errorf("got %+v\nwant %+v", got, e)
	}
	if !slices.Equal(got.Headers.Encoded(), e.Headers.Encoded()) {
		t.Errorf("headers: got %v, want %v", maps.Collect(got.Headers.All()), maps.Collect(e.Headers.All()))
	}
	bare := leasebus.Envelope{ID: leasebus.NewID(), Type: "t", Queue: "q"}
	if got := envelopeOf(delivered(publishing(&bare, stamps{firstDue: now, attempt: 1})), "q", "t", now); len(got.Headers.Encoded()) > 0 {
		t.Errorf("headers of an envelope without any: %v", maps.Collect(got.Headers.All()))
	}
}

func TestHeaders_S39_stamps_come_back(t *testing.T) {
	t.Parallel()
	now := millisecond()
	for name, s := range map[string]stamps{
		"first":    {firstDue: now, ageFrom: now, attempt: 1},
		"retried":  {firstDue: now.Add(-time.Hour), ageFrom: now.Add(-time.Hour), attempt: 7},
		"requeued": {firstDue: now.Add(-time.Hour), ageFrom: now.Add(-time.Minute), attempt: 1},
		"all": {
			firstDue: now.Add(-2 * time.Hour), ageFrom: now.Add(-time.Second), attempt: math.MaxInt32, crashes: 3,
			interruptions: 2, remaining: 90 * time.Minute,
		},
	} {
		table := amqp091.Table{headerAttempt: int64(9), headerRemaining: int64(9), headerAgeFrom: int64(9), headerCrashes: int64(9)}
		s.put(table)
		got, bad := readStamps(table, now)
		if got != s || bad != (spoiled{}) {
			t.Errorf("%s: got %+v (bad: %+v), want %+v", name, got, bad, s)
		}
	}
}

func TestHeaders_S39_what_cannot_be_true_is_not_believed(t *testing.T) {
	t.Parallel()
	now := millisecond()
	past := now.Add(-time.Minute)
	usual := stamps{firstDue: past, ageFrom: past, attempt: 1}
	for name, tt := range map[string]struct {
		table amqp091.Table
		want  stamps
		bad   spoiled
	}{
		"no headers":          {nil, stamps{firstDue: now, ageFrom: now, attempt: 1}, spoiled{}},
		"attempt of 32 bits":  {amqp091.Table{headerFirstDue: past.UnixMilli(), headerAttempt: int32(3)}, stamps{firstDue: past, ageFrom: past, attempt: 3}, spoiled{}},
		"attempt 0":           {amqp091.Table{headerFirstDue: past.UnixMilli(), headerAttempt: int64(0)}, usual, spoiled{attempt: true}},
		"attempt below 0":     {amqp091.Table{headerFirstDue: past.UnixMilli(), headerAttempt: int64(-1)}, usual, spoiled{attempt: true}},
		"attempt of 2^31":     {amqp091.Table{headerFirstDue: past.UnixMilli(), headerAttempt: int64(1 << 31)}, usual, spoiled{attempt: true}},
		"attempt as text":     {amqp091.Table{headerFirstDue: past.UnixMilli(), headerAttempt: "3"}, usual, spoiled{attempt: true}},
		"attempt null":        {amqp091.Table{headerFirstDue: past.UnixMilli(), headerAttempt: nil}, usual, spoiled{attempt: true}},
		"first due in future": {amqp091.Table{headerFirstDue: now.Add(time.Hour).UnixMilli()}, stamps{firstDue: now, ageFrom: now, attempt: 1}, spoiled{firstDue: true}},
		"first due as text":   {amqp091.Table{headerFirstDue: "yesterday"}, stamps{firstDue: now, ageFrom: now, attempt: 1}, spoiled{firstDue: true}},
		"first due 0":         {amqp091.Table{headerFirstDue: int64(0)}, stamps{firstDue: now, ageFrom: now, attempt: 1}, spoiled{firstDue: true}},
		"counters below 0": {
			amqp091.Table{headerFirstDue: past.UnixMilli(), headerCrashes: int64(-5), headerInterruptions: "x", headerRemaining: int64(-1)},
			usual,
			spoiled{},
		},
		"due when its wait is over": {
			amqp091.Table{headerFirstDue: now.Add(time.Hour).UnixMilli(), headerRemaining: int64(3_600_000)},
			stamps{firstDue: now.Add(time.Hour), ageFrom: now.Add(time.Hour), attempt: 1, remaining: time.Hour},
			spoiled{},
		},
		"due later than its wait is over": {
			amqp091.Table{headerFirstDue: now.Add(2 * time.Hour).UnixMilli(), headerRemaining: int64(3_600_000)},
			stamps{firstDue: now.Add(time.Hour), ageFrom: now.Add(time.Hour), attempt: 1, remaining: time.Hour},
			spoiled{firstDue: true},
		},
		"endless wait": {
			amqp091.Table{headerFirstDue: past.UnixMilli(), headerRemaining: int64(math.MaxInt64)},
			stamps{firstDue: past, ageFrom: past, attempt: 1, remaining: maxRemaining},
			spoiled{},
		},
	} {
		got, bad := readStamps(tt.table, now)
		if got != tt.want || bad != tt.bad {
			t.Errorf("%s: got %+v (bad: %+v), want %+v (%+v)", name, got, bad, tt.want, tt.bad)
		}
	}
}

func TestHeaders_C3_9_what_would_not_arrive_is_refused(t *testing.T) {
	t.Parallel()
	many := make(map[string]string)
	for i := range 12_000 {
		many[string([]byte{'a' + byte(i%26), 'a' + byte(i/26%26), 'a' + byte(i/676%26)})] = ""
	}
	for name, spoil := range map[string]func(*leasebus.Envelope){
		"reserved prefix":           withHeader("x-leasebus-attempt"),
		"reserved prefix, any case": withHeader("X-LeaseBus-Anything"),
		"x-death":                   withHeader("x-death"),
		"x-first-death-queue":       withHeader("x-first-death-queue"),
		"x-last-death-reason":       withHeader("x-last-death-reason"),
		"x-delivery-count":          withHeader("x-delivery-count"),
		"CC":                        withHeader("CC"),
		"BCC":                       withHeader("BCC"),
		"type over a short string":  func(e *leasebus.Envelope) { e.Type = strings.Repeat("t", 256) },
		"queue over a short string": func(e *leasebus.Envelope) { e.Queue = strings.Repeat("q", 256) },
		"more on the wire than in the envelope": func(e *leasebus.Envelope) {
			e.Headers = leasebus.NewHeaders(many)
			if size := len(e.Headers.Encoded()); size > leasebus.MaxHeadersBytes {
				t.Errorf("the envelope's headers are %d bytes, which is refused everywhere", size)
			}
		},
	} {
		e := fullEnvelope()
		spoil(&e)
		if err := checkEnvelope(&e); !errors.Is(err, leasebus.ErrInvalidEnvelope) {
			t.Errorf("%s: got error %v, want one that matches ErrInvalidEnvelope", name, err)
		}
	}
}

func withHeader(name string) func(*leasebus.Envelope) {
	return func(e *leasebus.Envelope) { e.Headers = leasebus.NewHeaders(map[string]string{name: "v"}) }
}

// What another program has published: no header of leasebus, any property, any type of value.
func TestHeaders_message_of_another_program(t *testing.T) {
	t.Parallel()
	now := millisecond()
	d := &amqp091.Delivery{
		MessageId: "order-7", CorrelationId: "flow", Body: []byte("{}"), UserId: "someone", Expiration: "60000", Priority: 3,
		Headers: amqp091.Table{
			"n": int32(7), "yes": true, "when": now, "nested": amqp091.Table{"a": "b"}, "bytes": []byte{1}, "nul": "a\x00b",
			"latin": "\xe4", "CC": []any{"elsewhere"}, "x-death": []any{amqp091.Table{"count": int64(3)}}, "none": nil,
			"huge": strings.Repeat("h", leasebus.MaxHeaderBytes+1), headerPublish: int64(3),
		},
	}
	e := envelopeOf(d, "orders", "shop.v1.OrderPlaced", now)
	if e.Type != "shop.v1.OrderPlaced" {
		t.Errorf("type: got %q, want the queue's own", e.Type)
	}
	if again := envelopeOf(d, "orders", "", now); e.ID != again.ID || e.ID == (leasebus.ID{}) {
		t.Errorf("id: got %v, then %v, want the same for each delivery", e.ID, again.ID)
	}
	if other := idOf("order-8"); other == e.ID {
		t.Error("another message_id gave the same id")
	}
	want := map[string]string{"n": "7", "yes": "true", "when": now.Truncate(time.Second).Format(time.RFC3339), leasebus.HeaderCorrelation: "flow"}
	if got := maps.Collect(e.Headers.All()); !maps.Equal(got, want) {
		t.Errorf("headers: got %v, want %v", got, want)
	}
	if err := e.Validate(100); err != nil {
		t.Errorf("an envelope of it cannot be stored elsewhere: %v", err)
	}
	d.Type = "theirs"
	if e := envelopeOf(d, "orders", "shop.v1.OrderPlaced", now); e.Type != "theirs" {
		t.Errorf("type: got %q, want that of the property", e.Type)
	}

	p := copyOf(d, e.ID, stamps{firstDue: now, attempt: 2}, nil)
	for _, name := range []string{"n", "yes", "when", "nested", "bytes", "nul", "latin", "huge"} {
		if _, there := p.Headers[name]; !there {
			t.Errorf("header %s did not travel on", name)
		}
	}
	for _, name := range []string{"CC", "x-death"} {
		if _, there := p.Headers[name]; there {
			t.Errorf("header %s, RabbitMQ's own, travels on", name)
		}
	}
	if p.UserId != "" || p.Expiration != "" {
		t.Errorf("user_id %q and expiration %q travel on", p.UserId, p.Expiration)
	}
	if p.MessageId != "order-7" || p.CorrelationId != "flow" || p.Priority != 3 || string(p.Body) != "{}" || p.DeliveryMode != amqp091.Persistent {
		t.Errorf("properties: got %+v", p)
	}
	if _, there := d.Headers["CC"]; !there || len(d.Headers) != 12 {
		t.Errorf("the delivery itself was changed: %v", d.Headers)
	}
	d.MessageId = ""
	if p := copyOf(d, e.ID, stamps{firstDue: now, attempt: 2}, nil); p.MessageId != e.ID.String() {
		t.Errorf("message_id of a copy of a message without one: got %q, want the id it was handled under", p.MessageId)
	}
}

func TestHeaders_id_of_nothing_is_new(t *testing.T) {
	t.Parallel()
	if a, b := idOf(""), idOf(""); a == b || a == (leasebus.ID{}) {
		t.Errorf("ids of messages without message_id: %v and %v", a, b)
	}
	if id := idOf("00000000-0000-0000-0000-000000000000"); id == (leasebus.ID{}) {
		t.Error("the zero id was taken for one")
	}
}

func TestFit_C3_8_nothing_is_larger_than_a_frame(t *testing.T) {
	t.Parallel()
	table := amqp091.Table{
		"small": "s", "big": strings.Repeat("b", 1000), "nested": amqp091.Table{"list": []any{"x", int64(1), []byte("yy")}},
		reservedPrefix + "history": strings.Repeat("h", 500), headerFirstDue: int64(1),
	}
	full := tableBytes(table)
	if dropped := fit(table, full, reservedPrefix+"history"); dropped != nil || tableBytes(table) != full {
		t.Errorf("what fits was cut: %v", dropped)
	}
	if dropped := fit(table, full-1, reservedPrefix+"history"); dropped != nil || table["big"] == nil || table[reservedPrefix+"history"] != nil {
		t.Errorf("dropped %v, want only the history to go", dropped)
	}
	if dropped := fit(table, 100); !slices.Equal(dropped, []string{"big"}) || tableBytes(table) > 100 {
		t.Errorf("dropped %v, want the largest header", dropped)
	}
	if dropped := fit(table, 0); !slices.Equal(dropped, []string{"nested", "small"}) || table[headerFirstDue] == nil {
		t.Errorf("dropped %v of %v, want all but what leasebus needs", dropped, table)
	}
}

func FuzzHeaders_S60(f *testing.F) {
	f.Add("name", "value", "key", []byte{1}, int64(3), int64(1700000000000))
	f.Add("", "\x00", "\xff", []byte(nil), int64(-1), int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, name, value, key string, payload []byte, attempt, due int64) {
		now := millisecond()
		d := &amqp091.Delivery{Headers: amqp091.Table{name: value, headerAttempt: attempt, headerFirstDue: due, headerKey: key}, MessageId: key, Body: payload}
		s, _ := readStamps(d.Headers, now)
		if s.attempt < 1 || s.firstDue.After(now.Add(s.remaining)) || s.ageFrom.After(now.Add(s.remaining)) || s.crashes < 0 || s.remaining < 0 {
			t.Fatalf("stamps %+v", s)
		}
		e := envelopeOf(d, "q", "t", s.firstDue)
		if err := (&leasebus.Envelope{
			ID: e.ID, Type: "t", Queue: "q", Headers: e.Headers, IdempotencyKey: e.IdempotencyKey,
		}).Validate(1); err != nil {
			t.Fatalf("headers that no store takes: %v", err)
		}
		again := envelopeOf(delivered(copyOf(d, e.ID, s, nil)), "q", "t", s.firstDue)
		if key != "" && again.ID != e.ID || !slices.Equal(again.Headers.Encoded(), e.Headers.Encoded()) || !slices.Equal(again.Payload, e.Payload) {
			t.Fatalf("a copy reads otherwise:\n%+v\n%+v", e, again)
		}
	})
}
