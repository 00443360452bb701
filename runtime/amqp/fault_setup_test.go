package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// hearing is one run of a handler.
type hearing struct {
	id      leasebus.ID
	attempt int
	at      time.Time
}

// book notes the runs of handlers by the values of their messages.
type book struct {
	mu   sync.Mutex
	runs map[string][]hearing
}

func (b *book) note(d leasebus.Delivery, value string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.runs == nil {
		b.runs = make(map[string][]hearing)
	}
	b.runs[value] = append(b.runs[value], hearing{d.ID(), d.Attempt(), time.Now()})
}

func (b *book) of(value string) []hearing {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.runs[value])
}

// values counts the different values that were seen.
func (b *book) values() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.runs)
}

func (b *book) attempts(value string) []int {
	var all []int
	for _, h := range b.of(value) {
		all = append(all, h.attempt)
	}
	return all
}

// wantOneIDEach checks that what came more than once came with the same id.
func (b *book) wantOneIDEach(t testing.TB) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	again := 0
	for value, runs := range b.runs {
		for _, h := range runs[1:] {
			if h.id != runs[0].id {
				t.Errorf("%s came as %v and as %v", value, runs[0].id, h.id)
			}
		}
		again += len(runs) - 1
	}
	t.Logf("%d messages, %d handled again", len(b.runs), again)
}

// mail is what publishers were told about their messages.
type mail struct {
	next atomic.Int64

	mu                  sync.Mutex
	confirmed           []string
	unknown, unsent     int
	longest             time.Duration
	failedInARow, worst int
}

// keepSending publishes one message after the other, each as soon as the one before was answered, until ctx ends.
func (m *mail) keepSending(ctx context.Context, s *stage) {
	to, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](s.policy, s.broker)
	if err != nil {
		s.Error(err)
		return
	}
	for ctx.Err() == nil {
		value := strconv.FormatInt(m.next.Add(1), 10)
		began := time.Now()
		_, err := to.Publish(context.WithoutCancel(ctx), wrapperspb.String(value))
		m.note(value, err, time.Since(began))
	}
}

func (m *mail) note(value string, err error, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.longest = max(m.longest, took)
	switch {
	case err == nil:
		m.confirmed = append(m.confirmed, value)
		m.failedInARow = 0
		return
	case errors.Is(err, leasebus.ErrOutcomeUnknown):
		m.unknown++
	default:
		m.unsent++
	}
	m.failedInARow++
	m.worst = max(m.worst, m.failedInARow)
}

func (m *mail) sent() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.confirmed)
}

// lost are the confirmed messages that nobody handled.
func (m *mail) lost(b *book) (lost []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, value := range m.confirmed {
		if len(b.of(value)) == 0 {
			lost = append(lost, value)
		}
	}
	return lost
}

// wantAllHandled waits until every confirmed message was handled.
func (m *mail) wantAllHandled(t testing.TB, b *book) {
	t.Helper()
	var lost []string
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if lost = m.lost(b); len(lost) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d confirmed messages were not handled within a minute: %.200v", len(lost), m.sent(), lost)
		}
	}
	b.wantOneIDEach(t)
	t.Logf("%d messages confirmed, %d unknown, %d not sent; the longest call took %v", m.sent(), m.unknown, m.unsent, m.longest.Round(time.Millisecond))
}

// again is the same queue for another service, as another process would have it.
func (s *stage) again(opts ...amqp.Option) *stage {
	s.Helper()
	return &stage{TB: s.TB, rabbit: s.rabbit, broker: dial(s, s.rabbit.URL(), opts...), policy: s.policy}
}

// awaitConsumer waits until the queue is consumed.
func (s *stage) awaitConsumer() {
	s.Helper()
	until(s, "the queue is consumed", func() bool {
		return slices.ContainsFunc(s.broker.CheckHealth(s.Context()), func(c leasebus.HealthComponent) bool {
			return c.Name == "consume "+s.policy.Queue && c.Details["unacked"] != nil
		})
	})
}

// faultRoles are what worker processes do.
var faultRoles = map[string]func(ctx context.Context) error{
	"consume": consumeInAProcess,
}

const (
	envURL        = "FAULT_URL"
	envQueue      = "FAULT_QUEUE"
	envCrashLimit = "FAULT_CRASH_LIMIT"
)

// fixed is the policy of stages whose messages other processes handle.
func fixed(queue string) *leasebus.Policy {
	p := leasebus.DefaultPolicy("google.protobuf.StringValue", queue)
	p.Retry = leasebus.FixedRetry(3, 50*time.Millisecond)
	p.Retry.Jitter = 0
	return &p
}

func consumeInAProcess(ctx context.Context) error {
	limit, err := strconv.Atoi(os.Getenv(envCrashLimit))
	if err != nil {
		return fmt.Errorf("%s: %w", envCrashLimit, err)
	}
	broker, err := amqp.Dial(ctx, os.Getenv(envURL), amqp.WithCrashLimit(limit))
	if err != nil {
		return err
	}
	p, err := leasebus.NewProcessor(broker, leasebus.WithConcurrency(4))
	if err == nil {
		err = leasebus.RegisterHandler(p, fixed(os.Getenv(envQueue)), handleInAProcess)
	}
	if err == nil {
		go testservers.SayCPUTime(ctx)
		err = p.Run(ctx)
	}
	return errors.Join(err, broker.Close())
}
