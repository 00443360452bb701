package leasebus

import (
	"context"
	"sync/atomic"
	"time"
)

var _ HealthChecker = (*Processor)(nil)

// CheckHealth says how the processor and its queues are. Only one that has ended is down: the store says itself when it
// is away. A queue is degraded while leases cannot be taken, renewed or settled. A pause and a drain are no fault.
func (p *Processor) CheckHealth(context.Context) []HealthComponent {
	p.mu.Lock()
	state, paused := p.state, p.paused
	p.mu.Unlock()
	self := HealthComponent{Details: map[string]any{
		"state": state.String(), "in_flight": p.InFlight(), "held": p.Held(), "concurrency": p.options.concurrency,
	}}
	if n := p.stats.abandoned.Load() - p.stats.abandonedReturned.Load(); n > 0 {
		self.Details["abandoned"] = n // handlers that do not return
	}
	switch state {
	case processorNew:
		self.Status = HealthDegraded
	case processorRunning, processorDraining:
	case processorDone:
		self.Status = HealthDown
	}
	if state == processorRunning && paused {
		self.Details["state"] = "paused"
	}
	all := []HealthComponent{self}
	if state == processorRunning {
		for _, q := range p.queues {
			all = append(all, p.queueHealth(q, paused))
		}
	}
	return all
}

func (p *Processor) queueHealth(q *queue, paused bool) HealthComponent {
	waiting, running := p.dispatcher.count(q)
	c := HealthComponent{Name: q.policy.Queue, Details: map[string]any{"in_flight": running, "waiting": waiting}}
	s := q.current.Load()
	switch {
	case paused:
		c.Details["state"] = "paused"
	case s == nil:
		c.Status = HealthDegraded
		c.Details["state"] = "subscribing"
	default:
		s.trouble.tell(&c)
	}
	return c
}

func (s processorState) String() string {
	return [...]string{"new", "running", "draining", "ended"}[s]
}

// troubles are what a session cannot do at present.
type troubles struct{ lease, renew, settle trouble }

func (t *troubles) tell(c *HealthComponent) {
	for name, trouble := range map[string]*trouble{"leasing": &t.lease, "renewing": &t.renew, "settling": &t.settle} {
		if err, since := trouble.get(); err != nil {
			c.Status = HealthDegraded
			c.Details[name] = map[string]any{healthError: err.Error(), "since": since.UTC().Format(time.RFC3339)}
		}
	}
}

// trouble is a failure that goes on. The zero value is none.
type trouble struct{ at atomic.Pointer[failing] }

type failing struct {
	err   error
	since time.Time
}

// note takes the outcome of one try; nil ends the trouble.
func (t *trouble) note(err error) {
	before := t.at.Load()
	switch {
	case err == nil && before == nil: // as nearly always
	case err == nil:
		t.at.Store(nil)
	case before == nil:
		t.at.Store(&failing{err, time.Now()})
	default:
		t.at.Store(&failing{err, before.since})
	}
}

func (t *trouble) get() (err error, since time.Time) { //nolint:revive,staticcheck // the error is one of the things it says
	if f := t.at.Load(); f != nil {
		return f.err, f.since
	}
	return nil, time.Time{}
}
