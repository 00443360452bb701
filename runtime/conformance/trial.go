package conformance

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// typeName is the message type of most cases.
const typeName = "google.protobuf.StringValue"

// trial is one run of one case on one backend.
type trial struct {
	*testing.T
	backend Backend
	store   Store
	ctx     context.Context
	queue   string
	policy  *leasebus.Policy
	// lease is the length of leases, the unit of time.
	lease time.Duration
	// prepared are the queues that can be published to.
	prepared map[string]bool
}

// unhurried is how much longer the leases are of cases that are not brief.
const unhurried = 4

func newTrial(t *testing.T, b Backend, brief bool) *trial {
	c := &trial{T: t, backend: b, store: b.Open(t), ctx: t.Context(), lease: b.Lease, prepared: make(map[string]bool)}
	if !brief {
		c.lease *= unhurried
	}
	c.queue = c.newQueue()
	c.policy = c.policyFor(c.queue)
	return c
}

// newQueue is a name that no other test has used.
func (t *trial) newQueue() string {
	var random [6]byte
	_, _ = rand.Read(random[:]) // never fails
	name := t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]
	return fmt.Sprintf("%.60s-%s", name, hex.EncodeToString(random[:]))
}

// policyFor is three attempts, a tenth of a lease apart.
func (t *trial) policyFor(queue string) *leasebus.Policy {
	p := leasebus.DefaultPolicy(typeName, queue)
	p.Lease = leasebus.LeasePolicy{Duration: t.lease, Heartbeat: t.lease / 4}
	p.Retry = leasebus.FixedRetry(3, t.lease/10)
	p.Retry.Jitter = 0
	return &p
}

// can reports whether the backend promises all of c.
func (t *trial) can(c capability) bool { return t.backend.Capabilities.set()&c == c }

func (t *trial) log() *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

// must stops the case if err is not nil.
func (t *trial) must(err error, doing string, args ...any) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", fmt.Sprintf(doing, args...), err)
	}
}

// want compares what was seen with what is right.
func want[T comparable](t *trial, what string, got, right T) {
	t.Helper()
	if got != right {
		t.Errorf("%s: got %v, want %v", what, got, right)
	}
}

// wantAll compares two lists.
func wantAll[T comparable](t *trial, what string, got, right []T) {
	t.Helper()
	if !slices.Equal(got, right) {
		t.Errorf("%s:\n got %v\nwant %v", what, got, right)
	}
}

// until waits for a condition.
func (t *trial) until(what string, ok func() bool) {
	t.Helper()
	begun := time.Now()
	for !ok() {
		if waited := time.Since(begun); waited > t.patience() {
			t.Fatalf("waited %v in vain until %s", waited.Round(time.Millisecond), what)
		}
		t.pause()
	}
}

// patience is how long a condition is waited for before the case fails.
func (t *trial) patience() time.Duration { return 20*time.Second + 20*t.lease }

// pause is the time between two looks at a condition.
func (t *trial) pause() { time.Sleep(max(t.lease/100, 2*time.Millisecond)) }

// payloadOf is a StringValue in binary.
func payloadOf(t *trial, value string) []byte {
	t.Helper()
	payload, err := proto.Marshal(wrapperspb.String(value))
	t.must(err, "marshal %q", value)
	return payload
}

// outgoing is a message for the trial's queue.
func (t *trial) outgoing(value string) leasebus.Outgoing {
	return leasebus.Outgoing{Envelope: leasebus.Envelope{
		ID: leasebus.NewID(), Type: t.policy.Type, Queue: t.queue, Payload: payloadOf(t, value),
	}}
}

// publish stores messages with these values, one call for each, and returns their ids.
func (t *trial) publish(values ...string) []leasebus.ID {
	t.Helper()
	ids := make([]leasebus.ID, len(values))
	for i, value := range values {
		out := t.outgoing(value)
		t.send(out)
		ids[i] = out.ID
	}
	return ids
}

// publishMany stores n messages in one call.
func (t *trial) publishMany(n int) []leasebus.ID {
	t.Helper()
	out := make([]leasebus.Outgoing, n)
	ids := make([]leasebus.ID, n)
	for i := range out {
		out[i] = t.outgoing(fmt.Sprintf("message %d", i))
		ids[i] = out[i].ID
	}
	t.send(out...)
	return ids
}

// prepare makes a policy's messages publishable.
func (t *trial) prepare(policy *leasebus.Policy) {
	t.Helper()
	if t.backend.Prepare == nil || t.prepared[policy.Queue] {
		return
	}
	t.prepared[policy.Queue] = true
	t.backend.Prepare(t.T, t.store, policy)
}

// send stores envelopes in one call.
func (t *trial) send(out ...leasebus.Outgoing) {
	t.Helper()
	for i := range out {
		if out[i].Queue == t.queue {
			t.prepare(t.policy)
		} else {
			t.prepare(t.policyFor(out[i].Queue))
		}
	}
	receipts := make([]leasebus.Receipt, len(out))
	t.must(t.store.Publish(t.ctx, out, receipts), "publish %d envelopes", len(out))
	for i := range receipts {
		if receipts[i].Err != nil || receipts[i].ID != out[i].ID || receipts[i].AlreadyAccepted {
			t.Fatalf("publish: receipt %d of %d is %+v, want id %v and no error", i, len(out), receipts[i], out[i].ID)
		}
	}
}

// consumer is a feed, driven by hand.
type consumer struct {
	leasebus.Feed
	t     *trial
	owner string
	woken chan struct{}
	check chan struct{}
}

// subscribe opens the trial's queue. Every call without an owner gets one of its own.
func (t *trial) subscribe() *consumer { t.Helper(); return t.subscribeAs("") }

func (t *trial) subscribeAs(owner string) *consumer {
	t.Helper()
	if owner == "" {
		owner = "worker#" + rand.Text()[:16]
	}
	k := &consumer{t: t, owner: owner, woken: make(chan struct{}, 1), check: make(chan struct{}, 1)}
	feed, err := t.store.Subscribe(t.ctx, t.subscription(k))
	t.must(err, "subscribe to %s", t.queue)
	k.Feed = feed
	t.Cleanup(func() {
		if err := feed.Close(); err != nil {
			t.Errorf("close the feed of %s: %v", t.queue, err)
		}
	})
	return k
}

func (t *trial) subscription(k *consumer) leasebus.Subscription {
	return leasebus.Subscription{
		Queue: t.policy.Queue, Types: append([]string{t.policy.Type}, t.policy.Aliases...),
		Owner: k.owner, Policy: t.policy, Concurrency: 1000,
		Wake: func() {
			select {
			case k.woken <- struct{}{}:
			default:
			}
		},
		Check: func() {
			select {
			case k.check <- struct{}{}:
			default:
			}
		},
	}
}

// leave gives others what k was sent ahead, where a backend does that, and lets it take no more.
func (k *consumer) leave() {
	k.t.Helper()
	if !k.t.can(pull) {
		k.t.must(k.Stop(k.t.ctx), "stop")
	}
}

// lease is one call for up to n.
func (k *consumer) lease(n int) []*leasebus.Lease {
	k.t.Helper()
	dst := make([]leasebus.Lease, n)
	got, err := k.Lease(k.t.ctx, dst)
	k.t.must(err, "lease up to %d", n)
	if got < 0 || got > n {
		k.t.Fatalf("lease up to %d: answered %d", n, got)
	}
	leases := make([]*leasebus.Lease, got)
	for i := range leases {
		leases[i] = &dst[i]
	}
	return leases
}

// take leases until it has n.
func (k *consumer) take(n int) []*leasebus.Lease {
	k.t.Helper()
	var leases []*leasebus.Lease
	k.t.until(fmt.Sprintf("%d messages of %s were leased", n, k.t.queue), func() bool {
		leases = append(leases, k.lease(n-len(leases))...)
		return len(leases) == n
	})
	return leases
}

func (k *consumer) takeOne() *leasebus.Lease { k.t.Helper(); return k.take(1)[0] }

// nothing checks that there is nothing to lease now.
func (k *consumer) nothing(why string) {
	k.t.Helper()
	for _, l := range k.lease(10) {
		k.t.Errorf("leased %v (attempt %d, generation %d): %s", l.ID, l.Attempt, l.Generation, why)
	}
}

// settle ends leases, and asks again where the answer is busy. The results stand in the order of the batch.
func (k *consumer) settle(batch ...leasebus.Settlement) []leasebus.Result {
	k.t.Helper()
	results, err := k.trySettle(batch...)
	k.t.must(err, "settle %d leases", len(batch))
	return results
}

// trySettle is settle for any goroutine.
func (k *consumer) trySettle(batch ...leasebus.Settlement) ([]leasebus.Result, error) {
	results := make([]leasebus.Result, len(batch))
	todo := make([]int, len(batch))
	for i := range todo {
		todo[i] = i
	}
	for begun := time.Now(); time.Since(begun) < k.t.patience(); k.t.pause() {
		part := make([]leasebus.Settlement, len(todo))
		for i, at := range todo {
			part[i] = batch[at]
			part[i].Result = leasebus.ResultUnknown
		}
		if err := k.Settle(k.t.ctx, part); err != nil {
			return results, err
		}
		var busy []int
		for i, at := range todo {
			results[at] = part[i].Result
			if part[i].Result == leasebus.ResultBusy {
				busy = append(busy, at)
			}
		}
		if todo = busy; len(todo) == 0 {
			return results, nil
		}
	}
	return results, fmt.Errorf("%d settlements stayed busy", len(todo))
}

// settled is settle where every answer has to be OK.
func (k *consumer) settled(batch ...leasebus.Settlement) {
	k.t.Helper()
	for i, r := range k.settle(batch...) {
		if r != leasebus.ResultOK {
			k.t.Fatalf("settle %d of %d, %v of %v: got %s, want OK", i, len(batch), batch[i].Kind, batch[i].Lease.ID, resultName(r))
		}
	}
}

// complete ends leases well.
func (k *consumer) complete(leases ...*leasebus.Lease) {
	k.t.Helper()
	batch := make([]leasebus.Settlement, len(leases))
	for i, l := range leases {
		batch[i] = leasebus.Settlement{Lease: l}
	}
	k.settled(batch...)
}

// bury dead-letters leases with an error text each.
func (k *consumer) bury(leases ...*leasebus.Lease) {
	k.t.Helper()
	batch := make([]leasebus.Settlement, len(leases))
	for i, l := range leases {
		batch[i] = k.t.deadLetter(l, leasebus.ReasonPermanent, "no use: "+l.ID.String())
	}
	k.settled(batch...)
}

// renew asks to keep leases, again where the answer is busy.
func (k *consumer) renew(leases ...*leasebus.Lease) []leasebus.Result {
	k.t.Helper()
	results := make([]leasebus.Result, len(leases))
	k.t.until("no renewal was busy", func() bool {
		batch := make([]leasebus.Renewal, len(leases))
		for i, l := range leases {
			batch[i].Lease = l
		}
		k.t.must(k.Renew(k.t.ctx, batch), "renew %d leases", len(batch))
		busy := false
		for i := range batch {
			results[i] = batch[i].Result
			busy = busy || batch[i].Result == leasebus.ResultBusy
		}
		return !busy
	})
	return results
}

// deadLetter is a settlement that buries l.
func (t *trial) deadLetter(l *leasebus.Lease, reason leasebus.Reason, text string) leasebus.Settlement {
	return leasebus.Settlement{
		Lease: l, Kind: leasebus.SettleDeadLetter, Reason: reason, DeadLetterQueue: t.policy.DeadLetter.Queue,
		Attempts: l.Attempt, Failure: &leasebus.Failure{Attempt: l.Attempt, Text: text, ErrorType: "*conformance.Error"},
	}
}

// retry is a settlement after a failure.
func retry(l *leasebus.Lease, delay time.Duration, text string) leasebus.Settlement {
	return leasebus.Settlement{
		Lease: l, Kind: leasebus.SettleRetry, Delay: delay,
		Failure: &leasebus.Failure{Attempt: l.Attempt, Text: text, ErrorType: "*conformance.Error"},
	}
}

// stats reads the counts of the trial's queue.
func (t *trial) stats() leasebus.QueueStats {
	t.Helper()
	stats, err := t.store.Stats(t.ctx, t.queue)
	t.must(err, "stats of %s", t.queue)
	return stats
}

// deadLetters lists what matches, from the start.
func (t *trial) deadLetters(f leasebus.Filter) []leasebus.DeadLetter {
	t.Helper()
	letters, err := t.store.DeadLetters(t.ctx, t.queue, f, "", 1000)
	t.must(err, "dead letters of %s", t.queue)
	return letters
}

// takeDeadLetters waits until there are n, and no more.
func (t *trial) takeDeadLetters(n int) []leasebus.DeadLetter {
	t.Helper()
	var letters []leasebus.DeadLetter
	t.until(fmt.Sprintf("%d dead letters were listed", n), func() bool {
		letters = t.deadLetters(leasebus.Filter{})
		return len(letters) >= n
	})
	if len(letters) != n {
		t.Fatalf("%d dead letters are listed, want %d", len(letters), n)
	}
	return letters
}

// nothingLeft waits until no message of the queue waits or is worked on.
func (t *trial) nothingLeft() {
	t.Helper()
	var s leasebus.QueueStats
	begun := time.Now()
	for {
		s = t.stats()
		if s.Pending == 0 && s.Processing == 0 && s.Failed == 0 {
			return
		}
		if time.Since(begun) > t.patience() {
			t.Fatalf("the queue holds more than it should: %+v; want nothing pending, processing or failed", s)
		}
		t.pause()
	}
}

func idsOf(leases []*leasebus.Lease) []leasebus.ID {
	ids := make([]leasebus.ID, len(leases))
	for i, l := range leases {
		ids[i] = l.ID
	}
	return ids
}

func idsOfLetters(letters []leasebus.DeadLetter) []leasebus.ID {
	ids := make([]leasebus.ID, len(letters))
	for i := range letters {
		ids[i] = letters[i].ID
	}
	return ids
}

// sorted is a copy in the order of the ids, for comparing sets.
func sorted(ids []leasebus.ID) []leasebus.ID {
	copied := slices.Clone(ids)
	slices.SortFunc(copied, func(a, b leasebus.ID) int { return slices.Compare(a[:], b[:]) })
	return copied
}

func resultName(r leasebus.Result) string {
	names := map[leasebus.Result]string{
		leasebus.ResultUnknown: "Unknown", leasebus.ResultOK: "OK", leasebus.ResultLost: "Lost", leasebus.ResultBusy: "Busy",
		leasebus.ResultCancelled: "Cancelled", leasebus.ResultRejected: "Rejected", leasebus.ResultStillLeased: "StillLeased",
	}
	if name, ok := names[r]; ok {
		return name
	}
	return fmt.Sprintf("Result(%d)", r)
}

// wantResult compares the answer for one element.
func (t *trial) wantResult(what string, got, right leasebus.Result) {
	t.Helper()
	want(t, what, resultName(got), resultName(right))
}

// notBefore checks that something that has just happened did not happen too early.
func (t *trial) notBefore(what string, since time.Time, delay time.Duration) {
	t.Helper()
	if passed := time.Since(since); passed < delay {
		t.Errorf("%s after %v, want at least %v", what, passed, delay)
	}
}
