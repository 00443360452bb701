// Package amqp carries messages over RabbitMQ 3.10 or newer: published with confirms, consumed with acknowledgements,
// retried and dead-lettered without a moment in which only a hope holds them.
//
// A [Broker] plays the roles that the engine asks for: it takes messages ([leasebus.Publisher]), hands them out
// ([leasebus.Source]) and lets operators act on dead letters ([leasebus.Operator]).
//
//	broker, err := amqp.Dial(ctx, "amqp://user:password@rabbit:5672/shop")
//	defer broker.Close()
//
// # Publishing
//
// A message is taken when RabbitMQ has confirmed it, and not before. Its outcome is one of three. Without an error, a
// queue has it. With [ErrUnroutable] or [ErrRefused], none has: there is no queue, or it is full. With
// [leasebus.ErrOutcomeUnknown] nobody can say: the connection was lost on the way, and publishing again with the same id
// is what to do. Everything else was not sent. A publish outlives the loss of a connection by waiting for the next one,
// within its context and [WithPublishTimeout].
//
// # Topology
//
// A queue has to exist before something is published to it. [Broker.Topology] says what the messages of some policies
// need, as a value that can be printed and exported ([Topology.Definitions]); [Broker.Declare] makes it so. A processor
// declares what its queue needs when it starts. What exists otherwise is an error that says what differs and what to do
// ([MismatchError]), and nothing is changed.
//
// Queues are quorum queues unless [WithClassicQueues] says otherwise. Beside a queue stand those of its dead letters, and
// for each delay of its retries that may be spent in RabbitMQ one in which messages wait ("orders.retry.90s"). All queues
// of a virtual host share a ladder of such queues for other delays ("leasebus.delay.10m"), which a message climbs down in
// several steps; a consumer of its queue moves it from one to the next.
//
// # Connections
//
// A broker has one connection for publishing, and opens one for each queue that it consumes: RabbitMQ stops reading from
// connections that publish while its memory or disk runs short, and acknowledgements must not wait for that. Each of
// them comes back by itself, without end, at intervals that grow to ten seconds, or to a minute where the server
// refuses. A connection from which nothing was heard for two heartbeats ([WithHeartbeat]) is given up.
//
// The URL may have the parameters of RabbitMQ's URI: heartbeat, connection_timeout, channel_max, auth_mechanism, and for
// amqps cacertfile, certfile, keyfile and server_name_indication.
package amqp
