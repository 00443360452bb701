package postgres

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// stored is what an insert of arrivals stores of a message.
type stored struct {
	Queue                   int32
	ID                      leasebus.ID
	Type                    string
	Headers, State, Payload []byte
}

// shared is what messages that are alike have in common.
func (s stored) shared() stored {
	s.ID, s.Payload = leasebus.ID{}, nil
	return s
}

// rows reads the arguments of an insert as the server does.
func (a *arrivals) rows() []stored {
	args := a.args()
	all := make([]stored, a.len())
	at := [columns]int{}
	for c := range at {
		at[c] = arrayHeader
	}
	for i := range all {
		element := func(c int) (v []byte) {
			if column, ok := args[c].(*array); ok {
				v, at[c] = column.next(at[c])
				return slices.Clone(v)
			}
			switch v := args[c].(type) {
			case string:
				return []byte(v)
			case []byte:
				return v
			default:
				return nil
			}
		}
		queue, ok := args[columnQueue].(int32)
		if number := element(columnQueue); !ok {
			queue = int32(number[3])
		}
		all[i] = stored{
			Queue: queue, ID: leasebus.ID(element(columnID)), Type: string(element(columnType)),
			Headers: element(columnHeaders), State: element(columnState), Payload: element(columnPayload),
		}
	}
	return all
}

// Whatever messages have in common, each is stored as it is; those that are alike once for all, and parts of them too.
func TestArrivals_EachIsStoredAsItIs(t *testing.T) {
	t.Parallel()
	headers := []leasebus.Headers{{}, leasebus.NewHeaders(map[string]string{"a": "1"})}
	rapid.Check(t, func(t *rapid.T) {
		var in arrivals
		in.clear()
		var want []stored
		differ := rapid.SliceOfN(rapid.IntRange(0, 20), 1, 12).Draw(t, "differ") // most do not
		alike := true
		for i, d := range differ {
			e := leasebus.Envelope{ID: leasebus.ID{byte(i)}, Type: "t", Payload: []byte{byte(i)}}
			queue := int32(1)
			switch d {
			case 0:
				queue = 2
			case 1:
				e.Type = ""
			case 2:
				e.Headers = headers[1]
			case 3:
				e.OrderingKey = "k"
			}
			in.add(queue, &e)
			want = append(want, stored{Queue: queue, ID: e.ID, Type: e.Type, Headers: headersOf(&e), State: keysOf(&e).encode(false), Payload: e.Payload})
			alike = alike && cmp.Equal(want[i].shared(), want[0].shared())
		}
		if in.alike != alike || in.len() != len(want) {
			t.Fatalf("%d messages, alike: %v; want %d, %v", in.len(), in.alike, len(want), alike)
		}
		check := func(got, want []stored) {
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("(-want +got)\n%s", diff)
			}
		}
		check(in.rows(), want)
		r := in.reader()
		half := rapid.IntRange(0, len(want)).Draw(t, "half")
		for _, part := range [][]stored{want[:half], want[half:]} {
			if len(part) > 0 {
				check(r.take(len(part)).rows(), part)
			}
		}
		if r.left() != 0 {
			t.Fatalf("%d are left", r.left())
		}
	})
}

func TestArrivals_ForLaterAreNeverAlike(t *testing.T) {
	t.Parallel()
	var in arrivals
	in.clear()
	for range 2 {
		in.addLater(1, &leasebus.Outgoing{Envelope: leasebus.Envelope{Type: "t"}, Delay: time.Second})
	}
	all := inserts{"mixed", "alike", "later"}
	if got := all.of(&in); got != "later" || len(in.args()) != columns {
		t.Errorf("%s with %d arguments", got, len(in.args()))
	}
}

// The leases of a claim come in the order of their positions, however the server has found them.
func TestClaim_S1_InTheOrderOfPositions(t *testing.T) {
	t.Parallel()
	for n := range 40 {
		positions := rand.Perm(n)
		c := claim{n: n, dst: make([]leasebus.Lease, n+1), unsorted: !slices.IsSorted(positions)}
		for i, pos := range positions {
			l := &c.dst[i]
			l.Ref.N, l.ID, l.Attempt, l.Generation, l.Payload = int64(pos), leasebus.ID{byte(pos)}, pos, int64(pos), []byte{byte(pos)}
			l.Interruptions, l.Age, l.Crashed = pos, time.Duration(pos), pos%2 == 1
		}
		c.sort()
		for i := range n {
			l := &c.dst[i]
			if int(l.Ref.N) != i || l.ID != (leasebus.ID{byte(i)}) || l.Attempt != i || l.Generation != int64(i) || l.Payload[0] != byte(i) ||
				l.Interruptions != i || l.Age != time.Duration(i) || l.Crashed != (i%2 == 1) {
				t.Fatalf("%v: lease %d is of position %d", positions, i, l.Ref.N)
			}
		}
	}
}
