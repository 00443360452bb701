package gen

import (
	"fmt"

	"github.com/dave/jennifer/jen"
)

// emitManager writes the typed manager of a message.
func emitManager(out *jen.File, m *message) {
	out.Comment(m.doc(
		fmt.Sprintf("%s inspects, requeues and discards %s messages.", m.names.manager, m.fullName()),
	))
	out.Type().Id(m.names.manager).Op("=").Qual(leasebusPackage, "TypedManager").Types(m.payload())

	out.Comment(m.doc(
		fmt.Sprintf("%s returns a manager of the %s messages in a store.", m.names.newManager, m.fullName()),
	))
	out.Func().Id(m.names.newManager).Params(
		jen.Id(paramStore).Qual(leasebusPackage, "Operator"),
		jen.Id(paramOptions).Op("...").Qual(leasebusPackage, "ManagerOption"),
	).Op("*").Id(m.names.manager).Block(
		jen.Return(jen.Qual(leasebusPackage, "NewTypedManager").Types(m.payload()).Call(
			jen.Op("&").Id(m.names.policyVar), jen.Id(paramStore), jen.Id(paramOptions).Op("..."),
		)),
	)
}
