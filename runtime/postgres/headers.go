package postgres

import (
	"bytes"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Most messages have one header, which is a correlation with nothing before it: their own id. It is not kept then, but
// for a byte that no other headers begin with: the name of a header is not empty.

// idText is the length of an id's text.
const idText = 36

//nolint:gochecknoglobals // constants
var (
	ownCorrelation       = []byte{0}
	ownCorrelationPrefix = func() []byte {
		encoded := leasebus.NewHeaders(map[string]string{leasebus.HeaderCorrelation: leasebus.ID{}.String()}).Encoded()
		return encoded[:len(encoded)-idText]
	}()
)

// headersOf is the column headers of a message, null if there are none.
func headersOf(e *leasebus.Envelope) []byte {
	encoded := e.Headers.Encoded()
	if len(encoded) == 0 {
		return nil
	}
	if id, ok := bytes.CutPrefix(encoded, ownCorrelationPrefix); ok {
		var own [idText]byte
		if text, err := e.ID.AppendText(own[:0]); err == nil && bytes.Equal(id, text) {
			return ownCorrelation
		}
	}
	return encoded
}

// readHeaders are those of the message id. What they are made of is copied into memory that space gives.
func readHeaders(column []byte, id leasebus.ID, space func(n int) []byte) (leasebus.Headers, error) {
	if !bytes.Equal(column, ownCorrelation) {
		encoded := space(len(column))
		copy(encoded, column)
		return leasebus.DecodeHeaders(encoded)
	}
	encoded := space(len(ownCorrelationPrefix) + idText)
	n := copy(encoded, ownCorrelationPrefix)
	if _, err := id.AppendText(encoded[:n]); err != nil {
		return leasebus.Headers{}, err
	}
	return leasebus.DecodeHeaders(encoded)
}

func newBytes(n int) []byte { return make([]byte, n) }
