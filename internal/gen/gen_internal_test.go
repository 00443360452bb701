package gen

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/dave/jennifer/jen"
)

// If a suffix ended another one, two messages could meet in a name without either beginning like a prefix of ours.
func TestNames_NoSuffixEndsAnother(t *testing.T) {
	t.Parallel()
	suffixes := map[string]bool{}
	for _, name := range namesOf("Base").declared() {
		_, suffix, _ := strings.Cut(strings.Replace(name, "base", "Base", 1), "Base")
		suffixes[suffix] = true
	}
	for a := range suffixes {
		for b := range suffixes {
			if a != b && strings.HasSuffix(a, b) {
				t.Errorf("suffix %q ends with %q", a, b)
			}
		}
	}
}

func TestNames_AllAreDeclaredAndDistinct(t *testing.T) {
	t.Parallel()
	n := namesOf("Order_Line")
	declared := map[string]bool{}
	for _, name := range n.declared() {
		if declared[name] {
			t.Errorf("%s is declared twice", name)
		}
		declared[name] = true
	}
	v := reflect.ValueOf(n)
	for i := range v.NumField() {
		name, field := v.Field(i).String(), v.Type().Field(i).Name
		if !strings.Contains(name, "rder_Line") {
			t.Errorf("%s is %q, without the name of the message", field, name)
		}
		if !declared[name] && field != "handle" {
			t.Errorf("%s is not among the declared names", field)
		}
	}
}

func TestImportAlias(t *testing.T) {
	t.Parallel()
	declared := func(name string) bool { return name == "orderPolicy" || name == "orderPolicypb" }
	for goPackage, want := range map[string]string{
		"ordersv1":    "ordersv1",
		"context":     "contextpb",
		"leasebus":    "leasebuspb",
		"string":      "stringpb",
		"opts":        "optspb",
		"nil":         "nilpb",
		"orderPolicy": "orderPolicypbpb",
	} {
		if got := importAlias(goPackage, declared); got != want {
			t.Errorf("%s is imported as %s, want %s", goPackage, got, want)
		}
	}
}

func TestDurationLiteral(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0:                         "0 * time.Hour",
		time.Second:               "time.Second",
		30 * time.Second:          "30 * time.Second",
		90 * time.Second:          "90 * time.Second",
		2 * time.Minute:           "2 * time.Minute",
		7500 * time.Millisecond:   "7500 * time.Millisecond",
		168 * time.Hour:           "168 * time.Hour",
		time.Hour + 1:             "3600000000001 * time.Nanosecond",
		1500 * time.Nanosecond:    "1500 * time.Nanosecond",
		-time.Second:              "-1 * time.Second",
		876_000 * time.Hour:       "876000 * time.Hour",
		1_001 * time.Microsecond:  "1001 * time.Microsecond",
		876_000*time.Hour - 1_000: "3153599999999999 * time.Microsecond",
	} {
		if got := fmt.Sprintf("%#v", jen.Add(durationLiteral(d))); got != want {
			t.Errorf("%v is written as %s, want %s", d, got, want)
		}
	}
}

func TestIsAlwaysBuilt(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{
		"orders": true, "windows": true, "linux_orders": true, "order_test": true, "unix": true, "orders_unix": true,
		"orders_windows": false, "x_arm64": false, "orders_linux_test": false, "_orders": false, ".orders": false,
		"a_js_wasm": false, "orders_android": false,
	} {
		if got := isAlwaysBuilt(name + ".leasebus.go"); got != want {
			t.Errorf("%s: %t, want %t", name, got, want)
		}
	}
}

func TestCommentLines(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ given, want string }{
		{" Text.", "// Text."},
		{"go:generate rm", "// go:generate rm"},
		{"line elsewhere.go:1", "// line elsewhere.go:1"},
		{"", "//"},
		{"   Indented.  ", "//   Indented."},
		{" ends */ nothing", "// ends */ nothing"},
		{" two\rlines\x00", "// twolines"},
		{" bad \xff text", "// bad \ufffd text"},
	} {
		if got := comment(commentLine(test.given)); got != test.want {
			t.Errorf("%q becomes %q, want %q", test.given, got, test.want)
		}
	}
}

func TestParameters(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, value string
		ok          bool
	}{
		{"package_suffix", "", true},
		{"package_suffix", "_bus", true},
		{"package_suffix", "type", false},
		{"package_suffix", "2", false},
		{"package_suffix", "a/b", false},
		{"package_suffix", "_test", false},
		{"Package_suffix", "bus", false},
		{"", "", false},
	} {
		p := NewParameters()
		if err := p.Set(test.name, test.value); (err == nil) != test.ok {
			t.Errorf("%s=%s: %v", test.name, test.value, err)
		} else if test.ok && p.packageSuffix != test.value {
			t.Errorf("%s=%s is taken as %q", test.name, test.value, p.packageSuffix)
		}
	}
}
