package leasebus

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"
)

// maxStack bounds the stack that is kept of a panic.
const maxStack = 2 << 10

// hire starts a worker.
func (p *Processor) hire() {
	p.workers.Add(1)
	go p.work()
}

// work is a worker's life: one lease after the other, until the processor closes or the handler is abandoned.
func (p *Processor) work() {
	parking := make(chan struct{}, 1)
	var finished *queue
	for {
		l := p.dispatcher.next(parking, finished, (*queue).ranDry)
		if l == nil {
			p.workers.Done()
			return
		}
		finished = l.run.queue
		if p.process(l) {
			continue
		}
		finished = nil // the slot went with the abandoned handler
		if !p.rejoin(l) {
			return
		}
	}
}

// ranDry tells the leaser of a queue that its last waiting lease was taken: idle workers are not to wait for a whole
// half batch of room.
func (q *queue) ranDry() {
	if s := q.current.Load(); s != nil && s.starved.Load() {
		s.offerRoom()
	}
}

// process takes one lease from held to a settlement; false if its handler was abandoned meanwhile.
func (p *Processor) process(l *Lease) bool {
	if !l.advance(stateHeld, stateRunning) {
		return true // dropped while it waited
	}
	q := l.run.queue
	if st := decideUnrun(q.policy, l); st != nil {
		return p.conclude(l, *st, nil)
	}
	if !slices.Contains(q.types, l.Type) {
		return p.conclude(l, decideUnhandled(q.policy, l, p.age(l), p.options.unhandledAfter), nil)
	}
	var bound timeout
	if q.policy.Timeout > 0 {
		bound = p.bound(l, q.policy.Timeout)
	}
	err := p.invoke(l)
	bound.stop()
	return p.conclude(l, decide(q.policy, p.result(l, err)), err)
}

// result describes an attempt that ended with err.
func (p *Processor) result(l *Lease, err error) attemptResult {
	if err == nil {
		return attemptResult{}
	}
	return attemptResult{
		attempt: l.Attempt, age: p.age(l), interruptions: l.Interruptions,
		err: err, ended: l.run.ctx.endedBy(),
	}
}

// age is the message's age on the store's clock: as it was when leased, plus what has passed here since its arrival. It is
// rather too little, by the way of the answer, than too much: nothing is given up too early.
func (p *Processor) age(l *Lease) time.Duration { return l.Age + p.now() - l.run.arrivedAt }

// conclude hands the settlement of a handler that has returned to the settler; false if it was abandoned before.
func (p *Processor) conclude(l *Lease, st Settlement, err error) bool {
	l.run.ctx.end(context.Canceled)
	switch {
	case l.advance(stateRunning, stateSettling):
	case l.advance(stateInTx, stateSettling):
		st = Settlement{Kind: SettleVerify}
	default:
		return false
	}
	st.Lease, st.state.err = l, err
	l.run.queue.finished.Add(1)
	l.run.queue.leaveSlot()
	l.run.session.settle(st)
	return true
}

// invoke calls the handler with everything around it. A panic becomes an error; so does runtime.Goexit, which ends this
// goroutine: another worker takes over.
func (p *Processor) invoke(l *Lease) (err error) {
	returned := false
	defer func() {
		if returned {
			return
		}
		value := recover()
		err = &PanicError{Value: value, Stack: stack()}
		if value == nil {
			p.exited(l, err)
		}
	}()
	err = tame(p.attempt(&l.run.ctx, l))
	returned = true
	return err
}

// tame replaces an error that cannot be asked what it is, such as a nil pointer returned as an error, by the panic that
// asking ends in.
func tame(err error) (tamed error) {
	if err == nil {
		return nil
	}
	defer func() {
		if value := recover(); value != nil {
			tamed = &PanicError{Value: value, Stack: stack()}
		}
	}()
	var v *verdict
	_ = errors.As(err, &v)           // Unwrap and As of all of its tree
	_ = errors.Is(err, ErrLeaseLost) // Is
	_ = errorType(err)
	return err
}

func stack() string {
	s := debug.Stack()
	return string(s[:min(len(s), maxStack)])
}

// exited concludes a handler that has called runtime.Goexit, and replaces the worker it ended.
func (p *Processor) exited(l *Lease, err error) {
	if !p.conclude(l, decide(l.run.queue.policy, p.result(l, err)), err) {
		if !p.rejoin(l) {
			return
		}
	} else {
		p.dispatcher.finished(l.run.queue)
	}
	go p.work() // in this worker's place
}

// attempt decodes the message and runs hooks, middleware and handler.
func (p *Processor) attempt(ctx context.Context, l *Lease) error {
	h := &l.run.queue.handler
	message, err := h.decode(l.Payload)
	if err != nil {
		return Invalid(err)
	}
	l.run.message = message
	d := Delivery{l}
	if p.options.validate != nil {
		if err := p.options.validate(ctx, d); err != nil {
			return Invalid(err)
		}
	}
	if len(p.options.hooks) == 0 {
		return h.handle(ctx, d)
	}
	return p.hooked(ctx, d, h.handle)
}

func (p *Processor) hooked(ctx context.Context, d Delivery, handle HandlerFunc) error {
	for _, hook := range p.options.hooks {
		if hook.Before == nil {
			continue
		}
		if err := p.hookFailed(d, hook.OnFailure, "before", guard(func() error { return hook.Before(ctx, d) })); err != nil {
			return err
		}
	}
	err := handle(ctx, d)
	for _, hook := range p.options.hooks {
		if hook.After == nil {
			continue
		}
		failed := p.hookFailed(d, hook.OnFailure, "after", guard(func() error { return hook.After(ctx, d, err) }))
		if err == nil {
			err = failed
		}
	}
	return err
}

// hookFailed turns a hook's error into the one that decides about the message; nil = go on.
func (p *Processor) hookFailed(d Delivery, then HookFailure, which string, err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s hook: %w", which, err)
	p.log.Warn("leasebus: hook failed", "queue", d.Queue(), "id", d.ID(), "attempt", d.Attempt(), "error", errorText(err))
	switch then {
	case HookFailureDeadLetter:
		return Permanent(err)
	case HookFailureIgnore:
		return nil
	default:
		return err
	}
}

// guard makes a hook's panic its error.
func guard(call func() error) (err error) {
	defer func() {
		if value := recover(); value != nil {
			err = &PanicError{Value: value, Stack: stack()}
		}
	}()
	return call()
}

// timeout ends a handler's context when its time is over, and abandons it when it does not care.
type timeout struct{ cancel, abandon *time.Timer }

func (p *Processor) bound(l *Lease, d time.Duration) timeout {
	l.run.ctx.deadline = time.Now().Add(d)
	return timeout{
		cancel:  time.AfterFunc(d, func() { l.run.ctx.end(fmt.Errorf("%w after %v", ErrHandlerTimeout, d)) }),
		abandon: time.AfterFunc(d+p.options.drainGrace, func() { p.abandonStuck(l) }),
	}
}

func (t timeout) stop() {
	if t.cancel != nil {
		t.cancel.Stop()
		t.abandon.Stop()
	}
}

// abandonStuck settles a message in place of a handler that ignores its timeout, and gives its slot to another worker:
// up to as many as the processor's concurrency, so that a handler that always hangs cannot pile up goroutines for ever.
func (p *Processor) abandonStuck(l *Lease) {
	q := l.run.queue
	stuck := p.abandoned.Add(1)
	replace := stuck <= int64(p.options.concurrency)
	l.run.replaced.Store(replace)
	if !l.advance(stateRunning, stateSettling) {
		p.abandoned.Add(-1)
		return
	}
	p.stats.abandoned.Add(1)
	p.log.Error("leasebus: handler ignores its timeout and is abandoned", "queue", l.Queue, "type", l.Type, "id", l.ID,
		"attempt", l.Attempt, "timeout", q.policy.Timeout, "abandoned", stuck)
	err := errors.Join(l.run.ctx.endedBy(), errors.New("the handler did not return"))
	st := decide(q.policy, p.result(l, err))
	st.Lease, st.state.err = l, err
	q.leaveSlot()
	l.run.session.settle(st)
	p.leave(q, replace)
}

// leave takes a worker that cannot take the next lease out of the count, and hires another if asked.
func (p *Processor) leave(q *queue, replace bool) {
	if replace {
		p.hire()
	}
	p.dispatcher.finished(q)
	p.workers.Done()
}

// rejoin is for a worker whose abandoned handler has returned after all: false if it is not needed any more.
func (p *Processor) rejoin(l *Lease) bool {
	p.stats.abandonedReturned.Add(1)
	p.abandoned.Add(-1)
	if l.run.replaced.Load() {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state != processorRunning {
		return false
	}
	p.workers.Add(1)
	return true
}
