// Package docs_test holds the pages to what they say: the quick start works, all Go compiles, all links lead somewhere.
package docs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"

	leasebusv1 "github.com/leasebus/leasebus/options/leasebus/v1"
)

// block is a fenced block of a page.
type block struct {
	page string
	line int
	// language and info are the two parts of what stands behind the fence, as in ```go file=main.go.
	language, info string
	text           string
}

func (b block) String() string { return fmt.Sprintf("%s:%d", b.page, b.line) }

// file is the name of the file that b is to be put in; "" = none.
func (b block) file() string {
	name, _ := strings.CutPrefix(b.info, "file=")
	if name == b.info {
		return ""
	}
	return name
}

// pages lists the pages for users, README included.
func pages(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob("*.md")
	if err != nil || len(names) < 2 {
		t.Fatalf("pages: %v, %v", names, err)
	}
	return append(names, "../README.md")
}

func blocks(t *testing.T, page string) []block {
	t.Helper()
	var (
		all    []block
		inside bool
	)
	for i, line := range strings.SplitAfter(read(t, page), "\n") {
		fence, isFence := strings.CutPrefix(line, "```")
		switch {
		case isFence && inside:
			inside = false
		case isFence:
			inside = true
			language, info, _ := strings.Cut(strings.TrimSpace(fence), " ")
			all = append(all, block{page: page, line: i + 1, language: language, info: info})
		case inside:
			all[len(all)-1].text += line
		}
	}
	if inside {
		t.Fatalf("%s: a block is not closed", page)
	}
	return all
}

// TestQuickstart does what quickstart.md says, in an empty folder: it writes the files, runs the commands, compares the
// output. Then it compiles the Go of all pages there.
func TestQuickstart(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("builds the plugins, takes some seconds")
	}
	shop := t.TempDir()
	output := follow(t, shop, blocks(t, "quickstart.md"))
	t.Run("Go", func(t *testing.T) {
		t.Parallel()
		compileAll(t, shop)
	})
	t.Run("Annotations", func(t *testing.T) {
		t.Parallel()
		generateExamples(t, shop)
	})
	if diff := cmp.Diff(sortedLines(output.want), sortedLines(output.got)); diff != "" {
		t.Errorf("the output (+) is not what the page says (-):\n%s", diff)
	}
}

type output struct{ want, got string }

// follow goes through the quick start. It returns the output of its last command, and the one that the page promises.
func follow(t *testing.T, shop string, page []block) output {
	t.Helper()
	var out output
	for _, b := range page {
		switch {
		case b.file() != "":
			write(t, filepath.Join(shop, b.file()), b.text)
		case b.language == "sh":
			for line := range strings.SplitSeq(strings.TrimSpace(b.text), "\n") {
				out.got = shell(t, shop, fromCheckout(t, line))
			}
		case b.info == "output":
			out.want = b.text
		}
	}
	return out
}

// fromCheckout replaces the commands that would download a release of leasebus by ones that take this checkout.
func fromCheckout(t *testing.T, command string) string {
	t.Helper()
	const module = "github.com/leasebus/leasebus"
	switch {
	case command == "go get "+module+"@latest":
		return fmt.Sprintf("go mod edit -require=%s@v0.0.0 -replace=%s='%s'", module, module, checkout(t))
	case strings.HasPrefix(command, "go get -tool "):
		return "go mod edit -tool=" + strings.Join(strings.Fields(command)[3:], " -tool=")
	case strings.HasPrefix(command, "buf "):
		return buf(t) + strings.TrimPrefix(command, "buf")
	}
	return command
}

// buf is the command line of buf: the binary that LEASEBUS_BUF names, or the one of tools/go.mod.
func buf(t *testing.T) string {
	t.Helper()
	if binary := os.Getenv("LEASEBUS_BUF"); binary != "" {
		return "'" + binary + "'"
	}
	binary := filepath.Join(t.TempDir(), "buf")
	shell(t, filepath.Join(checkout(t), "tools"), "go build -o '"+binary+"' github.com/bufbuild/buf/cmd/buf")
	return "'" + binary + "'"
}

func shell(t *testing.T, dir, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Dir = dir
	cmd.Env = inModule()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", command, err, out, &stderr)
	}
	return string(out)
}

// compileAll puts every Go block of every page into a package of its own in the module of the quick start, compiles
// them, and runs those that are tests.
func compileAll(t *testing.T, shop string) {
	t.Helper()
	places := map[string]block{}
	for _, page := range pages(t) {
		for i, b := range blocks(t, page) {
			if b.language != "go" || page == "quickstart.md" && b.file() != "" {
				continue
			}
			if b.file() != "" {
				write(t, filepath.Join(shop, "pages", strings.TrimSuffix(page, ".md"), b.file()), b.text)
				continue
			}
			source, err := complete(b)
			if err != nil {
				t.Errorf("%v: %v", b, err)
				continue
			}
			name := fmt.Sprintf("%s%d", strings.ToLower(strings.TrimSuffix(filepath.Base(page), ".md")), i)
			file := "block.go"
			if strings.Contains(source, "*testing.") {
				file = "block_test.go"
			}
			write(t, filepath.Join(shop, "pages", name, file), source)
			places[filepath.Join("pages", name, file)] = b
		}
	}
	if len(places) == 0 {
		t.Fatal("the pages have no Go")
	}
	for _, command := range [][]string{{"go", "vet", "-unreachable=false", "./pages/..."}, {"go", "test", "./pages/..."}} {
		cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
		cmd.Dir = shop
		cmd.Env = inModule()
		out, err := cmd.CombinedOutput()
		if err == nil {
			continue
		}
		text := string(out)
		for place, b := range places {
			text = strings.ReplaceAll(text, place, fmt.Sprintf("%s (%s)", b, place))
		}
		t.Fatalf("the Go of the pages, %s: %v\n%s", strings.Join(command, " "), err, text)
	}
}

// inModule is the environment for the go command in the module of the quick start, which may not be complete yet.
func inModule() []string { return append(os.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off") }

// known are the packages that a block may use without saying so.
var known = map[string]string{
	"context": "context", "errors": "errors", "fmt": "fmt", "http": "net/http", "os": "os", "signal": "os/signal", "slog": "log/slog",
	"sql": "database/sql", "synctest": "testing/synctest", "syscall": "syscall", "testing": "testing", "time": "time",
	"pgx":              "github.com/jackc/pgx/v5",
	"pgxpool":          "github.com/jackc/pgx/v5/pgxpool",
	"leasebus":         "github.com/leasebus/leasebus/runtime",
	"leasebustest":     "github.com/leasebus/leasebus/runtime/leasebustest",
	"conformance":      "github.com/leasebus/leasebus/runtime/conformance",
	"memory":           "github.com/leasebus/leasebus/runtime/memory",
	"postgres":         "github.com/leasebus/leasebus/runtime/postgres",
	"amqp":             "github.com/leasebus/leasebus/runtime/amqp",
	"ordersv1":         "example.com/shop/gen/orders/v1",
	"ordersv1leasebus": "example.com/shop/gen/orders/v1/ordersv1leasebus",
	"shop":             "example.com/shop/pages/testing",
}

var qualifier = regexp.MustCompile(`\b([a-z][a-z0-9]*)\.[A-Z]`)

// complete makes a file of b, which may be a file, declarations, or statements. Statements have ctx, store, orders,
// processor and manager, pool and inbox, and may return an error.
func complete(b block) (string, error) {
	if strings.HasPrefix(b.text, "package ") {
		return b.text, nil
	}
	text := b.text
	if !parses(text) {
		text = "func _(ctx context.Context, store *memory.Store, orders *ordersv1leasebus.OrderPlacedPublisher, " +
			"processor *leasebus.Processor, manager *ordersv1leasebus.OrderPlacedManager, " +
			"pool *pgxpool.Pool, inbox *postgres.Inbox) error {\n" + text + "\nreturn nil\n}\n"
	}
	if !parses(text) {
		return "", errors.New("this is neither a file nor declarations nor statements")
	}
	var imports []string
	for _, found := range qualifier.FindAllStringSubmatch(text, -1) {
		if path, ok := known[found[1]]; ok {
			imports = append(imports, fmt.Sprintf("import %s %q\n", found[1], path))
		}
	}
	slices.Sort(imports)
	return "package pages\n\n" + strings.Join(slices.Compact(imports), "") + "\n" + text, nil
}

func parses(declarations string) bool {
	_, err := parser.ParseFile(token.NewFileSet(), "", "package p\n"+declarations, parser.SkipObjectResolution)
	return err == nil
}

// setting is a line of the reference of annotations: its name, its default, what is allowed, an example.
var setting = regexp.MustCompile("(?m)^\\| `([a-z_.]+)` \\| [^|]* \\| [^|]* \\| `([^`]+)` \\|")

// TestEverySettingIsDocumented holds annotations.md against the annotations themselves, both ways.
func TestEverySettingIsDocumented(t *testing.T) {
	t.Parallel()
	page := read(t, "annotations.md")
	var documented []string
	for _, line := range setting.FindAllStringSubmatch(page, -1) {
		documented = append(documented, line[1])
	}
	slices.Sort(documented)
	options := leasebusv1.File_leasebus_v1_options_proto.Messages()
	declared := settingsOf(options.ByName("MessageOptions"), "")
	slices.Sort(declared)
	if diff := cmp.Diff(declared, documented); diff != "" {
		t.Errorf("the settings of annotations.md (+) are not those of options.proto (-):\n%s", diff)
	}
	for _, mark := range settingsOf(options.ByName("FieldOptions"), "") {
		if !strings.Contains(page, "| `"+mark+"` |") {
			t.Errorf("annotations.md does not have the mark %s", mark)
		}
	}
	for _, kind := range []protoreflect.ExtensionType{leasebusv1.E_File, leasebusv1.E_Message, leasebusv1.E_Field} {
		if number := kind.TypeDescriptor().Number(); !strings.Contains(page, fmt.Sprintf("the number %d,", number)) {
			t.Errorf("annotations.md does not say that %s has the number %d", kind.TypeDescriptor().FullName(), number)
		}
	}
}

// settingsOf lists the settings of a message of options.proto by their paths.
func settingsOf(message protoreflect.MessageDescriptor, prefix string) []string {
	var all []string
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		name := prefix + string(field.Name())
		inner := field.Message()
		if inner != nil && inner.ParentFile() == message.ParentFile() && inner.Fields().Len() > 0 {
			all = append(all, settingsOf(inner, name+".")...)
			continue
		}
		all = append(all, name)
	}
	return all
}

// generateExamples lets the plugin judge the examples of annotations.md.
func generateExamples(t *testing.T, shop string) {
	t.Helper()
	var file strings.Builder
	file.WriteString("syntax = \"proto3\";\npackage examples.v1;\nimport \"leasebus/v1/options.proto\";\n" +
		"option go_package = \"example.com/shop/gen/examples/v1;examplesv1\";\n")
	for i, line := range setting.FindAllStringSubmatch(read(t, "annotations.md"), -1) {
		fmt.Fprintf(&file, "message Example%d {\n  option (leasebus.v1.message) = {%s};\n}\n", i, line[2])
	}
	write(t, filepath.Join(shop, "proto", "examples", "v1", "examples.proto"), file.String())
	shell(t, shop, buf(t)+" generate --path proto/examples")
	shell(t, shop, "go vet ./gen/examples/...")
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.+)$`)
	unsaid  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// TestLinks follows the links between files of this repository, fragments included.
func TestLinks(t *testing.T) {
	t.Parallel()
	for _, page := range append(pages(t), "../CONTRIBUTING.md", "../CHANGELOG.md") {
		text, _, _ := strings.Cut(read(t, page), "<!-- The table is written by make generate. -->") // and held by its check
		for _, found := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(found[1], "://") {
				continue
			}
			target, fragment, _ := strings.Cut(found[1], "#")
			file := page
			if target != "" {
				file = filepath.Join(filepath.Dir(page), target)
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s: the link %s leads nowhere", page, found[1])
			} else if fragment != "" && !slices.Contains(anchors(read(t, file)), fragment) {
				t.Errorf("%s: the link %s leads to no heading of %s", page, found[1], file)
			}
		}
	}
}

// anchors are the fragments that GitHub gives the headings of a page.
func anchors(page string) []string {
	var all []string
	for _, found := range heading.FindAllStringSubmatch(page, -1) {
		all = append(all, strings.ReplaceAll(unsaid.ReplaceAllString(strings.ToLower(found[1]), ""), " ", "-"))
	}
	return all
}

// TestIndexHasEveryPage holds that no page is out of reach.
func TestIndexHasEveryPage(t *testing.T) {
	t.Parallel()
	index := read(t, "README.md")
	for _, page := range pages(t) {
		if page != "README.md" && page != "../README.md" && !strings.Contains(index, "("+page) {
			t.Errorf("the index has no link to %s", page)
		}
	}
}

func checkout(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

func sortedLines(text string) []string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	slices.Sort(lines)
	return lines
}

func read(t *testing.T, file string) string {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func write(t *testing.T, file, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}
