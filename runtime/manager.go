package leasebus

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"google.golang.org/protobuf/proto"
)

// managerPage is how many dead letters a manager reads or acts on at once.
const managerPage = 200

// What managers answer about a dead letter.
var (
	// ErrNotFound: no dead letter has this id.
	ErrNotFound = errors.New("leasebus: dead letter not found")
	// ErrReplaced: an edited message has taken the dead letter's place; it can be neither edited nor requeued.
	ErrReplaced = errors.New("leasebus: dead letter was replaced by an edited message")
	// ErrAmbiguous: several dead letters have this id.
	ErrAmbiguous = errors.New("leasebus: several dead letters have this id")
	// ErrUndecodable: the payload is no message of the type.
	ErrUndecodable = errors.New("leasebus: payload cannot be decoded")
	// ErrWouldLoseFields: the payload holds fields that this program's version of the message does not know and that
	// an edit would drop.
	ErrWouldLoseFields = errors.New("leasebus: edit would lose unknown fields")
	// ErrFilterNeeded: a filter that selects everything was given to an action that deletes.
	ErrFilterNeeded = errors.New("leasebus: the filter is empty; name what to discard, or use DiscardAll")
)

// TypedManager is what an operator does to the messages of one type. Generated code makes one for each annotated
// message. It may be used concurrently.
type TypedManager[M proto.Message] struct {
	policy *Policy
	store  Operator
	by     string
}

// ManagerOption changes what [NewTypedManager] makes.
type ManagerOption interface{ applyManager(*managerOptions) }

type managerOptions struct{ by string }

type managerOptionFunc func(*managerOptions)

func (f managerOptionFunc) applyManager(o *managerOptions) { f(o) }

// By names who acts, for the record that is kept with what is acted on. Default host:pid.
func By(name string) ManagerOption {
	return managerOptionFunc(func(o *managerOptions) { o.by = storableText(name, MaxNameBytes) })
}

// NewTypedManager binds a message type to the store that keeps its messages.
func NewTypedManager[M proto.Message](policy *Policy, store Operator, opts ...ManagerOption) *TypedManager[M] {
	o := managerOptions{by: processLabel()}
	for _, opt := range opts {
		opt.applyManager(&o)
	}
	if l, ok := store.(Learner); ok {
		l.Learn(policy)
	}
	return &TypedManager[M]{policy: policy, store: store, by: o.by}
}

// TypedDeadLetter is a dead letter with its message.
type TypedDeadLetter[M proto.Message] struct {
	DeadLetter
	// Message is the decoded payload; nil if DecodeError says why it cannot be decoded.
	Message     M
	DecodeError error
}

// RequeueResult says what a requeue did.
type RequeueResult struct {
	// Requested counts the ids or dead letters that were to be requeued, Requeued those that were.
	Requested, Requeued int
	// Skipped has a line for each that was not.
	Skipped []Skipped
}

// Skipped is a message that an action left alone.
type Skipped struct {
	ID  ID
	Why Disposition
}

// DeadLetters iterates over the dead letters that match, oldest first, reading page by page. It ends at the first error.
func (m *TypedManager[M]) DeadLetters(ctx context.Context, f Filter) iter.Seq2[TypedDeadLetter[M], error] {
	return func(yield func(TypedDeadLetter[M], error) bool) {
		for page, err := range m.pages(ctx, f) {
			if err != nil {
				yield(TypedDeadLetter[M]{}, m.failed("list", err))
				return
			}
			for i := range page {
				if !yield(m.typed(page[i]), nil) {
					return
				}
			}
		}
	}
}

// Page returns up to limit dead letters that match, beginning behind after ("" = at the oldest), and the cursor for the
// next page, "" if there is none.
func (m *TypedManager[M]) Page(ctx context.Context, f Filter, after Cursor, limit int) ([]TypedDeadLetter[M], Cursor, error) {
	if limit < 1 {
		return nil, "", m.failed("page", fmt.Errorf("limit %d is out of range; allowed is 1 or more", limit))
	}
	page, err := m.store.DeadLetters(ctx, m.policy.Queue, f, after, limit)
	if err != nil {
		return nil, "", m.failed("page", err)
	}
	typed := make([]TypedDeadLetter[M], len(page))
	for i := range page {
		typed[i] = m.typed(page[i])
	}
	next := Cursor("")
	if len(page) == limit {
		next = page[limit-1].Cursor
	}
	return typed, next, nil
}

// Get returns the dead letter with this id; [ErrNotFound] if there is none. Of twins it is the oldest.
func (m *TypedManager[M]) Get(ctx context.Context, id ID) (TypedDeadLetter[M], error) {
	found, err := m.store.DeadLetters(ctx, m.policy.Queue, Filter{IDs: []ID{id}}, "", 1)
	if err == nil && len(found) == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return TypedDeadLetter[M]{}, m.failed("get "+id.String(), err)
	}
	return m.typed(found[0]), nil
}

// Requeue makes the dead letters with these ids pending again, due now. Attempts and age restart, history stays.
// Dead letters that share an id (one message published twice) are acted on together.
func (m *TypedManager[M]) Requeue(ctx context.Context, ids ...ID) (RequeueResult, error) {
	refs := make([]DeadLetterRef, len(ids))
	for i, id := range ids {
		refs[i].ID = id
	}
	var result RequeueResult
	for len(refs) > 0 {
		n := min(len(refs), managerPage)
		if err := m.requeue(ctx, refs[:n], &result); err != nil {
			return result, m.failed("requeue", err)
		}
		refs = refs[n:]
	}
	return result, nil
}

// RequeueAll requeues every dead letter that matches f and was there when it was called: one that fails and is
// dead-lettered again meanwhile is not requeued twice. Those that an edit has replaced are left alone. It works in
// batches; with an error, the result says how far it came, and calling it again goes on.
func (m *TypedManager[M]) RequeueAll(ctx context.Context, f Filter) (RequeueResult, error) {
	var result RequeueResult
	err := m.eachPage(ctx, f, func(page []DeadLetter) error {
		refs := make([]DeadLetterRef, 0, len(page))
		for i := range page {
			if page[i].ReplacedBy == (ID{}) {
				refs = append(refs, page[i].ref())
			}
		}
		return m.requeue(ctx, refs, &result)
	})
	if err != nil {
		return result, m.failed("requeue all", err)
	}
	return result, nil
}

func (m *TypedManager[M]) requeue(ctx context.Context, refs []DeadLetterRef, result *RequeueResult) error {
	if len(refs) == 0 {
		return nil
	}
	done, err := m.store.Requeue(ctx, m.policy.Queue, refs, m.by)
	if err != nil {
		return err
	}
	result.Requested += len(refs)
	for i, disposition := range done {
		if disposition == DispositionDone {
			result.Requeued++
		} else {
			result.Skipped = append(result.Skipped, Skipped{refs[i].ID, disposition})
		}
	}
	return nil
}

// RequeueEdited lets edit change the message of a dead letter and publishes it as a new one, with a new id and the
// headers of the old, linked to it. The dead letter stays as the record, marked as replaced: it can be neither edited
// nor requeued from then on.
//
// Nothing happens if edit returns an error, if the payload cannot be decoded ([ErrUndecodable]), if the edit would drop
// fields that this program does not know ([ErrWouldLoseFields]), or if the result is too large to be published.
func (m *TypedManager[M]) RequeueEdited(ctx context.Context, id ID, edit func(M) error) (Receipt, error) {
	receipt, err := m.requeueEdited(ctx, id, edit)
	if err != nil {
		return Receipt{}, m.failed("edit and requeue "+id.String(), err)
	}
	return receipt, nil
}

func (m *TypedManager[M]) requeueEdited(ctx context.Context, id ID, edit func(M) error) (Receipt, error) {
	dead, err := m.editable(ctx, id)
	if err != nil {
		return Receipt{}, err
	}
	if losesUnknown(dead.Message.ProtoReflect().Descriptor(), dead.Payload) {
		return Receipt{}, fmt.Errorf("%w: map entries hold fields that this program's %s does not know; edit with a newer version", ErrWouldLoseFields, m.policy.Type)
	}
	if err := edit(dead.Message); err != nil {
		return Receipt{}, err
	}
	payload, err := proto.Marshal(dead.Message)
	if err != nil {
		return Receipt{}, err
	}
	edited := dead.Envelope
	edited.ID, edited.Payload, edited.Type = NewID(), payload, m.policy.Type
	edited.Headers = dead.Headers.With(HeaderReplaces, id.String()).With(HeaderCausation, id.String())
	if err := edited.Validate(DefaultMaxPayload); err != nil {
		return Receipt{}, err
	}
	done, err := m.store.Replace(ctx, m.policy.Queue, dead.ref(), &edited, m.by)
	if err != nil {
		return Receipt{}, err
	}
	switch done {
	case DispositionDone:
		return Receipt{ID: edited.ID}, nil
	case DispositionReplaced:
		return Receipt{}, ErrReplaced
	default:
		return Receipt{}, fmt.Errorf("%w: %v", ErrNotFound, done)
	}
}

// editable finds the one dead letter with this id that an edit can start from.
func (m *TypedManager[M]) editable(ctx context.Context, id ID) (TypedDeadLetter[M], error) {
	found, err := m.store.DeadLetters(ctx, m.policy.Queue, Filter{IDs: []ID{id}}, "", 2)
	if err != nil {
		return TypedDeadLetter[M]{}, err
	}
	if len(found) == 0 {
		return TypedDeadLetter[M]{}, ErrNotFound
	}
	dead := m.typed(found[0])
	switch {
	case len(found) > 1:
		return dead, fmt.Errorf("%w: requeue or discard one of them first", ErrAmbiguous)
	case dead.ReplacedBy != (ID{}):
		return dead, fmt.Errorf("%w: %s", ErrReplaced, dead.ReplacedBy)
	case dead.DecodeError != nil:
		return dead, dead.DecodeError
	}
	return dead, nil
}

// Discard deletes the dead letters that match f and were there when it was called, and returns how many.
// An empty filter is refused: [ErrFilterNeeded].
func (m *TypedManager[M]) Discard(ctx context.Context, f Filter) (int, error) {
	if f.IsZero() {
		return 0, m.failed("discard", ErrFilterNeeded)
	}
	return m.discard(ctx, f)
}

// DiscardAll deletes every dead letter of the queue that was there when it was called, and returns how many.
func (m *TypedManager[M]) DiscardAll(ctx context.Context) (int, error) {
	return m.discard(ctx, Filter{})
}

func (m *TypedManager[M]) discard(ctx context.Context, f Filter) (int, error) {
	discarded := 0
	err := m.eachPage(ctx, f, func(page []DeadLetter) error {
		refs := make([]DeadLetterRef, len(page))
		for i := range page {
			refs[i] = page[i].ref()
		}
		done, err := m.store.Discard(ctx, m.policy.Queue, refs, m.by)
		for _, disposition := range done {
			if disposition == DispositionDone {
				discarded++
			}
		}
		return err
	})
	if err != nil {
		return discarded, m.failed("discard", err)
	}
	return discarded, nil
}

// Stats counts the messages of the queue by state.
func (m *TypedManager[M]) Stats(ctx context.Context) (QueueStats, error) {
	stats, err := m.store.Stats(ctx, m.policy.Queue)
	if err != nil {
		return QueueStats{}, m.failed("stats", err)
	}
	return stats, nil
}

// eachPage acts on what matches now, page by page: a cut-off is taken first.
func (m *TypedManager[M]) eachPage(ctx context.Context, f Filter, act func([]DeadLetter) error) error {
	if f.UpTo == "" {
		last, err := m.store.LastDeadLetter(ctx, m.policy.Queue)
		if err != nil {
			return err
		}
		f.UpTo = last
	}
	for page, err := range m.pages(ctx, f) {
		if err != nil {
			return err
		}
		if err := act(page); err != nil {
			return err
		}
	}
	return nil
}

func (m *TypedManager[M]) pages(ctx context.Context, f Filter) iter.Seq2[[]DeadLetter, error] {
	return func(yield func([]DeadLetter, error) bool) {
		for after := Cursor(""); ; {
			page, err := m.store.DeadLetters(ctx, m.policy.Queue, f, after, managerPage)
			if err != nil {
				yield(nil, err)
				return
			}
			if len(page) > 0 && !yield(page, nil) || len(page) < managerPage {
				return
			}
			after = page[len(page)-1].Cursor
		}
	}
}

func (m *TypedManager[M]) typed(d DeadLetter) TypedDeadLetter[M] {
	typed := TypedDeadLetter[M]{DeadLetter: d}
	typed.Message, typed.DecodeError = decodeTo[M](d.Payload)
	return typed
}

func (m *TypedManager[M]) failed(what string, err error) error {
	return fmt.Errorf("leasebus: %s in queue %s: %w", what, m.policy.Queue, err)
}

func (d *DeadLetter) ref() DeadLetterRef { return DeadLetterRef{ID: d.ID, Cursor: d.Cursor} }
