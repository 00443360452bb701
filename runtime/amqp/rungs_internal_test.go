package amqp

import (
	"cmp"
	"maps"
	"math"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
	"pgregory.net/rapid"

	leasebus "github.com/leasebus/leasebus/runtime"
)

func namesOf(rungs []rung) []string {
	names := make([]string, len(rungs))
	for i, r := range rungs {
		names[i] = r.name
	}
	return names
}

func inBrokerFrom(r leasebus.RetryPolicy, d time.Duration) leasebus.RetryPolicy {
	r.WaitInBrokerFrom = &d
	return r
}

func TestRungs_S40_golden(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		policy leasebus.RetryPolicy
		want   []string
	}{
		"default":                 {leasebus.DefaultPolicy("t", "q").Retry, []string{"q.retry.5s", "q.retry.10s", "q.retry.20s", "q.retry.40s"}},
		"exponential, six":        {leasebus.ExponentialRetry(6, 10*time.Second, time.Hour, 2), []string{"q.retry.10s", "q.retry.20s", "q.retry.40s", "q.retry.80s", "q.retry.160s"}},
		"units":                   {leasebus.ExponentialRetry(6, 30*time.Second, 2*time.Hour, 3), []string{"q.retry.30s", "q.retry.90s", "q.retry.270s", "q.retry.810s", "q.retry.2430s"}},
		"minutes and hours":       {leasebus.ExponentialRetry(4, 5*time.Minute, 2*time.Hour, 12), []string{"q.retry.5m", "q.retry.1h", "q.retry.2h"}},
		"repeated":                {leasebus.ExponentialRetry(9, 90*time.Second, 5*time.Minute, 2), []string{"q.retry.90s", "q.retry.3m", "q.retry.5m"}},
		"fractions":               {leasebus.ExponentialRetry(4, time.Second, time.Minute, 1.5), []string{"q.retry.1s", "q.retry.1500ms", "q.retry.2250ms"}},
		"below a second":          {leasebus.ExponentialRetry(5, 300*time.Millisecond, time.Minute, 2), []string{"q.retry.1200ms", "q.retry.2400ms"}},
		"below a second, all":     {inBrokerFrom(leasebus.FixedRetry(3, 200*time.Millisecond), 0), []string{"q.retry.200ms"}},
		"below a millisecond":     {inBrokerFrom(leasebus.FixedRetry(3, time.Microsecond), 0), []string{"q.retry.1ms"}},
		"threshold moves no rung": {inBrokerFrom(leasebus.FixedRetry(3, 10*time.Second), time.Hour), []string{"q.retry.10s"}},
		"no retries":              {leasebus.NoRetry(), nil},
		"longer than RabbitMQ's longest time to live": {leasebus.FixedRetry(3, 50*24*time.Hour), nil},
		"the longest": {leasebus.FixedRetry(3, longestRung), []string{"q.retry.4294967295ms"}},
	} {
		got := rungsOf("q", tt.policy)
		if names := namesOf(got); !equal(names, tt.want) {
			t.Errorf("%s: rungs %v, want %v", name, names, tt.want)
		}
	}
}

func equal(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func TestRungs_S40_arguments(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		rung rung
		want amqp091.Table
	}{
		{
			rungsOf("orders", leasebus.FixedRetry(2, 90*time.Second))[0],
			amqp091.Table{"x-message-ttl": int64(90_000), "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"},
		},
		{sharedLadder()[4], amqp091.Table{"x-message-ttl": int64(3_600_000), "x-dead-letter-exchange": "leasebus.delay.due"}},
	} {
		if got := tt.rung.arguments(); !maps.Equal(got, tt.want) {
			t.Errorf("%s: arguments %v, want %v", tt.rung.name, got, tt.want)
		}
	}
	if names := namesOf(sharedLadder()); !equal(names, []string{
		"leasebus.delay.1s", "leasebus.delay.10s", "leasebus.delay.1m", "leasebus.delay.10m", "leasebus.delay.1h",
	}) {
		t.Errorf("shared ladder: %v", names)
	}
}

// The longest name that a policy allows still has room for every rung.
func TestRungs_S40_names_are_short_strings(t *testing.T) {
	t.Parallel()
	queue := make([]byte, 235)
	for i := range queue {
		queue[i] = 'q'
	}
	p := leasebus.DefaultPolicy("t", string(queue))
	p.Retry = inBrokerFrom(leasebus.FixedRetry(2, longestRung), 0)
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, r := range rungsOf(p.Queue, p.Retry) {
		if len(r.name) > leasebus.MaxNameBytes {
			t.Errorf("%q is %d bytes", r.name, len(r.name))
		}
	}
}

func TestWaits_S40_29_s_are_held_and_30_s_are_the_brokers(t *testing.T) {
	t.Parallel()
	usual := leasebus.ExponentialRetry(5, time.Second, time.Hour, 2)
	for name, tt := range map[string]struct {
		policy         leasebus.RetryPolicy
		nominal, delay time.Duration
		here           bool
	}{
		"29 s": {usual, 29 * time.Second, 29 * time.Second, true},
		"30 s": {usual, 30 * time.Second, 30 * time.Second, false},
		"30 s, drawn shorter: the nominal counts": {usual, 30 * time.Second, 25 * time.Second, false},
		"29 s, drawn longer":                      {usual, 29 * time.Second, 34 * time.Second, true},
		"the handler's 29 s":                      {usual, 0, 29 * time.Second, true},
		"the handler's 30 s":                      {usual, 0, 30 * time.Second, false},
		"threshold of 5 s":                        {inBrokerFrom(usual, 5*time.Second), 5 * time.Second, 5 * time.Second, false},
		"below a threshold of 5 s":                {inBrokerFrom(usual, 5*time.Second), 4 * time.Second, 4 * time.Second, true},
		"threshold 0: all in the broker":          {inBrokerFrom(usual, 0), time.Millisecond, time.Millisecond, false},
		"threshold of an hour":                    {inBrokerFrom(usual, time.Hour), 59 * time.Minute, 59 * time.Minute, true},
	} {
		if got := waitsOf("q", tt.policy).here(tt.nominal, tt.delay); got != tt.here {
			t.Errorf("%s: held here: %v, want %v", name, got, tt.here)
		}
	}
}

func TestWaits_S40_where_a_wait_in_the_broker_is_spent(t *testing.T) {
	t.Parallel()
	usual := waitsOf("q", leasebus.ExponentialRetry(5, 2*time.Second, 2*time.Minute, 4)) // 2s 8s 32s 2m
	for name, tt := range map[string]struct {
		waits          waits
		nominal, delay time.Duration
		exchange, key  string
		remaining      time.Duration
	}{
		"a rung of the policy":                 {usual, 32 * time.Second, 38 * time.Second, "", "q.retry.32s", 0},
		"spilled":                              {usual, 2 * time.Second, time.Second, "", "q.retry.2s", 0},
		"between two rungs: up":                {usual, 9 * time.Second, 9 * time.Second, "", "q.retry.32s", 0},
		"below the first: up":                  {usual, time.Millisecond, time.Millisecond, "", "q.retry.2s", 0},
		"above the last: the shared ladder":    {usual, 3 * time.Minute, 3 * time.Minute, "leasebus.delay.1m", "q", 2 * time.Minute},
		"the handler's own delay":              {usual, 0, 95 * time.Second, "leasebus.delay.1m", "q", 35 * time.Second},
		"exactly a rung of the ladder":         {usual, 0, 10 * time.Minute, "leasebus.delay.10m", "q", 0},
		"shorter than the ladder: up":          {usual, 0, 20 * time.Millisecond, "leasebus.delay.1s", "q", 0},
		"a fraction of a millisecond: up":      {usual, 0, time.Second + time.Microsecond, "leasebus.delay.1s", "q", time.Millisecond},
		"longer than the ladder: several hops": {usual, 0, 100 * time.Hour, "leasebus.delay.1h", "q", 99 * time.Hour},
		"no rungs at all":                      {waitsOf("q", leasebus.NoRetry()), 0, time.Minute, "leasebus.delay.1m", "q", 0},
		"a short delay without rungs":          {waitsOf("q", leasebus.FixedRetry(3, 100*time.Millisecond)), 100 * time.Millisecond, 80 * time.Millisecond, "leasebus.delay.1s", "q", 0},
		"a rung longer than RabbitMQ's longest": {
			waitsOf("q", leasebus.FixedRetry(3, 50*24*time.Hour)), 50 * 24 * time.Hour, 45 * 24 * time.Hour,
			"leasebus.delay.1h", "q", 50*24*time.Hour - time.Hour,
		},
	} {
		got := tt.waits.there("q", tt.nominal, tt.delay)
		if got.exchange != tt.exchange || got.key != tt.key || got.remaining != tt.remaining {
			t.Errorf("%s: exchange %q, key %q, then %v; want %q, %q, then %v",
				name, got.exchange, got.key, got.remaining, tt.exchange, tt.key, tt.remaining)
		}
		if first := cmp.Or(got.exchange, got.key); got.rung.name != first {
			t.Errorf("%s: rung %q of exchange %q, key %q", name, got.rung.name, got.exchange, got.key)
		}
	}
}

// Hop by hop, a wait on the ladder is never shorter than it has to be, nor more than a second longer, and ends.
func TestLadder_S40_hops_add_up(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		wait := time.Duration(rapid.Int64Range(1, int64(1000*time.Hour)).Draw(t, "wait"))
		var waited time.Duration
		hops := 0
		for left := wait; left > 0; hops++ {
			s := ladderStep("q", left)
			waited += s.rung.delay
			if s.remaining >= left {
				t.Fatalf("%v are left after a hop, of %v", s.remaining, left)
			}
			left = s.remaining
		}
		if waited < wait || waited > wait+time.Second {
			t.Fatalf("waited %v instead of %v", waited, wait)
		}
		if most := int(wait/time.Hour) + 5 + 9 + 5 + 10; hops > most {
			t.Fatalf("%d hops for %v", hops, wait)
		}
	})
}

func TestLadder_S40_longest_delay(t *testing.T) {
	t.Parallel()
	for _, delay := range []time.Duration{maxRemaining, math.MaxInt64} {
		if s := ladderStep("q", delay); s.remaining != maxRemaining-time.Hour {
			t.Errorf("%v left of %v, want an hour less than %v", s.remaining, delay, maxRemaining)
		}
	}
}
