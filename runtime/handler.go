package leasebus

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"
)

// handler is the untyped form of a registered handler.
type handler struct {
	decode func(payload []byte) (proto.Message, error)
	handle HandlerFunc
}

// HandlerOption changes what [RegisterHandler] registers.
type HandlerOption interface{ applyHandler(*handlerOptions) }

type handlerOptions struct{ maxConcurrency int }

type handlerOptionFunc func(*handlerOptions)

func (f handlerOptionFunc) applyHandler(o *handlerOptions) { f(o) }

// MaxConcurrency limits how many messages this handler has at once, below the processor's concurrency. At least 1.
func MaxConcurrency(n int) HandlerOption {
	return handlerOptionFunc(func(o *handlerOptions) {
		o.maxConcurrency = n
		if n == 0 {
			o.maxConcurrency = -1 // given, and out of range
		}
	})
}

// RegisterHandler makes handle the one for messages of type M on p. Generated code calls it with the message's policy.
// It fails if the policy is invalid or asks for what this version cannot do ([ErrUnsupported]), if the queue or the
// type has a handler already, or if p runs. Run refuses with the same error, should nobody look at this one.
func RegisterHandler[M proto.Message](p *Processor, policy *Policy, handle func(context.Context, M) error, opts ...HandlerOption) error {
	var o handlerOptions
	for _, opt := range opts {
		opt.applyHandler(&o)
	}
	if err := matchesPolicy[M](policy); err != nil {
		return p.refuse(err)
	}
	if handle == nil {
		return p.refuse(fmt.Errorf("leasebus: handler of %s: the function is nil", policy.Type))
	}
	chain := HandlerFunc(func(ctx context.Context, d Delivery) error {
		return handle(ctx, d.Message().(M)) //nolint:forcetypeassert // decode makes nothing else
	})
	for _, wrap := range slices.Backward(p.options.middleware) {
		chain = wrap(chain)
	}
	return p.register(policy, handler{decode: decoder[M](), handle: chain}, o)
}

// decoder makes messages of type M. It goes by the message's own type, so it works with the open, the hybrid and the
// opaque API alike.
func decoder[M proto.Message]() func([]byte) (proto.Message, error) {
	var zero M
	messageType := zero.ProtoReflect().Type()
	return func(payload []byte) (proto.Message, error) {
		m := messageType.New().Interface()
		if err := proto.Unmarshal(payload, m); err != nil {
			return nil, fmt.Errorf("decode %s: %w", messageType.Descriptor().FullName(), err)
		}
		return m, nil
	}
}

// matchesPolicy refuses a policy that was made for another message type.
func matchesPolicy[M proto.Message](policy *Policy) error {
	var zero M
	if any(zero) == nil {
		return errors.New("leasebus: the message type is an interface; name a generated message type")
	}
	if name := string(zero.ProtoReflect().Descriptor().FullName()); name != policy.Type {
		return fmt.Errorf("leasebus: the policy is for %s, the message type is %s", policy.Type, name)
	}
	return nil
}
