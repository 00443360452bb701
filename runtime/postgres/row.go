package postgres

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// row reads the columns of an answer where they lie, in the binary form or in the text form, whichever the connection's
// way of executing statements brings. What it returns is valid until the next row. The first damaged column fails it.
type row struct {
	rows   pgx.Rows
	raw    [][]byte
	fields []pgconn.FieldDescription
	err    error
}

func (r *row) take() {
	if r.fields == nil {
		r.fields = r.rows.FieldDescriptions()
	}
	r.raw = r.rows.RawValues()
}

func (r *row) binary(i int) bool { return r.fields[i].Format == pgx.BinaryFormatCode }

func (r *row) null(i int) bool { return r.raw[i] == nil }

func (r *row) damaged(i int, err error) {
	if r.err == nil {
		r.err = fmt.Errorf("column %d of %d bytes: %w", i, len(r.raw[i]), err)
	}
}

// Sizes of integers in the binary form.
const size16, size32, size64 = 2, 4, 8

// int64 reads an integer of any size; null is 0.
func (r *row) int64(i int) int64 {
	v := r.raw[i]
	if r.binary(i) {
		switch len(v) {
		case size64:
			return int64(binary.BigEndian.Uint64(v)) //nolint:gosec // two's complement
		case size32:
			return int64(int32(binary.BigEndian.Uint32(v))) //nolint:gosec // two's complement
		case size16:
			return int64(int16(binary.BigEndian.Uint16(v))) //nolint:gosec // two's complement
		}
	}
	if v == nil {
		return 0
	}
	n, err := strconv.ParseInt(string(v), 10, 64)
	if err != nil {
		r.damaged(i, err)
	}
	return n
}

func (r *row) int32(i int) int32 { return int32(r.int64(i)) } //nolint:gosec // of an int column

func (r *row) int(i int) int { return int(r.int64(i)) }

// bytes reads a bytea; null is nil, empty is not.
func (r *row) bytes(i int) []byte {
	v := r.raw[i]
	if r.binary(i) || v == nil {
		return v
	}
	decoded, err := byteaOf(v)
	if err != nil {
		r.damaged(i, err)
	}
	return decoded
}

// text reads a text in either form.
func (r *row) text(i int) []byte { return r.raw[i] }

func (r *row) id(i int) (id leasebus.ID) {
	v := r.raw[i]
	if v == nil {
		return id
	}
	if r.binary(i) {
		copy(id[:], v)
		return id
	}
	u, err := uuid.ParseBytes(v)
	if err != nil {
		r.damaged(i, err)
	}
	return leasebus.ID(u)
}

// instant reads what timestamptz_send wrote.
func (r *row) instant(i int) instant {
	v := r.bytes(i)
	if len(v) != instantSize {
		return 0
	}
	return instant(binary.BigEndian.Uint64(v)) //nolint:gosec // two's complement
}

// byteaOf decodes the text forms of bytea: hex, and the older escapes.
func byteaOf(v []byte) ([]byte, error) {
	if len(v) >= 2 && v[0] == '\\' && v[1] == 'x' {
		decoded := make([]byte, hex.DecodedLen(len(v)-2))
		if _, err := hex.Decode(decoded, v[2:]); err != nil {
			return nil, fmt.Errorf("bytea in hex: %w", err)
		}
		return decoded, nil
	}
	decoded := make([]byte, 0, len(v))
	for i := 0; i < len(v); i++ {
		switch {
		case v[i] != '\\':
			decoded = append(decoded, v[i])
		case i+1 < len(v) && v[i+1] == '\\':
			decoded = append(decoded, '\\')
			i++
		case i+3 < len(v):
			octal, err := strconv.ParseUint(string(v[i+1:i+4]), 8, 8)
			if err != nil {
				return nil, fmt.Errorf("bytea in escapes: %w", err)
			}
			decoded = append(decoded, byte(octal))
			i += 3
		default:
			return nil, fmt.Errorf("bytea ends within an escape at byte %d", i)
		}
	}
	return decoded, nil
}

// instant is a time as PostgreSQL sends it: microseconds since the year 2000.
type instant int64

const instantSize = 8

//nolint:gochecknoglobals // a constant
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

func (t instant) time() time.Time {
	const second = 1_000_000
	return time.Unix(epoch.Unix()+int64(t)/second, int64(t)%second*int64(time.Microsecond)).UTC()
}

func instantOf(t time.Time) instant {
	const second = 1_000_000
	return instant((t.Unix()-epoch.Unix())*second + int64(t.Nanosecond())/int64(time.Microsecond))
}

// since is at most the longest duration there is, either way.
func (t instant) since(earlier instant) time.Duration {
	return t.time().Sub(earlier.time())
}

// microseconds rounds up, so that nothing is due early.
func microseconds(d time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	n := int64(d / time.Microsecond)
	if d%time.Microsecond != 0 {
		n++
	}
	return n
}
