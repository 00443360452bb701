package options_test

import (
	"testing"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	leasebusv1 "github.com/leasebus/leasebus/options/leasebus/v1"
)

// annotation reads the annotation of a message.
func annotation(text string) *leasebusv1.MessageOptions {
	m := &leasebusv1.MessageOptions{}
	mustRead(text, m)
	return m
}

// defaults reads those of a file; "" = the file gives none.
func defaults(text string) *leasebusv1.FileOptions {
	if text == "" {
		return nil
	}
	d := &leasebusv1.Defaults{}
	mustRead(text, d)
	return &leasebusv1.FileOptions{Defaults: d}
}

func mustRead(text string, m proto.Message) {
	if err := prototext.Unmarshal([]byte(text), m); err != nil {
		panic(err)
	}
}

// describe makes message shop.v1.Order with one string field, id. An annotation that is nil is not there.
func describe(
	tb testing.TB, file *leasebusv1.FileOptions, message *leasebusv1.MessageOptions, field *leasebusv1.FieldOptions,
) protoreflect.MessageDescriptor {
	tb.Helper()
	fd := fileOf(message, field)
	if file != nil {
		fd.Options = &descriptorpb.FileOptions{}
		proto.SetExtension(fd.GetOptions(), leasebusv1.E_File, file)
	}
	return linked(tb, fd)
}

func fileOf(message *leasebusv1.MessageOptions, field *leasebusv1.FieldOptions) *descriptorpb.FileDescriptorProto {
	order := &descriptorpb.DescriptorProto{Name: proto.String("Order"), Field: []*descriptorpb.FieldDescriptorProto{stringField("id", 1)}}
	if message != nil {
		order.Options = &descriptorpb.MessageOptions{}
		proto.SetExtension(order.GetOptions(), leasebusv1.E_Message, message)
	}
	if field != nil {
		order.Field[0].Options = &descriptorpb.FieldOptions{}
		proto.SetExtension(order.GetField()[0].GetOptions(), leasebusv1.E_Field, field)
	}
	return &descriptorpb.FileDescriptorProto{
		Name: proto.String("shop.proto"), Package: proto.String("shop.v1"), Syntax: proto.String("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{order},
	}
}

func stringField(name string, number int32) *descriptorpb.FieldDescriptorProto {
	return &descriptorpb.FieldDescriptorProto{
		Name: proto.String(name), JsonName: proto.String(name), Number: proto.Int32(number),
		Type:  descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum(),
		Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
	}
}

// linked makes the descriptor of the first message of a file.
func linked(tb testing.TB, fd *descriptorpb.FileDescriptorProto) protoreflect.MessageDescriptor {
	tb.Helper()
	file, err := protodesc.NewFile(fd, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return file.Messages().Get(0)
}

// parsed sends a file through its bytes, the options being what the resolver makes of them.
func parsed(tb testing.TB, fd *descriptorpb.FileDescriptorProto, resolver interface {
	protoregistry.MessageTypeResolver
	protoregistry.ExtensionTypeResolver
},
) protoreflect.MessageDescriptor {
	tb.Helper()
	encoded, err := proto.Marshal(fd)
	if err != nil {
		tb.Fatal(err)
	}
	again := &descriptorpb.FileDescriptorProto{}
	if err := (proto.UnmarshalOptions{Resolver: resolver}).Unmarshal(encoded, again); err != nil {
		tb.Fatal(err)
	}
	return linked(tb, again)
}

// dynamicOptions resolves the leasebus options to dynamic messages, as a compiler at run time does.
func dynamicOptions(tb testing.TB) *protoregistry.Types {
	tb.Helper()
	file, err := protodesc.NewFile(protodesc.ToFileDescriptorProto(leasebusv1.File_leasebus_v1_options_proto), protoregistry.GlobalFiles)
	if err != nil {
		tb.Fatal(err)
	}
	types := new(protoregistry.Types)
	for i := range file.Extensions().Len() {
		if err := types.RegisterExtension(dynamicpb.NewExtensionType(file.Extensions().Get(i))); err != nil {
			tb.Fatal(err)
		}
	}
	return types
}
