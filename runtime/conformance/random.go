package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

var randomCases = []testCase{
	{name: "S1_S2_S9_S12_S33_random_workers_end_each_message_once", needs: ownLease | oneDeadLetter | operate, brief: true, run: randomWorkers},
	{name: "S6_S12_S16_S25_random_processors_over_a_failing_store", needs: ownLease | oneDeadLetter | operate, brief: true, run: randomProcessors},
}

// seed is printed if the case fails; Backend.Seed repeats it.
func (t *trial) seed() uint64 {
	seed := t.backend.Seed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("random choices made from Backend.Seed %d", seed)
	return seed
}

// lifeOf is everything that is known of one message. A run of many workers is judged by what their calls answered.
type lifeOf struct {
	value string
	// newest is the newest generation whose Lease has returned.
	newest int64
	// leases by generation, with the settlement that was accepted for it, if any.
	leases map[int64]*leaseOf
	// ended: completed, discarded, or a dead letter now.
	ended bool
}

type leaseOf struct {
	attempt  int
	accepted *leasebus.SettlementKind
	started  bool
	// requeued: the dead letter that this lease made was sent back.
	requeued bool
}

// checker collects what the workers saw.
type checker struct {
	t     *trial
	mu    sync.Mutex
	lives map[leasebus.ID]*lifeOf
	left  int
}

// holding is a lease in a worker's hands.
type holding struct {
	*leasebus.Lease
	// asked is when the lease, or its last renewal, was asked for.
	asked time.Time
}

// leased notes a lease.
func (c *checker) leased(l *leasebus.Lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	life := c.lives[l.ID]
	if life == nil {
		c.t.Errorf("leased %v, which was not published", l.ID)
		return
	}
	if string(l.Payload) != string(payloadOf(c.t, life.value)) {
		c.t.Errorf("leased %v with a payload that is not its own", l.ID)
	}
	if life.leases[l.Generation] != nil {
		c.t.Errorf("generation %d of %v was leased twice", l.Generation, l.ID)
	}
	life.leases[l.Generation] = &leaseOf{attempt: l.Attempt}
	life.newest = max(life.newest, l.Generation)
}

// stale reports whether a newer lease than l has been seen.
func (c *checker) stale(l *leasebus.Lease) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lives[l.ID].newest > l.Generation
}

// settled judges the answer to a settlement: stale is what was known before it was sent.
func (c *checker) settled(s leasebus.Settlement, h holding, stale bool, r leasebus.Result) {
	live := time.Since(h.asked) < c.t.lease // the lease cannot have ended before the answer
	c.mu.Lock()
	defer c.mu.Unlock()
	life := c.lives[s.Lease.ID]
	record := life.leases[s.Lease.Generation]
	switch {
	case r == leasebus.ResultLost && live && !stale && record.accepted == nil:
		c.t.Errorf("%v of %v, generation %d, was refused while the lease was live", s.Kind, s.Lease.ID, s.Lease.Generation)
		return
	case r == leasebus.ResultLost:
		return
	case r != leasebus.ResultOK:
		c.t.Errorf("%v of %v: got %s, want OK or Lost", s.Kind, s.Lease.ID, resultName(r))
		return
	case stale:
		c.t.Errorf("stale %v of %v was accepted: generation %d, a newer lease had been given", s.Kind, s.Lease.ID, s.Lease.Generation)
	case record.accepted != nil:
		c.t.Errorf("two settlements of %v, generation %d, were accepted: %v, then %v", s.Lease.ID, s.Lease.Generation, *record.accepted, s.Kind)
	}
	record.accepted, record.started = &s.Kind, s.Started
	if terminal(s.Kind) {
		if life.ended {
			c.t.Errorf("%v ended twice, by %v the second time", s.Lease.ID, s.Kind)
		}
		life.ended = true
		c.left--
	}
}

func terminal(k leasebus.SettlementKind) bool {
	return k == leasebus.SettleComplete || k == leasebus.SettleDeadLetter || k == leasebus.SettleDiscard
}

// knows reports whether the answer to the settlement that dead-lettered a message was noted.
func (c *checker) knows(id leasebus.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lives[id].ended
}

// requeued notes that a dead letter was sent back. Whoever dead-lettered it had the newest generation.
func (c *checker) requeued(d leasebus.DeadLetter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	life := c.lives[d.ID]
	for generation, l := range life.leases {
		if l.accepted != nil && *l.accepted == leasebus.SettleDeadLetter && !l.requeued && generation <= d.Generation {
			l.requeued = true
			life.ended = false
			c.left++
			return
		}
	}
	c.t.Errorf("requeued %v, of which no dead letter is known", d.ID)
}

// judge replays every message in the order of its generations.
func (c *checker) judge() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, life := range c.lives {
		generations := make([]int64, 0, len(life.leases))
		for g := range life.leases {
			generations = append(generations, g)
		}
		slices.Sort(generations)
		spent := 0
		for i, g := range generations {
			l := life.leases[g]
			if l.attempt != spent+1 {
				c.t.Errorf("%v, generation %d: attempt %d, want %d after what became of the leases before", id, g, l.attempt, spent+1)
			}
			spent = l.attempt
			if l.accepted == nil {
				continue
			}
			switch kind := *l.accepted; {
			case kind == leasebus.SettleDefer || kind == leasebus.SettleRelease:
				spent--
			case l.requeued:
				spent = 0
			case terminal(kind) && i < len(generations)-1:
				c.t.Errorf("%v was leased again (generation %d) after its %v (generation %d)", id, generations[i+1], kind, g)
			}
		}
		if !life.ended {
			c.t.Errorf("%v has not ended", id)
		}
	}
}

func (c *checker) open() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.left
}

// randomWorkers is several workers that complete, retry, defer, release, dead-letter, abandon, come late and renew as
// the dice fall, with operators among them. Nothing may end twice, no stale settlement may count, nothing may be stuck.
func randomWorkers(t *trial) {
	const messages, workers = 120, 6
	seed := t.seed()
	c := &checker{t: t, lives: make(map[leasebus.ID]*lifeOf), left: messages}
	var done sync.WaitGroup
	out := make([]leasebus.Outgoing, messages)
	for i := range out {
		value := fmt.Sprint("message ", i)
		out[i] = t.outgoing(value)
		c.lives[out[i].ID] = &lifeOf{value: value, leases: make(map[int64]*leaseOf)}
	}
	t.send(out...)
	end := time.Now().Add(12 * t.lease)
	for i := range workers {
		// Pairs of workers share a label, so that only the generation tells them apart.
		d := &dice{Rand: rand.New(rand.NewPCG(seed, uint64(i))), c: c, k: t.subscribeAs(fmt.Sprint("worker#", i/2))}
		done.Go(func() { d.work(end) })
	}
	done.Go(func() { c.operate(rand.New(rand.NewPCG(seed, workers)), end) })
	done.Wait()
	if t.Failed() {
		return
	}
	// What is left is finished by one who makes no mistakes: what he does not find is stuck.
	k := t.subscribe()
	t.until("every message had ended", func() bool {
		for _, l := range k.lease(50) {
			c.leased(l)
			s := leasebus.Settlement{Lease: l}
			c.settled(s, holding{l, time.Now()}, false, k.settle(s)[0])
		}
		return c.open() == 0
	})
	t.nothingLeft()
	c.judge()
	dead := make(map[leasebus.ID]bool)
	for _, d := range t.deadLetters(leasebus.Filter{}) {
		if dead[d.ID] {
			t.Errorf("%v is two dead letters", d.ID)
		}
		dead[d.ID] = true
	}
	for id, life := range c.lives {
		last := life.leases[life.newest]
		isDead := last.accepted != nil && *last.accepted == leasebus.SettleDeadLetter
		want(t, fmt.Sprintf("%v is a dead letter", id), dead[id], isDead)
	}
}

// operate requeues dead letters now and then.
func (c *checker) operate(r *rand.Rand, end time.Time) {
	for time.Now().Before(end) && !c.t.Failed() {
		letters, err := c.t.store.DeadLetters(c.t.ctx, c.t.queue, leasebus.Filter{}, "", 10)
		if err != nil {
			c.t.Errorf("dead letters: %v", err)
			return
		}
		for _, d := range letters {
			if r.IntN(3) > 0 {
				continue
			}
			if !c.knows(d.ID) {
				continue // the one who sent its settlement is to speak first
			}
			done, err := c.t.store.Requeue(c.t.ctx, c.t.queue, []leasebus.DeadLetterRef{refOf(d)}, "operator")
			if err != nil || len(done) != 1 || done[0] != leasebus.DispositionDone {
				c.t.Errorf("requeue of %v: got %v, %v, want it done: there is one operator", d.ID, done, err)
				return
			}
			c.requeued(d)
		}
		time.Sleep(time.Duration(r.Int64N(int64(c.t.lease))))
	}
}

// dice is a worker that does not know what it does.
type dice struct {
	*rand.Rand
	c    *checker
	k    *consumer
	held []holding
	// forgotten are leases that it gave no sign of for a while: it comes back to some of them, too late.
	forgotten []holding
}

func (d *dice) work(end time.Time) {
	lease := d.c.t.lease
	for time.Now().Before(end) && !d.c.t.Failed() {
		switch d.IntN(4) {
		case 0:
			d.lease()
		case 1:
			d.renew()
		case 2:
			d.settle(&d.held)
		case 3:
			d.settle(&d.forgotten)
		}
		d.forget()
		time.Sleep(time.Duration(d.Int64N(int64(lease / 8))))
	}
}

func (d *dice) lease() {
	asked := time.Now()
	dst := make([]leasebus.Lease, 1+d.IntN(8))
	n, err := d.k.Lease(d.c.t.ctx, dst)
	if err != nil {
		d.c.t.Errorf("lease: %v", err)
	}
	for i := range n {
		d.c.leased(&dst[i])
		d.held = append(d.held, holding{&dst[i], asked})
	}
}

func (d *dice) forget() {
	for len(d.held) > 0 && d.IntN(3) == 0 {
		d.forgotten = append(d.forgotten, d.pick(&d.held))
	}
}

func (d *dice) pick(from *[]holding) holding {
	i := d.IntN(len(*from))
	h := (*from)[i]
	*from = slices.Delete(*from, i, i+1)
	return h
}

func (d *dice) renew() {
	if len(d.held) == 0 {
		return
	}
	asked := time.Now()
	batch := make([]leasebus.Renewal, len(d.held))
	stale := make([]bool, len(d.held))
	for i, h := range d.held {
		batch[i].Lease, stale[i] = h.Lease, d.c.stale(h.Lease)
	}
	if err := d.k.Renew(d.c.t.ctx, batch); err != nil {
		d.c.t.Errorf("renew: %v", err)
		return
	}
	kept := d.held[:0]
	for i, h := range d.held {
		live := time.Since(h.asked) < d.c.t.lease
		switch {
		case batch[i].Result == leasebus.ResultOK && stale[i]:
			d.c.t.Errorf("stale renewal of %v, generation %d, was accepted", h.ID, h.Generation)
		case batch[i].Result == leasebus.ResultOK:
			kept = append(kept, holding{h.Lease, asked})
		case batch[i].Result == leasebus.ResultBusy:
			kept = append(kept, h)
		case batch[i].Result == leasebus.ResultLost && live:
			d.c.t.Errorf("renewal of %v, generation %d, was refused while the lease was live", h.ID, h.Generation)
		}
	}
	d.held = kept
}

// settle ends some leases, each in its own way, in one batch.
func (d *dice) settle(from *[]holding) {
	var (
		batch []leasebus.Settlement
		held  []holding
		stale []bool
	)
	for len(*from) > 0 && len(batch) < 1+d.IntN(6) {
		h := d.pick(from)
		ends := d.c.t.everyEnd(h.Lease)
		s := ends[d.IntN(len(ends))]
		if s.Kind == leasebus.SettleRetry || s.Kind == leasebus.SettleDefer {
			s.Delay = time.Duration(d.Int64N(int64(d.c.t.lease / 2)))
		}
		batch, held, stale = append(batch, s), append(held, h), append(stale, d.c.stale(h.Lease))
	}
	if len(batch) == 0 {
		return
	}
	results, err := d.k.trySettle(batch...)
	if err != nil {
		d.c.t.Errorf("settle: %v", err)
		return
	}
	for i := range batch {
		d.c.settled(batch[i], held[i], stale[i], results[i])
		if d.IntN(4) == 0 { // and says it again later
			d.forgotten = append(d.forgotten, held[i])
		}
	}
}

// randomProcessors is several processors whose way to the store fails now and then, with handlers that answer as the
// dice fall. Each message has to end once; what a processor was told by the store has to be so.
func randomProcessors(t *trial) {
	const messages, processors = 200, 3
	seed := t.seed()
	t.policy.Retry = leasebus.FixedRetry(6, t.lease/20)
	t.policy.Timeout = 2 * t.lease
	ids := t.publishMany(messages)
	var (
		mu    sync.Mutex
		r     = rand.New(rand.NewPCG(seed, 0))
		calm  atomic.Bool
		nodes []*worker
		ways  []*unreliable
	)
	draw := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return r.IntN(n)
	}
	handle := func(ctx context.Context, _ leasebus.Delivery, _ string) error {
		if calm.Load() {
			return nil
		}
		timer := time.NewTimer(time.Duration(draw(int(t.lease) / 3)))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		switch draw(8) {
		case 0:
			return errors.New("no")
		case 1:
			return leasebus.Permanent(errors.New("never"))
		case 2:
			return leasebus.Defer(t.lease / 30)
		case 3:
			return leasebus.RetryAfter(t.lease/30, errors.New("later"))
		case 4:
			panic("no\x00")
		}
		return nil
	}
	for range processors {
		u := &unreliable{Source: t.store}
		w := t.newWorker(u, leasebus.WithConcurrency(4))
		w.register(handle)
		nodes, ways = append(nodes, w.start()), append(ways, u)
	}
	end := time.Now().Add(15 * t.lease)
	for time.Now().Before(end) {
		u := ways[draw(processors)]
		fault := []*atomic.Bool{&u.noLease, &u.noRenew, &u.noSettle, &u.lies, &u.mute}[draw(5)]
		fault.Store(true)
		time.Sleep(time.Duration(draw(int(t.lease) * 3 / 2)))
		fault.Store(false)
		if draw(4) == 0 {
			w := nodes[draw(processors)]
			w.Pause()
			time.Sleep(time.Duration(draw(int(t.lease) / 2)))
			w.Resume()
		}
	}
	calm.Store(true)
	t.nothingLeft()
	ended := make(map[leasebus.ID]int)
	unknown := 0
	for _, w := range nodes {
		if err := w.finish(); err != nil {
			t.Errorf("drain: %v", err)
		}
		_, outcomes := w.recorded()
		for _, o := range outcomes {
			switch {
			case o.Result == leasebus.ResultOK && terminal(o.Kind):
				ended[o.id]++
			case o.Result != leasebus.ResultOK && terminal(o.Kind):
				unknown++ // refused, or its answer was lost
			}
		}
		want(t, "held at the end", w.Held(), 0)
		want(t, "running at the end", w.InFlight(), 0)
	}
	missing := 0
	for _, id := range ids {
		switch ended[id] {
		case 0:
			missing++
		case 1:
		default:
			t.Errorf("%v ended %d times by what the store answered", id, ended[id])
		}
	}
	if missing > unknown {
		t.Errorf("%d messages have ended without an answer, but only %d answers were lost", missing, unknown)
	}
	for _, d := range t.deadLetters(leasebus.Filter{}) {
		if d.Attempts > t.policy.Retry.MaxAttempts {
			t.Errorf("%v was dead-lettered after %d attempts, more than %d", d.ID, d.Attempts, t.policy.Retry.MaxAttempts)
		}
		if slices.ContainsFunc(d.History, func(h leasebus.FailureRecord) bool { return h.Attempt < 1 }) {
			t.Errorf("the history of %v holds an attempt below 1", d.ID)
		}
	}
}
