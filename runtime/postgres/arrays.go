package postgres

import (
	"encoding/binary"
	"encoding/hex"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// array is a one-dimensional array of PostgreSQL, kept in the binary form that a statement sends: made element by element
// through the driver's reflection, the arrays of a large insert would cost more than all the rest of it here.
//
// The connections of an inbox take it as it is (takeArrays). Where the driver sends texts, and on the connections of
// others, it becomes one (literals).
type array struct {
	element uint32 // the type's OID
	n       int
	wire    []byte // header and elements
}

// Of the binary form: five integers in front, and the length of a null.
const (
	arrayHeader = 5 * size32
	nullLength  = 0xffff_ffff
)

// newArray makes an array with room for elements of so many bytes together.
func newArray(element uint32, bytes int) *array {
	const typical = 2 // an element is about as long as what stands before it
	a := &array{wire: make([]byte, 0, arrayHeader+typical*bytes)}
	a.start(element)
	return a
}

// start empties a, which keeps its memory, for elements of a type.
func (a *array) start(element uint32) {
	a.element, a.n = element, 0
	a.wire = binary.BigEndian.AppendUint32(a.wire[:0], 1) // dimensions
	a.wire = binary.BigEndian.AppendUint32(a.wire, 1)     // there may be nulls
	a.wire = binary.BigEndian.AppendUint32(a.wire, element)
	a.wire = binary.BigEndian.AppendUint32(a.wire, 0) // elements
	a.wire = binary.BigEndian.AppendUint32(a.wire, 1) // the first one's index
}

// grow begins an element of so many bytes.
func (a *array) grow(length uint32) {
	a.n++
	binary.BigEndian.PutUint32(a.wire[3*size32:], uint32(a.n)) //nolint:gosec // far fewer
	a.wire = binary.BigEndian.AppendUint32(a.wire, length)
}

func (a *array) addInt32(v int32) {
	a.grow(size32)
	a.wire = binary.BigEndian.AppendUint32(a.wire, uint32(v)) //nolint:gosec // two's complement
}

func (a *array) addInt64(v int64) {
	a.grow(size64)
	a.wire = binary.BigEndian.AppendUint64(a.wire, uint64(v)) //nolint:gosec // two's complement
}

func (a *array) addBool(v bool) {
	a.grow(1)
	if v {
		a.wire = append(a.wire, 1)
	} else {
		a.wire = append(a.wire, 0)
	}
}

func (a *array) addID(id leasebus.ID) {
	a.grow(uint32(len(id)))
	a.wire = append(a.wire, id[:]...)
}

func (a *array) addText(v string) {
	a.grow(uint32(len(v))) //nolint:gosec // bounded by what a message may be
	a.wire = append(a.wire, v...)
}

// addBytes adds null for nil.
func (a *array) addBytes(v []byte) {
	if v == nil {
		a.grow(nullLength)
		return
	}
	a.grow(uint32(len(v))) //nolint:gosec // bounded by what a message may be
	a.wire = append(a.wire, v...)
}

// next returns the element at an offset of wire, nil for null, and the offset behind it.
func (a *array) next(at int) (element []byte, behind int) {
	length := binary.BigEndian.Uint32(a.wire[at:])
	at += size32
	if length == nullLength {
		return nil, at
	}
	behind = at + int(length)
	return a.wire[at:behind:behind], behind
}

// first is the first element, nil for null.
func (a *array) first() []byte {
	element, _ := a.next(arrayHeader)
	return element
}

// literal is the text form.
func (a *array) literal() string {
	b := []byte{'{'}
	for at := arrayHeader; at < len(a.wire); {
		var element []byte
		element, at = a.next(at)
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = a.appendText(b, element)
	}
	return string(append(b, '}'))
}

//nolint:gochecknoglobals // a constant
var arrayQuoter = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

func (a *array) appendText(b, element []byte) []byte {
	if element == nil {
		return append(b, "NULL"...)
	}
	switch a.element {
	case pgtype.Int4OID:
		return strconv.AppendInt(b, int64(int32(binary.BigEndian.Uint32(element))), 10) //nolint:gosec // two's complement
	case pgtype.Int8OID:
		return strconv.AppendInt(b, int64(binary.BigEndian.Uint64(element)), 10) //nolint:gosec // two's complement
	case pgtype.BoolOID:
		return strconv.AppendBool(b, element[0] != 0)
	case pgtype.UUIDOID:
		return append(b, uuid.UUID(element).String()...)
	case pgtype.ByteaOID:
		b = append(b, `"\\x`...)
		b = hex.AppendEncode(b, element)
		return append(b, '"')
	default: // text
		b = append(b, '"')
		b = append(b, arrayQuoter.Replace(string(element))...)
		return append(b, '"')
	}
}

// TextValue is for ways of executing statements in which the driver sends texts.
func (a *array) TextValue() (pgtype.Text, error) {
	return pgtype.Text{String: a.literal(), Valid: true}, nil
}

// literals replaces arrays by their text form, which every driver and connection can pass on.
func literals(args []any) []any {
	out := make([]any, len(args))
	for i, arg := range args {
		out[i] = arg
		if a, ok := arg.(*array); ok {
			out[i] = a.literal()
		}
	}
	return out
}

// takeArrays makes a connection take arrays as they are.
func takeArrays(conn *pgx.Conn) {
	m := conn.TypeMap()
	for _, oid := range []uint32{
		pgtype.Int4ArrayOID, pgtype.Int8ArrayOID, pgtype.BoolArrayOID, pgtype.UUIDArrayOID, pgtype.TextArrayOID, pgtype.ByteaArrayOID,
	} {
		if t, ok := m.TypeForOID(oid); ok {
			m.RegisterType(&pgtype.Type{Name: t.Name, OID: oid, Codec: wireCodec{t.Codec}})
		}
	}
}

// wireCodec is the driver's codec of an array type, which knows ours too.
type wireCodec struct{ pgtype.Codec }

// PlanEncode implements [pgtype.Codec].
//
//nolint:ireturn // as the interface says
func (c wireCodec) PlanEncode(m *pgtype.Map, oid uint32, format int16, value any) pgtype.EncodePlan {
	if _, ok := value.(*array); ok && format == pgtype.BinaryFormatCode {
		return wirePlan{}
	}
	return c.Codec.PlanEncode(m, oid, format, value)
}

type wirePlan struct{}

// Encode implements [pgtype.EncodePlan].
func (wirePlan) Encode(value any, buf []byte) ([]byte, error) {
	return append(buf, value.(*array).wire...), nil //nolint:forcetypeassert // PlanEncode has looked
}
