package leasebus

import (
	"context"
	"time"
)

// heartbeatLoop keeps the session's leases: one batch for each tick, from the moment a lease is given until it is
// settled, and ends the handlers whose lease cannot be kept.
func (s *session) heartbeatLoop() {
	policy := s.queue.policy.Lease
	retry := backoff{first: policy.Heartbeat / 8, max: policy.Heartbeat / 2}
	timer := time.NewTimer(policy.Heartbeat)
	defer timer.Stop()
	finished, shedAt := s.queue.finished.Load(), s.p.now()
	for {
		select {
		case <-timer.C:
		case <-s.check:
		case <-s.ctx.Done():
			return
		}
		next := policy.Heartbeat
		if now := s.p.now(); now-shedAt >= policy.Heartbeat {
			ever := s.queue.finished.Load()
			s.shed(ever - finished)
			finished, shedAt = ever, now
		}
		batch, deadline := s.renewable()
		if len(batch) == 0 {
			s.trouble.renew.note(nil)
			s.trouble.settle.note(nil)
		} else if s.ctx.Err() == nil {
			err := s.renew(batch, deadline)
			s.trouble.renew.note(err)
			if err != nil && s.ctx.Err() == nil {
				// Unknown is not lost: tried again while the leases can be valid.
				next = retry.next()
				s.p.stats.renewErrors.Add(1)
				s.p.log.WarnContext(s.ctx, "leasebus: renewing leases failed", "queue", s.queue.policy.Queue, "leases", len(batch), "error", err)
			} else {
				retry.reset()
			}
		}
		if expiry, live := s.expire(); live {
			next = min(next, max(time.Duration(expiry)-s.p.now(), 0))
		}
		timer.Reset(next)
	}
}

// renewable collects the leases to renew, and the time by which the first of them must have its answer.
func (s *session) renewable() (batch []Renewal, deadline time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.slabs.leases() {
		if l.run.lost.Load() {
			continue
		}
		switch l.run.state.Load() {
		case stateHeld, stateRunning, stateSettling:
			end := time.Duration(l.run.validUntil.Load()) - s.queue.margin()
			if len(batch) == 0 || end < deadline {
				deadline = end
			}
			batch = append(batch, Renewal{Lease: l})
		}
	}
	return batch, deadline
}

// renew asks once, within the heartbeat interval and before the first lease would have to be given up.
func (s *session) renew(batch []Renewal, deadline time.Duration) error {
	sent := s.p.now()
	bound := min(s.queue.policy.Lease.Heartbeat, max(deadline-sent, time.Millisecond))
	ctx, cancel := context.WithTimeout(s.ctx, bound)
	defer cancel()
	err := s.feed.Renew(ctx, batch)
	valid := int64(sent + s.queue.policy.Lease.Duration)
	for i := range batch {
		l := batch[i].Lease
		switch batch[i].Result {
		case ResultOK, ResultBusy:
			// Busy is mine: whoever locked it keeps others from it too.
			l.run.validUntil.Store(valid)
		case ResultLost:
			s.lose(l, ErrLeaseLost)
		case ResultCancelled:
			s.lose(l, ErrCancelled)
		default: // no answer
		}
	}
	return err
}

// expire gives up the leases that could not be renewed in time, and returns when the next one would be due for that.
func (s *session) expire() (next int64, live bool) {
	now := int64(s.p.now())
	margin := int64(s.queue.margin())
	var gone []*Lease
	s.mu.Lock()
	for l := range s.slabs.leases() {
		if state := l.run.state.Load(); (state != stateHeld && state != stateRunning) || l.run.lost.Load() {
			continue
		}
		end := l.run.validUntil.Load() - margin
		if end <= now {
			gone = append(gone, l)
		} else if !live || end < next {
			next, live = end, true
		}
	}
	s.mu.Unlock()
	for _, l := range gone {
		s.lose(l, ErrLeaseLost)
	}
	return next, live
}

// lose believes that a lease is gone: one that waits is dropped, one that runs has its handler cancelled. While a
// settlement or a transaction is under way, its own answer decides.
func (s *session) lose(l *Lease, cause error) {
	switch {
	case l.advance(stateHeld, stateDone):
		s.queue.leaveSlot()
		s.ended(l)
	case l.run.state.Load() == stateRunning:
		if l.run.lost.Swap(true) {
			return
		}
		l.run.ctx.end(cause)
	default:
		return
	}
	s.p.stats.leaseLost.Add(1)
	s.p.log.Info("leasebus: lease lost", "queue", l.Queue, "id", l.ID, "attempt", l.Attempt, "cause", cause)
}

// margin is how long before its end a lease is given up.
func (q *queue) margin() time.Duration { return q.policy.Lease.Duration / 10 }
