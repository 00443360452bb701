package leasebus_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	leasebus "github.com/leasebus/leasebus/runtime"
)

func TestNewID_ascends_and_never_repeats(t *testing.T) {
	t.Parallel()
	const goroutines, each = 4, 5000
	made := make([][]leasebus.ID, goroutines)
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for range each {
				made[g] = append(made[g], leasebus.NewID())
			}
		})
	}
	all.Wait()
	seen := make(map[leasebus.ID]bool)
	for _, ids := range made {
		if !slices.IsSortedFunc(ids, func(a, b leasebus.ID) int { return slices.Compare(a[:], b[:]) }) {
			t.Error("the ids of one goroutine do not ascend")
		}
		for _, id := range ids {
			seen[id] = true
		}
	}
	if len(seen) != goroutines*each {
		t.Errorf("%d different ids of %d", len(seen), goroutines*each)
	}
}

func TestNewID_is_a_version_7_UUID_of_now(t *testing.T) {
	t.Parallel()
	before := time.Now().UnixMilli()
	u := uuid.UUID(leasebus.NewID())
	if u.Version() != 7 || u.Variant() != uuid.RFC4122 {
		t.Errorf("version %d, variant %v", u.Version(), u.Variant())
	}
	var ms int64
	for _, b := range u[:6] {
		ms = ms<<8 | int64(b)
	}
	// Other tests make more ids than there are parts of a millisecond: the clock of ids can be a little ahead.
	if after := time.Now().Add(time.Minute).UnixMilli(); ms < before || ms > after {
		t.Errorf("it says %d ms, want %d to %d", ms, before, after)
	}
}

func TestID_text(t *testing.T) {
	t.Parallel()
	for range 100 {
		id := leasebus.NewID()
		if want := uuid.UUID(id).String(); id.String() != want {
			t.Errorf("%s, want %s", id, want)
		}
		if again, err := leasebus.ParseID(id.String()); err != nil || again != id {
			t.Errorf("%s is read as %s, %v", id, again, err)
		}
	}
}
