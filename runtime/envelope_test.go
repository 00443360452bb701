package leasebus_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"strings"
	"testing"

	leasebus "github.com/leasebus/leasebus/runtime"
)

func TestHeaders_round_trip(t *testing.T) {
	t.Parallel()
	m := map[string]string{"a": "1", "b": "", "tenant": "Ä\t", "long": strings.Repeat("x", 300)}
	h := leasebus.NewHeaders(m)
	if got := maps.Collect(h.All()); !maps.Equal(got, m) {
		t.Errorf("got %v", got)
	}
	again, err := leasebus.DecodeHeaders(h.Encoded())
	if err != nil || again.Get("tenant") != "Ä\t" || again.Get("none") != "" {
		t.Errorf("decoded: %v, %v", maps.Collect(again.All()), err)
	}
	changed := h.With("a", "2").With("long", "")
	if changed.Get("a") != "2" || changed.Get("long") != "" || h.Get("a") != "1" {
		t.Errorf("With: %v from %v", maps.Collect(changed.All()), maps.Collect(h.All()))
	}
	if !bytes.Equal(leasebus.NewHeaders(m).Encoded(), h.Encoded()) {
		t.Error("equal maps are not equal bytes")
	}
}

func FuzzDecodeHeaders(f *testing.F) {
	f.Add([]byte{})
	f.Add(leasebus.NewHeaders(map[string]string{"a": "1", "b": ""}).Encoded())
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01})
	f.Fuzz(func(t *testing.T, encoded []byte) {
		h, err := leasebus.DecodeHeaders(encoded)
		if err != nil {
			return
		}
		n := 0
		for name, value := range h.All() {
			n += len(name) + len(value)
		}
		if n > len(encoded) {
			t.Errorf("%d bytes of text in %d", n, len(encoded))
		}
		if len(encoded) > 0 && n == 0 && len(encoded) < 2 {
			t.Error("accepted half a header")
		}
	})
}

func TestEnvelope_C3_5_C3_9_C3_10_limits(t *testing.T) {
	t.Parallel()
	header := func(name, value string) leasebus.Envelope {
		return leasebus.Envelope{Headers: leasebus.NewHeaders(map[string]string{name: value})}
	}
	many := map[string]string{}
	for name := range strings.FieldsSeq("a b c d e f g h i") {
		many[name] = strings.Repeat("x", leasebus.MaxHeaderBytes)
	}
	for name, tt := range map[string]struct {
		envelope leasebus.Envelope
		want     string // "" = allowed
	}{
		"everything at its limit": {leasebus.Envelope{
			Payload: make([]byte, 100), IdempotencyKey: strings.Repeat("k", 255), OrderingKey: strings.Repeat("k", 255),
			Headers: leasebus.NewHeaders(map[string]string{strings.Repeat("h", 255): strings.Repeat("v", 8192)}),
		}, ""},
		"payload with NUL":         {leasebus.Envelope{Payload: []byte("a\x00\xff")}, ""},
		"payload too large":        {leasebus.Envelope{Payload: make([]byte, 101)}, "payload: is 101 bytes; allowed are 100"},
		"idempotency key too long": {leasebus.Envelope{IdempotencyKey: strings.Repeat("k", 256)}, "idempotency key: is 256 bytes; allowed are 255"},
		"ordering key with NUL":    {leasebus.Envelope{OrderingKey: "a\x00"}, "ordering key: holds a NUL at byte 1"},
		"key not UTF-8":            {leasebus.Envelope{IdempotencyKey: "\xff"}, "idempotency key: is not valid UTF-8"},
		"header with NUL":          {header("a", "b\x00"), "header a: holds a NUL at byte 1"},
		"header name with NUL":     {header("a\x00", "b"), "header name: holds a NUL"},
		"header without name":      {header("", "b"), "header: has an empty name"},
		"header too long":          {header("a", strings.Repeat("x", 8193)), "header a: is 8193 bytes; allowed are 8192"},
		"headers too long":         {leasebus.Envelope{Headers: leasebus.NewHeaders(many)}, "headers: are"},
	} {
		tt.envelope.ID, tt.envelope.Type, tt.envelope.Queue = leasebus.NewID(), "test.Message", "queue"
		err := tt.envelope.Validate(100)
		if tt.want == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		var typed *leasebus.EnvelopeError
		if !errors.Is(err, leasebus.ErrInvalidEnvelope) || !errors.As(err, &typed) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

func TestEnvelope_needs_an_id_a_type_and_a_queue(t *testing.T) {
	t.Parallel()
	id := leasebus.NewID()
	for want, e := range map[string]leasebus.Envelope{
		"id: is not set":    {Type: "test.Message", Queue: "queue"},
		"type: is not set":  {ID: id, Queue: "queue"},
		"queue: is not set": {ID: id, Type: "test.Message"},
	} {
		if err := e.Validate(100); !errors.Is(err, leasebus.ErrInvalidEnvelope) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestID_S36_is_a_string_in_JSON(t *testing.T) {
	t.Parallel()
	id := leasebus.NewID()
	text, err := json.Marshal(map[string]any{"id": id})
	if err != nil || string(text) != `{"id":"`+id.String()+`"}` {
		t.Fatalf("%s, %v", text, err)
	}
	var back struct{ ID leasebus.ID }
	if err := json.Unmarshal(text, &back); err != nil || back.ID != id {
		t.Errorf("%v, %v", back, err)
	}
	if _, err := leasebus.ParseID("7"); err == nil || !strings.Contains(err.Error(), `"7"`) {
		t.Errorf("bad id: %v", err)
	}
}
