package suite

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/leasebus/leasebus/bench/internal/engine"
	"github.com/leasebus/leasebus/bench/internal/meter"
	"github.com/leasebus/leasebus/bench/internal/server"
)

// Runner runs cases in rounds: each round runs every case on each of its engines once, so that whatever disturbs the
// machine disturbs all of them alike.
type Runner struct {
	Server *server.Server
	// Broker is the URL of the RabbitMQ for the engines that need one, BrokerPID its process, 0 if it is elsewhere.
	Broker    string
	BrokerPID int
	Rounds    int
	// Budget is how long it may take: a round that would not end in time is not begun. 0 = unlimited.
	Budget time.Duration
	// Profiles is a folder for CPU profiles of what is measured, one for each run; "" = none.
	Profiles string
	// Log tells of each run.
	Log *slog.Logger

	prepared map[string]bool
}

// Result is what a case came to on one engine.
type Result struct {
	Case, Engine string
	// Samples are those of the rounds, in their order.
	Samples []Sample
	// Median is of the samples.
	Median Sample
	// Series are of the last round.
	Series Series
	// Errors are of the rounds that failed.
	Errors []string
}

// Run runs cases and returns what was measured until ctx ended.
func (r *Runner) Run(ctx context.Context, cases []Case) ([]Result, error) {
	results := make([]*Result, 0, len(cases))
	at := make(map[[2]string]*Result)
	for _, c := range cases {
		for _, name := range c.Engines {
			result := &Result{Case: c.Name, Engine: name}
			at[[2]string{c.Name, name}] = result
			results = append(results, result)
		}
	}
	began := time.Now()
	for round := range r.Rounds {
		roundBegan := time.Now()
		if r.Budget > 0 && round > 0 && time.Since(began)+time.Since(began)/time.Duration(round) > r.Budget {
			break
		}
		for _, c := range cases {
			for i := range c.Engines {
				name := c.Engines[(i+round)%len(c.Engines)] // nobody is always first
				if err := r.run(ctx, c, name, round, at[[2]string{c.Name, name}]); err != nil {
					return nil, err
				}
			}
		}
		r.Log.Info("round", "number", round+1, "took", time.Since(roundBegan).Round(time.Millisecond))
	}
	all := make([]Result, len(results))
	for i, result := range results {
		result.Median = Median(result.Samples)
		all[i] = *result
	}
	return all, nil
}

// run adds one sample. What an engine cannot do is left out; what fails is noted; an error is one of the runner itself.
func (r *Runner) run(ctx context.Context, c Case, name string, round int, result *Result) error {
	e, err := engine.ByName(name)
	if err != nil {
		return err
	}
	began := time.Now()
	outcome, err := r.trial(ctx, e, c.Load, r.profile(c.Name, name, round))
	log := r.Log.With("round", round+1, "case", c.Name, "engine", name, "took", time.Since(began).Round(time.Millisecond))
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, engine.ErrUnsupported):
		log.Info("not supported", "error", err)
	case err != nil:
		log.Error("failed", "error", err)
		result.Errors = append(result.Errors, err.Error())
	default:
		log.Info("done", outcome.Sample.attrs()...)
		result.Samples = append(result.Samples, outcome.Sample)
		result.Series = outcome.Series
	}
	return nil
}

func (r *Runner) profile(caseName, engine string, round int) string {
	if r.Profiles == "" {
		return ""
	}
	return filepath.Join(r.Profiles, fmt.Sprintf("%s.%s.%d.prof", caseName, engine, round+1))
}

const trialDatabase = "leasebus_bench_trial"

// trial runs a load in a new database.
func (r *Runner) trial(ctx context.Context, e engine.Engine, load Load, profile string) (Outcome, error) {
	if e.Clear != nil {
		return r.onBroker(ctx, e, load, profile)
	}
	template := "leasebus_bench_" + e.Name
	if err := r.prepare(ctx, e, template); err != nil {
		return Outcome{}, err
	}
	dsn, err := r.Server.Database(ctx, trialDatabase, template)
	if err != nil {
		return Outcome{}, err
	}
	m, err := meter.New(ctx, dsn)
	if err != nil {
		return Outcome{}, err
	}
	defer m.Close(ctx)
	if err := m.Checkpoint(ctx); err != nil {
		return Outcome{}, err
	}
	outcome, err := load.Run(ctx, &Trial{Engine: e, DSN: dsn, Meter: m, Profile: profile})
	return outcome, errors.Join(err, r.Server.Drop(context.WithoutCancel(ctx), trialDatabase))
}

// onBroker runs a load with queues that are new.
func (r *Runner) onBroker(ctx context.Context, e engine.Engine, load Load, profile string) (Outcome, error) {
	if err := e.Clear(ctx, r.Broker); err != nil {
		return Outcome{}, err
	}
	outcome, err := load.Run(ctx, &Trial{Engine: e, DSN: r.Broker, Meter: meter.OfBroker(r.BrokerPID), Profile: profile})
	return outcome, errors.Join(err, e.Clear(context.WithoutCancel(ctx), r.Broker))
}

// prepare makes the database with an engine's empty tables that trials are copied from.
func (r *Runner) prepare(ctx context.Context, e engine.Engine, template string) error {
	if r.prepared[template] {
		return nil
	}
	dsn, err := r.Server.Database(ctx, template, "")
	if err != nil {
		return err
	}
	if err := e.Prepare(ctx, dsn); err != nil {
		return err
	}
	if r.prepared == nil {
		r.prepared = make(map[string]bool)
	}
	r.prepared[template] = true
	return nil
}

// Cleanup drops the databases that Run has made.
func (r *Runner) Cleanup(ctx context.Context) error {
	var errs []error
	for template := range r.prepared {
		errs = append(errs, r.Server.Drop(ctx, template))
	}
	return errors.Join(errs...)
}

// attrs are the figures of a sample for a log, in their order.
func (s Sample) attrs() []any {
	var attrs []any
	for _, m := range Metrics() {
		if v, ok := s[m]; ok {
			attrs = append(attrs, slog.String(string(m), fmt.Sprintf("%.4g", v)))
		}
	}
	return attrs
}
