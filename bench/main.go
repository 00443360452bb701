// Command bench does the same work on leasebus and on its peers, side by side, and tells how they compare.
//
//	go run . -quick        # some rounds of the most telling cases, within a minute
//	go run . -rounds 5     # all cases
//	go run . -run '^drain' # some of them
//	go run . -amqp         # the cases on RabbitMQ
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/leasebus/leasebus/internal/testservers"
	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/bench/internal/report"
	"github.com/leasebus/leasebus/bench/internal/server"
	"github.com/leasebus/leasebus/bench/internal/suite"
)

type settings struct {
	quick    bool
	amqp     bool
	cases    string
	engines  string
	rounds   int
	budget   time.Duration
	long     time.Duration
	dsn      string
	folder   string
	profiles string
	list     bool
	quiet    bool
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1) //nolint:gocritic // stop has nothing left to do
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 4 && args[0] == suite.WorkCommand {
		handler, err := time.ParseDuration(args[3])
		if err != nil {
			return fmt.Errorf("worker process: %w", err)
		}
		return suite.Work(ctx, args[1], args[2], handler)
	}
	var s settings
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.BoolVar(&s.quick, "quick", false, "small cases, for a first impression within a minute")
	flags.StringVar(&s.cases, "run", "", "run only cases whose name matches this `regexp`")
	flags.StringVar(&s.engines, "engines", "", "run only engines whose name matches this `regexp`")
	flags.IntVar(&s.rounds, "rounds", 3, "how often each case is run on each engine; medians are reported")
	flags.DurationVar(&s.budget, "budget", 0, "begin no round that would end later than this; 0 = no limit")
	flags.DurationVar(&s.long, "duration", 5*time.Minute, "how long the sustained case lasts")
	flags.BoolVar(&s.amqp, "amqp", false, "the cases on RabbitMQ, instead of those on PostgreSQL")
	flags.StringVar(&s.dsn, "dsn", "", "measure on this server instead of one that is started for it: PostgreSQL as a superuser, or the URL of a RabbitMQ")
	flags.StringVar(&s.folder, "out", "", "write results.json and charts (SVG) into this `folder`")
	flags.StringVar(&s.profiles, "profiles", "", "write a CPU profile of each measurement into this `folder`")
	flags.BoolVar(&s.list, "list", false, "list the cases and end")
	flags.BoolVar(&s.quiet, "quiet", false, "do not tell of each run")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return fmt.Errorf("flags: %w", err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("%q is no flag", flags.Arg(0))
	}
	if s.rounds < 1 {
		return fmt.Errorf("-rounds %d is out of range; allowed is 1 or more", s.rounds)
	}
	return s.run(ctx)
}

func (s *settings) run(ctx context.Context) (err error) {
	cases, err := s.selected()
	if err != nil {
		return err
	}
	if s.list {
		return report.List(os.Stdout, cases)
	}
	if s.amqp {
		return s.onRabbitMQ(ctx, cases)
	}
	where := server.Named(s.dsn)
	if s.dsn == "" {
		if where, err = server.Start(ctx); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, where.Close()) }()
	}
	runner := &suite.Runner{Server: where, Rounds: s.rounds, Budget: s.budget, Profiles: s.profiles, Log: s.log()}
	defer func() { err = errors.Join(err, runner.Cleanup(context.WithoutCancel(ctx))) }()
	results, err := s.measure(ctx, runner, cases)
	if err != nil {
		return err
	}
	machine, err := s.machine(ctx, where.DSN())
	if err != nil {
		return err
	}
	return s.write(&report.Report{Machine: machine, Cases: cases, Results: results})
}

func (s *settings) measure(ctx context.Context, runner *suite.Runner, cases []suite.Case) ([]suite.Result, error) {
	if s.profiles != "" {
		if err := os.MkdirAll(s.profiles, 0o750); err != nil {
			return nil, fmt.Errorf("-profiles: %w", err)
		}
	}
	return runner.Run(ctx, cases)
}

func (s *settings) onRabbitMQ(ctx context.Context, cases []suite.Case) error {
	runner := &suite.Runner{Broker: s.dsn, Rounds: s.rounds, Budget: s.budget, Profiles: s.profiles, Log: s.log()}
	if s.dsn == "" {
		own, err := testservers.OwnRabbitMQ(ctx)
		if err != nil {
			return fmt.Errorf("start a broker: %w", err)
		}
		defer own.Close() //nolint:contextcheck // it ends whatever becomes of ctx
		runner.Broker, runner.BrokerPID = own.URL, own.PID
	}
	results, err := s.measure(ctx, runner, cases)
	if err != nil {
		return err
	}
	conn, err := amqp091.Dial(runner.Broker)
	if err != nil {
		return fmt.Errorf("ask the broker for its version: %w", err)
	}
	defer func() { _ = conn.Close() }()
	machine := here()
	machine.RabbitMQ, _ = conn.Properties["version"].(string)
	return s.write(&report.Report{Machine: machine, Cases: cases, Results: results})
}

func (s *settings) selected() ([]suite.Case, error) {
	wanted, err := regexp.Compile(s.cases)
	if err != nil {
		return nil, fmt.Errorf("-run: %w", err)
	}
	engines, err := regexp.Compile(s.engines)
	if err != nil {
		return nil, fmt.Errorf("-engines: %w", err)
	}
	var all []suite.Case
	switch {
	case s.amqp && s.quick:
		all = suite.QuickAMQP()
	case s.amqp:
		all = suite.FullAMQP()
	case s.quick:
		all = suite.Quick()
	default:
		all = suite.Full(s.long)
	}
	var cases []suite.Case
	for _, c := range all {
		c.Engines = slices.DeleteFunc(slices.Clone(c.Engines), func(name string) bool { return !engines.MatchString(name) })
		if wanted.MatchString(c.Name) && len(c.Engines) > 0 {
			cases = append(cases, c)
		}
	}
	if len(cases) == 0 {
		return nil, errors.New("no case is selected; -list shows what there is")
	}
	return cases, nil
}

func (s *settings) log() *slog.Logger {
	if s.quiet {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.LevelKey {
			return slog.Attr{}
		}
		if a.Key == slog.TimeKey {
			return slog.String("at", a.Value.Time().Format(time.TimeOnly))
		}
		return a
	}}))
}

// here is the machine without its servers.
func here() report.Machine {
	return report.Machine{
		Cores: runtime.NumCPU(), OS: runtime.GOOS + "/" + runtime.GOARCH, Go: runtime.Version(),
		Versions: versions(), Date: time.Now().UTC().Format(time.DateOnly),
	}
}

func (s *settings) machine(ctx context.Context, dsn string) (report.Machine, error) {
	m := here()
	if s.dsn == "" {
		m.Settings = server.Settings
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return m, fmt.Errorf("ask the server for its version: %w", err)
	}
	defer func() { _ = conn.Close(ctx) }()
	if err := conn.QueryRow(ctx, "SHOW server_version").Scan(&m.PostgreSQL); err != nil {
		return m, fmt.Errorf("ask the server for its version: %w", err)
	}
	return m, nil
}

// versions are those of the peers and of the driver, as they are built in.
func versions() (all []string) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	for _, d := range info.Deps {
		switch d.Path {
		case "github.com/riverqueue/river", "github.com/ThreeDotsLabs/watermill-sql/v4", "github.com/jackc/pgx/v5",
			"github.com/ThreeDotsLabs/watermill-amqp/v3", "github.com/rabbitmq/amqp091-go":
			all = append(all, d.Path+" "+d.Version)
		}
	}
	return all
}

func (s *settings) write(r *report.Report) error {
	if err := errors.Join(r.Head(os.Stdout), r.Table(os.Stdout), r.Goals(os.Stdout), r.Ratios(os.Stdout)); err != nil {
		return err
	}
	if s.folder == "" {
		return nil
	}
	if err := os.MkdirAll(s.folder, 0o750); err != nil {
		return fmt.Errorf("-out: %w", err)
	}
	f, err := os.Create(filepath.Join(s.folder, "results.json"))
	if err != nil {
		return fmt.Errorf("-out: %w", err)
	}
	if err := errors.Join(r.JSON(f), f.Close()); err != nil {
		return err
	}
	_, err = r.Charts(s.folder)
	return err
}
