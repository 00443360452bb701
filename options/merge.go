package options

import (
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	leasebusv1 "github.com/leasebus/leasebus/options/leasebus/v1"
)

const durationName = "google.protobuf.Duration"

// inherited is what a message takes over from the defaults of its file: all but the settings that the message's own
// choice rules out. A message that wants no retries should not have to repeal the file's max_attempts first.
func inherited(defaults *leasebusv1.Defaults, own *leasebusv1.MessageOptions) *leasebusv1.Defaults {
	rest := proto.CloneOf(defaults)
	if own.GetRetry().GetNone() != nil && rest.GetRetry() != nil {
		rest.Retry.MaxAttempts = nil
	}
	if letter := rest.GetDeadLetter(); letter != nil {
		chosen := own.GetDeadLetter()
		if chosen.GetDiscard() {
			letter.Queue, letter.InvalidQueue = nil, nil
		}
		if chosen.GetQueue() != "" || chosen.GetInvalidQueue() != "" {
			letter.Discard = nil
		}
	}
	return rest
}

// merge puts what src sets over dst, setting by setting; the two may be of different types with like-named fields.
// [proto.Merge] would not do: it merges the seconds of one duration with the nanoseconds of another.
func merge(dst, src protoreflect.Message) {
	src.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		target := dst.Descriptor().Fields().ByName(field.Name())
		if isSection(field) {
			// Mutable also makes the other kinds of a oneof go away, and keeps what the same kind had.
			merge(dst.Mutable(target).Message(), value.Message())
		} else {
			dst.Set(target, value)
		}
		return true
	})
}

// isSection tells a group of settings from a single one.
func isSection(field protoreflect.FieldDescriptor) bool {
	return field.Kind() == protoreflect.MessageKind && field.Message().FullName() != durationName
}
