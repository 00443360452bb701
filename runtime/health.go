package leasebus

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"
)

// DefaultHealthTimeout bounds a check of a service's health.
const DefaultHealthTimeout = 3 * time.Second

// HealthStatus says how something is. The worst one wins.
type HealthStatus uint8

const (
	// HealthUp: it works. What only waits for others, such as a broker that takes no messages for now, is up too.
	HealthUp HealthStatus = iota
	// HealthDegraded: somebody should look. Starting the process again would mend nothing.
	HealthDegraded
	// HealthDown: it does not work; a connection is closed.
	HealthDown
)

// healthError is the detail that says what is wrong.
const healthError = "error"

func (s HealthStatus) String() string {
	if s > HealthDown {
		return fmt.Sprintf("HealthStatus(%d)", uint8(s))
	}
	return [...]string{"up", "degraded", "down"}[s]
}

// MarshalText makes a status a word in JSON.
func (s HealthStatus) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// HealthComponent is what one part of a service says about itself.
type HealthComponent struct {
	// Name is the part's own. In a report that of its checker stands before it: "broker/consume orders".
	Name   string       `json:"name"`
	Status HealthStatus `json:"status"`
	// Details are for people: counts, since when, why. They hold neither payloads nor passwords.
	Details map[string]any `json:"details,omitempty"`
}

// HealthChecker is something that can say how it is. A [Processor] and every backend are one.
type HealthChecker interface {
	// CheckHealth says how each part is. It changes nothing, and returns when ctx ends. A part that has no name is the
	// checker itself.
	CheckHealth(ctx context.Context) []HealthComponent
}

// HealthCheckerFunc makes a function a checker.
type HealthCheckerFunc func(ctx context.Context) []HealthComponent

// CheckHealth calls f.
func (f HealthCheckerFunc) CheckHealth(ctx context.Context) []HealthComponent { return f(ctx) }

// HealthReport is how a service is: the worst of its parts, and each of them, in the order of [Health.Add].
type HealthReport struct {
	Status     HealthStatus      `json:"status"`
	Components []HealthComponent `json:"components"`
}

// Health asks the parts of a service how they are. The zero value has none. It may be used concurrently.
type Health struct {
	// Timeout bounds a check; a part that has not answered by then is down. 0 or less = [DefaultHealthTimeout].
	Timeout time.Duration

	mu    sync.Mutex
	parts []*healthPart
}

// Add makes c a part, under a name that has none yet and is not empty; anything else panics.
func (h *Health) Add(name string, c HealthChecker) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if name == "" || c == nil {
		panic(fmt.Sprintf("leasebus: health: a part needs a name and a checker; given are %q and %v", name, c))
	}
	for _, other := range h.parts {
		if other.name == name {
			panic(fmt.Sprintf("leasebus: health: there is a part named %q already", name))
		}
	}
	h.parts = append(h.parts, &healthPart{name: name, checker: c})
}

// Check asks all parts at the same time and returns within the timeout, sooner if ctx ends. One that hangs is asked
// once only, however many checks come meanwhile.
func (h *Health) Check(ctx context.Context) HealthReport {
	timeout := h.Timeout
	if timeout <= 0 {
		timeout = DefaultHealthTimeout
	}
	h.mu.Lock()
	parts := h.parts
	h.mu.Unlock()

	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	probes := make([]*healthProbe, len(parts))
	for i, part := range parts {
		probes[i] = part.probe(timeout)
	}
	report := HealthReport{Components: make([]HealthComponent, 0, len(parts))}
	for i, probe := range probes {
		report.add(parts[i].name, probe.await(bounded))
	}
	return report
}

func (r *HealthReport) add(name string, components []HealthComponent) {
	for _, c := range components {
		if c.Name == "" {
			c.Name = name
		} else {
			c.Name = name + "/" + c.Name
		}
		r.Status = max(r.Status, c.Status)
		r.Components = append(r.Components, c)
	}
}

// healthPart is a named checker, asked by one goroutine at a time.
type healthPart struct {
	name    string
	checker HealthChecker

	mu  sync.Mutex
	now *healthProbe // under way
}

// healthProbe is one question to a part, and its answer once done is closed.
type healthProbe struct {
	began  time.Time
	done   chan struct{}
	answer []HealthComponent
}

// probe asks, or joins who is asking.
func (p *healthPart) probe(timeout time.Duration) *healthProbe {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.now != nil {
		return p.now
	}
	probe := &healthProbe{began: time.Now(), done: make(chan struct{})}
	p.now = probe
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		probe.answer = askHealth(ctx, p.checker)
		p.mu.Lock()
		p.now = nil
		p.mu.Unlock()
		close(probe.done)
	}()
	return probe
}

func askHealth(ctx context.Context, c HealthChecker) (answer []HealthComponent) {
	defer func() {
		if v := recover(); v != nil {
			answer = []HealthComponent{{Status: HealthDown, Details: map[string]any{healthError: fmt.Sprintf("the check panicked: %v", v)}}}
		}
	}()
	return c.CheckHealth(ctx)
}

// await returns the answer, or that there was none before ctx ended.
func (p *healthProbe) await(ctx context.Context) []HealthComponent {
	select {
	case <-p.done:
		return p.answer
	case <-ctx.Done():
	}
	select {
	case <-p.done: // while others were awaited
		return p.answer
	default:
	}
	waited := time.Since(p.began).Round(time.Millisecond)
	return []HealthComponent{{Status: HealthDown, Details: map[string]any{healthError: fmt.Sprintf("no answer within %v", waited)}}}
}

// Readiness answers HTTP requests with the report in JSON: 200 if the service is up or degraded, for another process
// would not be better, and 503 if it is down.
func (h *Health) Readiness() http.Handler {
	return healthHandler(func(ctx context.Context) HealthReport { return h.Check(ctx) })
}

// Liveness answers HTTP requests as long as the process can. It asks no database and no broker: where one of them is
// away, starting the process again does not bring it back.
func Liveness() http.Handler {
	return healthHandler(func(context.Context) HealthReport { return HealthReport{Components: []HealthComponent{}} })
}

func healthHandler(check func(context.Context) HealthReport) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "allowed are GET and HEAD", http.StatusMethodNotAllowed)
			return
		}
		report := check(r.Context())
		body, err := json.MarshalIndent(report, "", "  ")
		if err != nil { // a checker's details may hold what JSON cannot
			http.Error(w, "the report is no JSON: "+err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if report.Status == HealthDown {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		if r.Method == http.MethodGet {
			_, _ = w.Write(append(body, '\n')) // the client may be gone
		}
	})
}
