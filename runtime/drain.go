package leasebus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

const (
	// flushBound is how long a drain waits for the last settlements: with the default drain timeout and grace, all of
	// it fits the 30 s that Kubernetes gives.
	flushBound = 4 * time.Second
	// maxLeftovers bounds the ids that a DrainError lists.
	maxLeftovers = 100
)

// DrainError says what a drain had to leave. All of it will be leased again when its lease expires.
type DrainError struct {
	// Abandoned are the messages whose handlers did not return in time, Unsettled those whose outcome could not be
	// stored; at most 100 ids each, the counts are exact.
	Abandoned, Unsettled           []ID
	AbandonedCount, UnsettledCount int
}

func (e *DrainError) Error() string {
	var parts []string
	if e.AbandonedCount > 0 {
		parts = append(parts, fmt.Sprintf("%d handlers did not return in time and were abandoned (%s)", e.AbandonedCount, idList(e.Abandoned, e.AbandonedCount)))
	}
	if e.UnsettledCount > 0 {
		parts = append(parts, fmt.Sprintf("%d messages could not be settled (%s)", e.UnsettledCount, idList(e.Unsettled, e.UnsettledCount)))
	}
	return "leasebus: drain: " + strings.Join(parts, "; ") + "; their leases are left to expire"
}

// idList writes the first few ids of count.
func idList(ids []ID, count int) string {
	const shown = 5
	var b strings.Builder
	for i, id := range ids[:min(len(ids), shown)] {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(id.String())
	}
	if count > shown {
		b.WriteString(", …")
	}
	return b.String()
}

// ErrDrainStarted is what Drain answers inside a handler of the same processor: the drain has begun, and Run will
// report it; waiting for it here would be waiting for oneself.
var ErrDrainStarted = errors.New("leasebus: drain started; it waits for this handler too")

// Drain stops the processor: it takes no more messages, gives back at once those it has not started, waits up to the
// drain timeout for running handlers, cancels them with [ErrShutdown], waits the grace, and abandons what is left.
//
// It returns nil when everything finished, a [*DrainError] when something was left, and ctx's error if ctx ends first:
// leasing stays stopped then, handlers go on, and Drain can be called again. It may be called more than once, by
// several callers, and with a handler's context ([ErrDrainStarted]).
func (p *Processor) Drain(ctx context.Context) error {
	if p.idleForGood() {
		return p.report()
	}
	begun := time.Now()
	p.stopLeasing()
	if d, inside := DeliveryFrom(ctx); inside && d.lease.run.session.p == p {
		p.asking.Do(func() { close(p.drainAsked) })
		return ErrDrainStarted
	}
	finished, err := p.waitIdle(ctx, p.options.drainTimeout-time.Since(begun))
	if err != nil {
		return err
	}
	if !finished {
		p.cancelHandlers()
		if finished, err = p.waitIdle(ctx, p.options.drainGrace); err != nil {
			return err
		}
	}
	if !finished {
		p.abandonRunning()
	}
	if err := p.flush(ctx); err != nil {
		return err
	}
	p.finish()
	p.log.Info("leasebus: drained", "took", time.Since(begun).Round(time.Millisecond))
	return p.report()
}

// idleForGood ends a processor that never ran; true if there is nothing to drain.
func (p *Processor) idleForGood() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == processorNew {
		p.state = processorDone
		close(p.draining)
		close(p.drained)
	}
	return p.state == processorDone
}

// stopLeasing is the first step, taken once: no handler starts from here on, and what waits for one goes back.
func (p *Processor) stopLeasing() {
	p.mu.Lock()
	first := p.state == processorRunning
	if first {
		p.state = processorDraining
		close(p.draining)
		p.stopOpening()
		for _, q := range p.queues {
			p.dispatcher.pause(q)
			q.current.Store(nil)
		}
	}
	sessions := p.sessions()
	p.mu.Unlock()
	if !first {
		return
	}
	each(sessions, func(s *session) {
		s.stop()
		s.release(0)
	})
}

// each runs f for every session at the same time and waits for all: one slow backend does not hold up the others.
func each(sessions []*session, f func(*session)) {
	var all sync.WaitGroup
	for _, s := range sessions {
		all.Go(func() { f(s) })
	}
	all.Wait()
}

// sessions lists the live ones. Call it with the lock held.
func (p *Processor) sessions() []*session {
	list := make([]*session, 0, len(p.live))
	for s := range p.live {
		list = append(list, s)
	}
	return list
}

func (p *Processor) liveSessions() []*session {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sessions()
}

// forget drops a closed session.
func (p *Processor) forget(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.live, s)
}

// waitIdle waits until no handler runs; false if that took longer than limit.
func (p *Processor) waitIdle(ctx context.Context, limit time.Duration) (bool, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.dispatcher.whenIdle():
		return true, nil
	case <-ctx.Done():
		return false, fmt.Errorf("leasebus: drain: %w", context.Cause(ctx))
	case <-timer.C:
		return false, nil
	}
}

// cancelHandlers ends the contexts of all running handlers.
func (p *Processor) cancelHandlers() {
	for _, s := range p.liveSessions() {
		for _, l := range s.unfinished() {
			l.run.ctx.end(ErrShutdown)
		}
	}
}

// abandonRunning gives up the handlers that are still running: whatever they return is dropped, their leases expire.
func (p *Processor) abandonRunning() {
	for _, s := range p.liveSessions() {
		for _, l := range s.unfinished() {
			p.abandoned.Add(1)
			l.run.replaced.Store(true)
			if !l.advance(stateRunning, stateDone) && !l.advance(stateInTx, stateDone) {
				p.abandoned.Add(-1)
				continue
			}
			p.stats.abandoned.Add(1)
			p.log.Error("leasebus: handler abandoned in a drain, the lease is left to expire", "queue", l.Queue, "type", l.Type, "id", l.ID, "attempt", l.Attempt)
			p.mu.Lock()
			p.leftovers.AbandonedCount++
			p.leftovers.Abandoned = appendLeftover(p.leftovers.Abandoned, l.ID)
			p.mu.Unlock()
			s.ended(l)
			p.leave(l.run.queue, false)
		}
	}
}

// unfinished lists the leases whose handler runs, or is about to.
func (s *session) unfinished() []*Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []*Lease
	for l := range s.slabs.leases() {
		if l.run.state.Load() <= stateInTx {
			list = append(list, l)
		}
	}
	return list
}

// unsettled notes a message whose settlement was given up; only those of the drain are its report.
func (p *Processor) unsettled(id ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == processorDraining {
		p.leftovers.UnsettledCount++
		p.leftovers.Unsettled = appendLeftover(p.leftovers.Unsettled, id)
	}
}

func appendLeftover(ids []ID, id ID) []ID {
	if len(ids) == maxLeftovers {
		return ids
	}
	return append(ids, id)
}

// flush waits for the last settlements.
func (p *Processor) flush(ctx context.Context) error {
	timer := time.NewTimer(flushBound)
	defer timer.Stop()
	for _, s := range p.liveSessions() {
		select {
		case <-s.empty:
		case <-s.ctx.Done():
		case <-ctx.Done():
			return fmt.Errorf("leasebus: drain: %w", context.Cause(ctx))
		case <-timer.C:
			return nil // what is left is given up, and reported
		}
	}
	return nil
}

// finish ends everything that is left, once.
func (p *Processor) finish() {
	p.closing.Lock()
	defer p.closing.Unlock()
	if p.idleForGood() {
		return
	}
	each(p.liveSessions(), (*session).close)
	p.helpers.Wait()
	p.dispatcher.close()
	p.workers.Wait()
	p.mu.Lock()
	p.state = processorDone
	p.mu.Unlock()
	close(p.drained)
}

// report is the drain's answer.
func (p *Processor) report() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.leftovers.AbandonedCount == 0 && p.leftovers.UnsettledCount == 0 {
		return nil
	}
	left := p.leftovers
	return &left
}
