// Command leasebus prepares and checks the database of a leasebus inbox.
//
//	leasebus migrate  [--dsn postgres://…] [--schema leasebus]
//	leasebus validate [--dsn postgres://…] [--schema leasebus]
//
// migrate brings the schema to the version of this program; it may run at any number of places at once. validate
// changes nothing: it tells what is missing, and exits with 1 if something is. The connection string can also be given
// in the environment, as LEASEBUS_POSTGRES. Exit code 2 says that the program was called wrongly.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasebus/leasebus/runtime/postgres"
)

// dsnEnv names the variable with the connection string.
const dsnEnv = "LEASEBUS_POSTGRES"

const (
	exitFailed = 1
	exitUsage  = 2
)

// command is one thing that the program does.
type command struct {
	name, what, done string
	run              func(context.Context, *pgxpool.Pool, ...postgres.Option) error
}

func commands() []command {
	return []command{
		{"migrate", "bring the schema to the version of this program", "is up to date", postgres.Migrate},
		{"validate", "tell what is missing in the schema", "has everything", postgres.Validate},
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) (exitCode int) {
	if len(args) > 0 {
		for _, c := range commands() {
			if c.name == args[0] {
				return c.execute(ctx, args[1:], env, stdout, stderr)
			}
		}
		_, _ = fmt.Fprintf(stderr, "leasebus: unknown command %q\n", args[0])
	}
	_, _ = fmt.Fprintln(stderr, "Usage: leasebus COMMAND [flags]; leasebus COMMAND --help lists the flags.\n\nCommands:")
	for _, c := range commands() {
		_, _ = fmt.Fprintf(stderr, "  %-9s %s\n", c.name, c.what)
	}
	return exitUsage
}

func (c command) execute(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) (exitCode int) {
	flags := flag.NewFlagSet("leasebus "+c.name, flag.ContinueOnError)
	flags.SetOutput(stderr)
	dsn := flags.String("dsn", "", "the database, as a URL or as key=value pairs; default: "+dsnEnv+" of the environment")
	schema := flags.String("schema", postgres.DefaultSchema, "the schema of the tables")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return exitUsage
	case flags.NArg() > 0:
		_, _ = fmt.Fprintf(stderr, "leasebus %s: unexpected argument %q; see --help\n", c.name, flags.Arg(0))
		return exitUsage
	}
	if *dsn == "" {
		*dsn = env(dsnEnv)
	}
	if *dsn == "" {
		_, _ = fmt.Fprintf(stderr, "leasebus %s: no database; give --dsn or set %s\n", c.name, dsnEnv)
		return exitUsage
	}
	config, err := pgxpool.ParseConfig(*dsn)
	if err != nil { // its text may hold the password
		_, _ = fmt.Fprintf(stderr, "leasebus %s: the connection string cannot be parsed; as a URL it is postgres://user:password@host:port/database\n", c.name)
		return exitUsage
	}
	if err := c.on(ctx, config, *schema); err != nil {
		_, _ = fmt.Fprintf(stderr, "leasebus %s: %v\n", c.name, err)
		return exitFailed
	}
	_, _ = fmt.Fprintf(stdout, "schema %q %s\n", *schema, c.done)
	return 0
}

func (c command) on(ctx context.Context, config *pgxpool.Config, schema string) error {
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("open the database: %w", err)
	}
	defer pool.Close()
	return c.run(ctx, pool, postgres.WithSchema(schema))
}
