package postgres

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	leasebus "github.com/leasebus/leasebus/runtime"
)

func pastGenerator() *rapid.Generator[*past] {
	return rapid.Custom(func(t *rapid.T) *past {
		text := rapid.StringN(0, 40, 200)
		at := rapid.Custom(func(t *rapid.T) instant { return instant(rapid.Int64Range(1, 1<<60).Draw(t, "at")) })
		p := &past{
			failed:         rapid.Bool().Draw(t, "failed"),
			recorded:       rapid.IntRange(0, 1<<31-1).Draw(t, "recorded"),
			interruptions:  rapid.IntRange(0, 1<<31-1).Draw(t, "interruptions"),
			deferrals:      rapid.IntRange(0, 1<<31-1).Draw(t, "deferrals"),
			idempotencyKey: text.Draw(t, "idempotency key"),
			orderingKey:    text.Draw(t, "ordering key"),
		}
		for range rapid.IntRange(0, leasebus.HistoryLimit).Draw(t, "requeues") {
			p.requeues = append(p.requeues, requeue{text.Draw(t, "by"), at.Draw(t, "at")})
		}
		for range rapid.IntRange(0, leasebus.HistoryLimit).Draw(t, "failures") {
			p.failures = append(p.failures, failure{
				attempt: rapid.IntRange(0, 1<<31-1).Draw(t, "attempt"), text: text.Draw(t, "text"),
				errorType: text.Draw(t, "type"), owner: text.Draw(t, "owner"), at: at.Draw(t, "at"),
			})
		}
		if rapid.Bool().Draw(t, "first failed") {
			p.firstFailed = at.Draw(t, "first failed at")
		}
		return p
	})
}

func diffPast(want, got *past) string {
	return cmp.Diff(want, got, cmp.AllowUnexported(past{}, requeue{}, failure{}))
}

func TestState_ComesBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := pastGenerator().Draw(t, "past")
		got, err := decodePast(p.encode(false))
		if err != nil {
			t.Fatal(err)
		}
		if p.zero() {
			p = nil
		}
		if diff := diffPast(p, got); diff != "" {
			t.Fatalf("(-want +got)\n%s", diff)
		}
	})
}

// The database appends the time of the failure that a statement records.
func TestState_TimeOfANewFailureIsAppended(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := pastGenerator().Draw(t, "past")
		at := instant(rapid.Int64Range(1, 1<<60).Draw(t, "at"))
		before := p.failedFirst()
		p.fail(&leasebus.Failure{Attempt: 3, Text: "no stock", ErrorType: "*errors.errorString"}, "host:1#2")
		got, err := decodePast(binary.BigEndian.AppendUint64(p.encode(true), uint64(at)))
		if err != nil {
			t.Fatal(err)
		}
		if last := got.failures[len(got.failures)-1]; last.at != at || last.text != "no stock" {
			t.Fatalf("the last failure is %+v, want it at %d", last, at)
		}
		if before == 0 {
			before = at
		}
		if len(got.failures) > leasebus.HistoryLimit || got.failedFirst() != before {
			t.Fatalf("%d failures, first failed at %d; want at most %d, at %d", len(got.failures), got.failedFirst(), leasebus.HistoryLimit, before)
		}
	})
}

func TestState_NothingIsNull(t *testing.T) {
	t.Parallel()
	if b := (&past{}).encode(false); b != nil {
		t.Errorf("an empty past is %x, want null", b)
	}
	if p, err := decodePast(nil); p != nil || err != nil {
		t.Errorf("null is %+v, %v; want nothing", p, err)
	}
}

// What an older version wrote has to be read for ever.
func TestState_PinnedEncoding(t *testing.T) {
	t.Parallel()
	p := &past{
		failed: true, recorded: 2, interruptions: 1, deferrals: 300, idempotencyKey: "k", orderingKey: "o",
		requeues: []requeue{{"ann", 5}}, firstFailed: 6, failures: []failure{{2, "x", "t", "w", 7}},
	}
	want := "\x01\x03\x02\x01\xac\x02\x01k\x01o\x01\x03ann\x00\x00\x00\x00\x00\x00\x00\x05" +
		"\x00\x00\x00\x00\x00\x00\x00\x06\x01\x02\x01x\x01t\x01w\x00\x00\x00\x00\x00\x00\x00\x07"
	if got := string(p.encode(false)); got != want {
		t.Errorf("encoded\n got %q\nwant %q", got, want)
	}
}

func FuzzState(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{pastVersion, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add((&past{failed: true, recorded: 1, failures: []failure{{1, "x", "y", "z", 9}}, requeues: []requeue{{"a", 1}}}).encode(false))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decodePast(b)
		if err != nil || p == nil {
			return
		}
		again, err := decodePast(p.encode(false))
		if err != nil {
			t.Fatal(err)
		}
		if p.zero() {
			p = nil
		}
		if diff := diffPast(p, again); diff != "" {
			t.Fatalf("(-first +second)\n%s", diff)
		}
	})
}

func TestInstant_IsAsTheServerCounts(t *testing.T) {
	t.Parallel()
	for _, at := range []time.Time{
		epoch, time.Date(1999, 12, 31, 23, 59, 59, 999_999_000, time.UTC), time.Date(2026, 11, 29, 1, 2, 3, 4000, time.UTC),
		time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(9999, 1, 1, 0, 0, 0, 1000, time.UTC),
	} {
		if got := instantOf(at).time(); !got.Equal(at) {
			t.Errorf("%v came back as %v", at, got)
		}
	}
	if got := instant(1 << 62).since(-1 << 62); got <= 0 {
		t.Errorf("a span past the longest duration is %v", got)
	}
}

func TestBytea_TextForms(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`\x`: "", `\x00ff5c`: "\x00\xff\\", `abc`: "abc", `a\\b\000\377`: "a\\b\x00\xff", ``: "",
	} {
		if got, err := byteaOf([]byte(text)); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v; want %q", text, got, err, want)
		}
	}
	for _, text := range []string{`\xzz`, `\x0`, `a\`, `\9zz`, `\400`} {
		if got, err := byteaOf([]byte(text)); err == nil {
			t.Errorf("%s is %q, want an error", text, got)
		}
	}
}

func TestHint_ComesBackAndRefusesWhatIsNone(t *testing.T) {
	t.Parallel()
	for _, a := range []arrival{{queue: 7, pos: 1 << 60}, {queue: 1 << 30, due: maxDue}, {}} {
		got, instance, ok := parseHint(a.hint(0xfeed))
		if !ok || got != a || instance != 0xfeed {
			t.Errorf("%+v came back as %+v from %x, %t", a, got, instance, ok)
		}
	}
	for _, payload := range []string{"", "proof:1", "1:2:3", "1:-2:3:4", "1:2:-3:4", "99999999999:1:0:0", "1:2:999999999999999999:0", "a:b:c:d"} {
		if got, _, ok := parseHint(payload); ok {
			t.Errorf("%q was read as %+v", payload, got)
		}
	}
}

func TestNames_QuotedAndBounded(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", strings.Repeat("x", 64), "a\x00b", "a\xffb"} {
		if _, err := namesOf(name); err == nil {
			t.Errorf("%q was taken", name)
		}
	}
	a, err := namesOf(`we"ird.Schema`)
	if err != nil || a.quoted != `"we""ird.Schema"` {
		t.Errorf("quoted as %s, %v", a.quoted, err)
	}
	b, _ := namesOf(DefaultSchema)
	if a.key == b.key || a.channel() == b.channel() || len(b.channel()) > maxIdentifier {
		t.Errorf("two schemas share a lock or a channel: %+v, %+v", a, b)
	}
	const pinned = 0x94dd9a85572e0cf8 // other versions of this program use it too
	if uint64(b.key) != pinned {
		t.Errorf("the default schema's key is %x, want %x", uint64(b.key), uint64(pinned))
	}
}

func TestArena_KeepsCopiesApart(t *testing.T) {
	t.Parallel()
	var a arena
	var kept, want [][]byte
	for i := range 300 {
		b := bytes.Repeat([]byte{byte(i)}, i*97%(arenaShare+2000))
		kept, want = append(kept, a.keep(b, 300-i)), append(want, bytes.Clone(b))
		clear(b)
	}
	for i := range kept {
		if !bytes.Equal(kept[i], want[i]) {
			t.Fatalf("the bytes kept as number %d have changed", i)
		}
		_ = append(kept[i], 0xEE) // must not reach a neighbour
	}
}
