package amqp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// mute stands before a server and lets everything through that clients say, but, once it is muted, nothing that the
// server answers.
type mute struct {
	listener net.Listener
	answers  sync.RWMutex // held by who mutes
	tasks    sync.WaitGroup
	mu       sync.Mutex
	open     []net.Conn
}

func newMute(t testing.TB, upstream string) *mute {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &mute{listener: listener}
	m.tasks.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", upstream)
			if err != nil {
				_ = client.Close()
				return
			}
			m.mu.Lock()
			m.open = append(m.open, client, server)
			m.mu.Unlock()
			m.tasks.Go(func() { _, _ = io.Copy(server, client) })
			m.tasks.Go(func() {
				buffer := make([]byte, 32<<10)
				for {
					n, err := server.Read(buffer)
					m.answers.RLock()
					_, failed := client.Write(buffer[:n])
					m.answers.RUnlock()
					if err != nil || failed != nil {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		m.cut()
		m.tasks.Wait()
	})
	return m
}

func (m *mute) cut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, conn := range m.open {
		_ = conn.Close()
	}
	m.open = nil
}

// warmUp publishes a first message: after it, the next one is sent at once.
func warmUp(t *testing.T, b *amqp.Broker, queue string) {
	t.Helper()
	if _, err := publish(t.Context(), b, outgoing(queue, 1)); err != nil {
		t.Fatal(err)
	}
}

// Ten thousand messages have reached the server, and no confirm has come back, when the connection is lost. None may be
// called refused, for all of them are stored; and none confirmed. Published again, each is there under its own id.
func TestPublish_S41_C7_1_C7_2_cut_with_10k_in_flight(t *testing.T) {
	t.Parallel()
	const brokers, window = 10, 1024
	rabbit := testservers.RabbitMQ(t)
	front := newMute(t, rabbit.Addr())
	queue := rabbit.Queue(t, "cut")
	rabbit.Do(t, func(ch *amqp091.Channel) error {
		_, err := ch.QueueDeclare(queue, true, false, false, false, nil)
		return err
	})
	url := rabbit.At(front.listener.Addr().String()).URL()
	var publishers [brokers]*amqp.Broker
	for i := range publishers {
		publishers[i] = dial(t, url, amqp.WithConfirmWindow(window))
		warmUp(t, publishers[i], queue)
	}
	front.answers.Lock()
	var all sync.WaitGroup
	for i := range publishers {
		all.Go(func() {
			out := outgoing(queue, window)
			receipts, err := publish(t.Context(), publishers[i], out)
			if !errors.Is(err, leasebus.ErrOutcomeUnknown) {
				t.Errorf("got %v, want that it is unknown", err)
			}
			var again []leasebus.Outgoing
			for at, r := range receipts {
				if !errors.Is(r.Err, leasebus.ErrOutcomeUnknown) || errors.Is(r.Err, amqp.ErrRefused) {
					t.Errorf("message %d: %v, want that it is unknown", at, r.Err)
					return
				}
				again = append(again, out[at])
			}
			if _, err := publish(t.Context(), publishers[i], again); err != nil {
				t.Errorf("published again: %v", err)
			}
		})
	}
	until(t, "all have reached the server", func() bool { return rabbit.Ready(t, queue) == brokers*(window+1) })
	front.cut()
	front.answers.Unlock()
	all.Wait()
	if n := rabbit.Ready(t, queue); n != brokers*(2*window+1) {
		t.Errorf("%d messages are stored, want each of %d twice and %d once", n, brokers*window, brokers)
	}
}

// The connection is cut over and over amid publishing: what is confirmed is stored, what is unknown is published again
// with the same id, and in the end every id is there.
func TestPublish_S41_S54_C12_3_cuts_amid_publishing(t *testing.T) {
	t.Parallel()
	shared := testservers.RabbitMQ(t)
	proxy, rabbit := shared.Proxy(t)
	b := dial(t, rabbit.URL(), amqp.QuickPace())
	queue := declared(t, shared, b, "cuts").Queue
	var confirmed, unknown atomic.Int64
	var stop atomic.Bool
	var callers sync.WaitGroup
	var mu sync.Mutex
	wanted := make(map[string]bool)
	for range 8 {
		callers.Go(func() {
			for !stop.Load() {
				pending := outgoing(queue, 20)
				mu.Lock()
				for _, out := range pending {
					wanted[out.ID.String()] = true
				}
				mu.Unlock()
				for len(pending) > 0 {
					receipts, _ := publish(t.Context(), b, pending)
					var again []leasebus.Outgoing
					for i, r := range receipts {
						switch {
						case r.Err == nil:
							confirmed.Add(1)
						case errors.Is(r.Err, leasebus.ErrOutcomeUnknown):
							unknown.Add(1)
							again = append(again, pending[i])
						default:
							t.Errorf("message: %v, want it stored or unknown", r.Err)
						}
					}
					pending = again
				}
			}
		})
	}
	for cuts := 0; cuts < 8 || unknown.Load() == 0; cuts++ {
		before := confirmed.Load()
		until(t, "publishing goes on", func() bool { return confirmed.Load() > before+40 })
		proxy.Cut()
	}
	stop.Store(true)
	callers.Wait()
	for _, d := range shared.Take(t, queue) {
		delete(wanted, d.MessageId)
	}
	if len(wanted) > 0 {
		t.Errorf("%d messages that were confirmed are not stored", len(wanted))
	}
}

func TestPublish_S54_waits_for_the_connection(t *testing.T) {
	t.Parallel()
	shared := testservers.RabbitMQ(t)
	proxy, rabbit := shared.Proxy(t)
	b := dial(t, rabbit.URL())
	hasty := dial(t, rabbit.URL(), amqp.WithPublishTimeout(100*time.Millisecond))
	queue := declared(t, shared, b, "waits").Queue
	proxy.Down()

	for _, each := range []*amqp.Broker{b, hasty} {
		until(t, "the loss is noticed", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			_, err := publish(ctx, each, outgoing(queue, 1))
			return errors.Is(err, amqp.ErrDisconnected)
		})
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, errors.New("enough"))
	defer cancel()
	for _, c := range []struct {
		name string
		b    *amqp.Broker
		ctx  context.Context
		want string
	}{{"by its context", b, ctx, "enough"}, {"by the publish timeout", hasty, t.Context(), "100ms"}} {
		begun := time.Now()
		receipts, err := publish(c.ctx, c.b, outgoing(queue, 10))
		for i, r := range receipts {
			if !errors.Is(r.Err, amqp.ErrDisconnected) || errors.Is(r.Err, leasebus.ErrOutcomeUnknown) {
				t.Errorf("%s: message %d: %v, want %v", c.name, i, r.Err, amqp.ErrDisconnected)
			}
		}
		if err == nil || !strings.Contains(err.Error(), c.want) || time.Since(begun) > 5*time.Second {
			t.Errorf("%s: %v after %v, want an error with %q", c.name, err, time.Since(begun), c.want)
		}
	}

	var done sync.WaitGroup
	done.Go(func() {
		if _, err := publish(t.Context(), b, outgoing(queue, 10)); err != nil {
			t.Errorf("published while there was no connection: %v", err)
		}
	})
	proxy.Up(t)
	done.Wait()
	if n := shared.Ready(t, queue); n != 10 {
		t.Errorf("%d messages are stored, want the 10 that waited", n)
	}
}

// F10: a connection that is open and dead.
func TestPublish_C7_1_silence(t *testing.T) {
	t.Parallel()
	shared := testservers.RabbitMQ(t)
	proxy, rabbit := shared.Proxy(t)
	b := dial(t, rabbit.URL(), amqp.WithHeartbeat(time.Second))
	queue := declared(t, shared, b, "silence").Queue
	warmUp(t, b, queue)
	proxy.Silence()
	begun := time.Now()
	receipts, err := publish(t.Context(), b, outgoing(queue, 10))
	if !errors.Is(err, leasebus.ErrOutcomeUnknown) || time.Since(begun) > 10*time.Second {
		t.Errorf("got %v after %v, want that it is unknown, after two heartbeats", err, time.Since(begun))
	}
	for i, r := range receipts {
		if !errors.Is(r.Err, leasebus.ErrOutcomeUnknown) {
			t.Errorf("message %d: %v", i, r.Err)
		}
	}
	proxy.Speak()
	if _, err := publish(t.Context(), b, outgoing(queue, 1)); err != nil {
		t.Errorf("after the silence: %v", err)
	}
}

// A caller that gives up leaves messages on their way behind. Their places are free again when they are confirmed.
func TestPublish_S41_C7_1_gives_up_on_confirms(t *testing.T) {
	t.Parallel()
	shared := testservers.RabbitMQ(t)
	front := newMute(t, shared.Addr())
	url := shared.At(front.listener.Addr().String()).URL()
	b := dial(t, url, amqp.WithConfirmWindow(4), amqp.WithPublishTimeout(2*time.Second))
	queue := declared(t, shared, b, "gives-up").Queue
	warmUp(t, b, queue)
	front.answers.Lock()
	receipts, err := publish(t.Context(), b, outgoing(queue, 6))
	if err == nil || !strings.Contains(err.Error(), "2s") {
		t.Errorf("got %v, want the publish timeout", err)
	}
	for i, r := range receipts {
		// Four fit into the window; the others were not sent.
		if sent := errors.Is(r.Err, leasebus.ErrOutcomeUnknown); sent != (i < 4) || r.Err == nil {
			t.Errorf("message %d: %v", i, r.Err)
		}
	}
	front.answers.Unlock()
	if _, err := publish(t.Context(), b, outgoing(queue, 20)); err != nil {
		t.Errorf("when the server answers again: %v", err)
	}
	if n := shared.Ready(t, queue); n != 25 {
		t.Errorf("%d messages are stored, want the first, the 4 that were given up, and 20", n)
	}
}

// F9: RabbitMQ says that it blocks only to who publishes, and then reads nothing more.
func TestPublish_S56_C7_6_C8_8_blocked(t *testing.T) {
	t.Parallel()
	rabbit := testservers.PrivateRabbitMQ(t)
	b := dial(t, rabbit.URL())
	queue := declared(t, rabbit.Rabbit, b, "blocked").Queue
	stored := 0
	for round := range 4 {
		rabbit.MemoryAlarm(t, true)
		deadline := time.Second
		for i := range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), deadline)
			begun := time.Now()
			_, err := publish(ctx, b, outgoing(queue, 1))
			if took := time.Since(begun); took > deadline+5*time.Second {
				t.Errorf("round %d: publish %d took %v, want its context's %v", round, i, took, deadline)
			}
			switch unknown := errors.Is(err, leasebus.ErrOutcomeUnknown); {
			case err == nil || unknown && i == 0: // the first may get through, or be what it is told about
				stored++
			case unknown || !errors.Is(err, amqp.ErrBlocked) || !strings.Contains(err.Error(), "low on memory"):
				t.Errorf("round %d: publish %d: %v, want that it was not sent, because RabbitMQ blocks", round, i, err)
			}
			cancel()
			deadline = 50 * time.Millisecond
		}
		if round%2 == 1 { // the connection is lost meanwhile
			rabbit.CloseConnections(t, "round")
		}
		rabbit.MemoryAlarm(t, false)
		if _, err := publish(t.Context(), b, outgoing(queue, 1)); err != nil {
			t.Errorf("round %d: published by itself when RabbitMQ took messages again: %v", round, err)
		}
	}
	if n := rabbit.Ready(t, queue); n < 4 || n > 4+stored {
		t.Errorf("%d messages are stored, want 4, and at most %d that may have been", n, stored)
	}
}

func TestPublish_S54_C7_13_a_broker_that_was_killed(t *testing.T) {
	t.Parallel()
	rabbit := testservers.PrivateRabbitMQ(t)
	b := dial(t, rabbit.URL())
	queue := declared(t, rabbit.Rabbit, b, "killed").Queue
	before := outgoing(queue, 300)
	if _, err := publish(t.Context(), b, before); err != nil {
		t.Fatal(err)
	}
	rabbit.Kill(t)
	var done sync.WaitGroup
	meanwhile := outgoing(queue, 50)
	done.Go(func() {
		for pending := meanwhile; len(pending) > 0; {
			receipts, _ := publish(t.Context(), b, pending)
			var again []leasebus.Outgoing
			for i, r := range receipts {
				if r.Err != nil {
					again = append(again, pending[i])
				}
			}
			pending = again
		}
	})
	rabbit.Start(t)
	done.Wait()
	stored := make(map[string]bool)
	for _, d := range rabbit.Take(t, queue) {
		stored[d.MessageId] = true
	}
	for i, out := range append(before, meanwhile...) {
		if !stored[out.ID.String()] {
			t.Fatalf("message %d was confirmed and is lost", i)
		}
	}
}

// A queue that does not confirm, as one without a leader, takes up places of the window. Others are not held up by that:
// neither while its callers still wait, nor when they have given up.
func TestPublish_S41_S26_a_queue_that_never_confirms(t *testing.T) {
	t.Parallel()
	rabbit := testservers.PrivateRabbitMQ(t)
	b := dial(t, rabbit.URL(), amqp.WithConfirmWindow(8), amqp.WithPublishTimeout(2*time.Second))
	stuck, healthy := "stuck", "healthy"
	for _, queue := range []string{stuck, healthy} {
		rabbit.Do(t, func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclare(queue, true, false, false, false, amqp091.Table{"x-queue-type": "quorum"})
			return err
		})
	}
	warmUp(t, b, healthy)
	warmUp(t, b, stuck) // the first one on a channel would hold up the channel itself
	rabbit.Ctl(t, "eval", `sys:suspend('%2F_stuck').`)
	defer rabbit.Ctl(t, "eval", `sys:resume('%2F_stuck').`)

	// One for the stuck queue at the head of a batch: the rest of the batch lands, and leaves its places to others.
	var mixed sync.WaitGroup
	mixed.Go(func() {
		out := append(outgoing(stuck, 1), outgoing(healthy, 20)...)
		receipts, _ := publish(t.Context(), b, out)
		for i, r := range receipts {
			if unknown := errors.Is(r.Err, leasebus.ErrOutcomeUnknown); unknown != (i == 0) || !unknown && r.Err != nil {
				t.Errorf("message %d for %s: %v", i, out[i].Queue, r.Err)
			}
		}
	})
	until(t, "the mixed batch has landed, but for the stuck one", func() bool { return rabbit.Ready(t, healthy) >= 21 })
	begun := time.Now()
	if _, err := publish(t.Context(), b, outgoing(healthy, 50)); err != nil || time.Since(begun) > 2*time.Second {
		t.Errorf("beside the stuck one: %v after %v", err, time.Since(begun))
	}
	mixed.Wait()

	// As many as the window holds: the channel is of no more use, and another takes its place.
	if receipts, err := publish(t.Context(), b, outgoing(stuck, 8)); !errors.Is(err, leasebus.ErrOutcomeUnknown) {
		t.Errorf("to the stuck queue: %v, %v", err, receipts)
	}
	begun = time.Now()
	if _, err := publish(t.Context(), b, outgoing(healthy, 50)); err != nil || time.Since(begun) > 2*time.Second {
		t.Errorf("when the window was full of stuck ones: %v after %v", err, time.Since(begun))
	}
}
