//go:build unix

package testservers

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
)

// postgresWire reads PostgreSQL's protocol, version 3, without TLS. An exchange ends with the server's ReadyForQuery;
// the startup is exchange 1, and each Query and each Sync begins another.
type postgresWire struct{}

const largestMessage = 1 << 30

func (postgresWire) forward(l *link) error {
	from, to := bufio.NewReaderSize(l.client, 64<<10), bufio.NewWriterSize(l.server, 64<<10)
	if err := startup(l, from, to); err != nil {
		return err
	}
	exchanges := 1
	prepared := make(map[string]string) // statement by name
	for {
		kind, body, err := message(from)
		if err != nil {
			return err
		}
		rest := body
		switch kind {
		case 'Q':
			l.request(text(&rest), exchanges+1)
			exchanges++
		case 'P':
			name := text(&rest)
			prepared[name] = text(&rest)
		case 'B':
			_ = text(&rest) // the portal
			l.request(prepared[text(&rest)], exchanges+1)
		case 'S':
			exchanges++
		}
		if err := send(to, kind, body); err != nil {
			return err
		}
		if err := flushWhenIdle(l, from, to); err != nil {
			return err
		}
	}
}

// startup passes on the first message, which has no kind.
func startup(l *link, from *bufio.Reader, to *bufio.Writer) error {
	head, err := from.Peek(4)
	if err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(head)
	if size > largestMessage {
		return fmt.Errorf("a startup message of %d bytes", size)
	}
	if _, err := io.CopyN(to, from, int64(size)); err != nil {
		return err
	}
	if err := l.gate(); err != nil {
		return err
	}
	return to.Flush()
}

func (postgresWire) backward(l *link) error {
	from, to := bufio.NewReaderSize(l.server, 64<<10), bufio.NewWriterSize(l.client, 64<<10)
	for exchange := 1; ; {
		kind, body, err := message(from)
		if err != nil {
			return err
		}
		over := kind == 'Z'
		lost := l.fate(exchange)
		if over {
			exchange++
		}
		switch {
		case lost && over:
			return l.lose()
		case lost:
			continue
		}
		if err := send(to, kind, body); err != nil {
			return err
		}
		if err := flushWhenIdle(l, from, to); err != nil {
			return err
		}
	}
}

// message reads a message after the startup.
func message(from *bufio.Reader) (kind byte, body []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(from, head[:]); err != nil {
		return 0, nil, err
	}
	size := binary.BigEndian.Uint32(head[1:])
	if size < 4 || size > largestMessage {
		return 0, nil, fmt.Errorf("a message %q of %d bytes", head[0], size)
	}
	body = make([]byte, size-4)
	_, err = io.ReadFull(from, body)
	return head[0], body, err
}

func send(to *bufio.Writer, kind byte, body []byte) error {
	var head [5]byte
	head[0] = kind
	binary.BigEndian.PutUint32(head[1:], uint32(len(body))+4)
	if _, err := to.Write(head[:]); err != nil {
		return err
	}
	_, err := to.Write(body)
	return err
}

// text takes a string that ends with NUL off the front.
func text(from *[]byte) string {
	s, rest, _ := bytes.Cut(*from, []byte{0})
	*from = rest
	return string(s)
}
