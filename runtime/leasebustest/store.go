package leasebustest

import (
	"context"
	"slices"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// Store is a [memory.Store] that remembers everything that was published to it. It can stand wherever a service has its
// inbox, outbox or broker, and may be used concurrently.
type Store struct {
	*memory.Store

	mu        sync.Mutex
	published []leasebus.Outgoing
}

// NewStore makes an empty store.
func NewStore(opts ...memory.Option) *Store { return &Store{Store: memory.New(opts...)} }

// Publish implements [leasebus.Publisher].
func (s *Store) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	if err := s.Store.Publish(ctx, out, receipts); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range out {
		kept := out[i]
		kept.Payload = slices.Clone(kept.Payload) // the caller may reuse its buffer
		s.published = append(s.published, kept)
	}
	return nil
}

// PublishedMessage is a message as it was published: with its id, queue, headers, and the time it is for.
type PublishedMessage[M proto.Message] struct {
	leasebus.Outgoing

	Message M
}

// Published returns the messages of type M that were published to s so far, in their order, handled ones too.
// One that cannot be decoded fails the test.
func Published[M proto.Message](tb testing.TB, s *Store) []PublishedMessage[M] {
	tb.Helper()
	typeOf := typeOf[M](tb)
	name := string(typeOf.Descriptor().FullName())
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []PublishedMessage[M]
	for _, out := range s.published {
		if out.Type != name {
			continue
		}
		m := typeOf.New().Interface()
		if err := proto.Unmarshal(out.Payload, m); err != nil {
			tb.Fatalf("leasebustest: message %s in queue %q is no %s: %v", out.ID, out.Queue, name, err)
		}
		found = append(found, PublishedMessage[M]{Outgoing: out, Message: m.(M)}) //nolint:forcetypeassert // its own type made it
	}
	return found
}

// typeOf fails the test if M is an interface, as the inferred type of a table's column can be.
func typeOf[M proto.Message](tb testing.TB) protoreflect.MessageType {
	tb.Helper()
	var zero M
	if any(zero) == nil {
		tb.Fatalf("leasebustest: the message type is an interface; name a generated message type")
	}
	return zero.ProtoReflect().Type()
}
