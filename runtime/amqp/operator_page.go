package amqp

import (
	"reflect"
	"slices"
	"sync"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
)

const (
	// aheadMost and aheadBytes bound what is kept of a reading for the pages that follow, aheadLife how long.
	aheadMost  = 4000
	aheadBytes = 16 << 20
	aheadLife  = 10 * time.Second
)

// page collects the dead letters behind a position, those that come first: one page, and what follows it.
type page struct {
	after, upTo position
	limit       int
	letters     []leasebus.DeadLetter // in order
	bytes       int
	// cut: there were more.
	cut bool
}

func pageOf(f leasebus.Filter, after leasebus.Cursor, limit int) (*page, error) {
	p := &page{upTo: lastPosition(), limit: limit}
	var err error
	if p.after, err = parsePosition(after); err != nil {
		return nil, err
	}
	if f.UpTo != "" {
		if p.upTo, err = parsePosition(f.UpTo); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *page) add(letter *leasebus.DeadLetter) {
	at := positionOf(letter)
	if at.compare(p.after) <= 0 || at.compare(p.upTo) > 0 {
		return
	}
	i, _ := slices.BinarySearchFunc(p.letters, at, func(d leasebus.DeadLetter, at position) int { return positionOf(&d).compare(at) })
	p.letters = slices.Insert(p.letters, i, *letter)
	p.bytes += len(letter.Payload)
	for len(p.letters) > p.limit && (len(p.letters) > p.limit+aheadMost || p.bytes > aheadBytes) {
		last := len(p.letters) - 1
		p.bytes -= len(p.letters[last].Payload)
		p.letters = slices.Delete(p.letters, last, last+1)
		p.cut = true
	}
}

// readAhead keeps what a reading found behind its page, for the next one: else each page would read the whole queue.
type readAhead struct {
	mu      sync.Mutex
	queue   string
	filter  leasebus.Filter
	after   leasebus.Cursor // what letters follow
	letters []leasebus.DeadLetter
	cut     bool // there are more
	until   time.Time
}

// keep returns the page, and keeps the rest.
func (r *readAhead) keep(queue string, f leasebus.Filter, p *page) []leasebus.DeadLetter {
	n := min(p.limit, len(p.letters))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.letters = nil
	if n > 0 {
		r.queue, r.filter, r.after = queue, f, p.letters[n-1].Cursor
		r.letters, r.cut, r.until = p.letters[n:], p.cut, time.Now().Add(aheadLife)
	}
	return slices.Clip(p.letters[:n])
}

// next returns the page behind after, if that is what was kept.
func (r *readAhead) next(queue string, f leasebus.Filter, after leasebus.Cursor, limit int) ([]leasebus.DeadLetter, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.letters) == 0 || r.queue != queue || r.after != after || time.Now().After(r.until) || !reflect.DeepEqual(r.filter, f) {
		return nil, false
	}
	if len(r.letters) < limit && r.cut {
		return nil, false
	}
	n := min(limit, len(r.letters))
	letters := slices.Clip(r.letters[:n])
	r.letters, r.after = r.letters[n:], letters[n-1].Cursor
	return letters, true
}

// forget takes out what has been acted on.
func (r *readAhead) forget(ids map[leasebus.ID][]int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.letters = slices.DeleteFunc(r.letters, func(d leasebus.DeadLetter) bool { return ids[d.ID] != nil })
}
