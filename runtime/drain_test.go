package leasebus_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// leftBy drains, and wants an error that counts what was left.
func (r *rig) leftBy(abandoned, unsettled int) *leasebus.DrainError {
	r.Helper()
	var left *leasebus.DrainError
	if err := r.stop(); !errors.As(err, &left) || left.AbandonedCount != abandoned || left.UnsettledCount != unsettled {
		r.Fatalf("drain answered %v; want %d abandoned, %d unsettled", err, abandoned, unsettled)
	}
	return left
}

func TestRefill_S26_C4_9_never_waits_for_the_whole_batch(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(_ context.Context, text string) error {
			if text == "slow" {
				time.Sleep(time.Hour)
			}
			time.Sleep(time.Second)
			return nil
		}
		texts := make([]string, 101)
		texts[0] = "slow"
		r.publish(texts...)
		r.start(leasebus.WithConcurrency(2))
		r.wait(102 * time.Second)
		r.wantStats(leasebus.QueueStats{Completed: 100, Processing: 1})
		_ = r.leftBy(1, 0)
		r.wait(time.Hour) // the bubble ends when the abandoned handler has returned
	})
}

func TestDrain_S50_C5_11_gives_back_at_once_what_is_not_started(t *testing.T) {
	bubble(t, func(r *rig) {
		ran := 0
		r.handler = func(ctx context.Context, _ string) error {
			ran++
			time.Sleep(5 * time.Second)
			return ctx.Err()
		}
		other := newSecond(r)
		r.publish("a")
		other.publish(r, "b")
		r.startBoth(&other)
		r.wait(time.Second)
		if r.processor.Held() != 1 {
			t.Fatalf("%d held, want the one that waits", r.processor.Held())
		}
		drained := make(chan error, 1)
		go func() { drained <- r.processor.Drain(context.Background()) }()
		r.wait(100 * time.Millisecond)
		processing, pending := int64(0), int64(0)
		for _, queue := range []string{"queue", "second"} {
			stats, err := r.store.Stats(t.Context(), queue)
			if err != nil {
				t.Fatal(err)
			}
			processing, pending = processing+stats.Processing, pending+stats.Due
		}
		if processing != 1 || pending != 1 {
			t.Errorf("%d processing, %d due; the one that waits must be there for others at once", processing, pending)
		}
		if err := errors.Join(<-drained, <-r.ran); err != nil {
			t.Error(err)
		}
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 1, Released: 1})
		// The other processor finds it with its attempt unspent.
		r.handler = func(ctx context.Context, _ string) error {
			if d, _ := leasebus.DeliveryFrom(ctx); d.Attempt() != 1 {
				t.Errorf("attempt %d", d.Attempt())
			}
			ran++
			return nil
		}
		r.startBoth(&other)
		r.wait(time.Second)
		r.mustStop()
		if ran != 2 {
			t.Errorf("%d runs", ran)
		}
	})
}

// rerun hands what is left to another processor and checks that it starts at attempt.
func (r *rig) rerun(attempt int) {
	r.Helper()
	ran := 0
	r.handler = func(ctx context.Context, _ string) error {
		if d, _ := leasebus.DeliveryFrom(ctx); d.Attempt() != attempt {
			r.Errorf("handed over with attempt %d, want %d", d.Attempt(), attempt)
		}
		ran++
		return nil
	}
	r.start()
	r.wait(time.Second)
	r.mustStop()
	if ran != 1 {
		r.Errorf("%d messages were left", ran)
	}
}

func TestDrain_S50_C5_9_cancels_with_the_shutdown_cause_and_gives_the_attempt_back(t *testing.T) {
	bubble(t, func(r *rig) {
		r.policy.Retry = leasebus.NoRetry() // a failure would be a dead letter
		var cause error
		r.handler = func(ctx context.Context, _ string) error {
			<-ctx.Done()
			cause = context.Cause(ctx)
			return ctx.Err()
		}
		r.publish("a")
		r.start()
		r.wait(time.Second)
		begun := time.Now()
		r.mustStop()
		if took := time.Since(begun); took < 20*time.Second || took > 21*time.Second {
			t.Errorf("the drain took %v, want the drain timeout", took)
		}
		if !errors.Is(cause, leasebus.ErrShutdown) {
			t.Errorf("cause %v", cause)
		}
		r.wantStats(leasebus.QueueStats{Pending: 1, Due: 1})
		r.wantCounters(leasebus.ProcessorStats{Released: 1})
		r.rerun(1)
	})
}

func TestDrain_S50_C5_1_verdicts_after_the_shutdown_count(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(ctx context.Context, text string) error {
			<-ctx.Done()
			switch text {
			case "done":
				return nil
			case "bad":
				return leasebus.Permanent(errors.New("bad"))
			default:
				return leasebus.RetryAfter(time.Hour, errors.New("later"))
			}
		}
		r.publish("done", "bad", "later")
		r.start()
		r.wait(time.Second)
		r.mustStop()
		r.wantStats(leasebus.QueueStats{Completed: 1, DeadLettered: 1, Failed: 1})
	})
}

func TestDrain_S50_C5_5_abandons_and_drops_the_late_outcome(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(context.Context, string) error {
			time.Sleep(time.Minute)
			return nil
		}
		receipts := r.publish("a")
		r.start()
		r.wait(time.Second)
		begun := time.Now()
		left := r.leftBy(1, 0)
		if took := time.Since(begun); took < 25*time.Second || took > 26*time.Second {
			t.Errorf("the drain took %v, want 20 s and 5 s of grace", took)
		}
		if !slices.Equal(left.Abandoned, []leasebus.ID{receipts[0].ID}) {
			t.Errorf("left %v, want %v", left.Abandoned, receipts[0].ID)
		}
		r.wait(time.Minute)
		stats := r.stats()
		if stats.Completed != 0 || stats.Processing != 1 || stats.Stuck != 1 {
			t.Errorf("store: %+v; the late outcome must be dropped, the lease left to expire", stats)
		}
		r.rerun(2) // the attempt is spent
	})
}

func TestDrain_S51_a_context_that_ends_leaves_handlers_running(t *testing.T) {
	bubble(t, func(r *rig) {
		var cancelled atomic.Bool
		r.handler = func(ctx context.Context, _ string) error {
			time.Sleep(30 * time.Second)
			cancelled.Store(ctx.Err() != nil)
			return nil
		}
		r.publish("a")
		r.start()
		r.wait(time.Second)
		mine := errors.New("enough")
		ctx, cancel := context.WithCancelCause(context.Background())
		cancel(mine)
		var left *leasebus.DrainError
		if err := r.processor.Drain(ctx); !errors.Is(err, mine) || errors.As(err, &left) {
			t.Errorf("drain answered %v", err)
		}
		r.publish("b")
		r.wait(40 * time.Second)
		if cancelled.Load() {
			t.Error("the handler was cancelled")
		}
		r.wantStats(leasebus.QueueStats{Completed: 1, Pending: 1, Due: 1}) // nothing was leased any more
		r.mustStop()
	})
}

func TestDrain_S53_twice_and_by_several(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(context.Context, string) error {
			time.Sleep(10 * time.Second)
			return nil
		}
		r.publish("a")
		r.start()
		r.wait(time.Second)
		answers := make(chan error, 3)
		for range 3 {
			go func() { answers <- r.processor.Drain(context.Background()) }()
		}
		for range 3 {
			if err := <-answers; err != nil {
				t.Error(err)
			}
		}
		r.mustStop()
		r.wantStats(leasebus.QueueStats{Completed: 1})
	})
}

func TestDrain_S53_from_inside_a_handler(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(ctx context.Context, _ string) error {
			begun := time.Now()
			child, cancel := context.WithTimeout(ctx, time.Hour)
			defer cancel()
			if err := r.processor.Drain(child); !errors.Is(err, leasebus.ErrDrainStarted) || time.Since(begun) > time.Second {
				t.Errorf("drain inside a handler answered %v after %v", err, time.Since(begun))
			}
			return nil
		}
		r.publish("a")
		r.start()
		if err := <-r.ran; err != nil {
			t.Error(err)
		}
		r.wantStats(leasebus.QueueStats{Completed: 1})
	})
}

func TestDrain_before_Run(t *testing.T) {
	bubble(t, func(r *rig) {
		p, err := leasebus.NewProcessor(r.store, quiet)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Drain(context.Background()); err != nil {
			t.Error(err)
		}
		if err := p.Run(context.Background()); err == nil {
			t.Error("a processor that was drained ran")
		}
	})
}

func TestRun_drains_when_its_context_ends(t *testing.T) {
	bubble(t, func(r *rig) {
		var cancelled atomic.Bool
		r.handler = func(ctx context.Context, _ string) error {
			time.Sleep(10 * time.Second)
			cancelled.Store(ctx.Err() != nil)
			return nil
		}
		r.publish("a")
		p, err := leasebus.NewProcessor(r.store, quiet)
		if err != nil {
			t.Fatal(err)
		}
		r.processor = p
		register(r, p)
		ctx, cancel := context.WithCancel(context.Background())
		go func() { r.ran <- p.Run(ctx) }()
		r.wait(time.Second)
		cancel()
		if err := <-r.ran; err != nil {
			t.Error(err)
		}
		if cancelled.Load() {
			t.Error("the end of Run's context reached the handler at once")
		}
		r.wantStats(leasebus.QueueStats{Completed: 1})
	})
}

func TestPause_S52_hands_the_same_message_over_again(t *testing.T) {
	for name, tt := range map[string]struct {
		pause time.Duration
		held  int
	}{
		"shorter than a heartbeat: it is kept": {5 * time.Second, 1},
		"longer: it goes back meanwhile":       {time.Minute, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(r *rig) {
				var seen []string
				r.handler = func(ctx context.Context, text string) error {
					if d, _ := leasebus.DeliveryFrom(ctx); d.Attempt() != 1 {
						t.Errorf("%s: attempt %d", text, d.Attempt())
					}
					seen = append(seen, text)
					time.Sleep(time.Second)
					return nil
				}
				other := newSecond(r)
				r.publish("x")
				other.publish(r, "x")
				r.startBoth(&other)
				r.wait(500 * time.Millisecond)
				r.processor.Pause()
				r.processor.Pause()
				r.wait(tt.pause)
				if p := r.processor; len(seen) != 1 || p.InFlight() != 0 || p.Held() != tt.held {
					t.Errorf("ran %v, %d in flight, %d held; want 1 run, 0, %d", seen, p.InFlight(), p.Held(), tt.held)
				}
				r.processor.Resume()
				r.processor.Resume()
				r.wait(2 * time.Second)
				r.wantCounters(leasebus.ProcessorStats{Succeeded: 2, Released: int64(1 - tt.held)})
				r.mustStop()
			})
		})
	}
}

func TestPause_S52_running_handlers_go_on_and_keep_their_leases(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(ctx context.Context, _ string) error {
			time.Sleep(10 * time.Minute)
			return ctx.Err()
		}
		r.publish("a")
		r.start()
		r.wait(time.Second)
		r.processor.Pause()
		r.wait(11 * time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.wantCounters(leasebus.ProcessorStats{Succeeded: 1})
		r.mustStop() // while paused
	})
}

func TestResume_S54_subscribes_until_it_works(t *testing.T) {
	bubble(t, func(r *rig) {
		fail := 0
		r.subscribe = func() error {
			if fail--; fail >= 0 {
				return errStoreAway
			}
			return nil
		}
		r.handler = func(context.Context, string) error { return nil }
		r.start()
		synctest.Wait()
		r.processor.Pause()
		fail = 5
		r.publish("a")
		r.processor.Resume()
		r.wait(time.Minute)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.mustStop()
	})
}

func TestRun_a_subscription_that_fails_at_the_start_is_told(t *testing.T) {
	bubble(t, func(r *rig) {
		r.subscribe = func() error { return errStoreAway }
		r.start()
		if err := <-r.ran; !errors.Is(err, errStoreAway) {
			t.Errorf("Run answered %v", err)
		}
	})
}

func TestGate_S52_publishing_paused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	gate := leasebus.NewPublishGate(r.store)
	gate.Pause()
	receipts := make([]leasebus.Receipt, 1)
	publish := func() error {
		envelope := leasebus.Envelope{ID: leasebus.NewID(), Type: r.policy.Type, Queue: r.policy.Queue}
		return gate.Publish(t.Context(), []leasebus.Outgoing{{Envelope: envelope}}, receipts)
	}
	if err := publish(); !errors.Is(err, leasebus.ErrPublishingPaused) || !errors.Is(receipts[0].Err, leasebus.ErrPublishingPaused) {
		t.Errorf("paused: %v, %v", err, receipts)
	}
	receipts[0] = leasebus.Receipt{}
	gate.Resume()
	if err := publish(); err != nil {
		t.Errorf("resumed: %v", err)
	}
	r.wantStats(leasebus.QueueStats{Pending: 1, Due: 1})
}

func TestDrain_S51_does_not_wait_for_a_store_that_hangs_at_the_start(t *testing.T) {
	bubble(t, func(r *rig) {
		hanging := hangingSource{r.store}
		p, err := leasebus.NewProcessor(hanging, quiet)
		if err != nil {
			t.Fatal(err)
		}
		register(r, p)
		go func() { r.ran <- p.Run(context.WithoutCancel(t.Context())) }()
		r.wait(time.Second)
		begun := time.Now()
		if err := p.Drain(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-r.ran; err != nil {
			t.Error(err)
		}
		if took := time.Since(begun); took > time.Second {
			t.Errorf("the drain took %v", took)
		}
	})
}

// hangingSource subscribes until it is told to stop.
type hangingSource struct{ leasebus.Source }

func (hangingSource) Subscribe(ctx context.Context, _ leasebus.Subscription) (leasebus.Feed, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestDrain_S50_fits_the_thirty_seconds_of_a_pod(t *testing.T) {
	bubble(t, func(r *rig) {
		r.settle = func(ctx context.Context, _ []leasebus.Settlement, _ func() error) error {
			<-ctx.Done()
			return ctx.Err()
		}
		r.stopFeed = func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}
		stuck := make(chan struct{})
		r.handler = func(_ context.Context, text string) error {
			if text == "stuck" {
				<-stuck
			}
			return nil
		}
		r.publish("stuck", "fine")
		r.start()
		r.wait(time.Second)
		begun := time.Now()
		_ = r.leftBy(1, 1)
		if took := time.Since(begun); took >= 30*time.Second {
			t.Errorf("the drain took %v", took)
		}
		close(stuck)
	})
}

func TestPause_S52_before_Run_begins_paused(t *testing.T) {
	bubble(t, func(r *rig) {
		r.handler = func(context.Context, string) error { return nil }
		r.publish("a")
		p, err := leasebus.NewProcessor(r.store, quiet)
		if err != nil {
			t.Fatal(err)
		}
		r.processor = p
		register(r, p)
		p.Pause()
		go func() { r.ran <- p.Run(context.WithoutCancel(t.Context())) }()
		r.wait(time.Minute)
		r.wantStats(leasebus.QueueStats{Pending: 1, Due: 1})
		p.Resume()
		r.wait(time.Second)
		r.wantStats(leasebus.QueueStats{Completed: 1})
		r.mustStop()
	})
}

func TestSettler_S16_a_drain_accounts_for_what_is_busy(t *testing.T) {
	bubble(t, func(r *rig) {
		r.settle = func(_ context.Context, batch []leasebus.Settlement, _ func() error) error {
			for i := range batch {
				batch[i].Result = leasebus.ResultBusy
			}
			return nil
		}
		var told atomic.Int32
		r.handler = func(context.Context, string) error { return nil }
		r.publish("a", "b")
		r.start(leasebus.WithHooks(leasebus.Hooks{Settled: func(leasebus.Delivery, leasebus.Outcome) { told.Add(1) }}))
		r.wait(time.Second)
		_ = r.leftBy(0, 2)
		if told.Load() != 2 {
			t.Errorf("hooks were told of %d of 2", told.Load())
		}
		r.wait(time.Minute)
		if told.Load() != 2 {
			t.Error("a hook was called after Run had returned")
		}
	})
}

func TestLookAhead_S2_gives_back_what_handlers_have_become_too_slow_for(t *testing.T) {
	bubble(t, func(r *rig) {
		var slow atomic.Bool
		r.handler = func(context.Context, string) error {
			if slow.Load() {
				time.Sleep(time.Hour)
			}
			time.Sleep(time.Millisecond)
			return nil
		}
		r.publish(make([]string, 3000)...)
		r.start(leasebus.WithConcurrency(4))
		r.wait(500 * time.Millisecond)
		slow.Store(true)
		r.wait(time.Second)
		if held := r.stats().Processing - 4; held < 5 {
			t.Fatalf("%d held ahead of fast handlers", held)
		}
		r.wait(20 * time.Second) // two heartbeats
		if got := r.stats(); got.Processing != 4 {
			t.Errorf("%d processing, of which 4 have workers that are stuck", got.Processing)
		}
		_ = r.leftBy(4, 0)
		r.wait(time.Hour)
	})
}
