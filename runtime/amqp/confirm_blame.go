package amqp

import (
	"fmt"
	"strings"

	"github.com/rabbitmq/amqp091-go"
)

// blamed reports whether the reason for which RabbitMQ closed a channel is a message to this exchange, of this size.
// Such a message is not stored. RabbitMQ does not say which message it was, but what was wrong with it.
func blamed(reason *amqp091.Error, exchange string, size int) bool {
	switch reason.Code {
	case amqp091.NotFound, amqp091.AccessRefused:
		// NOT_FOUND - no exchange 'x' in vhost '/'
		// ACCESS_REFUSED - write access to exchange 'x' in vhost '/' refused for user 'u'
		name := exchange
		if name == "" {
			name = "amq.default"
		}
		return strings.Contains(reason.Reason, "exchange '"+name+"' in ")
	case amqp091.PreconditionFailed, amqp091.ContentTooLarge:
		// PRECONDITION_FAILED - message size 200 is larger than configured max size 100
		var given, limit int
		_, text, ok := strings.Cut(reason.Reason, "message size ")
		if !ok {
			return false
		}
		n, _ := fmt.Sscanf(text, "%d is larger than configured max size %d", &given, &limit)
		return n == 2 && size > limit
	}
	return false
}
