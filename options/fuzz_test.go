package options_test

import (
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/leasebus/leasebus/options"
)

// FuzzResolve gives the resolver bytes that no compiler would write. It must not panic, must answer with exactly one of
// policy and error, and a policy must be one that the runtime takes.
func FuzzResolve(f *testing.F) {
	for _, text := range []string{
		``,
		`queue: "orders" lease {duration {seconds: 30} heartbeat {seconds: 7}}`,
		`retry {exponential {initial {seconds: 1} max {seconds: 60} multiplier: 2} jitter: 0.2 max_attempts: 8}`,
		`retry {none {} max_attempts: 3} dead_letter {discard: true queue: "q"}`,
		`timeout {seconds: 1 nanos: -1} idempotency {} ordering {on_exhausted: ON_EXHAUSTED_HALT} aliases: "x"`,
	} {
		encoded, err := proto.Marshal(annotation(text))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(encoded, []byte{}, []byte{})
		f.Add(encoded, protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), encoded), []byte{8, 1, 16, 1})
	}
	f.Add([]byte{0xff}, []byte{0x80}, []byte{0x08})

	f.Fuzz(func(t *testing.T, message, file, field []byte) {
		fd := fileOf(nil, nil)
		fd.Options = &descriptorpb.FileOptions{}
		fd.GetOptions().ProtoReflect().SetUnknown(optionBytes(file))
		order := fd.GetMessageType()[0]
		order.Options = &descriptorpb.MessageOptions{}
		order.GetOptions().ProtoReflect().SetUnknown(optionBytes(message))
		order.Field[0].Options = &descriptorpb.FieldOptions{}
		order.GetField()[0].GetOptions().ProtoReflect().SetUnknown(optionBytes(field))

		policy, err := options.Resolve(linked(t, fd))
		if (policy == nil) == (err == nil) {
			t.Fatalf("policy %v and error %v", policy, err)
		}
		if err == nil {
			if err := policy.Validate(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// optionBytes makes an option with this content, and for an odd length bytes without any frame.
func optionBytes(content []byte) []byte {
	if len(content)%2 == 1 {
		return content
	}
	return protowire.AppendBytes(protowire.AppendTag(nil, options.Number, protowire.BytesType), content)
}
