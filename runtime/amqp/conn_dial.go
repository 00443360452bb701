package amqp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// connectTimeout bounds one attempt to connect, handshakes included, unless the URL's connection_timeout does.
const connectTimeout = 10 * time.Second

// target is the server and what it is told about us.
type target struct {
	uri  amqp091.URI
	addr string
	tls  *tls.Config // nil = in the clear
}

// targetOf reads the URL, and what options leave to it. Its errors do not hold the URL, which may hold a password.
func targetOf(rawURL string, o *options) (*target, error) {
	uri, err := amqp091.ParseURI(rawURL)
	if err != nil {
		var fault *url.Error
		if errors.As(err, &fault) {
			err = errors.New("it is not a URL; user and password need percent-encoding")
		}
		return nil, fmt.Errorf("amqp: the connection URL cannot be used: %w; wanted is amqp:// or amqps://user:password@host:port/vhost", err)
	}
	if o.heartbeat == 0 {
		if o.heartbeat, err = heartbeatOf(rawURL); err != nil {
			return nil, err
		}
	}
	t := &target{uri: uri, addr: net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port))}
	if uri.Scheme != "amqps" {
		if o.tls != nil {
			return nil, errors.New("amqp: WithTLS needs an amqps URL; the given one is amqp")
		}
		return t, nil
	}
	if t.tls, err = tlsOf(uri, o.tls); err != nil {
		return nil, err
	}
	return t, nil
}

// heartbeatOf reads the URL's heartbeat, in seconds, which the library keeps to itself.
func heartbeatOf(rawURL string) (time.Duration, error) {
	u, err := url.Parse(rawURL)
	if err != nil { // the library has parsed it already
		return 0, errors.New("amqp: the connection URL cannot be used")
	}
	if !u.Query().Has("heartbeat") {
		return DefaultHeartbeat, nil
	}
	given := u.Query().Get("heartbeat")
	seconds, err := strconv.Atoi(given)
	if d := time.Duration(seconds) * time.Second; err == nil && d >= time.Second && d <= maxHeartbeat {
		return d, nil
	}
	return 0, fmt.Errorf("amqp: heartbeat %q of the connection URL is out of range; allowed are 1 to %d seconds", given, int(maxHeartbeat.Seconds()))
}

func tlsOf(uri amqp091.URI, given *tls.Config) (*tls.Config, error) {
	if given != nil {
		config := given.Clone()
		if config.ServerName == "" {
			config.ServerName = uri.Host
		}
		return config, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: uri.Host}
	if uri.ServerName != "" {
		config.ServerName = uri.ServerName
	}
	if uri.CACertFile != "" {
		pem, err := os.ReadFile(uri.CACertFile)
		if err != nil {
			return nil, fmt.Errorf("amqp: cacertfile of the connection URL: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("amqp: cacertfile %s of the connection URL holds no certificate in PEM", uri.CACertFile)
		}
	}
	if uri.CertFile != "" || uri.KeyFile != "" {
		pair, err := tls.LoadX509KeyPair(uri.CertFile, uri.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("amqp: certfile and keyfile of the connection URL: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// connect opens one connection.
func (l *link) connect(ctx context.Context) (*epoch, error) {
	limit := connectTimeout
	if given := l.target.uri.ConnectionTimeout; given > 0 {
		limit = time.Duration(given) * time.Millisecond
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer within %v", limit))
	defer cancel()
	sasl, err := l.login(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := l.dial(ctx)
	if err != nil {
		return nil, err
	}
	// The library's handshake knows no context.
	stop := context.AfterFunc(ctx, conn.cut)
	defer stop()
	about := amqp091.Table{
		"product": "leasebus", "platform": "Go",
		"connection_name": l.options.name + " " + l.purpose,
	}
	for i := range sasl {
		sasl[i] = askingWhy{sasl[i], about}
	}
	c, err := amqp091.Open(conn, amqp091.Config{
		SASL: sasl, Vhost: l.target.uri.Vhost, Heartbeat: l.options.heartbeat, Locale: "en_US",
		ChannelMax: l.target.uri.ChannelMax, FrameSize: frameSize, Properties: about,
	})
	if err == nil && c.Config.Heartbeat > 0 {
		err = conn.live(2 * c.Config.Heartbeat)
	}
	if err != nil {
		conn.cut()
		<-conn.sent
		return nil, fmt.Errorf("amqp: connect to %s, virtual host %q: %w", l.target.addr, l.target.uri.Vhost, either(ctx, err))
	}
	return newEpoch(l.epochs.Add(1), c, conn), nil
}

// askingWhy asks the server to say so when it refuses a login. Otherwise it only closes the connection, which looks like
// a loss, and a loss would look like a refusal. The library sets the capabilities that the server is told of before it
// asks for the response.
type askingWhy struct {
	amqp091.Authentication
	about amqp091.Table
}

func (a askingWhy) Response() string {
	if capabilities, ok := a.about["capabilities"].(amqp091.Table); ok {
		capabilities["authentication_failure_close"] = true
	}
	return a.Authentication.Response()
}

// either is why ctx ended, if it did: what failed then failed for that.
func either(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var guess *amqp091.Error
	if errors.As(err, &guess) && !guess.Server {
		return errHandshake // what the library makes of it is a guess
	}
	return err
}

var errHandshake = errors.New("the connection was lost during the handshake")

// frameSize is the largest frame that we take; RabbitMQ's default.
const frameSize = 128 << 10

func (l *link) dial(ctx context.Context) (*netConn, error) {
	tcp, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.target.addr)
	if err != nil {
		return nil, fmt.Errorf("amqp: connect: %w", either(ctx, err))
	}
	conn := tcp
	if l.target.tls != nil {
		client := tls.Client(tcp, l.target.tls)
		if err := client.HandshakeContext(ctx); err != nil {
			_ = tcp.Close()
			return nil, fmt.Errorf("amqp: connect to %s: %w", l.target.addr, either(ctx, err))
		}
		conn = client
	}
	return newNetConn(conn, tcp), nil
}

// login is how we say who we are.
func (l *link) login(ctx context.Context) ([]amqp091.Authentication, error) {
	uri := l.target.uri
	if l.options.credentials != nil {
		user, password, err := l.options.credentials(ctx)
		if err != nil {
			return nil, fmt.Errorf("amqp: connect to %s: credentials: %w", l.target.addr, err)
		}
		uri.Username, uri.Password = user, password
	}
	var ways []amqp091.Authentication
	for _, way := range uri.AuthMechanism {
		switch way {
		case "plain", "PLAIN":
			ways = append(ways, uri.PlainAuth())
		case "amqplain", "AMQPLAIN":
			ways = append(ways, uri.AMQPlainAuth())
		case "external", "EXTERNAL":
			ways = append(ways, &amqp091.ExternalAuth{})
		default:
			return nil, fmt.Errorf("amqp: auth_mechanism %q of the connection URL is unknown; allowed are plain, amqplain and external", way)
		}
	}
	if ways == nil {
		ways = append(ways, uri.PlainAuth())
	}
	return ways, nil
}
