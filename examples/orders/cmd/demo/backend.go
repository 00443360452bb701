package main

import (
	"context"
	"fmt"
	"strings"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/memory"
)

// backend is where the messages live: one thing that plays every role the story needs.
type backend interface {
	leasebus.Publisher
	leasebus.Source
	leasebus.Operator
}

// opener opens a backend. It must be empty, in a schema or with queues of its own, because all that is found in it at
// the end is taken for part of the story. closeStore takes away what was made for it.
type opener func(ctx context.Context) (store backend, closeStore func(), err error)

// backends are those that the demo can run on; the first one is the default.
func backends() []namedBackend {
	return []namedBackend{
		{"memory", func(context.Context) (backend, func(), error) { return memory.New(), func() {}, nil }},
		{"postgres", openPostgres},
		{"amqp", openAMQP},
	}
}

type namedBackend struct {
	name string
	open opener
}

func backendNamed(name string) (opener, error) {
	for _, b := range backends() {
		if b.name == name {
			return b.open, nil
		}
	}
	return nil, fmt.Errorf("unknown backend %q; allowed: %s", name, backendNames())
}

func backendNames() string {
	all := backends()
	names := make([]string, len(all))
	for i, b := range all {
		names[i] = b.name
	}
	return strings.Join(names, ", ")
}
