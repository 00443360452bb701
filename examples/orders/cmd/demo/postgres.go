package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasebus/leasebus/runtime/postgres"
)

const (
	// postgresEnv names the variable with the connection string; make demo BACKEND=postgres sets it.
	postgresEnv     = "LEASEBUS_TEST_POSTGRES"
	defaultPostgres = "postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable"

	// dropTimeout bounds the cleaning up, which goes on when the demo is interrupted.
	dropTimeout = 10 * time.Second
)

// openPostgres makes an inbox in a schema of its own, and drops it when the story is over.
func openPostgres(ctx context.Context) (backend, func(), error) { //nolint:ireturn // as every opener
	dsn := os.Getenv(postgresEnv)
	if dsn == "" {
		dsn = defaultPostgres
	}
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return nil, nil, fmt.Errorf("the connection string in %s cannot be parsed", postgresEnv) // its text may hold a password
	}
	schema := "leasebus_demo_" + strings.ToLower(rand.Text()[:8])
	if err := postgres.Migrate(ctx, pool, postgres.WithSchema(schema)); err != nil {
		pool.Close()
		return nil, nil, err
	}
	inbox, err := postgres.NewInbox(ctx, pool, postgres.WithSchema(schema))
	if err != nil {
		dropSchema(context.WithoutCancel(ctx), pool, schema)
		return nil, nil, err
	}
	return inbox, func() {
		_ = inbox.Close() // the account is drawn up, nothing can be lost any more
		dropSchema(context.WithoutCancel(ctx), pool, schema)
	}, nil
}

// dropSchema is given a context that does not end when the demo is interrupted.
func dropSchema(ctx context.Context, pool *pgxpool.Pool, schema string) {
	ctx, cancel := context.WithTimeout(ctx, dropTimeout)
	defer cancel()
	if _, err := pool.Exec(ctx, "DROP SCHEMA "+pgx.Identifier{schema}.Sanitize()+" CASCADE"); err != nil {
		fmt.Fprintf(os.Stderr, "demo: the schema %s is left behind: %v\n", schema, err)
	}
	pool.Close()
}
