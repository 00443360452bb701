package amqp

import (
	"context"
	"sync"
	"time"
)

// latest is something that comes and goes, and can be waited for. Make one with newLatest.
type latest[T any] struct {
	mu      sync.Mutex
	value   *T    // nil while there is none
	err     error // why there is none
	since   time.Time
	changed chan struct{} // closed and replaced at each set
}

func newLatest[T any](err error) *latest[T] {
	return &latest[T]{err: err, since: time.Now(), changed: make(chan struct{})}
}

func (l *latest[T]) set(value *T, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if (l.value == nil) != (value == nil) {
		l.since = time.Now()
	}
	l.value, l.err = value, err
	close(l.changed)
	l.changed = make(chan struct{})
}

// get returns what there is, why there is none, since when that is so, and what is closed at the next change.
func (l *latest[T]) get() (value *T, err error, since time.Time, changed <-chan struct{}) { //nolint:revive,staticcheck // one of the things it says
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.value, l.err, l.since, l.changed
}

// await waits for one that is good. When ctx ends, why is the reason for which there is none.
func (l *latest[T]) await(ctx context.Context, good func(*T) bool) (value *T, why error) {
	for {
		value, err, _, changed := l.get()
		if value != nil && good(value) {
			return value, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, err
		}
	}
}
