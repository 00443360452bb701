package memory_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestPublish_ReceiptsStandInOrder(t *testing.T) {
	t.Parallel()
	store := memory.New()
	out := []leasebus.Outgoing{message("1"), message("elsewhere"), message("2")}
	out[1].Queue = "invoices"
	receipts := make([]leasebus.Receipt, 3)
	receipts[0].Err = errors.New("left from another call")
	if err := store.Publish(t.Context(), out, receipts); err != nil {
		t.Fatal(err)
	}
	for i, r := range receipts {
		if r != (leasebus.Receipt{ID: out[i].ID}) {
			t.Errorf("receipt %d: %+v, want id %v", i, r, out[i].ID)
		}
	}
	wantPayloads(t, subscribe(t, store, "a#1").lease(5), "1", "2")
	if err := store.Publish(t.Context(), nil, nil); err != nil {
		t.Errorf("an empty batch: %v", err)
	}
}

func TestPublish_AllOrNothing(t *testing.T) {
	t.Parallel()
	store := memory.New(memory.WithMaxPayload(10))
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tt := range map[string]struct {
		ctx  context.Context
		bad  func(*leasebus.Outgoing)
		want error
	}{
		"payload": {t.Context(), func(o *leasebus.Outgoing) { o.Payload = make([]byte, 11) }, leasebus.ErrInvalidEnvelope},
		"key":     {t.Context(), func(o *leasebus.Outgoing) { o.IdempotencyKey = "\xff" }, leasebus.ErrInvalidEnvelope},
		"header": {t.Context(), func(o *leasebus.Outgoing) {
			o.Headers = leasebus.NewHeaders(map[string]string{"big": strings.Repeat("x", leasebus.MaxHeaderBytes+1)})
		}, leasebus.ErrInvalidEnvelope},
		"context": {cancelled, func(*leasebus.Outgoing) {}, context.Canceled},
	} {
		out := []leasebus.Outgoing{message("good"), message("bad"), message("good")}
		tt.bad(&out[1])
		receipts := make([]leasebus.Receipt, 3)
		if err := store.Publish(tt.ctx, out, receipts); !errors.Is(err, tt.want) {
			t.Errorf("%s: error %v, want %v", name, err, tt.want)
		}
		for i, r := range receipts {
			if !errors.Is(r.Err, tt.want) {
				t.Errorf("%s: receipt %d has error %v: it says that the message was taken", name, i, r.Err)
			}
		}
		wantStats(t, store, leasebus.QueueStats{})
	}
	if err := store.Publish(t.Context(), []leasebus.Outgoing{message("m")}, nil); err == nil {
		t.Error("no room for receipts: no error")
	}
	wantStats(t, store, leasebus.QueueStats{})
}

func TestPublish_CopiesItsBytes(t *testing.T) {
	t.Parallel()
	store := memory.New()
	buffer := []byte("first ")
	encoded := append([]byte(nil), leasebus.NewHeaders(map[string]string{"tenant": "a"}).Encoded()...)
	out := message("")
	out.Payload = buffer
	var err error
	if out.Headers, err = leasebus.DecodeHeaders(encoded); err != nil {
		t.Fatal(err)
	}
	publish(t, store, out, out)
	copy(buffer, "second")
	for i := range encoded {
		encoded[i] = 0
	}
	for _, l := range subscribe(t, store, "a#1").lease(2) {
		if string(l.Payload) != "first " || l.Headers.Get("tenant") != "a" {
			t.Errorf("leased %q with tenant %q: the caller's buffer shows", l.Payload, l.Headers.Get("tenant"))
		}
		if cap(l.Payload) != len(l.Payload) {
			t.Errorf("capacity %d for %d bytes: an append would write into a neighbour", cap(l.Payload), len(l.Payload))
		}
	}
}

func TestNew_RefusesNonsense(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(){
		"max payload": func() { memory.WithMaxPayload(0) },
		"advance":     func() { memory.New().Advance(-1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			call()
		}()
	}
}
