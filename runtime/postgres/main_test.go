package postgres_test

import (
	"log/slog"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/conformance"
	"github.com/leasebus/leasebus/runtime/postgres"
)

func TestMain(m *testing.M) {
	testservers.RunWorker(faultRoles)
	goleak.VerifyTestMain(m)
}

// logTo shows the inbox's log with the test that fails.
func logTo(t testing.TB) postgres.Option {
	t.Helper()
	return postgres.WithLogger(slog.New(slog.NewTextHandler(t.Output(), nil)))
}

func TestContract(t *testing.T) {
	pg := migrated(t, testservers.Postgres(t))
	contract(t, pg.DSN())
}

// The same where sessions begin their transactions as serializable.
func TestContract_SerializableByDefault(t *testing.T) {
	pg := migrated(t, testservers.Postgres(t))
	contract(t, pg.DSN("default_transaction_isolation=serializable"))
}

func contract(t *testing.T, dsn string) {
	t.Helper()
	conformance.Run(t, conformance.Backend{
		Open: func(t *testing.T) conformance.Store {
			t.Helper()
			return openInbox(t, dsn, logTo(t), postgres.WithConnections(4), postgres.WithSweep(100*time.Millisecond))
		},
		Capabilities: conformance.Everything(),
		Lease:        500 * time.Millisecond,
	})
}

var _ leasebus.Publisher
