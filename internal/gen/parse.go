package gen

import (
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/compiler/protogen"

	"github.com/leasebus/leasebus/options"
)

// file is a proto file of the request with its annotated messages.
type file struct {
	proto    *protogen.File
	messages []*message // in the order of declaration, the outer ones first

	// Where the generated code goes.
	output       string // path of the file
	goImportPath protogen.GoImportPath
	goPackage    string
}

// message is an annotated message.
type message struct {
	proto      *protogen.Message
	file       *file
	annotation *options.Annotation
	names      names
}

// isWritten tells whether a file is generated: one without annotated messages gets none.
func (f *file) isWritten() bool { return f.proto.Generate && len(f.messages) > 0 }

// inSubPackage tells whether the generated code lives in a Go package of its own.
func (f *file) inSubPackage() bool { return f.goImportPath != f.proto.GoImportPath }

// parse collects the files of the request and what they import, sorted by path: the order of the request depends on
// how the compiler was called, and must not show.
func parse(plugin *protogen.Plugin, parameters *Parameters) []*file {
	files := make([]*file, 0, len(plugin.Files))
	for _, proto := range plugin.Files {
		f := &file{proto: proto}
		f.setTarget(parameters.packageSuffix)
		f.collect(proto.Messages)
		files = append(files, f)
	}
	slices.SortFunc(files, func(a, b *file) int { return strings.Compare(a.proto.Desc.Path(), b.proto.Desc.Path()) })
	return files
}

func (f *file) collect(messages []*protogen.Message) {
	for _, proto := range messages {
		if annotation, ok := options.Read(proto.Desc); ok {
			f.messages = append(f.messages, &message{
				proto: proto, file: f, annotation: annotation, names: namesOf(proto.GoIdent.GoName),
			})
		}
		f.collect(proto.Messages)
	}
}

func (f *file) setTarget(packageSuffix string) {
	dir, base := path.Split(f.proto.GeneratedFilenamePrefix)
	f.goPackage = string(f.proto.GoPackageName)
	f.goImportPath = f.proto.GoImportPath
	if packageSuffix != "" {
		f.goPackage += packageSuffix
		f.goImportPath = protogen.GoImportPath(path.Join(string(f.goImportPath), f.goPackage))
		dir = path.Join(dir, f.goPackage)
	}
	f.output = path.Join(dir, base+".leasebus.go")
}
