package postgres

import (
	"bytes"
	"testing"

	leasebus "github.com/leasebus/leasebus/runtime"
)

func TestHeaders_ComeBackByteForByte(t *testing.T) {
	t.Parallel()
	id, other := leasebus.NewID(), leasebus.NewID()
	for name, tt := range map[string]struct {
		headers map[string]string
		stored  int // bytes
	}{
		"none":                       {nil, 0},
		"its own correlation":        {map[string]string{leasebus.HeaderCorrelation: id.String()}, 1},
		"another's correlation":      {map[string]string{leasebus.HeaderCorrelation: other.String()}, 61},
		"a correlation like its own": {map[string]string{leasebus.HeaderCorrelation: id.String() + "x"}, 62},
		"its own and another header": {map[string]string{leasebus.HeaderCorrelation: id.String(), "tenant": "7"}, 70},
		"an empty value":             {map[string]string{"a": ""}, 3},
	} {
		e := leasebus.Envelope{ID: id, Headers: leasebus.NewHeaders(tt.headers)}
		column := bytes.Clone(headersOf(&e))
		if len(column) != tt.stored || (column == nil) != (tt.stored == 0) {
			t.Errorf("%s: %d bytes are stored, want %d", name, len(column), tt.stored)
		}
		h, err := readHeaders(column, id, newBytes)
		clear(column) // it is the driver's
		if err != nil || !bytes.Equal(h.Encoded(), e.Headers.Encoded()) {
			t.Errorf("%s: %q come back for %q, %v", name, h.Encoded(), e.Headers.Encoded(), err)
		}
	}
	if _, err := readHeaders([]byte{9}, id, newBytes); err == nil {
		t.Error("damaged headers are read")
	}
}
