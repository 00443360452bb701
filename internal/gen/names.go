package gen

import (
	"go/token"
	"go/types"
	"strings"
)

// names are all identifiers that are generated for one message. Nothing else makes up identifiers.
//
// No suffix is the end of another, so two messages can meet in a name only through a prefix, as Order and NewOrder do
// in NewOrderPublisher. The symbol table finds those.
type names struct {
	policyVar, waitVar, policy   string
	publisher, newPublisher      string
	handler, handlerFunc, handle string
	registerHandler              string
	manager, newManager          string
}

// namesOf derives the names from the Go name that protoc-gen-go gives the message: a second opinion on how to
// camel-case a proto name would differ from it some day.
func namesOf(goName string) names {
	// A suffix follows, so that lower-casing never makes a keyword or a predeclared name.
	unexported := strings.ToLower(goName[:1]) + goName[1:]
	return names{
		policyVar:       unexported + "Policy",
		waitVar:         unexported + "WaitInBrokerFrom",
		policy:          goName + "Policy",
		publisher:       goName + "Publisher",
		newPublisher:    "New" + goName + "Publisher",
		handler:         goName + "Handler",
		handlerFunc:     goName + "HandlerFunc",
		handle:          "Handle" + goName,
		registerHandler: "Register" + goName + "Handler",
		manager:         goName + "Manager",
		newManager:      "New" + goName + "Manager",
	}
}

// declared lists the names at package level, those first that people see. Handle is a method.
func (n names) declared() []string {
	return []string{
		n.publisher, n.newPublisher, n.handler, n.handlerFunc, n.registerHandler, n.manager, n.newManager,
		n.policy, n.policyVar, n.waitVar,
	}
}

// The names of what generated functions are handed. Inside them they hide any package of that name.
const (
	paramContext   = "ctx"
	paramMessage   = "m"
	paramFunc      = "f"
	paramHandler   = "h"
	paramProcessor = "p"
	paramPublisher = "to"
	paramStore     = "store"
	paramOptions   = "opts"
)

var reservedAliases = map[string]bool{
	"context": true, "time": true, "leasebus": true, // the packages that generated code imports by these names
	paramContext: true, paramMessage: true, paramFunc: true, paramHandler: true,
	paramProcessor: true, paramPublisher: true, paramStore: true, paramOptions: true,
}

// importAlias is the name under which generated code imports the package of its messages: the package's own unless
// that means something else there. Users never write it, so it may give way where a declared name may not.
func importAlias(goPackage string, declared func(string) bool) string {
	alias := goPackage
	for reservedAliases[alias] || declared(alias) || token.IsKeyword(alias) || types.Universe.Lookup(alias) != nil {
		alias += "pb"
	}
	return alias
}
