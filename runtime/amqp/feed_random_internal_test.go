package amqp

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// roamer is a worker that does not know what it does, and whose connection is cut now and then.
type roamer struct {
	*rand.Rand
	feed   *feed
	policy *leasebus.Policy
	mu     *sync.Mutex
	ended  map[leasebus.ID]string // by what
	held   []*leasebus.Lease
	owed   []leasebus.Settlement
}

func (r *roamer) step(t *testing.T) {
	t.Helper()
	switch r.IntN(6) {
	case 0, 1:
		dst := make([]leasebus.Lease, 1+r.IntN(10))
		n, err := r.feed.Lease(t.Context(), dst)
		if err != nil {
			t.Errorf("lease: %v", err)
		}
		for i := range n {
			r.held = append(r.held, &dst[i])
		}
	case 2:
		r.renew(t)
	case 3, 4:
		r.settle(t)
	case 5:
		time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
	}
}

func (r *roamer) renew(t *testing.T) {
	t.Helper()
	batch := make([]leasebus.Renewal, len(r.held))
	for i, l := range r.held {
		batch[i].Lease = l
	}
	if err := r.feed.Renew(t.Context(), batch); err != nil {
		t.Errorf("renew: %v", err)
	}
	r.held = r.held[:0]
	for i := range batch {
		if batch[i].Result == leasebus.ResultOK {
			r.held = append(r.held, batch[i].Lease)
		}
	}
}

func (r *roamer) settle(t *testing.T) {
	t.Helper()
	batch := r.owed
	for len(r.held) > 0 && len(batch) < 8 {
		i := r.IntN(len(r.held))
		l := r.held[i]
		r.held = append(r.held[:i], r.held[i+1:]...)
		batch = append(batch, r.end(l))
	}
	r.owed = nil
	if len(batch) == 0 {
		return
	}
	if err := r.feed.Settle(t.Context(), batch); err != nil {
		t.Errorf("settle: %v", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range batch {
		switch {
		case s.Result == leasebus.ResultBusy:
			s.Result = leasebus.ResultUnknown
			r.owed = append(r.owed, s)
		case s.Result == leasebus.ResultLost:
		case s.Result != leasebus.ResultOK:
			t.Errorf("%v of %v: result %d", s.Kind, s.Lease.ID, s.Result)
		case s.Kind == leasebus.SettleComplete, s.Kind == leasebus.SettleDeadLetter:
			r.ended[s.Lease.ID] = s.Kind.String()
		}
	}
}

func (r *roamer) end(l *leasebus.Lease) leasebus.Settlement {
	failure := &leasebus.Failure{Attempt: l.Attempt, Text: "no", ErrorType: "*test.Error"}
	delay := time.Duration(r.IntN(60)) * time.Millisecond
	switch r.IntN(8) {
	case 0:
		return leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Delay: delay, Failure: failure}
	case 1:
		return leasebus.Settlement{Lease: l, Kind: leasebus.SettleRetry, Delay: time.Second, Nominal: time.Second, Failure: failure}
	case 2:
		return leasebus.Settlement{Lease: l, Kind: leasebus.SettleDefer, Delay: delay}
	case 3:
		return leasebus.Settlement{Lease: l, Kind: leasebus.SettleRelease, Started: r.IntN(2) == 0}
	case 4:
		return leasebus.Settlement{
			Lease: l, Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonPermanent, DeadLetterQueue: r.policy.DeadLetter.Queue,
			Attempts: l.Attempt, Failure: failure,
		}
	}
	return leasebus.Settlement{Lease: l}
}

// Several workers settle as the dice fall, in batches, while their connections and that of the publisher are cut and
// feeds are closed and opened. In the end, every message was completed or is a dead letter: none is lost, none is stuck,
// and RabbitMQ has never closed a channel for an acknowledgement that it did not understand.
func TestFeed_S27_S39_S41_S42_random_settlements_under_cuts_lose_nothing(t *testing.T) {
	t.Parallel()
	const messages, roamers, length = 300, 3, 8 * time.Second
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rabbit := testservers.RabbitMQ(t)
	var log overheard
	b := dialIn(t, rabbit.URL(), WithHoldBudget(6), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	b.options.pace = pace{10 * time.Millisecond, 100 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond}
	policy := leasebus.DefaultPolicy("test.v1.Thing", rabbit.Queue(t, "random", ".dlq", ".retry.1s"))
	policy.Retry = leasebus.FixedRetry(1000, time.Second)
	topology, err := b.Topology(&policy)
	if err == nil {
		err = b.Declare(t.Context(), topology)
	}
	if err != nil {
		t.Fatal(err)
	}
	out := make([]leasebus.Outgoing, messages)
	ids := make(map[leasebus.ID]bool)
	for i := range out {
		out[i].Envelope = leasebus.Envelope{ID: leasebus.NewID(), Type: policy.Type, Queue: policy.Queue, Payload: []byte(fmt.Sprint(i))}
		ids[out[i].ID] = true
	}
	if err := b.Publish(t.Context(), out, make([]leasebus.Receipt, messages)); err != nil {
		t.Fatal(err)
	}
	subscribe := func(i int) *feed {
		opened, err := b.Subscribe(t.Context(), leasebus.Subscription{
			Queue: policy.Queue, Types: []string{policy.Type}, Owner: fmt.Sprint("roamer#", i), Policy: &policy, Concurrency: 8,
		})
		if err != nil {
			t.Fatalf("subscribe: %v", err)
		}
		f, _ := opened.(*feed)
		return f
	}
	var (
		mu    sync.Mutex
		ended = make(map[leasebus.ID]string)
		done  sync.WaitGroup
		end   = time.Now().Add(length)
	)
	for i := range roamers {
		r := &roamer{Rand: rand.New(rand.NewPCG(seed, uint64(i))), feed: subscribe(i), policy: &policy, mu: &mu, ended: ended}
		done.Go(func() {
			for time.Now().Before(end) && !t.Failed() {
				r.step(t)
				if r.IntN(150) == 0 { // a deploy
					r.held, r.owed = nil, nil
					_ = r.feed.Close()
					r.feed = subscribe(i)
				}
				if r.IntN(100) == 0 {
					r.feed.link.cut()
				}
				if r.IntN(100) == 0 {
					b.publishing.cut()
				}
			}
			_ = r.feed.Close()
		})
	}
	done.Wait()
	if t.Failed() {
		return
	}

	wantAllEnded(t, rabbit, subscribe(roamers), &policy, ids, ended)
	if n := b.Counters(); n.BadAttempts+n.BadFirstDues != 0 {
		t.Errorf("counters %+v", n)
	}
	if text := log.String(); strings.Contains(text, "PRECONDITION_FAILED") {
		t.Errorf("RabbitMQ closed a channel:\n%s", text)
	}
	t.Logf("%+v", b.Counters())
}

// wantAllEnded finishes what is left, without mistakes, and checks that there is nothing else.
func wantAllEnded(t *testing.T, rabbit *testservers.Rabbit, last *feed, policy *leasebus.Policy, ids map[leasebus.ID]bool, ended map[leasebus.ID]string) {
	t.Helper()
	defer func() { _ = last.Close() }()
	dead := make(map[leasebus.ID]bool)
	deadline := time.Now().Add(40 * time.Second)
	missing := func() (n int) {
		for id := range ids {
			if ended[id] == "" && !dead[id] {
				n++
			}
		}
		return n
	}
	for missing() > 0 && time.Now().Before(deadline) {
		dst := make([]leasebus.Lease, 50)
		n, err := last.Lease(t.Context(), dst)
		if err != nil {
			t.Fatal(err)
		}
		batch := make([]leasebus.Settlement, n)
		for i := range n {
			batch[i].Lease = &dst[i]
			if !ids[dst[i].ID] {
				t.Errorf("%v was never published", dst[i].ID)
			}
		}
		if err := last.Settle(t.Context(), batch); err != nil {
			t.Fatal(err)
		}
		for i := range batch {
			if batch[i].Result == leasebus.ResultOK {
				ended[batch[i].Lease.ID] = "complete"
			}
		}
		if n == 0 {
			for _, d := range rabbit.Take(t, policy.DeadLetter.Queue) {
				dead[idOf(d.MessageId)] = true
			}
		}
	}
	if n := missing(); n > 0 {
		t.Errorf("%d of %d messages are lost", n, len(ids))
	}
	for id, how := range ended {
		if how == "dead-letter" && !dead[id] && !inQueue(t, rabbit, policy.DeadLetter.Queue, dead, id) {
			t.Errorf("%v was dead-lettered, and is no dead letter", id)
		}
	}
}

// overheard is a log that can be read.
type overheard struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *overheard) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *overheard) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// inQueue takes what is in a queue, and looks for an id.
func inQueue(t *testing.T, rabbit *testservers.Rabbit, queue string, seen map[leasebus.ID]bool, id leasebus.ID) bool {
	t.Helper()
	for _, d := range rabbit.Take(t, queue) {
		seen[idOf(d.MessageId)] = true
	}
	return seen[id]
}

// cut ends a link's connection as a network does.
func (l *link) cut() {
	if e, _, _, _ := l.current.get(); e != nil {
		e.raw.cut()
	}
}
