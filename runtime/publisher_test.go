package leasebus_test

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestPublish_refuses_and_stores_nothing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&r.policy, r.store, leasebus.WithMaxPayload(100))
	if err != nil {
		t.Fatal(err)
	}
	good := wrapperspb.String("a")
	for name, tt := range map[string]struct {
		message *wrapperspb.StringValue
		opts    []leasebus.PublishOption
		want    string
	}{
		"C3_10 payload over the limit": {wrapperspb.String(strings.Repeat("x", 100)), nil, "payload: is 102 bytes; allowed are 100"},
		"payload not UTF-8":            {wrapperspb.String("\xff"), nil, "UTF-8"},
		"C3_5 header with NUL":         {good, []leasebus.PublishOption{leasebus.WithHeader("tenant", "a\x00")}, "header tenant: holds a NUL"},
		"C3_9 header too long":         {good, []leasebus.PublishOption{leasebus.WithHeader("a", strings.Repeat("x", 140<<10))}, "headers: are"},
		"reserved header":              {good, []leasebus.PublishOption{leasebus.WithHeader("Leasebus-Id", "7")}, "begins with leasebus-, which is reserved"},
		"correlation with NUL":         {good, []leasebus.PublishOption{leasebus.WithCorrelation("\x00")}, "holds a NUL"},
	} {
		if _, err := publisher.Publish(t.Context(), tt.message, tt.opts...); !errors.Is(err, leasebus.ErrInvalidEnvelope) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
		if _, err := publisher.PublishBatch(t.Context(), []*wrapperspb.StringValue{good, tt.message}, tt.opts...); !errors.Is(err, leasebus.ErrInvalidEnvelope) {
			t.Errorf("%s, in a batch: %v", name, err)
		}
	}
	if _, err := publisher.PublishBatch(t.Context(), []*wrapperspb.StringValue{good, good}, leasebus.WithID(leasebus.NewID())); !errors.Is(err, leasebus.ErrInvalidEnvelope) {
		t.Errorf("one id for a batch: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := publisher.Publish(ctx, good); !errors.Is(err, context.Canceled) {
		t.Errorf("C5_12 a context that is done: %v", err)
	}
	if receipts, err := publisher.PublishBatch(t.Context(), nil); err != nil || len(receipts) != 0 {
		t.Errorf("an empty batch: %v, %v", receipts, err)
	}
	r.wantStats(leasebus.QueueStats{})
}

func TestNewTypedPublisher_refuses(t *testing.T) {
	t.Parallel()
	policy := leasebus.DefaultPolicy("google.protobuf.StringValue", "queue")
	if _, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&policy, nil); err == nil {
		t.Error("a nil publisher was taken")
	}
	if _, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&policy, memory.New(), leasebus.WithMaxPayload(0)); err == nil {
		t.Error("a max payload of 0 was taken")
	}
	if _, err := leasebus.NewTypedPublisher[*wrapperspb.BytesValue](&policy, memory.New()); err == nil {
		t.Error("another type's policy was taken")
	}
	policy.Queue = "a b"
	if _, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&policy, memory.New()); err == nil {
		t.Error("a wrong policy was taken")
	}
}

func TestPublish_S59_inside_a_handler(t *testing.T) {
	for name, tt := range map[string]struct {
		opts                                []leasebus.PublishOption
		correlation, causation, traceparent string
	}{
		"by itself": {nil, "flow", "parent", "00-trace"},
		"explicit options win": {
			[]leasebus.PublishOption{leasebus.WithCorrelation("mine"), leasebus.WithCausation("other"), leasebus.WithHeader("traceparent", "00-own")},
			"mine", "other", "00-own",
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(r *rig) {
				publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&r.policy, r.store)
				if err != nil {
					t.Fatal(err)
				}
				got := make(chan leasebus.Headers, 1)
				r.handler = func(ctx context.Context, text string) error {
					d, _ := leasebus.DeliveryFrom(ctx)
					if text == "child" {
						got <- d.Headers()
						return nil
					}
					child, cancel := context.WithTimeout(ctx, time.Second)
					defer cancel()
					_, err := publisher.Publish(child, wrapperspb.String("child"), tt.opts...)
					return err
				}
				r.start()
				parent, err := publisher.Publish(t.Context(), wrapperspb.String("parent"), leasebus.WithCorrelation("flow"), leasebus.WithHeader("traceparent", "00-trace"))
				if err != nil {
					t.Fatal(err)
				}
				causation := tt.causation
				if causation == "parent" {
					causation = parent.ID.String()
				}
				h := <-got
				if h.Get(leasebus.HeaderCorrelation) != tt.correlation || h.Get(leasebus.HeaderCausation) != causation || h.Get(leasebus.HeaderTraceparent) != tt.traceparent {
					t.Errorf("child has correlation %q, causation %q, trace %q", h.Get(leasebus.HeaderCorrelation), h.Get(leasebus.HeaderCausation), h.Get(leasebus.HeaderTraceparent))
				}
				r.mustStop()
			})
		})
	}
}

func TestPublish_S59_outside_starts_a_flow_of_its_own(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	receipt := r.publish("a")[0]
	lease := leaseOne(t, r.store, &r.policy)
	if lease.Headers.Get(leasebus.HeaderCorrelation) != receipt.ID.String() || lease.Headers.Get(leasebus.HeaderCausation) != "" {
		t.Errorf("correlation %q, causation %q", lease.Headers.Get(leasebus.HeaderCorrelation), lease.Headers.Get(leasebus.HeaderCausation))
	}
}

func TestPublish_schedule(t *testing.T) {
	bubble(t, func(r *rig) {
		publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&r.policy, r.store)
		if err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		due := make(chan time.Duration, 4)
		r.handler = func(context.Context, string) error {
			due <- time.Since(begun)
			return nil
		}
		r.start()
		for _, opts := range [][]leasebus.PublishOption{
			{leasebus.Delay(time.Hour)},
			{leasebus.At(begun.Add(30 * time.Minute)), leasebus.Delay(time.Hour)},
			{leasebus.At(begun.Add(-time.Hour))},
			{leasebus.Delay(-time.Hour)},
		} {
			if _, err := publisher.Publish(t.Context(), wrapperspb.String("a"), opts...); err != nil {
				t.Fatal(err)
			}
		}
		for _, want := range []time.Duration{0, 0, 30 * time.Minute, time.Hour} {
			if got := <-due; got != want {
				t.Errorf("due after %v, want %v", got, want)
			}
		}
		r.mustStop()
	})
}

// Every message of a batch has headers of its own, though they are made from one form: as NewHeaders makes them.
func TestPublishBatch_S59_headers(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		opts []leasebus.PublishOption
		want map[string]string // the correlation is "id" where it is the message's own
	}{
		"nothing given": {nil, map[string]string{leasebus.HeaderCorrelation: "id"}},
		"headers before and behind": {
			[]leasebus.PublishOption{leasebus.WithHeader("a", "1"), leasebus.WithHeader("z", "2")},
			map[string]string{"a": "1", "z": "2", leasebus.HeaderCorrelation: "id"},
		},
		"correlation and causation": {
			[]leasebus.PublishOption{leasebus.WithCorrelation("c"), leasebus.WithCausation("d")},
			map[string]string{leasebus.HeaderCorrelation: "c", leasebus.HeaderCausation: "d"},
		},
		"much of it": {
			[]leasebus.PublishOption{leasebus.WithHeader("a", strings.Repeat("x", 3000))},
			map[string]string{"a": strings.Repeat("x", 3000), leasebus.HeaderCorrelation: "id"},
		},
	} {
		var got []leasebus.Outgoing
		policy := leasebus.DefaultPolicy("google.protobuf.StringValue", "queue")
		publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](&policy, publisherFunc(func(out []leasebus.Outgoing) { got = out }))
		if err != nil {
			t.Fatal(err)
		}
		var messages []*wrapperspb.StringValue
		for i := range 40 {
			messages = append(messages, wrapperspb.String(strings.Repeat(string(rune('a'+i%26)), 100*i)))
		}
		if _, err := publisher.PublishBatch(t.Context(), messages, tt.opts...); err != nil {
			t.Fatal(err)
		}
		for i := range got {
			want := maps.Clone(tt.want)
			if want[leasebus.HeaderCorrelation] == "id" {
				want[leasebus.HeaderCorrelation] = got[i].ID.String()
			}
			if !bytes.Equal(got[i].Headers.Encoded(), leasebus.NewHeaders(want).Encoded()) {
				t.Errorf("%s: message %d has headers %v", name, i, maps.Collect(got[i].Headers.All()))
			}
			if payload, err := proto.Marshal(messages[i]); err != nil || !bytes.Equal(got[i].Payload, payload) {
				t.Errorf("%s: message %d has another payload, %v", name, i, err)
			}
		}
	}
}

type publisherFunc func([]leasebus.Outgoing)

func (f publisherFunc) Publish(_ context.Context, out []leasebus.Outgoing, _ []leasebus.Receipt) error {
	f(out)
	return nil
}
