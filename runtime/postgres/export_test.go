package postgres

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"
)

// For tests of the package from outside.

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
