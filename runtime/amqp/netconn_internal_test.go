package amqp

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// pipe is a connection whose other end reads nothing by itself.
func pipe(t *testing.T) (*netConn, net.Conn) {
	t.Helper()
	ours, theirs := net.Pipe()
	c := newNetConn(ours, ours)
	t.Cleanup(func() {
		c.cut()
		_ = theirs.Close()
		<-c.sent
	})
	return c, theirs
}

// F9, F10: who writes to a server that does not read is not held up; who publishes waits for room, as long as it likes.
func TestNetConn_C7_6_writes_never_wait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, theirs := pipe(t)
		begun := time.Now()
		frame := make([]byte, 64<<10)
		for range 2 * roomyBytes / len(frame) {
			if n, err := c.Write(frame); n != len(frame) || err != nil {
				t.Fatalf("wrote %d bytes of %d: %v", n, len(frame), err)
			}
			synctest.Wait() // the first ones are being sent
		}
		if time.Since(begun) != 0 || c.roomy() {
			t.Errorf("writing took %v, and there is room: %v", time.Since(begun), c.roomy())
		}
		enough := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, enough)
		defer cancel()
		if err := c.room(ctx); !errors.Is(err, enough) || time.Since(begun) != time.Second {
			t.Errorf("waited %v for room: %v, want a second and the context's cause", time.Since(begun), err)
		}
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		if err := c.room(t.Context()); err != nil {
			t.Errorf("waiting for room with a server that reads: %v", err)
		}
	})
}

func TestNetConn_what_was_written_together_is_sent_together(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, theirs := pipe(t)
		for range 3 {
			_, _ = c.Write([]byte("a"))
			synctest.Wait()
		}
		got := make([]byte, 10)
		for _, want := range []string{"a", "aa"} { // the first was on its way when the others came
			n, err := theirs.Read(got)
			if err != nil || string(got[:n]) != want {
				t.Errorf("read %q: %v, want %q", got[:n], err, want)
			}
		}
	})
}

func TestNetConn_close_sends_the_last_words(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, theirs := pipe(t)
		_, _ = c.Write([]byte("close-ok"))
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("more")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a write after close: %v, want %v", err, net.ErrClosed)
		}
		got, err := io.ReadAll(theirs)
		if string(got) != "close-ok" || err != nil {
			t.Errorf("read %q, %v", got, err)
		}
	})
}

func TestNetConn_close_waits_for_no_reader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, _ := pipe(t)
		begun := time.Now()
		_, _ = c.Write([]byte("close-ok"))
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		<-c.sent
		if time.Since(begun) != lastWords {
			t.Errorf("the connection was closed after %v, want %v", time.Since(begun), lastWords)
		}
	})
}

// Whatever is written, a peer of whom nothing is read for two heartbeats is dead; one that says anything is not.
func TestNetConn_S54_silence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const silence = 20 * time.Second
		c, theirs := pipe(t)
		if err := c.live(silence); err != nil {
			t.Fatal(err)
		}
		go func() {
			for range 40 {
				time.Sleep(silence / 16)
				_, _ = theirs.Write([]byte("heartbeat"))
			}
			var err error
			for err == nil {
				time.Sleep(silence / 4)
				_, err = c.Write([]byte("we go on")) // which says nothing about them
			}
		}()
		begun := time.Now()
		buffer := make([]byte, 100)
		var err error
		for err == nil {
			_ = c.SetReadDeadline(time.Now()) // from above: does not count
			_, err = c.Read(buffer)
		}
		var timeout net.Error
		if !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("reading ended with %v, want a timeout", err)
		}
		waited := time.Since(begun) - 40*silence/16
		if waited < silence*7/8 || waited > silence {
			t.Errorf("the silence lasted %v, want %v, or an eighth less", waited, silence)
		}
		c.cut()
		time.Sleep(silence)
	})
}
