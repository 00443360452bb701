// Protoc-gen-leasebus is a plugin of buf and protoc. For each message with the option (leasebus.v1.message) it writes
// a typed publisher, a handler interface with its registration, and a typed manager for operators.
//
// It is not run by hand; in buf.gen.yaml:
//
//	plugins:
//	  - local: ["go", "tool", "protoc-gen-leasebus"]
//	    out: gen
//	    opt: paths=source_relative
//
// Besides the options of every Go plugin (paths, module, M) it takes package_suffix: what is appended to the name of
// a message's Go package to name the package of the generated code. Default: leasebus. Empty: the same package.
package main

import (
	"fmt"
	"os"

	"google.golang.org/protobuf/compiler/protogen"

	"github.com/leasebus/leasebus/internal/gen"
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == "--version" {
		fmt.Println("protoc-gen-leasebus", gen.Version())
		return
	}
	parameters := gen.NewParameters()
	protogen.Options{ParamFunc: parameters.Set}.Run(func(plugin *protogen.Plugin) error {
		return gen.Generate(plugin, parameters)
	})
}
