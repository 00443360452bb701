//go:build unix

package testservers

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
)

// RabbitMQEnv names the variable with the URL of the broker to test on.
const RabbitMQEnv = "LEASEBUS_TEST_RABBITMQ"

const usualRabbitMQ = "amqp://guest:guest@127.0.0.1:5672/"

// Rabbit is a broker as a test sees it.
type Rabbit struct{ url string }

// RabbitMQ gives the test the shared broker. Others use it at the same time: a test keeps to the queues that it made
// names for with [Rabbit.Queue], and does nothing to the broker as a whole.
func RabbitMQ(t testing.TB) *Rabbit {
	t.Helper()
	notInShort(t)
	url, err := sharedBroker()
	if err != nil {
		t.Fatalf("testservers: RabbitMQ: %v", err)
	}
	return &Rabbit{url: url}
}

// SharedRabbitMQ makes the shared RabbitMQ answer and returns its URL. A broker that was started for this stays as long
// as the process.
func SharedRabbitMQ() (url string, err error) {
	if url, err = sharedBroker(); err != nil {
		return "", fmt.Errorf("RabbitMQ: %w", err)
	}
	return url, nil
}

// URL is what to connect to.
func (r *Rabbit) URL() string { return r.url }

// Addr is the broker's host:port.
func (r *Rabbit) Addr() string {
	uri, err := amqp.ParseURI(r.url)
	if err != nil {
		return "not a URL"
	}
	return net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port))
}

// At is the same broker by way of another address: a proxy's.
func (r *Rabbit) At(addr string) *Rabbit {
	u, err := url.Parse(r.url)
	if err != nil {
		return r
	}
	u.Host = addr
	return &Rabbit{url: u.String()}
}

// Proxy opens a proxy to the broker. The second result is the broker as seen through the proxy.
func (r *Rabbit) Proxy(t testing.TB) (*Proxy, *Rabbit) {
	t.Helper()
	proxy := NewProxy(t, r.Addr())
	return proxy, r.At(proxy.Addr())
}

var namesMade atomic.Int64

// Queue makes up the name of a queue that nobody else uses. That queue is deleted after the test, if there is one, and
// so are those with one of the suffixes behind its name.
func (r *Rabbit) Queue(t testing.TB, label string, suffixes ...string) string {
	t.Helper()
	name := fmt.Sprintf("leasebus-test.%s.%d.%s", processMark(), namesMade.Add(1), label)
	t.Cleanup(func() {
		names := []string{name}
		for _, suffix := range suffixes {
			names = append(names, name+suffix)
		}
		if err := r.do(func(ch *amqp.Channel) error {
			for _, name := range names {
				if _, err := ch.QueueDelete(name, false, false, false); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			t.Logf("testservers: the queues of the test were not deleted: %v", err) // a private broker may be down
		}
	})
	return name
}

// processMark tells this process's queues from those of others.
var processMark = sync.OnceValue(func() string {
	var random [6]byte
	_, _ = rand.Read(random[:]) // never fails
	return hex.EncodeToString(random[:])
})

// Channel is a channel of a connection of its own, which is closed after the test.
func (r *Rabbit) Channel(t testing.TB) *amqp.Channel {
	t.Helper()
	conn, err := dialRabbit(t.Context(), r.url)
	if err != nil {
		t.Fatalf("testservers: connect: %v", err)
	}
	t.Cleanup(func() { hangUp(conn) })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatalf("testservers: open a channel: %v", err)
	}
	return ch
}

// Do runs something on a channel of its own.
func (r *Rabbit) Do(t testing.TB, f func(ch *amqp.Channel) error) {
	t.Helper()
	if err := r.do(f); err != nil {
		t.Fatalf("testservers: RabbitMQ: %v", err)
	}
}

func (r *Rabbit) do(f func(ch *amqp.Channel) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	conn, err := dialRabbit(ctx, r.url)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return f(ch)
}

// Ready is how many messages of a queue wait to be delivered: those at consumers are not among them. A queue that does
// not exist has none.
func (r *Rabbit) Ready(t testing.TB, queue string) int {
	t.Helper()
	n := 0
	err := r.do(func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		n = q.Messages
		return err
	})
	var closed *amqp.Error
	if err != nil && (!errors.As(err, &closed) || closed.Code != amqp.NotFound) {
		t.Fatalf("testservers: messages in queue %s: %v", queue, err)
	}
	return n
}

// Take takes all messages out of a queue.
func (r *Rabbit) Take(t testing.TB, queue string) (all []amqp.Delivery) {
	t.Helper()
	r.Do(t, func(ch *amqp.Channel) error {
		for {
			d, ok, err := ch.Get(queue, true)
			if err != nil || !ok {
				return err
			}
			all = append(all, d)
		}
	})
	return all
}

// DeleteQueue deletes a queue, whatever is in it and whoever consumes it.
func (r *Rabbit) DeleteQueue(t testing.TB, queue string) {
	t.Helper()
	r.Do(t, func(ch *amqp.Channel) error {
		_, err := ch.QueueDelete(queue, false, false, false)
		return err
	})
}

var sharedBroker = sync.OnceValues(func() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), setupTime)
	defer cancel()
	return findRabbitMQ(ctx)
})

func findRabbitMQ(ctx context.Context) (string, error) {
	if url := os.Getenv(RabbitMQEnv); url != "" {
		if err := usableRabbit(ctx, url); err != nil {
			return "", fmt.Errorf("%s is set, but %w", RabbitMQEnv, err)
		}
		return url, nil
	}
	if usualBroker(ctx) == nil {
		return usualRabbitMQ, nil
	}
	url, err := joinSharedRabbit(ctx)
	if err == nil || !errors.Is(err, errNoBinaries) {
		return url, err
	}
	composeErr := compose(ctx, "rabbitmq")
	if composeErr == nil {
		composeErr = eventually(ctx, func() error { return usableRabbit(ctx, usualRabbitMQ) })
	}
	if composeErr != nil {
		return "", fmt.Errorf("%w\nDocker Compose instead: %w\nInstall RabbitMQ 3.10 or newer, or set %s to the URL of a broker "+
			"for the tests, as in amqp://guest:secret@broker.example:5672/", err, composeErr, RabbitMQEnv)
	}
	return usualRabbitMQ, nil
}

// usualBroker asks the broker on the usual port, again if it is only slow: a busy one is still the one to use.
func usualBroker(ctx context.Context) (err error) {
	for range 5 {
		err = usableRabbit(ctx, usualRabbitMQ)
		var slow net.Error
		if err == nil || !errors.As(err, &slow) || !slow.Timeout() {
			break
		}
	}
	return err
}

// joinSharedRabbit keeps the shared broker for as long as this process lives.
func joinSharedRabbit(ctx context.Context) (string, error) {
	if _, err := installed(ctx, rabbitScripts, "rabbitmq-server"); err != nil {
		return "", err
	}
	folder, err := stateFolder()
	if err != nil {
		return "", err
	}
	folder = filepath.Join(folder, "rabbitmq")
	if err := os.Mkdir(folder, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*nodeStartTimeout)
	defer cancel()
	url, leave, err := shared{folder, sharedRabbitMQ}.join(ctx)
	if err != nil {
		return "", err
	}
	leaveSharedRabbit.Store(&leave)
	return url, nil
}

// leaveSharedRabbit is kept reachable, as long as the process lives: it holds the lock.
var leaveSharedRabbit atomic.Pointer[func()]

// usableRabbit checks a broker.
func usableRabbit(ctx context.Context, url string) error {
	if _, err := amqp.ParseURI(url); err != nil {
		return errors.New("is not the URL of a broker, as in amqp://guest:secret@broker.example:5672/") // it may hold a password
	}
	conn, err := dialRabbit(ctx, url)
	if err != nil {
		return fmt.Errorf("does not answer: %w", err)
	}
	defer hangUp(conn)
	version, _ := conn.Properties["version"].(string)
	if before310(version) {
		return fmt.Errorf("is version %s; 3.10 is the oldest supported", version)
	}
	return nil
}

func before310(version string) bool {
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
		return false // what does not tell is given a chance
	}
	return major < 3 || major == 3 && minor < 10
}
