package gen

import (
	"fmt"
	"strconv"
	"time"

	"github.com/dave/jennifer/jen"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// emitPolicy writes the resolved settings of a message as a literal: what a reviewer sees there is what runs,
// and an annotation that changes shows in the diff.
func emitPolicy(out *jen.File, m *message) {
	p := &m.annotation.Policy
	if wait := p.Retry.WaitInBrokerFrom; wait != nil {
		out.Commentf("// %s is here because a literal cannot point at a number.", m.names.waitVar)
		out.Var().Id(m.names.waitVar).Op("=").Add(durationLiteral(*wait))
	}
	out.Commentf("// %s is what the annotations of %s and of its file come to.", m.names.policyVar, m.fullName())
	out.Var().Id(m.names.policyVar).Op("=").Add(policyLiteral(p, m.names))
	out.Comment(m.doc(
		fmt.Sprintf("%s returns the settings of %s.", m.names.policy, m.fullName()),
		"What its pointers point to is shared by all callers and must not be changed.",
	))
	out.Func().Id(m.names.policy).Params().Qual(leasebusPackage, "Policy").Block(
		jen.Return(jen.Id(m.names.policyVar)),
	)
}

func policyLiteral(p *leasebus.Policy, n names) jen.Code {
	var l literal
	l.text("Type", p.Type)
	l.texts("Aliases", p.Aliases)
	l.text("Queue", p.Queue)
	l.duration("Timeout", p.Timeout)
	l.duration("RetainCompleted", p.RetainCompleted)
	l.add("Lease", leaseLiteral(p.Lease))
	l.add("Retry", retryLiteral(p.Retry, n))
	l.add("DeadLetter", deadLetterLiteral(p.DeadLetter))
	if p.Idempotency != nil {
		l.add("Idempotency", jen.Op("&").Add(idempotencyLiteral(p.Idempotency)))
	}
	if p.Ordering != nil {
		l.add("Ordering", jen.Op("&").Add(orderingLiteral(p.Ordering)))
	}
	return l.of("Policy")
}

func leaseLiteral(p leasebus.LeasePolicy) jen.Code {
	var l literal
	l.duration("Duration", p.Duration)
	l.duration("Heartbeat", p.Heartbeat)
	return l.of("LeasePolicy")
}

func retryLiteral(p leasebus.RetryPolicy, n names) jen.Code {
	var l literal
	l.add("MaxAttempts", jen.Lit(p.MaxAttempts))
	l.duration("Initial", p.Initial)
	l.duration("Max", p.Max)
	l.add("Multiplier", jen.Lit(p.Multiplier))
	l.add("Jitter", jen.Lit(p.Jitter))
	l.duration("GiveUpAfter", p.GiveUpAfter)
	if p.WaitInBrokerFrom != nil {
		l.add("WaitInBrokerFrom", jen.Op("&").Id(n.waitVar))
	}
	return l.of("RetryPolicy")
}

func deadLetterLiteral(p leasebus.DeadLetterPolicy) jen.Code {
	var l literal
	l.text("Queue", p.Queue)
	l.text("InvalidQueue", p.InvalidQueue)
	l.flag("Discard", p.Discard)
	l.duration("Retention", p.Retention)
	return l.of("DeadLetterPolicy")
}

func idempotencyLiteral(p *leasebus.IdempotencyPolicy) *jen.Statement {
	var l literal
	l.text("Field", p.Field)
	l.duration("Retention", p.Retention)
	l.duration("InProgressDelay", p.InProgressDelay)
	return l.of("IdempotencyPolicy")
}

func orderingLiteral(p *leasebus.OrderingPolicy) *jen.Statement {
	var l literal
	l.text("Field", p.Field)
	l.flag("Halt", p.Halt)
	return l.of("OrderingPolicy")
}

// literal collects the fields of a composite literal in the order in which they are to stand; jennifer's own Dict
// would sort them by name. Fields at their zero value are left out where zero means "off".
type literal []jen.Code

func (l *literal) add(name string, value jen.Code) {
	*l = append(*l, jen.Id(name).Op(":").Add(value))
}

func (l *literal) text(name, value string) {
	if value != "" {
		l.add(name, jen.Lit(value))
	}
}

func (l *literal) texts(name string, values []string) {
	if len(values) > 0 {
		l.add(name, jen.Index().String().ValuesFunc(func(g *jen.Group) {
			for _, value := range values {
				g.Lit(value)
			}
		}))
	}
}

func (l *literal) flag(name string, value bool) {
	if value {
		l.add(name, jen.True())
	}
}

func (l *literal) duration(name string, d time.Duration) {
	if d != 0 {
		l.add(name, durationLiteral(d))
	}
}

func (l *literal) of(typeName string) *jen.Statement {
	return jen.Qual(leasebusPackage, typeName).Custom(jen.Options{Open: "{", Close: "}", Separator: ",", Multi: true}, *l...)
}

// durationLiteral writes a duration in the largest unit that it is a whole number of: 30 * time.Second.
func durationLiteral(d time.Duration) jen.Code {
	units := []struct {
		size time.Duration
		name string
	}{
		{time.Hour, "Hour"},
		{time.Minute, "Minute"},
		{time.Second, "Second"},
		{time.Millisecond, "Millisecond"},
		{time.Microsecond, "Microsecond"},
	}
	for _, unit := range units {
		switch n := d / unit.size; {
		case d == unit.size:
			return jen.Qual(timePackage, unit.name)
		case d%unit.size == 0:
			return whole(n).Op("*").Qual(timePackage, unit.name)
		}
	}
	return whole(d).Op("*").Qual(timePackage, "Nanosecond")
}

// whole writes an untyped number; jen.Lit would convert all but an int, which may be too short.
func whole(n time.Duration) *jen.Statement { return jen.Id(strconv.FormatInt(int64(n), 10)) }
