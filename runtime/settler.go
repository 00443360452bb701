package leasebus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	// settleBound is the longest that one Settle call may take.
	settleBound = 10 * time.Second
	// busyRetry is the first wait before a settlement is tried again whose row is locked.
	busyRetry    = 5 * time.Millisecond
	busyRetryMax = 250 * time.Millisecond

	// unstorableText replaces the error text of a settlement that the store refuses for its data.
	unstorableText = "the store refused the text of this error"
)

// settlementState is the engine's part of a settlement.
type settlementState struct {
	err error // what the handler returned, for hooks and for a Verify that finds the envelope still there
	// unsure: an answer was lost, so that "lost" may mean that the settlement had been written.
	unsure bool
	// plain: the text was replaced already.
	plain bool
	// part, if any, is done when the settlement has ended, written or not.
	part *countdown
	// busy counts the answers "busy", since is when the settlement was first tried, again when it is to be next.
	busy         int
	since, again time.Duration
}

// settle queues a settlement. The lease must be in stateSettling.
func (s *session) settle(st Settlement) {
	s.mu.Lock()
	if s.over {
		s.mu.Unlock()
		s.giveUp(&st, "the processor has stopped")
		return
	}
	s.pending = append(s.pending, st)
	n := len(s.pending)
	s.mu.Unlock()
	if n == 1 || n%settleBatch == 0 {
		nudge(s.kick)
	}
}

func (s *session) settleLoop() {
	var batch []Settlement
	retry := backoff{first: 20 * time.Millisecond, max: time.Second}
	for {
		batch = s.takePending(batch)
		if len(batch) == 0 {
			select {
			case <-s.kick:
				s.linger()
			case <-s.ctx.Done():
				s.giveUpPending()
				return
			}
			continue
		}
		if s.settleNow(batch) {
			retry.reset()
			continue
		}
		s.p.stats.settleErrors.Add(1)
		if !retry.wait(s.ctx.Done()) {
			s.giveUpPending()
			return
		}
	}
}

// linger waits a moment for more settlements to share a round trip, when few are there and nobody is in a hurry.
func (s *session) linger() {
	d := s.p.options.settleLinger
	if d == 0 || s.backlog() >= settleBatch/4 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.stopped:
	}
}

func (s *session) takePending(buf []Settlement) []Settlement {
	clear(buf)
	s.mu.Lock()
	n := min(len(s.pending), settleBatch)
	buf = append(buf[:0], s.pending[:n]...)
	rest := copy(s.pending, s.pending[n:])
	clear(s.pending[rest:])
	s.pending = s.pending[:rest]
	s.mu.Unlock()
	if rest > 0 {
		nudge(s.kick)
	}
	if n > 0 && s.starved.Load() && s.queue.inFlight.Load() <= s.roomMark.Load() {
		s.offerRoom()
	}
	return buf
}

// settleNow sends a batch and deals with every answer; false if some have to be tried again after a wait.
func (s *session) settleNow(batch []Settlement) bool {
	now := s.p.now()
	for i := range batch {
		batch[i].Result = ResultUnknown
		if batch[i].state.since == 0 {
			batch[i].state.since = now
		}
	}
	ctx, cancel := context.WithTimeout(s.ctx, min(settleBound, s.queue.policy.Lease.Duration))
	err := s.feed.Settle(ctx, batch)
	cancel()
	if errors.Is(err, ErrUnstorable) {
		return s.split(batch)
	}
	s.trouble.settle.note(err)
	if err != nil {
		s.p.log.Warn("leasebus: settling failed", "queue", s.queue.policy.Queue, "settlements", len(batch), "error", err)
	}
	all := err == nil
	for i := range batch {
		if !s.answered(&batch[i]) {
			all = false
		}
	}
	return all
}

// split finds the settlement whose data the store refuses: the halves are sent apart, until it stands alone and gets
// a text that can be stored.
func (s *session) split(batch []Settlement) bool {
	if len(batch) == 1 {
		batch[0].Result = ResultRejected
		return s.answered(&batch[0])
	}
	half := len(batch) / 2
	first := s.settleNow(batch[:half])
	return s.settleNow(batch[half:]) && first
}

// answered acts on the store's answer for one settlement; false if there was none and it is to be tried again.
func (s *session) answered(st *Settlement) bool {
	l := st.Lease
	switch st.Result {
	case ResultOK:
		if st.Kind == SettleVerify {
			st.Kind = SettleComplete
		}
		s.count(st)
		s.finishSettlement(st)
	case ResultLost, ResultCancelled:
		switch {
		case st.state.unsure:
			s.p.stats.settleUnknown.Add(1)
		case l.run.lost.Load():
			s.p.stats.persistSkipped.Add(1)
		default:
			s.p.stats.persistRejected.Add(1)
		}
		s.p.log.Info("leasebus: settlement came too late", "queue", l.Queue, "id", l.ID, "attempt", l.Attempt, "kind", st.Kind, "unsure", st.state.unsure)
		s.finishSettlement(st)
	case ResultStillLeased:
		s.settle(s.afterVerify(st))
	case ResultRejected:
		s.rejected(st)
	case ResultBusy:
		s.busy(st)
	default:
		st.state.unsure = true
		if int64(s.p.now()) < l.run.validUntil.Load() {
			s.settle(*st)
			return false
		}
		s.giveUp(st, "its store did not answer while the lease was valid")
	}
	return true
}

// afterVerify is for a handler whose transaction did not commit: an ordinary failure.
func (s *session) afterVerify(st *Settlement) Settlement {
	err := st.state.err
	if err == nil {
		err = errUncommitted
	}
	again := decide(s.queue.policy, s.p.result(st.Lease, err))
	again.Lease, again.state.err = st.Lease, err
	return again
}

var errUncommitted = errors.New("the handler's transaction did not commit")

// rejected sends a settlement again without the text that the store refuses; once.
func (s *session) rejected(st *Settlement) {
	if st.state.plain {
		s.giveUp(st, "the store refuses it")
		return
	}
	st.state.plain = true
	if st.Failure != nil {
		st.Failure = &Failure{Attempt: st.Failure.Attempt, Text: unstorableText, ErrorType: ""}
	}
	s.settle(*st)
}

// busy tries again in a moment, for as long as one lease.
func (s *session) busy(st *Settlement) {
	now := s.p.now()
	if now-st.state.since > s.queue.policy.Lease.Duration {
		s.giveUp(st, "its row stayed locked")
		return
	}
	st.state.busy++
	wait := RetryPolicy{Initial: busyRetry, Max: busyRetryMax, Multiplier: 2}.delay(st.state.busy)
	st.state.again = now + wait
	s.mu.Lock()
	s.locked = append(s.locked, *st)
	s.mu.Unlock()
	time.AfterFunc(wait, s.retryLocked)
}

// retryLocked tries those again whose moment has come.
func (s *session) retryLocked() {
	now := s.p.now()
	s.mu.Lock()
	var due []Settlement
	s.locked = slices.DeleteFunc(s.locked, func(st Settlement) bool {
		if st.state.again > now {
			return false
		}
		due = append(due, st)
		return true
	})
	s.mu.Unlock()
	for i := range due {
		s.settle(due[i])
	}
}

// giveUp leaves a lease to expire.
func (s *session) giveUp(st *Settlement, why string) {
	l := st.Lease
	st.Result = ResultUnknown
	s.p.stats.settleUnknown.Add(1)
	s.p.unsettled(l.ID)
	s.p.log.Error("leasebus: settlement given up, the lease is left to expire",
		"queue", l.Queue, "id", l.ID, "attempt", l.Attempt, "kind", st.Kind, "why", why)
	s.finishSettlement(st)
}

func (s *session) giveUpPending() {
	s.mu.Lock()
	s.over = true
	s.pending = append(s.pending, s.locked...)
	s.locked = nil
	s.mu.Unlock()
	for {
		batch := s.takePending(nil)
		if len(batch) == 0 {
			return
		}
		for i := range batch {
			s.giveUp(&batch[i], "the processor has stopped")
		}
	}
}

func (s *session) finishSettlement(st *Settlement) {
	if settled := s.p.options.settledHooks; len(settled) > 0 {
		outcome := Outcome{
			Kind: st.Kind, Reason: st.Reason, Delay: st.Delay, DeadLetterQueue: st.DeadLetterQueue,
			Err: st.state.err, Result: st.Result,
		}
		for _, hook := range settled {
			s.callSettled(hook, Delivery{st.Lease}, outcome)
		}
	}
	s.ended(st.Lease)
	if st.state.part != nil {
		st.state.part.done()
	}
}

func (s *session) callSettled(hook func(Delivery, Outcome), d Delivery, o Outcome) {
	defer func() {
		if p := recover(); p != nil {
			s.p.log.Error("leasebus: a Settled hook panicked", "queue", d.Queue(), "id", d.ID(), "panic", fmt.Sprint(p))
		}
	}()
	hook(d, o)
}

// count adds what the store has done to the counters, and tells the log what people want to know.
func (s *session) count(st *Settlement) {
	stats, l := &s.p.stats, st.Lease
	switch st.Kind {
	case SettleComplete:
		stats.succeeded.Add(1)
	case SettleRetry:
		stats.failed.Add(1)
		s.p.log.Info("leasebus: message failed, will be retried",
			"queue", l.Queue, "type", l.Type, "id", l.ID, "attempt", l.Attempt, "delay", st.Delay, "error", st.Failure.Text)
	case SettleDefer:
		stats.deferred.Add(1)
	case SettleRelease:
		stats.released.Add(1)
	case SettleDeadLetter:
		stats.deadLettered.Add(1)
		s.p.log.Warn("leasebus: message dead-lettered", "queue", l.Queue, "type", l.Type, "id", l.ID,
			"attempts", st.Attempts, "reason", st.Reason, "to", st.DeadLetterQueue, "error", st.Failure.Text)
	case SettleDiscard:
		stats.discarded.Add(1)
		s.p.log.Warn("leasebus: message discarded, its queue keeps no dead letters", "queue", l.Queue, "type", l.Type, "id", l.ID,
			"attempts", st.Attempts, "reason", st.Reason, "error", st.Failure.Text)
	case SettleVerify: // answered as Complete
	}
}
