package leasebus

import "sync/atomic"

// ProcessorStats counts what a processor has done since it was made.
type ProcessorStats struct {
	// Leased counts leases taken; Succeeded, Failed (retried later), Deferred, Released, DeadLettered and Discarded are
	// the settlements that the store confirmed.
	Leased, Succeeded, Failed, Deferred, Released, DeadLettered, Discarded int64
	// LeaseLost counts leases known to be lost before they were settled.
	LeaseLost int64
	// PersistSkipped counts settlements that the store refused and that were known to be too late, PersistRejected those
	// that it refused unexpectedly: a newer lease had the message.
	PersistSkipped, PersistRejected int64
	// SettleUnknown counts settlements of which it is not known whether they were stored.
	SettleUnknown int64
	// Abandoned counts handlers that did not return when they had to; AbandonedReturned those of them that did later.
	Abandoned, AbandonedReturned int64
	// LeaseErrors, RenewErrors and SettleErrors count failed calls to the store.
	LeaseErrors, RenewErrors, SettleErrors int64
}

type processorStats struct {
	held                                                                   atomic.Int64 // a gauge: leased, not ended
	leased, succeeded, failed, deferred, released, deadLettered, discarded atomic.Int64
	leaseLost, persistSkipped, persistRejected, settleUnknown              atomic.Int64
	abandoned, abandonedReturned                                           atomic.Int64
	leaseErrors, renewErrors, settleErrors                                 atomic.Int64
}

// Stats returns the counters. They are read one by one: a message may be between two of them.
func (p *Processor) Stats() ProcessorStats {
	s := &p.stats
	return ProcessorStats{
		Leased: s.leased.Load(), Succeeded: s.succeeded.Load(), Failed: s.failed.Load(), Deferred: s.deferred.Load(),
		Released: s.released.Load(), DeadLettered: s.deadLettered.Load(), Discarded: s.discarded.Load(),
		LeaseLost: s.leaseLost.Load(), PersistSkipped: s.persistSkipped.Load(), PersistRejected: s.persistRejected.Load(),
		SettleUnknown: s.settleUnknown.Load(), Abandoned: s.abandoned.Load(), AbandonedReturned: s.abandonedReturned.Load(),
		LeaseErrors: s.leaseErrors.Load(), RenewErrors: s.renewErrors.Load(), SettleErrors: s.settleErrors.Load(),
	}
}
