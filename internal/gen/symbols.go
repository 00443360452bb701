package gen

import (
	"fmt"

	"google.golang.org/protobuf/compiler/protogen"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/leasebus/leasebus/options"
)

// symbols are the names declared at the package level of each Go package, with what they are declared for.
type symbols map[protogen.GoImportPath]map[string]protoreflect.Descriptor

// declareAll enters the names that protoc-gen-go and this plugin declare, and reports those of ours that are taken.
// A collision is never resolved by renaming: which message got the plain name would depend on the other one.
func declareAll(visible []*file) (symbols, []options.Problem) {
	table := symbols{}
	for _, f := range visible {
		table.declareProtoc(f.proto.GoImportPath, f.proto.Enums, f.proto.Extensions, f.proto.Messages)
	}
	var problems []options.Problem
	for _, f := range visible {
		if !f.isWritten() {
			continue
		}
		for _, m := range f.messages {
			if problem, ok := table.declareMessage(m); !ok {
				problems = append(problems, problem)
			}
		}
	}
	return table, problems
}

// declareProtoc enters what protoc-gen-go declares: in the package of the messages that is in the way of our names.
// Two of its own names that collide are for protoc-gen-go to report.
func (s symbols) declareProtoc(
	pkg protogen.GoImportPath, enums []*protogen.Enum, extensions []*protogen.Extension, messages []*protogen.Message,
) {
	for _, enum := range enums {
		s.declare(pkg, enum.GoIdent.GoName, enum.Desc)
		for _, value := range enum.Values {
			s.declare(pkg, value.GoIdent.GoName, value.Desc)
		}
	}
	for _, extension := range extensions {
		s.declare(pkg, extension.GoIdent.GoName, extension.Desc)
	}
	for _, m := range messages {
		s.declare(pkg, m.GoIdent.GoName, m.Desc)
		for _, oneof := range m.Oneofs {
			s.declare(pkg, "is"+oneof.GoIdent.GoName, oneof.Desc)
			for _, field := range oneof.Fields {
				s.declare(pkg, field.GoIdent.GoName, field.Desc)
			}
		}
		s.declareProtoc(pkg, m.Enums, m.Extensions, m.Messages)
	}
}

// declareMessage enters the names of a message; the first one that is taken is reported, for the rest follow from it.
func (s symbols) declareMessage(m *message) (options.Problem, bool) {
	for _, name := range m.names.declared() {
		if other, free := s.declare(m.file.goImportPath, name, m.proto.Desc); !free {
			return problemAt(m.proto.Desc, m.proto.Desc.FullName(),
				"the Go name %s is needed for it and for %s at %s, both in package %s; rename one of the two",
				name, other.FullName(), position(other), m.file.goPackage), false
		}
	}
	return options.Problem{}, true
}

// declare enters a name. If it is taken, it answers for what.
func (s symbols) declare(pkg protogen.GoImportPath, name string, by protoreflect.Descriptor) (protoreflect.Descriptor, bool) {
	if s[pkg] == nil {
		s[pkg] = map[string]protoreflect.Descriptor{}
	}
	if other, taken := s[pkg][name]; taken {
		return other, false
	}
	s[pkg][name] = by
	return by, true
}

func (s symbols) has(pkg protogen.GoImportPath, name string) bool {
	_, ok := s[pkg][name]
	return ok
}

// problemAt points at a descriptor.
func problemAt(at protoreflect.Descriptor, about protoreflect.FullName, format string, args ...any) options.Problem {
	p := options.Problem{Message: about, Text: fmt.Sprintf(format, args...), File: at.ParentFile().Path()}
	if found := at.ParentFile().SourceLocations().ByDescriptor(at); found.Path != nil {
		p.Line, p.Column = found.StartLine+1, found.StartColumn+1
	}
	return p
}

func position(d protoreflect.Descriptor) string { return problemAt(d, "", "").Position() }
