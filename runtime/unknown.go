package leasebus

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// losesUnknown reports whether decoding and encoding payload again would drop something: Go keeps the unknown fields of
// messages, but not those of map entries.
func losesUnknown(message protoreflect.MessageDescriptor, payload []byte) bool {
	for len(payload) > 0 {
		number, wireType, n := protowire.ConsumeTag(payload)
		if n < 0 {
			return false // cannot be decoded: not for this function to say
		}
		payload = payload[n:]
		size := protowire.ConsumeFieldValue(number, wireType, payload)
		if size < 0 {
			return false
		}
		value := payload[:size]
		payload = payload[size:]
		field := message.Fields().ByNumber(number)
		switch {
		case field == nil:
			if message.IsMapEntry() {
				return true
			}
		case field.Message() == nil:
		case wireType == protowire.BytesType:
			inner, _ := protowire.ConsumeBytes(value)
			if losesUnknown(field.Message(), inner) {
				return true
			}
		case wireType == protowire.StartGroupType:
			inner, _ := protowire.ConsumeGroup(number, value)
			if losesUnknown(field.Message(), inner) {
				return true
			}
		}
	}
	return false
}
