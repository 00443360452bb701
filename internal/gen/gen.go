// Package gen is protoc-gen-leasebus: it reads annotated messages and writes Go.
//
// Generate runs three phases, one after the other: parse collects the annotated messages of the request, validate
// looks for everything that is wrong with them, render writes a file for each proto file. Nothing is written unless
// nothing is wrong. Each construct of the generated code has a file here with the function that emits it.
package gen

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"

	"google.golang.org/protobuf/compiler/protogen"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"

	"github.com/leasebus/leasebus/options"
)

// Generate adds the generated files to the plugin's response.
// The error lists everything that is wrong, one line each, sorted by place; then no file is added.
func Generate(plugin *protogen.Plugin, parameters *Parameters) error {
	// Before anything can fail: a response without them makes the compiler complain about the features,
	// and hides the error.
	plugin.SupportedFeatures = uint64(pluginpb.CodeGeneratorResponse_FEATURE_PROTO3_OPTIONAL |
		pluginpb.CodeGeneratorResponse_FEATURE_SUPPORTS_EDITIONS)
	plugin.SupportedEditionsMinimum = descriptorpb.Edition_EDITION_PROTO2
	plugin.SupportedEditionsMaximum = descriptorpb.Edition_EDITION_2024

	visible := parse(plugin, parameters)
	symbols, problems := validate(visible)
	if len(problems) > 0 {
		return joined(problems)
	}
	for _, f := range visible {
		if !f.isWritten() {
			continue
		}
		source, err := render(f, symbols)
		if err != nil {
			return err
		}
		if _, err := plugin.NewGeneratedFile(f.output, f.goImportPath).Write(source); err != nil {
			return err
		}
	}
	return nil
}

// joined makes one error of all problems, since a plugin reports only one. They begin on a line of their own:
// whoever prints the error puts something in front of it, and each problem is to begin with its place.
func joined(problems []options.Problem) error {
	slices.SortFunc(problems, options.Problem.Compare)
	problems = slices.Compact(problems)
	errs := make([]error, len(problems))
	for i, problem := range problems {
		errs[i] = problem
	}
	return fmt.Errorf("nothing is generated, because of %s:\n%w", count(len(problems), "problem"), errors.Join(errs...))
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Version is that of the module which the running binary was built from; "(devel)" in a checkout.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(unknown)"
}
