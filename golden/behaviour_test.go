package golden_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/leasebus/leasebus/options"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// TestLiteralsAreWhatTheAnnotationsMean holds the literal in the generated code against what the resolver makes of the
// descriptor that is compiled into the program.
func TestLiteralsAreWhatTheAnnotationsMean(t *testing.T) {
	t.Parallel()
	for _, m := range messages {
		resolved, err := options.Resolve(m.empty().ProtoReflect().Descriptor())
		if err != nil {
			t.Errorf("%s: %v", m.fullName(), err)
			continue
		}
		if diff := cmp.Diff(*resolved, m.policy()); diff != "" {
			t.Errorf("%s: resolved (-) and generated (+) differ:\n%s", m.fullName(), diff)
		}
		if err := resolved.Validate(); err != nil {
			t.Error(err)
		}
	}
}

// TestGeneratedCodeRuns_S21_S33 takes each message its whole way: published, handled, failed, dead-lettered, requeued, handled.
func TestGeneratedCodeRuns_S21_S33(t *testing.T) {
	t.Parallel()
	if len(messages) == 0 {
		t.Fatal("the table of messages is empty; run go test ./golden -update")
	}
	for _, m := range messages {
		t.Run(m.fullName(), func(t *testing.T) {
			t.Parallel()
			if p := m.policy(); p.Idempotency != nil || p.Ordering != nil {
				m.refused(t)
				return
			}
			synctest.Test(t, m.run)
		})
	}
}

// TestOpaqueBuild compiles the hybrid API in its other form, in which no field can be touched.
func TestOpaqueBuild(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), "go", "vet", "-tags", "protoopaque", "./edition2023/...")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// refused holds that settings which the runtime cannot honour yet are refused instead of ignored.
func (g generated[M]) refused(t *testing.T) {
	t.Helper()
	store := memory.New()
	if _, err := g.newPublisher(store); !errors.Is(err, leasebus.ErrUnsupported) {
		t.Errorf("the publisher answers %v, want %v", err, leasebus.ErrUnsupported)
	}
	processor, err := leasebus.NewProcessor(store)
	if err != nil {
		t.Fatal(err)
	}
	err = g.register(processor, func(context.Context, M) error { return nil })
	if !errors.Is(err, leasebus.ErrUnsupported) {
		t.Errorf("the registration answers %v, want %v", err, leasebus.ErrUnsupported)
	}
}

func (g generated[M]) run(t *testing.T) {
	store := memory.New()
	publisher, err := g.newPublisher(store)
	if err != nil {
		t.Fatal(err)
	}
	manager := g.newManager(store)

	g.publish(t, publisher, "first")
	g.handleOnce(t, store, "first")
	g.wantDeadLetters(t, manager, 0)

	retry, letter := g.policy().Retry, g.policy().DeadLetter
	id := g.publish(t, publisher, "second")
	g.handle(t, store, "second", errors.New("does not work"), retry.MaxAttempts)
	if letter.Discard {
		g.wantDeadLetters(t, manager, 0)
		return
	}
	dead := g.wantDeadLetters(t, manager, 1)[0]
	if dead.ID != id || dead.Reason != leasebus.ReasonExhausted || dead.Attempts != retry.MaxAttempts ||
		dead.DeadLetterQueue != letter.Queue || !proto.Equal(dead.Message, g.message("second")) {
		t.Errorf("dead letter %+v is not message %s after %d attempts", dead, id, retry.MaxAttempts)
	}

	if result, err := manager.Requeue(t.Context(), id); err != nil || result.Requeued != 1 {
		t.Fatalf("requeue: %+v, %v", result, err)
	}
	g.handleOnce(t, store, "second")
	g.wantDeadLetters(t, manager, 0)
}

func (g generated[M]) publish(t *testing.T, publisher *leasebus.TypedPublisher[M], text string) leasebus.ID {
	t.Helper()
	receipt, err := publisher.Publish(t.Context(), g.message(text))
	if err != nil {
		t.Fatal(err)
	}
	return receipt.ID
}

// handleOnce handles what must be a first attempt.
func (g generated[M]) handleOnce(t *testing.T, store *memory.Store, text string) {
	t.Helper()
	if attempts := g.handle(t, store, text, nil, 1); attempts[0] != 1 {
		t.Errorf("%s: the first attempt is number %d", text, attempts[0])
	}
}

// handle runs a processor until its handler was called n times and what follows from that is stored.
// It returns the numbers of the attempts.
func (g generated[M]) handle(t *testing.T, store *memory.Store, text string, answer error, n int) []int {
	t.Helper()
	processor, err := leasebus.NewProcessor(store)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var attempts []int
	err = g.register(processor, func(ctx context.Context, m M) error {
		delivery, _ := leasebus.DeliveryFrom(ctx)
		attempts = append(attempts, delivery.Attempt())
		if want := g.message(text); !proto.Equal(m, want) {
			t.Errorf("the handler was given %v, want %v", m, want)
		}
		if len(attempts) == n {
			stop()
		}
		return answer
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := processor.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if len(attempts) != n {
		t.Fatalf("attempts %v, want %d", attempts, n)
	}
	return attempts
}

func (g generated[M]) wantDeadLetters(t *testing.T, manager *leasebus.TypedManager[M], n int) []leasebus.TypedDeadLetter[M] {
	t.Helper()
	var all []leasebus.TypedDeadLetter[M]
	for d, err := range manager.DeadLetters(t.Context(), leasebus.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, d)
	}
	if len(all) != n {
		t.Fatalf("%d dead letters, want %d: %+v", len(all), n, all)
	}
	return all
}

// message makes a message that can be told from others, if it has a text to tell it by.
func (g generated[M]) message(text string) M {
	m, ok := g.empty().(M)
	if !ok {
		panic(fmt.Sprintf("%T is not of its own type", m))
	}
	fields := m.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if field := fields.Get(i); field.Kind() == protoreflect.StringKind && field.Cardinality() != protoreflect.Repeated {
			m.ProtoReflect().Set(field, protoreflect.ValueOfString(text))
		}
	}
	return m
}
