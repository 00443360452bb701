package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
)

// The raw engines are loops of bare SQL: what PostgreSQL can do at most. They decode nothing.

const (
	rawBatch = 500
	// rawLoops work at a time, each on a connection of its own.
	rawLoops       = 4
	rawConnections = 16
	rawIdle        = time.Millisecond
	rawType        = "bench.v1.Task"
)

// rawTable is the hot table of leasebus' design.
const rawTable = `CREATE TABLE ready (
  pos         bigint      GENERATED ALWAYS AS IDENTITY,
  visible_at  timestamptz NOT NULL DEFAULT statement_timestamp(),
  lease_owner bigint,
  created_at  timestamptz NOT NULL DEFAULT statement_timestamp(),
  id          uuid        NOT NULL,
  queue       int         NOT NULL,
  generation  int         NOT NULL DEFAULT 0,
  attempt     int         NOT NULL DEFAULT 0,
  type        text        NOT NULL,
  headers     bytea,
  state       bytea,
  payload     bytea       NOT NULL,
  PRIMARY KEY (queue, pos)
) WITH (fillfactor = 50, vacuum_truncate = off,
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0)`

const (
	rawInsert = `INSERT INTO ready (queue, id, type, payload) VALUES (1, $1, $2, $3)`
	rawDelete = `DELETE FROM ready WHERE ctid = ANY(ARRAY(
 SELECT ctid FROM ready WHERE queue = 1 AND pos >= $1 ORDER BY pos LIMIT $2 FOR UPDATE SKIP LOCKED)) RETURNING pos, payload`
	bareClaim = `UPDATE ready SET lease_owner = $2, generation = generation + 1, attempt = attempt + 1,
 visible_at = statement_timestamp() + make_interval(secs => 30)
 WHERE ctid = ANY(ARRAY(SELECT ctid FROM ready WHERE queue = 1 AND pos >= $1 AND visible_at <= statement_timestamp()
 ORDER BY pos LIMIT $3 FOR UPDATE SKIP LOCKED))
 RETURNING pos, generation, attempt, id, type, headers, state, payload, created_at`
	bareComplete = `DELETE FROM ready m USING unnest($2::bigint[], $3::int[]) u(pos, generation)
 WHERE m.queue = 1 AND m.pos = u.pos AND m.lease_owner = $1 AND m.generation = u.generation RETURNING m.pos`
)

// rawPlan are the settings under which the statements walk the one index, for the whole session.
func rawPlan(config *pgxpool.Config) {
	for _, name := range []string{"enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin", "jit"} {
		config.ConnConfig.RuntimeParams[name] = "off"
	}
	config.ConnConfig.RuntimeParams["plan_cache_mode"] = "force_generic_plan"
}

func rawEngine() Engine {
	return rawKind(Raw, "ceilings: single INSERTs, COPY, DELETE … RETURNING in batches of 500 on 4 connections", (*rawBus).delete)
}

func bareLoopEngine() Engine {
	return rawKind(BareLoop, "the statements of leasebus' design: claim 500, delete 500, on 4 connections", (*rawBus).lease)
}

func rawKind(name, about string, loop func(*rawBus, context.Context, *pgxpool.Conn, Handler) error) Engine {
	return Engine{
		Name: name, About: about,
		Setup: func(ctx context.Context, pool *pgxpool.Pool) error {
			_, err := pool.Exec(ctx, rawTable)
			return err
		},
		Open: func(ctx context.Context, dsn string, o Options) (Bus, error) {
			if err := onlyOneQueue(o); err != nil {
				return nil, err
			}
			config, err := pgxpool.ParseConfig(dsn)
			if err != nil {
				return nil, fmt.Errorf("the connection string: %w", ErrUnsupported)
			}
			config.MaxConns = rawConnections
			rawPlan(config)
			pool, err := pgxpool.NewWithConfig(ctx, config)
			if err != nil {
				return nil, fmt.Errorf("connect: %w", err)
			}
			return &rawBus{pool: pool, loop: loop}, nil
		},
	}
}

type rawBus struct {
	pool *pgxpool.Pool
	loop func(*rawBus, context.Context, *pgxpool.Conn, Handler) error
	// next is where the next claim begins to look.
	next atomic.Int64
}

func (b *rawBus) Publish(ctx context.Context, m Message) error {
	row, err := rawRow(m)
	if err != nil {
		return err
	}
	_, err = b.pool.Exec(ctx, rawInsert, row[1:]...)
	return rawError(err)
}

func (b *rawBus) PublishBatch(ctx context.Context, batch []Message) error {
	rows := make([][]any, len(batch))
	for i := range batch {
		row, err := rawRow(batch[i])
		if err != nil {
			return err
		}
		rows[i] = row
	}
	_, err := b.pool.CopyFrom(ctx, pgx.Identifier{"ready"}, []string{"queue", "id", "type", "payload"}, pgx.CopyFromRows(rows))
	return rawError(err)
}

func (b *rawBus) PublishTx(ctx context.Context, m Message) error {
	return inTx(ctx, b.pool, func(tx pgx.Tx) error {
		row, err := rawRow(m)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, rawInsert, row[1:]...)
		return rawError(err)
	})
}

// rawRow is queue, id, type, payload.
func rawRow(m Message) ([]any, error) {
	if m.Delay > 0 {
		return nil, fmt.Errorf("raw: delays: %w", ErrUnsupported)
	}
	payload, err := proto.Marshal(taskOf(m))
	if err != nil {
		return nil, fmt.Errorf("raw: encode: %w", err)
	}
	id, err := uuid.NewV7()
	if err != nil {
		return nil, fmt.Errorf("raw: %w", err)
	}
	return []any{int32(1), [16]byte(id), rawType, payload}, nil
}

func rawError(err error) error {
	if err != nil {
		return fmt.Errorf("raw: %w", err)
	}
	return nil
}

func (b *rawBus) Work(ctx context.Context, handle Handler) error {
	var loops errgroup.Group
	background := context.WithoutCancel(ctx)
	for range rawLoops {
		loops.Go(func() error {
			conn, err := b.pool.Acquire(background)
			if err != nil {
				return rawError(err)
			}
			defer conn.Release()
			for ctx.Err() == nil {
				if err := b.loop(b, background, conn, handle); err != nil {
					return rawError(err)
				}
			}
			return nil
		})
	}
	return loops.Wait() //nolint:wrapcheck // each has said what it is
}

// delete takes messages away, with nothing to bring them back.
func (b *rawBus) delete(ctx context.Context, conn *pgxpool.Conn, handle Handler) error {
	positions, _, err := b.take(ctx, conn, rawDelete, b.next.Load(), rawBatch)
	if err != nil {
		return err
	}
	done(ctx, positions, handle)
	return nil
}

// lease claims messages, and then deletes them under the fence.
func (b *rawBus) lease(ctx context.Context, conn *pgxpool.Conn, handle Handler) error {
	const owner = int64(1)
	positions, generations, err := b.take(ctx, conn, bareClaim, b.next.Load(), owner, rawBatch)
	if err != nil || len(positions) == 0 {
		done(ctx, positions, handle)
		return err
	}
	done(ctx, positions, handle)
	tag, err := conn.Exec(ctx, bareComplete, owner, positions, generations)
	if err == nil && tag.RowsAffected() != int64(len(positions)) {
		err = fmt.Errorf("%d of %d leases could be completed", tag.RowsAffected(), len(positions))
	}
	return err
}

// take reads positions and, of a claim, generations; the rest of a row is received and left alone.
func (b *rawBus) take(ctx context.Context, conn *pgxpool.Conn, sql string, args ...any) (positions []int64, generations []int32, err error) {
	rows, err := conn.Query(ctx, sql, args...)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close()
	positions, generations = make([]int64, 0, rawBatch), make([]int32, 0, rawBatch)
	for rows.Next() {
		values := rows.RawValues()
		positions = append(positions, int64(binary.BigEndian.Uint64(values[0]))) //nolint:gosec // two's complement
		if len(values) > 2 {
			generations = append(generations, int32(binary.BigEndian.Uint32(values[1]))) //nolint:gosec // two's complement
		}
	}
	for _, pos := range positions {
		for next := b.next.Load(); pos >= next && !b.next.CompareAndSwap(next, pos+1); next = b.next.Load() {
		}
	}
	return positions, generations, rows.Err()
}

func done(ctx context.Context, positions []int64, handle Handler) {
	if len(positions) == 0 {
		time.Sleep(rawIdle)
	}
	for range positions {
		handle(ctx, Message{})
	}
}

func (b *rawBus) Left(ctx context.Context) (int64, error) {
	return count(ctx, b.pool, "SELECT count(*) FROM ready")
}

func (b *rawBus) Close() { b.pool.Close() }
