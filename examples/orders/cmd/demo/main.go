// The demo runs the shop of examples/orders and lets things go wrong: a payment provider that fails for a moment, a
// search that takes longer than its lease, a mistyped address, an article that does not exist, messages that nobody
// can read. It tells what happens as it happens, and at the end asks the store what became of every message.
//
//	go run ./examples/orders/cmd/demo [--backend memory|postgres|amqp]
//
// It exits with 0 if the story went as it should and no message is lost, with 1 if not, and with 2 if it was called
// wrongly. The help text says what the numbers of its last line mean.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const (
	exitFailed = 1
	exitUsage  = 2

	// patience bounds the whole story; it takes about four seconds.
	patience = time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) (exitCode int) {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() { usage(flags) }
	name := env("BACKEND")
	if name == "" {
		name = backends()[0].name
	}
	flags.StringVar(&name, "backend", name, "where the messages live: "+backendNames()+"; also the environment's BACKEND")
	verbose := flags.Bool("verbose", false, "show the log of the processor too, on stderr")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return exitUsage
	case flags.NArg() > 0:
		_, _ = fmt.Fprintf(stderr, "demo: unexpected argument %q; see --help\n", flags.Arg(0))
		return exitUsage
	}
	open, err := backendNamed(name)
	if err != nil {
		_, _ = fmt.Fprintln(stderr, "demo:", err)
		return exitUsage
	}
	log := slog.New(slog.DiscardHandler)
	if *verbose {
		log = slog.New(slog.NewTextHandler(stderr, nil))
	}
	if err := demonstrate(ctx, name, open, log, stdout); err != nil {
		_, _ = fmt.Fprintln(stderr, "demo:", err)
		return exitFailed
	}
	return 0
}

// demonstrate tells the story and draws up its account. The account is printed even if the story broke off: what
// became of the messages matters all the more then.
func demonstrate(ctx context.Context, name string, open opener, log *slog.Logger, stdout io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	store, closeStore, err := open(ctx)
	if err != nil {
		return fmt.Errorf("open backend %s: %w", name, err)
	}
	defer closeStore()

	n := newNarrator(stdout)
	n.sayf("A shop on leasebus, its messages kept by the backend %q. Times are in seconds.", name)
	s, err := newStory(store, n, log)
	if err != nil {
		return err
	}
	told := s.tell(ctx)
	accounted := s.conclude(context.WithoutCancel(ctx))
	return errors.Join(told, accounted)
}

func usage(flags *flag.FlagSet) {
	out := flags.Output()
	_, _ = fmt.Fprintln(out, strings.TrimSpace(usageText))
	_, _ = fmt.Fprintln(out, "\nFlags:")
	flags.PrintDefaults()
}

const usageText = `
Runs a small shop on leasebus and lets things go wrong: failures that heal, that heal with an operator's help,
and that never heal. It takes about four seconds.

Usage: demo [flags]

The last line counts messages, and takes every number from the store when all work is over:

  published      messages that the store knows, in whatever state; those that an edit brought forth included
  completed      messages that the store keeps as completed; on RabbitMQ, which keeps none, those it was seen to take
                 as completed
  retried        attempts that failed and were followed by another one
  dead_lettered  messages that became dead letters, those that an edit replaced later included
  requeued       dead letters that an operator sent back to work
  lost           messages whose publishing was acknowledged, and which the store shows neither as completed nor as a
                 dead letter; anything but 0 makes the demo fail, as does a story that did not reach its end
`
