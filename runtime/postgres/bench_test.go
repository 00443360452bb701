package postgres_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

const drained = 100_000

// benchPolicy has defaults only.
func benchPolicy(queue string) *leasebus.Policy {
	p := leasebus.DefaultPolicy("google.protobuf.StringValue", queue)
	return &p
}

func fill(b *testing.B, inbox *postgres.Inbox, policy *leasebus.Policy, n int) {
	b.Helper()
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.StringValue](policy, inbox)
	if err != nil {
		b.Fatal(err)
	}
	text := make([]byte, 250)
	for i := range text {
		text[i] = 'a' + byte(i%26)
	}
	batch := make([]*wrapperspb.StringValue, 1000)
	for i := range batch {
		batch[i] = wrapperspb.String(string(text))
	}
	for left := n; left > 0; left -= len(batch) {
		if _, err := publisher.PublishBatch(b.Context(), batch[:min(left, len(batch))]); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkDrain drains 100,000 no-op messages through the typed API with default settings, beside the same statements
// in a bare loop: what the engine, decoding and the backend add to what the database costs.
func BenchmarkDrain(b *testing.B) {
	pg := testservers.Postgres(b)
	pool := pg.Pool(b)
	if err := postgres.Migrate(b.Context(), pool); err != nil {
		b.Fatal(err)
	}
	inbox, err := postgres.NewInbox(b.Context(), pool, postgres.WithLogger(quiet))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = inbox.Close() }()
	// In turns, so that what else the machine does meets both alike.
	var engine, loop lap
	for range b.N {
		b.StopTimer()
		policy := benchPolicy(fmt.Sprintf("engine-%d", rand.Uint64()))
		fill(b, inbox, policy, drained)
		b.StartTimer()
		engine.measure(func() { drain(b, inbox, policy) })
		b.StopTimer()
		queue := fmt.Sprintf("loop-%d", rand.Uint64())
		fill(b, inbox, benchPolicy(queue), drained)
		loop.measure(func() { bareLoop(b, pool, queue) })
		b.StartTimer()
	}
	all := drained * float64(b.N)
	b.ReportMetric(all/engine.took.Seconds(), "msg/s")
	b.ReportMetric(float64(engine.cpu.Nanoseconds())/all, "cpu-ns/msg")
	b.ReportMetric(all/loop.took.Seconds(), "loop-msg/s")
	b.ReportMetric(float64(loop.cpu.Nanoseconds())/all, "loop-cpu-ns/msg")
	b.ReportMetric(engine.took.Seconds()/loop.took.Seconds(), "engine/loop")
}

// lap adds up the time and the processor time of this process.
type lap struct{ took, cpu time.Duration }

func (l *lap) measure(work func()) {
	began, before := time.Now(), testservers.CPUTime()
	work()
	l.took += time.Since(began)
	l.cpu += testservers.CPUTime() - before
}

func drain(b *testing.B, inbox *postgres.Inbox, policy *leasebus.Policy) {
	b.Helper()
	p, err := leasebus.NewProcessor(inbox, leasebus.WithLogger(quiet))
	if err != nil {
		b.Fatal(err)
	}
	if err := leasebus.RegisterHandler(p, policy, func(context.Context, *wrapperspb.StringValue) error { return nil }); err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	ran := make(chan error, 1)
	go func() { ran <- p.Run(ctx) }()
	for p.Stats().Succeeded < drained {
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-ran; err != nil {
		b.Fatal(err)
	}
}

// bareLoop is claim and complete by SQL, as fast as this design goes without leases' bookkeeping: batches of 500 on four
// connections.
func bareLoop(b *testing.B, pool *pgxpool.Pool, queue string) {
	b.Helper()
	const workers, batch = 4, 500
	const pin = `SELECT set_config('enable_seqscan','off',true), set_config('enable_bitmapscan','off',true), set_config('enable_hashjoin','off',true),
		set_config('enable_mergejoin','off',true), set_config('jit','off',true), set_config('plan_cache_mode','force_generic_plan',true)`
	const claim = `UPDATE leasebus.ready SET lease_owner = $3, generation = generation + 1, attempt = attempt + 1, visible_at = statement_timestamp() + make_interval(secs => $4)
		WHERE ctid = ANY(ARRAY(SELECT ctid FROM leasebus.ready WHERE queue = $1 AND pos >= $5 AND visible_at <= statement_timestamp() ORDER BY pos LIMIT $2 FOR UPDATE SKIP LOCKED))
		RETURNING pos, generation, attempt, id, type, headers, state, payload, first_due`
	const complete = `DELETE FROM leasebus.ready m USING unnest($3::bigint[], $4::int[]) u(pos, gen)
		WHERE m.queue = $2 AND m.pos = u.pos AND m.lease_owner = $1 AND m.generation = u.gen RETURNING m.pos`
	var id int32
	if err := pool.QueryRow(b.Context(), `SELECT id FROM leasebus.queue WHERE name = $1`, queue).Scan(&id); err != nil {
		b.Fatal(err)
	}
	var done, cursor atomic.Int64
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			owner := rand.Int64()
			for done.Load() < drained {
				var positions []int64
				var generations []int32
				var claimBatch pgx.Batch
				claimBatch.Queue(pin)
				claimBatch.Queue(claim, id, batch, owner, 30.0, cursor.Load())
				results := pool.SendBatch(b.Context(), &claimBatch)
				_, _ = results.Exec()
				rows, err := results.Query()
				if err != nil {
					b.Error(err)
					return
				}
				for rows.Next() {
					raw := rows.RawValues()
					var pos int64
					for _, c := range raw[0] {
						pos = pos<<8 | int64(c)
					}
					positions, generations = append(positions, pos), append(generations, 1)
				}
				if err := results.Close(); err != nil {
					b.Error(err)
					return
				}
				if len(positions) == 0 {
					continue
				}
				cursor.Store(positions[len(positions)-1] + 1)
				var completeBatch pgx.Batch
				completeBatch.Queue(pin)
				completeBatch.Queue(complete, owner, id, positions, generations)
				if err := pool.SendBatch(b.Context(), &completeBatch).Close(); err != nil {
					b.Error(err)
					return
				}
				done.Add(int64(len(positions)))
			}
		})
	}
	all.Wait()
}

// BenchmarkFeed is each call of a feed by itself, with batches as the engine makes them.
func BenchmarkFeed(b *testing.B) {
	pg := testservers.Postgres(b)
	pool := pg.Pool(b)
	if err := postgres.Migrate(b.Context(), pool); err != nil {
		b.Fatal(err)
	}
	inbox, err := postgres.NewInbox(b.Context(), pool, postgres.WithLogger(quiet))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = inbox.Close() }()
	open := func(b *testing.B, n int) (leasebus.Feed, []leasebus.Lease) {
		b.Helper()
		policy := benchPolicy(fmt.Sprintf("feed-%d", rand.Uint64()))
		policy.Lease.Duration = time.Hour
		fill(b, inbox, policy, n)
		feed, err := inbox.Subscribe(b.Context(), leasebus.Subscription{Queue: policy.Queue, Owner: "bench#1", Policy: policy, Wake: func() {}, Check: func() {}})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = feed.Close() })
		return feed, make([]leasebus.Lease, n)
	}
	b.Run("renew=1500", func(b *testing.B) {
		feed, leases := open(b, 1500)
		if n, err := feed.Lease(b.Context(), leases); n != len(leases) || err != nil {
			b.Fatal(n, err)
		}
		batch := make([]leasebus.Renewal, len(leases))
		for i := range batch {
			batch[i].Lease = &leases[i]
		}
		b.ResetTimer()
		for range b.N {
			if err := feed.Renew(b.Context(), batch); err != nil || batch[0].Result != leasebus.ResultOK {
				b.Fatal(batch[0].Result, err)
			}
		}
	})
	for name, end := range map[string]leasebus.Settlement{
		"complete": {}, "release": {Kind: leasebus.SettleRelease},
		"retry": {Kind: leasebus.SettleRetry, Failure: &leasebus.Failure{Attempt: 1, Text: "no stock", ErrorType: "*errors.errorString"}},
	} {
		b.Run("settle=500/"+name, func(b *testing.B) {
			feed, leases := open(b, 500)
			batch := make([]leasebus.Settlement, len(leases))
			for range b.N {
				b.StopTimer()
				if end.Kind == leasebus.SettleComplete {
					feed, leases = open(b, 500)
				}
				if n, err := feed.Lease(b.Context(), leases); n != len(leases) || err != nil {
					b.Fatal(n, err)
				}
				for i := range batch {
					batch[i] = end
					batch[i].Lease = &leases[i]
				}
				b.StartTimer()
				if err := feed.Settle(b.Context(), batch); err != nil || batch[0].Result != leasebus.ResultOK {
					b.Fatal(batch[0].Result, err)
				}
			}
		})
	}
}

// BenchmarkPublish is one message each call from many callers, and batches.
func BenchmarkPublish(b *testing.B) {
	pg := testservers.Postgres(b)
	pool := pg.Pool(b)
	if err := postgres.Migrate(b.Context(), pool); err != nil {
		b.Fatal(err)
	}
	inbox, err := postgres.NewInbox(b.Context(), pool, postgres.WithLogger(quiet))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = inbox.Close() }()
	payload := make([]byte, 256)
	publish := func(b *testing.B, n int) {
		b.Helper()
		out := make([]leasebus.Outgoing, n)
		for i := range out {
			out[i] = order("")
			out[i].Payload = payload
		}
		if err := inbox.Publish(b.Context(), out, make([]leasebus.Receipt, n)); err != nil {
			b.Error(err)
		}
	}
	b.Run("callers=256", func(b *testing.B) {
		b.SetParallelism(256 / 2)
		b.RunParallel(func(each *testing.PB) {
			for each.Next() {
				publish(b, 1)
			}
		})
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	})
	b.Run("batch=1000", func(b *testing.B) {
		for range b.N {
			publish(b, 1000)
		}
		b.ReportMetric(1000*float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	})
}

// BenchmarkLatency publishes 400 messages each second in one inbox and handles them in another, as two processes do: from
// before the publish to the handler.
func BenchmarkLatency(b *testing.B) {
	pg := testservers.Postgres(b)
	pool := pg.Pool(b)
	if err := postgres.Migrate(b.Context(), pool); err != nil {
		b.Fatal(err)
	}
	for name, opts := range map[string][]postgres.Option{"notify": nil, "poll": {postgres.WithoutListen()}} {
		b.Run(name, func(b *testing.B) {
			opts = append(opts, postgres.WithLogger(quiet))
			producer, err := postgres.NewInbox(b.Context(), pool, opts...)
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = producer.Close() }()
			consumer, err := postgres.NewInbox(b.Context(), pool, opts...)
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = consumer.Close() }()
			measureLatency(b, producer, consumer)
		})
	}
}

func measureLatency(b *testing.B, producer, consumer *postgres.Inbox) {
	b.Helper()
	policy := numbersPolicy(30 * time.Second)
	policy.Queue = fmt.Sprintf("latency-%d", rand.Uint64())
	began := time.Now()
	var mu sync.Mutex
	var latencies []time.Duration
	p, err := newProcessor(consumer, policy, func(_ context.Context, n int64, _ leasebus.Delivery) error {
		took := time.Since(began) - time.Duration(n)
		mu.Lock()
		defer mu.Unlock()
		latencies = append(latencies, took)
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	publisher, err := leasebus.NewTypedPublisher[*wrapperspb.Int64Value](policy, producer)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	ran := make(chan error, 1)
	go func() { ran <- p.Run(ctx) }()
	time.Sleep(time.Second) // the listener proves itself
	b.ResetTimer()
	tick := time.NewTicker(2500 * time.Microsecond)
	defer tick.Stop()
	for range b.N {
		<-tick.C
		if _, err := publisher.Publish(ctx, wrapperspb.Int64(int64(time.Since(began)))); err != nil {
			b.Fatal(err)
		}
	}
	for p.Stats().Succeeded < int64(b.N) {
		time.Sleep(time.Millisecond)
	}
	b.StopTimer()
	cancel()
	if err := <-ran; err != nil {
		b.Fatal(err)
	}
	slices.Sort(latencies)
	b.ReportMetric(float64(latencies[len(latencies)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(latencies[len(latencies)*99/100].Microseconds())/1000, "p99-ms")
}
