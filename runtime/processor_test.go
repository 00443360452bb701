package leasebus_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// faults puts itself between the engine and a store. A nil function passes the call on.
type faults struct {
	leasebus.Source
	subscribe func() error
	stopFeed  func(ctx context.Context) error
	lease     func(ctx context.Context, pass func() (int, error)) (int, error)
	renew     func(ctx context.Context, batch []leasebus.Renewal, pass func() error) error
	settle    func(ctx context.Context, batch []leasebus.Settlement, pass func() error) error
}

type faultyFeed struct {
	leasebus.Feed
	*faults
}

func (f *faults) Subscribe(ctx context.Context, s leasebus.Subscription) (leasebus.Feed, error) {
	if f.subscribe != nil {
		if err := f.subscribe(); err != nil {
			return nil, err
		}
	}
	feed, err := f.Source.Subscribe(ctx, s)
	return faultyFeed{feed, f}, err
}

func (f faultyFeed) Stop(ctx context.Context) error {
	err := f.Feed.Stop(ctx)
	if f.stopFeed != nil {
		return f.stopFeed(ctx)
	}
	return err
}

func (f faultyFeed) Lease(ctx context.Context, dst []leasebus.Lease) (int, error) {
	pass := func() (int, error) { return f.Feed.Lease(ctx, dst) }
	if f.lease != nil {
		return f.lease(ctx, pass)
	}
	return pass()
}

func (f faultyFeed) Renew(ctx context.Context, batch []leasebus.Renewal) error {
	pass := func() error { return f.Feed.Renew(ctx, batch) }
	if f.renew != nil {
		return f.renew(ctx, batch, pass)
	}
	return pass()
}

func (f faultyFeed) Settle(ctx context.Context, batch []leasebus.Settlement) error {
	pass := func() error { return f.Feed.Settle(ctx, batch) }
	if f.settle != nil {
		return f.settle(ctx, batch, pass)
	}
	return pass()
}

// quiet keeps the processors of tests from logging.
var quiet = leasebus.WithLogger(slog.New(slog.DiscardHandler))

var errStoreAway = errors.New("the store is away")

// rig is a processor over a memory store with faults between them, inside a synctest bubble.
type rig struct {
	*testing.T
	faults
	store     *memory.Store
	policy    leasebus.Policy
	processor *leasebus.Processor
	handler   func(ctx context.Context, text string) error
	ran       chan error // Run's answer
}

func newRig(t *testing.T) *rig {
	t.Helper()
	store := memory.New()
	policy := leasebus.DefaultPolicy("google.protobuf.StringValue", "queue")
	policy.Lease = leasebus.LeasePolicy{Duration: 40 * time.Second, Heartbeat: 10 * time.Second}
	policy.Retry = leasebus.RetryPolicy{MaxAttempts: 3, Initial: time.Second, Multiplier: 1}
	policy.RetainCompleted = time.Hour
	return &rig{T: t, faults: faults{Source: store}, store: store, policy: policy, ran: make(chan error, 1)}
}

func (r *rig) publish(texts ...string) []leasebus.Receipt {
	r.Helper()
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&r.policy, r.store)
	if err != nil {
		r.Fatal(err)
	}
	messages := make([]*wrapperspb.StringValue, len(texts))
	for i, text := range texts {
		messages[i] = wrapperspb.String(text)
	}
	receipts, err := publisher.PublishBatch(r.Context(), messages)
	if err != nil {
		r.Fatal(err)
	}
	return receipts
}

func (r *rig) start(opts ...leasebus.ProcessorOption) {
	r.Helper()
	p, err := leasebus.NewProcessor(&r.faults, append([]leasebus.ProcessorOption{quiet}, opts...)...)
	if err != nil {
		r.Fatal(err)
	}
	r.processor = p
	register(r, p)
	go func() { r.ran <- p.Run(context.WithoutCancel(r.Context())) }()
}

// wait lets d pass, and then everything happen that can happen without more of it.
func (r *rig) wait(d time.Duration) {
	r.Helper()
	time.Sleep(d)
	synctest.Wait()
}

func register(r *rig, p *leasebus.Processor, opts ...leasebus.HandlerOption) {
	r.Helper()
	err := leasebus.RegisterHandler(p, &r.policy, func(ctx context.Context, m *wrapperspb.StringValue) error {
		return r.handler(ctx, m.GetValue())
	}, opts...)
	if err != nil {
		r.Fatal(err)
	}
}

// stop drains and wants both answers to be want.
func (r *rig) stop() error {
	r.Helper()
	err := r.processor.Drain(context.Background())
	ran := <-r.ran
	synctest.Wait()
	if fmt.Sprint(ran) != fmt.Sprint(err) {
		r.Errorf("Drain answered %v, Run answered %v", err, ran)
	}
	return err
}

func (r *rig) mustStop() {
	r.Helper()
	if err := r.stop(); err != nil {
		r.Error(err)
	}
}

func (r *rig) stats() leasebus.QueueStats {
	r.Helper()
	stats, err := r.store.Stats(context.Background(), r.policy.Queue)
	if err != nil {
		r.Fatal(err)
	}
	return stats
}

func (r *rig) wantStats(want leasebus.QueueStats) {
	r.Helper()
	got := r.stats()
	got.OldestDueAge = 0
	if got != want {
		r.Errorf("store: %+v\nwant:  %+v", got, want)
	}
}

// wantCounters compares the counters of the processor, Leased and the errors left out.
func (r *rig) wantCounters(want leasebus.ProcessorStats) {
	r.Helper()
	got := r.processor.Stats()
	got.Leased, got.LeaseErrors, got.RenewErrors, got.SettleErrors = 0, 0, 0, 0
	if got != want {
		r.Errorf("counters: %+v\nwant:     %+v", got, want)
	}
}

func bubble(t *testing.T, test func(*rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(newRig(t)) })
}

func TestHeartbeat_S6_C1_12_one_failed_round_harms_nobody(t *testing.T) {
	bubble(t, func(r *rig) {
		var rounds atomic.Int32
		r.renew = func(_ context.Context, _ []leasebus.Renewal, pass func() error) error {
			if rounds.Add(1) == 1 {
				return errStoreAway
			}
			return pass()
		}
		r.handler = func(ctx context.Context, _ string) error {
			time.Sleep(10 * time.Minute)
			return ctx.Err()
		}
		r.publish("a")
		r.start()
		r.wait(11 * time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 1})
		r.mustStop()
	})
}

func TestHeartbeat_S6_C1_11_gives_up_before_the_lease_ends(t *testing.T) {
	for name, renew := range map[string]func(context.Context, []leasebus.Renewal, func() error) error{
		"error": func(context.Context, []leasebus.Renewal, func() error) error { return errStoreAway },
		"silence": func(ctx context.Context, _ []leasebus.Renewal, _ func() error) error {
			<-ctx.Done()
			return ctx.Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(r *rig) {
				r.renew = renew
				begun := time.Now()
				var ended time.Duration
				var cause error
				r.handler = func(ctx context.Context, _ string) error {
					<-ctx.Done()
					ended, cause = time.Since(begun), context.Cause(ctx)
					return nil
				}
				r.publish("a")
				r.start()
				r.wait(time.Minute)
				// 40 s of lease, counted from when it was asked for, less a tenth.
				if ended != 36*time.Second || !errors.Is(cause, leasebus.ErrLeaseLost) {
					t.Errorf("handler ended after %v with %v", ended, cause)
				}
				// The outcome is tried all the same: nobody has taken the message, so it counts.
				r.wantStats(leasebus.QueueStats{Completed: 1})
				r.wantCounters(leasebus.ProcessorStats{Succeeded: 1, LeaseLost: 1})
				r.mustStop()
			})
		})
	}
}

func TestHeartbeat_S5_S13_one_batch_for_all_and_busy_is_not_lost(t *testing.T) {
	bubble(t, func(r *rig) {
		var mu sync.Mutex
		var batches []int
		r.renew = func(_ context.Context, batch []leasebus.Renewal, pass func() error) error {
			mu.Lock()
			defer mu.Unlock()
			batches = append(batches, len(batch))
			if err := pass(); err != nil {
				return err
			}
			batch[0].Result = leasebus.ResultBusy
			return nil
		}
		r.handler = func(ctx context.Context, _ string) error {
			time.Sleep(45 * time.Second)
			return ctx.Err()
		}
		r.publish(make([]string, 50)...)
		r.start(leasebus.WithConcurrency(50))
		r.wait(50 * time.Second)
		if want := []int{50, 50, 50, 50}; !slices.Equal(batches, want) {
			t.Errorf("renewed %v, want %v", batches, want)
		}
		r.wantStats(leasebus.QueueStats{Completed: 50})
		r.mustStop()
	})
}

// second is a queue beside the rig's own, with the same handler: what is leased from it while the only worker is busy
// is held.
type second struct {
	policy    leasebus.Policy
	publisher *leasebus.TypedPublisher[*wrapperspb.BytesValue]
}

func newSecond(r *rig) second {
	r.Helper()
	s := second{policy: r.policy}
	s.policy.Queue, s.policy.Type, s.policy.DeadLetter.Queue = "second", "google.protobuf.BytesValue", "second.dlq"
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.BytesValue](&s.policy, r.store)
	if err != nil {
		r.Fatal(err)
	}
	s.publisher = publisher
	return s
}

func (s *second) publish(r *rig, text string) {
	r.Helper()
	if _, err := s.publisher.Publish(r.Context(), wrapperspb.Bytes([]byte(text))); err != nil {
		r.Fatal(err)
	}
}

// startBoth runs both queues on one worker.
func (r *rig) startBoth(s *second, opts ...leasebus.ProcessorOption) {
	r.Helper()
	opts = append([]leasebus.ProcessorOption{leasebus.WithConcurrency(1), quiet}, opts...)
	p, err := leasebus.NewProcessor(&r.faults, opts...)
	if err != nil {
		r.Fatal(err)
	}
	r.processor = p
	register(r, p)
	err = leasebus.RegisterHandler(p, &s.policy, func(ctx context.Context, m *wrapperspb.BytesValue) error { return r.handler(ctx, string(m.GetValue())) })
	if err != nil {
		r.Fatal(err)
	}
	go func() { r.ran <- p.Run(context.WithoutCancel(r.Context())) }()
}

func TestHeartbeat_S5_renews_what_waits_for_a_worker(t *testing.T) {
	bubble(t, func(r *rig) {
		var runs atomic.Int32
		r.handler = func(ctx context.Context, _ string) error {
			runs.Add(1)
			time.Sleep(100 * time.Second)
			return ctx.Err()
		}
		other := newSecond(r)
		r.publish("a")
		other.publish(r, "b")
		r.startBoth(&other)
		r.wait(90 * time.Second) // more than two leases
		if p := r.processor; runs.Load() != 1 || p.InFlight() != 1 || p.Held() != 1 {
			t.Errorf("%d runs, %d in flight, %d held; want one of each", runs.Load(), p.InFlight(), p.Held())
		}
		r.wait(120 * time.Second)
		if runs.Load() != 2 {
			t.Errorf("%d runs", runs.Load())
		}
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 2})
		r.mustStop()
	})
}

func TestSettler_S16_waits_for_a_store_that_is_away(t *testing.T) {
	bubble(t, func(r *rig) {
		var away atomic.Bool
		away.Store(true)
		r.settle = func(_ context.Context, _ []leasebus.Settlement, pass func() error) error {
			if away.Load() {
				return errStoreAway
			}
			return pass()
		}
		r.handler = func(context.Context, string) error { return nil }
		r.publish("a", "b", "c")
		r.start()
		r.wait(5 * time.Minute) // the heartbeat goes on: the leases stay valid
		r.wantStats(leasebus.QueueStats{Processing: 3})
		if calls := r.processor.Stats().SettleErrors; calls > 1000 {
			t.Errorf("%d tries in five minutes", calls)
		}
		away.Store(false)
		r.wait(5 * time.Second)
		r.wantStats(leasebus.QueueStats{Completed: 3})
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 3})
		r.mustStop()
	})
}

func TestSettler_S16_C5_6_reports_what_cannot_be_settled(t *testing.T) {
	bubble(t, func(r *rig) {
		r.settle = func(context.Context, []leasebus.Settlement, func() error) error { return errStoreAway }
		r.handler = func(context.Context, string) error { return nil }
		receipts := r.publish("a", "b")
		r.start()
		r.wait(time.Second)
		begun := time.Now()
		var left *leasebus.DrainError
		if err := r.stop(); !errors.As(err, &left) || left.UnsettledCount != 2 || !slices.Contains(left.Unsettled, receipts[0].ID) {
			t.Errorf("drain answered %v", err)
		}
		if took := time.Since(begun); took > 5*time.Second {
			t.Errorf("the drain took %v", took)
		}
		r.wantCounters(leasebus.ProcessorStats{SettleUnknown: 2})
	})
}

func TestSettler_S16_gives_up_when_the_lease_has_ended(t *testing.T) {
	bubble(t, func(r *rig) {
		var away atomic.Bool
		away.Store(true)
		r.settle = func(_ context.Context, _ []leasebus.Settlement, pass func() error) error {
			if away.Load() {
				return errStoreAway
			}
			return pass()
		}
		r.renew = func(context.Context, []leasebus.Renewal, func() error) error { return errStoreAway }
		var runs atomic.Int32
		r.handler = func(context.Context, string) error {
			if runs.Add(1) == 2 {
				away.Store(false)
			}
			return nil
		}
		r.publish("a")
		r.start()
		r.wait(2 * time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 1, SettleUnknown: 1})
		r.mustStop()
	})
}

func TestSettler_S14_a_lost_answer_is_not_a_rejection(t *testing.T) {
	bubble(t, func(r *rig) {
		var calls atomic.Int32
		r.settle = func(_ context.Context, _ []leasebus.Settlement, pass func() error) error {
			err := pass()
			if calls.Add(1) == 1 {
				return errStoreAway // it was written, but nobody heard
			}
			return err
		}
		r.handler = func(context.Context, string) error { return nil }
		r.publish("a")
		r.start()
		r.wait(time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.mustStop()
	})
}

func TestSettler_S14_a_lost_answer_without_results_is_unknown(t *testing.T) {
	bubble(t, func(r *rig) {
		var calls atomic.Int32
		r.settle = func(_ context.Context, batch []leasebus.Settlement, pass func() error) error {
			err := pass()
			if calls.Add(1) == 1 {
				for i := range batch {
					batch[i].Result = leasebus.ResultUnknown
				}
				return errStoreAway
			}
			return err
		}
		r.handler = func(context.Context, string) error { return nil }
		r.publish("a")
		r.start()
		r.wait(time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.wantCounters(leasebus.ProcessorStats{SettleUnknown: 1})
		r.mustStop()
	})
}

func TestSettler_S14_a_renewal_cannot_lose_what_is_being_settled(t *testing.T) {
	bubble(t, func(r *rig) {
		r.settle = func(_ context.Context, _ []leasebus.Settlement, pass func() error) error {
			time.Sleep(8 * time.Second)
			return pass()
		}
		r.renew = func(_ context.Context, batch []leasebus.Renewal, _ func() error) error {
			for i := range batch {
				batch[i].Result = leasebus.ResultLost
			}
			return nil
		}
		var cancelled atomic.Bool
		r.handler = func(ctx context.Context, _ string) error {
			time.Sleep(5 * time.Second) // the settlement lasts from 5 s to 13 s, the renewal comes at 10 s
			cancelled.Store(ctx.Err() != nil)
			return nil
		}
		r.publish("a")
		r.start()
		r.wait(time.Minute)
		if cancelled.Load() {
			t.Error("the handler was cancelled")
		}
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 1})
		r.mustStop()
	})
}

// refusing makes a settlement fail the way a database does: the whole batch, because of one element's data. It counts
// the batches that it refuses.
func refusing(poisonous func(leasebus.Settlement) bool, refused *atomic.Int32) func(context.Context, []leasebus.Settlement, func() error) error {
	return func(_ context.Context, batch []leasebus.Settlement, pass func() error) error {
		if slices.ContainsFunc(batch, poisonous) {
			refused.Add(1)
			return fmt.Errorf("invalid byte sequence: %w", leasebus.ErrUnstorable)
		}
		return pass()
	}
}

func TestSettler_S15_C3_1_C3_2_C3_3_one_bad_element_spoils_no_other(t *testing.T) {
	bubble(t, func(r *rig) {
		var refused atomic.Int32
		r.settle = refusing(func(s leasebus.Settlement) bool { return s.Failure != nil && s.Failure.Text == "poison" }, &refused)
		r.handler = func(_ context.Context, text string) error {
			if text == "bad" {
				return leasebus.Permanent(errors.New("poison"))
			}
			return nil
		}
		texts := make([]string, 41)
		texts[17] = "bad"
		receipts := r.publish(texts...)
		r.start()
		r.wait(time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 40, DeadLettered: 1})
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 40, DeadLettered: 1})
		dead, err := r.store.DeadLetters(t.Context(), "queue", leasebus.Filter{}, "", 10)
		if err != nil || len(dead) != 1 || dead[0].ID != receipts[17].ID || dead[0].Error != "the store refused the text of this error" {
			t.Errorf("dead letters: %+v, %v", dead, err)
		}
		if n := refused.Load(); n > 7 { // 41, 21, 11, 6, 3, 2, 1
			t.Errorf("%d batches were refused to find one of 41", n)
		}
		r.mustStop()
	})
}

func TestSettler_S15_what_can_never_be_stored_does_not_loop(t *testing.T) {
	bubble(t, func(r *rig) {
		var refused atomic.Int32
		r.settle = refusing(func(s leasebus.Settlement) bool { return s.Kind == leasebus.SettleDeadLetter }, &refused)
		r.handler = func(context.Context, string) error { return leasebus.Permanent(errors.New("poison")) }
		r.publish("bad")
		r.start()
		r.wait(30 * time.Second)
		if n := refused.Load(); n != 2 {
			t.Errorf("%d refusals, want one with the text and one without", n)
		}
		r.wantCounters(leasebus.ProcessorStats{SettleUnknown: 1})
		r.wantStats(leasebus.QueueStats{Processing: 1}) // left to expire
		r.mustStop()
	})
}

func TestSettler_S13_busy_is_tried_again(t *testing.T) {
	bubble(t, func(r *rig) {
		busy := 3
		r.settle = func(_ context.Context, batch []leasebus.Settlement, pass func() error) error {
			if busy--; busy >= 0 {
				batch[0].Result = leasebus.ResultBusy
				return nil
			}
			return pass()
		}
		r.handler = func(context.Context, string) error { return nil }
		r.publish("a")
		r.start()
		r.wait(time.Second)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 1})
		r.mustStop()
	})
}

func TestSettler_S13_busy_for_ever_is_left_to_expire(t *testing.T) {
	bubble(t, func(r *rig) {
		r.settle = func(_ context.Context, batch []leasebus.Settlement, _ func() error) error {
			batch[0].Result = leasebus.ResultBusy
			return nil
		}
		r.handler = func(context.Context, string) error { return nil }
		r.publish("a")
		r.start(leasebus.WithConcurrency(1))
		r.wait(41 * time.Second)
		r.wantCounters(leasebus.ProcessorStats{SettleUnknown: 1})
		r.mustStop()
	})
}

// inTransaction makes handlers complete their message the way a backend's CompleteTx does, and answers Verify with
// what verify says.
func inTransaction(r *rig, verify func(call int) leasebus.Result) (renewed *atomic.Int32) {
	renewed = new(atomic.Int32)
	calls := 0
	r.settle = func(_ context.Context, batch []leasebus.Settlement, pass func() error) error {
		if batch[0].Kind != leasebus.SettleVerify {
			return pass()
		}
		calls++
		batch[0].Result = verify(calls)
		return nil
	}
	r.renew = func(_ context.Context, batch []leasebus.Renewal, pass func() error) error {
		renewed.Add(int32(len(batch)))
		return pass()
	}
	return renewed
}

func TestCompleteTx_S17_the_row_tells_what_was_committed(t *testing.T) {
	for name, tt := range map[string]struct {
		verify   func(call int) leasebus.Result
		answer   error
		counters leasebus.ProcessorStats
		failure  string
	}{
		"committed": {
			verify:   func(int) leasebus.Result { return leasebus.ResultOK },
			counters: leasebus.ProcessorStats{Succeeded: 1},
		},
		"committed, then an error": {
			verify:   func(int) leasebus.Result { return leasebus.ResultOK },
			answer:   errors.New("after the commit"),
			counters: leasebus.ProcessorStats{Succeeded: 1},
		},
		"committing still": {
			verify: func(call int) leasebus.Result {
				if call < 3 {
					return leasebus.ResultBusy
				}
				return leasebus.ResultOK
			},
			counters: leasebus.ProcessorStats{Succeeded: 1},
		},
		"rolled back in silence": {
			verify:   func(int) leasebus.Result { return leasebus.ResultStillLeased },
			counters: leasebus.ProcessorStats{DeadLettered: 1},
			failure:  "the handler's transaction did not commit",
		},
		"rolled back with an error": {
			verify:   func(int) leasebus.Result { return leasebus.ResultStillLeased },
			answer:   errors.New("serialization failure"),
			counters: leasebus.ProcessorStats{DeadLettered: 1},
			failure:  "serialization failure",
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(r *rig) {
				r.policy.Retry = leasebus.NoRetry()
				renewed := inTransaction(r, tt.verify)
				r.handler = func(ctx context.Context, _ string) error {
					lease, _ := leasebus.LeaseFrom(ctx)
					if err := lease.BeginComplete(); err != nil {
						t.Error(err)
					}
					if err := lease.BeginComplete(); err == nil {
						t.Error("a lease was completed twice")
					}
					time.Sleep(25 * time.Second)
					return tt.answer
				}
				r.publish("a")
				r.start()
				r.wait(30 * time.Second)
				r.wantCounters(tt.counters)
				if renewed.Load() != 0 {
					t.Error("a lease was renewed while its transaction had the row")
				}
				dead, err := r.store.DeadLetters(t.Context(), "queue", leasebus.Filter{}, "", 1)
				if err != nil || (len(dead) == 1) != (tt.failure != "") || len(dead) == 1 && dead[0].Error != tt.failure {
					t.Errorf("dead letters %+v, %v", dead, err)
				}
				r.mustStop()
			})
		})
	}
}

func TestCompleteTx_S17_refused_by_the_fence(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(ctx context.Context, _ string) error {
			lease, _ := leasebus.LeaseFrom(ctx)
			if err := lease.BeginComplete(); err != nil {
				return err
			}
			lease.AbortComplete(leasebus.ErrLeaseLost)
			if !errors.Is(context.Cause(ctx), leasebus.ErrLeaseLost) {
				t.Errorf("the handler goes on without a lease: %v", context.Cause(ctx))
			}
			return context.Cause(ctx)
		}
		r.policy.Retry = leasebus.NoRetry()
		r.publish("a")
		r.start()
		r.wait(time.Second)
		r.wantCounters(leasebus.ProcessorStats{DeadLettered: 1})
		r.mustStop()
	})
}

func TestTimeout_S11_C1_15_a_stuck_handler_is_abandoned(t *testing.T) {
	bubble(t, func(r *rig) {
		r.policy.Timeout = time.Minute
		r.policy.Retry = leasebus.RetryPolicy{MaxAttempts: 2, Initial: time.Second, Multiplier: 1}
		stuck := make(chan struct{})
		causes := make(chan error, 2)
		r.handler = func(ctx context.Context, text string) error {
			if text == "fine" {
				return nil
			}
			if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) != time.Minute {
				t.Errorf("deadline %v, %v", deadline, ok)
			}
			<-stuck
			causes <- context.Cause(ctx)
			return nil // too late
		}
		r.publish("stuck", "fine", "fine")
		r.start(leasebus.WithConcurrency(1))
		r.wait(5 * time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 2, DeadLettered: 1})
		// The first abandoned handler's worker was replaced; the concurrency is 1, so the second one's was not.
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 2, Failed: 1, DeadLettered: 1, Abandoned: 2})
		if r.processor.InFlight() != 0 {
			t.Errorf("%d in flight", r.processor.InFlight())
		}
		dead, err := r.store.DeadLetters(t.Context(), "queue", leasebus.Filter{}, "", 1)
		if err != nil || dead[0].Reason != leasebus.ReasonExhausted || dead[0].Attempts != 2 {
			t.Errorf("dead letters %+v, %v", dead, err)
		}
		close(stuck)
		for range 2 {
			if cause := <-causes; !errors.Is(cause, leasebus.ErrHandlerTimeout) {
				t.Errorf("cause %v", cause)
			}
		}
		r.publish("fine")
		r.wait(time.Second)
		r.wantStats(leasebus.QueueStats{Completed: 3, DeadLettered: 1}) // the worker that was not replaced is back
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 3, Failed: 1, DeadLettered: 1, Abandoned: 2, AbandonedReturned: 2})
		r.mustStop()
	})
}

func TestTimeout_S7_is_an_ordinary_failure(t *testing.T) {
	bubble(t, func(r *rig) {
		r.policy.Timeout = time.Second
		r.policy.Retry = leasebus.NoRetry()
		r.handler = func(ctx context.Context, _ string) error {
			<-ctx.Done()
			return ctx.Err()
		}
		r.publish("slow")
		r.start()
		r.wait(3 * time.Second)
		dead, err := r.store.DeadLetters(t.Context(), "queue", leasebus.Filter{}, "", 1)
		if want := "leasebus: handler timed out after 1s: context canceled"; err != nil || len(dead) != 1 || dead[0].Error != want {
			t.Errorf("dead letters %+v, %v", dead, err)
		}
		r.wantCounters(leasebus.ProcessorStats{DeadLettered: 1})
		r.mustStop()
	})
}

func TestLeasing_S54_a_store_that_is_away_costs_little(t *testing.T) {
	bubble(t, func(r *rig) {
		var away atomic.Bool
		var calls atomic.Int32
		away.Store(true)
		r.lease = func(_ context.Context, pass func() (int, error)) (int, error) {
			calls.Add(1)
			if away.Load() {
				return 0, errStoreAway
			}
			return pass()
		}
		r.handler = func(context.Context, string) error { return nil }
		r.publish("a")
		r.start()
		r.wait(time.Hour)
		if n := calls.Load(); n < 100 || n > 1000 {
			t.Errorf("%d tries in an hour", n)
		}
		away.Store(false)
		r.wait(10 * time.Second)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.mustStop()
	})
}

func TestLeasing_leases_that_arrive_too_late_go_back(t *testing.T) {
	bubble(t, func(r *rig) {
		late := 37 * time.Second
		r.lease = func(_ context.Context, pass func() (int, error)) (int, error) {
			n, err := pass()
			time.Sleep(late) // the answer took most of the lease
			late = 0
			return n, err
		}
		var attempt int
		r.handler = func(ctx context.Context, _ string) error {
			d, _ := leasebus.DeliveryFrom(ctx)
			attempt = d.Attempt()
			return nil
		}
		r.publish("a")
		r.start()
		r.wait(time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 1, Released: 1})
		if attempt != 1 {
			t.Errorf("attempt %d: a lease that was never worked on was paid for", attempt)
		}
		r.mustStop()
	})
}

func TestLookAhead_S2_slow_handlers_hoard_nothing(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(context.Context, string) error {
			time.Sleep(2 * time.Second)
			return nil
		}
		r.publish(make([]string, 1000)...)
		r.start(leasebus.WithConcurrency(4))
		for range 60 {
			time.Sleep(time.Second + 7*time.Millisecond)
			if got := r.stats(); got.Processing > 6 {
				t.Fatalf("%d leased for 4 slow workers", got.Processing)
			}
		}
		r.mustStop()
		if got := r.stats(); got.Processing != 0 || got.Completed < 100 {
			t.Errorf("store: %+v", got)
		}
	})
}

func TestLookAhead_S2_S10_none_for_messages_with_one_attempt(t *testing.T) {
	bubble(t, func(r *rig) {
		r.policy.Retry = leasebus.NoRetry()
		r.handler = func(_ context.Context, text string) error {
			if text == "slow" {
				time.Sleep(time.Minute)
			}
			time.Sleep(time.Millisecond) // fast enough to look ahead for
			return nil
		}
		texts := make([]string, 3000)
		for i := 2000; i < len(texts); i++ {
			texts[i] = "slow"
		}
		r.publish(texts...)
		r.start(leasebus.WithConcurrency(4))
		r.wait(30 * time.Second)
		if got := r.stats(); got.Processing != 4 || got.Completed != 2000 {
			t.Errorf("%d leased for 4 workers, %d completed", got.Processing, got.Completed)
		}
		_ = r.leftBy(4, 0)
		r.wait(time.Hour)
	})
}

func TestLookAhead_S2_0_is_free_slots_only(t *testing.T) {
	bubble(t, func(r *rig) {
		var most atomic.Int64
		r.handler = func(context.Context, string) error {
			most.Store(max(most.Load(), r.stats().Processing))
			return nil
		}
		r.publish(make([]string, 1000)...)
		r.start(leasebus.WithConcurrency(4), leasebus.WithLookAhead(0), leasebus.WithSettleLinger(0))
		r.wait(time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 1000})
		r.mustStop()
		// Handlers that have returned count until they are settled.
		if n := most.Load(); n > 4+4*500 {
			t.Errorf("%d leased at once", n)
		}
	})
}

func TestLookAhead_S2_fast_handlers_get_full_batches(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const messages = 30_000
	var calls, leased atomic.Int64
	done := make(chan struct{})
	r.lease = func(_ context.Context, pass func() (int, error)) (int, error) {
		n, err := pass()
		calls.Add(1)
		if leased.Add(int64(n)) == messages && n > 0 {
			close(done)
		}
		return n, err
	}
	r.handler = func(context.Context, string) error { return nil }
	r.publish(make([]string, messages)...)
	r.start(leasebus.WithConcurrency(8))
	<-done
	r.stopReal()
	if mean := messages / calls.Load(); mean < 64 {
		t.Errorf("%d leases a call with 8 workers: fast handlers are to get full batches", mean)
	}
}

// While a queue is full, a second Lease call is under way, and both together ask for no more than there is room for.
func TestLookAhead_S2_TwoCallsUnderWayWhileTheQueueIsFull(t *testing.T) {
	for _, tt := range []struct{ messages, concurrency, most int }{
		{5000, 1000, 2},
		{5000, 150, 1}, // a second one would not pay
		{150, 1000, 1}, // the first call finds all there is
	} {
		bubble(t, func(r *rig) {
			var underWay, most, held atomic.Int64
			r.lease = func(_ context.Context, pass func() (int, error)) (int, error) {
				most.Store(max(most.Load(), underWay.Add(1)))
				defer underWay.Add(-1)
				time.Sleep(time.Millisecond)
				n, err := pass()
				if now := held.Add(int64(n)); now > int64(tt.concurrency) {
					r.Errorf("%d leases for %d free slots", now, tt.concurrency)
				}
				return n, err
			}
			r.handler = func(context.Context, string) error {
				time.Sleep(time.Second) // longer than any look-ahead is for
				held.Add(-1)
				return nil
			}
			r.publish(make([]string, tt.messages)...)
			r.start(leasebus.WithConcurrency(tt.concurrency), leasebus.WithLookAhead(0))
			r.wait(time.Minute)
			r.wantStats(leasebus.QueueStats{Completed: int64(tt.messages)})
			r.mustStop()
			if int(most.Load()) != tt.most {
				t.Errorf("%d messages for %d workers: %d Lease calls were under way at once, want %d", tt.messages, tt.concurrency, most.Load(), tt.most)
			}
		})
	}
}

// A Lease call that found nothing, and whose answer comes after those of younger calls that found all they asked for,
// does not end the leasing: the store will not wake for what it has not been asked for since.
func TestLease_S55_AnOldAnswerDoesNotHideWhatCameSince(t *testing.T) {
	bubble(t, func(r *rig) {
		const messages = 3000
		asked, answer := make(chan struct{}), make(chan struct{})
		var calls atomic.Int64
		r.lease = func(_ context.Context, pass func() (int, error)) (int, error) {
			n, err := pass()
			if calls.Add(1) == 1 {
				close(asked)
				<-answer
			}
			return n, err
		}
		finish := make(chan struct{})
		r.handler = func(context.Context, string) error {
			<-finish
			return nil
		}
		r.start(leasebus.WithConcurrency(messages/2), leasebus.WithLookAhead(0))
		<-asked
		r.publish(make([]string, messages)...)
		r.wait(0) // younger calls took all there was room for beside the first
		close(answer)
		r.wait(0)
		close(finish)
		r.wait(time.Second)
		r.wantStats(leasebus.QueueStats{Completed: messages})
		r.mustStop()
	})
}

// stopReal is mustStop outside a bubble.
func (r *rig) stopReal() {
	r.Helper()
	if err := errors.Join(r.processor.Drain(context.Background()), <-r.ran); err != nil {
		r.Error(err)
	}
}

func TestOwner_S3_one_label_is_two_owners(t *testing.T) {
	bubble(t, func(r *rig) {
		owners := make(chan string, 2)
		r.handler = func(context.Context, string) error { return nil }
		for range 2 {
			p, err := leasebus.NewProcessor(ownerSource{r.store, owners}, quiet, leasebus.WithOwner("worker"))
			if err != nil {
				t.Fatal(err)
			}
			register(r, p)
			go func() { r.ran <- p.Run(context.WithoutCancel(t.Context())) }()
			r.wait(time.Second)
			if err := errors.Join(p.Drain(context.Background()), <-r.ran); err != nil {
				t.Error(err)
			}
		}
		first, second := <-owners, <-owners
		if first == second || !strings.HasPrefix(first, "worker#") || !strings.HasPrefix(second, "worker#") {
			t.Errorf("owners %q and %q", first, second)
		}
	})
}

// ownerSource tells who subscribes.
type ownerSource struct {
	leasebus.Source
	owners chan<- string
}

func (s ownerSource) Subscribe(ctx context.Context, sub leasebus.Subscription) (leasebus.Feed, error) {
	s.owners <- sub.Owner
	return s.Source.Subscribe(ctx, sub)
}

func TestHeartbeat_S8_and_settlements_wait_for_nothing_else(t *testing.T) {
	bubble(t, func(r *rig) {
		leasing := 0
		r.lease = func(ctx context.Context, pass func() (int, error)) (int, error) {
			if leasing++; leasing == 1 {
				return pass()
			}
			<-ctx.Done() // the connection for leasing is stuck
			return 0, ctx.Err()
		}
		r.handler = func(ctx context.Context, text string) error {
			if text == "slow" {
				time.Sleep(5 * time.Minute) // and so are all workers
			}
			return ctx.Err()
		}
		r.publish("slow", "slow", "fast")
		r.start(leasebus.WithConcurrency(3))
		r.wait(4 * time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 1, Processing: 2})
		r.wait(2 * time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 3})
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 3})
		r.mustStop()
	})
}

// Messages that come in drops, while those before them are just being started, find the idle workers too.
func TestLease_S55_no_worker_stays_idle_while_messages_come(t *testing.T) {
	const workers, rounds = 41, 200
	for range rounds {
		bubble(t, func(r *rig) {
			var running atomic.Int32
			all := make(chan struct{})
			r.handler = func(context.Context, string) error {
				running.Add(1)
				<-all
				return nil
			}
			r.start(leasebus.WithConcurrency(workers))
			for range workers {
				r.publish("drop")
			}
			r.wait(time.Second) // in which no heartbeat passes
			if n := running.Load(); n != workers {
				t.Errorf("%d handlers run, want %d: the other messages were never leased", n, workers)
			}
			close(all)
			r.mustStop()
		})
		if t.Failed() {
			return
		}
	}
}
