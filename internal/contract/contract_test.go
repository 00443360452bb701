package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRulesIn(t *testing.T) {
	t.Parallel()
	for name, want := range map[string][]int{
		"TestLease_S12_StaleComplete":   {12},
		"TestS7_TimeoutIsAFailure":      {7},
		"TestSettle_S12":                {12},
		"S12_S14_stale_complete":        {12, 14},
		"S50 S53 twice, C5_1 too":       {50, 53},
		"TestDrain_S50_S53_Twice":       {50, 53},
		"TestLease":                     nil,
		"TestAS12_NotAtAWordsBeginning": nil,
		"TestS3Client":                  nil,
	} {
		if got := rulesIn(name); !slices.Equal(got, want) {
			t.Errorf("rulesIn(%q) = %v, want %v", name, got, want)
		}
	}
}

func TestParseRules(t *testing.T) {
	t.Parallel()
	got, err := parseRules("# Contract\n### S2 Two, and `more`\ntext S9\n### S1 One (not built yet)\n#### S3 No rule\n")
	if err != nil {
		t.Fatal(err)
	}
	want := []rule{{1, "One", false}, {2, "Two, and `more`", true}}
	if !slices.Equal(got, want) {
		t.Errorf("rules are %v, want %v", got, want)
	}
	for i, want := range []string{"s1-one-not-built-yet", "s2-two-and-more"} {
		if anchor := got[i].anchor(); anchor != want {
			t.Errorf("anchor is %q, want %q", anchor, want)
		}
	}
	for page, want := range map[string]string{
		"### S1 One\n### S1 Another\n": "rule S1 stands twice",
		"no headings":                  "has no rules",
	} {
		if _, err := parseRules(page); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parseRules(%q) answers %v, want an error with %q", page, err, want)
		}
	}
}

// page is a contract with two built rules and one to come; the table is to be filled in.
const page = "### S1 Claims are atomic\n### S2 Leases exclude\n### S45 Three answers (not built yet)\n" +
	tableBegin + "\nold\n" + tableEnd + "\nthe end\n"

func TestRunWritesTheTable(t *testing.T) {
	t.Parallel()
	root := tree(t, map[string]string{
		"docs/contract.md": page,
		"runtime/lease_test.go": "package leasebus\n// TestS45_InAComment\nfunc TestLease_S1_Atomic() { t.Error(`S45 said`); t.Run(`S2 a table's own`) }\n" +
			"var cases = map[string]int{`S1 a|b`: 1}\n",
		"runtime/lease.go":              "package leasebus\nconst notATest = `S45_x`\n",
		"runtime/conformance/cases.go":  "package conformance\nvar cases = []struct{ name string }{{name: \"S1_atomic\"}, {\"S2_exclusive\"}}\n",
		"runtime/conformance/x_test.go": "package conformance_test\nimport _ \"github.com/leasebus/leasebus/runtime/conformance\"\nfunc TestMutant_S2_OfTheSuite() {}\n",
		"runtime/memory/feed_test.go":   "package memory_test\nimport _ \"github.com/leasebus/leasebus/runtime/conformance\"\n",
		"tools/go.mod":                  "module tools\n",
		"tools/x_test.go":               "package tools\nfunc TestS45_ElseWhere() {}\n",
		"runtime/testdata/x_test.go":    "this is not Go",
	})
	if err := run(root); err != nil {
		t.Fatal(err)
	}
	want := strings.Replace(page, "old\n", `
| rule | engine | memory |
| --- | --- | --- |
| [S1](#s1-claims-are-atomic) Claims are atomic | [S1 a\|b](../runtime/lease_test.go)<br>[TestLease_S1_Atomic](../runtime/lease_test.go) | [S1_atomic](../runtime/conformance/cases.go) |
| [S2](#s2-leases-exclude) Leases exclude | [S2 a table's own](../runtime/lease_test.go) | [S2_exclusive](../runtime/conformance/cases.go) |
| [S45](#s45-three-answers-not-built-yet) Three answers | not built yet | not built yet |

`, 1)
	if diff := cmp.Diff(want, read(t, root)); diff != "" {
		t.Errorf("the page (+) is not as wanted (-):\n%s", diff)
	}
	if err := run(root); err != nil || read(t, root) != want {
		t.Errorf("a second run changes the page, or fails: %v\n%s", err, read(t, root))
	}
}

func TestRunRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		page, tests string
		want        []string
	}{
		"built without a test": {page, "func TestS1_X() {}", []string{"S2 (Leases exclude) is called built"}},
		"no such rule":         {page, "func TestS1_S2_S45_S99_X() {}", []string{"S99, which is no rule"}},
		"no table":             {"### S1 One\n", "func TestS1_X() {}", []string{"no place for the table"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := tree(t, map[string]string{"docs/contract.md": c.page, "runtime/x_test.go": "package leasebus\n" + c.tests})
			err := run(root)
			if err == nil {
				t.Fatal("run accepts it")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error is %q, want %q in it", err, want)
				}
			}
		})
	}
}

// tree writes files into a folder of the test.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func read(t *testing.T, root string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, "docs", "contract.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
