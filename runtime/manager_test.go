package leasebus_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// deadRig is a rig whose messages are all dead letters.
func deadRig(r *rig, texts ...string) *leasebus.TypedManager[*wrapperspb.StringValue] {
	r.Helper()
	r.policy.Retry = leasebus.NoRetry()
	r.handler = func(_ context.Context, text string) error { return errors.New("cannot do " + text) }
	r.publish(texts...)
	r.start()
	r.wait(time.Minute)
	r.wantStats(leasebus.QueueStats{DeadLettered: int64(len(texts))})
	return leasebus.NewTypedManager[*wrapperspb.StringValue](&r.policy, r.store, leasebus.By("alice"))
}

func TestManager_S32_S33_S34_acts_on_what_was_there(t *testing.T) {
	bubble(t, func(r *rig) {
		texts := make([]string, 450) // more than two pages
		for i := range texts {
			texts[i] = strings.Repeat("x", i%7+1)
		}
		mgr := deadRig(r, texts...)
		var listed int
		for d, err := range mgr.DeadLetters(t.Context(), leasebus.Filter{ErrorContains: "cannot do xxxxxxx"}) {
			if err != nil || d.Message.GetValue() != "xxxxxxx" {
				t.Fatalf("%v, %v", d, err)
			}
			listed++
		}
		if listed != 450/7 {
			t.Errorf("listed %d", listed)
		}
		// Everything fails again at once: what comes back while the requeue is under way is not requeued twice.
		result, err := mgr.RequeueAll(t.Context(), leasebus.Filter{})
		if err != nil || result.Requested != 450 || result.Requeued != 450 || len(result.Skipped) != 0 {
			t.Errorf("requeue all: %+v, %v", result, err)
		}
		r.wait(time.Minute)
		for d, err := range mgr.DeadLetters(t.Context(), leasebus.Filter{}) {
			if err != nil || len(d.Requeues) != 1 || d.Requeues[0].By != "alice" || len(d.History) != 2 || d.Attempts != 1 {
				t.Fatalf("%+v, %v", d, err)
			}
		}
		page, next, err := mgr.Page(t.Context(), leasebus.Filter{}, "", 449)
		if err != nil || len(page) != 449 || next == "" {
			t.Fatalf("page of %d, next %q, %v", len(page), next, err)
		}
		if page, next, err = mgr.Page(t.Context(), leasebus.Filter{}, next, 449); err != nil || len(page) != 1 || next != "" {
			t.Errorf("last page of %d, next %q, %v", len(page), next, err)
		}
		if _, _, err := mgr.Page(t.Context(), leasebus.Filter{}, "", 0); err == nil {
			t.Error("a page of 0 was given")
		}
		r.mustStop()
	})
}

func TestManager_S33_C6_5_tells_of_each_id(t *testing.T) {
	bubble(t, func(r *rig) {
		mgr := deadRig(r, "a")
		d, err := one(mgr)
		if err != nil {
			t.Fatal(err)
		}
		unknown := leasebus.NewID()
		result, err := mgr.Requeue(t.Context(), d.ID, unknown)
		if err != nil || result.Requested != 2 || result.Requeued != 1 || len(result.Skipped) != 1 ||
			result.Skipped[0] != (leasebus.Skipped{ID: unknown, Why: leasebus.DispositionNotFound}) {
			t.Errorf("%+v, %v", result, err)
		}
		if _, err := mgr.Get(t.Context(), unknown); !errors.Is(err, leasebus.ErrNotFound) {
			t.Errorf("get: %v", err)
		}
		r.mustStop()
	})
}

func one(mgr *leasebus.TypedManager[*wrapperspb.StringValue]) (leasebus.TypedDeadLetter[*wrapperspb.StringValue], error) {
	for d, err := range mgr.DeadLetters(context.Background(), leasebus.Filter{}) {
		return d, err
	}
	return leasebus.TypedDeadLetter[*wrapperspb.StringValue]{}, leasebus.ErrNotFound
}

func TestManager_S35_C6_2_edit_and_requeue(t *testing.T) {
	bubble(t, func(r *rig) {
		mgr := deadRig(r, "sugra")
		d, err := one(mgr)
		if err != nil {
			t.Fatal(err)
		}
		refused := errors.New("changed my mind")
		if _, err := mgr.RequeueEdited(t.Context(), d.ID, func(*wrapperspb.StringValue) error { return refused }); !errors.Is(err, refused) {
			t.Errorf("an edit that failed: %v", err)
		}
		type seen struct {
			text                             string
			replaces, causation, correlation string
			attempt                          int
		}
		got := make(chan seen, 1)
		r.handler = func(ctx context.Context, text string) error {
			d, _ := leasebus.DeliveryFrom(ctx)
			got <- seen{text, d.Headers().Get(leasebus.HeaderReplaces), d.Causation(), d.Correlation(), d.Attempt()}
			return nil
		}
		receipt, err := mgr.RequeueEdited(t.Context(), d.ID, func(m *wrapperspb.StringValue) error {
			m.Value = "sugar"
			return nil
		})
		if err != nil || receipt.ID == d.ID || receipt.ID == (leasebus.ID{}) {
			t.Fatalf("%+v, %v", receipt, err)
		}
		id := d.ID.String()
		if s := <-got; s != (seen{"sugar", id, id, id, 1}) {
			t.Errorf("handler saw %+v", s)
		}
		// The original is the record; it cannot be used again.
		if d, err = mgr.Get(t.Context(), d.ID); err != nil || d.ReplacedBy != receipt.ID || d.Message.GetValue() != "sugra" {
			t.Errorf("%+v, %v", d, err)
		}
		if _, err := mgr.RequeueEdited(t.Context(), d.ID, func(*wrapperspb.StringValue) error { return nil }); !errors.Is(err, leasebus.ErrReplaced) {
			t.Errorf("second edit: %v", err)
		}
		result, err := mgr.Requeue(t.Context(), d.ID)
		if err != nil || result.Requeued != 0 || result.Skipped[0].Why != leasebus.DispositionReplaced {
			t.Errorf("requeue of what was replaced: %+v, %v", result, err)
		}
		if result, err := mgr.RequeueAll(t.Context(), leasebus.Filter{}); err != nil || result.Requested != 0 {
			t.Errorf("requeue all of what was replaced: %+v, %v", result, err)
		}
		r.mustStop()
	})
}

func TestManager_S36_C6_7_discard_needs_a_filter(t *testing.T) {
	bubble(t, func(r *rig) {
		mgr := deadRig(r, "a", "b", "b")
		if _, err := mgr.Discard(t.Context(), leasebus.Filter{}); !errors.Is(err, leasebus.ErrFilterNeeded) {
			t.Errorf("an empty filter: %v", err)
		}
		if n, err := mgr.Discard(t.Context(), leasebus.Filter{ErrorContains: "do a"}); err != nil || n != 1 {
			t.Errorf("discarded %d, %v", n, err)
		}
		if n, err := mgr.DiscardAll(t.Context()); err != nil || n != 2 {
			t.Errorf("discarded %d, %v", n, err)
		}
		if stats, err := mgr.Stats(t.Context()); err != nil || stats.DeadLettered != 0 {
			t.Errorf("%+v, %v", stats, err)
		}
		r.mustStop()
	})
}

// newerStruct is a Struct as a newer program writes it: with one more field in its Values and, if inEntry, in the map
// entries that hold them.
func newerStruct(inEntry bool) []byte {
	value := protowire.AppendString(protowire.AppendTag(nil, 3, protowire.BytesType), "text")
	value = protowire.AppendVarint(protowire.AppendTag(value, 99, protowire.VarintType), 7)
	entry := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), "key")
	entry = protowire.AppendBytes(protowire.AppendTag(entry, 2, protowire.BytesType), value)
	if inEntry {
		entry = protowire.AppendVarint(protowire.AppendTag(entry, 98, protowire.VarintType), 7)
	}
	return protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), entry)
}

func TestManager_S60_an_edit_keeps_unknown_fields_or_is_refused(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		payload []byte
		refused error
	}{
		"in a message":   {newerStruct(false), nil},
		"in a map entry": {newerStruct(true), leasebus.ErrWouldLoseFields},
		"not decodable":  {[]byte{0xff}, leasebus.ErrUndecodable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			policy := leasebus.DefaultPolicy("google.protobuf.Struct", "structs")
			store := memory.New()
			mgr := leasebus.NewTypedManager[*structpb.Struct](&policy, store)
			id := deadLetter(t, store, &policy, tt.payload)
			receipt, err := mgr.RequeueEdited(t.Context(), id, func(m *structpb.Struct) error {
				m.Fields["new"] = structpb.NewNullValue()
				return nil
			})
			if !errors.Is(err, tt.refused) {
				t.Fatalf("edit: %v, want %v", err, tt.refused)
			}
			stats, statsErr := mgr.Stats(t.Context())
			if tt.refused != nil {
				if statsErr != nil || stats.Pending != 0 || stats.DeadLettered != 1 {
					t.Errorf("a refused edit changed something: %+v, %v", stats, statsErr)
				}
				return
			}
			lease := leaseOne(t, store, &policy)
			var back structpb.Struct
			if err := proto.Unmarshal(lease.Payload, &back); err != nil {
				t.Fatal(err)
			}
			if lease.ID != receipt.ID || len(back.GetFields()) != 2 || len(back.GetFields()["key"].ProtoReflect().GetUnknown()) == 0 {
				t.Errorf("the edited message lost fields: %v", &back)
			}
		})
	}
}

func leaseOne(t *testing.T, store *memory.Store, policy *leasebus.Policy) *leasebus.Lease {
	t.Helper()
	feed, err := store.Subscribe(t.Context(), leasebus.Subscription{Queue: policy.Queue, Policy: policy, Owner: "test#1", Wake: func() {}, Check: func() {}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = feed.Close() })
	leases := make([]leasebus.Lease, 1)
	if n, err := feed.Lease(t.Context(), leases); n != 1 || err != nil {
		t.Fatalf("leased %d, %v", n, err)
	}
	return &leases[0]
}

// deadLetter stores payload as it is and dead-letters it.
func deadLetter(t *testing.T, store *memory.Store, policy *leasebus.Policy, payload []byte) leasebus.ID {
	t.Helper()
	id := leasebus.NewID()
	out := []leasebus.Outgoing{{Envelope: leasebus.Envelope{ID: id, Type: policy.Type, Queue: policy.Queue, Payload: payload}}}
	if err := store.Publish(t.Context(), out, make([]leasebus.Receipt, 1)); err != nil {
		t.Fatal(err)
	}
	feed, err := store.Subscribe(t.Context(), leasebus.Subscription{Queue: policy.Queue, Policy: policy, Owner: "test#2", Wake: func() {}, Check: func() {}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = feed.Close() }()
	leases := make([]leasebus.Lease, 1)
	if n, err := feed.Lease(t.Context(), leases); n != 1 || err != nil {
		t.Fatalf("leased %d, %v", n, err)
	}
	settlement := []leasebus.Settlement{{
		Lease: &leases[0], Kind: leasebus.SettleDeadLetter, Reason: leasebus.ReasonInvalid, DeadLetterQueue: policy.DeadLetter.Queue,
		Attempts: 1, Failure: &leasebus.Failure{Attempt: 1, Text: "boom"},
	}}
	if err := feed.Settle(t.Context(), settlement); err != nil || settlement[0].Result != leasebus.ResultOK {
		t.Fatalf("settled %+v, %v", settlement[0], err)
	}
	return id
}
