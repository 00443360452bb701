package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// lengthEnv sets how long those tests run that look for what is rare.
const lengthEnv = "LEASEBUS_TEST_LENGTH"

func length(t *testing.T, usual time.Duration) time.Duration {
	t.Helper()
	given := os.Getenv(lengthEnv)
	if given == "" {
		return usual
	}
	d, err := time.ParseDuration(given)
	if err != nil {
		t.Fatalf("%s: %v", lengthEnv, err)
	}
	return d
}

// fate is what was told of one message.
type fate struct{ published, completed, dead, requeued, discarded int }

// ledger keeps the fates of all messages.
type ledger struct {
	mu    sync.Mutex
	fates map[leasebus.ID]*fate
	lost  []string
}

func (l *ledger) note(id leasebus.ID, change func(*fate)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fates == nil {
		l.fates = make(map[leasebus.ID]*fate)
	}
	if l.fates[id] == nil {
		l.fates[id] = &fate{}
	}
	change(l.fates[id])
}

// settled is a hook.
func (l *ledger) settled(d leasebus.Delivery, o leasebus.Outcome) {
	if o.Result != leasebus.ResultOK {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.lost = append(l.lost, fmt.Sprintf("%v of %v answers %v", o.Kind, d.ID(), o.Result))
		return
	}
	switch o.Kind {
	case leasebus.SettleComplete:
		l.note(d.ID(), func(f *fate) { f.completed++ })
	case leasebus.SettleDeadLetter:
		l.note(d.ID(), func(f *fate) { f.dead++ })
	default: // it comes again
	}
}

// wantExact checks that every message has ended once: it was completed, or it was a dead letter that nobody requeued.
func (l *ledger) wantExact(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, lost := range l.lost {
		t.Error(lost)
	}
	sum, bad := fate{}, 0
	for id, f := range l.fates {
		ended := f.completed + f.dead - f.requeued
		if f.published != 1 || ended != 1 || f.completed > 1 || f.discarded > 1 || f.completed+f.discarded > 1 {
			if bad++; bad <= 5 {
				t.Errorf("message %v: %+v; want one end", id, *f)
			}
		}
		sum.published += f.published
		sum.completed += f.completed
		sum.dead += f.dead
		sum.requeued += f.requeued
		sum.discarded += f.discarded
	}
	if bad > 5 {
		t.Errorf("… and %d more", bad-5)
	}
	t.Logf("%+v", sum)
}

// Everything goes on at once: eight processes that claim, renew, settle, move what has become due and delete what their
// retention has passed, over a ring that turns all the time; handlers' own transactions; operators who requeue, discard,
// replace and count. The server has no deadlock to resolve, and every message comes to one end.
func TestInbox_S12_S13_S33_S35_C10_5_NothingDeadlocks(t *testing.T) {
	t.Parallel()
	const processes, operators, publishers = 8, 4, 3
	// Some waits are given up before a deadlock would be looked for, if that took a second as it usually does.
	pg := migrated(t, testservers.PrivatePostgres(t, "deadlock_timeout=5ms").PG)
	effects(t, pg)
	var told ledger
	policy := numbersPolicy(10 * time.Second)
	policy.Lease.Heartbeat = 500 * time.Millisecond
	policy.Retry = leasebus.FixedRetry(3, 20*time.Millisecond)
	policy.RetainCompleted, policy.DeadLetter.Retention = 500*time.Millisecond, time.Second

	pool := pg.Pool(t, "pool_max_conns=8")
	var inboxes []*postgres.Inbox
	var processors []*running
	for range processes {
		inbox := openInbox(t, pg.DSN(), postgres.WithConnections(4), postgres.WithSweep(100*time.Millisecond), fastRing())
		inboxes = append(inboxes, inbox)
		processors = append(processors, startProcessor(t, inbox, policy, anyOutcome(pool),
			leasebus.WithConcurrency(16), leasebus.WithLogger(slog.New(slog.NewTextHandler(t.Output(), nil))), leasebus.WithHooks(leasebus.Hooks{Settled: told.settled})))
	}
	ctx, cancel := context.WithTimeout(t.Context(), length(t, 8*time.Second))
	defer cancel()
	var all sync.WaitGroup
	for i := range publishers {
		all.Go(func() { told.publish(ctx, t, inboxes[i], pool, policy) })
	}
	for i := range operators {
		all.Go(func() { told.operate(ctx, t, inboxes[processes-1-i]) })
	}
	all.Wait()
	eventually(t, 60*time.Second, "all messages have ended, and were deleted when their time had come", func() error {
		if e := endsOf(t, pg); e != (ends{}) {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
	t.Logf("the ring turned %d times", turns(t, pg))
	for i, p := range processors {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
		if s := p.Stats(); s.SettleErrors+s.LeaseErrors > 0 {
			t.Errorf("calls failed: %+v", s)
		}
		if err := inboxes[i].Close(); err != nil {
			t.Error(err)
		}
	}
	told.wantExact(t)
	pool.Close()
	wantNoDeadlocks(t, pg)
}

// txOptions are the isolations that handlers complete in.
var txOptions = []pgx.TxOptions{{}, {IsoLevel: pgx.RepeatableRead}, {IsoLevel: pgx.Serializable}}

// anyOutcome handles as chance will have it.
func anyOutcome(pool *pgxpool.Pool) numberHandler {
	return func(ctx context.Context, n int64, _ leasebus.Delivery) error {
		switch chance := rand.IntN(100); {
		case chance < 10:
			return errors.New("not yet")
		case chance < 15:
			return leasebus.Defer(10 * time.Millisecond)
		case chance < 20:
			return leasebus.RetryAfter(30*time.Millisecond, errors.New("later"))
		case chance < 35:
			return leasebus.Permanent(errors.New("never"))
		case chance < 38:
			time.Sleep(rand.N(1500 * time.Millisecond)) // some long enough for renewals
			return nil
		case chance < 45:
			tx, err := postgres.BeginTx(ctx, pool, txOptions[rand.IntN(len(txOptions))])
			if err != nil {
				return err
			}
			defer rollBack(ctx, tx)
			return commitEffect(ctx, tx, n)
		}
		return nil
	}
}

// publish publishes in batches, some of them in transactions, and not faster than they are handled.
func (l *ledger) publish(ctx context.Context, t *testing.T, inbox *postgres.Inbox, pool *pgxpool.Pool, policy *leasebus.Policy) {
	for ctx.Err() == nil {
		out := make([]leasebus.Outgoing, 1+rand.IntN(100))
		for i := range out {
			out[i] = number(policy, rand.Int64N(1000))
			if rand.IntN(10) == 0 {
				out[i].Delay = rand.N(50 * time.Millisecond)
			}
		}
		if err := publishSomehow(context.WithoutCancel(ctx), inbox, pool, out); err != nil {
			t.Error(err)
			return
		}
		for i := range out {
			l.note(out[i].ID, func(f *fate) { f.published++ })
		}
		for {
			s, err := inbox.Stats(context.WithoutCancel(ctx), numbersQueue)
			if err != nil {
				t.Error(err)
				return
			}
			if s.Pending+s.Failed < 2000 || ctx.Err() != nil {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
}

func number(policy *leasebus.Policy, n int64) leasebus.Outgoing {
	payload, _ := proto.Marshal(wrapperspb.Int64(n)) // cannot fail
	return leasebus.Outgoing{Envelope: leasebus.Envelope{ID: leasebus.NewID(), Type: policy.Type, Queue: policy.Queue, Payload: payload}}
}

func publishSomehow(ctx context.Context, inbox *postgres.Inbox, pool *pgxpool.Pool, out []leasebus.Outgoing) error {
	receipts := make([]leasebus.Receipt, len(out))
	if rand.IntN(2) == 0 {
		return inbox.Publish(ctx, out, receipts)
	}
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer rollBack(ctx, tx)
	if err := inbox.Tx(tx).Publish(ctx, out, receipts); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// operate acts on dead letters in any order, in ways that cross those of other operators, and those of retention.
func (l *ledger) operate(ctx context.Context, t *testing.T, inbox *postgres.Inbox) {
	for ctx.Err() == nil {
		if err := l.act(context.WithoutCancel(ctx), inbox); err != nil {
			t.Error(err)
			return
		}
	}
}

func (l *ledger) act(ctx context.Context, inbox *postgres.Inbox) error {
	letters, err := inbox.DeadLetters(ctx, numbersQueue, leasebus.Filter{}, "", 200)
	if err != nil || len(letters) == 0 {
		return err
	}
	rand.Shuffle(len(letters), func(i, j int) { letters[i], letters[j] = letters[j], letters[i] })
	letters = letters[:1+rand.IntN(min(len(letters), 50))]
	refs := make([]leasebus.DeadLetterRef, len(letters))
	for i := range letters {
		refs[i].ID = letters[i].ID
		if rand.IntN(2) == 0 {
			refs[i].Cursor = letters[i].Cursor
		}
	}
	switch rand.IntN(3) {
	case 0:
		done, err := inbox.Requeue(ctx, numbersQueue, refs, "the test")
		return l.done(refs, done, err, func(f *fate) { f.requeued++ })
	case 1:
		done, err := inbox.Discard(ctx, numbersQueue, refs, "the test")
		return l.done(refs, done, err, func(f *fate) { f.discarded++ })
	}
	edited := letters[0].Envelope
	edited.ID = leasebus.NewID()
	done, err := inbox.Replace(ctx, numbersQueue, refs[0], &edited, "the test")
	if err == nil && done == leasebus.DispositionDone {
		l.note(edited.ID, func(f *fate) { f.published++ })
	}
	return err
}

func (l *ledger) done(refs []leasebus.DeadLetterRef, done []leasebus.Disposition, err error, change func(*fate)) error {
	for i := range done {
		if done[i] == leasebus.DispositionDone {
			l.note(refs[i].ID, change)
		}
	}
	return err
}
