// Command ready makes the servers ready that the tests need, so that installing and starting them does not count on the
// tests' time. See package testservers.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"github.com/leasebus/leasebus/internal/testservers"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := testservers.Ready(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "ready:", err)
		os.Exit(1) //nolint:gocritic // the signal's handler ends with the process
	}
}
