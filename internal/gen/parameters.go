package gen

import (
	"flag"
	"fmt"
	"go/token"
	"io"
	"strings"
)

// Parameters are what buf and protoc hand to the plugin as its options.
type Parameters struct {
	flags         *flag.FlagSet
	packageSuffix string
}

// NewParameters returns the defaults.
func NewParameters() *Parameters {
	p := &Parameters{flags: flag.NewFlagSet("protoc-gen-leasebus", flag.ContinueOnError)}
	p.flags.SetOutput(io.Discard)
	p.flags.StringVar(&p.packageSuffix, "package_suffix", "leasebus", "appended to the Go package's name; empty = the same package")
	return p
}

// Set takes one parameter. Unknown ones are refused: a misspelt parameter must not pass for a default.
func (p *Parameters) Set(name, value string) error {
	if p.flags.Lookup(name) == nil {
		return fmt.Errorf("unknown parameter %q; allowed are package_suffix, paths, module and M", name)
	}
	if name == "package_suffix" && value != "" && (!token.IsIdentifier(value) || strings.HasSuffix(value, "_test")) {
		return fmt.Errorf("package_suffix %q is not usable in a Go package name; "+
			"allowed are letters, digits and '_', not beginning with a digit nor ending in _test, or nothing", value)
	}
	if err := p.flags.Set(name, value); err != nil {
		return fmt.Errorf("parameter %s: %w", name, err)
	}
	return nil
}
