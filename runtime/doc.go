// Package leasebus is the runtime under the code that protoc-gen-leasebus generates: it leases, renews, retries,
// dedupes and dead-letters messages, on any backend that implements the roles of this package.
//
// Three kinds of readers meet three layers here:
//
//   - A service uses the typed shells ([TypedPublisher], [RegisterHandler], [TypedManager]), mostly through generated
//     code, and a [Processor] that runs its handlers.
//   - A backend implements the roles: [Publisher], [Source] with [Feed], and [Operator]. It knows how to lease, renew
//     and settle; it decides nothing.
//   - The engine between them decides what should happen to a message: [Processor] and what it is made of.
//
// The package knows no database and no broker.
package leasebus

// IsAtLeastVersion0_1_0 is referred to by generated code that needs this version of the package or a later one.
const IsAtLeastVersion0_1_0 = true
