package leasebus

import (
	"slices"
	"strings"
	"time"
)

// HistoryLimit is how many failures and requeues a store keeps with a message; the newest stay.
const HistoryLimit = 20

// Cursor is a position among a queue's dead letters, for paging. Its text is the backend's own.
type Cursor string

// DeadLetter is a message that no attempt could handle, with all that is known about why.
type DeadLetter struct {
	// Envelope keeps the original queue and type.
	Envelope
	Cursor          Cursor
	DeadLetterQueue string
	Reason          Reason
	Error           string
	ErrorType       string
	Attempts        int
	Generation      int64
	// FirstFailed is zero if no attempt ended with a failure.
	FirstFailed    time.Time
	DeadLetteredAt time.Time
	LastOwner      string
	// History holds the newest failures, Requeues the newest operator actions; both oldest first.
	History  []FailureRecord
	Requeues []RequeueRecord
	// ReplacedBy is the id of the edited message that took this one's place. Zero = not replaced.
	ReplacedBy ID
}

// FailureRecord is one failed attempt in a message's history.
type FailureRecord struct {
	Failure
	At    time.Time
	Owner string
}

// RequeueRecord says who sent a dead letter back to work.
type RequeueRecord struct {
	By string
	At time.Time
}

// DeadLetterRef names what an operator acts on: one dead letter by its position, or, without a Cursor, all dead letters
// with that id (a message published twice has two).
type DeadLetterRef struct {
	ID     ID
	Cursor Cursor
}

// Disposition is what became of one reference of an operator's action.
type Disposition uint8

const (
	// DispositionDone: acted on.
	DispositionDone Disposition = iota
	// DispositionNotFound: no message with this id.
	DispositionNotFound
	// DispositionNotDeadLettered: the message is there, but not as a dead letter.
	DispositionNotDeadLettered
	// DispositionMoved: the dead letter at this position went elsewhere meanwhile.
	DispositionMoved
	// DispositionReplaced: an edited message has taken its place.
	DispositionReplaced
)

func (d Disposition) String() string {
	return [...]string{"done", "not found", "not dead-lettered", "moved meanwhile", "replaced by an edited message"}[d]
}

// Filter selects dead letters of a queue. Every field that is set must match; the zero Filter selects all.
type Filter struct {
	IDs  []ID
	Type string
	// Reason is one reason, DeadLetterQueue one route.
	Reason          Reason
	DeadLetterQueue string
	// ErrorContains looks in the last error's text, upper and lower case told apart.
	ErrorContains string
	// Since and Before bound the time of dead-lettering: Since ≤ t < Before, on the store's clock.
	Since, Before time.Time
	// UpTo leaves out what was dead-lettered behind this position.
	UpTo Cursor
}

// IsZero reports whether f selects everything.
func (f Filter) IsZero() bool {
	return len(f.IDs) == 0 && f.Type == "" && f.Reason == "" && f.DeadLetterQueue == "" && f.ErrorContains == "" &&
		f.Since.IsZero() && f.Before.IsZero() && f.UpTo == ""
}

// Match reports whether d is selected, as far as d alone can tell: UpTo is the store's to compare.
func (f Filter) Match(d *DeadLetter) bool {
	switch {
	case len(f.IDs) > 0 && !slices.Contains(f.IDs, d.ID),
		f.Type != "" && f.Type != d.Type,
		f.Reason != "" && f.Reason != d.Reason,
		f.DeadLetterQueue != "" && f.DeadLetterQueue != d.DeadLetterQueue,
		!strings.Contains(d.Error, f.ErrorContains),
		!f.Since.IsZero() && d.DeadLetteredAt.Before(f.Since),
		!f.Before.IsZero() && !d.DeadLetteredAt.Before(f.Before):
		return false
	}
	return true
}

// QueueStats counts the messages of one queue by state.
type QueueStats struct {
	// Pending wait for a worker, those scheduled for later included; Failed wait for their next attempt.
	Pending, Processing, Failed, DeadLettered int64
	// Completed counts only what a policy's retain_completed keeps.
	Completed int64
	// Due counts the pending and failed messages that could be leased now, OldestDueAge is how long the first of them
	// has been due.
	Due          int64
	OldestDueAge time.Duration
	// Stuck counts the processing messages whose lease has expired.
	Stuck int64
}
