package leasebus

import (
	"encoding/binary"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Envelope is what travels. Its slices may share memory with others of one batch: they are read, never written.
type Envelope struct {
	ID    ID
	Type  string // full proto name of the message
	Queue string
	// Payload is the message in binary protobuf. It survives retry, dead letter and requeue byte for byte.
	Payload []byte
	Headers Headers
	// IdempotencyKey and OrderingKey are empty where the message has none.
	IdempotencyKey string
	OrderingKey    string
	// FirstDue is when the envelope was first due, by the store's clock. The store sets it.
	FirstDue time.Time
}

// Limits of an envelope; see [MaxNameBytes] for its names and keys.
const (
	// DefaultMaxPayload is the largest payload that a publisher takes, unless an option says otherwise.
	DefaultMaxPayload = 4 << 20
	// MaxHeaderBytes bounds one header's value, MaxHeadersBytes all of them together.
	MaxHeaderBytes  = 8 << 10
	MaxHeadersBytes = 64 << 10
)

// Header names that leasebus reads and writes itself. All others beginning with "leasebus-" are refused.
const (
	HeaderCorrelation = "leasebus-correlation-id"
	HeaderCausation   = "leasebus-causation-id"
	// HeaderReplaces holds the id of the dead letter that an edited message took the place of.
	HeaderReplaces    = "leasebus-replaces"
	HeaderTraceparent = "traceparent"
	HeaderTracestate  = "tracestate"

	reservedHeaderPrefix = "leasebus-"
)

// Headers are an envelope's metadata, kept in the form in which a store keeps them. The zero value is empty.
// They are immutable: With returns a changed copy.
type Headers struct{ encoded []byte }

// NewHeaders encodes m, sorted by name, so that equal maps are equal bytes.
func NewHeaders(m map[string]string) Headers {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	var h Headers
	for _, name := range names {
		h.encoded = appendHeader(h.encoded, name, m[name])
	}
	return h
}

// DecodeHeaders wraps what [Headers.Encoded] gave, without copying it.
func DecodeHeaders(encoded []byte) (Headers, error) {
	for rest := encoded; len(rest) > 0; {
		var ok bool
		if _, _, rest, ok = cutHeader(rest); !ok {
			return Headers{}, fmt.Errorf("leasebus: headers are damaged at byte %d of %d", len(encoded)-len(rest), len(encoded))
		}
	}
	return Headers{encoded}, nil
}

// Encoded is the form that a store keeps: each name and value behind its length as a varint.
func (h Headers) Encoded() []byte { return h.encoded }

// Get returns the value under name, "" if there is none.
func (h Headers) Get(name string) string {
	for n, v := range h.All() {
		if n == name {
			return v
		}
	}
	return ""
}

// All iterates over names and values.
func (h Headers) All() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for rest := h.encoded; len(rest) > 0; {
			name, value, next, ok := cutHeader(rest)
			if !ok || !yield(string(name), string(value)) {
				return
			}
			rest = next
		}
	}
}

// With returns the headers with name set to value; an empty value takes the header out.
func (h Headers) With(name, value string) Headers {
	var changed []byte
	for n, v := range h.All() {
		if n != name {
			changed = appendHeader(changed, n, v)
		}
	}
	if value != "" {
		changed = appendHeader(changed, name, value)
	}
	return Headers{changed}
}

func appendHeader(b []byte, name, value string) []byte {
	b = binary.AppendUvarint(b, uint64(len(name)))
	b = append(b, name...)
	b = binary.AppendUvarint(b, uint64(len(value)))
	return append(b, value...)
}

func cutHeader(b []byte) (name, value, rest []byte, ok bool) {
	name, rest, ok = cutSized(b)
	if !ok {
		return nil, nil, b, false
	}
	value, rest, ok = cutSized(rest)
	return name, value, rest, ok
}

func cutSized(b []byte) (part, rest []byte, ok bool) {
	size, n := binary.Uvarint(b)
	if n <= 0 || size > uint64(len(b)-n) { //nolint:gosec // n is at most len(b)
		return nil, b, false
	}
	end := n + int(size) //nolint:gosec // bounded by len(b) above
	return b[n:end], b[end:], true
}

// EnvelopeError says what of an envelope was refused. It matches [ErrInvalidEnvelope].
type EnvelopeError struct {
	// Part is what was wrong: "payload", "header …", "idempotency key", ….
	Part string
	// Text says what was given and what is allowed. It never holds the value itself.
	Text string
}

func (e *EnvelopeError) Error() string { return "leasebus: " + e.Part + ": " + e.Text }

// Is makes errors.Is(err, ErrInvalidEnvelope) true.
func (e *EnvelopeError) Is(target error) bool { return target == ErrInvalidEnvelope }

// Validate checks e against the limits of every backend. Its error matches [ErrInvalidEnvelope].
// Every [Publisher] calls it before it stores anything.
func (e *Envelope) Validate(maxPayload int) error {
	for _, needed := range []struct {
		part   string
		absent bool
	}{{"id", e.ID == ID{}}, {"type", e.Type == ""}, {"queue", e.Queue == ""}} {
		if needed.absent {
			return &EnvelopeError{needed.part, "is not set"}
		}
	}
	if len(e.Payload) > maxPayload {
		return &EnvelopeError{"payload", fmt.Sprintf("is %d bytes; allowed are %d", len(e.Payload), maxPayload)}
	}
	for _, key := range []struct{ part, value string }{{"idempotency key", e.IdempotencyKey}, {"ordering key", e.OrderingKey}} {
		if err := validateText(key.part, key.value, MaxNameBytes); err != nil {
			return err
		}
	}
	return e.Headers.validate()
}

func (h Headers) validate() error {
	if len(h.encoded) > MaxHeadersBytes {
		return &EnvelopeError{"headers", fmt.Sprintf("are %d bytes together; allowed are %d", len(h.encoded), MaxHeadersBytes)}
	}
	for rest := h.encoded; len(rest) > 0; {
		name, value, next, ok := cutHeader(rest)
		switch {
		case !ok:
			return &EnvelopeError{"headers", "are damaged"}
		case len(name) == 0:
			return &EnvelopeError{"header", "has an empty name"}
		}
		if problem := problemOf(name, MaxNameBytes); problem != "" {
			return &EnvelopeError{"header name", problem}
		}
		if problem := problemOf(value, MaxHeaderBytes); problem != "" {
			return &EnvelopeError{"header " + string(name), problem}
		}
		rest = next
	}
	return nil
}

func validateText(part, value string, limit int) error {
	if problem := problemOf(value, limit); problem != "" {
		return &EnvelopeError{part, problem}
	}
	return nil
}

// problemOf says what keeps a text from being stored as a name, a key or a header; "" = nothing.
func problemOf[T string | []byte](text T, limit int) string {
	if len(text) > limit {
		return fmt.Sprintf("is %d bytes; allowed are %d", len(text), limit)
	}
	for i := range len(text) {
		switch c := text[i]; {
		case c == 0:
			return fmt.Sprintf("holds a NUL at byte %d; none is allowed", i)
		case c >= utf8.RuneSelf:
			if s := string(text); !utf8.ValidString(s) {
				return "is not valid UTF-8"
			}
			if nul := strings.IndexByte(string(text[i:]), 0); nul >= 0 {
				return fmt.Sprintf("holds a NUL at byte %d; none is allowed", i+nul)
			}
			return ""
		}
	}
	return ""
}
