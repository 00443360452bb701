//go:build unix

package testservers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

func declare(ch *amqp.Channel, queue string) error {
	_, err := ch.QueueDeclare(queue, true, false, false, false, nil)
	return err
}

// publish publishes a persistent message and waits until the broker has it.
func publish(ctx context.Context, ch *amqp.Channel, queue string) error {
	if err := ch.Confirm(false); err != nil {
		return err
	}
	confirm, err := ch.PublishWithDeferredConfirm("", queue, true, false, amqp.Publishing{DeliveryMode: amqp.Persistent})
	if err != nil {
		return err
	}
	ok, err := confirm.WaitContext(ctx)
	if err == nil && !ok {
		err = errors.New("refused")
	}
	return err
}

func TestPrivateRabbitMQ_SurvivesWhatIsDoneToIt(t *testing.T) {
	t.Parallel()
	began := time.Now()
	b, other := PrivateRabbitMQ(t), PrivateRabbitMQ(t)
	t.Logf("two are ready after %v", time.Since(began))
	queue := b.Queue(t, "kept")
	b.Do(t, func(ch *amqp.Channel) error {
		return errors.Join(declare(ch, queue), publish(t.Context(), ch, queue))
	})
	kept := func(after string) {
		t.Helper()
		if n := b.Ready(t, queue); n != 1 {
			t.Errorf("after %s: %d messages, want 1", after, n)
		}
	}
	kept("a publish")
	if n := other.Ready(t, queue); n != 0 {
		t.Errorf("another broker has %d messages in the queue, want none", n)
	}
	b.Stop(t)
	if err := pingRabbit(t.Context(), b.URL()); err == nil {
		t.Error("a stopped broker answers")
	}
	b.Start(t)
	kept("a stop")
	b.Kill(t)
	b.Start(t)
	kept("a kill")
}

func TestPrivateRabbitMQ_Settings(t *testing.T) {
	t.Parallel()
	b := PrivateRabbitMQ(t, "consumer_timeout=4321")
	if got := b.Ctl(t, "eval", "application:get_env(rabbit, consumer_timeout)."); got != "{ok,4321}\n" {
		t.Errorf("consumer_timeout is %q, want 4321", got)
	}
}

func TestPrivateRabbitMQ_MemoryAlarm(t *testing.T) {
	t.Parallel()
	b := PrivateRabbitMQ(t)
	queue := b.Queue(t, "alarm")
	ch := b.Channel(t)
	if err := errors.Join(declare(ch, queue), publish(t.Context(), ch, queue)); err != nil {
		t.Fatal(err)
	}
	b.MemoryAlarm(t, true)
	blocked := func() *amqp.DeferredConfirmation {
		confirm, err := ch.PublishWithDeferredConfirm("", queue, true, false, amqp.Publishing{})
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-confirm.Done():
			return nil
		case <-time.After(500 * time.Millisecond): // a silence can only be seen by waiting
			return confirm
		}
	}
	confirm := blocked()
	for range 10 {
		if confirm == nil {
			confirm = blocked()
		}
	}
	if confirm == nil {
		t.Fatal("the broker confirms although its memory alarm is on")
	}
	b.MemoryAlarm(t, false)
	select {
	case <-confirm.Done():
	case <-time.After(longEnough):
		t.Error("the broker does not confirm although its memory alarm is off")
	}
}

func TestPrivateRabbitMQ_CloseChannelsAndConnections(t *testing.T) {
	t.Parallel()
	b := PrivateRabbitMQ(t)
	queue := b.Queue(t, "consumed")
	ch := b.Channel(t)
	if err := declare(ch, queue); err != nil {
		t.Fatal(err)
	}
	if _, err := ch.Consume(queue, "", false, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	closed := ch.NotifyClose(make(chan *amqp.Error, 1))
	within(t, "the queue is consumed", func() error {
		if q := b.Queues(t)[queue]; q.Consumers != 1 {
			return errors.New("it has no consumer")
		}
		return nil
	})
	if n := b.CloseChannels(t, queue); n != 1 {
		t.Errorf("closed %d channels, want 1", n)
	}
	if why := <-closed; why == nil {
		t.Error("the channel was closed in order, want an exception")
	}
	closed = b.Channel(t).NotifyClose(make(chan *amqp.Error, 1))
	if n := b.CloseConnections(t, "for a test"); n == 0 {
		t.Error("closed no connection")
	}
	if why := <-closed; why == nil || why.Code != amqp.ConnectionForced || why.Reason != "CONNECTION_FORCED - for a test" {
		t.Errorf("the connection was closed for %v, want the test's reason", why)
	}
}

func TestPrivateRabbitMQ_EndsWithAProcessThatIsKilled(t *testing.T) {
	t.Parallel()
	endsWithItsWorker(t, "broker", "address ", pingRabbit)
}

func TestOwnRabbitMQ_EndsWithClose(t *testing.T) {
	t.Parallel()
	notInShort(t)
	own, err := OwnRabbitMQ(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := pingRabbit(t.Context(), own.URL); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", own.PID)); err != nil && runtime.GOOS == "linux" {
		t.Errorf("the server's process: %v", err)
	}
	folder := own.node.folder
	own.Close()
	if err := pingRabbit(t.Context(), own.URL); err == nil {
		t.Error("it still answers")
	}
	if _, err := os.Stat(folder); err == nil {
		t.Error("its folder is still there")
	}
}
