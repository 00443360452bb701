package gen

import (
	"go/build"
	"io"
	"path"
	"strings"

	"google.golang.org/protobuf/compiler/protogen"

	"github.com/leasebus/leasebus/options"
)

// validate finds everything that is wrong with the files that are to be generated, and the names that they declare.
// Files that are only imported are looked at for what clashes with those.
func validate(visible []*file) (symbols, []options.Problem) {
	symbols, problems := declareAll(visible)
	for _, f := range visible {
		if !f.proto.Generate {
			continue
		}
		for _, m := range f.messages {
			problems = append(problems, m.annotation.Problems...)
		}
		problems = append(problems, misplacedMarks(f.proto)...)
		if f.isWritten() {
			problems = append(problems, checkFileName(f)...)
		}
	}
	problems = append(problems, checkOutputs(visible)...)
	problems = append(problems, checkQueues(visible)...)
	problems = append(problems, checkTypes(visible)...)
	return symbols, problems
}

// misplacedMarks reports extension fields that are marked as keys: they belong to no message's own declaration.
func misplacedMarks(f *protogen.File) []options.Problem {
	extensions := f.Extensions
	var nested func(messages []*protogen.Message)
	nested = func(messages []*protogen.Message) {
		for _, m := range messages {
			extensions = append(extensions, m.Extensions...)
			nested(m.Messages)
		}
	}
	nested(f.Messages)
	problems := make([]options.Problem, 0, len(extensions))
	for _, extension := range extensions {
		problems = append(problems, options.CheckExtension(extension.Desc)...)
	}
	return problems
}

// checkFileName refuses names that the go command would read as a build constraint, or overlook: the generated code
// would be left out of the build without a word.
func checkFileName(f *file) []options.Problem {
	name := path.Base(f.output)
	if isAlwaysBuilt(name) {
		return nil
	}
	return []options.Problem{{
		File: f.proto.Desc.Path(), Line: 1, Column: 1,
		Text: "its Go file would be called " + name + ", which the go command leaves out of some or all builds; " +
			"allowed are file names that neither begin with '_' or '.' nor end in an operating system or architecture",
	}}
}

// isAlwaysBuilt asks go/build, which keeps the list of names, on behalf of a system that does not exist.
func isAlwaysBuilt(name string) bool {
	nowhere := build.Context{
		GOOS: "none", GOARCH: "none", Compiler: "gc",
		OpenFile: func(string) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("package p\n")), nil },
	}
	ok, err := nowhere.MatchFile("", name)
	return ok && err == nil
}

// checkOutputs refuses two files that would be written to one path: buf would keep one of them and report success.
func checkOutputs(visible []*file) []options.Problem {
	var problems []options.Problem
	first := map[string]*file{}
	for _, f := range visible {
		if !f.isWritten() {
			continue
		}
		if other, taken := first[f.output]; taken {
			problems = append(problems, options.Problem{
				File: f.proto.Desc.Path(), Line: 1, Column: 1,
				Text: "its generated code goes to " + f.output + ", and so does that of " + other.proto.Desc.Path() +
					"; give the two files different names or Go packages",
			})
			continue
		}
		first[f.output] = f
	}
	return problems
}

// checkQueues refuses a queue of two messages.
func checkQueues(visible []*file) []options.Problem {
	return checkUnique(visible, "queue",
		func(m *message) []string { return []string{m.annotation.Policy.Queue} },
		"%q is also the queue of message %s at %s; allowed are queues of one message")
}

// checkTypes refuses a former name that another message has or had: its handler would get messages of both.
func checkTypes(visible []*file) []options.Problem {
	return checkUnique(visible, "aliases",
		func(m *message) []string {
			return append([]string{string(m.proto.Desc.FullName())}, m.annotation.Policy.Aliases...)
		},
		"%q is also a name of message %s at %s; allowed are names that no other message has or had")
}

// checkUnique reports names that two messages share. Of two messages the one is reported that is to be generated,
// of two such the later one. Under buf's default strategy a plugin sees one directory at a time and what that imports,
// so the runtime checks the same once more when handlers are registered.
func checkUnique(visible []*file, setting string, namesOf func(*message) []string, format string) []options.Problem {
	var problems []options.Problem
	first := map[string]*message{}
	for _, f := range visible {
		for _, m := range f.messages {
			if len(m.annotation.Problems) > 0 {
				continue // its names are not to be relied upon
			}
			for _, name := range namesOf(m) {
				other, taken := first[name]
				switch {
				case !taken:
					first[name] = m
				case other == m: // the policy's own check reports that
				case m.file.proto.Generate:
					problems = append(problems, m.annotation.Problem(setting, format, name, other.proto.Desc.FullName(), settingPosition(other, setting)))
				case other.file.proto.Generate:
					problems = append(problems, other.annotation.Problem(setting, format, name, m.proto.Desc.FullName(), settingPosition(m, setting)))
				}
			}
		}
	}
	return problems
}

func settingPosition(m *message, setting string) string {
	return m.annotation.Problem(setting, "").Position()
}
