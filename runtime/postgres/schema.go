package postgres

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// SchemaVersion is the version of the schema that this version of the package works with. A database may be newer, as
// long as it says that it serves this version still.
const SchemaVersion = 1

// Errors of the schema. What to do stands in their text.
var (
	// ErrSchemaMissing: the tables are not there.
	ErrSchemaMissing = errors.New("schema is missing")
	// ErrSchemaTooOld: the database has not been migrated to what this version needs.
	ErrSchemaTooOld = errors.New("schema is too old")
	// ErrSchemaTooNew: the database does not serve this version any more.
	ErrSchemaTooNew = errors.New("schema is too new")
	// ErrSchemaDrift: something of the schema is missing or is not as it was made.
	ErrSchemaDrift = errors.New("schema differs")
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

// Migration is one step of the schema, as plain SQL for the tool of your choice. A step runs in one transaction.
type Migration struct {
	Version int
	// Name is that of the file, such as "0001_inbox.sql".
	Name string
	// SQL may hold several statements.
	SQL string
}

// Migrations are all steps in order, for the schema of the options.
func Migrations(opts ...Option) ([]Migration, error) {
	o, err := optionsOf(opts)
	if err != nil {
		return nil, err
	}
	return migrations(o.names), nil
}

// migrations reads the embedded files. That they are well named is held by a test.
func migrations(n names) []Migration {
	quoted := pgx.Identifier{DefaultSchema}.Sanitize()
	renamed := strings.NewReplacer(`'`+quoted, `'`+strings.ReplaceAll(n.quoted, `'`, `''`), quoted, n.quoted) // in literals, and as names
	var steps []Migration
	entries, _ := fs.ReadDir(migrationFiles, "migrations") // embedded
	for _, entry := range entries {
		text, _ := migrationFiles.ReadFile("migrations/" + entry.Name()) // embedded
		number, _, _ := strings.Cut(entry.Name(), "_")
		version, _ := strconv.Atoi(number)
		steps = append(steps, Migration{version, entry.Name(), renamed.Replace(string(text))})
	}
	return steps
}

// Migrate brings the schema up to [SchemaVersion]. It runs what is missing in one transaction: all or nothing. Processes
// that call it at the same time wait for the first one. A schema that is newer already is left as it is.
func Migrate(ctx context.Context, pool *pgxpool.Pool, opts ...Option) error {
	o, err := optionsOf(opts)
	if err != nil {
		return err
	}
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return fmt.Errorf("postgres: migrate schema %s: %w", o.quoted, err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // no-op after the commit
	if err := migrate(ctx, tx, o.names); err != nil {
		return fmt.Errorf("postgres: migrate schema %s: %w", o.quoted, err)
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("postgres: migrate schema %s: %w", o.quoted, err)
	}
	return nil
}

func migrate(ctx context.Context, tx pgx.Tx, n names) error {
	if _, err := tx.Exec(ctx, `SELECT set_config('lock_timeout', '0', true), pg_advisory_xact_lock($1)`, n.key); err != nil {
		return err
	}
	var there bool
	if err := tx.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, n.quoted+".schema_version").Scan(&there); err != nil {
		return err
	}
	version := 0
	if there {
		if err := tx.QueryRow(ctx, n.render(`SELECT coalesce(max(version), 0) FROM {schema}.schema_version`)).Scan(&version); err != nil {
			return err
		}
	}
	for _, step := range migrations(n) {
		if step.Version <= version {
			continue
		}
		// Several statements need the simple protocol.
		if err := tx.Conn().PgConn().Exec(ctx, step.SQL).Close(); err != nil {
			return fmt.Errorf("%s: %w", step.Name, err)
		}
	}
	return nil
}

const versionSQL = `SELECT version, serves, current_setting('default_transaction_isolation')
 FROM {schema}.schema_version ORDER BY version DESC LIMIT 1`

// checkVersion refuses a schema that this version cannot work with (S61). It also tells what isolation sessions have.
func checkVersion(ctx context.Context, pool *pgxpool.Pool, n names) (isolation string, err error) {
	var version, serves int
	err = pool.QueryRow(ctx, n.render(versionSQL)).Scan(&version, &serves, &isolation)
	switch code := sqlState(err); {
	case code == codeUndefinedTable, code == codeInvalidSchema, errors.Is(err, pgx.ErrNoRows):
		return "", n.drift(ErrSchemaMissing, "it has no tables of leasebus")
	case err != nil:
		return "", fmt.Errorf("postgres: read the version of schema %s: %w", n.quoted, err)
	case version < SchemaVersion:
		return "", n.drift(ErrSchemaTooOld, fmt.Sprintf("it has version %d, this program needs %d", version, SchemaVersion))
	case serves > SchemaVersion:
		return "", fmt.Errorf("postgres: schema %s: %w: it has version %d, which serves programs from version %d on; "+
			"this one has %d: upgrade leasebus in this program", n.quoted, ErrSchemaTooNew, version, serves, SchemaVersion)
	}
	return isolation, nil
}

// drift is an error that names the remedy.
func (n names) drift(kind error, what string) error {
	flag := ""
	if n.schema != DefaultSchema {
		flag = " --schema " + strconv.Quote(n.schema)
	}
	return fmt.Errorf("postgres: schema %s: %w: %s; run `leasebus migrate%s`, or call postgres.Migrate", n.quoted, kind, what, flag)
}

// Validate compares the schema with what [Migrate] makes, and names everything that is missing or of the wrong type.
// What was added besides does not matter.
func Validate(ctx context.Context, pool *pgxpool.Pool, opts ...Option) error {
	o, err := optionsOf(opts)
	if err != nil {
		return err
	}
	if _, err := checkVersion(ctx, pool, o.names); err != nil {
		return err
	}
	found, err := readSchema(ctx, pool, o.names)
	if err != nil {
		return fmt.Errorf("postgres: validate schema %s: %w", o.quoted, err)
	}
	var problems []string
	for _, want := range wantedSchema {
		switch have, ok := found[want.name]; {
		case !ok:
			problems = append(problems, want.name+" is missing")
		case have != want.is:
			problems = append(problems, fmt.Sprintf("%s is %q, want %q", want.name, have, want.is))
		}
	}
	if len(problems) > 0 {
		return o.drift(ErrSchemaDrift, strings.Join(problems, "; "))
	}
	return nil
}

const (
	columnsSQL = `SELECT 'column ' || c.relname || '.' || a.attname, format_type(a.atttypid, a.atttypmod) || concat(CASE WHEN a.attnotnull THEN ' not null' END)
 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid
 WHERE c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $1) AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped
 UNION ALL SELECT CASE relkind WHEN 'S' THEN 'sequence ' ELSE 'table ' END || relname,
 CASE WHEN relispartition THEN 'partition ' || pg_get_expr(relpartbound, oid) WHEN relkind = 'p' THEN 'partitioned'
 WHEN relkind = 'S' THEN 'sequence' ELSE 'table' END
 FROM pg_catalog.pg_class WHERE relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $1) AND relkind IN ('r', 'p', 'S')`
	indexesSQL = `SELECT 'index ' || c.relname, CASE WHEN NOT i.indisvalid THEN 'invalid ' WHEN i.indisunique THEN 'unique ' ELSE '' END ||
 m.amname || ' on ' || t.relname || ' (' ||
 (SELECT string_agg(pg_get_indexdef(i.indexrelid, k, true), ', ' ORDER BY k) FROM generate_series(1, i.indnkeyatts) k) || ')'
 FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid JOIN pg_catalog.pg_class t ON t.oid = i.indrelid
 JOIN pg_catalog.pg_am m ON m.oid = c.relam
 WHERE c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $1)`
	functionsSQL = `SELECT 'function ' || proname || '(' || pg_get_function_identity_arguments(oid) || ')', format_type(prorettype, NULL)
 FROM pg_catalog.pg_proc WHERE pronamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = $1)`
)

// readSchema describes what is there, by the names that wantedSchema uses.
func readSchema(ctx context.Context, pool *pgxpool.Pool, n names) (map[string]string, error) {
	found := make(map[string]string)
	for _, statement := range []string{columnsSQL, indexesSQL, functionsSQL} {
		rows, err := pool.Query(ctx, statement, n.schema)
		if err != nil {
			return nil, err
		}
		var name, is string
		if _, err := pgx.ForEachRow(rows, []any{&name, &is}, func() error {
			found[name] = is
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return found, nil
}

type schemaObject struct{ name, is string }

// wantedSchema is what the migrations come to; a test compares it with a migrated schema, both ways.
//
//nolint:gochecknoglobals // a constant
var wantedSchema = wanted()

func wanted() []schemaObject {
	var objects []schemaObject
	relation := func(name, is, columns string) {
		objects = append(objects, schemaObject{"table " + name, is})
		for column := range strings.SplitSeq(columns, ", ") {
			column, is, _ := strings.Cut(column, " ")
			is = strings.Replace(is, "timestamptz", "timestamp with time zone", 1)
			objects = append(objects, schemaObject{"column " + name + "." + column, is})
		}
	}
	table := func(name, columns string) { relation(name, "table", columns) }
	table("schema_version", "version integer not null, serves integer not null, applied_at timestamptz not null")
	table("queue", "id integer not null, name text not null")
	const ready = "pos bigint not null, visible_at timestamptz not null, lease_owner bigint, first_due timestamptz not null, id uuid not null, " +
		"queue integer not null, generation integer not null, attempt integer not null, segment smallint not null, type text not null, " +
		"headers bytea, state bytea, payload bytea not null"
	relation("ready", "partitioned", ready)
	for seg := range segment(segments) {
		relation(seg.table(), fmt.Sprintf("partition FOR VALUES IN ('%d')", seg), ready)
		objects = append(objects, schemaObject{"index " + seg.table() + "_pkey", "unique btree on " + seg.table() + " (queue, pos)"})
	}
	table("delayed", "pos bigint not null, due_at timestamptz not null, first_due timestamptz not null, id uuid not null, queue integer not null, "+
		"generation integer not null, attempt integer not null, type text not null, headers bytea, state bytea, payload bytea not null")
	table("dead", "pos bigint not null, dead_at timestamptz not null, first_due timestamptz not null, id uuid not null, queue integer not null, "+
		"generation integer not null, attempts integer not null, replaced_by uuid, type text not null, dead_letter_queue text not null, reason text not null, "+
		"error text not null, error_type text not null, last_owner text not null, headers bytea, state bytea, payload bytea not null")
	table("history", "pos bigint not null, completed_at timestamptz not null, first_due timestamptz not null, id uuid not null, queue integer not null, "+
		"generation integer not null, attempts integer not null, type text not null, owner text not null, headers bytea, state bytea, payload bytea not null")
	for _, index := range []schemaObject{
		{"schema_version_pkey", "unique btree on schema_version (version)"},
		{"queue_pkey", "unique btree on queue (id)"},
		{"queue_name_key", "unique btree on queue (name)"},
		{"delayed_pkey", "unique btree on delayed (queue, due_at, pos)"},
		{"dead_pkey", "unique btree on dead (queue, pos)"},
		{"dead_id", "btree on dead (id)"},
		{"history_pkey", "unique btree on history (queue, pos)"},
		{"history_completed_at", "brin on history (completed_at)"},
	} {
		objects = append(objects, schemaObject{"index " + index.name, index.is})
	}
	for _, sequence := range []string{"ready_pos", "ring", "queue_id_seq", "delayed_pos_seq", "dead_pos_seq", "history_pos_seq"} {
		objects = append(objects, schemaObject{"sequence " + sequence, "sequence"})
	}
	for i := range fronts {
		objects = append(objects, schemaObject{fmt.Sprint("sequence front_", i), "sequence"})
	}
	return append(objects, schemaObject{"function lease_lost()", "integer"})
}
