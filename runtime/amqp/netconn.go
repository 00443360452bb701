package amqp

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// roomyBytes is how much may wait to be sent before publishers hold back.
	roomyBytes = 1 << 20
	// lastWords is how long a connection that is closed may take to send what is still to be sent.
	lastWords = time.Second
)

// netConn is the network connection under AMQP. It differs from a plain one in three ways.
//
// A Write never waits: what is written is gathered, and sent by one goroutine in as few packets as come together. A
// server that does not read, such as one short of memory, would otherwise hold up the caller of anything at all on the
// connection, past every context. Publishers bound what gathers by [netConn.room].
//
// Whether the peer lives is told by reading alone: nothing for as long as two heartbeats means dead, whatever is
// waiting to be sent. Deadlines for reading that come from above are ignored.
//
// It can be cut.
type netConn struct {
	net.Conn          // TCP, or TLS on it
	tcp      net.Conn // at the bottom

	silence atomic.Int64 // the longest that may be, as a duration; 0 = not live yet, or closing
	armed   time.Time    // when the deadline was last moved; of the reader

	mu      sync.Mutex
	wake    sync.Cond // pending or err has come
	pending []byte
	emptied chan struct{} // closed when pending is taken; nil = nobody waits
	err     error

	sent chan struct{} // closed when nothing will be sent any more
}

func newNetConn(conn, tcp net.Conn) *netConn {
	c := &netConn{Conn: conn, tcp: tcp, sent: make(chan struct{})}
	c.wake.L = &c.mu
	go c.send()
	return c
}

// live begins to watch for silence.
func (c *netConn) live(silence time.Duration) error {
	c.silence.Store(int64(silence))
	return c.Conn.SetReadDeadline(time.Now().Add(silence)) //nolint:wrapcheck // a connection answers like one
}

func (c *netConn) Read(p []byte) (int, error) {
	if silence := time.Duration(c.silence.Load()); silence > 0 {
		// Moving a deadline costs; an eighth of it is close enough.
		if now := time.Now(); now.Sub(c.armed) > silence/8 {
			c.armed = now
			if err := c.Conn.SetReadDeadline(now.Add(silence)); err != nil {
				return 0, err //nolint:wrapcheck // a connection answers like one
			}
		}
	}
	return c.Conn.Read(p) //nolint:wrapcheck // a connection answers like one
}

func (c *netConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	if len(c.pending) == 0 {
		c.wake.Signal()
	}
	c.pending = append(c.pending, p...)
	return len(p), nil
}

// SetDeadline bounds the handshake and the farewell. It ends the watching for silence.
func (c *netConn) SetDeadline(t time.Time) error {
	c.silence.Store(0)
	return c.Conn.SetDeadline(t) //nolint:wrapcheck // a connection answers like one
}

// SetReadDeadline does nothing: see netConn.
func (c *netConn) SetReadDeadline(time.Time) error { return nil }

// room waits until little enough is waiting to be sent.
func (c *netConn) room(ctx context.Context) error {
	for {
		c.mu.Lock()
		if c.err != nil || len(c.pending) < roomyBytes {
			err := c.err
			c.mu.Unlock()
			return err
		}
		if c.emptied == nil {
			c.emptied = make(chan struct{})
		}
		emptied := c.emptied
		c.mu.Unlock()
		select {
		case <-emptied:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (c *netConn) send() {
	defer close(c.sent)
	var spare []byte
	for {
		c.mu.Lock()
		for len(c.pending) == 0 && c.err == nil {
			c.wake.Wait()
		}
		batch := c.pending
		c.pending = spare[:0]
		c.letIn()
		c.mu.Unlock()
		if len(batch) == 0 {
			_ = c.Conn.Close()
			return
		}
		if _, err := c.Conn.Write(batch); err != nil {
			c.end(err)
			_ = c.tcp.Close()
			return
		}
		if spare = batch; cap(spare) > 2*roomyBytes { // a rare large message is not worth keeping its room
			spare = nil
		}
	}
}

// end lets nothing be written from here on.
func (c *netConn) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	c.letIn()
	c.wake.Signal()
}

// letIn wakes who waits for room. With mu held.
func (c *netConn) letIn() {
	if c.emptied != nil {
		close(c.emptied)
		c.emptied = nil
	}
}

// Close sends what is still to be sent, for a moment, and closes. It does not wait for that.
func (c *netConn) Close() error {
	c.end(net.ErrClosed)
	return c.SetDeadline(time.Now().Add(lastWords))
}

// cut ends the connection at once.
func (c *netConn) cut() {
	c.end(net.ErrClosed)
	_ = c.tcp.Close()
}

// roomy reports whether room would not wait.
func (c *netConn) roomy() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pending) < roomyBytes
}
