package main

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// rule is a numbered promise of docs/contract.md.
type rule struct {
	number int
	title  string
	built  bool
}

func (r rule) id() string { return fmt.Sprintf("S%d", r.number) }

// anchor is the fragment that GitHub gives the rule's heading.
func (r rule) anchor() string {
	heading := r.id() + " " + r.title
	if !r.built {
		heading += " " + unbuiltMark
	}
	return strings.ReplaceAll(notInAnchors.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")
}

// unbuiltMark ends the heading of a rule that nothing keeps yet.
const unbuiltMark = "(not built yet)"

var (
	ruleHeading  = regexp.MustCompile(`(?m)^### S(\d+) (.+)$`)
	notInAnchors = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// parseRules reads the headings "### S12 Title" of a page, in order of number.
func parseRules(page string) ([]rule, error) {
	headings := ruleHeading.FindAllStringSubmatch(page, -1)
	rules := make([]rule, 0, len(headings))
	for _, heading := range headings {
		number, err := strconv.Atoi(heading[1])
		if err != nil {
			return nil, fmt.Errorf("rule %q: %w", heading[0], err)
		}
		title, unbuilt := strings.CutSuffix(heading[2], " "+unbuiltMark)
		rules = append(rules, rule{number: number, title: title, built: !unbuilt})
	}
	slices.SortStableFunc(rules, func(a, b rule) int { return a.number - b.number })
	for i := 1; i < len(rules); i++ {
		if rules[i].number == rules[i-1].number {
			return nil, fmt.Errorf("rule %s stands twice: %q and %q", rules[i].id(), rules[i-1].title, rules[i].title)
		}
	}
	if len(rules) == 0 {
		return nil, errors.New("the page has no rules; their headings are written ### S12 Title")
	}
	return rules, nil
}

// judge holds rules and tests against each other. A rule to come may have tests already: it is built in part.
func judge(rules []rule, tests []test) error {
	var problems []error
	tested := map[int]string{}
	for _, t := range tests {
		for _, number := range t.rules {
			tested[number] = t.file + ": " + t.name
		}
	}
	for _, r := range rules {
		if _, ok := tested[r.number]; r.built && !ok {
			problems = append(problems, fmt.Errorf("%s (%s) is called built, but no test has %s in its name", r.id(), r.title, r.id()))
		}
		delete(tested, r.number)
	}
	for _, number := range slices.Sorted(maps.Keys(tested)) {
		problems = append(problems, fmt.Errorf("%s is the name of a test for S%d, which is no rule", tested[number], number))
	}
	return errors.Join(problems...)
}
