package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var publishCases = []testCase{
	{name: "S60_C3_5_envelope_comes_back_byte_for_byte", run: envelopeComesBack},
	{name: "S60_empty_payload_and_no_headers_come_back_empty", run: emptyEnvelopeComesBack},
	{name: "S60_buffers_of_the_publisher_may_be_reused", run: publishedBytesAreKept},
	{name: "S60_C3_6_large_payload_comes_back", run: largePayloadComesBack},
	{name: "S1_order_of_arrival_is_kept", run: orderOfArrivalIsKept},
	{name: "S1_queues_of_one_batch_are_kept_apart", run: queuesAreKeptApart},
	{name: "S1_publish_of_nothing_is_no_error", run: publishOfNothing},
	{name: "S1_C5_12_done_context_stores_nothing", run: doneContextStoresNothing},
	{name: "S15_C3_5_C3_9_C3_10_unstorable_envelope_is_refused", run: unstorableEnvelopeIsRefused},
	{name: "S15_receipts_tell_what_of_a_batch_was_taken", run: receiptsTellWhatWasTaken},
	{name: "S4_delayed_message_is_not_leased_before_its_time", needs: scheduledPublish, brief: true, run: delayedMessageWaits},
	{name: "S4_message_for_an_instant_is_not_leased_before_it", needs: scheduledPublish, brief: true, run: messageForAnInstantWaits},
	{name: "S4_C10_6_past_and_negative_times_mean_now", needs: scheduledPublish, run: pastTimesMeanNow},
	{name: "S4_first_due_is_kept_over_attempts", run: firstDueIsKept},
	{name: "S4_age_counts_from_first_due", run: ageCountsFromFirstDue},
	{name: "S30_message_published_twice_is_two_with_one_id", run: twinsAreTwo},
}

// everyByte holds all 256 values, NUL first.
func everyByte() []byte {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	return all
}

func envelopeComesBack(t *trial) {
	headers := map[string]string{
		"plain": "value", "spaces and : colons": " kept ", "unicode-ключ": "значение 漢字 🚌", "newline": "a\r\nb\tc",
		"quotes": `"'\`, "empty": "", leasebus.HeaderCorrelation: "c-1", leasebus.HeaderTraceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"long": strings.Repeat("x", leasebus.MaxHeaderBytes),
	}
	out := t.outgoing("")
	out.Payload, out.Headers = everyByte(), leasebus.NewHeaders(headers)
	out.IdempotencyKey, out.OrderingKey = "key "+strings.Repeat("ф", 100), strings.Repeat("o", leasebus.MaxNameBytes)
	before := time.Now()
	t.send(out)

	l := t.subscribe().takeOne()
	want(t, "id", l.ID, out.ID)
	want(t, "type", l.Type, out.Type)
	want(t, "queue", l.Queue, t.queue)
	wantAll(t, "payload", l.Payload, everyByte())
	want(t, "idempotency key", l.IdempotencyKey, out.IdempotencyKey)
	want(t, "ordering key", l.OrderingKey, out.OrderingKey)
	want(t, "attempt", l.Attempt, 1)
	want(t, "interruptions", l.Interruptions, 0)
	want(t, "crashed", l.Crashed, false)
	got := maps.Collect(l.Headers.All())
	for name, value := range headers {
		if seen, ok := got[name]; !ok || seen != value {
			t.Errorf("header %q: got %.100q (there: %v), want %.100q", name, seen, ok, value)
		}
	}
	want(t, "number of headers", len(got), len(headers))
	if t.can(fencingToken) && l.Generation < 1 {
		t.Errorf("generation: got %d, want 1 or more", l.Generation)
	}
	if age := time.Since(before); l.Age < 0 || l.Age > age+clockSlack {
		t.Errorf("age: got %v, want 0 to %v", l.Age, age)
	}
}

// clockSlack is by how much two clocks of one machine may differ: a store's times have microseconds, a broker's
// milliseconds.
const clockSlack = 10 * time.Millisecond

func emptyEnvelopeComesBack(t *trial) {
	out := t.outgoing("")
	out.Payload = nil
	t.send(out)
	l := t.subscribe().takeOne()
	want(t, "payload bytes", len(l.Payload), 0)
	want(t, "header bytes", len(l.Headers.Encoded()), 0)
	want(t, "idempotency key", l.IdempotencyKey, "")
	want(t, "ordering key", l.OrderingKey, "")
}

func publishedBytesAreKept(t *trial) {
	out := t.outgoing("before")
	payload := slices.Clone(out.Payload)
	t.send(out)
	for i := range out.Payload {
		out.Payload[i] = 0xEE
	}
	wantAll(t, "payload after the publisher's buffer was overwritten", t.subscribe().takeOne().Payload, payload)
}

func largePayloadComesBack(t *trial) {
	out := t.outgoing("")
	out.Payload = slices.Repeat(everyByte(), 1<<20/256)
	t.send(out)
	l := t.subscribe().takeOne()
	if !slices.Equal(l.Payload, out.Payload) {
		t.Errorf("a payload of 1 MiB came back with %d bytes, or others", len(l.Payload))
	}
}

func orderOfArrivalIsKept(t *trial) {
	ids := t.publish("1", "2", "3", "4", "5")
	ids = append(ids, t.publishMany(20)...)
	ids = append(ids, t.publish("6", "7", "8", "9", "10")...)
	k := t.subscribe()
	var got []leasebus.ID
	for len(got) < len(ids) {
		part := k.take(min(7, len(ids)-len(got)))
		got = append(got, idsOf(part)...)
	}
	wantAll(t, "order of one publisher's messages at one consumer", got, ids)
}

func queuesAreKeptApart(t *trial) {
	names := []string{t.queue, t.newQueue(), t.newQueue()}
	var out []leasebus.Outgoing
	ids := make(map[string][]leasebus.ID)
	for i := range 12 {
		each := t.outgoing(fmt.Sprint(i))
		each.Queue = names[i%len(names)]
		out = append(out, each)
		ids[each.Queue] = append(ids[each.Queue], each.ID)
	}
	t.send(out...)
	for _, name := range names {
		t.queue, t.policy = name, t.policyFor(name)
		k := t.subscribe()
		leases := k.take(4)
		wantAll(t, "messages of "+name, idsOf(leases), ids[name])
		for _, l := range leases {
			want(t, "queue of "+l.ID.String(), l.Queue, name)
		}
		k.nothing("a queue gave what another one holds")
	}
}

func publishOfNothing(t *trial) {
	t.must(t.store.Publish(t.ctx, nil, nil), "publish no envelope")
	t.must(t.store.Publish(t.ctx, []leasebus.Outgoing{}, []leasebus.Receipt{}), "publish an empty batch")
	t.subscribe().nothing("nothing was published")
}

func (t *trial) doneContext() context.Context {
	ctx, cancel := context.WithCancel(t.ctx)
	cancel()
	return ctx
}

func doneContextStoresNothing(t *trial) {
	receipts := make([]leasebus.Receipt, 1)
	err := t.store.Publish(t.doneContext(), []leasebus.Outgoing{t.outgoing("never")}, receipts)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("publish with a cancelled context: got error %v, want one that matches context.Canceled", err)
	}
	if receipts[0].Err == nil {
		t.Error("publish with a cancelled context: the receipt has no error")
	}
	sentinel := t.publish("after")[0]
	k := t.subscribe()
	want(t, "first message", k.takeOne().ID, sentinel)
	k.nothing("it was published with a context that was done")
}

func unstorableEnvelopes(t *trial) map[string]leasebus.Outgoing {
	bad := make(map[string]leasebus.Outgoing)
	add := func(what string, spoil func(*leasebus.Outgoing)) {
		out := t.outgoing(what)
		spoil(&out)
		bad[what] = out
	}
	header := func(name, value string) func(*leasebus.Outgoing) {
		return func(o *leasebus.Outgoing) { o.Headers = leasebus.NewHeaders(map[string]string{name: value}) }
	}
	add("payload over the limit", func(o *leasebus.Outgoing) { o.Payload = make([]byte, leasebus.DefaultMaxPayload+1) })
	add("idempotency key over the limit", func(o *leasebus.Outgoing) { o.IdempotencyKey = strings.Repeat("k", leasebus.MaxNameBytes+1) })
	add("NUL in the idempotency key", func(o *leasebus.Outgoing) { o.IdempotencyKey = "a\x00b" })
	add("idempotency key that is no UTF-8", func(o *leasebus.Outgoing) { o.IdempotencyKey = "a\xffb" })
	add("ordering key over the limit", func(o *leasebus.Outgoing) { o.OrderingKey = strings.Repeat("k", leasebus.MaxNameBytes+1) })
	add("NUL in the ordering key", func(o *leasebus.Outgoing) { o.OrderingKey = "\x00" })
	add("NUL in a header's value", header("name", "a\x00b"))
	add("NUL in a header's name", header("na\x00me", "value"))
	add("header that is no UTF-8", header("name", "\xc3\x28"))
	add("header without a name", header("", "value"))
	add("header name over the limit", header(strings.Repeat("n", leasebus.MaxNameBytes+1), "value"))
	add("header over the limit", header("name", strings.Repeat("v", leasebus.MaxHeaderBytes+1)))
	add("headers over the limit together", func(o *leasebus.Outgoing) {
		many := make(map[string]string)
		for i := range leasebus.MaxHeadersBytes/leasebus.MaxHeaderBytes + 1 {
			many[fmt.Sprint("h", i)] = strings.Repeat("v", leasebus.MaxHeaderBytes)
		}
		o.Headers = leasebus.NewHeaders(many)
	})
	return bad
}

func unstorableEnvelopeIsRefused(t *trial) {
	for what, out := range unstorableEnvelopes(t) {
		receipts := make([]leasebus.Receipt, 1)
		err := t.store.Publish(t.ctx, []leasebus.Outgoing{out}, receipts)
		if !errors.Is(err, leasebus.ErrInvalidEnvelope) {
			t.Errorf("%s: got error %v, want one that matches ErrInvalidEnvelope", what, err)
		}
		if !errors.Is(receipts[0].Err, leasebus.ErrInvalidEnvelope) {
			t.Errorf("%s: the receipt's error is %v, want one that matches ErrInvalidEnvelope", what, receipts[0].Err)
		}
	}
	sentinel := t.publish("good")[0]
	k := t.subscribe()
	want(t, "first message", k.takeOne().ID, sentinel)
	k.nothing("it was refused")
}

func receiptsTellWhatWasTaken(t *trial) {
	out := []leasebus.Outgoing{t.outgoing("first"), t.outgoing("bad"), t.outgoing("last")}
	out[1].OrderingKey = "a\x00b"
	receipts := make([]leasebus.Receipt, len(out))
	t.prepare(t.policy)
	if err := t.store.Publish(t.ctx, out, receipts); !errors.Is(err, leasebus.ErrInvalidEnvelope) {
		t.Errorf("publish of a batch with a bad one: got error %v, want one that matches ErrInvalidEnvelope", err)
	}
	if !errors.Is(receipts[1].Err, leasebus.ErrInvalidEnvelope) {
		t.Errorf("receipt of the bad one: got error %v, want one that matches ErrInvalidEnvelope", receipts[1].Err)
	}
	var taken []leasebus.ID
	for i := range receipts {
		if receipts[i].Err == nil {
			taken = append(taken, out[i].ID)
		}
	}
	taken = append(taken, t.publish("sentinel")...)
	k := t.subscribe()
	wantAll(t, "messages whose receipt has no error", idsOf(k.take(len(taken))), taken)
	k.nothing("its receipt has an error")
}

func delayedMessageWaits(t *trial) {
	delay := t.lease / 2
	later := t.outgoing("later")
	later.Delay = delay
	sent := time.Now()
	t.send(later)
	answered := time.Now()
	now := t.publish("now")[0]

	k := t.subscribe()
	want(t, "first message", k.takeOne().ID, now)
	l := k.takeOne()
	t.notBefore("the delayed message was leased", sent, delay)
	want(t, "second message", l.ID, later.ID)
	if early, late := sent.Add(delay-clockSlack), answered.Add(delay+clockSlack); l.FirstDue.Before(early) || l.FirstDue.After(late) {
		t.Errorf("first due: got %v, want %v to %v", l.FirstDue, early, late)
	}
	if l.Age < 0 || l.Age > time.Since(sent)-delay+clockSlack {
		t.Errorf("age: got %v, want it to count from when the message was due", l.Age)
	}
}

func messageForAnInstantWaits(t *trial) {
	// On the store's clock, which is read off the time it gives to a message.
	k := t.subscribe()
	t.publish("what time is it")
	clock := k.takeOne()
	k.settled(leasebus.Settlement{Lease: clock, Kind: leasebus.SettleComplete})
	at := clock.FirstDue.Add(2 * t.lease)
	later := t.outgoing("later")
	later.At, later.Delay = at, 100*t.lease // At wins
	sent := time.Now()
	t.send(later)
	l := k.takeOne()
	want(t, "message", l.ID, later.ID)
	if diff := l.FirstDue.Sub(at).Abs(); diff > clockSlack {
		t.Errorf("first due: got %v, want %v", l.FirstDue, at)
	}
	if passed := time.Since(sent); passed > 50*t.lease {
		t.Errorf("leased after %v: Delay won over At", passed)
	}
	if l.Age < -clockSlack {
		t.Errorf("leased %v before its time", -l.Age)
	}
}

func pastTimesMeanNow(t *trial) {
	before := time.Now()
	past, farPast, negative := t.outgoing("past"), t.outgoing("far past"), t.outgoing("negative")
	past.At = time.Now().Add(-100 * time.Hour)
	farPast.At = time.Date(1, 2, 3, 0, 0, 0, 0, time.UTC)
	negative.Delay = math.MinInt64
	t.send(past, farPast, negative)
	for _, l := range t.subscribe().take(3) {
		if passed := time.Since(before); l.Age < -clockSlack || l.Age > passed+clockSlack {
			t.Errorf("age of a message for the past: got %v, want 0 to %v: it becomes due when it is stored", l.Age, passed)
		}
	}
}

func firstDueIsKept(t *trial) {
	t.publish("kept")
	k := t.subscribe()
	first := k.takeOne()
	due := first.FirstDue
	if due.IsZero() {
		t.Error("first due is not set")
	}
	k.settled(retry(first, 0, "again"))
	second := k.takeOne()
	want(t, "first due at the second attempt", second.FirstDue.UTC(), due.UTC())
	k.settled(leasebus.Settlement{Lease: second, Kind: leasebus.SettleDefer})
	want(t, "first due after a deferral", k.takeOne().FirstDue.UTC(), due.UTC())
}

func ageCountsFromFirstDue(t *trial) {
	t.publish("ages")
	k := t.subscribe()
	taken := time.Now()
	l := k.takeOne()
	k.settled(retry(l, t.lease/2, "wait"))
	again := k.takeOne()
	if passed := time.Since(taken); again.Age < t.lease/2-clockSlack || again.Age > passed+t.lease {
		t.Errorf("age at the second attempt: got %v, want about %v: it counts from when the message was first due", again.Age, passed)
	}
}

func twinsAreTwo(t *trial) {
	out := t.outgoing("twin")
	t.send(out)
	t.send(out)
	k := t.subscribe()
	leases := k.take(2)
	wantAll(t, "ids", idsOf(leases), []leasebus.ID{out.ID, out.ID})
	k.complete(leases[0])
	// In one batch, so that a store that tells rows apart by their id collides.
	k.settled(retry(leases[1], 0, "again"))
	left := k.takeOne()
	want(t, "attempt of the twin that is left", left.Attempt, 2)
	k.nothing("one of two twins was completed")

	t.send(out)
	both := []*leasebus.Lease{left, k.takeOne()}
	k.settled(retry(both[0], 0, "one"), retry(both[1], 0, "two"))
	attempts := 0
	for _, l := range k.take(2) {
		attempts += l.Attempt
	}
	want(t, "attempts of both after they were retried together", attempts, 3+2)
}
