package memory_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasebus/leasebus/runtime/conformance"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestContract(t *testing.T) {
	conformance.Run(t, conformance.Backend{
		Open:         func(*testing.T) conformance.Store { return memory.New() },
		Capabilities: conformance.Everything(),
		Lease:        30 * time.Second,
		Wrap:         synctest.Test,
	})
}
