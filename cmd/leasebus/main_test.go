package main

import (
	"bytes"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/leasebus/leasebus/internal/testservers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func called(t *testing.T, dsnInEnv string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(t.Context(), args, func(string) string { return dsnInEnv }, &out, &err)
	return code, out.String(), err.String()
}

func TestMigrateAndValidate_S61(t *testing.T) {
	t.Parallel()
	pg := testservers.Postgres(t)
	for _, step := range []struct {
		env    string
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{"", []string{"validate", "--dsn", pg.DSN()}, 1, "", `leasebus migrate`},
		{"", []string{"migrate", "--dsn", pg.DSN()}, 0, "schema \"leasebus\" is up to date\n", ""},
		{pg.DSN(), []string{"migrate"}, 0, "schema \"leasebus\" is up to date\n", ""},
		{pg.DSN(), []string{"validate"}, 0, "schema \"leasebus\" has everything\n", ""},
		{pg.DSN(), []string{"validate", "--schema", "it's"}, 1, "", `leasebus migrate --schema "it's"`},
	} {
		code, stdout, stderr := called(t, step.env, step.args...)
		if code != step.code || stdout != step.stdout || !strings.Contains(stderr, step.stderr) || step.stderr == "" && stderr != "" {
			t.Errorf("%q: exit code %d, stdout %q, stderr %q; want %d, %q, %q", step.args, code, stdout, stderr, step.code, step.stdout, step.stderr)
		}
	}
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{nil, 2, "Usage: leasebus COMMAND"},
		{[]string{"drop"}, 2, `unknown command "drop"`},
		{[]string{"migrate"}, 2, "give --dsn or set LEASEBUS_POSTGRES"},
		{[]string{"migrate", "now"}, 2, `unexpected argument "now"`},
		{[]string{"migrate", "--dsn", "postgres://u:" + secret + "@h:port/x"}, 2, "cannot be parsed"},
		{[]string{"migrate", "--dsn", "postgres://u:" + secret + "@127.0.0.1:1/x"}, 1, "connect"},
		{[]string{"migrate", "--table", "x"}, 2, "flag provided but not defined"},
		{[]string{"migrate", "--help"}, 0, "the schema of the tables"},
	} {
		code, stdout, stderr := called(t, "", tt.args...)
		if code != tt.code || stdout != "" || !strings.Contains(stderr, tt.want) || strings.Contains(stderr, secret) {
			t.Errorf("%q: exit code %d, stdout %q, stderr %q; want %d and %q, and no password", tt.args, code, stdout, stderr, tt.code, tt.want)
		}
	}
}
