//go:build unix

package testservers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// nodeStartTimeout allows for a busy machine: a start takes four seconds of a processor.
const nodeStartTimeout = 3 * time.Minute

// nodeSettings suit tests, in the form of rabbitmq.conf.
var nodeSettings = []string{
	"disk_free_limit.absolute=1MB", "log.file=false", "log.console=true", "log.console.level=warning",
}

// nodeTerms are settings that rabbitmq.conf does not know: how often the broker looks for consumers that take too long.
const nodeTerms = "[{rabbit,[{channel_tick_interval,1000}]}].\n"

// node is a RabbitMQ server started from its scripts. It belongs to one goroutine at a time.
type node struct {
	folder               string // everything that it writes
	scripts              string
	servant              servant
	port, between, names int // of clients, of Erlang's own protocol, of the program that knows the latter
	mapper               *process
	running              *process
}

// newNode makes the files of a broker; it does not start it.
func newNode(ctx context.Context, folder string, settings ...string) (*node, error) {
	scripts, err := installed(ctx, rabbitScripts, "rabbitmq-server")
	if err != nil {
		return nil, err
	}
	who, err := findServant()
	if err != nil {
		return nil, err
	}
	n := &node{folder: folder, scripts: scripts, servant: who}
	for _, port := range []*int{&n.port, &n.between, &n.names} {
		if *port, err = freePort(); err != nil {
			return nil, err
		}
	}
	lines := slices.Concat([]string{fmt.Sprintf("listeners.tcp.1=127.0.0.1:%d", n.port)}, nodeSettings, settings)
	for name, text := range map[string]string{
		"rabbitmq.conf":   strings.Join(lines, "\n") + "\n",
		"advanced.config": nodeTerms,
		"plugins":         "[].\n",
	} {
		if err := errors.Join(os.WriteFile(n.path(name), []byte(text), 0o600), who.own(n.path(name))); err != nil {
			return nil, err
		}
	}
	return n, who.own(folder)
}

// sharedRabbitMQ is the broker that test processes share where there is no other.
var sharedRabbitMQ = kind{
	name: "RabbitMQ",
	new:  func(ctx context.Context, folder string) (kept, error) { return newNode(ctx, folder) },
	ping: pingRabbit,
	end:  syscall.SIGTERM,
}

func (n *node) path(name string) string { return filepath.Join(n.folder, name) }
func (n *node) address() string         { return fmt.Sprintf("amqp://guest:guest@127.0.0.1:%d/", n.port) }
func (n *node) ended() <-chan struct{}  { return n.running.done }
func (n *node) log() string             { return n.path("rabbitmq.log") }

// start starts the broker and waits until it answers.
func (n *node) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, nodeStartTimeout, errors.New("RabbitMQ did not start in time"))
	defer cancel()
	if err := n.launch(ctx); err != nil {
		return err
	}
	err := eventually(ctx, func() error {
		select {
		case <-n.running.done:
			cancel()
			return fmt.Errorf("rabbitmq-server ended: %w", n.running.err)
		default:
			return pingRabbit(ctx, n.address())
		}
	})
	if err != nil {
		return fmt.Errorf("%w\n%s", err, tail(n.log()))
	}
	return nil
}

// launch starts the program that knows names first, in the foreground, and waits for it: where there is none, Erlang would
// start one that outlives everything.
func (n *node) launch(ctx context.Context) (err error) {
	if n.mapper, err = n.spawn("epmd.pid", "epmd", "-address", "127.0.0.1", "-port", strconv.Itoa(n.names)); err != nil {
		return err
	}
	if err := eventually(ctx, func() error {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", n.names))
		if err != nil {
			return err
		}
		return conn.Close()
	}); err != nil {
		return fmt.Errorf("epmd: %w", err)
	}
	n.running, err = n.spawn("rabbitmq.pid", filepath.Join(n.scripts, "rabbitmq-server"), "-noinput")
	return err
}

// spawn starts a program whose output goes to the log, and leaves its process id for [guard].
func (n *node) spawn(pidFile, program string, args ...string) (*process, error) {
	log, err := os.OpenFile(n.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := n.command(context.Background(), program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	p, err := run(cmd)
	if err != nil {
		return nil, err
	}
	return p, os.WriteFile(n.path(pidFile), []byte(strconv.Itoa(cmd.Process.Pid)+"\n"), 0o644)
}

// command is a program in the broker's surroundings, which share nothing with those of another broker, not even the
// program by which Erlang's nodes find each other: so all can have the same name.
func (n *node) command(ctx context.Context, program string, args ...string) *exec.Cmd {
	cmd := n.servant.command(ctx, program, args...)
	cmd.Env = append(cmd.Env,
		"HOME="+n.folder, // for the cookie
		"ERL_EPMD_ADDRESS=127.0.0.1",
		fmt.Sprintf("ERL_EPMD_PORT=%d", n.names),
		fmt.Sprintf("RABBITMQ_DIST_PORT=%d", n.between),
		"RABBITMQ_NODENAME=leasebus@localhost",
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
		"RABBITMQ_ALLOW_INPUT=1", // the script becomes the server, instead of waiting for it
		"RABBITMQ_CONF_ENV_FILE="+n.path("none"),
		"RABBITMQ_CONFIG_FILE="+n.path("rabbitmq.conf"),
		"RABBITMQ_ADVANCED_CONFIG_FILE="+n.path("advanced.config"),
		"RABBITMQ_ENABLED_PLUGINS_FILE="+n.path("plugins"),
		"RABBITMQ_MNESIA_BASE="+n.path("data"),
		"RABBITMQ_LOG_BASE="+n.path("logs"),
		"RABBITMQ_GENERATED_CONFIG_DIR="+n.path("generated"),
		"RABBITMQ_PLUGINS_EXPAND_DIR="+n.path("expanded"),
	)
	return cmd
}

// stop ends the broker: SIGTERM in order, SIGKILL as a crash. It returns when all its processes are gone.
func (n *node) stop(ctx context.Context, how syscall.Signal) (err error) {
	if n.running != nil {
		err = n.running.stop(ctx, how)
		n.running = nil
	}
	if n.mapper != nil {
		_ = n.mapper.stop(context.WithoutCancel(ctx), syscall.SIGKILL) // it has nothing to put in order
		n.mapper = nil
	}
	return err
}

// discard ends everything, in no order.
func (n *node) discard() { _ = n.stop(context.Background(), syscall.SIGKILL) }

// ctl runs rabbitmqctl.
func (n *node) ctl(ctx context.Context, args ...string) (string, error) {
	if n.running == nil {
		return "", errors.New("the broker is stopped")
	}
	cmd := n.command(ctx, filepath.Join(n.scripts, "rabbitmqctl"), append([]string{"--quiet"}, args...)...)
	out, err := cmd.Output()
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		err = fmt.Errorf("%w\n%s%s", err, out, ended.Stderr)
	}
	return string(out), err
}

// dialRabbit opens a connection, within a bound.
func dialRabbit(ctx context.Context, url string) (*amqp.Connection, error) {
	const bound = 5 * time.Second
	return amqp.DialConfig(url, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{Timeout: bound}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return conn, conn.SetDeadline(time.Now().Add(bound)) // the client lifts it when the connection is open
	}})
}

// hangUp closes a connection, which a broker that blocks it may never answer.
func hangUp(conn *amqp.Connection) { _ = conn.CloseDeadline(time.Now().Add(5 * time.Second)) }

func pingRabbit(ctx context.Context, url string) error {
	conn, err := dialRabbit(ctx, url)
	if err != nil {
		return err
	}
	hangUp(conn)
	return nil
}
