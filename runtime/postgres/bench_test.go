package postgres_test

import (
	"context"
	"fmt"
	"math/rand/v2"
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
	defer inbox.Close()
	b.Run("engine", func(b *testing.B) {
		for range b.N {
			b.StopTimer()
			policy := benchPolicy(fmt.Sprintf("engine-%d", rand.Uint64()))
			fill(b, inbox, policy, drained)
			before := cpuTime()
			b.StartTimer()
			drain(b, inbox, policy)
			b.StopTimer()
			b.ReportMetric(float64((cpuTime()-before).Nanoseconds())/drained, "cpu-ns/msg")
			b.StartTimer()
		}
		b.ReportMetric(drained*float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	})
	b.Run("loop", func(b *testing.B) {
		for range b.N {
			b.StopTimer()
			policy := benchPolicy(fmt.Sprintf("loop-%d", rand.Uint64()))
			fill(b, inbox, policy, drained)
			before := cpuTime()
			b.StartTimer()
			bareLoop(b, pool, policy.Queue)
			b.StopTimer()
			b.ReportMetric(float64((cpuTime()-before).Nanoseconds())/drained, "cpu-ns/msg")
			b.StartTimer()
		}
		b.ReportMetric(drained*float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	})
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
	b.StopTimer()
	cancel()
	if err := <-ran; err != nil {
		b.Fatal(err)
	}
	b.StartTimer()
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
