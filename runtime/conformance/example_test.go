package conformance_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasebus/leasebus/runtime/conformance"
	"github.com/leasebus/leasebus/runtime/memory"
)

// A backend that lives in the process runs each case in a bubble, where leases of any length cost no time.
func ExampleRun() { //nolint:testableexamples // runs inside the backend's own test
	var t *testing.T // of the backend's func TestContract(t *testing.T)
	conformance.Run(t, conformance.Backend{
		Open:         func(*testing.T) conformance.Store { return memory.New() },
		Capabilities: conformance.Everything(),
		Lease:        30 * time.Second,
		Wrap:         synctest.Test,
	})
}

// A backend with a server runs in real time, with short leases, and leaves out what it does not promise.
func ExampleRun_server() { //nolint:testableexamples // needs a server
	open := func(t *testing.T) conformance.Store {
		store := memory.New() // here: connect, and make a schema or virtual host for this test
		t.Cleanup(func() { /* and here: drop it, and close */ })
		return store
	}
	promises := conformance.Everything()
	promises.OneDeadLetter = false // a crash can leave twins

	var t *testing.T // of the backend's func TestContract(t *testing.T)
	conformance.Run(t, conformance.Backend{
		Open:         open,
		Capabilities: promises,
		Lease:        500 * time.Millisecond,
	})
}
