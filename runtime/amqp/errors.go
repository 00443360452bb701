package amqp

import (
	"errors"

	"github.com/rabbitmq/amqp091-go"
)

// What a [Broker] answers, besides the errors of package leasebus.
var (
	// ErrClosed is what a Broker answers after Close.
	ErrClosed = errors.New("amqp: the broker is closed")
	// ErrDisconnected: there was no connection for as long as the caller was ready to wait. Nothing was sent.
	ErrDisconnected = errors.New("amqp: not connected")
	// ErrBlocked: RabbitMQ takes no messages for now, because memory or disk run short. With
	// [leasebus.ErrOutcomeUnknown] the message had been sent before that was known; without, it was not sent.
	ErrBlocked = errors.New("amqp: RabbitMQ blocks publishers")
	// ErrUnroutable: there is no queue for the message. It is not stored.
	ErrUnroutable = errors.New("amqp: no queue for the message")
	// ErrRefused: RabbitMQ refused the message, such as for a full queue or a missing exchange. It is not stored.
	ErrRefused = errors.New("amqp: refused by RabbitMQ")
)

// isConfiguration reports whether err is one that waiting does not mend: what was asked for does not exist, exists
// otherwise, or is not allowed. It is nothing to repeat at once.
func isConfiguration(err error) bool {
	var refusal *amqp091.Error
	if !errors.As(err, &refusal) || !refusal.Server {
		return false
	}
	switch refusal.Code {
	case amqp091.AccessRefused, amqp091.NotFound, amqp091.ResourceLocked, amqp091.PreconditionFailed,
		amqp091.NotAllowed, amqp091.InvalidPath:
		return true
	}
	return false
}
