package amqp

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"pgregory.net/rapid"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
)

func letterAt(ms int64, id byte) leasebus.DeadLetter {
	d := leasebus.DeadLetter{Envelope: leasebus.Envelope{ID: leasebus.ID{15: id}, Payload: []byte{id}}}
	if ms > 0 {
		d.DeadLetteredAt = time.UnixMilli(ms).UTC()
	}
	d.Cursor = positionOf(&d).cursor()
	return d
}

func TestPosition_S32_cursor_comes_back(t *testing.T) {
	t.Parallel()
	for _, p := range []position{{0, leasebus.ID{}}, {1, leasebus.ID{1}}, {math.MaxInt64, leasebus.NewID()}} {
		got, err := parsePosition(p.cursor())
		if err != nil || got != p {
			t.Errorf("%v came back as %v, %v", p, got, err)
		}
	}
	start, err := parsePosition("")
	if err != nil || start.compare(position{}) >= 0 {
		t.Errorf("the start %v is not before all: %v", start, err)
	}
	if (position{5, leasebus.ID{1}}).compare(position{5, leasebus.ID{2}}) >= 0 || (position{5, leasebus.ID{9}}).compare(position{6, leasebus.ID{1}}) >= 0 {
		t.Error("positions are not ordered by time, then id")
	}
}

// Whatever the order in which a queue holds them, pages are in order, complete, and of no more than what was asked for.
func TestPage_S32_any_order(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.IntRange(0, 60).Draw(t, "letters")
		limit := rapid.IntRange(1, 20).Draw(t, "limit")
		letters := make([]leasebus.DeadLetter, count)
		for i := range letters {
			letters[i] = letterAt(int64(rapid.IntRange(0, 20).Draw(t, "time")), byte(i+1))
		}
		var ahead readAhead
		var got []leasebus.ID
		after := leasebus.Cursor("")
		readings := 0
		for {
			part, ok := ahead.next("q", leasebus.Filter{}, after, limit)
			if !ok {
				readings++
				p, err := pageOf(leasebus.Filter{}, after, limit)
				if err != nil {
					t.Fatal(err)
				}
				for i := range letters {
					p.add(&letters[i])
				}
				part = ahead.keep("q", leasebus.Filter{}, p)
			}
			if len(part) > limit {
				t.Fatalf("%d letters on a page of %d", len(part), limit)
			}
			for _, d := range part {
				got = append(got, d.ID)
			}
			if len(part) < limit {
				break
			}
			after = part[len(part)-1].Cursor
		}
		slices.SortFunc(letters, func(a, b leasebus.DeadLetter) int { return positionOf(&a).compare(positionOf(&b)) })
		var want []leasebus.ID
		for _, d := range letters {
			want = append(want, d.ID)
		}
		if !slices.Equal(got, want) {
			t.Fatalf("listed %v, want %v", got, want)
		}
		if readings > 2 {
			t.Fatalf("read the queue %d times", readings)
		}
	})
}

func TestPage_S34_cut_off_and_bounds(t *testing.T) {
	t.Parallel()
	cutOff := letterAt(50, 1)
	p, err := pageOf(leasebus.Filter{UpTo: cutOff.Cursor}, "", 2)
	if err != nil {
		t.Fatal(err)
	}
	big := strings.Repeat("x", aheadBytes/4)
	for ms := int64(100); ms > 0; ms-- {
		d := letterAt(ms, 1)
		d.Payload = []byte(big)
		p.add(&d)
	}
	if len(p.letters) < 2 || len(p.letters) > 6 || !p.cut {
		t.Errorf("%d letters are kept (cut: %v), want few: they are large", len(p.letters), p.cut)
	}
	if first := p.letters[0].DeadLetteredAt.UnixMilli(); first != 1 {
		t.Errorf("the first one is of %d, want 1", first)
	}
	if _, err := pageOf(leasebus.Filter{UpTo: "x"}, "", 1); err == nil {
		t.Error("a bad cut-off was taken")
	}
}

// What was read ahead serves the page that follows, for a moment, and nothing that was acted on.
func TestReadAhead_S32(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ahead readAhead
		fill := func() leasebus.Cursor {
			p, err := pageOf(leasebus.Filter{}, "", 2)
			if err != nil {
				t.Fatal(err)
			}
			for i := range 6 {
				d := letterAt(int64(i+1), byte(i+1))
				p.add(&d)
			}
			page := ahead.keep("q", leasebus.Filter{}, p)
			return page[1].Cursor
		}
		after := fill()
		for what, ask := range map[string]func() bool{
			"another queue":  func() bool { _, ok := ahead.next("other", leasebus.Filter{}, after, 2); return ok },
			"another filter": func() bool { _, ok := ahead.next("q", leasebus.Filter{Type: "t"}, after, 2); return ok },
			"another place":  func() bool { _, ok := ahead.next("q", leasebus.Filter{}, letterAt(1, 1).Cursor, 2); return ok },
			"the start":      func() bool { _, ok := ahead.next("q", leasebus.Filter{}, "", 2); return ok },
		} {
			if ask() {
				t.Errorf("%s was answered from what was read ahead", what)
			}
		}
		ahead.forget(map[leasebus.ID][]int{letterAt(1, 3).ID: {0}})
		part, ok := ahead.next("q", leasebus.Filter{}, after, 2)
		if !ok || len(part) != 2 || part[0].ID != letterAt(1, 4).ID {
			t.Errorf("next page: %v, %v", part, ok)
		}
		after = fill()
		time.Sleep(aheadLife + time.Second)
		if _, ok := ahead.next("q", leasebus.Filter{}, after, 2); ok {
			t.Error("what was read long ago was served")
		}
	})
}

// An operator that dies amid its reading leaves everything where it was.
func TestScan_S32_reader_that_dies_loses_nothing(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dialIn(t, rabbit.URL())
	const messages = 250
	for _, kind := range []string{"classic", "quorum"} {
		queue := rabbit.Queue(t, kind)
		rabbit.Do(t, func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclare(queue, true, false, false, false, amqp091.Table{"x-queue-type": kind})
			return err
		})
		for i, err := range b.publisher.publishAll(t, "", queue, messages) {
			if err != nil {
				t.Fatalf("message %d: %v", i, err)
			}
		}
		read := 0
		err := b.scan(t.Context(), queue, func(s *scan, _ *amqp091.Delivery) bool {
			if read++; read == 150 {
				s.channel.epoch.raw.cut()
			}
			return true
		}, nil)
		if err == nil {
			t.Errorf("%s: the reading ended without an error after %d of %d", kind, read, messages)
		}
		seen := make(map[string]bool)
		deadline := time.Now().Add(30 * time.Second)
		for len(seen) < messages && time.Now().Before(deadline) {
			clear(seen)
			if err := b.scan(t.Context(), queue, func(_ *scan, d *amqp091.Delivery) bool {
				seen[d.MessageId] = true
				return true
			}, nil); err != nil {
				t.Logf("%s: %v", kind, err)
			}
		}
		if len(seen) != messages {
			t.Errorf("%s: %d of %d messages are there", kind, len(seen), messages)
		}
	}
}

// A reading gives everything back in its place, and takes out only what is acknowledged.
func TestScan_S32_order_stays(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	b := dialIn(t, rabbit.URL())
	for _, kind := range []string{"classic", "quorum"} {
		queue := rabbit.Queue(t, kind)
		rabbit.Do(t, func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclare(queue, true, false, false, false, amqp091.Table{"x-queue-type": kind})
			return err
		})
		const messages = 230
		b.publisher.publishAll(t, "", queue, messages)
		var first []string
		for round := range 3 {
			var ids []string
			var acked *amqp091.Delivery
			var reading *scan
			err := b.scan(t.Context(), queue, func(s *scan, d *amqp091.Delivery) bool {
				if len(ids) == 0 && round > 0 {
					acked, reading = d, s
				}
				ids = append(ids, d.MessageId)
				return len(ids) < 210 || round != 1
			}, func() error {
				if acked == nil {
					return nil
				}
				defer func() { acked = nil }()
				return reading.ack(acked)
			})
			if err != nil {
				t.Fatalf("%s, round %d: %v", kind, round, err)
			}
			if round == 0 {
				first = ids
			}
			if want := first[max(round-1, 0):]; !slices.Equal(ids, want[:len(ids)]) {
				var places []int
				for _, id := range ids {
					places = append(places, slices.Index(first, id))
				}
				t.Fatalf("%s, round %d: the order has changed: %v", kind, round, places)
			}
		}
		if n := rabbit.Ready(t, queue); n != messages-2 {
			t.Errorf("%s: %d messages are left, want %d", kind, n, messages-2)
		}
		if missing := fmt.Sprint(queue, ".missing"); b.scan(t.Context(), missing, nil, nil) != nil {
			t.Errorf("a queue that does not exist is an error")
		}
	}
}
