// Package orders is a small shop on leasebus: an order is placed, its stock is reserved, a receipt is sent.
//
// Each step is a message of its own (examples/proto/orders/v1/orders.proto), and each handler publishes the next one.
// What is retried, how often and after which delays stands in the annotations of the messages; the handlers only say
// what went wrong. [Shop] is the place to begin reading.
//
// cmd/demo runs the shop and lets things go wrong.
package orders
