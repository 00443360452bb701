package options

import (
	"google.golang.org/protobuf/reflect/protoreflect"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// The roles a field can have, by the name of their annotation.
const (
	idempotencyKey = "idempotency_key"
	orderingKey    = "ordering_key"
)

// key is a field that is marked as holding one.
type key struct {
	field protoreflect.FieldDescriptor
	role  string
}

// readKeys finds the marked fields of the message, in the order of declaration.
func (a *Annotation) readKeys() []key {
	var keys []key
	fields := a.Message.Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		options, _, err := decode(field.Options(), fieldOption)
		if err != nil {
			a.reportf(locateField(field, ""), "field %s: %v", field.Name(), err)
			continue
		}
		if options.GetIdempotencyKey() {
			keys = append(keys, key{field, idempotencyKey})
		}
		if options.GetOrderingKey() {
			keys = append(keys, key{field, orderingKey})
		}
	}
	return keys
}

// applyKeys puts the marked fields into the policy. A mark implies the setting that it is the key of.
func (a *Annotation) applyKeys(keys []key) {
	first := map[string]protoreflect.Name{}
	for _, k := range keys {
		name := k.field.Name()
		if other, taken := first[k.role]; taken {
			a.reportf(locateField(k.field, k.role),
				"field %s is marked as %s, and so is field %s; allowed is one field", name, k.role, other)
			continue
		}
		first[k.role] = name
		if !canHoldKey(k.field) {
			a.reportf(locateField(k.field, k.role),
				"field %s is marked as %s, but it is %s; allowed is one string, bytes or integer", name, k.role, kindOf(k.field))
			continue
		}
		switch k.role {
		case idempotencyKey:
			if a.Policy.Idempotency == nil {
				a.Policy.Idempotency = idempotencyOf(nil)
			}
			a.Policy.Idempotency.Field = string(name)
		case orderingKey:
			if a.Policy.Ordering == nil {
				a.Policy.Ordering = &leasebus.OrderingPolicy{}
			}
			a.Policy.Ordering.Field = string(name)
		}
	}
}

// canHoldKey allows the types of which two values are the same key exactly if they are equal.
// Floating point is not among them, and a truth value or enum makes no useful key.
func canHoldKey(field protoreflect.FieldDescriptor) bool {
	if field.Cardinality() == protoreflect.Repeated {
		return false
	}
	switch field.Kind() {
	case protoreflect.StringKind, protoreflect.BytesKind,
		protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Uint32Kind,
		protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Uint64Kind,
		protoreflect.Sfixed32Kind, protoreflect.Fixed32Kind, protoreflect.Sfixed64Kind, protoreflect.Fixed64Kind:
		return true
	default:
		return false
	}
}

func kindOf(field protoreflect.FieldDescriptor) string {
	switch {
	case field.IsMap():
		return "a map"
	case field.IsList():
		return "repeated"
	case field.Message() != nil:
		return "a message"
	case field.Enum() != nil:
		return "an enum"
	default:
		return "of type " + field.Kind().String()
	}
}

// CheckExtension reports an extension field that is marked as holding a key: the message that it extends
// was declared without it, and its publishers need not know the extension.
func CheckExtension(field protoreflect.ExtensionDescriptor) []Problem {
	a := &Annotation{Message: field.ContainingMessage()}
	mark, found, err := decode(field.Options(), fieldOption)
	switch {
	case err != nil:
		a.reportf(locateField(field, ""), "extension %s: %v", field.FullName(), err)
	case found && (mark.GetIdempotencyKey() || mark.GetOrderingKey()):
		a.reportf(locateField(field, ""), "extension %s is marked as holding a key; allowed are fields of the message itself", field.FullName())
	}
	return a.Problems
}
