package options_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/leasebus/leasebus/options"
	leasebusv1 "github.com/leasebus/leasebus/options/leasebus/v1"
	leasebus "github.com/leasebus/leasebus/runtime"
)

func TestResolve_S21_S28_Defaults(t *testing.T) {
	t.Parallel()
	got, err := options.Resolve(describe(t, nil, annotation(``), nil))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(leasebus.DefaultPolicy("shop.v1.Order", "shop.v1.Order"), *got); diff != "" {
		t.Errorf("an empty annotation means (-), got (+):\n%s", diff)
	}
}

// Each case gives the defaults of a file, the annotation of a message, and how the outcome differs from the built-in
// defaults.
func TestResolve_Merges(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		file, message string
		want          func(p *leasebus.Policy)
	}{
		"the file holds where the message says nothing": {
			`timeout {seconds: 3}`, ``,
			func(p *leasebus.Policy) { p.Timeout = 3 * time.Second },
		},
		"the message wins": {
			`timeout {seconds: 3}`, `timeout {seconds: 4}`,
			func(p *leasebus.Policy) { p.Timeout = 4 * time.Second },
		},
		"a duration is one setting, not two": {
			`timeout {seconds: 3}`, `timeout {nanos: 500000000}`,
			func(p *leasebus.Policy) { p.Timeout = time.Second / 2 },
		},
		"zero is not unset": {
			`timeout {seconds: 3} retry {jitter: 0.5}`, `timeout {} retry {jitter: 0}`,
			func(p *leasebus.Policy) { p.Retry.Jitter = 0 },
		},
		"neighbours in a sub-message stay": {
			`lease {duration {seconds: 60} heartbeat {seconds: 6}}`, `lease {duration {seconds: 40}}`,
			func(p *leasebus.Policy) {
				p.Lease = leasebus.LeasePolicy{Duration: 40 * time.Second, Heartbeat: 6 * time.Second}
			},
		},
		"the default heartbeat follows the duration": {
			`lease {duration {seconds: 60}}`, ``,
			func(p *leasebus.Policy) {
				p.Lease = leasebus.LeasePolicy{Duration: time.Minute, Heartbeat: 15 * time.Second}
			},
		},
		"another kind of retry keeps the neighbours": {
			`retry {fixed {delay {seconds: 9}} max_attempts: 8 jitter: 0.5}`, `retry {exponential {multiplier: 3}}`,
			func(p *leasebus.Policy) {
				p.Retry = leasebus.ExponentialRetry(8, leasebus.DefaultInitialDelay, leasebus.DefaultMaxDelay, 3)
				p.Retry.Jitter = 0.5
			},
		},
		"the same kind of retry is merged": {
			`retry {exponential {initial {seconds: 1} multiplier: 3}}`, `retry {exponential {max {seconds: 20}}}`,
			func(p *leasebus.Policy) {
				p.Retry = leasebus.ExponentialRetry(leasebus.DefaultMaxAttempts, time.Second, 20*time.Second, 3)
			},
		},
		"attempts alone keep the default kind": {
			`retry {max_attempts: 8}`, ``,
			func(p *leasebus.Policy) { p.Retry.MaxAttempts = 8 },
		},
		"fixed has a default delay": {
			``, `retry {fixed {}}`,
			func(p *leasebus.Policy) {
				p.Retry = leasebus.FixedRetry(leasebus.DefaultMaxAttempts, leasebus.DefaultInitialDelay)
			},
		},
		"no retries rule out inherited attempts": {
			`retry {max_attempts: 8 give_up_after {seconds: 60}}`, `retry {none {}}`,
			func(p *leasebus.Policy) {
				p.Retry = leasebus.NoRetry()
				p.Retry.GiveUpAfter = time.Minute
			},
		},
		"no retries may say that they are one attempt": {
			``, `retry {none {} max_attempts: 1}`,
			func(p *leasebus.Policy) { p.Retry = leasebus.NoRetry() },
		},
		"discarding rules out inherited queues": {
			`dead_letter {queue: "dead" invalid_queue: "invalid"}`, `dead_letter {discard: true}`,
			func(p *leasebus.Policy) { p.DeadLetter = leasebus.DeadLetterPolicy{Discard: true} },
		},
		"a queue rules out inherited discarding": {
			`dead_letter {discard: true}`, `dead_letter {queue: "dead"}`,
			func(p *leasebus.Policy) { p.DeadLetter = leasebus.DeadLetterPolicy{Queue: "dead"} },
		},
		"not discarding brings back the default queue": {
			`dead_letter {discard: true}`, `dead_letter {discard: false}`,
			func(*leasebus.Policy) {},
		},
		"the dead-letter queue follows the queue": {
			``, `queue: "orders"`,
			func(p *leasebus.Policy) { p.Queue, p.DeadLetter.Queue = "orders", "orders.dlq" },
		},
		"a file makes its messages idempotent and ordered": {
			`idempotency {retention {seconds: 60}} ordering {on_exhausted: ON_EXHAUSTED_HALT}`, ``,
			func(p *leasebus.Policy) {
				p.Idempotency = &leasebus.IdempotencyPolicy{Retention: time.Minute, InProgressDelay: leasebus.DefaultInProgressDelay}
				p.Ordering = &leasebus.OrderingPolicy{Halt: true}
			},
		},
		"an unspecified enum is the default": {
			``, `ordering {on_exhausted: ON_EXHAUSTED_UNSPECIFIED}`,
			func(p *leasebus.Policy) { p.Ordering = &leasebus.OrderingPolicy{} },
		},
		"waiting in the broker from nothing on is not the default": {
			``, `retry {wait_in_broker_from {}}`,
			func(p *leasebus.Policy) { p.Retry.WaitInBrokerFrom = new(time.Duration) },
		},
		"former names": {
			``, `aliases: "shop.v1.Purchase" aliases: "Purchase"`,
			func(p *leasebus.Policy) { p.Aliases = []string{"shop.v1.Purchase", "Purchase"} },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := leasebus.DefaultPolicy("shop.v1.Order", "shop.v1.Order")
			test.want(&want)
			got, err := options.Resolve(describe(t, defaults(test.file), annotation(test.message), nil))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, *got); diff != "" {
				t.Errorf("want (-), got (+):\n%s", diff)
			}
		})
	}
}

func TestResolve_MarksImplyTheirSetting(t *testing.T) {
	t.Parallel()
	got, err := options.Resolve(describe(t, nil, annotation(`ordering {on_exhausted: ON_EXHAUSTED_HALT}`),
		&leasebusv1.FieldOptions{IdempotencyKey: proto.Bool(true), OrderingKey: proto.Bool(true)}))
	if err != nil {
		t.Fatal(err)
	}
	want := leasebus.DefaultPolicy("shop.v1.Order", "shop.v1.Order")
	want.Idempotency = &leasebus.IdempotencyPolicy{
		Field:           "id",
		Retention:       leasebus.DefaultIdempotencyRetention,
		InProgressDelay: leasebus.DefaultInProgressDelay,
	}
	want.Ordering = &leasebus.OrderingPolicy{Field: "id", Halt: true}
	if diff := cmp.Diff(want, *got); diff != "" {
		t.Errorf("want (-), got (+):\n%s", diff)
	}
}

// An option arrives as the generated type, as bytes or as a dynamic message, depending on who parsed the descriptor.
func TestResolve_EveryShapeOfAnOption(t *testing.T) {
	t.Parallel()
	concrete := describe(t, defaults(`timeout {seconds: 3}`), annotation(`queue: "orders" lease {duration {seconds: 8}}`),
		&leasebusv1.FieldOptions{OrderingKey: proto.Bool(true)})
	want, err := options.Resolve(concrete)
	if err != nil {
		t.Fatal(err)
	}
	if want.Queue != "orders" || want.Timeout != 3*time.Second || want.Ordering == nil {
		t.Fatalf("the concrete shape lacks something: %+v", want)
	}
	for shape, resolver := range map[string]interface {
		protoregistry.MessageTypeResolver
		protoregistry.ExtensionTypeResolver
	}{
		"unknown bytes": new(protoregistry.Types),
		"dynamic":       dynamicOptions(t),
	} {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			md := parsed(t, protodesc.ToFileDescriptorProto(concrete.ParentFile()), resolver)
			if proto.HasExtension(md.Options(), leasebusv1.E_Message) == (shape == "unknown bytes") {
				t.Fatalf("the options are not of this shape: %v", md.Options())
			}
			got, err := options.Resolve(md)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("concrete (-) and %s (+) differ:\n%s", shape, diff)
			}
		})
	}
}

func TestResolve_UnknownSettingsAreRefusedInEveryShape(t *testing.T) {
	t.Parallel()
	newer := annotation(``)
	newer.Lease = &leasebusv1.Lease{}
	newer.GetLease().ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 77, protowire.VarintType), 1))
	concrete := describe(t, nil, newer, nil)
	for shape, md := range map[string]protoreflect.MessageDescriptor{
		"concrete":      concrete,
		"unknown bytes": parsed(t, protodesc.ToFileDescriptorProto(concrete.ParentFile()), new(protoregistry.Types)),
		"dynamic":       parsed(t, protodesc.ToFileDescriptorProto(concrete.ParentFile()), dynamicOptions(t)),
	} {
		_, err := options.Resolve(md)
		if err == nil || !strings.Contains(err.Error(), "field 77 of leasebus.v1.Lease, which is unknown here: it was made for a newer leasebus") {
			t.Errorf("%s: %v", shape, err)
		}
	}
}

func TestResolve_WithoutAnnotation(t *testing.T) {
	t.Parallel()
	for name, md := range map[string]protoreflect.MessageDescriptor{
		"in a file with defaults": describe(t, defaults(`timeout {seconds: 1}`), nil, nil),
		"with other options":      (&descriptorpb.FieldOptions{}).ProtoReflect().Descriptor(),
		"one of leasebus's own":   (&leasebusv1.Lease{}).ProtoReflect().Descriptor(),
	} {
		policy, err := options.Resolve(md)
		if policy != nil || !errors.Is(err, options.ErrNotAnnotated) {
			t.Errorf("%s: %v, %v", name, policy, err)
		}
	}
}

func TestResolve_EveryProblemIsTold(t *testing.T) {
	t.Parallel()
	_, err := options.Resolve(describe(t, defaults(`retry {jitter: 2}`), annotation(`queue: "a b" timeout {seconds: -1}`), nil))
	var problem options.Problem
	if !errors.As(err, &problem) || problem.Message != "shop.v1.Order" || problem.Line != 0 {
		t.Errorf("%#v", problem)
	}
	want := strings.Join([]string{
		`queue: "a b" is not a queue name; allowed are letters, digits, '.', '_' and '-', beginning with a letter or digit`,
		`retry.jitter: 2 is out of range; allowed is 0 to 1`,
		`timeout: -1s is out of range; allowed is 0 to 876000h0m0s`,
	}, "\nshop.proto: message shop.v1.Order: ")
	if want = "shop.proto: message shop.v1.Order: " + want; err.Error() != want {
		t.Errorf("got\n%v\nwant\n%v", err, want)
	}
}

// Compilers differ in the places that they tell; the nearest one that is told counts.
func TestResolve_PointsAtTheNearestPlace(t *testing.T) {
	t.Parallel()
	const number = int32(options.Number)
	heartbeat := []int32{4, 0, 7, number, 2, 2}
	for _, test := range []struct {
		name string
		told []*descriptorpb.SourceCodeInfo_Location
		want string
	}{
		{"nothing is told", nil, "shop.proto"},
		{"the message", places([]int32{4, 0}), "shop.proto:1:1"},
		{"another option beside it", places([]int32{4, 0}, []int32{4, 0, 7, 3}), "shop.proto:1:1"},
		{"the option as a whole, as protoc does", places([]int32{4, 0}, heartbeat[:4]), "shop.proto:2:1"},
		{"another setting alone", places([]int32{4, 0}, append(heartbeat[:4:4], 7)), "shop.proto:2:1"},
		{"the setting", places([]int32{4, 0}, heartbeat[:4], heartbeat), "shop.proto:3:1"},
		{"the seconds of the setting, as buf does", places([]int32{4, 0}, heartbeat[:4], append(heartbeat[:6:6], 1)), "shop.proto:3:1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			file := fileOf(annotation(`lease {duration {seconds: 30} heartbeat {seconds: 29}}`), nil)
			file.SourceCodeInfo = &descriptorpb.SourceCodeInfo{Location: test.told}
			_, err := options.Resolve(linked(t, file))
			var problem options.Problem
			if !errors.As(err, &problem) || problem.Position() != test.want {
				t.Errorf("%v, want it at %s", err, test.want)
			}
		})
	}
}

// places are one to a line.
func places(paths ...[]int32) []*descriptorpb.SourceCodeInfo_Location {
	told := make([]*descriptorpb.SourceCodeInfo_Location, len(paths))
	for i, path := range paths {
		told[i] = &descriptorpb.SourceCodeInfo_Location{Path: path, Span: []int32{int32(i), 0, 9}}
	}
	return told
}

// A map entry cannot be annotated in a proto file, but in a descriptor that somebody made.
func TestResolve_MapEntry(t *testing.T) {
	t.Parallel()
	file := fileOf(annotation(``), nil)
	file.MessageType[0].Field = []*descriptorpb.FieldDescriptorProto{{
		Name: proto.String("labels"), Number: proto.Int32(1), TypeName: proto.String(".shop.v1.Order.LabelsEntry"),
		Type: descriptorpb.FieldDescriptorProto_TYPE_MESSAGE.Enum(), Label: descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum(),
	}}
	entry := fileOf(annotation(``), nil).GetMessageType()[0]
	entry.Name = proto.String("LabelsEntry")
	entry.Options.MapEntry = proto.Bool(true)
	entry.Field = []*descriptorpb.FieldDescriptorProto{stringField("key", 1), stringField("value", 2)}
	file.MessageType[0].NestedType = []*descriptorpb.DescriptorProto{entry}

	md := parsed(t, file, protoregistry.GlobalTypes)
	if _, err := options.Resolve(md); err != nil {
		t.Error(err)
	}
	if _, err := options.Resolve(md.Messages().Get(0)); err == nil || !strings.Contains(err.Error(), "stands on a map entry") {
		t.Error(err)
	}
}

// The number and the names are in every compiled schema: buf breaking does not notice if they change.
func TestOptionsArePinned(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		extension protoreflect.ExtensionType
		name      protoreflect.FullName
		extends   protoreflect.FullName
		message   protoreflect.FullName
	}{
		{leasebusv1.E_File, "leasebus.v1.file", "google.protobuf.FileOptions", "leasebus.v1.FileOptions"},
		{leasebusv1.E_Message, "leasebus.v1.message", "google.protobuf.MessageOptions", "leasebus.v1.MessageOptions"},
		{leasebusv1.E_Field, "leasebus.v1.field", "google.protobuf.FieldOptions", "leasebus.v1.FieldOptions"},
	} {
		d := test.extension.TypeDescriptor()
		extends, message := d.ContainingMessage().FullName(), d.Message().FullName()
		if d.FullName() != test.name || extends != test.extends || message != test.message {
			t.Errorf("%s extends %s by %s, want %+v", d.FullName(), extends, message, test)
		}
		if d.Number() != 61850 || d.Number() != options.Number {
			t.Errorf("%s has number %d, want 61850", d.FullName(), d.Number())
		}
	}
}

// Defaults has the settings of MessageOptions that can be shared, under the same numbers and names.
func TestDefaultsMirrorMessageOptions(t *testing.T) {
	t.Parallel()
	ofMessage := (&leasebusv1.MessageOptions{}).ProtoReflect().Descriptor().Fields()
	ofFile := (&leasebusv1.Defaults{}).ProtoReflect().Descriptor().Fields()
	ownOnly := []protoreflect.Name{"queue", "aliases"}
	for i := range ofMessage.Len() {
		own := ofMessage.Get(i)
		shared := ofFile.ByName(own.Name())
		switch {
		case slices.Contains(ownOnly, own.Name()):
			if shared != nil {
				t.Errorf("%s is a setting of one message, but a file can give it", own.Name())
			}
		case shared == nil, shared.Number() != own.Number(), shared.Message() != own.Message():
			t.Errorf("%s differs between a message and a file", own.Name())
		}
	}
	if ofFile.Len() != ofMessage.Len()-len(ownOnly) {
		t.Error("a file can give what a message cannot")
	}
}
