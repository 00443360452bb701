package postgres_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/leasebus/leasebus/internal/testservers"
	"github.com/leasebus/leasebus/runtime/postgres"
)

func TestMigrate_ConcurrentStartsAndAgain(t *testing.T) {
	t.Parallel()
	pg := testservers.Postgres(t)
	pool := pg.Pool(t)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if err := postgres.Migrate(t.Context(), pool); err != nil {
				t.Errorf("migrate: %v", err)
			}
		})
	}
	all.Wait()
	if n := testservers.Value[int](t, pg, `SELECT count(*) FROM leasebus.schema_version`); n != 1 {
		t.Errorf("%d migrations were applied, want 1", n)
	}
	if err := postgres.Validate(t.Context(), pool); err != nil {
		t.Error(err)
	}
}

func TestMigrate_AllOrNothing(t *testing.T) {
	t.Parallel()
	pg := testservers.Postgres(t)
	pool := pg.Pool(t)
	pg.Exec(t, `CREATE SCHEMA leasebus`)
	pg.Exec(t, `CREATE TABLE leasebus.dead (mine int)`)
	err := postgres.Migrate(t.Context(), pool)
	if err == nil || !strings.Contains(err.Error(), "0001_inbox.sql") || !strings.Contains(err.Error(), "dead") {
		t.Fatalf("migrate over a table in the way: %v; want an error that names the step and the table", err)
	}
	if testservers.Value[bool](t, pg, `SELECT to_regclass('leasebus.ready') IS NOT NULL`) {
		t.Error("half of a migration was left")
	}
	pg.Exec(t, `DROP TABLE leasebus.dead`)
	if err := postgres.Migrate(t.Context(), pool); err != nil {
		t.Errorf("migrate after the table is gone: %v", err)
	}
}

// The files are plain SQL for anybody's tool.
func TestMigrations_RunByAnotherTool(t *testing.T) {
	t.Parallel()
	pg := testservers.Postgres(t)
	steps, err := postgres.Migrations()
	if err != nil {
		t.Fatal(err)
	}
	for i, step := range steps {
		if step.Version != i+1 {
			t.Errorf("%s is number %d, want %d", step.Name, step.Version, i+1)
		}
		pg.Exec(t, step.SQL)
	}
	if last := steps[len(steps)-1].Version; last != postgres.SchemaVersion {
		t.Errorf("the steps end with version %d, the package needs %d", last, postgres.SchemaVersion)
	}
	if err := postgres.Validate(t.Context(), pg.Pool(t)); err != nil {
		t.Error(err)
	}
}

func TestValidate_S61_NamesWhatDiffers(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change string
		kind   error
		want   []string
	}{
		"table":       {`DROP TABLE leasebus.delayed`, postgres.ErrSchemaDrift, []string{"table delayed is missing", "column delayed.due_at is missing"}},
		"column":      {`ALTER TABLE leasebus.dead DROP COLUMN error_type`, postgres.ErrSchemaDrift, []string{"column dead.error_type is missing"}},
		"index":       {`DROP INDEX leasebus.dead_id`, postgres.ErrSchemaDrift, []string{"index dead_id is missing"}},
		"type":        {`ALTER TABLE leasebus.ready ALTER COLUMN type TYPE varchar(10)`, postgres.ErrSchemaDrift, []string{`column ready_3.type is "character varying(10) not null", want "text not null"`}},
		"null":        {`ALTER TABLE leasebus.ready ALTER COLUMN payload DROP NOT NULL`, postgres.ErrSchemaDrift, []string{`column ready.payload is "bytea", want "bytea not null"`}},
		"index order": {`ALTER TABLE leasebus.ready_5 DROP CONSTRAINT ready_5_pkey, ADD CONSTRAINT ready_5_pkey PRIMARY KEY (pos, queue)`, postgres.ErrSchemaDrift, []string{"index ready_5_pkey is"}},
		"function":    {`DROP FUNCTION leasebus.lease_lost()`, postgres.ErrSchemaDrift, []string{"function lease_lost() is missing"}},
		"none":        {`DROP SCHEMA leasebus CASCADE`, postgres.ErrSchemaMissing, []string{"leasebus migrate", "postgres.Migrate"}},
		"empty":       {`DELETE FROM leasebus.schema_version`, postgres.ErrSchemaMissing, []string{"leasebus migrate"}},
		"too old":     {`UPDATE leasebus.schema_version SET version = 0, serves = 0`, postgres.ErrSchemaTooOld, []string{"leasebus migrate", "version 0"}},
		"too new":     {`INSERT INTO leasebus.schema_version VALUES (9, 8)`, postgres.ErrSchemaTooNew, []string{"version 9", "from version 8", "upgrade leasebus"}},
		"additions":   {`ALTER TABLE leasebus.ready ADD COLUMN mine int; CREATE TABLE leasebus.mine (); CREATE INDEX ON leasebus.ready (id)`, nil, nil},
		"newer":       {`INSERT INTO leasebus.schema_version VALUES (2, 1)`, nil, nil}, // S61
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := migrated(t, testservers.Postgres(t))
			for change := range strings.SplitSeq(tt.change, "; ") {
				pg.Exec(t, change)
			}
			err := postgres.Validate(t.Context(), pg.Pool(t))
			if !errors.Is(err, tt.kind) {
				t.Fatalf("got %v, want %v", err, tt.kind)
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error lacks %q: %v", want, err)
				}
			}
			inbox, opening := postgres.NewInbox(t.Context(), pg.Pool(t))
			if opening == nil {
				_ = inbox.Close()
			}
			if refused := opening != nil; refused != (err != nil && !errors.Is(err, postgres.ErrSchemaDrift)) {
				t.Errorf("NewInbox answers %v, Validate %v", opening, err)
			}
		})
	}
}

// What Validate compares with is all that the migrations make.
func TestValidate_KnowsEverything(t *testing.T) {
	t.Parallel()
	pg := migrated(t, testservers.Postgres(t))
	found, err := postgres.ReadSchema(t.Context(), pg.Pool(t), postgres.DefaultSchema)
	if err != nil {
		t.Fatal(err)
	}
	if unknown := slices.DeleteFunc(slices.Sorted(maps.Keys(found)), func(name string) bool { return postgres.WantedSchema[name] != "" }); len(unknown) > 0 {
		t.Errorf("the migrations make what Validate does not know: %q", unknown)
	}
}

func TestNewInbox_S8_BadInput(t *testing.T) {
	t.Parallel()
	pg := testservers.Postgres(t)
	const secret = "hunter2"
	for name, tt := range map[string]struct {
		options []postgres.Option
		want    string
	}{
		"few connections":        {[]postgres.Option{postgres.WithConnections(3)}, "needs 4"},
		"few connections by DSN": {[]postgres.Option{postgres.WithDSN(pg.DSN("pool_max_conns=2"))}, "needs 4"},
		"no schema":              {[]postgres.Option{postgres.WithSchema("")}, "empty"},
		"long schema":            {[]postgres.Option{postgres.WithSchema(strings.Repeat("x", 64))}, "63"},
		"DSN":                    {[]postgres.Option{postgres.WithDSN("postgres://u:" + secret + "@host:port/x?a=%%%")}, "WithDSN"},
		"listen DSN":             {[]postgres.Option{postgres.WithListenDSN("host=h password='" + secret + " port=x")}, "WithListenDSN"},
		"no server":              {[]postgres.Option{postgres.WithDSN("postgres://u:" + secret + "@127.0.0.1:1/x")}, "connect"},
		"poll":                   {[]postgres.Option{postgres.WithPollInterval(0)}, "1ms"},
		"sweep":                  {[]postgres.Option{postgres.WithSweep(0)}, "10ms"},
		"payload":                {[]postgres.Option{postgres.WithMaxPayload(0)}, "1 or more"},
		"not migrated":           {[]postgres.Option{postgres.WithSchema("it's")}, `leasebus migrate --schema "it's"`},
	} {
		inbox, err := postgres.NewInbox(t.Context(), pg.Pool(t), tt.options...)
		if err == nil {
			_ = inbox.Close()
			t.Errorf("%s: no error", name)
			continue
		}
		if !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v; want it to say %q, and no password", name, err, tt.want)
		}
	}
	if _, err := postgres.NewInbox(t.Context(), nil); err == nil {
		t.Error("no pool: no error")
	}
}

// Every name that PostgreSQL takes is a schema's name, and two schemas of one database are strangers.
func TestSchema_AnyName(t *testing.T) {
	t.Parallel()
	pg := testservers.Postgres(t)
	for _, schema := range []string{`Mixed "Case".dots`, "select", "ünïcødé 漢字", "it's; DROP TABLE x --", strings.Repeat("x", 63), "{schema}", `\x00`, "$1"} {
		t.Run(schema, func(t *testing.T) {
			t.Parallel()
			for mode := range execModes {
				oneLife(t, pg, mode, postgres.WithSchema(schema))
			}
			if err := postgres.Validate(t.Context(), pg.Pool(t), postgres.WithSchema(schema)); err != nil {
				t.Error(err)
			}
		})
	}
}

var execModes = map[string]pgx.QueryExecMode{
	"cache_statement": pgx.QueryExecModeCacheStatement, "cache_describe": pgx.QueryExecModeCacheDescribe,
	"describe_exec": pgx.QueryExecModeDescribeExec, "exec": pgx.QueryExecModeExec, "simple_protocol": pgx.QueryExecModeSimpleProtocol,
}

func poolOf(ctx context.Context, t *testing.T, dsn string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}
