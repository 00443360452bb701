package suite

import (
	"slices"
	"strconv"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
)

// Groups of the cases on RabbitMQ.
const (
	GroupAMQP        = "amqp"
	GroupAMQPLatency = "amqp_latency"
	GroupAMQPFailing = "amqp_failing"
)

const (
	caseAMQPPublish   = "amqp_publish"
	caseAMQPBatch     = "amqp_publish_batch"
	caseAMQPEndToEnd  = "amqp_e2e"
	caseAMQPFailing0  = "amqp_failing_0"
	caseAMQPFailing10 = "amqp_failing_10"

	amqpPublishers = 256
	amqpRate       = 2000
)

// QuickAMQP are the cases of make bench-amqp-quick.
func QuickAMQP() []Case {
	const short = 700 * time.Millisecond
	return []Case{
		amqpCase(caseAMQPPublish, publishAbout, Publish{Goroutines: amqpPublishers, For: short, Body: smallBody}, amqpEveryone()...),
		amqpCase(caseAMQPBatch, batchAbout, Publish{Goroutines: 1, Batch: publishBatch, For: short, Body: smallBody}, engine.AMQP, engine.AMQPRaw),
		amqpCase(caseAMQPEndToEnd, endToEndAbout, Pipeline{For: 2 * short, Body: smallBody}, amqpEveryone()...),
		amqpFailing(caseAMQPFailing0, 0, 40_000),
		amqpFailing(caseAMQPFailing10, 10, 40_000),
	}
}

const (
	publishAbout  = "one by one, 256 goroutines, each message confirmed"
	batchAbout    = "in batches of 1,000, each message confirmed"
	endToEndAbout = "publishing in batches and working at the same time"
)

// FullAMQP are all cases on RabbitMQ, on quorum queues and then on classic ones.
func FullAMQP() []Case {
	return slices.Concat(amqpCases(""), amqpCases(engine.Classic))
}

func amqpCases(kind string) []Case {
	const long = 5 * time.Second
	cases := []Case{
		amqpCase(caseAMQPPublish, publishAbout, Publish{Goroutines: amqpPublishers, For: long, Body: smallBody}, amqpEveryone()...),
		amqpCase(caseAMQPBatch, batchAbout, Publish{Goroutines: 1, Batch: publishBatch, For: long, Body: smallBody}, engine.AMQP, engine.AMQPRaw),
		amqpCase("amqp_consume", "100,000 waiting messages, no-op handlers",
			Drain{Messages: 100_000, Limit: 2 * long, Body: smallBody}, amqpEveryone()...),
		amqpCase("amqp_handlers_2ms", "30,000 waiting messages, handlers of 2 ms",
			Drain{Messages: 30_000, Handler: 2 * time.Millisecond, Limit: 2 * long, Body: smallBody}, amqpEveryone()...),
		amqpCase(caseAMQPEndToEnd, endToEndAbout, Pipeline{For: long, Body: smallBody}, amqpEveryone()...),
		{
			Name: "amqp_latency", Group: GroupAMQPLatency, About: "2,000 messages/s, published by another connection",
			Load: Latency{Rate: amqpRate, For: long, Body: smallBody, Apart: true}, Engines: amqpEveryone(),
		},
		amqpFailing(caseAMQPFailing0, 0, 100_000),
		amqpFailing("amqp_failing_2", 2, 100_000),
		amqpFailing(caseAMQPFailing10, 10, 100_000),
	}
	for i := range cases {
		cases[i].Name += kind
		for j := range cases[i].Engines {
			cases[i].Engines[j] += kind
		}
	}
	return cases
}

func amqpEveryone() []string { return []string{engine.AMQP, engine.AMQPRaw, engine.AMQPWatermill} }

func amqpCase(name, about string, l Load, engines ...string) Case {
	return Case{Name: name, Group: GroupAMQP, About: about, Load: l, Engines: engines}
}

func amqpFailing(name string, percent, messages int) Case {
	return Case{
		Name: name, Group: GroupAMQPFailing, Engines: []string{engine.AMQP},
		About: "waiting messages of which so many in a hundred fail once and wait 2 s: " + strconv.Itoa(percent),
		Load:  Failing{Messages: messages, Percent: percent, Limit: time.Minute, Body: smallBody},
	}
}

func amqpTargets() []Target {
	return []Target{
		{"amqp_publish_vs_raw", rate(caseAMQPBatch, engine.AMQP), rate(caseAMQPBatch, engine.AMQPRaw), 0.95},
		{"amqp_publish_vs_watermill", rate(caseAMQPPublish, engine.AMQP), rate(caseAMQPPublish, engine.AMQPWatermill), 1.4},
		{"amqp_e2e_vs_raw", rate(caseAMQPEndToEnd, engine.AMQP), rate(caseAMQPEndToEnd, engine.AMQPRaw), 0.85},
		{"amqp_e2e_vs_watermill", rate(caseAMQPEndToEnd, engine.AMQP), rate(caseAMQPEndToEnd, engine.AMQPWatermill), 1.5},
		{"amqp_failing10_vs_none", rate(caseAMQPFailing10, engine.AMQP), rate(caseAMQPFailing0, engine.AMQP), 0.3},
	}
}
