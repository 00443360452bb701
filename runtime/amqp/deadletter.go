package amqp

import (
	"encoding/json"
	"time"
	"unicode/utf8"

	amqp091 "github.com/rabbitmq/amqp091-go"

	leasebus "github.com/leasebus/leasebus/runtime"
)

// The headers of a dead letter, besides those that it had. The history is kept from the first failure on.
const (
	headerOriginQueue    = reservedPrefix + "origin-queue"
	headerReason         = reservedPrefix + "reason"
	headerError          = reservedPrefix + "error"
	headerErrorType      = reservedPrefix + "error-type"
	headerDeadLetteredAt = reservedPrefix + "dead-lettered-at"
	headerLastOwner      = reservedPrefix + "last-owner"
	headerReplacedBy     = reservedPrefix + "replaced-by"

	headerFirstFailed = reservedPrefix + "first-failed"
	headerHistory     = reservedPrefix + "history"
	headerRequeues    = reservedPrefix + "requeues"
)

const (
	// mostHistory bounds the history in a header, in bytes; mostText each text in it. The last error is there in full.
	mostHistory = 16 << 10
	mostText    = 1 << 10
)

// failureRecord is a failed attempt, and requeueRecord an operator's action, as they stand in a header.
type failureRecord struct {
	Attempt int    `json:"attempt"`
	At      int64  `json:"at"`
	Text    string `json:"error"`
	Type    string `json:"type,omitempty"`
	Owner   string `json:"owner,omitempty"`
}

type requeueRecord struct {
	By string `json:"by"`
	At int64  `json:"at"`
}

// records reads a list from a header. One that is no list is none.
func records[T any](table amqp091.Table, name string) (list []T) {
	encoded, _ := table[name].(string)
	if json.Unmarshal([]byte(encoded), &list) != nil {
		return nil
	}
	return list
}

// putRecords writes the newest of list, as many as fit.
func putRecords[T any](table amqp091.Table, name string, list []T) {
	list = list[max(len(list)-leasebus.HistoryLimit, 0):]
	for len(list) > 0 {
		encoded, err := json.Marshal(list)
		if err == nil && len(encoded) <= mostHistory {
			table[name] = string(encoded)
			return
		}
		list = list[1:]
	}
}

// putFailure adds a failed attempt to the history.
func putFailure(table amqp091.Table, failure *leasebus.Failure, owner string, now time.Time) {
	if _, there := table[headerFirstFailed]; !there {
		table[headerFirstFailed] = now.UnixMilli()
	}
	putRecords(table, headerHistory, append(records[failureRecord](table, headerHistory), failureRecord{
		Attempt: failure.Attempt, At: now.UnixMilli(), Text: cut(failure.Text, mostText), Type: failure.ErrorType, Owner: owner,
	}))
}

// cut shortens a text to at most limit bytes, between runes.
func cut(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}

// deadLetter is a message for the dead-letter queue, with all that is known about why.
func (f *feed) deadLetter(d *delivery, s *leasebus.Settlement, now time.Time) message {
	stamp := d.stamp
	stamp.remaining = 0
	if !d.spent { // else the number of attempts was made up, and the one on the message is right
		stamp.attempt = s.Attempts
	}
	p := copyOf(&d.msg, d.id, stamp, func(table amqp091.Table) {
		table[headerAttempt] = int64(stamp.attempt) // the first one too
		table[headerOriginQueue] = f.sub.Queue
		table[headerReason] = string(s.Reason)
		table[headerDeadLetteredAt] = now.UnixMilli()
		table[headerLastOwner] = f.sub.Owner
		if s.Failure != nil {
			putFailure(table, s.Failure, f.sub.Owner, now)
			table[headerError] = s.Failure.Text
			putText(table, headerErrorType, s.Failure.ErrorType)
		}
	})
	if p.Type == "" { // as it was handled
		p.Type = f.sub.Policy.Type
	}
	f.fit(d, p.Headers, headerHistory, headerRequeues, headerError)
	return message{key: s.DeadLetterQueue, Publishing: p}
}

// letterOf reads a dead letter, as it lies in queue. One that RabbitMQ has dead-lettered itself has no headers of
// leasebus about that: then x-death says why.
func letterOf(d *amqp091.Delivery, asked, queue string) leasebus.DeadLetter {
	now := time.Now()
	table := d.Headers
	stamp, _ := readStamps(table, now)
	letter := leasebus.DeadLetter{
		Envelope:        envelopeOf(d, originOf(d, asked), "", stamp.firstDue),
		DeadLetterQueue: queue,
		Reason:          leasebus.Reason(text(table, headerReason)),
		ErrorType:       text(table, headerErrorType),
		Attempts:        counter(table, headerAttempt),
		FirstFailed:     timeOf(table, headerFirstFailed),
		DeadLetteredAt:  timeOf(table, headerDeadLetteredAt),
		LastOwner:       text(table, headerLastOwner),
	}
	letter.Error, _ = table[headerError].(string)
	if id, err := leasebus.ParseID(text(table, headerReplacedBy)); err == nil {
		letter.ReplacedBy = id
	}
	for _, r := range records[failureRecord](table, headerHistory) {
		letter.History = append(letter.History, leasebus.FailureRecord{
			Failure: leasebus.Failure{Attempt: r.Attempt, Text: r.Text, ErrorType: r.Type},
			At:      time.UnixMilli(r.At).UTC(), Owner: r.Owner,
		})
	}
	for _, r := range records[requeueRecord](table, headerRequeues) {
		letter.Requeues = append(letter.Requeues, leasebus.RequeueRecord{By: r.By, At: time.UnixMilli(r.At).UTC()})
	}
	letter.ID = letterID(d)
	if letter.Reason == "" {
		explain(&letter, table)
	}
	letter.Cursor = positionOf(&letter).cursor()
	return letter
}

// letterID is the id of a dead letter: one that has none is known by what is in it.
func letterID(d *amqp091.Delivery) leasebus.ID {
	if d.MessageId == "" {
		return idOf("\x00" + string(d.Body))
	}
	return idOf(d.MessageId)
}

func timeOf(table amqp091.Table, name string) time.Time {
	n, ok := number(table[name])
	if !ok || n <= 0 {
		return time.Time{}
	}
	return time.UnixMilli(n).UTC()
}

// originOf is the queue that a dead letter came from: as leasebus has written, else as RabbitMQ has.
func originOf(d *amqp091.Delivery, asked string) string {
	if origin := text(d.Headers, headerOriginQueue); origin != "" {
		return origin
	}
	if origin, _ := death(d.Headers)["queue"].(string); origin != "" {
		return origin
	}
	return asked
}

// death is RabbitMQ's newest record of a dead-lettering of its own.
func death(table amqp091.Table) amqp091.Table {
	deaths, _ := table["x-death"].([]any)
	if len(deaths) == 0 {
		return nil
	}
	newest, _ := deaths[0].(amqp091.Table)
	return newest
}

// explain tells of a dead letter that RabbitMQ has made itself, what RabbitMQ says.
func explain(d *leasebus.DeadLetter, table amqp091.Table) {
	record := death(table)
	why, _ := record["reason"].(string)
	switch why {
	case "delivery_limit":
		d.Reason = leasebus.ReasonCrashed
	case "expired":
		d.Reason = leasebus.ReasonExpired
	default:
		d.Reason = leasebus.ReasonPermanent
	}
	d.Error = "not dead-lettered by leasebus"
	if why != "" {
		d.Error = "dead-lettered by RabbitMQ: " + why
	}
	if at, ok := record["time"].(time.Time); ok {
		d.DeadLetteredAt = at.UTC()
	}
}
