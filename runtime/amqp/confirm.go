package amqp

import (
	"context"
	"fmt"
	"sync"

	"github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// headerPublish is the number of a publish, unique on its channel. What RabbitMQ cannot route it sends back with it.
const headerPublish = reservedPrefix + "publish"

// message is one on its way to RabbitMQ.
type message struct {
	amqp091.Publishing
	exchange, key string
}

// session is a channel in confirm mode, with a window of messages that may be on their way at the same time.
type session struct {
	*channel
	free    chan int // the window's places that nothing is in
	returns chan amqp091.Return
	retired chan struct{} // closed when nothing more is to be sent on it
	once    sync.Once     // closes retired

	mu     sync.Mutex
	places []place
	count  int64 // of publishes
	stuck  int   // places whose message nobody waits for any more
}

type place struct {
	publish  int64
	returned string // why RabbitMQ sent it back; "" = it did not
}

func openSession(ctx context.Context, e *epoch, window int) (*session, error) {
	s := &session{
		free: make(chan int, window), places: make([]place, window), retired: make(chan struct{}),
		// A return is taken before its place is left: there is room for all that can come.
		returns: make(chan amqp091.Return, window),
	}
	var err error
	s.channel, err = e.open(ctx, func(ch *amqp091.Channel) error {
		ch.NotifyReturn(s.returns)
		return ch.Confirm(false)
	})
	if err != nil {
		return nil, err
	}
	for at := range window {
		s.free <- at
	}
	return s, nil
}

// flight is a message between its publish and its outcome.
type flight struct {
	index     int // in the call
	session   *session
	at        int // the place
	confirmed *amqp091.DeferredConfirmation
	exchange  string
	size      int
}

// send publishes m in a place of the window. An error means that it was not sent.
func (s *session) send(index, at int, m *message) (flight, error) {
	s.mu.Lock()
	s.count++
	s.places[at] = place{publish: s.count}
	number := s.count*int64(len(s.places)) + int64(at)
	s.mu.Unlock()
	if m.Headers == nil {
		m.Headers = make(amqp091.Table, 1)
	}
	m.Headers[headerPublish] = number
	confirmed, err := s.PublishWithDeferredConfirm(m.exchange, m.key, true, false, m.Publishing)
	if err != nil {
		s.free <- at
		return flight{}, err
	}
	return flight{index, s, at, confirmed, m.exchange, len(m.Body)}, nil
}

// fits refuses headers that a server with smaller frames than usual would close the connection for.
func (s *session) fits(m *message) error {
	frame := s.epoch.conn.Config.FrameSize
	if frame >= frameSize {
		return nil // checkEnvelope has seen to it
	}
	const properties = 1 << 10 // at most, besides the headers: four texts of 255 bytes at the most, and some numbers
	size, most := tableBytes(m.Headers)+len(headerPublish), frame-properties
	if size > most {
		return refused("headers", fmt.Sprintf("are about %d bytes on the wire; allowed are %d, as this server's frame_max is %d", size, most, frame))
	}
	return nil
}

func (f *flight) landed() bool {
	select {
	case <-f.confirmed.Done():
		return true
	default:
		return false
	}
}

// outcome of a flight that has landed. It leaves the place to others.
func (f *flight) outcome() error {
	s := f.session
	s.mu.Lock()
	s.takeReturns()
	returned := s.places[f.at].returned
	s.mu.Unlock()
	// The library answers for all that is open when a channel closes: that is no word of RabbitMQ's.
	refused := !f.confirmed.Acked() && !s.IsClosed()
	s.free <- f.at
	switch {
	case returned != "":
		return fmt.Errorf("%w: %s", ErrUnroutable, returned)
	case f.confirmed.Acked():
		return nil
	case refused:
		return fmt.Errorf("%w: a queue did not take it: it may be full, or have no leader", ErrRefused)
	}
	<-s.over
	return s.fate(f)
}

// takeReturns notes which publishes came back. RabbitMQ sends a message back before it confirms it, and the library
// passes both on in that order: when a confirm is seen, its return is here. With mu held.
func (s *session) takeReturns() {
	for {
		select {
		case r, ok := <-s.returns:
			if !ok {
				return
			}
			number, _ := r.Headers[headerPublish].(int64)
			publish, at := number/int64(len(s.places)), number%int64(len(s.places))
			if p := &s.places[at]; p.publish == publish {
				p.returned = fmt.Sprintf("%s (exchange %q, routing key %q)", r.ReplyText, r.Exchange, r.RoutingKey)
			}
		default:
			return
		}
	}
}

// fate is what became of a message that was on its way when the channel ended.
func (s *session) fate(f *flight) error {
	switch {
	case s.err == nil:
		return fmt.Errorf("%w: the channel was closed before RabbitMQ confirmed", leasebus.ErrOutcomeUnknown)
	case blamed(s.err, f.exchange, f.size):
		return fmt.Errorf("%w: %w", ErrRefused, s.err)
	case s.epoch.conn.IsClosed():
		return fmt.Errorf("%w: the connection was lost before RabbitMQ confirmed: %w", leasebus.ErrOutcomeUnknown, s.err)
	}
	return fmt.Errorf("%w: another message made RabbitMQ close the channel before it confirmed: %w", leasebus.ErrOutcomeUnknown, s.err)
}
