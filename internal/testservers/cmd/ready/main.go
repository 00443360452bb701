// Command ready makes the servers ready that the tests need, so that installing and starting them does not count on the
// tests' time. With a command, it runs that on them instead: PostgreSQL's connection string is in its environment, as
// LEASEBUS_TEST_POSTGRES. See package testservers.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"

	"github.com/leasebus/leasebus/internal/testservers"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	code := ready(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

func ready(ctx context.Context, command []string) (exitCode int) {
	var err error
	if len(command) == 0 {
		err = testservers.Ready(ctx)
	} else {
		err = run(ctx, command)
	}
	var ended *exec.ExitError
	switch {
	case errors.As(err, &ended):
		return ended.ExitCode()
	case err != nil:
		fmt.Fprintln(os.Stderr, "ready:", err)
		return 1
	}
	return 0
}

func run(ctx context.Context, command []string) error {
	dsn, err := testservers.SharedPostgres()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), testservers.PostgresEnv+"="+dsn)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}
