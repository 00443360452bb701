package main

import (
	"fmt"
	"slices"
	"strings"
)

// The table stands between these lines of the page.
const (
	tableBegin = "<!-- The table is written by make generate. -->"
	tableEnd   = "<!-- End of the table. -->"
)

// table renders the rules with the tests that hold them.
func table(rules []rule, tests []test) string {
	cells := map[string]map[int][]string{} // column → rule → links
	for _, t := range tests {
		if cells[t.column] == nil {
			cells[t.column] = map[int][]string{}
		}
		for _, number := range t.rules {
			cells[t.column][number] = append(cells[t.column][number], fmt.Sprintf("[%s](../%s)", strings.ReplaceAll(t.name, "|", `\|`), t.file))
		}
	}
	var shown []string
	for _, column := range columns {
		if cells[column.name] != nil {
			shown = append(shown, column.name)
		}
	}

	var b strings.Builder
	row := func(first string, others []string) {
		fmt.Fprintf(&b, "| %s | %s |\n", first, strings.Join(others, " | "))
	}
	row("rule", shown)
	row("---", slices.Repeat([]string{"---"}, len(shown)))
	for _, r := range rules {
		fields := make([]string, len(shown))
		for i, column := range shown {
			fields[i] = cell(r, cells[column][r.number])
		}
		row(fmt.Sprintf("[%s](#%s) %s", r.id(), r.anchor(), r.title), fields)
	}
	return b.String()
}

func cell(r rule, links []string) string {
	switch {
	case len(links) > 0:
		slices.Sort(links)
		return strings.Join(slices.Compact(links), "<br>")
	case r.built:
		return "–"
	default:
		return "not built yet"
	}
}

// replaceTable puts a table between the marks of a page.
func replaceTable(page, table string) (string, error) {
	before, rest, ok := strings.Cut(page, tableBegin+"\n")
	_, after, closed := strings.Cut(rest, tableEnd)
	if !ok || !closed {
		return "", fmt.Errorf("the page has no place for the table: the lines %q and %q", tableBegin, tableEnd)
	}
	return before + tableBegin + "\n\n" + table + "\n" + tableEnd + after, nil
}
