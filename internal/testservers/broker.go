//go:build unix

package testservers

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// Broker is a RabbitMQ that belongs to one test, which may do to it what it likes, from one goroutine at a time. Its
// address stays the same throughout.
type Broker struct {
	*Rabbit
	node *node
}

// PrivateRabbitMQ starts a broker for the test alone, with settings of rabbitmq.conf on top of the usual:
// "consumer_timeout=2000". It takes some seconds.
func PrivateRabbitMQ(t testing.TB, settings ...string) *Broker {
	t.Helper()
	notInShort(t)
	folder := privateFolder(t)
	ctx, cancel := context.WithTimeout(t.Context(), setupTime)
	defer cancel()
	server, err := newNode(ctx, folder, settings...)
	if err != nil {
		t.Fatalf("testservers: a RabbitMQ of the test's own: %v", err)
	}
	b := &Broker{Rabbit: &Rabbit{url: server.address()}, node: server}
	t.Cleanup(server.discard)
	b.Start(t)
	return b
}

// Own is a RabbitMQ that belongs to a program which is no test.
type Own struct {
	URL string
	// PID is the server's process.
	PID  int
	node *node
	tidy func()
}

// OwnRabbitMQ starts a broker for the program alone. It ends with Close, and with the program's process.
func OwnRabbitMQ(ctx context.Context, settings ...string) (*Own, error) {
	folder, err := os.MkdirTemp("", "leasebus-testserver-")
	if err != nil {
		return nil, fmt.Errorf("RabbitMQ: %w", err)
	}
	release, err := guard(folder)
	if err != nil {
		return nil, fmt.Errorf("RabbitMQ: %w", errors.Join(err, os.RemoveAll(folder)))
	}
	o := &Own{tidy: func() {
		_ = os.RemoveAll(folder) // it is a temporary one
		release()
	}}
	if err := os.Chmod(folder, 0o755); err != nil {
		o.tidy()
		return nil, fmt.Errorf("RabbitMQ: %w", err)
	}
	if o.node, err = newNode(ctx, folder, settings...); err == nil {
		err = o.node.start(ctx)
	}
	if err != nil {
		o.Close()
		return nil, fmt.Errorf("RabbitMQ: %w", err)
	}
	o.URL, o.PID = o.node.address(), o.node.running.cmd.Process.Pid
	return o, nil
}

// Close ends the broker and deletes its files.
func (o *Own) Close() {
	if o.node != nil {
		o.node.discard()
	}
	o.tidy()
}

// Start starts the broker after a stop and returns when it answers.
func (b *Broker) Start(t testing.TB) {
	t.Helper()
	if err := b.node.start(context.Background()); err != nil {
		t.Fatalf("testservers: start RabbitMQ: %v", err)
	}
}

// Stop stops the broker in order: clients are told.
func (b *Broker) Stop(t testing.TB) {
	t.Helper()
	b.stop(t, syscall.SIGTERM)
}

// Kill ends the broker by SIGKILL; the next start recovers.
func (b *Broker) Kill(t testing.TB) {
	t.Helper()
	b.stop(t, syscall.SIGKILL)
}

func (b *Broker) stop(t testing.TB, how syscall.Signal) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	if err := b.node.stop(ctx, how); err != nil {
		t.Errorf("testservers: stop RabbitMQ: %v", err)
	}
}

// Ctl runs rabbitmqctl and returns what it prints.
func (b *Broker) Ctl(t testing.TB, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	out, err := b.node.ctl(ctx, args...)
	if err != nil {
		t.Fatalf("testservers: rabbitmqctl %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// MemoryAlarm puts the broker's memory alarm on, or off: while it is on, a connection that publishes is blocked. What it
// publishes first may still get through.
func (b *Broker) MemoryAlarm(t testing.TB, on bool) {
	t.Helper()
	limit := "0.4"
	if on {
		limit = "0"
	}
	b.Ctl(t, "set_vm_memory_high_watermark", limit)
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	if err := eventually(ctx, func() error {
		if alarms := b.Ctl(t, "eval", "rabbit_alarm:get_alarms()."); strings.Contains(alarms, "memory") != on {
			return fmt.Errorf("the alarms are %s", strings.TrimSpace(alarms))
		}
		return nil
	}); err != nil {
		t.Fatalf("testservers: memory alarm %v: %v", on, err)
	}
}

// QueueInfo is what the broker knows of a queue.
type QueueInfo struct {
	Name      string `json:"name"`
	Ready     int    `json:"messages_ready"`          //nolint:tagliatelle // rabbitmqctl says so
	Unacked   int    `json:"messages_unacknowledged"` //nolint:tagliatelle // the same
	Consumers int    `json:"consumers"`
}

// Queues are the broker's queues by name. The broker counts now and then, not at once.
func (b *Broker) Queues(t testing.TB) map[string]QueueInfo {
	t.Helper()
	var list []QueueInfo
	out := b.Ctl(t, "list_queues", "--formatter", "json", "name", "messages_ready", "messages_unacknowledged", "consumers")
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("testservers: rabbitmqctl list_queues: %v\n%s", err, out)
	}
	queues := make(map[string]QueueInfo, len(list))
	for _, q := range list {
		queues[q.Name] = q
	}
	return queues
}

// CloseConnections closes all connections from the broker's side, telling the clients why, and returns how many those
// were.
func (b *Broker) CloseConnections(t testing.TB, reason string) (n int) {
	t.Helper()
	for lines := bufio.NewScanner(strings.NewReader(b.Ctl(t, "list_connections", "pid"))); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "<") {
			n++
		}
	}
	b.Ctl(t, "close_all_connections", reason)
	return n
}

// CloseChannels closes all channels on which something consumes the queue, as the broker does when a client breaks the
// protocol: by an exception on the channel, which RabbitMQ 3.10 often lets the connection die of. It returns how many
// those were.
func (b *Broker) CloseChannels(t testing.TB, queue string) int {
	t.Helper()
	out := b.Ctl(t, "eval", fmt.Sprintf(`
		{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<%q>>)),
		Channels = lists:usort([element(1, Consumer) || Consumer <- rabbit_amqqueue:consumers(Queue)]),
		[exit(Channel, {amqp_error, precondition_failed, "closed by the test", none}) || Channel <- Channels],
		length(Channels).`, queue))
	n, err := strconv.Atoi(strings.TrimSpace(out))
	if err != nil {
		t.Fatalf("testservers: close the channels of queue %s: %s", queue, out)
	}
	return n
}
