package conformance

import (
	"fmt"
	"strings"
	"testing"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// Store is everything that a backend is asked for. One that cannot act on its messages by all of [leasebus.Operator]
// answers the calls it cannot honour with an error, and leaves Operate and Edit out of its [Capabilities].
type Store interface {
	leasebus.Publisher
	leasebus.Source
	leasebus.Operator
}

// Backend is what is tested, and how.
type Backend struct {
	// Open returns a store for one test, empty as far as that test can see: queue names are never used twice. What it
	// needs to be closed is closed with t.Cleanup.
	Open func(t *testing.T) Store
	// Capabilities are what the backend promises.
	Capabilities Capabilities
	// Prepare, if set, makes what the messages of a policy need before the first one is published, such as the queues of a
	// broker. It is called once for each queue.
	Prepare func(t *testing.T, store Store, policy *leasebus.Policy)
	// Lease is how long the leases are of cases that wait for the end of one: the unit of all their times. Those of the
	// others are four times as long. At least 100 ms.
	Lease time.Duration
	// Wrap, if set, runs the body of every case: synctest.Test for a backend without goroutines and connections of its
	// own, or what a server's tests need around them.
	Wrap func(t *testing.T, body func(t *testing.T))
	// Seed, if not 0, repeats the run of the randomised cases that printed it.
	Seed uint64
}

// Capabilities declare what holds on a backend, by the capability table of the contract.
type Capabilities struct {
	// LeaseExpiry: a lease that is neither renewed nor settled ends by itself when its time is over (S9). Without it, a
	// lease lasts as long as its feed is open.
	LeaseExpiry bool
	// FencingToken: a lease carries a generation that outlives connections and grows with every lease and every operator
	// action (S12).
	FencingToken bool
	// AttemptsAtLease: a worker that dies has spent an attempt (S1, S10).
	AttemptsAtLease bool
	// OneDeadLetter: a dead-lettered envelope is one dead letter, always (S30). Without it there may be twins.
	OneDeadLetter bool
	// Operate: query by every field of a filter, cut-offs, dispositions that tell why, counts by state (S32–S34, S36).
	// Without it: listing, requeue and discard by reference, and the counts Pending and DeadLettered.
	Operate bool
	// Edit: replace a dead letter by an edited message (S35).
	Edit bool
	// ScheduledPublish: a message can be published for later.
	ScheduledPublish bool
	// Verify: [leasebus.SettleVerify] is answered from what is stored (S17).
	Verify bool
	// Pull: what no feed has leased can be leased by any. Without it, messages are sent to a feed ahead of Lease, up to a
	// bound that follows the concurrency, and go to others only when that feed stops.
	Pull bool
}

// Everything is what a backend promises that keeps the whole contract.
func Everything() Capabilities {
	return Capabilities{
		LeaseExpiry: true, FencingToken: true, AttemptsAtLease: true, OneDeadLetter: true,
		Operate: true, Edit: true, ScheduledPublish: true, Verify: true, Pull: true,
	}
}

// capability is a set of promises.
type capability uint

const (
	leaseExpiry capability = 1 << iota
	fencingToken
	attemptsAtLease
	oneDeadLetter
	operate
	edit
	scheduledPublish
	verify
	pull

	// ownLease is what a worker of whom nothing is heard any more is told apart by.
	ownLease = leaseExpiry | fencingToken | attemptsAtLease
)

func (c Capabilities) list() []struct {
	bit   capability
	name  string
	given bool
} {
	return []struct {
		bit   capability
		name  string
		given bool
	}{
		{leaseExpiry, "LeaseExpiry", c.LeaseExpiry},
		{fencingToken, "FencingToken", c.FencingToken},
		{attemptsAtLease, "AttemptsAtLease", c.AttemptsAtLease},
		{oneDeadLetter, "OneDeadLetter", c.OneDeadLetter},
		{operate, "Operate", c.Operate},
		{edit, "Edit", c.Edit},
		{scheduledPublish, "ScheduledPublish", c.ScheduledPublish},
		{verify, "Verify", c.Verify},
		{pull, "Pull", c.Pull},
	}
}

func (c Capabilities) set() (set capability) {
	for _, each := range c.list() {
		if each.given {
			set |= each.bit
		}
	}
	return set
}

func (c Capabilities) String() string {
	var b strings.Builder
	for i, each := range c.list() {
		sign := "-"
		if each.given {
			sign = "+"
		}
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(sign + each.name)
	}
	return b.String()
}

// testCase is one line of a table of cases.
type testCase struct {
	// name begins with the rules it holds, S<number>, then the field cases, C<chapter>_<number>, then says what is right.
	name string
	// needs are the promises without which the case has no sense, lacks those with which it has none.
	needs, lacks capability
	// brief cases wait for the end of leases, or for many times a part of one. All others have longer leases: nothing is
	// to end in them before its time on a machine that takes half a second for a statement.
	brief bool
	run   func(*trial)
}

func tables() [][]testCase {
	return [][]testCase{
		publishCases, leaseCases, settleCases, stopCases, wakeCases, deadLetterCases, operatorCases, // of the roles
		verdictCases, retryCases, processorLeaseCases, drainCases, sharingCases, hookCases, managerCases, randomCases,
	}
}

// Run runs every case that b's capabilities call for, in parallel, as subtests of t.
func Run(t *testing.T, b Backend) {
	t.Helper()
	if err := b.check(); err != nil {
		t.Fatal(err)
	}
	given := b.Capabilities.set()
	listed, all := 0, 0
	for _, table := range tables() {
		for _, c := range table {
			all++
			if c.needs&^given != 0 || c.lacks&given != 0 {
				continue
			}
			listed++
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				b.wrap(t, func(t *testing.T) { c.run(newTrial(t, b, c.brief)) })
			})
		}
	}
	t.Logf("conformance: %d of %d cases apply to: %v", listed, all, b.Capabilities)
}

func (b *Backend) check() error {
	switch {
	case b.Open == nil:
		return fmt.Errorf("conformance: Backend.Open is nil; it has to return a store")
	case b.Lease < 100*time.Millisecond:
		return fmt.Errorf("conformance: Backend.Lease %v is out of range; allowed is 100ms or more", b.Lease)
	}
	return nil
}

func (b *Backend) wrap(t *testing.T, body func(t *testing.T)) {
	if b.Wrap == nil {
		body(t)
		return
	}
	b.Wrap(t, body)
}
