package amqp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
)

// connected is a link that is up.
func connected(t *testing.T, b *Broker) (*link, *epoch) {
	t.Helper()
	l, err := b.connect("test")
	if err != nil {
		t.Fatal(err)
	}
	e, err := l.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return l, e
}

// within fails the test if what it waits for takes longer.
func within(t *testing.T, limit time.Duration, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatalf("waited %v in vain until %s", limit, what)
	}
}

func quickPace(o *options) {
	o.pace = pace{time.Millisecond, 20 * time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond}
}

func TestLink_S54_comes_back(t *testing.T) {
	t.Parallel()
	proxy, rabbit := testservers.RabbitMQ(t).Proxy(t)
	b := dialIn(t, rabbit.URL(), QuickPace())
	l, first := connected(t, b)
	ch, err := first.open(t.Context(), func(*amqp091.Channel) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	proxy.Down()
	within(t, 5*time.Second, "the loss is noticed", first.over)
	within(t, 5*time.Second, "the channel's end is noticed", ch.over)
	if s := l.state(); s.Up && first.isOver() {
		_, _, _, changed := l.current.get()
		within(t, 5*time.Second, "the link says that it is down", changed)
	}
	if _, err := first.open(t.Context(), func(*amqp091.Channel) error { return nil }); !errors.Is(err, ErrDisconnected) {
		t.Errorf("a channel of what is over: %v, want %v", err, ErrDisconnected)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := l.await(ctx); !errors.Is(err, ErrDisconnected) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while the broker is away: %v", err)
	}
	if s := l.state(); s.Up || s.Err == nil {
		t.Errorf("while the broker is away the state is %+v", s)
	}
	proxy.Up(t)
	second, err := l.await(t.Context())
	if err != nil || second.number != first.number+1 {
		t.Fatalf("the next epoch: %v", err)
	}
	if s := l.state(); !s.Up || s.Err != nil {
		t.Errorf("with the broker back the state is %+v", s)
	}
}

// C7.6: the goroutines of ended connections end with them.
func TestLink_C7_6_leaves_nothing_behind(t *testing.T) {
	proxy, rabbit := testservers.RabbitMQ(t).Proxy(t)
	b := dialIn(t, rabbit.URL(), QuickPace())
	l, e := connected(t, b)
	before := 0
	for i := range 12 {
		if _, err := e.open(t.Context(), func(ch *amqp091.Channel) error { return ch.Confirm(false) }); err != nil {
			t.Fatal(err)
		}
		proxy.Cut()
		within(t, 5*time.Second, "the loss is noticed", e.over)
		var err error
		if e, err = l.await(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := b.publishing.await(t.Context()); err != nil {
			t.Fatal(err)
		}
		if i == 1 { // past what is made once
			before = runtime.NumGoroutine()
		}
	}
	Eventually(t, 10*time.Second, fmt.Sprintf("there are no more goroutines than %d, or about", before), func() bool {
		return runtime.NumGoroutine() <= before+4 // some are on their way out, or in
	})
}

func TestLink_S54_notices_a_silent_server(t *testing.T) {
	t.Parallel()
	proxy, rabbit := testservers.RabbitMQ(t).Proxy(t)
	b := dialIn(t, rabbit.URL(), WithHeartbeat(time.Second), QuickPace())
	l, e := connected(t, b)
	proxy.Silence()
	begun := time.Now()
	within(t, 10*time.Second, "the silence is noticed", e.over)
	if waited := time.Since(begun); waited > 5*time.Second {
		t.Errorf("the silence was noticed after %v, want two heartbeats of 1s", waited)
	}
	proxy.Speak()
	if _, err := l.await(t.Context()); err != nil {
		t.Error(err)
	}
}

// A connection on which nothing happens but heartbeats is not silent.
func TestLink_idle_is_not_silent(t *testing.T) {
	t.Parallel()
	b := dialIn(t, testservers.RabbitMQ(t).URL(), WithHeartbeat(time.Second))
	_, e := connected(t, b)
	select {
	case <-e.over:
		t.Errorf("the connection was given up: %v", e.err)
	case <-time.After(3500 * time.Millisecond): // what is waited for is that nothing happens
	}
}

// F9: an answer that does not come holds up nobody past the own context, and closing is bounded.
func TestEpoch_C7_7_C7_6_a_server_that_does_not_answer(t *testing.T) {
	t.Parallel()
	proxy, rabbit := testservers.RabbitMQ(t).Proxy(t)
	b := dialIn(t, rabbit.URL())
	_, e := connected(t, b)
	proxy.Silence()
	defer proxy.Speak()
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		begun := time.Now()
		_, err := e.open(ctx, func(*amqp091.Channel) error { return nil })
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) > 2*time.Second {
			t.Errorf("a channel: %v after %v", err, time.Since(begun))
		}
		if err := e.aside(ctx, func(*amqp091.Channel) error { return nil }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("aside: %v", err)
		}
		cancel()
	}
	begun := time.Now()
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(begun); took > farewell+3*time.Second {
		t.Errorf("close took %v, want little more than %v", took, farewell)
	}
}

// A channel that was asked for in vain is closed when it comes.
func TestEpoch_open_gives_up_what_comes_too_late(t *testing.T) {
	t.Parallel()
	b := dialIn(t, testservers.RabbitMQ(t).URL())
	_, e := connected(t, b)
	ctx, cancel := context.WithCancel(t.Context())
	var late *amqp091.Channel
	proceed := make(chan struct{})
	_, err := e.open(ctx, func(ch *amqp091.Channel) error {
		late = ch
		cancel()
		<-proceed
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	close(proceed)
	next, err := e.open(t.Context(), func(*amqp091.Channel) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	Eventually(t, 5*time.Second, "the late channel is closed", late.IsClosed)
	if next.IsClosed() {
		t.Error("the other channel was closed")
	}
}

func TestDial_refused(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	with := func(change func(u *url.URL)) string {
		u, err := url.Parse(rabbit.URL())
		if err != nil {
			t.Fatal(err)
		}
		change(u)
		return u.String()
	}
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	for _, c := range []struct {
		name, url string
		opts      []Option
		want      []string
		refused   bool
	}{
		{"a wrong password", with(func(u *url.URL) { u.User = url.UserPassword("guest", "s3cret") }), nil, []string{"403", rabbit.Addr()}, true},
		{"a wrong user", with(func(u *url.URL) { u.User = url.UserPassword("nobody", "s3cret") }), nil, []string{"403"}, true},
		{"no such virtual host", with(func(u *url.URL) { u.Path = "/absent" }), nil, []string{"absent", "vhost"}, true},
		{"nobody listens", with(func(u *url.URL) { u.Host = closed.Addr().String() }), nil, []string{"connection refused"}, false},
		{"not a URL", "amqp://guest:s3cret@[::1", nil, []string{"cannot be used"}, false},
		{"a colon in the password", "amqp://guest:s3cret%zz@localhost/", nil, []string{"percent-encoding"}, false},
		{"a space", "amqp://guest:s3cret@local host/", nil, []string{"whitespace"}, false},
		{"another protocol", "http://guest:s3cret@localhost/", nil, []string{"scheme"}, false},
		{"an unknown mechanism", with(func(u *url.URL) { u.RawQuery = "auth_mechanism=guess" }), nil, []string{`"guess"`, "plain, amqplain"}, false},
		{"no credentials", rabbit.URL(), []Option{WithCredentials(func(context.Context) (string, string, error) {
			return "", "", errors.New("the vault is closed")
		})}, []string{"the vault is closed"}, false},
		{"a TLS server that is none", "amqps://guest:s3cret@" + rabbit.Addr(), nil, []string{"tls", rabbit.Addr()}, false},
		{"files that are not there", "amqps://guest:s3cret@localhost/?cacertfile=absent.pem", nil, []string{"cacertfile", "absent.pem"}, false},
		{"a key without a certificate", "amqps://guest:s3cret@localhost/?keyfile=absent.pem", nil, []string{"keyfile"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			begun := time.Now()
			b, err := Dial(t.Context(), c.url, c.opts...)
			if err == nil {
				_ = b.Close()
				t.Fatal("connected, want an error")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error %q does not say %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("the error %q tells the password", err)
			}
			if isConfiguration(err) != c.refused {
				t.Errorf("%v counts as a matter of configuration: %v, want %v", err, isConfiguration(err), c.refused)
			}
			if took := time.Since(begun); took > 5*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// A server that accepts and says nothing.
func TestDial_C5_12_context(t *testing.T) {
	t.Parallel()
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	begun := time.Now()
	_, err = Dial(ctx, "amqp://"+mute.Addr().String())
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) > 2*time.Second {
		t.Errorf("got %v after %v, want the context's end", err, time.Since(begun))
	}
}

// New credentials are asked for on each connection, and a refusal does not end the attempts.
func TestLink_S54_credentials_that_change(t *testing.T) {
	t.Parallel()
	proxy, rabbit := testservers.RabbitMQ(t).Proxy(t)
	u, err := url.Parse(rabbit.URL())
	if err != nil {
		t.Fatal(err)
	}
	user := u.User.Username()
	right, _ := u.User.Password()
	u.User = url.UserPassword(user, "outdated")
	var password atomic.Pointer[string]
	password.Store(&right)
	var asked atomic.Int32
	b := dialIn(t, u.String(), QuickPace(), WithCredentials(func(context.Context) (string, string, error) {
		asked.Add(1)
		return user, *password.Load(), nil
	}))
	wrong := "wrong"
	password.Store(&wrong)
	proxy.Cut()
	before := asked.Load()
	Eventually(t, 30*time.Second, "credentials were asked for 3 times", func() bool { return asked.Load() >= before+3 })
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := b.publishing.await(ctx); !isConfiguration(err) {
		t.Errorf("while they are wrong: %v, want the refusal", err)
	}
	password.Store(&right)
	if _, err := b.publishing.await(t.Context()); err != nil {
		t.Errorf("with the right ones again: %v", err)
	}
}

func TestPace_C4_5(t *testing.T) {
	t.Parallel()
	refusal := &amqp091.Error{Code: amqp091.AccessRefused, Server: true}
	for _, c := range []struct {
		name      string
		failures  int
		err       error
		low, high time.Duration
	}{
		{"the first", 0, nil, 0, 100 * time.Millisecond},
		{"the second", 1, errors.New("reset"), 0, 200 * time.Millisecond},
		{"the seventh", 6, errors.New("reset"), 0, 6400 * time.Millisecond},
		{"the eighth", 7, errors.New("reset"), 0, 10 * time.Second},
		{"the five thousandth", 5000, errors.New("reset"), 0, 10 * time.Second},
		{"the last", int(^uint(0) >> 1), errors.New("reset"), 0, 10 * time.Second},
		{"a refusal", 0, refusal, 5 * time.Second, 10 * time.Second},
		{"many refusals", 1000, refusal, 5 * time.Second, time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			least, most := c.high, time.Duration(0)
			for range 2000 {
				d := usualPace.wait(c.failures, c.err)
				least, most = min(least, d), max(most, d)
			}
			if least < c.low || most > c.high {
				t.Errorf("waits are from %v to %v, want within %v to %v", least, most, c.low, c.high)
			}
			if tenth := (c.high - c.low) / 10; least > c.low+tenth || most < c.high-tenth { // spread over all of it
				t.Errorf("waits are from %v to %v, want all of %v to %v", least, most, c.low, c.high)
			}
		})
	}
}
