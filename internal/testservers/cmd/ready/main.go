// Command ready makes the servers ready that the tests need, so that installing and starting them does not count on the
// tests' time. With a command, it runs that on one of them instead, whose address is in the command's environment:
//
//	ready                    # all of them
//	ready postgres COMMAND   # with a connection string as LEASEBUS_TEST_POSTGRES
//	ready rabbitmq COMMAND   # with a URL as LEASEBUS_TEST_RABBITMQ
//
// See package testservers.
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

func ready(ctx context.Context, args []string) (exitCode int) {
	var err error
	switch {
	case len(args) == 0:
		err = testservers.Ready(ctx)
	case len(args) > 1 && args[0] == "postgres":
		err = run(ctx, testservers.SharedPostgres, testservers.PostgresEnv, args[1:])
	case len(args) > 1 && args[0] == "rabbitmq":
		err = run(ctx, testservers.SharedRabbitMQ, testservers.RabbitMQEnv, args[1:])
	default:
		err = fmt.Errorf("arguments %q; allowed are none, or postgres or rabbitmq and a command", args)
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

// run runs a command on a server.
func run(ctx context.Context, server func() (string, error), env string, command []string) error {
	address, err := server()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), env+"="+address)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}
