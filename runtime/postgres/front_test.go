package postgres_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

func someOrders(n int) []leasebus.Outgoing {
	batch := make([]leasebus.Outgoing, n)
	for i := range batch {
		batch[i] = order("m")
	}
	return batch
}

// hears waits until an inbox is told what others publish. Until then its claims jump over nothing, and then look at
// everything once.
func hears(t *testing.T, in *postgres.Inbox) {
	t.Helper()
	eventually(t, 20*time.Second, "notifications come", func() error { return wokenBy(t, in, "notifications") })
}

// Consumers that take turns do not walk over what the others have leased meanwhile.
func TestFront_S2_NobodyStepsOverWhatOthersHold(t *testing.T) {
	t.Parallel()
	const consumers, rounds, batch = 8, 10, 100
	const messages = consumers * rounds * batch
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN(), postgres.WithSweep(time.Hour))
	send(t, inbox, someOrders(messages)...)
	all := make([]*consumer, consumers)
	for i := range all {
		all[i] = subscribe(t, inbox, ordersPolicy())
	}
	hears(t, inbox)
	for range rounds {
		for _, c := range all {
			c.take(batch)
		}
	}
	if err := inbox.Close(); err != nil { // sessions that end report what they read
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "the sessions have ended", func() error { return sessionsEnded(t, pg) })
	read := testservers.Value[int64](t, pg, `SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE relname LIKE 'ready%'`)
	if most := int64(messages * 3 / 2); read < messages || read > most { // half of it for first claims, which look at everything
		t.Errorf("%d index entries were read for %d messages, want at most %d", read, messages, most)
	}
}

// What is committed behind the front is found by whoever hears of it, however far that is behind the front itself.
func TestFront_S9_WhatCommitsLateIsNotJumpedOver(t *testing.T) {
	t.Parallel()
	const late = 300
	pg := migrated(t, testservers.Postgres(t))
	inbox := openInbox(t, pg.DSN(), postgres.WithSweep(time.Hour))
	slow, fast := subscribe(t, inbox, ordersPolicy()), subscribe(t, inbox, ordersPolicy())
	hears(t, inbox)
	send(t, inbox, someOrders(10)...)
	slow.take(5)

	tx, err := pg.Pool(t).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	send(t, inbox.Tx(tx), someOrders(late)...)
	send(t, inbox, someOrders(1000)...)
	fast.take(905)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range (late + 100) / 50 {
		slow.take(50)
	}
	for _, c := range []*consumer{slow, fast} {
		if n, err := c.Lease(t.Context(), make([]leasebus.Lease, 50)); n > 0 || err != nil {
			t.Errorf("%d more messages, %v", n, err)
		}
	}
}

// Queues that share a front do not take the other's for their own.
func TestFront_S55_QueuesThatShareOne(t *testing.T) {
	t.Parallel()
	const queues, rounds, batch = 24, 4, 5
	inbox := openInbox(t, migrated(t, testservers.Postgres(t)).DSN(), postgres.WithSweep(time.Hour))
	consumers := make([]*consumer, queues)
	for i := range consumers {
		policy := ordersPolicy(func(p *leasebus.Policy) { p.Queue = fmt.Sprint("queue ", i) })
		consumers[i] = subscribe(t, inbox, policy)
		messages := someOrders(rounds * batch)
		for m := range messages {
			messages[m].Queue = policy.Queue
		}
		send(t, inbox, messages...)
	}
	for range rounds {
		for i, c := range consumers {
			for _, l := range c.take(batch) {
				if want := fmt.Sprint("queue ", i); l.Queue != want {
					t.Fatalf("a message of %q came from %q", l.Queue, want)
				}
			}
		}
	}
}
