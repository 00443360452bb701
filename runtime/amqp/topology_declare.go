package amqp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strings"

	"github.com/rabbitmq/amqp091-go"
)

// MismatchError says that a queue or an exchange exists, but not as leasebus wants it. It matches [ErrMismatch].
type MismatchError struct {
	// Kind is "queue" or "exchange".
	Kind, Name string
	// Argument is the first one that differs; Have is what it is, Want what it should be. "none" = not set.
	Argument   string
	Have, Want string
}

// ErrMismatch is matched by every [MismatchError].
var ErrMismatch = errors.New("amqp: exists otherwise")

func (e *MismatchError) Error() string {
	text := fmt.Sprintf("amqp: %s %q exists with %s %s; wanted is %s. ", e.Kind, e.Name, e.Argument, e.Have, e.Want)
	if e.Argument == argLimit {
		return text + "With that limit RabbitMQ takes messages away behind leasebus's back once they have been returned so often, " +
			"by deploys and lost connections too. Delete the queue when it is empty, and let it be declared again"
	}
	return text + "Delete it, the queue when it is empty, and let it be declared again; choose another name; or take it as it is (amqp.WithExistingTopology)"
}

// Is makes errors.Is(err, ErrMismatch) true.
func (e *MismatchError) Is(target error) bool { return target == ErrMismatch }

// Declare makes RabbitMQ have all of t. What exists as it is wanted stays; what exists otherwise is an error matching
// [ErrMismatch], and so is a limit on deliveries. The error tells of everything that does not fit.
//
// With [WithExistingTopology] nothing is declared: what does not exist is the error then. The limit on deliveries is
// refused all the same, where RabbitMQ lets it be seen.
//
// What was declared is declared again whenever the connection has been lost: a broker may come back with nothing.
func (b *Broker) Declare(ctx context.Context, t *Topology) error {
	if err := t.checkNames(); err != nil {
		return err
	}
	e, err := b.publishing.await(ctx)
	if err != nil {
		return fmt.Errorf("amqp: declare: %w", err)
	}
	if err := b.options.declare(ctx, e, t); err != nil {
		return err
	}
	b.publisher.remember(t)
	return nil
}

// declare declares t on channels of their own: a refusal closes the channel.
func (o *options) declare(ctx context.Context, e *epoch, t *Topology) error {
	steps := o.stepsOf(t, e.serverMajor())
	var problems []error
	for len(steps) > 0 {
		err := e.aside(ctx, func(ch *amqp091.Channel) error {
			for len(steps) > 0 {
				step := steps[0]
				steps = steps[1:]
				if err := step.do(ch); err != nil {
					return step.explain(err)
				}
			}
			return nil
		})
		if errors.Is(err, errAsItIs) {
			continue
		}
		if err == nil {
			break
		}
		problems = append(problems, err)
		if !isConfiguration(err) && !errors.Is(err, ErrMismatch) {
			break // not a matter of this queue
		}
	}
	if ctx.Err() != nil {
		return fmt.Errorf("amqp: declare: %w", context.Cause(ctx))
	}
	return errors.Join(problems...)
}

// declaration is one thing that RabbitMQ is asked for.
type declaration struct {
	kind, name string
	arguments  map[string]any
	do         func(ch *amqp091.Channel) error
}

func (o *options) stepsOf(t *Topology, serverMajor int) []declaration {
	var steps []declaration
	add := func(kind, name string, args map[string]any, do func(ch *amqp091.Channel) error) {
		steps = append(steps, declaration{kind, name, args, do})
	}
	for _, x := range t.Exchanges {
		differs := map[string]any{"type": x.Kind}
		maps.Copy(differs, x.arguments())
		add("exchange", x.Name, differs, func(ch *amqp091.Channel) error {
			if o.asItIs {
				return ch.ExchangeDeclarePassive(x.Name, x.Kind, true, false, false, false, nil)
			}
			return ch.ExchangeDeclare(x.Name, x.Kind, true, false, false, false, x.arguments())
		})
	}
	for i := range t.Queues {
		q := &t.Queues[i]
		args := q.forServer(serverMajor)
		add("queue", q.Name, args, func(ch *amqp091.Channel) error {
			if o.asItIs {
				_, err := ch.QueueDeclarePassive(q.Name, true, false, false, false, nil)
				return err
			}
			_, err := ch.QueueDeclare(q.Name, true, false, false, false, args)
			return err
		})
	}
	if o.asItIs {
		return append(steps, limitsOf(t, serverMajor)...)
	}
	for _, b := range t.Bindings {
		add("binding", b.Exchange+" -> "+b.Queue, nil, func(ch *amqp091.Channel) error {
			return ch.QueueBind(b.Queue, b.Key, b.Exchange, false, nil)
		})
	}
	return steps
}

var errAsItIs = errors.New("it differs, and may")

// limitsOf looks for limits on deliveries of queues that exist, by declaring them: of all that RabbitMQ may say against
// that, only the limit counts. Its answer is the first difference it comes to, so a limit can hide behind another.
func limitsOf(t *Topology, serverMajor int) []declaration {
	var steps []declaration
	for i := range t.Queues {
		q := &t.Queues[i]
		args := q.forServer(serverMajor)
		steps = append(steps, declaration{"queue", q.Name, args, func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclare(q.Name, true, false, false, false, args)
			var refusal *amqp091.Error
			if errors.As(err, &refusal) {
				if found := inequivalent.FindStringSubmatch(refusal.Reason); found == nil || found[1] != argLimit {
					return errAsItIs
				}
			}
			return err
		}})
	}
	return steps
}

// inequivalent is what RabbitMQ answers to a declaration with other arguments:
//
//	PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received '2000' but current is '1000'
//	… received none but current is the value '20' of type 'signedint'
var inequivalent = regexp.MustCompile(`inequivalent arg '([^']+)' for (?:queue|exchange) .* but current is (?:the value )?(none|'.*?')(?: of type '[^']*')?$`)

// explain says what RabbitMQ's refusal means.
func (d *declaration) explain(err error) error {
	var refusal *amqp091.Error
	if !errors.As(err, &refusal) {
		return fmt.Errorf("amqp: declare %s %q: %w", d.kind, d.name, err)
	}
	found := inequivalent.FindStringSubmatch(refusal.Reason)
	if refusal.Code != amqp091.PreconditionFailed || found == nil {
		return fmt.Errorf("amqp: declare %s %q: %w", d.kind, d.name, err)
	}
	argument := found[1]
	want, given := d.arguments[argument]
	switch {
	case given:
	case argument == "durable":
		want = true
	case argument == "auto_delete", argument == "exclusive", argument == "internal":
		want = false
	default:
		want = "none"
	}
	return &MismatchError{
		Kind: d.kind, Name: d.name, Argument: argument,
		Have: shown(strings.Trim(found[2], "'")), Want: shown(fmt.Sprint(want)),
	}
}

// shown makes an empty text visible.
func shown(value string) string {
	if value == "" {
		return `""`
	}
	return value
}
