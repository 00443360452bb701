package postgres_test

import (
	"context"
	"log/slog"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/postgres"
)

// A service migrates at deployment, opens the inbox once, and closes it last.
func Example() { //nolint:testableexamples // it needs a server, and runs until it is stopped
	serve := func(ctx context.Context) error {
		pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
		if err != nil {
			return err
		}
		defer pool.Close()
		if err := postgres.Migrate(ctx, pool); err != nil {
			return err
		}
		inbox, err := postgres.NewInbox(ctx, pool)
		if err != nil {
			return err
		}
		defer func() { _ = inbox.Close() }()

		// Generated code brings the policy and wraps these calls.
		policy := leasebus.DefaultPolicy("google.protobuf.StringValue", "greetings")
		p, err := leasebus.NewProcessor(inbox)
		if err != nil {
			return err
		}
		err = leasebus.RegisterHandler(p, &policy, func(context.Context, *wrapperspb.StringValue) error { return nil })
		if err != nil {
			return err
		}
		return p.Run(ctx)
	}
	if err := serve(context.Background()); err != nil {
		slog.Error("stopped", "error", err)
	}
}

// The message exists if and only if the order does.
func ExampleInbox_Tx() { //nolint:testableexamples // it needs a server
	var (
		ctx       context.Context
		pool      *pgxpool.Pool
		inbox     *postgres.Inbox
		publisher *leasebus.TypedPublisher[*wrapperspb.StringValue]
	)
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO orders (id) VALUES ('7')`); err != nil {
			return err
		}
		_, err := publisher.Via(inbox.Tx(tx)).Publish(ctx, wrapperspb.String("7"))
		return err
	})
	if err != nil {
		slog.Error("not published", "error", err)
	}
}

// The effect of a handler and the completion of its message commit together, or not at all.
func ExampleCompleteTx() { //nolint:testableexamples // it needs a server
	var pool *pgxpool.Pool
	handle := func(ctx context.Context, m *wrapperspb.StringValue) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `UPDATE orders SET shipped = true WHERE id = $1`, m.GetValue()); err != nil {
				return err
			}
			return postgres.CompleteTx(ctx, tx) // last
		})
	}
	_ = handle
}
