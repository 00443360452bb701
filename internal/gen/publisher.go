package gen

import (
	"fmt"

	"github.com/dave/jennifer/jen"
)

// emitPublisher writes the typed publisher of a message.
func emitPublisher(out *jen.File, m *message) {
	publisher := func() *jen.Statement { return jen.Qual(leasebusPackage, "TypedPublisher").Types(m.payload()) }

	out.Comment(m.doc(
		fmt.Sprintf("%s publishes %s messages.", m.names.publisher, m.fullName()),
	))
	out.Type().Id(m.names.publisher).Op("=").Add(publisher())

	out.Comment(m.doc(
		fmt.Sprintf("%s returns a publisher of %s messages to a store or broker.", m.names.newPublisher, m.fullName()),
		"It fails if an option is out of range or the settings of the message are not supported there.",
	))
	out.Func().Id(m.names.newPublisher).Params(
		jen.Id(paramPublisher).Qual(leasebusPackage, "Publisher"),
		jen.Id(paramOptions).Op("...").Qual(leasebusPackage, "PublisherOption"),
	).Params(jen.Op("*").Id(m.names.publisher), jen.Error()).Block(
		jen.Return(jen.Qual(leasebusPackage, "NewTypedPublisher").Types(m.payload()).Call(
			jen.Op("&").Id(m.names.policyVar), jen.Id(paramPublisher), jen.Id(paramOptions).Op("..."),
		)),
	)
}
