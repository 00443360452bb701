// Package conformance is the contract of leasebus's backends as tests: the same cases for memory, for a database, for a
// broker, and for a backend of your own. Call [Run] from a test of the backend.
//
// # Cases
//
// There are two levels. The cases of the roles call [leasebus.Publisher], [leasebus.Feed] and [leasebus.Operator]
// directly; those of the engine run a [leasebus.Processor] over the backend. A case is a subtest whose name carries the
// rules of the contract that it holds and, where there is one, the field report it answers:
//
//	TestContract/S10_C2_7_crash_looping_message_is_dead_lettered
//
// holds rule S10 and is case C2.7. All names stand in the tables of this package's source, one to a line, as
// {name: "S…", so that a list of rules by test needs no run.
//
// # Capabilities
//
// Backends differ in what they can promise, and say so in [Capabilities]. A case that needs a promise which is not given
// is not listed; where the opposite can be held, another case holds it. What was declared is printed once.
//
// A broker that sends messages ahead to its consumers does not promise [Capabilities.Pull]: where a case has two of them
// on one queue, the first one leaves before the second one is to find something. Its queues are made by
// [Backend.Prepare].
//
// # Time
//
// Every duration in a case is a fraction or a multiple of [Backend.Lease], and a case waits for conditions, never for a
// fixed time. A backend that lives in the process runs each case in a [testing/synctest] bubble, where a lease of 30 s
// costs nothing; one with a server takes leases that outlast a pause of the machine, such as 500 ms.
//
// # Leaks
//
// In a synctest bubble, a goroutine that survives a case fails it. Elsewhere, let the TestMain of the backend's package
// look for them, with go.uber.org/goleak for example.
package conformance
