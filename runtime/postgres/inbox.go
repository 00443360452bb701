package postgres

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var (
	_ leasebus.Publisher = (*Inbox)(nil)
	_ leasebus.Source    = (*Inbox)(nil)
	_ leasebus.Operator  = (*Inbox)(nil)
)

// ErrClosed is what an [Inbox] answers after Close.
var ErrClosed = errors.New("postgres: the inbox is closed")

// Inbox keeps messages in one schema of a database. It may be used concurrently. Make one with [NewInbox] for each
// process and schema, and close it.
type Inbox struct {
	options options
	caller  caller
	sql     statements

	// Connections of each kind: none of them waits for the others, nor for the caller's pool.
	claims, settles, renewals, rest *pgxpool.Pool

	publisher publisher
	commits   commits
	notifier  notifier
	keeper    keeper
	pruner    pruner
	ring      ring

	// instance tells this inbox's own notifications apart.
	instance uint64

	mu     sync.Mutex
	queues map[string]int32
	closed bool

	// ctx ends with Close; everything that runs in the background hangs on it.
	ctx  context.Context //nolint:containedctx // of the inbox itself
	quit context.CancelFunc
	jobs sync.WaitGroup
}

// statements have their identifiers filled in.
type statements struct {
	in                                                                                 [segments]segmentStatements
	completeCold, completeColdKept                                                     string
	insert, insertTx                                                                   inserts
	insertOneTx                                                                        string
	promote, nextDue, head, look, sizes, advance, pruneDead, pruneHistory              string
	findQueue, addQueue                                                                string
	listDead, listDeadByID, listCompleted, lastOf, findDead, requeue, discard, whereIs string
	replace, stats                                                                     string
}

// segmentStatements are those about one segment.
type segmentStatements struct {
	claim, reclaim, renew                string
	complete, completeBusy, move, verify string
	completeTx, completeTxKept, lockTx   string
	empty, lock, truncate, evacuate      string
}

func statementsOf(n names) statements {
	s := n.render
	all := statements{
		completeCold: s(completeColdSQL), completeColdKept: s(completeColdKeptSQL),
		insert: insertsOf(n, arrivalsSQL), insertTx: insertsOf(n, arrivalsTxSQL), insertOneTx: s(insertOneTxSQL),
		promote: s(promoteSQL), nextDue: s(nextDueSQL), head: s(headSQL), sizes: s(sizesSQL), advance: s(advanceSQL),
		findQueue: s(findQueueSQL), addQueue: s(addQueueSQL),
		listDead: s(listDeadSQL), listDeadByID: s(listDeadByIDSQL), listCompleted: s(listCompletedSQL), lastOf: s(lastDeadSQL),
		findDead: s(findDeadSQL), requeue: s(requeueSQL), discard: s(discardSQL),
		replace: s(replaceSQL), whereIs: s(whereIsSQL),
		stats:        s(statsSQL),
		pruneDead:    s(strings.NewReplacer("{table}", "{schema}.dead", "{time}", "dead_at").Replace(pruneSQL)),
		pruneHistory: s(strings.NewReplacer("{table}", "{schema}.history", "{time}", "completed_at").Replace(pruneSQL)),
	}
	var looks []string
	for seg := range segment(segments) {
		s := func(sql string) string { return n.renderFor(seg, sql) }
		all.in[seg] = segmentStatements{
			claim: s(claimSQL), reclaim: s(reclaimSQL), renew: s(renewSQL),
			complete: s(completeSQL), completeBusy: s(completeBusySQL), move: s(moveSQL), verify: s(verifySQL),
			completeTx: s(completeTxSQL), completeTxKept: s(completeTxKeptSQL), lockTx: s(lockTxSQL),
			empty: s(emptySQL), lock: s(lockSQL), truncate: s(truncateSQL), evacuate: s(evacuateSQL),
		}
		looks = append(looks, s(lookSQL))
	}
	all.look = strings.Join(looks, " UNION ALL ")
	return all
}

// NewInbox opens an inbox in the database that pool is connected to. It changes nothing there: a schema that is missing,
// too old, or too new for this version is an error that says what to do.
//
// The inbox opens connections of its own; pool is not used after NewInbox has returned, and may be closed.
func NewInbox(ctx context.Context, pool *pgxpool.Pool, opts ...Option) (*Inbox, error) {
	o, err := optionsOf(opts)
	if err != nil {
		return nil, err
	}
	if pool == nil {
		return nil, errors.New("postgres: new inbox: the pool is nil")
	}
	config := pool.Config()
	if o.own != nil {
		config = o.own
		if given := o.own.ConnConfig.ConnString(); poolSizeGiven(given) {
			o.connections = int(o.own.MaxConns)
		}
	}
	if o.connections < minConnections {
		return nil, fmt.Errorf("postgres: new inbox: pool_max_conns %d is too small; the inbox needs %d at least", o.connections, minConnections)
	}
	if o.listen == nil {
		o.listen, o.prepareListen = config.ConnConfig.Copy(), config.BeforeConnect
	}
	boundConnecting(o.listen)
	in := &Inbox{options: o, sql: statementsOf(o.names), instance: rand.Uint64(), //nolint:gosec // tells inboxes apart, no secret
		queues: make(map[string]int32)}
	in.caller.closed, in.caller.elsewhere = make(chan struct{}), config.ConnConfig.ValidateConnect != nil
	in.ctx, in.quit = context.WithCancel(context.Background())
	if err := in.connect(ctx, config); err != nil {
		in.closePools()
		return nil, err
	}
	in.publisher.in, in.notifier.in = in, in
	in.commits.init(in)
	in.keeper.init(in)
	in.pruner.init(in)
	in.ring.init(in)
	return in, nil
}

// connect makes the pools and looks at the database once.
func (in *Inbox) connect(ctx context.Context, config *pgxpool.Config) error {
	for _, p := range []struct {
		pool **pgxpool.Pool
		size int
	}{
		{&in.renewals, 1},
		{&in.settles, in.options.connections / 4},
		{&in.claims, in.options.connections / 4},
		{&in.rest, in.options.connections - 1 - 2*(in.options.connections/4)},
	} {
		own := config.Copy()
		own.MaxConns, own.MinConns, own.MinIdleConns = int32(p.size), 0, 0 //nolint:gosec // an option of a sane size
		own.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			takeArrays(conn)
			if config.AfterConnect == nil {
				return nil
			}
			return config.AfterConnect(ctx, conn)
		}
		boundConnecting(own.ConnConfig)
		boundPings(own)
		pool, err := pgxpool.NewWithConfig(ctx, own)
		if err != nil {
			return fmt.Errorf("postgres: new inbox: %w", err)
		}
		*p.pool = pool
		in.caller.pools = append(in.caller.pools, pool)
	}
	isolation, err := checkVersion(ctx, in.rest, in.options.names)
	if err != nil {
		return err
	}
	in.caller.framed.Store(isolation != "read committed")
	return nil
}

func (in *Inbox) closePools() {
	for _, pool := range in.caller.pools {
		pool.Close()
	}
	close(in.caller.closed)
	in.caller.ending.Wait()
}

// Close lets go of everything: feeds answer errors from here on, leases that are not settled expire, a publish under
// way is waited for. Close the processors first. Closing twice is no error.
func (in *Inbox) Close() error {
	in.mu.Lock()
	first := !in.closed
	in.closed = true
	in.mu.Unlock()
	if !first {
		in.jobs.Wait()
		return nil
	}
	in.publisher.close()
	in.quit()
	in.jobs.Wait()
	in.closePools()
	return nil
}

// start runs job in the background until Close; false if the inbox is closed.
func (in *Inbox) start(job func()) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return false
	}
	in.jobs.Go(job)
	return true
}

const (
	findQueueSQL = `SELECT id FROM {schema}.queue WHERE name = $1`
	addQueueSQL  = `INSERT INTO {schema}.queue (name) VALUES ($1) ON CONFLICT (name) DO NOTHING`
)

// lookup finds a queue's number; ok = false if nobody has registered it.
func (in *Inbox) lookup(ctx context.Context, name string) (id int32, ok bool, err error) {
	in.mu.Lock()
	id, ok = in.queues[name]
	in.mu.Unlock()
	if ok {
		return id, true, nil
	}
	err = in.caller.call(ctx, in.rest, func(b *pgx.Batch) { b.Queue(in.sql.findQueue, name) }, func(results pgx.BatchResults) error {
		ok = false
		return each(results, func(r *row) error {
			id, ok = r.int32(0), true
			return r.err
		})
	})
	if err != nil || !ok {
		return 0, false, err
	}
	in.mu.Lock()
	in.queues[name] = id
	in.mu.Unlock()
	return id, true, nil
}

// register finds a queue's number or gives it one, on a connection of the inbox: in a caller's transaction the new row
// would lock out everyone else who means this queue (S62).
func (in *Inbox) register(ctx context.Context, name string) (int32, error) {
	id, ok, err := in.lookup(ctx, name)
	if err != nil || ok {
		return id, err
	}
	err = in.caller.call(ctx, in.rest, func(b *pgx.Batch) { b.Queue(in.sql.addQueue, name) }, skip)
	if err != nil {
		return 0, err
	}
	id, ok, err = in.lookup(ctx, name)
	if err == nil && !ok {
		err = fmt.Errorf("queue %q was registered and is not there", name)
	}
	return id, err
}

// poolSizeGiven reports whether a connection string says how large the pool is to be.
func poolSizeGiven(connString string) bool { return strings.Contains(connString, "pool_max_conns") }
