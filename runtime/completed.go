package leasebus

import (
	"context"
	"fmt"
	"iter"
	"time"

	"google.golang.org/protobuf/proto"
)

// CompletedMessage is a message that was handled and is kept for as long as its policy's RetainCompleted says, with all
// that happened to it on the way.
type CompletedMessage struct {
	Envelope
	Cursor Cursor
	// Attempts counts how often it was handed to work since it was published or last requeued, the last time included.
	Attempts    int
	Generation  int64
	CompletedAt time.Time
	LastOwner   string
	// History holds the newest failures, Requeues the newest operator actions; both oldest first.
	History  []FailureRecord
	Requeues []RequeueRecord
}

// TypedCompletedMessage is a completed message, decoded.
type TypedCompletedMessage[M proto.Message] struct {
	CompletedMessage
	// Message is the decoded payload; nil if DecodeError says why it cannot be decoded.
	Message     M
	DecodeError error
}

// Completed iterates over the completed messages that are kept, oldest first, reading page by page. It ends at the
// first error.
func (m *TypedManager[M]) Completed(ctx context.Context) iter.Seq2[TypedCompletedMessage[M], error] {
	return func(yield func(TypedCompletedMessage[M], error) bool) {
		for after := Cursor(""); ; {
			page, err := m.store.Completed(ctx, m.policy.Queue, after, managerPage)
			if err != nil {
				yield(TypedCompletedMessage[M]{}, m.failed("list completed", err))
				return
			}
			for i := range page {
				typed := TypedCompletedMessage[M]{CompletedMessage: page[i]}
				typed.Message, typed.DecodeError = decodeTo[M](page[i].Payload)
				if !yield(typed, nil) {
					return
				}
			}
			if len(page) < managerPage {
				return
			}
			after = page[len(page)-1].Cursor
		}
	}
}

func decodeTo[M proto.Message](payload []byte) (m M, err error) {
	message, err := decoder[M]()(payload)
	if err != nil {
		return m, fmt.Errorf("%w: %w", ErrUndecodable, err)
	}
	return message.(M), nil //nolint:forcetypeassert // decoder makes nothing else
}
