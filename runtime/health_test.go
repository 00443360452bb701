package leasebus_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// ended waits for Run, which must have left nothing.
func (r *rig) ended() {
	r.Helper()
	if err := <-r.ran; err != nil {
		r.Errorf("Run: %v", err)
	}
}

// says is a checker that always gives the same answer.
func says(components ...leasebus.HealthComponent) leasebus.HealthCheckerFunc {
	return func(context.Context) []leasebus.HealthComponent { return components }
}

func status(s leasebus.HealthStatus) leasebus.HealthComponent {
	return leasebus.HealthComponent{Status: s}
}

func TestHealth_S56_the_worst_wins_and_each_part_reports_by_name(t *testing.T) {
	t.Parallel()
	var health leasebus.Health
	if got := health.Check(t.Context()); got.Status != leasebus.HealthUp || len(got.Components) != 0 {
		t.Errorf("without parts: %+v, want up", got)
	}
	blocked := map[string]any{"blocked": "low on memory"}
	health.Add("broker", says(
		leasebus.HealthComponent{Name: "publish", Details: blocked},
		leasebus.HealthComponent{Name: "consume orders", Status: leasebus.HealthDegraded}))
	health.Add("inbox", says(status(leasebus.HealthUp)))
	want := leasebus.HealthReport{Status: leasebus.HealthDegraded, Components: []leasebus.HealthComponent{
		{Name: "broker/publish", Details: blocked},
		{Name: "broker/consume orders", Status: leasebus.HealthDegraded},
		{Name: "inbox"},
	}}
	if got := health.Check(t.Context()); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	health.Add("outbox", says(status(leasebus.HealthDown)))
	if got := health.Check(t.Context()).Status; got != leasebus.HealthDown {
		t.Errorf("with a part that is down: %v", got)
	}
}

func TestHealth_S56_a_part_that_hangs_is_down_by_name_within_the_bound_and_asked_once(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		release := make(chan struct{})
		health := leasebus.Health{Timeout: 2 * time.Second}
		health.Add("deaf", leasebus.HealthCheckerFunc(func(context.Context) []leasebus.HealthComponent {
			asked.Add(1)
			<-release // it ignores its context
			return []leasebus.HealthComponent{{}}
		}))
		health.Add("inbox", says(status(leasebus.HealthUp)))
		for range 3 {
			began := time.Now()
			report := health.Check(t.Context())
			if took := time.Since(began); took != 2*time.Second {
				t.Errorf("the check took %v, want the timeout of 2s", took)
			}
			if report.Components[0].Status != leasebus.HealthDown || report.Components[1].Status != leasebus.HealthUp {
				t.Errorf("%+v; want deaf down and inbox up", report)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		began := time.Now()
		if health.Check(ctx); time.Since(began) != 0 {
			t.Errorf("a check whose caller has gone took %v", time.Since(began))
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("the part that hangs was asked %d times, want once", n)
		}
		close(release)
		synctest.Wait()
		if got := health.Check(t.Context()).Status; got != leasebus.HealthUp {
			t.Errorf("after it has answered: %v, want up", got)
		}
	})
}

func TestHealth_S56_a_check_that_panics_is_down(t *testing.T) {
	t.Parallel()
	var health leasebus.Health
	health.Add("odd", leasebus.HealthCheckerFunc(func(context.Context) []leasebus.HealthComponent { panic("odd") }))
	report := health.Check(t.Context())
	if report.Status != leasebus.HealthDown || report.Components[0].Name != "odd" {
		t.Errorf("%+v; want odd down", report)
	}
}

func TestHealth_Add_refuses_what_has_no_name_or_the_same(t *testing.T) {
	t.Parallel()
	var health leasebus.Health
	health.Add("inbox", says())
	for name, c := range map[string]leasebus.HealthChecker{"": says(), "inbox": says(), "nil": nil} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("name %q, checker %v: no panic", name, c)
				}
			}()
			health.Add(name, c)
		}()
	}
}

func get(t *testing.T, h http.Handler, method string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, "/", nil))
	return w
}

func TestHealth_S56_readiness_answers_200_unless_something_is_down(t *testing.T) {
	t.Parallel()
	for given, want := range map[leasebus.HealthStatus]int{
		leasebus.HealthUp: 200, leasebus.HealthDegraded: 200, leasebus.HealthDown: 503,
	} {
		var health leasebus.Health
		health.Add("inbox", says(leasebus.HealthComponent{Status: given, Details: map[string]any{"held": 3}}))
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			res := get(t, health.Readiness(), method)
			if res.Code != want || res.Header().Get("Content-Type") != "application/json" || res.Header().Get("Cache-Control") != "no-store" {
				t.Errorf("%s when %v: %d %v; want %d", method, given, res.Code, res.Header(), want)
			}
			if method == http.MethodHead {
				continue
			}
			var body struct {
				Status     string
				Components []struct {
					Name, Status string
					Details      map[string]int
				}
			}
			if err := json.NewDecoder(res.Body).Decode(&body); err != nil {
				t.Fatal(err)
			}
			if body.Status != given.String() || len(body.Components) != 1 || body.Components[0].Name != "inbox" ||
				body.Components[0].Status != given.String() || body.Components[0].Details["held"] != 3 {
				t.Errorf("the body when %v is %+v", given, body)
			}
		}
	}
	var health leasebus.Health
	health.Add("odd", says(leasebus.HealthComponent{Details: map[string]any{"no JSON": func() {}}}))
	for method, want := range map[string]int{http.MethodPost: 405, http.MethodGet: 500} {
		res := get(t, health.Readiness(), method)
		if res.Code != want {
			t.Errorf("%s: %d, want %d", method, res.Code, want)
		}
	}
}

func TestHealth_S56_liveness_answers_whatever_the_parts_say(t *testing.T) {
	t.Parallel()
	res := get(t, leasebus.Liveness(), http.MethodGet)
	if res.Code != http.StatusOK {
		t.Errorf("liveness answers %d, want 200", res.Code)
	}
}

func TestHealth_S56_memory_is_up(t *testing.T) {
	t.Parallel()
	var health leasebus.Health
	health.Add("store", memory.New())
	if got := health.Check(t.Context()); got.Status != leasebus.HealthUp || len(got.Components) != 1 {
		t.Errorf("%+v; want one part that is up", got)
	}
}

// health asks the rig's processor.
func (r *rig) health() (processor, queue leasebus.HealthComponent) {
	r.Helper()
	all := r.processor.CheckHealth(r.Context())
	for _, c := range all {
		switch c.Name {
		case "":
			processor = c
		case r.policy.Queue:
			queue = c
		default:
			r.Errorf("there is a part named %q", c.Name)
		}
	}
	return processor, queue
}

func TestHealth_S56_processor_through_its_life(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		release := make(chan struct{})
		r.handler = func(context.Context, string) error {
			<-release
			return nil
		}
		fresh, err := leasebus.NewProcessor(&r.faults, quiet)
		if err != nil {
			t.Fatal(err)
		}
		if c := fresh.CheckHealth(t.Context())[0]; c.Status != leasebus.HealthDegraded || c.Details["state"] != "new" {
			t.Errorf("before Run: %+v, want degraded", c)
		}

		r.publish("a", "b", "c")
		r.start(leasebus.WithConcurrency(1))
		r.wait(0)
		want := leasebus.HealthComponent{Details: map[string]any{"state": "running", "in_flight": 1, "held": r.processor.Held(), "concurrency": 1}}
		if c, _ := r.health(); !reflect.DeepEqual(c, want) {
			t.Errorf("running: %+v\nwant %+v", c, want)
		}
		if _, q := r.health(); q.Status != leasebus.HealthUp || q.Details["in_flight"] != 1 {
			t.Errorf("the queue: %+v, want up with one handler", q)
		}

		r.processor.Pause()
		c, q := r.health()
		if c.Status != leasebus.HealthUp || q.Status != leasebus.HealthUp || c.Details["state"] != "paused" || q.Details["state"] != "paused" {
			t.Errorf("paused: %+v %+v, want up", c, q)
		}
		r.processor.Resume()
		r.wait(0)

		drained := make(chan error)
		go func() { drained <- r.processor.Drain(context.Background()) }()
		r.wait(0)
		if c, _ := r.health(); c.Status != leasebus.HealthUp || c.Details["state"] != "draining" {
			t.Errorf("draining: %+v, want up", c)
		}
		close(release)
		if err := <-drained; err != nil {
			t.Fatal(err)
		}
		if c, _ := r.health(); c.Status != leasebus.HealthDown || c.Details["state"] != "ended" {
			t.Errorf("afterwards: %+v, want down", c)
		}
		r.ended()
	})
}

func TestHealth_S54_S56_a_store_that_is_away_degrades_the_queue_until_it_is_back(t *testing.T) {
	t.Parallel()
	for _, trouble := range []string{"leasing", "renewing", "settling"} {
		t.Run(trouble, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				var away atomic.Bool
				fails := func(what string) bool { return what == trouble && away.Load() }
				r.lease = func(_ context.Context, pass func() (int, error)) (int, error) {
					if fails("leasing") {
						return 0, errStoreAway
					}
					return pass()
				}
				r.renew = func(_ context.Context, _ []leasebus.Renewal, pass func() error) error {
					if fails("renewing") {
						return errStoreAway
					}
					return pass()
				}
				r.settle = func(_ context.Context, _ []leasebus.Settlement, pass func() error) error {
					if fails("settling") {
						return errStoreAway
					}
					return pass()
				}
				r.handler = func(ctx context.Context, text string) error {
					if text == "slow" {
						time.Sleep(15 * time.Second)
					}
					return nil
				}
				r.start()
				r.wait(0)
				away.Store(true)
				r.publish("slow", "fast")
				r.wait(12 * time.Second)
				_, q := r.health()
				if q.Status != leasebus.HealthDegraded || !strings.Contains(fmt.Sprint(q.Details[trouble]), errStoreAway.Error()) {
					t.Errorf("while %s fails: %+v", trouble, q)
				}
				away.Store(false)
				r.wait(time.Minute)
				if _, q := r.health(); q.Status != leasebus.HealthUp || q.Details[trouble] != nil {
					t.Errorf("afterwards: %+v, want up", q)
				}
				if err := r.processor.Drain(t.Context()); err != nil {
					t.Error(err)
				}
				r.ended()
			})
		})
	}
}

func TestHealth_S54_S56_a_queue_that_cannot_be_subscribed_again_is_degraded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var away atomic.Bool
		r.subscribe = func() error {
			if away.Load() {
				return errors.New("no")
			}
			return nil
		}
		r.start()
		r.wait(0)
		away.Store(true)
		r.processor.Pause()
		r.processor.Resume()
		r.wait(time.Second)
		if _, q := r.health(); q.Status != leasebus.HealthDegraded || q.Details["state"] != "subscribing" {
			t.Errorf("%+v, want degraded", q)
		}
		away.Store(false)
		r.wait(time.Minute)
		if _, q := r.health(); q.Status != leasebus.HealthUp {
			t.Errorf("afterwards: %+v, want up", q)
		}
		if err := r.processor.Drain(t.Context()); err != nil {
			t.Error(err)
		}
		r.ended()
	})
}
