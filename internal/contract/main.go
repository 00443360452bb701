// Contract writes the table of docs/contract.md: which tests hold which rule, on which backend. It reads the rules
// from the headings of that page and the tests from the tree, by their names. It fails if a rule that the page calls
// built has no test, or if a test names a rule that the page does not have.
//
// Run it at the root of the checkout; make generate does.
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if err := run("."); err != nil {
		fmt.Fprintln(os.Stderr, "contract:", err)
		os.Exit(1)
	}
}

// run brings the page of the checkout at root up to date.
func run(root string) error {
	path := filepath.Join(root, "docs", "contract.md")
	page, err := os.ReadFile(path) //nolint:gosec // a file of this checkout
	if err != nil {
		return fmt.Errorf("read the rules: %w", err)
	}
	rules, err := parseRules(string(page))
	if err != nil {
		return err
	}
	tests, err := findTests(root)
	if err != nil {
		return err
	}
	updated, err := replaceTable(string(page), table(rules, tests))
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, []byte(updated), 0o644); err != nil { //nolint:gosec // a page for everyone to read
		return fmt.Errorf("write the table: %w", err)
	}
	return judge(rules, tests)
}
