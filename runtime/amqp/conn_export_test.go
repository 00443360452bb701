package amqp

import (
	"testing"
	"time"
)

// QuickPace comes back from losses within milliseconds, where a test makes many of them.
func QuickPace() Option { return optionFunc(quickPace) }

// Eventually waits for a condition.
func Eventually(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for begun := time.Now(); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Since(begun) > limit {
			t.Fatalf("waited %v in vain until %s", limit, what)
		}
	}
}
