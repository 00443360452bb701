package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// test is a test function or a case in a table of cases whose name holds rules.
type test struct {
	name   string
	rules  []int
	file   string // from the root, with slashes
	column string
}

// columns of the table, in order, with the folders whose tests they hold; of nested folders the inner one counts.
// A column without a test is left out.
var columns = []struct {
	name    string
	folders []string
}{
	{"engine", []string{"runtime"}},
	{"memory", []string{"runtime/memory"}},
	{"PostgreSQL", []string{"runtime/postgres"}},
	{"RabbitMQ", []string{"runtime/amqp"}},
	{"generator", []string{"options", "internal/gen", "cmd/protoc-gen-leasebus", "golden"}},
}

const (
	module      = "github.com/leasebus/leasebus"
	conformance = "runtime/conformance"
)

var (
	// ruleInName finds S12 in TestLease_S12_StaleComplete, in S12_S14_stale_complete and in "S12 a stale complete".
	ruleInName = regexp.MustCompile(`(?:^|[_ ]|^Test)S(\d+)(?:[_ ]|$)`)
	// caseName is a string literal that can be the name of a case.
	caseName = regexp.MustCompile(`^S\d+[_ ]\S`)
)

// rulesIn lists the rules that a name holds.
func rulesIn(name string) []int {
	var rules []int
	for rest := name; ; {
		found := ruleInName.FindStringSubmatchIndex(rest)
		if found == nil {
			return rules
		}
		number, err := strconv.Atoi(rest[found[2]:found[3]])
		if err == nil {
			rules = append(rules, number)
		}
		rest = rest[found[3]:] // the underscore behind it may be the one before the next
	}
}

// findTests reads the Go files below root. Modules of their own are not part of it.
func findTests(root string) ([]test, error) {
	var (
		tests     []test
		suite     []test              // cases of the conformance suite
		suiteRuns = map[string]bool{} // columns whose tests run it
	)
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return skipFolder(root, name)
		}
		relative := filepath.ToSlash(strings.TrimPrefix(name, root+string(filepath.Separator)))
		inSuite := path.Dir(relative) == conformance
		isTest := strings.HasSuffix(relative, "_test.go")
		if path.Ext(relative) != ".go" || inSuite == isTest || columnOf(relative) == "" { // the suite's tests of itself hold no rule
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return fmt.Errorf("parse: %w", err)
		}
		found := testsIn(file, relative)
		if inSuite {
			suite = append(suite, found...)
			return nil
		}
		tests = append(tests, found...)
		if imports(file, module+"/"+conformance) {
			suiteRuns[columnOf(relative)] = true
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for tests: %w", err)
	}
	for _, column := range slices.Sorted(maps.Keys(suiteRuns)) {
		for _, t := range suite {
			t.column = column
			tests = append(tests, t)
		}
	}
	return tests, nil
}

// skipFolder leaves out what the go command leaves out too.
func skipFolder(root, name string) error {
	base := filepath.Base(name)
	if name == root {
		return nil
	}
	if base == "testdata" || strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") {
		return fs.SkipDir
	}
	if _, err := os.Stat(filepath.Join(name, "go.mod")); err == nil {
		return fs.SkipDir
	}
	return nil
}

// testsIn lists the test functions and the named cases of one file.
func testsIn(file *ast.File, name string) []test {
	var tests []test
	add := func(title string) {
		if rules := rulesIn(title); len(rules) > 0 {
			tests = append(tests, test{name: title, rules: rules, file: name, column: columnOf(name)})
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			if n.Recv == nil && strings.HasPrefix(n.Name.Name, "Test") {
				add(n.Name.Name)
			}
		case *ast.CompositeLit:
			for _, element := range n.Elts {
				add(caseIn(element))
			}
		case *ast.CallExpr:
			if run, ok := n.Fun.(*ast.SelectorExpr); ok && run.Sel.Name == "Run" && len(n.Args) > 0 {
				add(caseIn(n.Args[0]))
			}
		}
		return true
	})
	return tests
}

// caseIn returns the name of a case that an element of a table or an argument of t.Run is: a string itself, the key
// of a map, or the value of a field called name.
func caseIn(n ast.Expr) string {
	if pair, ok := n.(*ast.KeyValueExpr); ok {
		n = pair.Key
		if field, ok := pair.Key.(*ast.Ident); ok && strings.EqualFold(field.Name, "name") {
			n = pair.Value
		}
	}
	literal, ok := n.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return ""
	}
	value, err := strconv.Unquote(literal.Value)
	if err != nil || !caseName.MatchString(value) {
		return ""
	}
	return value
}

func imports(file *ast.File, what string) bool {
	return slices.ContainsFunc(file.Imports, func(spec *ast.ImportSpec) bool {
		return spec.Path.Value == strconv.Quote(what)
	})
}

// columnOf finds the column of a file or folder; "" = none: tests there hold nothing of the contract.
func columnOf(name string) string {
	for folder := name; folder != "."; folder = path.Dir(folder) {
		for _, column := range columns {
			if slices.Contains(column.folders, folder) {
				return column.name
			}
		}
	}
	return ""
}
