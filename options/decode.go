package options

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	leasebusv1 "github.com/leasebus/leasebus/options/leasebus/v1"
)

// Number is that of all leasebus options. It is from the range for in-house use until it is registered.
const Number protoreflect.FieldNumber = 61850

// option names one kind of leasebus option: the standard message that it extends, and its own type.
type option[T proto.Message] struct {
	extension protoreflect.ExtensionType
	carrier   func() proto.Message
}

var (
	fileOption = option[*leasebusv1.FileOptions]{
		leasebusv1.E_File, func() proto.Message { return new(descriptorpb.FileOptions) },
	}
	messageOption = option[*leasebusv1.MessageOptions]{
		leasebusv1.E_Message, func() proto.Message { return new(descriptorpb.MessageOptions) },
	}
	fieldOption = option[*leasebusv1.FieldOptions]{
		leasebusv1.E_Field, func() proto.Message { return new(descriptorpb.FieldOptions) },
	}
)

// ours resolves the leasebus options and nothing else: what other options say is not looked at.
var ours = func() *protoregistry.Types {
	types := new(protoregistry.Types)
	for _, xt := range []protoreflect.ExtensionType{leasebusv1.E_File, leasebusv1.E_Message, leasebusv1.E_Field} {
		if err := types.RegisterExtension(xt); err != nil {
			panic(err) // three distinct constants cannot collide
		}
	}
	return types
}()

// decode takes a leasebus option out of a descriptor's options.
//
// The option comes in one of three shapes: as the generated Go type, as unknown bytes (the descriptor was parsed where
// leasebus was not linked in), or as a dynamic message (it was compiled at run time). All of them have the same bytes,
// so going through the bytes treats them alike.
func decode[T proto.Message](options protoreflect.ProtoMessage, kind option[T]) (value T, found bool, err error) {
	if options == nil {
		return value, false, nil
	}
	name := kind.extension.TypeDescriptor().FullName()
	encoded, err := proto.MarshalOptions{AllowPartial: true}.Marshal(options)
	if err != nil {
		return value, false, fmt.Errorf("the option (%s) cannot be read: %w", name, err)
	}
	if len(encoded) == 0 {
		return value, false, nil
	}
	carrier := kind.carrier()
	if err := (proto.UnmarshalOptions{AllowPartial: true, Resolver: ours}).Unmarshal(encoded, carrier); err != nil {
		return value, false, fmt.Errorf("the option (%s) cannot be read: %w", name, err)
	}
	if hasField(carrier.ProtoReflect().GetUnknown(), Number) {
		return value, false, fmt.Errorf("option %d is not a message, so it is not (%s); another option seems to have its number",
			Number, name)
	}
	if !proto.HasExtension(carrier, kind.extension) {
		return value, false, nil
	}
	value, ok := proto.GetExtension(carrier, kind.extension).(T)
	if !ok {
		return value, false, fmt.Errorf("the option (%s) is of an unexpected type", name)
	}
	if where := unknownTo(value.ProtoReflect()); where != "" {
		return value, true, fmt.Errorf("the option (%s) holds %s, which is unknown here: it was made for a newer leasebus; "+
			"use that version, or take the setting away", name, where)
	}
	return value, true, nil
}

// hasField tells whether raw fields, already known to be well formed, hold one with this number.
func hasField(raw []byte, number protowire.Number) bool {
	for len(raw) > 0 {
		n, _, length := protowire.ConsumeField(raw)
		if n == number {
			return true
		}
		if length < 0 {
			return false
		}
		raw = raw[length:]
	}
	return false
}

// unknownTo describes the first field or enum value of m, at any depth, that this version has no name for; "" = none.
// A setting that is not understood must not be ignored: it may be the one that matters.
func unknownTo(m protoreflect.Message) string {
	if raw := m.GetUnknown(); len(raw) > 0 {
		number, _, _ := protowire.ConsumeField(raw)
		return fmt.Sprintf("field %d of %s", number, m.Descriptor().FullName())
	}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		if !m.Has(field) || field.IsList() {
			continue
		}
		switch field.Kind() {
		case protoreflect.MessageKind:
			if where := unknownTo(m.Get(field).Message()); where != "" {
				return where
			}
		case protoreflect.EnumKind:
			if value := m.Get(field).Enum(); field.Enum().Values().ByNumber(value) == nil {
				return fmt.Sprintf("value %d of %s", value, field.Enum().FullName())
			}
		default: // scalars have no names to be missed
		}
	}
	return ""
}
