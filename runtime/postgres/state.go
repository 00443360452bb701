package postgres

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// past is what a message carries besides its columns, in the column state. Most messages have none: it is null until
// something went wrong, or for messages with keys.
//
// The encoding begins with a version and a byte of flags, which Stats reads too. Counters are varints, texts stand
// behind their length, times are 8 bytes. The times of the failures come last, so that the one of a new failure, which
// is the database's to know, can be appended by the statement that records it.
type past struct {
	// failed: it waits for its next attempt.
	failed bool
	// recorded is the last attempt that ended with an outcome that spent it (S10).
	recorded      int
	interruptions int
	deferrals     int

	idempotencyKey, orderingKey string

	requeues []requeue
	// firstFailed is kept apart when the history has lost its first failure. 0 = it has not.
	firstFailed instant
	failures    []failure
}

type requeue struct {
	by string
	at instant
}

type failure struct {
	attempt                int
	text, errorType, owner string
	at                     instant
}

const (
	pastVersion = 1

	flagFailed      = 1 << 0
	flagFirstFailed = 1 << 1
	knownFlags      = flagFailed | flagFirstFailed
)

var errDamaged = errors.New("the state of a message is damaged")

// zero reports whether there is nothing to keep.
func (p *past) zero() bool {
	return p == nil || !p.failed && p.recorded == 0 && p.interruptions == 0 && p.deferrals == 0 &&
		p.idempotencyKey == "" && p.orderingKey == "" && len(p.requeues) == 0 && len(p.failures) == 0 && p.firstFailed == 0
}

// clone is a copy to change: slices are shared and only ever replaced. It makes one of nil.
func (p *past) clone() *past {
	if p == nil {
		return &past{}
	}
	c := *p
	return &c
}

// fail appends a failure whose time the database will write: the encoding lacks it.
func (p *past) fail(f *leasebus.Failure, owner string) {
	kept := p.failures
	if len(kept) == leasebus.HistoryLimit {
		if p.firstFailed == 0 {
			p.firstFailed = kept[0].at
		}
		kept = kept[1:]
	}
	p.failures = append(slices.Clip(kept), failure{attempt: f.Attempt, text: f.Text, errorType: f.ErrorType, owner: owner})
}

func (p *past) actedOn(by string, at instant) {
	kept := p.requeues
	if len(kept) == leasebus.HistoryLimit {
		kept = kept[1:]
	}
	p.requeues = append(slices.Clip(kept), requeue{by, at})
}

// ageFrom is when the message's age began to count: when it was first due, or last requeued (S23).
func (p *past) ageFrom(firstDue instant) instant {
	if p == nil || len(p.requeues) == 0 {
		return firstDue
	}
	return p.requeues[len(p.requeues)-1].at
}

func (p *past) failedFirst() instant {
	if p.firstFailed == 0 && len(p.failures) > 0 {
		return p.failures[0].at
	}
	return p.firstFailed
}

// encode writes p, nil if there is nothing. With stamped, the time of the last failure is left out for the database to
// append.
func (p *past) encode(stamped bool) []byte {
	if p.zero() {
		return nil
	}
	flags := byte(0)
	if p.failed {
		flags |= flagFailed
	}
	if p.firstFailed != 0 {
		flags |= flagFirstFailed
	}
	b := make([]byte, 0, p.size())
	b = append(b, pastVersion, flags)
	b = appendCount(b, p.recorded)
	b = appendCount(b, p.interruptions)
	b = appendCount(b, p.deferrals)
	b = appendText(b, p.idempotencyKey)
	b = appendText(b, p.orderingKey)
	b = appendCount(b, len(p.requeues))
	for _, r := range p.requeues {
		b = appendText(b, r.by)
		b = appendInstant(b, r.at)
	}
	if p.firstFailed != 0 {
		b = appendInstant(b, p.firstFailed)
	}
	b = appendCount(b, len(p.failures))
	for _, f := range p.failures {
		b = appendCount(b, f.attempt)
		b = appendText(b, f.text)
		b = appendText(b, f.errorType)
		b = appendText(b, f.owner)
	}
	for i, f := range p.failures {
		if stamped && i == len(p.failures)-1 {
			break
		}
		b = appendInstant(b, f.at)
	}
	return b
}

// size is an upper bound but for huge counters.
func (p *past) size() int {
	n := 32 + len(p.idempotencyKey) + len(p.orderingKey)
	for _, r := range p.requeues {
		n += 4 + len(r.by) + instantSize
	}
	for _, f := range p.failures {
		n += 12 + len(f.text) + len(f.errorType) + len(f.owner) + instantSize
	}
	return n
}

func appendCount(b []byte, n int) []byte { return binary.AppendUvarint(b, uint64(max(n, 0))) }

func appendText(b []byte, s string) []byte { return append(appendCount(b, len(s)), s...) }

func appendInstant(b []byte, t instant) []byte {
	return binary.BigEndian.AppendUint64(b, uint64(t)) //nolint:gosec // two's complement
}

// decodePast reads what encode and the database wrote. It keeps nothing of b.
func decodePast(b []byte) (*past, error) {
	if b == nil {
		return nil, nil //nolint:nilnil // a message without a past is the rule
	}
	r := stateReader{rest: b}
	if version := r.byte(); version != pastVersion {
		return nil, errDamaged
	}
	flags := r.byte()
	if flags&^byte(knownFlags) != 0 {
		return nil, errDamaged
	}
	p := &past{failed: flags&flagFailed != 0}
	p.recorded, p.interruptions, p.deferrals = r.count(), r.count(), r.count()
	p.idempotencyKey, p.orderingKey = r.text(), r.text()
	if n := r.listed(1 + instantSize); n > 0 {
		p.requeues = make([]requeue, n)
		for i := range p.requeues {
			p.requeues[i] = requeue{by: r.text(), at: r.instant()}
		}
	}
	if flags&flagFirstFailed != 0 {
		p.firstFailed = r.instant()
	}
	if n := r.listed(4 + instantSize); n > 0 {
		p.failures = make([]failure, n)
		for i := range p.failures {
			p.failures[i] = failure{attempt: r.count(), text: r.text(), errorType: r.text(), owner: r.text()}
		}
		for i := range p.failures {
			p.failures[i].at = r.instant()
		}
	}
	if r.bad || len(r.rest) != 0 {
		return nil, errDamaged
	}
	return p, nil
}

// stateReader reads until something is wrong, and then only zeros.
type stateReader struct {
	rest []byte
	bad  bool
}

func (r *stateReader) fail() {
	r.bad = true
	r.rest = nil
}

func (r *stateReader) byte() byte {
	if len(r.rest) == 0 {
		r.fail()
		return 0
	}
	b := r.rest[0]
	r.rest = r.rest[1:]
	return b
}

func (r *stateReader) count() int {
	const most = 1<<31 - 1
	v, n := binary.Uvarint(r.rest)
	if n <= 0 || v > most {
		r.fail()
		return 0
	}
	r.rest = r.rest[n:]
	return int(v)
}

// listed is the number of elements that follow, each at least size bytes long.
func (r *stateReader) listed(size int) int {
	n := r.count()
	if n > len(r.rest)/size {
		r.fail()
		return 0
	}
	return n
}

func (r *stateReader) text() string {
	n := r.count()
	if n > len(r.rest) {
		r.fail()
		return ""
	}
	s := string(r.rest[:n])
	r.rest = r.rest[n:]
	return s
}

func (r *stateReader) instant() instant {
	if len(r.rest) < instantSize {
		r.fail()
		return 0
	}
	t := instant(binary.BigEndian.Uint64(r.rest)) //nolint:gosec // two's complement
	r.rest = r.rest[instantSize:]
	return t
}

// storable makes a text that a column takes, whatever it was recorded as.
func storable(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}
