package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// narrator tells what happens to the messages, a line for each event. It learns of it as any program can: from hooks
// around the handlers, and by standing in front of the place that messages are published to.
//
// An event and its line are one step under the lock, so that no message is seen to be worked on before it was published.
type narrator struct {
	policies map[string]leasebus.Policy // by queue
	begun    time.Time

	mu        sync.Mutex
	out       io.Writer
	published map[leasebus.ID]string    // what was acknowledged, and its short name
	started   map[leasebus.ID]time.Time // the newest attempt at a message
}

func newNarrator(out io.Writer) *narrator {
	n := &narrator{
		policies:  make(map[string]leasebus.Policy),
		begun:     time.Now(),
		out:       out,
		published: make(map[leasebus.ID]string),
		started:   make(map[leasebus.ID]time.Time),
	}
	for _, p := range policies() {
		n.policies[p.Queue] = p
	}
	return n
}

// sayf writes a line without a time.
func (n *narrator) sayf(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, _ = fmt.Fprintf(n.out, format+"\n", args...)
}

// act does something and tells of it; the line is what do returns.
func (n *narrator) act(subject, message string, do func() (line string, err error)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	line, err := do()
	if err == nil {
		n.tell(subject, message, line)
	}
	return err
}

func (n *narrator) tell(subject, message, what string) {
	_, _ = fmt.Fprintf(n.out, "%8.3f  %-10s  %-12s  %s\n", time.Since(n.begun).Seconds(), subject, message, what)
}

// acknowledged lists the messages that a publisher took, or an operator put in another's place.
func (n *narrator) acknowledged() []leasebus.ID {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Keys(n.published))
}

// publisher is a place to publish to that is told about.
func (n *narrator) publisher(to leasebus.Publisher) leasebus.Publisher { return narrated{n, to} }

type narrated struct {
	n  *narrator
	to leasebus.Publisher
}

// Publish implements [leasebus.Publisher].
func (p narrated) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	err := p.to.Publish(ctx, out, receipts)
	for i := range out {
		p.n.took(&out[i].Envelope, receipts[i])
	}
	return err
}

func (n *narrator) took(e *leasebus.Envelope, receipt leasebus.Receipt) {
	name := shortName(e.Type)
	what := "published to " + e.Queue
	if receipt.Err != nil {
		what = fmt.Sprintf("could not be published: %v", receipt.Err)
	} else {
		n.published[receipt.ID] = name
	}
	if cause, err := leasebus.ParseID(e.Headers.Get(leasebus.HeaderCausation)); err == nil {
		what += ", by the handler of " + n.published[cause]
	}
	n.tell(e.Headers.Get(leasebus.HeaderCorrelation), name, what)
}

// hooks tell of attempts and of what came of them.
func (n *narrator) hooks() leasebus.Hooks {
	return leasebus.Hooks{Before: n.before, Settled: n.settled}
}

func (n *narrator) before(_ context.Context, d leasebus.Delivery) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.started[d.ID()] = time.Now()
	n.tell(d.Correlation(), shortName(d.Type()), fmt.Sprintf("leased, attempt %d of %d", d.Attempt(), n.policies[d.Queue()].Retry.MaxAttempts))
	return nil
}

func (n *narrator) settled(d leasebus.Delivery, o leasebus.Outcome) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tell(d.Correlation(), shortName(d.Type()), n.outcome(d, o))
}

func (n *narrator) outcome(d leasebus.Delivery, o leasebus.Outcome) string {
	policy := n.policies[d.Queue()]
	if o.Result != leasebus.ResultOK {
		return fmt.Sprintf("%v could not be stored: the lease was lost", o.Kind)
	}
	switch o.Kind {
	case leasebus.SettleComplete:
		if took := time.Since(n.started[d.ID()]); took > policy.Lease.Duration {
			return fmt.Sprintf("completed after %.1fs, on a lease of %v that was renewed meanwhile", took.Seconds(), policy.Lease.Duration)
		}
		return "completed"
	case leasebus.SettleRetry:
		return fmt.Sprintf("failed: %v; due again in %v", o.Err, o.Delay)
	case leasebus.SettleDeadLetter:
		return fmt.Sprintf("dead-lettered to %s, %s: %v", route(policy, o.Reason), o.Reason, o.Err)
	default:
		return fmt.Sprintf("%v: %v", o.Kind, o.Err)
	}
}

// route is where dead letters of a reason go.
func route(p leasebus.Policy, reason leasebus.Reason) string {
	if reason == leasebus.ReasonInvalid && p.DeadLetter.InvalidQueue != "" {
		return p.DeadLetter.InvalidQueue
	}
	return p.DeadLetter.Queue
}

// shortName is a message's name without its package.
func shortName(typeName string) string { return typeName[strings.LastIndexByte(typeName, '.')+1:] }
