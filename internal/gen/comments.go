package gen

import (
	"regexp"
	"strings"

	"google.golang.org/protobuf/compiler/protogen"
	"google.golang.org/protobuf/types/descriptorpb"
)

// comment makes // comments of lines. It is the only way that text gets into a comment: jennifer would write several
// lines as one /* */, which ends at the first */ in the text.
func comment(lines ...string) string {
	var text strings.Builder
	for _, line := range lines {
		if line != "" && line[0] != '\t' {
			text.WriteByte(' ')
		}
		text.WriteString(line)
		text.WriteByte('\n')
	}
	return strings.TrimSuffix(protogen.Comments(text.String()).String(), "\n")
}

// doc is the comment of a declaration: what it is, and that it is deprecated if the message is.
func (m *message) doc(lines ...string) string {
	own, _ := m.proto.Desc.Options().(*descriptorpb.MessageOptions)
	if own.GetDeprecated() {
		lines = append(lines, "", "Deprecated: message "+string(m.fullName())+" is marked as deprecated.")
	} else if m.file.proto.Proto.GetOptions().GetDeprecated() {
		lines = append(lines, "", "Deprecated: file "+oneLine(m.file.proto.Desc.Path())+" is marked as deprecated.")
	}
	return comment(lines...)
}

// leading is what stands above the message in its proto file, as lines to put behind our own.
func (m *message) leading() []string {
	text := strings.TrimSuffix(string(m.proto.Comments.Leading), "\n")
	if strings.TrimSpace(text) == "" {
		return nil
	}
	lines := []string{""}
	for line := range strings.SplitSeq(text, "\n") {
		lines = append(lines, commentLine(line))
	}
	return lines
}

// unprintable is what Go does not allow in a source file, or reads as the end of a line.
var unprintable = regexp.MustCompile("[\x00\r\ufeff]")

// commentLine is a line of a proto comment without the space that usually follows its marker; comment puts one there
// for every line, so that none reads as a directive such as //go:generate.
func commentLine(line string) string {
	line = unprintable.ReplaceAllString(strings.ToValidUTF8(line, "\ufffd"), "")
	return strings.TrimRight(strings.TrimPrefix(line, " "), " \t")
}

// oneLine makes a path fit into a line of a comment.
func oneLine(path string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' {
			return -1
		}
		return r
	}, path)
}
