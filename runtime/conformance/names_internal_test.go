package conformance

import (
	"regexp"
	"testing"
)

// Docs list rules by test from the names alone.
func TestNames(t *testing.T) {
	t.Parallel()
	form := regexp.MustCompile(`^S\d+(_S\d+)*(_C\d+_\d+)*(_[A-Za-z]+)+$`)
	seen := make(map[string]bool)
	for _, table := range tables() {
		for _, c := range table {
			if !form.MatchString(c.name) {
				t.Errorf("%s: want rules, then field cases, then words: S<number>_C<chapter>_<number>_what_is_right", c.name)
			}
			if seen[c.name] {
				t.Errorf("%s names two cases", c.name)
			}
			seen[c.name] = true
		}
	}
}
