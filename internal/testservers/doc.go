// Package testservers gives tests the real servers that they need, on any machine: databases of a shared PostgreSQL,
// PostgreSQL clusters of their own that may be stopped, killed, made read-only, followed by a standby and replaced by it,
// PgBouncer, a shared RabbitMQ and brokers of their own that may be stopped, killed and run out of memory, a proxy that
// loses what passes through it, and worker processes that may be killed.
//
// # Where PostgreSQL comes from
//
// [Postgres] looks in this order:
//
//  1. LEASEBUS_TEST_POSTGRES, a connection string of a role that may create databases. If it is set and does not
//     answer, the test fails.
//  2. 127.0.0.1:5432, if it lets postgres in without a password, and has room for 400 connections.
//  3. A server started from the installed binaries, shared by all test processes of this user, and stopped when none of
//     them has lived for a minute.
//  4. 127.0.0.1:5432 with less room: too many tests at once may then find it full.
//
// [PrivatePostgres] and [PgBouncer] always start the installed binaries.
//
// # Where RabbitMQ comes from
//
// [RabbitMQ] looks in this order:
//
//  1. LEASEBUS_TEST_RABBITMQ, a URL with a user who may declare queues in its virtual host. If it is set and does not
//     answer, the test fails.
//  2. 127.0.0.1:5672, if it lets guest in.
//  3. A broker started from the installed scripts, shared by all test processes of this user, and stopped when none of
//     them has lived for a minute.
//
// [PrivateRabbitMQ] always starts the installed scripts, apart from everything else that speaks Erlang on the machine.
//
// With go test -short, tests that ask for a server are skipped. They are never skipped because there is none.
//
// Binaries that are missing are installed where that is for us to do: on Debian and its kin as root, or by sudo where
// the environment says CI. Otherwise the shared servers come from compose.yaml by Docker Compose, or the test fails and
// says what to do. Command cmd/ready does all of this ahead of the tests, so that none of it counts on their time.
//
// Nothing outlives the tests by more than that minute: whatever a process started for itself is stopped when that process
// ends, by SIGKILL too.
package testservers
