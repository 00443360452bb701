// Package options reads the leasebus annotations of a message descriptor and makes a complete, checked policy of them.
//
// There is one resolver: protoc-gen-leasebus calls it when it writes a policy into generated code, and a program that
// meets a message by its descriptor alone calls it at run time. Both get the same policy and the same complaints.
package options
