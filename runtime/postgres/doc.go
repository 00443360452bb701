// Package postgres keeps messages in PostgreSQL 13 or newer: durable, leased with a fence, crash-proof.
//
// An [Inbox] plays the roles that the engine asks for: it takes messages ([leasebus.Publisher]), hands them out under
// leases ([leasebus.Source]) and lets operators act on dead letters ([leasebus.Operator]).
//
//	pool, err := pgxpool.New(ctx, dsn)
//	err = postgres.Migrate(ctx, pool)        // at deployment, or run the SQL files with a tool of your own
//	inbox, err := postgres.NewInbox(ctx, pool)
//	defer inbox.Close()
//
// # Transactions
//
// [Inbox.Tx] publishes inside the caller's transaction: the message exists if and only if it commits. [CompleteTx] makes
// the completion of the message at hand part of the handler's transaction: effect and completion commit together.
// [Inbox.SQLTx] and [CompleteSQLTx] are the same for database/sql.
//
// # Connections
//
// The inbox opens connections of its own, configured like the caller's pool, so that no handler that holds connections
// can keep a heartbeat, a settlement or a claim from getting one ([WithConnections]); and one more that listens for
// notifications, where that is possible. Behind a pooler in transaction mode it is not: the inbox finds that out and
// polls instead ([WithPollInterval]). Every way in which pgx can execute statements works.
//
// # Guarantees
//
// A message that was published is handed out until a settlement ends it. It is worked on at least once; who holds its
// lease is decided by the database's clock alone, and a worker whose lease has passed to another can change nothing.
// A message ends once: completed, dead-lettered, or discarded. Order of arrival is kept approximately: messages are
// leased in the order of their positions, which transactions that commit late or retries can break.
package postgres
