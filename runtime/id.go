package leasebus

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
)

// ID identifies an envelope: a version 7 UUID, so that ids sort by time of publishing: those of one process exactly,
// those of several as their clocks do. It is not unique in a store: publishing again after an unknown outcome stores two
// envelopes with one id. It is no secret.
type ID [16]byte

// newest is the time in the newest id of this process, in 4096ths of a millisecond.
var newest atomic.Uint64 //nolint:gochecknoglobals // one for the process, so that its ids never repeat a time

// NewID makes an id for a new envelope.
func NewID() ID { return newID(time.Now()) }

// newID is RFC 9562's version 7 with its method 3: the bits behind the milliseconds are a fraction of one. An id that
// would have the time of an earlier one, or an older, has the next.
func newID(now time.Time) (id ID) {
	const (
		fraction = 12 // bits
		version  = 7
		variant  = 0b10
	)
	at := uint64(now.UnixMilli())<<fraction | uint64(now.Nanosecond()%int(time.Millisecond))<<fraction/uint64(time.Millisecond) //nolint:gosec // since 1970
	for {
		last := newest.Load()
		at = max(at, last+1)
		if newest.CompareAndSwap(last, at) {
			break
		}
	}
	ms, part := at>>fraction, at&(1<<fraction-1)
	binary.BigEndian.PutUint64(id[:8], ms<<16|version<<12|part)
	binary.BigEndian.PutUint64(id[8:], variant<<62|rand.Uint64()>>2) //nolint:gosec // unique, and no secret
	return id
}

// ParseID reads the form that [ID.String] writes.
func ParseID(s string) (ID, error) {
	u, err := uuid.Parse(s)
	if err != nil {
		return ID{}, fmt.Errorf("leasebus: message id %q: %w", s, err)
	}
	return ID(u), nil
}

// idText is the length of an id's text.
const idText = 36

func (id ID) String() string {
	var text [idText]byte
	id.text(&text)
	return string(text[:])
}

func (id ID) text(to *[idText]byte) {
	hex.Encode(to[0:8], id[0:4])
	to[8] = '-'
	hex.Encode(to[9:13], id[4:6])
	to[13] = '-'
	hex.Encode(to[14:18], id[6:8])
	to[18] = '-'
	hex.Encode(to[19:23], id[8:10])
	to[23] = '-'
	hex.Encode(to[24:], id[10:])
}

// MarshalText makes ids strings in JSON.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// AppendText is MarshalText behind b. It has no error.
func (id ID) AppendText(b []byte) ([]byte, error) {
	var text [idText]byte
	id.text(&text)
	return append(b, text[:]...), nil
}

// UnmarshalText reads the form that MarshalText writes.
func (id *ID) UnmarshalText(text []byte) error { return (*uuid.UUID)(id).UnmarshalText(text) }
