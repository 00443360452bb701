package server_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/leasebus/leasebus/bench/internal/meter"
	"github.com/leasebus/leasebus/bench/internal/server"
)

func TestServer(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a PostgreSQL, and -short is set")
	}
	s, err := server.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if _, err := pgx.Connect(context.Background(), s.DSN()); err == nil {
			t.Error("the server answers after Close")
		}
	}()
	template, err := s.Database(t.Context(), "template", "")
	if err != nil {
		t.Fatal(err)
	}
	exec(t, template, "CREATE TABLE t AS SELECT g FROM generate_series(1, 100000) g")
	copied, err := s.Database(t.Context(), "copy", "template")
	if err != nil {
		t.Fatal(err)
	}
	m, err := meter.New(t.Context(), copied)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close(t.Context())
	before, err := m.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	exec(t, copied, "CREATE INDEX ON t (g)")
	after, err := m.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cost := after.Since(before)
	if cost.WAL < 1<<20 || cost.Wall <= 0 || cost.Server < 0 {
		t.Errorf("an index on 100,000 rows costs %+v", cost)
	}
	tables, indexes, err := m.Sizes(t.Context())
	if err != nil || tables < 3<<20 || indexes < 2<<20 {
		t.Errorf("sizes: %d, %d, %v", tables, indexes, err)
	}
	if err := s.Drop(t.Context(), "copy"); err != nil {
		t.Error(err)
	}
}

func exec(t *testing.T, dsn, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}
