package postgres

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// commitsSQL tells what has become of transactions, and tells others what those have published that have committed. Those
// of too long ago are not known any more.
const commitsSQL = `SELECT u.xid, x.status, CASE WHEN x.status NOT IN ('in progress', 'aborted') THEN pg_notify($1, u.hint) END,
 set_config('synchronous_commit', 'off', true)
 FROM unnest($2::text[], $3::text[]) AS u(xid, hint), LATERAL (SELECT coalesce(pg_xact_status(u.xid::xid8), '')) AS x(status)`

const (
	// A transaction that has published is looked for after commitFirst, then whenever a quarter of its time has passed
	// again, at least every commitMost.
	commitFirst, commitMost = time.Millisecond, 100 * time.Millisecond
	// commitSpacing is the least time between two looks: what is to be looked for meanwhile shares the next.
	commitSpacing = 2 * time.Millisecond
	// commitBound is the longest that looking may take.
	commitBound = 5 * time.Second
)

// commits announces what transactions of callers have published, when they have committed. It looks for that aside: a
// notification inside the transaction would make its commit wait for those of all others that notify. What is announced
// is a hint; when the process ends, it is forgotten.
type commits struct {
	in *Inbox

	mu      sync.Mutex
	open    map[string]*awaited // by the transaction's number
	running bool
	looked  time.Time
	lookAt  time.Time
	earlier chan struct{} // lookAt has become earlier
}

// awaited is what an open transaction has published. What is due later counts from its begin.
type awaited struct {
	came              arrivalSet
	begin, last, next time.Time
}

func (c *commits) init(in *Inbox) {
	c.in, c.open, c.earlier = in, make(map[string]*awaited), make(chan struct{}, 1)
}

// await takes what a transaction has published just now.
func (c *commits) await(transaction string, came []arrival) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	tx := c.open[transaction]
	if tx == nil {
		tx = &awaited{came: make(arrivalSet, len(came)), begin: now}
		c.open[transaction] = tx
	}
	for _, a := range came {
		a.due += now.Sub(tx.begin)
		tx.came.add(a)
	}
	tx.last, tx.next = now, now.Add(commitFirst)
	if !c.running {
		c.lookAt = tx.next
		c.running = c.in.start(c.run)
	} else if tx.next.Before(c.lookAt) && c.lookAt.After(c.looked.Add(commitSpacing)) {
		c.lookAt = tx.next
		select {
		case c.earlier <- struct{}{}:
		default:
		}
	}
}

// run looks until nothing is open.
func (c *commits) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		wait, open := c.wait()
		if !open {
			return
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
			c.look()
		case <-c.earlier:
		case <-c.in.ctx.Done():
			return
		}
	}
}

// wait says when to look next; false when there is nothing to look for.
func (c *commits) wait() (time.Duration, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running = len(c.open) > 0
	return max(time.Until(c.lookAt), time.Until(c.looked.Add(commitSpacing)), 0), c.running
}

// look asks what has become of those transactions that are to be looked for now.
func (c *commits) look() {
	ctx, cancel := context.WithTimeout(c.in.ctx, commitBound)
	defer cancel()
	due, hints := c.due()
	status := make(map[string]string, len(due))
	err := c.in.caller.call(ctx, c.in.rest,
		func(b *pgx.Batch) { b.Queue(commitsSQL, c.in.options.channel(), due, hints) },
		func(results pgx.BatchResults) error {
			return each(results, func(r *row) error {
				status[string(r.text(0))] = string(r.text(1))
				return r.err
			})
		})
	if err != nil {
		c.in.options.log.Debug("leasebus: not known whether transactions have committed, their messages may be found later", "error", err)
	}
	if refusedByServer(sqlState(err)) { // one of them is no transaction of this server's
		for _, transaction := range due {
			status[transaction] = ""
		}
	}
	for _, a := range c.ended(status) {
		c.in.keeper.arrived(a)
	}
}

// due are the transactions to look for, one for each of the hints that others are to get.
func (c *commits) due() (transactions, hints []string) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.looked, c.lookAt = now, now.Add(commitMost)
	for transaction, tx := range c.open {
		if !tx.next.After(now.Add(commitSpacing)) {
			for _, a := range tx.arrivals(now) {
				transactions, hints = append(transactions, transaction), append(hints, a.hint(c.in.instance))
			}
			tx.next = now.Add(min(max(now.Sub(tx.last)/4, commitFirst), commitMost))
		}
		if tx.next.Before(c.lookAt) {
			c.lookAt = tx.next
		}
	}
	return transactions, hints
}

// arrivals are what the transaction has published, as of now.
func (tx *awaited) arrivals(now time.Time) (came []arrival) {
	for _, a := range tx.came {
		a.due = max(a.due-now.Sub(tx.begin), 0)
		came = append(came, a)
	}
	return came
}

// ended forgets the transactions that are not open any more, and returns what those have published that have committed.
func (c *commits) ended(status map[string]string) (came []arrival) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for transaction, is := range status {
		tx := c.open[transaction]
		if is == "in progress" || tx.last.After(c.looked) { // what came after the question was not told with it
			continue
		}
		delete(c.open, transaction)
		if is == "aborted" {
			continue
		}
		came = append(came, tx.arrivals(now)...)
	}
	return came
}
