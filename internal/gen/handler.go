package gen

import (
	"fmt"

	"github.com/dave/jennifer/jen"
)

// emitHandler writes what handles a message: the interface, a function as one, and the registration.
func emitHandler(out *jen.File, m *message) {
	signature := func() *jen.Statement {
		return jen.Params(
			jen.Id(paramContext).Qual(contextPackage, "Context"),
			jen.Id(paramMessage).Add(m.payload()),
		).Error()
	}

	out.Comment(m.doc(append([]string{
		fmt.Sprintf("%s handles %s messages.", m.names.handler, m.fullName()),
	}, m.leading()...)...))
	out.Type().Id(m.names.handler).Interface(
		jen.Comment(comment(
			m.names.handle+" handles one message. A nil error completes it; after any other the settings of",
			"the message decide, unless the error says itself what is to happen, as that of leasebus.Permanent does.",
		)),
		jen.Id(m.names.handle).Add(signature()),
	)

	out.Comment(m.doc(
		fmt.Sprintf("%s makes a handler of %s messages from a function.", m.names.handlerFunc, m.fullName()),
	))
	out.Type().Id(m.names.handlerFunc).Func().Add(signature())

	out.Comment(m.doc(
		fmt.Sprintf("%s calls %s.", m.names.handle, paramFunc),
	))
	out.Func().Params(jen.Id(paramFunc).Id(m.names.handlerFunc)).Id(m.names.handle).Add(signature()).Block(
		jen.Return(jen.Id(paramFunc).Call(jen.Id(paramContext), jen.Id(paramMessage))),
	)

	out.Comment(m.doc(
		fmt.Sprintf("%s makes %s hand %s messages to %s.", m.names.registerHandler, paramProcessor, m.fullName(), paramHandler),
		"It fails if an option is out of range, the settings of the message are not supported there,",
		"or another handler has its queue or one of its names.",
	))
	out.Func().Id(m.names.registerHandler).Params(
		jen.Id(paramProcessor).Op("*").Qual(leasebusPackage, "Processor"),
		jen.Id(paramHandler).Id(m.names.handler),
		jen.Id(paramOptions).Op("...").Qual(leasebusPackage, "HandlerOption"),
	).Error().Block(
		jen.Return(jen.Qual(leasebusPackage, "RegisterHandler").Call(
			jen.Id(paramProcessor), jen.Op("&").Id(m.names.policyVar),
			jen.Id(paramHandler).Dot(m.names.handle), jen.Id(paramOptions).Op("..."),
		)),
	)
}
