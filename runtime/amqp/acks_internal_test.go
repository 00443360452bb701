package amqp

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// fakeChannel knows what RabbitMQ would: which tags are open. What would close the channel is an error here.
type fakeChannel struct {
	open  []uint64
	calls []string
	fails error
}

func (c *fakeChannel) Ack(tag uint64, multiple bool) error {
	c.calls = append(c.calls, call("ack", tag, multiple))
	return c.settle(tag, multiple)
}

func (c *fakeChannel) Nack(tag uint64, multiple, requeue bool) error {
	if multiple || !requeue {
		return fmt.Errorf("nack %d, multiple %v, requeue %v: deliveries go back one by one, to their queue", tag, multiple, requeue)
	}
	c.calls = append(c.calls, call("nack", tag, false))
	return c.settle(tag, false)
}

func call(what string, tag uint64, multiple bool) string {
	if multiple {
		return fmt.Sprintf("%s ..%d", what, tag)
	}
	return fmt.Sprintf("%s %d", what, tag)
}

func (c *fakeChannel) settle(tag uint64, multiple bool) error {
	if c.fails != nil {
		return c.fails
	}
	if !slices.Contains(c.open, tag) {
		return fmt.Errorf("PRECONDITION_FAILED - unknown delivery tag %d", tag)
	}
	c.open = slices.DeleteFunc(c.open, func(t uint64) bool { return t == tag || multiple && t < tag })
	return nil
}

// opened is a ledger with n open deliveries.
func opened(n int) (*fakeChannel, *ledger, []*entry) {
	channel := &fakeChannel{}
	l := &ledger{channel: channel}
	entries := make([]*entry, n)
	for i := range entries {
		tag := uint64(i + 1)
		channel.open = append(channel.open, tag)
		entries[i] = &entry{tag: tag}
		l.delivered(entries[i])
	}
	return channel, l, entries
}

func TestLedger_S42_acknowledgements_are_merged_below_the_first_open_delivery(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		steps [][]int // of tags, negative = handed back
		want  []string
	}{
		{"all in order", [][]int{{1, 2, 3, 4, 5}}, []string{"ack ..5"}},
		{"in any order", [][]int{{3, 1, 2}}, []string{"ack ..3"}},
		{"one alone", [][]int{{1}}, []string{"ack 1"}},
		{"one open in between", [][]int{{1, 2, 4, 5}}, []string{"ack ..2", "ack 4", "ack 5"}},
		{"the open one follows", [][]int{{1, 2, 4, 5}, {3}}, []string{"ack ..2", "ack 4", "ack 5", "ack 3"}},
		{"the first is open: nothing waits for it", [][]int{{2, 3}, {4}, {1, 5}}, []string{"ack 2", "ack 3", "ack 4", "ack ..5"}},
		{"never at a tag that is acknowledged", [][]int{{5}, {1, 2, 3, 4}}, []string{"ack 5", "ack ..4"}},
		{"over what was handed back", [][]int{{-2}, {1, 3}}, []string{"nack 2", "ack ..3"}},
		{"twice is once", [][]int{{1, 2}, {1, 2, 3}, {-2}}, []string{"ack ..2", "ack 3"}},
		{"twice in one batch", [][]int{{1, 1, 2}}, []string{"ack ..2"}},
		{"nothing", [][]int{{}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			channel, l, entries := opened(5)
			for _, step := range c.steps {
				if err := l.apply(entries, step); err != nil {
					t.Fatalf("step %v: %v", step, err)
				}
			}
			if !slices.Equal(channel.calls, c.want) {
				t.Errorf("sent %q, want %q", channel.calls, c.want)
			}
		})
	}
}

// apply acknowledges tags, and hands back negative ones.
func (l *ledger) apply(entries []*entry, tags []int) error {
	var acked []*entry
	for _, tag := range tags {
		if tag > 0 {
			acked = append(acked, entries[tag-1])
			continue
		}
		if err := l.requeue(entries[-tag-1]); err != nil {
			return err
		}
	}
	if len(acked) == 0 {
		return nil
	}
	return l.ack(acked)
}

func TestLedger_S42_closed_with_its_channel_it_sends_nothing(t *testing.T) {
	t.Parallel()
	channel, l, entries := opened(3)
	l.close()
	late := &entry{tag: 4}
	l.delivered(late)
	if err := l.ack(append(slices.Clone(entries), late)); err == nil {
		t.Error("ack after close: got no error, although all will be delivered again")
	}
	if err := l.requeue(entries[0]); err != nil {
		t.Errorf("requeue after close: %v", err)
	}
	if len(channel.calls) > 0 {
		t.Errorf("sent %q on a channel that has ended", channel.calls)
	}
}

func TestLedger_S42_error_of_the_channel_is_told(t *testing.T) {
	t.Parallel()
	channel, l, entries := opened(3)
	channel.fails = fmt.Errorf("channel is closed")
	if err := l.ack(slices.Clone(entries[:2])); err == nil {
		t.Error("acknowledgements that could not be sent: got no error")
	}
	if err := l.requeue(entries[2]); err == nil {
		t.Error("nack that could not be sent: got no error")
	}
}

// Whatever the order of deliveries and settlements: RabbitMQ sees every tag settled at most once, and nothing
// acknowledged that is open here.
func TestLedger_S42_any_order(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		channel := &fakeChannel{}
		l := &ledger{channel: channel}
		var entries []*entry
		open := make(map[uint64]bool)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"deliver", "ack", "requeue"}).Draw(t, "step") {
			case "deliver":
				e := &entry{tag: uint64(len(entries) + 1)}
				entries = append(entries, e)
				channel.open = append(channel.open, e.tag)
				l.delivered(e)
				open[e.tag] = true
			case "ack":
				if len(entries) == 0 {
					continue
				}
				batch := rapid.SliceOfN(rapid.SampledFrom(entries), 1, 12).Draw(t, "batch")
				if err := l.ack(slices.Clone(batch)); err != nil {
					t.Fatal(err)
				}
				for _, e := range batch {
					delete(open, e.tag)
				}
			case "requeue":
				if len(entries) == 0 {
					continue
				}
				e := rapid.SampledFrom(entries).Draw(t, "entry")
				if err := l.requeue(e); err != nil {
					t.Fatal(err)
				}
				delete(open, e.tag)
			}
			if len(channel.open) != len(open) {
				t.Fatalf("open at RabbitMQ: %v, here: %v", channel.open, open)
			}
			for _, tag := range channel.open {
				if !open[tag] {
					t.Fatalf("open at RabbitMQ: %v, here: %v", channel.open, open)
				}
			}
		}
	})
}
