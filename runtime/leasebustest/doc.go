// Package leasebustest helps a service test its handlers and what it publishes, without a database or a broker.
//
// It answers three questions:
//
//   - What did my code publish? Give its publishers a [Store] and ask [Published].
//   - What becomes of a message when my handler gets it? [Handle] runs one handler on one message and tells.
//   - Does the whole flow come to its end? [Drain] runs handlers over a store until every message is completed or
//     dead-lettered. Retries, deferrals and delays are not waited for: the store's clock is advanced instead.
//
// All of it works inside a [testing/synctest] bubble and outside.
package leasebustest
