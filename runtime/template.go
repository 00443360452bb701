package leasebus

import (
	"maps"

	"google.golang.org/protobuf/proto"
)

// headerTemplate is the headers of all messages of one publish, checked and encoded once.
type headerTemplate struct {
	encoded []byte
	// id is where each message has its own id; 0 = nowhere.
	id int
}

// ownCorrelation is the headers of most messages: each begins a flow of its own.
var ownCorrelation = newTemplate(nil) //nolint:gochecknoglobals // a constant

// templateOf encodes headers. Without a correlation among them, each message's is its id.
func templateOf(headers map[string]string) (headerTemplate, error) {
	if len(headers) == 0 {
		return ownCorrelation, nil
	}
	t := newTemplate(headers)
	return t, Headers{t.encoded}.validate()
}

func newTemplate(headers map[string]string) (t headerTemplate) {
	if headers[HeaderCorrelation] != "" {
		return headerTemplate{encoded: NewHeaders(headers).encoded}
	}
	all := map[string]string{HeaderCorrelation: ID{}.String()}
	maps.Copy(all, headers)
	t.encoded = NewHeaders(all).encoded
	for rest := t.encoded; t.id == 0; {
		var name, value []byte
		name, value, rest, _ = cutHeader(rest) // encoded above
		if string(name) == HeaderCorrelation {
			t.id = len(t.encoded) - len(rest) - len(value)
		}
	}
	return t
}

// of is the headers of one message.
func (t *headerTemplate) of(id ID, memory *arena) Headers {
	if t.id == 0 {
		return Headers{t.encoded}
	}
	encoded := memory.take(len(t.encoded))
	copy(encoded, t.encoded)
	id.text((*[idText]byte)(encoded[t.id:]))
	return Headers{encoded}
}

// arena takes bytes of several messages from one block. Blocks are small, because a store may keep some of the messages
// for long, and one keeps its whole block.
type arena struct {
	// expected is how many messages there will be.
	expected int
	free     []byte
}

const (
	publishBlock = 8 << 10
	// publishShare is the largest part of a block that one message takes; larger ones stand alone.
	publishShare = publishBlock / 8
)

func (a *arena) take(n int) []byte {
	if n > cap(a.free) {
		if n > publishShare || a.expected == 1 {
			return make([]byte, n)
		}
		a.free = make([]byte, 0, publishBlock)
	}
	return a.cut(n)
}

func (a *arena) cut(n int) []byte {
	taken := a.free[:n:n]
	a.free = a.free[n:n:cap(a.free)]
	return taken
}

func (a *arena) marshal(m proto.Message) ([]byte, error) {
	payload, err := proto.MarshalOptions{}.MarshalAppend(a.free, m)
	n := len(payload)
	if err != nil || n > cap(a.free) { // it stands alone
		if a.expected > 1 && n <= publishShare {
			a.free = make([]byte, 0, publishBlock)
		}
		return payload, err
	}
	return a.cut(n), nil
}
