// Package inboxtest tests what is built with package inbox.
//
// For users: [Once] delivers a message as at-least-once brokers do, on the real
// path, and checks that the handler's work is done once; [Conflict] and
// [RolledBack] check the other outcomes.
//
// For authors of stores: [RunStore] is the conformance suite, every rule of
// inbox.Store and inbox.Batch as a test.
package inboxtest
