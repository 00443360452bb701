package conformance_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/conformance"
	"github.com/leasebus/leasebus/runtime/memory"
)

// mutantVariable names the mistake that TestMutant's backend makes.
const mutantVariable = "LEASEBUS_CONFORMANCE_MUTANT"

// mutant is a backend with one mistake.
type mutant struct {
	*memory.Store
	publish   func(context.Context, *memory.Store, []leasebus.Outgoing, []leasebus.Receipt) error
	subscribe func(*leasebus.Subscription)
	leased    func([]leasebus.Lease)
	renew     func(leasebus.Feed, []leasebus.Renewal) error
	settle    func(leasebus.Feed, []leasebus.Settlement) error
	stop      func(leasebus.Feed) error
	filter    func(*leasebus.Filter)
	limit     int
	letters   func([]leasebus.DeadLetter)
	stats     func(*leasebus.QueueStats)
	done      func([]leasebus.Disposition)
}

// mutants are mistakes that backends make, each with a case that has to find it.
var mutants = map[string]struct {
	change func(*mutant)
	caught string
}{
	"a stale settlement is called done": {func(m *mutant) {
		m.settle = func(f leasebus.Feed, batch []leasebus.Settlement) error {
			err := f.Settle(context.Background(), batch)
			for i := range batch {
				if batch[i].Result == leasebus.ResultLost {
					batch[i].Result = leasebus.ResultOK
				}
			}
			return err
		}
	}, "S12_C1_1_C1_2_C1_6_stale_settlement_and_renewal_are_lost"},
	"an error stops the rest of a batch": {func(m *mutant) {
		m.settle = func(f leasebus.Feed, batch []leasebus.Settlement) error {
			for i := range batch {
				if err := f.Settle(context.Background(), batch[i:i+1]); err != nil || batch[i].Result == leasebus.ResultLost {
					return err
				}
			}
			return nil
		}
	}, "S15_lost_element_does_not_spoil_its_neighbours"},
	"renewals do nothing": {func(m *mutant) {
		m.renew = func(_ leasebus.Feed, batch []leasebus.Renewal) error {
			for i := range batch {
				batch[i].Result = leasebus.ResultOK
			}
			return nil
		}
	}, "S5_renewals_keep_a_lease_beyond_its_length"},
	"a deferral spends the attempt": {everySettlement(func(s *leasebus.Settlement) {
		if s.Kind == leasebus.SettleDefer {
			s.Kind = leasebus.SettleRetry
		}
	}), "S19_C4_7_deferral_gives_the_attempt_back"},
	"a release waits": {everySettlement(func(s *leasebus.Settlement) {
		if s.Kind == leasebus.SettleRelease {
			s.Kind, s.Delay = leasebus.SettleDefer, 10*time.Minute
		}
	}), "S50_release_is_at_once_visible_to_others"},
	"interruptions are not counted": {
		everySettlement(func(s *leasebus.Settlement) { s.Started = false }),
		"S50_release_of_a_started_message_counts_an_interruption",
	},
	"delays are cut short": {everySettlement(func(s *leasebus.Settlement) { s.Delay /= 2 }), "S24_retry_is_due_after_its_delay"},
	"failures are forgotten": {everySettlement(func(s *leasebus.Settlement) {
		if s.Kind == leasebus.SettleRetry {
			s.Failure = nil
		}
	}), "S27_S29_C6_1_dead_letter_keeps_everything"},
	"nobody is woken": {
		func(m *mutant) { m.subscribe = func(s *leasebus.Subscription) { s.Wake = func() {} } },
		"S9_publish_wakes_a_hungry_feed",
	},
	"attempts are counted from 0": {func(m *mutant) {
		m.leased = func(leases []leasebus.Lease) {
			for i := range leases {
				leases[i].Attempt--
			}
		}
	}, "S1_attempt_is_counted_at_lease"},
	"payloads end at a NUL": {func(m *mutant) {
		m.leased = func(leases []leasebus.Lease) {
			for i := range leases {
				leases[i].Payload, _, _ = bytes.Cut(leases[i].Payload, []byte{0})
			}
		}
	}, "S60_C3_5_envelope_comes_back_byte_for_byte"},
	"a context that is done publishes": {func(m *mutant) {
		m.publish = func(ctx context.Context, s *memory.Store, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
			return s.Publish(context.WithoutCancel(ctx), out, receipts)
		}
	}, "S1_C5_12_done_context_stores_nothing"},
	"a NUL in a key is taken": {func(m *mutant) {
		m.publish = func(ctx context.Context, s *memory.Store, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
			for i := range out {
				out[i].OrderingKey = strings.ReplaceAll(out[i].OrderingKey, "\x00", "")
			}
			return s.Publish(ctx, out, receipts)
		}
	}, "S15_C3_5_C3_9_C3_10_unstorable_envelope_is_refused"},
	"Stop does not stop":     {func(m *mutant) { m.stop = func(leasebus.Feed) error { return nil } }, "S50_C5_11_stopped_feed_leases_nothing"},
	"the cut-off is ignored": {func(m *mutant) { m.filter = func(f *leasebus.Filter) { f.UpTo = "" } }, "S34_cut_off_leaves_out_what_came_later"},
	"the reason is ignored":  {func(m *mutant) { m.filter = func(f *leasebus.Filter) { f.Reason = "" } }, "S32_filter_selects_by_every_field"},
	"pages are short":        {func(m *mutant) { m.limit = 3 }, "S32_paging_is_stable_and_complete"},
	"requeues have no author": {func(m *mutant) {
		m.letters = func(letters []leasebus.DeadLetter) {
			for i := range letters {
				letters[i].Requeues = nil
			}
		}
	}, "S33_requeue_restarts_attempts_and_keeps_history"},
	"scheduled messages are called due": {
		func(m *mutant) { m.stats = func(s *leasebus.QueueStats) { s.Due = s.Pending + s.Failed } },
		"S32_stats_count_by_state",
	},
	"what was not found is called done": {
		func(m *mutant) { m.done = func(done []leasebus.Disposition) { clear(done) } },
		"S33_C6_5_requeue_tells_what_it_left_and_why",
	},
}

func everySettlement(change func(*leasebus.Settlement)) func(*mutant) {
	return func(m *mutant) {
		m.settle = func(f leasebus.Feed, batch []leasebus.Settlement) error {
			for i := range batch {
				change(&batch[i])
			}
			return f.Settle(context.Background(), batch)
		}
	}
}

func (m *mutant) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	if m.publish != nil {
		return m.publish(ctx, m.Store, out, receipts)
	}
	return m.Store.Publish(ctx, out, receipts)
}

func (m *mutant) Subscribe(ctx context.Context, s leasebus.Subscription) (leasebus.Feed, error) {
	if m.subscribe != nil {
		m.subscribe(&s)
	}
	feed, err := m.Store.Subscribe(ctx, s)
	if err != nil {
		return nil, err
	}
	return &mutantFeed{feed, m}, nil
}

func (m *mutant) DeadLetters(ctx context.Context, queue string, f leasebus.Filter, after leasebus.Cursor, limit int) ([]leasebus.DeadLetter, error) {
	if m.filter != nil {
		m.filter(&f)
	}
	if m.limit > 0 {
		limit = min(limit, m.limit)
	}
	letters, err := m.Store.DeadLetters(ctx, queue, f, after, limit)
	if m.letters != nil {
		m.letters(letters)
	}
	return letters, err
}

func (m *mutant) Requeue(ctx context.Context, queue string, refs []leasebus.DeadLetterRef, by string) ([]leasebus.Disposition, error) {
	done, err := m.Store.Requeue(ctx, queue, refs, by)
	if m.done != nil {
		m.done(done)
	}
	return done, err
}

func (m *mutant) Stats(ctx context.Context, queue string) (leasebus.QueueStats, error) {
	stats, err := m.Store.Stats(ctx, queue)
	if m.stats != nil {
		m.stats(&stats)
	}
	return stats, err
}

type mutantFeed struct {
	leasebus.Feed
	m *mutant
}

func (f *mutantFeed) Lease(ctx context.Context, dst []leasebus.Lease) (int, error) {
	n, err := f.Feed.Lease(ctx, dst)
	if f.m.leased != nil {
		f.m.leased(dst[:n])
	}
	return n, err
}

func (f *mutantFeed) Renew(ctx context.Context, batch []leasebus.Renewal) error {
	if f.m.renew != nil {
		return f.m.renew(f.Feed, batch)
	}
	return f.Feed.Renew(ctx, batch)
}

func (f *mutantFeed) Settle(ctx context.Context, batch []leasebus.Settlement) error {
	if f.m.settle != nil {
		return f.m.settle(f.Feed, batch)
	}
	return f.Feed.Settle(ctx, batch)
}

func (f *mutantFeed) Stop(ctx context.Context) error {
	if f.m.stop != nil {
		return f.m.stop(f.Feed)
	}
	return f.Feed.Stop(ctx)
}

// TestMutant is the suite on the backend that the variable names: what TestMutantsAreCaught runs in a process of its own.
func TestMutant(t *testing.T) {
	name, set := os.LookupEnv(mutantVariable)
	if !set {
		return
	}
	conformance.Run(t, conformance.Backend{
		Open: func(*testing.T) conformance.Store {
			m := &mutant{Store: memory.New()}
			mutants[name].change(m)
			return m
		},
		Capabilities: conformance.Everything(), Lease: 30 * time.Second, Wrap: synctest.Test,
	})
}

// A suite that lets mistakes pass promises nothing.
func TestMutantsAreCaught(t *testing.T) {
	t.Parallel()
	if _, inside := os.LookupEnv(mutantVariable); inside {
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, mutant := range mutants {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := exec.CommandContext(t.Context(), self, "-test.run=^TestMutant$/^"+mutant.caught+"$", "-test.timeout=60s")
			run.Env = append(os.Environ(), mutantVariable+"="+name)
			output, err := run.CombinedOutput()
			if err == nil || !strings.Contains(string(output), "--- FAIL: TestMutant/"+mutant.caught) {
				t.Errorf("the suite let pass that %s: %s did not fail (%v)\n%s", name, mutant.caught, err, output)
			}
			if strings.Contains(string(output), "panic:") {
				t.Errorf("the suite panicked instead of failing:\n%s", output)
			}
		})
	}
}
