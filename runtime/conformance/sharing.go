package conformance

import (
	"context"
	"sync"
	"sync/atomic"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var sharingCases = []testCase{
	{name: "S55_workers_run_in_parallel_up_to_the_concurrency", run: workersRunInParallel},
	{name: "S55_flooded_queue_leaves_another_its_share", run: floodedQueueShares},
	{name: "S55_handler_keeps_to_its_own_limit", run: handlerKeepsToItsLimit},
	{name: "S55_idle_queue_leaves_all_workers_to_another", run: idleQueueLeavesWorkers},
}

func workersRunInParallel(t *trial) {
	t.publishMany(10)
	g := t.newGate()
	w := t.work(func(context.Context, leasebus.Delivery, string) error { <-g.open; return nil }, leasebus.WithConcurrency(5))
	w.untilRuns(5)
	want(t, "running handlers", w.InFlight(), 5)
	want(t, "handler calls while none returns", len(w.untilRuns(5)), 5)
	g.lift()
	w.untilHandled(10)
	want(t, "running handlers at the end", w.InFlight(), 0)
	want(t, "held at the end", w.Held(), 0)
}

func floodedQueueShares(t *trial) {
	const flood, few = 400, 20
	w := t.newWorker(t.store, leasebus.WithConcurrency(4))
	var floodDone, fewDone, floodWhenFewWereDone atomic.Int64
	work := func(done *atomic.Int64) handlerFunc {
		return func(context.Context, leasebus.Delivery, string) error {
			t.pause()
			if done.Add(1) == few && done == &fewDone {
				floodWhenFewWereDone.Store(floodDone.Load())
			}
			return nil
		}
	}
	w.register(work(&floodDone))
	second := w.registerSecond(work(&fewDone))
	t.publishMany(flood)
	second.publishMany(few)
	w.start()
	w.untilHandled(flood + few)
	if n := floodWhenFewWereDone.Load(); n > flood/2 {
		t.Errorf("when the %d messages of the small queue were handled, the flooded one stood at %d of %d: it took the other's share", few, n, flood)
	}
}

func handlerKeepsToItsLimit(t *trial) {
	t.publishMany(40)
	w := t.newWorker(t.store, leasebus.WithConcurrency(8))
	var (
		mu            sync.Mutex
		now, most     int
		second        *trial
		otherFinished atomic.Int64
	)
	w.register(func(context.Context, leasebus.Delivery, string) error {
		mu.Lock()
		now++
		most = max(most, now)
		mu.Unlock()
		t.pause()
		mu.Lock()
		now--
		mu.Unlock()
		return nil
	}, leasebus.MaxConcurrency(3))
	second = w.registerSecond(func(context.Context, leasebus.Delivery, string) error { otherFinished.Add(1); return nil })
	second.publishMany(40)
	w.start()
	w.untilHandled(80)
	want(t, "most handlers at once, with MaxConcurrency(3)", most, 3)
	want(t, "messages of the other handler", otherFinished.Load(), 40)
}

func idleQueueLeavesWorkers(t *trial) {
	w := t.newWorker(t.store, leasebus.WithConcurrency(6))
	g := t.newGate()
	hold := func(context.Context, leasebus.Delivery, string) error { <-g.open; return nil }
	w.register(hold)
	w.registerSecond(hold)
	t.publishMany(6)
	w.start()
	w.untilRuns(6)
	g.lift()
	w.untilSettled(6)
}
