package options

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	leasebusv1 "github.com/leasebus/leasebus/options/leasebus/v1"
)

// A Problem is one thing that is wrong with a message's annotation.
type Problem struct {
	// Message is the full name of the message; "" where it is about the file.
	Message protoreflect.FullName
	// Setting is the path of the setting in the annotation, such as "lease.heartbeat"; "" where it is about no one setting.
	Setting string
	// Text says what is wrong, and what is allowed.
	Text string
	// File is the path of the proto file that holds the place.
	File string
	// Line and Column count from 1. Both are 0 where the descriptor came without source information,
	// as those compiled into a program do.
	Line, Column int
}

// Position is "path:line:column", or the path alone where the place in it is not known.
func (p Problem) Position() string {
	if p.Line == 0 {
		return p.File
	}
	return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column)
}

func (p Problem) Error() string {
	text := p.Text
	if p.Setting != "" {
		text = p.Setting + ": " + text
	}
	if p.Message != "" {
		text = fmt.Sprintf("message %s: %s", p.Message, text)
	}
	return p.Position() + ": " + text
}

// Compare orders problems by place, then by text.
func (p Problem) Compare(q Problem) int {
	return cmp.Or(
		strings.Compare(p.File, q.File),
		cmp.Compare(p.Line, q.Line),
		cmp.Compare(p.Column, q.Column),
		strings.Compare(p.Error(), q.Error()),
	)
}

// Problem makes a problem with one setting of the annotation, such as "lease.heartbeat".
// It points at the setting where it is given, on the message or in the defaults of its file; else at what encloses it;
// else at the message.
func (a *Annotation) Problem(setting, format string, args ...any) Problem {
	p := a.problemAt(a.locate(setting), format, args...)
	p.Setting = setting
	return p
}

func (a *Annotation) reportf(at location, format string, args ...any) {
	a.Problems = append(a.Problems, a.problemAt(at, format, args...))
}

func (a *Annotation) problemAt(at location, format string, args ...any) Problem {
	return Problem{
		Message: a.Message.FullName(), Text: fmt.Sprintf(format, args...),
		File: at.file, Line: at.line, Column: at.column,
	}
}

type location struct {
	file         string
	line, column int
}

// The fields of descriptor.proto that hold the options of a file, a message and a field.
const (
	fileOptionsField    = 8
	messageOptionsField = 7
	fieldOptionsField   = 8
)

// locate finds where a setting is given; "" = the annotation as a whole.
func (a *Annotation) locate(setting string) location {
	own := (&leasebusv1.MessageOptions{}).ProtoReflect()
	if a.own != nil {
		own = a.own.ProtoReflect()
	}
	names := settingNames(setting)
	if defaults := a.defaults.ProtoReflect(); !isGiven(own, names) && isGiven(defaults, names) {
		return locateDefault(a.Message.ParentFile(), names...)
	}
	return locate(a.Message, append(protoreflect.SourcePath{messageOptionsField, int32(Number)}, numbers(own.Descriptor(), names)...))
}

// locateDefault finds where the file gives a default.
func locateDefault(file protoreflect.FileDescriptor, names ...protoreflect.Name) location {
	names = append([]protoreflect.Name{"defaults"}, names...)
	options := (*leasebusv1.FileOptions)(nil).ProtoReflect().Descriptor()
	return locate(file, append(protoreflect.SourcePath{fileOptionsField, int32(Number)}, numbers(options, names)...))
}

// locateField finds the mark of a field; "" = its annotation as a whole.
func locateField(field protoreflect.FieldDescriptor, mark string) location {
	marks := (*leasebusv1.FieldOptions)(nil).ProtoReflect().Descriptor()
	return locate(field, append(protoreflect.SourcePath{fieldOptionsField, int32(Number)}, numbers(marks, settingNames(mark))...))
}

// locate finds a path within the options of a descriptor, or what is nearest to it: the first thing inside it, else
// what encloses it, in the end the descriptor.
//
// Compilers differ in the places that they tell. protoc knows no place inside the braces of an option; buf knows
// one for each scalar, so for a duration only that of its seconds.
func locate(owner protoreflect.Descriptor, option protoreflect.SourcePath) location {
	file := owner.ParentFile()
	if file == nil {
		return location{} // a descriptor made by hand, outside any file
	}
	of := pathOf(owner)
	for ; len(option) >= 2; option = option[:len(option)-1] { // 2: the options, and which of them
		if at, ok := firstWithin(file, slices.Concat(of, option)); ok {
			return at
		}
	}
	for ; len(of) > 0; of = of[:len(of)-1] {
		if found := file.SourceLocations().ByPath(of); found.Path != nil {
			return locationOf(file, found)
		}
	}
	return location{file: file.Path()}
}

// firstWithin finds a path in the source, or the first thing inside it.
func firstWithin(file protoreflect.FileDescriptor, path protoreflect.SourcePath) (location, bool) {
	sources := file.SourceLocations()
	if exact := sources.ByPath(path); exact.Path != nil {
		return locationOf(file, exact), true
	}
	var first protoreflect.SourceLocation
	for i := range sources.Len() {
		candidate := sources.Get(i)
		if len(candidate.Path) <= len(path) || !slices.Equal(candidate.Path[:len(path)], path) {
			continue
		}
		if first.Path == nil || cmp.Or(cmp.Compare(candidate.StartLine, first.StartLine), cmp.Compare(candidate.StartColumn, first.StartColumn)) < 0 {
			first = candidate
		}
	}
	return locationOf(file, first), first.Path != nil
}

func locationOf(file protoreflect.FileDescriptor, found protoreflect.SourceLocation) location {
	return location{file.Path(), found.StartLine + 1, found.StartColumn + 1}
}

func settingNames(setting string) []protoreflect.Name {
	if setting == "" {
		return nil
	}
	var names []protoreflect.Name
	for name := range strings.SplitSeq(setting, ".") {
		names = append(names, protoreflect.Name(name))
	}
	return names
}

// isGiven tells whether a message sets the field at the end of a path of names.
func isGiven(m protoreflect.Message, names []protoreflect.Name) bool {
	for i, name := range names {
		field := m.Descriptor().Fields().ByName(name)
		if field == nil || !m.Has(field) {
			return false
		}
		if i < len(names)-1 {
			m = m.Get(field).Message()
		}
	}
	return len(names) > 0
}

// numbers translates names into the field numbers of a source path, as far as they are known.
func numbers(md protoreflect.MessageDescriptor, names []protoreflect.Name) []int32 {
	var path []int32
	for _, name := range names {
		if md == nil {
			break
		}
		field := md.Fields().ByName(name)
		if field == nil {
			break
		}
		path = append(path, int32(field.Number()))
		md = field.Message()
	}
	return path
}

// pathOf is the source path of a message or field, built from its place among its siblings.
func pathOf(d protoreflect.Descriptor) protoreflect.SourcePath {
	var path protoreflect.SourcePath
	for ; d.Parent() != nil; d = d.Parent() {
		path = append(path, int32(d.Index()), siblings(d)) //nolint:gosec // no file has 2³¹ of anything
	}
	slices.Reverse(path)
	return path
}

// siblings is the field of descriptor.proto that lists a message or field among its like.
func siblings(d protoreflect.Descriptor) int32 {
	const (
		messagesOfFile, extensionsOfFile                        = 4, 7
		fieldsOfMessage, messagesOfMessage, extensionsOfMessage = 2, 3, 6
	)
	_, inFile := d.Parent().(protoreflect.FileDescriptor)
	field, isField := d.(protoreflect.FieldDescriptor)
	switch {
	case isField && !field.IsExtension():
		return fieldsOfMessage
	case isField && inFile:
		return extensionsOfFile
	case isField:
		return extensionsOfMessage
	case inFile:
		return messagesOfFile
	default:
		return messagesOfMessage
	}
}
