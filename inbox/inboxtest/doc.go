// Package inboxtest tests what is built with package inbox.
//
// For users: [Once] delivers a message as at-least-once brokers do, on the real
// path, and checks that the handler's work is done once; [Conflict] and
// [RolledBack] check the other outcomes. [Chaos] lets everything go wrong that can
// (crashes, lost answers, reordering, poison), by seeds, and checks that the end is
// that of an undisturbed run. docs/testing.md shows how to use them.
//
// For authors of stores: [RunStore] is the conformance suite, every rule of
// inbox.Store and inbox.Batch as a test.
package inboxtest
