//go:build unix

package testservers

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func TestProxy_Cut(t *testing.T) {
	t.Parallel()
	proxy, pg := Postgres(t).Proxy(t)
	conn := pg.Conn(t)
	if n := proxy.Cut(); n != 1 {
		t.Errorf("cut %d connections, want 1", n)
	}
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("a connection that was cut answers")
	}
	if err := pg.Conn(t).Ping(t.Context()); err != nil {
		t.Errorf("a connection from after the cut: %v", err)
	}
	proxy.Down()
	if err := ping(t.Context(), pg.DSN()); err == nil {
		t.Error("a proxy that is down answers")
	}
	proxy.Up(t)
	if err := ping(t.Context(), pg.DSN()); err != nil {
		t.Errorf("a proxy that is up again: %v", err)
	}
}

func TestProxy_Silence(t *testing.T) {
	t.Parallel()
	proxy, pg := Postgres(t).Proxy(t)
	conn := pg.Conn(t)
	proxy.Silence()
	answered := make(chan error, 1)
	go func() { answered <- conn.Ping(context.WithoutCancel(t.Context())) }()
	select {
	case err := <-answered:
		t.Fatalf("an answer came through the silence: %v", err)
	case <-time.After(200 * time.Millisecond): // a silence can only be seen by waiting
	}
	proxy.Speak()
	if err := <-answered; err != nil {
		t.Errorf("after the silence: %v", err)
	}
}

func TestProxy_ForgetsConnections(t *testing.T) {
	t.Parallel()
	proxy, pg := Postgres(t).Proxy(t)
	conn := pg.Conn(t)
	if n := proxy.Forget(); n != 1 {
		t.Errorf("forgot %d connections, want 1", n)
	}
	bound, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := conn.Ping(bound); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a connection that was forgotten answers %v", err)
	}
	if err := ping(t.Context(), pg.DSN()); err != nil {
		t.Errorf("a new connection: %v", err)
	}
}

func TestProxy_ForgetsConnectionsThatBeginInASilence(t *testing.T) {
	t.Parallel()
	proxy, pg := Postgres(t).Proxy(t)
	proxy.Silence()
	late := make(chan error, 1)
	go func() { late <- ping(context.WithoutCancel(t.Context()), pg.DSN()) }()
	within(t, "a connection begins during the silence", func() error {
		if proxy.Forget() != 1 {
			return errors.New("there is none")
		}
		return nil
	})
	proxy.Speak()
	if err := ping(t.Context(), pg.DSN()); err != nil {
		t.Errorf("a connection from after the silence: %v", err)
	}
	if err := <-late; err == nil {
		t.Error("a connection that was forgotten came to life with the end of the silence")
	}
}

func TestProxy_ForgetsAtAStatement(t *testing.T) {
	t.Parallel()
	direct := Postgres(t)
	direct.Exec(t, `CREATE TABLE done (n int)`)
	proxy, pg := direct.Proxy(t)
	conn := pg.Conn(t)
	lost := proxy.ForgetAt(Containing("INSERT INTO", "done"))
	asked := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, err := conn.Exec(ctx, `INSERT INTO done VALUES (1)`)
		asked <- err
	}()
	<-lost
	if got := Value[int](t, direct, `SELECT count(*) FROM done`); got != 1 {
		t.Errorf("%d rows, want 1: the server must have done what it was asked to", got)
	}
	cancel()
	if err := <-asked; !errors.Is(err, context.Canceled) {
		t.Errorf("the statement answers %v", err)
	}
}

func TestProxy_LosesRepliesOfStatements(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]pgx.QueryExecMode{
		"prepared": pgx.QueryExecModeCacheStatement, "described": pgx.QueryExecModeCacheDescribe,
		"exec": pgx.QueryExecModeExec, "simple": pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := Postgres(t)
			direct.Exec(t, `CREATE TABLE done (n int)`)
			proxy, pg := direct.Proxy(t)
			const insert = `INSERT INTO done VALUES ($1)`
			conn := pg.Conn(t)
			if _, err := conn.Exec(t.Context(), insert, mode, 1); err != nil { // prepares it, too
				t.Fatal(err)
			}
			lost := proxy.LoseReply(Containing("INSERT INTO", "done"))
			if _, err := conn.Exec(t.Context(), `SELECT 1`, mode); err != nil {
				t.Errorf("a statement that does not match: %v", err)
			}
			if _, err := conn.Exec(t.Context(), insert, mode, 2); err == nil {
				t.Error("the reply arrived")
			}
			<-lost
			if got := Value[int](t, direct, `SELECT count(*) FROM done`); got != 2 {
				t.Errorf("%d rows, want 2: the server must have done what it was asked to", got)
			}
			if _, err := pg.Conn(t).Exec(t.Context(), insert, mode, 3); err != nil {
				t.Errorf("the next one, on a new connection: %v", err)
			}
		})
	}
}

// A batch is one exchange: an answer to any of its statements is lost with the whole.
func TestProxy_LosesReplyOfABatch(t *testing.T) {
	t.Parallel()
	direct := Postgres(t)
	direct.Exec(t, `CREATE TABLE done (n int)`)
	proxy, pg := direct.Proxy(t)
	conn := pg.Conn(t)
	lost := proxy.LoseReply(Containing("INSERT"))
	batch := &pgx.Batch{}
	batch.Queue(`SELECT set_config('jit', 'off', true)`)
	batch.Queue(`INSERT INTO done VALUES ($1)`, 1)
	if err := conn.SendBatch(t.Context(), batch).Close(); err == nil {
		t.Error("the reply arrived")
	}
	<-lost
	if got := Value[int](t, direct, `SELECT count(*) FROM done`); got != 1 {
		t.Errorf("%d rows, want 1", got)
	}
}

func TestProxy_LosesRepliesOfAnyProtocol(t *testing.T) {
	t.Parallel()
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		conn, err := echo.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.Copy(conn, conn)
	}()
	t.Cleanup(func() {
		_ = echo.Close()
		<-served
	})
	proxy := NewProxy(t, echo.Addr().String())
	conn, err := net.Dial("tcp", proxy.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	exchange := func(text string) (string, error) {
		if _, err := io.WriteString(conn, text); err != nil {
			return "", err
		}
		answer := make([]byte, len(text))
		n, err := io.ReadFull(conn, answer)
		return string(answer[:n]), err
	}
	lost := proxy.LoseReply(Containing("second"))
	if got, err := exchange("first"); got != "first" || err != nil {
		t.Errorf("the first: %q, %v", got, err)
	}
	if got, err := exchange("second"); got != "" || err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the second: %q, %v; want nothing and a cut connection", got, err)
	}
	<-lost
}
