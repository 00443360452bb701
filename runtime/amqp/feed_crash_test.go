package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

// consumer is a feed, driven by hand.
type consumer struct {
	leasebus.Feed
	s     *stage
	check chan struct{}
	woken chan struct{}
}

func (s *stage) consume(concurrency int) *consumer {
	s.Helper()
	return s.consumeOn(s.broker, concurrency)
}

func (s *stage) consumeOn(b *amqp.Broker, concurrency int) *consumer {
	s.Helper()
	c := &consumer{s: s, check: make(chan struct{}, 1), woken: make(chan struct{}, 1)}
	tell := func(to chan struct{}) func() {
		return func() {
			select {
			case to <- struct{}{}:
			default:
			}
		}
	}
	feed, err := b.Subscribe(s.Context(), leasebus.Subscription{
		Queue: s.policy.Queue, Types: []string{s.policy.Type}, Owner: "hand#1", Policy: s.policy, Concurrency: concurrency,
		Wake: tell(c.woken), Check: tell(c.check),
	})
	if err != nil {
		s.Fatal(err)
	}
	c.Feed = feed
	s.Cleanup(func() {
		if err := feed.Close(); err != nil {
			s.Errorf("close the feed: %v", err)
		}
	})
	return c
}

func (c *consumer) lease(n int) []*leasebus.Lease {
	c.s.Helper()
	dst := make([]leasebus.Lease, n)
	got, err := c.Lease(c.s.Context(), dst)
	if err != nil {
		c.s.Fatal(err)
	}
	leases := make([]*leasebus.Lease, got)
	for i := range leases {
		leases[i] = &dst[i]
	}
	return leases
}

// take leases until it has n.
func (c *consumer) take(n int) (leases []*leasebus.Lease) {
	c.s.Helper()
	until(c.s, fmt.Sprintf("%d messages are leased", n), func() bool {
		leases = append(leases, c.lease(n-len(leases))...)
		return len(leases) == n
	})
	return leases
}

func (c *consumer) settle(batch ...leasebus.Settlement) []leasebus.Result {
	c.s.Helper()
	if err := c.Settle(c.s.Context(), batch); err != nil {
		c.s.Fatal(err)
	}
	results := make([]leasebus.Result, len(batch))
	for i := range batch {
		results[i] = batch[i].Result
	}
	return results
}

func (c *consumer) settled(batch ...leasebus.Settlement) {
	c.s.Helper()
	for i, r := range c.settle(batch...) {
		if r != leasebus.ResultOK {
			c.s.Fatalf("settlement %d, %v: result %d, want OK", i, batch[i].Kind, r)
		}
	}
}

func (c *consumer) close() {
	c.s.Helper()
	if err := c.Close(); err != nil {
		c.s.Fatal(err)
	}
}

func failed(l *leasebus.Lease, text string) *leasebus.Failure {
	return &leasebus.Failure{Attempt: l.Attempt, Text: text, ErrorType: "*test.Error"}
}

// A message whose consumers end without an outcome comes back again and again, its attempt unspent, up to the limit.
func TestFeed_S10_crashes_are_counted_up_to_the_limit(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "crashes", nil, amqp.WithCrashLimit(3))
	ids := s.send("killer")
	for crash := range 4 {
		c := s.consume(1)
		l := c.take(1)[0]
		if l.Attempt != 1 || l.Crashed || l.ID != ids[0] {
			t.Fatalf("after %d crashes: attempt %d, crashed %v, id %v", crash, l.Attempt, l.Crashed, l.ID)
		}
		c.close() // with the lease
	}
	if n := s.broker.Counters().Crashes; n != 3 {
		t.Errorf("%d crashes counted, want 3", n)
	}
	w := s.work(func(context.Context, leasebus.Delivery, string) error {
		t.Error("the handler was called once too often")
		return nil
	})
	until(t, "it is a dead letter", func() bool { return w.Stats().DeadLettered == 1 })
	d, err := s.manager().Get(t.Context(), ids[0])
	if err != nil {
		t.Fatal(err)
	}
	if d.Reason != leasebus.ReasonCrashed || d.Attempts != 1 {
		t.Errorf("dead letter for %s after %d attempts, want crashed after 1", d.Reason, d.Attempts)
	}
}

// An outcome ends the row of crashes.
func TestFeed_S10_an_outcome_begins_a_new_count(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(l *leasebus.Lease) leasebus.Settlement{
		"a failure": func(l *leasebus.Lease) leasebus.Settlement {
			return leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Failure: failed(l, "no")}
		},
		"a deferral": func(l *leasebus.Lease) leasebus.Settlement {
			return leasebus.Settlement{Lease: l, Kind: leasebus.SettleDefer}
		},
		"an interruption": func(l *leasebus.Lease) leasebus.Settlement {
			return leasebus.Settlement{Lease: l, Kind: leasebus.SettleRelease, Started: true}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := onStage(t, testservers.RabbitMQ(t), "outcome", nil, amqp.WithCrashLimit(1))
			s.send("unlucky")
			for range 3 {
				c := s.consume(1)
				c.take(1)
				c.close() // one crash
				c = s.consume(1)
				l := c.take(1)[0]
				if l.Crashed {
					t.Fatal("one crash after an outcome is one too many for a limit of 1")
				}
				if err := c.Stop(t.Context()); err != nil { // so that what comes back is not sent here again
					t.Fatal(err)
				}
				c.settled(end(l))
				c.close()
			}
		})
	}
}

// One message ends the process of whoever handles it. Others that were in hand then are handled all the same: only the
// one that does it becomes a dead letter.
func TestFeed_S10_C2_7_killer_takes_no_other_message_with_it(t *testing.T) {
	t.Parallel()
	s := onStage(t, testservers.RabbitMQ(t), "killer", nil, amqp.WithCrashLimit(5))
	var values []string
	for i := range 100 {
		values = append(values, fmt.Sprint("good ", i))
	}
	values[10] = "killer"
	ids := s.send(values...)
	var (
		mu      sync.Mutex
		handled = make(map[string]bool)
	)
	deaths := 0
	for begun := time.Now(); s.rabbit.Ready(t, s.policy.DeadLetter.Queue) == 0 || len(handled) < len(values)-1; deaths++ {
		if time.Since(begun) > 2*time.Minute || deaths > 20 {
			t.Fatalf("after %d deaths: %d of %d handled, %d dead letters", deaths, len(handled), len(values)-1, s.rabbit.Ready(t, s.policy.DeadLetter.Queue))
		}
		s.life(func(value string) bool {
			if value == "killer" {
				return false
			}
			time.Sleep(time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			handled[value] = true
			return true
		}, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(handled) == len(values)-1 && s.rabbit.Ready(t, s.policy.DeadLetter.Queue) == 1
		})
	}
	var dead []leasebus.ID
	for d, err := range s.manager().DeadLetters(t.Context(), leasebus.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		if d.Reason != leasebus.ReasonCrashed {
			t.Errorf("dead letter for %s: %s", d.Reason, d.Error)
		}
		dead = append(dead, d.ID)
	}
	if !slices.Equal(dead, ids[10:11]) {
		t.Errorf("%d dead letters, want the killer alone", len(dead))
	}
	t.Logf("%d deaths", deaths)
}

// life is a process that dies when handle answers false, or ends when all is done: its connections are cut, and nothing
// is heard of what it had in hand.
func (s *stage) life(handle func(value string) bool, done func() bool) {
	s.Helper()
	quiet := slog.New(slog.DiscardHandler)
	b, err := amqp.Dial(s.Context(), s.rabbit.URL(), amqp.WithLogger(quiet), amqp.WithCrashLimit(5))
	if err != nil {
		s.Fatal(err)
	}
	p, err := leasebus.NewProcessor(b, leasebus.WithConcurrency(8), leasebus.WithLogger(quiet),
		leasebus.WithDrainTimeout(0), leasebus.WithDrainGrace(time.Second))
	if err != nil {
		s.Fatal(err)
	}
	died := make(chan struct{})
	var once sync.Once
	err = leasebus.RegisterHandler(p, s.policy, func(ctx context.Context, m *wrapperspb.StringValue) error {
		if handle(m.GetValue()) {
			return nil
		}
		once.Do(func() {
			_ = b.Close() // all that was not acknowledged goes back
			close(died)
		})
		<-ctx.Done()
		return errors.New("nobody hears this")
	})
	if err != nil {
		s.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.Context()))
	ran := make(chan error, 1)
	go func() { ran <- p.Run(ctx) }()
	begun := time.Now()
	for over := false; !over; over = over || done() || time.Since(begun) > time.Minute {
		select {
		case <-died:
			over = true
		case <-time.After(20 * time.Millisecond):
		}
	}
	cancel()
	if err := <-ran; err != nil {
		s.Logf("what a dead process has left: %v", err)
	}
	_ = b.Close()
}
