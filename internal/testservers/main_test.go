//go:build unix

package testservers

import (
	"context"
	"errors"
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	RunWorker(map[string]func(context.Context) error{
		"count":   count,
		"refuse":  func(context.Context) error { return errors.New("refused") },
		"cluster": holdCluster,
		"shared":  holdShared,
		"broker":  holdBroker,
	})
	goleak.VerifyTestMain(m)
}

// count says numbers, for ever.
func count(ctx context.Context) error {
	for i := 0; ctx.Err() == nil; i++ {
		Sayf("%d %s", i, os.Getenv("COUNT_NAME"))
	}
	Sayf("stopped")
	return nil
}

// holdCluster starts a server in the folder HOLD and does not stop it.
func holdCluster(ctx context.Context) error {
	folder := os.Getenv("HOLD")
	if _, err := guard(folder); err != nil {
		return err
	}
	server, err := newInstance(ctx, folder)
	if err != nil {
		return err
	}
	if err := server.start(ctx); err != nil {
		return err
	}
	Sayf("dsn %s", server.dsn("postgres"))
	<-ctx.Done()
	return nil
}

// holdBroker starts a broker in the folder HOLD and does not stop it.
func holdBroker(ctx context.Context) error {
	folder := os.Getenv("HOLD")
	if _, err := guard(folder); err != nil {
		return err
	}
	broker, err := newNode(ctx, folder)
	if err != nil {
		return err
	}
	if err := broker.start(ctx); err != nil {
		return err
	}
	Sayf("address %s", broker.address())
	<-ctx.Done()
	return nil
}

// holdShared uses the shared server of the folder HOLD.
func holdShared(ctx context.Context) error {
	kind := sharedPostgres
	if os.Getenv("KIND") == sharedRabbitMQ.name {
		kind = sharedRabbitMQ
	}
	address, _, err := shared{os.Getenv("HOLD"), kind}.join(ctx)
	if err != nil {
		return err
	}
	Sayf("address %s", address)
	<-ctx.Done()
	return nil
}

// within waits for a condition that nobody announces.
func within(t *testing.T, what string, try func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), longEnough)
	defer cancel()
	if err := eventually(ctx, try); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}
