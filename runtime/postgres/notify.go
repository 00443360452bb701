package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Other processes are told of messages by notifications: the queue and the first position, so that their cursors go back
// to it. A notification is a hint; everything is found without it too, only later.

const (
	// After a notification the next one of this process waits for notifyForOne for each arrival that it told of, at most
	// notifySpacing: what comes meanwhile shares it. So a lone message is told of at once, and a flood costs little.
	// Inside the publishing transactions they would queue for one lock of the server.
	notifyForOne, notifySpacing = 250 * time.Microsecond, 2 * time.Millisecond
	// notifyBound is the longest that sending may take.
	notifyBound = 5 * time.Second

	// notifySQL does not wait for the disk: a notification has nothing to lose.
	notifySQL = `SELECT pg_notify($1, hint), set_config('synchronous_commit', 'off', true) FROM unnest($2::text[]) AS hint`
)

// hint is a notification's payload: queue, segment, first position, microseconds until something is due, sender.
func (a arrival) hint(instance uint64) string {
	return fmt.Sprintf("%d:%d:%d:%d:%x", a.queue, a.seg, a.pos, a.due.Microseconds(), instance)
}

func parseHint(payload string) (a arrival, instance uint64, ok bool) {
	parts := strings.Split(payload, ":")
	const least = 5 // a later version may say more
	if len(parts) < least {
		return a, 0, false
	}
	queue, err1 := strconv.ParseInt(parts[0], 10, 32)
	seg, err2 := strconv.ParseUint(parts[1], 10, 16)
	pos, err3 := strconv.ParseInt(parts[2], 10, 64)
	due, err4 := strconv.ParseInt(parts[3], 10, 64)
	instance, err5 := strconv.ParseUint(parts[4], 16, 64)
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil ||
		seg >= segments || pos < 0 || due < 0 || due > int64(maxDue/time.Microsecond) {
		return a, 0, false
	}
	return arrival{int32(queue), segment(seg), pos, time.Duration(due) * time.Microsecond}, instance, true
}

// maxDue is as far ahead as anyone looks for what is due: farther means not now.
const maxDue = 24 * time.Hour

// notifier sends hints, gathered.
type notifier struct {
	in *Inbox

	mu      sync.Mutex
	pending arrivalSet
	added   int // to pending
	running bool
}

// arrivalSet has the earliest arrivals only.
type arrivalSet map[arrivalKey]arrival

// arrivalKey keeps what is due now and what will be apart, and the segments.
type arrivalKey struct {
	queue int32
	seg   segment
	later bool
}

func (s arrivalSet) add(a arrival) {
	key := arrivalKey{a.queue, a.seg, a.pos == 0}
	if have, ok := s[key]; ok {
		a.pos, a.due = min(a.pos, have.pos), min(a.due, have.due)
	}
	s[key] = a
}

func (n *notifier) add(a arrival) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.pending == nil {
		n.pending = make(arrivalSet)
	}
	n.pending.add(a)
	n.added++
	if !n.running {
		n.running = n.in.start(n.run)
	}
}

// run sends what is pending until there is nothing.
func (n *notifier) run() {
	for {
		hints, added := n.take()
		if len(hints) == 0 {
			return
		}
		n.send(hints)
		select {
		case <-time.After(min(time.Duration(added)*notifyForOne, notifySpacing)):
		case <-n.in.ctx.Done():
		}
	}
}

func (n *notifier) take() (hints []string, added int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range n.pending {
		hints = append(hints, a.hint(n.in.instance))
	}
	clear(n.pending)
	added, n.added = n.added, 0
	n.running = len(hints) > 0
	return hints, added
}

func (n *notifier) send(hints []string) {
	ctx, cancel := context.WithTimeout(context.Background(), notifyBound)
	defer cancel()
	err := n.in.caller.call(ctx, n.in.rest,
		func(b *pgx.Batch) { b.Queue(notifySQL, n.in.options.channel(), hints) },
		skip)
	if err != nil {
		n.in.options.log.Debug("leasebus: notification not sent, others will find the messages later", "error", err)
	}
}

// listener keeps a connection that receives hints.
type listener struct {
	in *Inbox
}

const (
	// proveBound is how long the proof may take that notifications arrive: behind a pooler in transaction mode the
	// server sends them to a connection that is someone else's.
	proveBound = 3 * time.Second
	// idleBound is how long a listener hears nothing before it proves again that it would. All that listen hear that.
	idleBound = 5 * time.Second

	listenFirst, listenMost = 100 * time.Millisecond, 10 * time.Second
	// deafWait is how long nobody tries to listen where notifications do not arrive.
	deafWait = 30 * time.Second
)

var (
	errUnheard = errors.New("a notification did not arrive in time")
	errDeaf    = errors.New("notifications do not arrive")
)

// run listens until Close, and comes back by itself.
func (l *listener) run() {
	in := l.in
	wait := listenFirst
	for in.ctx.Err() == nil {
		began := time.Now()
		err := l.listen(in.ctx)
		in.keeper.listening(false)
		if in.ctx.Err() != nil {
			return
		}
		if errors.Is(err, errDeaf) {
			in.options.log.Info("leasebus: notifications do not arrive here, as behind a pooler in transaction mode; polling instead",
				"schema", in.options.schema, "poll", in.options.poll)
			wait = deafWait
		} else {
			in.options.log.Warn("leasebus: listening for notifications failed, polling meanwhile", "schema", in.options.schema, "error", err)
			if time.Since(began) > listenMost {
				wait = listenFirst
			}
		}
		select {
		case <-time.After(wait):
		case <-in.ctx.Done():
		}
		wait = min(2*wait, listenMost)
	}
}

func (l *listener) listen(ctx context.Context) error {
	in := l.in
	config := in.options.listen.Copy()
	if prepare := in.options.prepareListen; prepare != nil {
		if err := prepare(ctx, config); err != nil {
			return err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer func() {
		bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(bound)
		in.caller.abandon(conn)
	}()
	channel := in.options.channel()
	if err := bounded(ctx, func(ctx context.Context) error {
		_, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{channel}.Sanitize())
		return err
	}); err != nil {
		return err
	}
	if err := l.prove(ctx, conn, channel); errors.Is(err, errUnheard) {
		if err := bounded(ctx, conn.Ping); err != nil {
			return err
		}
		return errDeaf
	} else if err != nil {
		return err
	}
	in.keeper.listening(true)
	for {
		bound, cancel := context.WithTimeout(ctx, idleBound)
		heard, err := conn.WaitForNotification(bound)
		cancel()
		switch {
		case err == nil:
			l.hear(heard.Payload)
		case ctx.Err() != nil:
			return ctx.Err()
		case bound.Err() == nil || conn.IsClosed():
			return err
		default: // it may be dead, or of a server where nobody publishes any more
			if err := l.prove(ctx, conn, channel); err != nil {
				return err
			}
		}
	}
}

// bounded asks in bounded time what a connection that is there answers at once.
func bounded(ctx context.Context, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, pingBound)
	defer cancel()
	return ask(ctx)
}

// prove sends a notification by another connection and waits for it.
func (l *listener) prove(ctx context.Context, conn *pgx.Conn, channel string) error {
	in := l.in
	bound, cancel := context.WithTimeout(ctx, proveBound)
	defer cancel()
	proof := fmt.Sprintf("proof:%x", in.instance)
	if err := in.caller.call(bound, in.rest, func(b *pgx.Batch) { b.Queue(notifySQL, channel, []string{proof}) }, skip); err != nil {
		return err
	}
	for {
		heard, err := conn.WaitForNotification(bound)
		switch {
		case err == nil && heard.Payload == proof:
			return nil
		case err == nil:
			l.hear(heard.Payload)
		case ctx.Err() == nil && bound.Err() != nil:
			return errUnheard
		default:
			return err
		}
	}
}

func (l *listener) hear(payload string) {
	if a, instance, ok := parseHint(payload); ok && instance != l.in.instance {
		l.in.keeper.arrived(a)
	}
}
