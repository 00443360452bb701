package amqp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Defaults of a [Broker].
const (
	DefaultHeartbeat      = 10 * time.Second
	DefaultConfirmWindow  = 256
	DefaultPublishTimeout = 30 * time.Second
)

const (
	maxConfirmWindow = 1024
	maxHeartbeat     = 5 * time.Minute
)

// Option changes what [Dial] makes.
type Option interface{ apply(*options) }

type optionFunc func(*options)

func (f optionFunc) apply(o *options) { f(o) }

type options struct {
	name           string
	heartbeat      time.Duration // 0 = the URL's, or the default
	tls            *tls.Config
	credentials    func(context.Context) (username, password string, err error)
	window         int
	publishTimeout time.Duration
	exchange       Exchange
	classic        bool
	asItIs         bool
	maxPayload     int
	consume        consumeOptions
	log            *slog.Logger
	pace           pace
	err            error
}

// WithName sets the name under which RabbitMQ lists the connections. Up to 200 bytes. Default host:pid.
func WithName(name string) Option {
	return optionFunc(func(o *options) {
		o.name = name
		if name == "" || len(name) > 200 {
			o.refusef("WithName: %q is %d bytes; allowed are 1 to 200", name, len(name))
		}
	})
}

// WithHeartbeat sets the interval after which each side of an idle connection says that it lives. From 1 s to 5 min, in
// whole seconds; it wins over the URL's heartbeat, and a shorter one that the server asks for wins over both. A
// connection from which nothing has come for twice the interval is given up. Default [DefaultHeartbeat].
func WithHeartbeat(d time.Duration) Option {
	return optionFunc(func(o *options) {
		o.heartbeat = d
		if d < time.Second || d > maxHeartbeat || d%time.Second != 0 {
			o.refusef("WithHeartbeat: %v is out of range; allowed are whole seconds from 1s to %v", d, maxHeartbeat)
		}
	})
}

// WithTLS sets how connections are encrypted. Without it an amqps URL means TLS 1.2 or newer, with the system's
// authorities and the URL's certfile, keyfile, cacertfile and server_name_indication. Refused with an amqp URL.
func WithTLS(config *tls.Config) Option {
	return optionFunc(func(o *options) {
		o.tls = config
		if config == nil {
			o.refusef("WithTLS: the configuration is nil")
		}
	})
}

// WithCredentials asks f for the user and password of each new connection, in place of the URL's: for secrets that
// change. An error of f counts as a failed attempt to connect.
func WithCredentials(f func(ctx context.Context) (username, password string, err error)) Option {
	return optionFunc(func(o *options) {
		o.credentials = f
		if f == nil {
			o.refusef("WithCredentials: the function is nil")
		}
	})
}

// WithConfirmWindow sets how many messages may be published and not yet confirmed. From 1 to 1024: more waits longer
// for nothing. Default [DefaultConfirmWindow].
func WithConfirmWindow(n int) Option {
	return optionFunc(func(o *options) {
		o.window = n
		if n < 1 || n > maxConfirmWindow {
			o.refusef("WithConfirmWindow: %d is out of range; allowed is 1 to %d", n, maxConfirmWindow)
		}
	})
}

// WithPublishTimeout sets how long a publish goes on without any progress: while there is no connection, while RabbitMQ
// takes nothing, while it confirms nothing. More than 0. A context that ends sooner wins. Default
// [DefaultPublishTimeout].
func WithPublishTimeout(d time.Duration) Option {
	return optionFunc(func(o *options) {
		o.publishTimeout = d
		if d <= 0 {
			o.refusef("WithPublishTimeout: %v is out of range; allowed is more than 0", d)
		}
	})
}

// WithExchange publishes to an exchange instead of straight to the queues, so that others can bind queues of their own
// to it. The routing key is the name of the message's queue, and that queue is bound under it. A delayed message goes
// to its queue alone: RabbitMQ returns it there when its time has come.
func WithExchange(name, kind string) Option {
	return optionFunc(func(o *options) {
		o.exchange = Exchange{Name: name, Kind: kind}
		if name == "" || len(name) > leasebus.MaxNameBytes {
			o.refusef("WithExchange: the name %q is %d bytes; allowed are 1 to %d", name, len(name), leasebus.MaxNameBytes)
		}
		switch kind {
		case "direct", "topic", "fanout", "headers":
		default:
			o.refusef("WithExchange: kind %q is unknown; allowed are direct, topic, fanout and headers", kind)
		}
	})
}

// WithClassicQueues declares classic queues instead of quorum queues: for a single node, or where a few lost messages
// matter less than disk writes.
func WithClassicQueues() Option { return optionFunc(func(o *options) { o.classic = true }) }

// WithExistingTopology declares nothing: queues and exchanges are made by others, and taken as they are if they exist.
func WithExistingTopology() Option { return optionFunc(func(o *options) { o.asItIs = true }) }

// WithMaxPayload sets the largest payload that is taken, in bytes. At least 1; RabbitMQ's own limit (max_message_size)
// should not be less. Default [leasebus.DefaultMaxPayload].
func WithMaxPayload(bytes int) Option {
	return optionFunc(func(o *options) {
		o.maxPayload = bytes
		if bytes < 1 {
			o.refusef("WithMaxPayload: %d is out of range; allowed is 1 or more", bytes)
		}
	})
}

// WithLogger sets where the broker tells what happens. Default [slog.Default]. Payloads and passwords are never logged.
func WithLogger(log *slog.Logger) Option {
	return optionFunc(func(o *options) { o.log = log })
}

func (o *options) refusef(format string, args ...any) {
	o.err = errors.Join(o.err, fmt.Errorf("amqp: "+format, args...))
}

func optionsOf(opts []Option) (options, error) {
	o := options{
		window: DefaultConfirmWindow, publishTimeout: DefaultPublishTimeout,
		maxPayload: leasebus.DefaultMaxPayload, consume: consumeOptions{crashLimit: DefaultCrashLimit}, pace: usualPace,
	}
	for _, opt := range opts {
		opt.apply(&o)
	}
	if o.name == "" {
		host, _ := os.Hostname() // a connection may be nameless
		o.name = fmt.Sprintf("%.150s:%d", host, os.Getpid())
	}
	if o.log == nil {
		o.log = slog.Default()
	}
	return o, o.err
}
