package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// For tests of the package from outside.

// WithPace makes the ring turn faster than in life.
func WithPace(every time.Duration, headBytes int64, coldAfter time.Duration) Option {
	return optionFunc(func(o *options) { o.pace = pace{every, headBytes, coldAfter} })
}

// EvacuateSQL moves up to $1 messages of a segment to the cold one.
func EvacuateSQL(schema string, seg int) string {
	n, err := namesOf(schema)
	if err != nil {
		panic(err)
	}
	return n.renderFor(segment(seg), evacuateSQL)
}

// TurnLocks are the numbers of the locks by which a feed's claims take a turn, in each segment.
func TurnLocks(of leasebus.Feed, number int) (schema int32, keys []int32) {
	f, ok := of.(*feed)
	if !ok {
		panic("no feed of this package")
	}
	keys = make([]int32, segments)
	for s := range keys {
		schema, keys[s], _ = f.turnKeys(segment(s), &turn{first: int32(number)})
	}
	return schema, keys
}

func ReadSchema(ctx context.Context, pool *pgxpool.Pool, schema string) (map[string]string, error) {
	n, err := namesOf(schema)
	if err != nil {
		return nil, err
	}
	return readSchema(ctx, pool, n)
}

var WantedSchema = func() map[string]string {
	all := make(map[string]string)
	for _, object := range wantedSchema {
		all[object.name] = object.is
	}
	return all
}()
