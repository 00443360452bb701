package postgres

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// sampleArrays are one of each type, with what its text form is.
func sampleArrays() (arrays []*array, texts []string) {
	for _, sample := range []struct {
		element uint32
		text    string
		add     func(a *array)
	}{
		{pgtype.Int4OID, "{1,-2}", func(a *array) { a.addInt32(1); a.addInt32(-2) }},
		{pgtype.Int8OID, "{-4611686018427387904}", func(a *array) { a.addInt64(-1 << 62) }},
		{pgtype.Int8OID, "{}", func(*array) {}},
		{pgtype.BoolOID, "{true,false}", func(a *array) { a.addBool(true); a.addBool(false) }},
		{pgtype.TextOID, `{"a\"b\\c","","NULL","ü,{}"}`, func(a *array) {
			for _, s := range []string{`a"b\c`, "", "NULL", "ü,{}"} {
				a.addText(s)
			}
		}},
		{pgtype.ByteaOID, `{NULL,"\\x","\\x00ff"}`, func(a *array) { a.addBytes(nil); a.addBytes([]byte{}); a.addBytes([]byte{0, 255}) }},
		{pgtype.UUIDOID, "{01000000-0000-0000-0000-000000000000}", func(a *array) { a.addID(leasebus.ID{1}) }},
	} {
		a := &array{}
		a.start(sample.element)
		sample.add(a)
		arrays, texts = append(arrays, a), append(texts, sample.text)
	}
	return arrays, texts
}

func TestArray_Literals(t *testing.T) {
	t.Parallel()
	arrays, texts := sampleArrays()
	args, want := []any{"as it is"}, []any{"as it is"}
	for i := range arrays {
		args, want = append(args, arrays[i]), append(want, texts[i])
	}
	if diff := cmp.Diff(want, literals(args)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// The server reads an array as the same in every way of sending it.
func TestArray_IsReadByTheServer(t *testing.T) {
	t.Parallel()
	config, err := pgx.ParseConfig(testservers.Postgres(t).DSN())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	takeArrays(conn)
	arrays, texts := sampleArrays()
	types := []string{"int[]", "bigint[]", "bigint[]", "bool[]", "text[]", "bytea[]", "uuid[]"}
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		for i, a := range arrays {
			var same bool
			var n int
			err := conn.QueryRow(t.Context(), "SELECT $1::"+types[i]+" = '"+texts[i]+"'::"+types[i]+", cardinality($1::"+types[i]+")", mode, a).Scan(&same, &n)
			if err != nil || !same || n != a.n {
				t.Errorf("%v, %s: the same: %t, %d elements of %d, %v", mode, texts[i], same, n, a.n, err)
			}
		}
	}
}
