package leasebustest_test

import (
	"context"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/leasebustest"
	"github.com/leasebus/leasebus/runtime/memory"
)

var (
	_ leasebus.Publisher = (*leasebustest.Store)(nil)
	_ leasebus.Source    = (*leasebustest.Store)(nil)
	_ leasebus.Operator  = (*leasebustest.Store)(nil)
)

func TestPublished_ByTypeInOrder(t *testing.T) {
	t.Parallel()
	store := leasebustest.NewStore()
	publishTexts(t, store, "a")
	if _, err := newNumbers(t, store).Publish(t.Context(), wrapperspb.Int64(7)); err != nil {
		t.Fatal(err)
	}
	at := time.Now().Add(time.Hour)
	receipt, err := newTexts(t, store).Publish(t.Context(), wrapperspb.String("b"), leasebus.At(at), leasebus.WithHeader("tenant", "x"))
	if err != nil {
		t.Fatal(err)
	}
	got := leasebustest.Published[text](t, store)
	if len(got) != 2 || got[0].Message.GetValue() != "a" || got[1].Message.GetValue() != "b" {
		t.Fatalf("published %+v, want a and b", got)
	}
	if b := got[1]; b.ID != receipt.ID || !b.At.Equal(at) || b.Headers.Get("tenant") != "x" || b.Queue != "texts" {
		t.Errorf("published %+v", b.Outgoing)
	}
	if n := leasebustest.Published[number](t, store); len(n) != 1 || n[0].Message.GetValue() != 7 {
		t.Errorf("published %+v, want 7", n)
	}
	if none := leasebustest.Published[*wrapperspb.BoolValue](t, store); len(none) != 0 {
		t.Errorf("published %+v, want none", none)
	}
}

func TestPublished_OnlyWhatWasTaken(t *testing.T) {
	t.Parallel()
	store := leasebustest.NewStore(memory.WithMaxPayload(4))
	if _, err := newTexts(t, store).Publish(t.Context(), wrapperspb.String("too long")); err == nil {
		t.Error("no error")
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newTexts(t, store).Publish(cancelled, wrapperspb.String("a")); err == nil {
		t.Error("no error")
	}
	if got := leasebustest.Published[text](t, store); len(got) != 0 {
		t.Errorf("published %+v, want none", got)
	}
}

func TestPublished_KeepsItsOwnBytes(t *testing.T) {
	t.Parallel()
	store := leasebustest.NewStore()
	payload, err := proto.Marshal(wrapperspb.String("a"))
	if err != nil {
		t.Fatal(err)
	}
	out := leasebus.Outgoing{Envelope: leasebus.Envelope{ID: leasebus.NewID(), Type: "google.protobuf.StringValue", Queue: "texts", Payload: payload}}
	if err := store.Publish(t.Context(), []leasebus.Outgoing{out}, make([]leasebus.Receipt, 1)); err != nil {
		t.Fatal(err)
	}
	payload[len(payload)-1] = 'b'
	if got := leasebustest.Published[text](t, store); got[0].Message.GetValue() != "a" {
		t.Errorf("published %v, want a", got[0].Message)
	}
}

func TestPublished_FailsItsTest(t *testing.T) {
	t.Parallel()
	store := leasebustest.NewStore()
	out := leasebus.Outgoing{Envelope: leasebus.Envelope{ID: leasebus.NewID(), Type: "google.protobuf.StringValue", Queue: "texts", Payload: []byte("?")}}
	if err := store.Publish(t.Context(), []leasebus.Outgoing{out}, make([]leasebus.Receipt, 1)); err != nil {
		t.Fatal(err)
	}
	wantFailure(t, func(tb testing.TB) { leasebustest.Published[text](tb, store) }, `in queue "texts" is no google.protobuf.StringValue`)
	wantFailure(t, func(tb testing.TB) { leasebustest.Published[proto.Message](tb, store) }, "the message type is an interface")
}
