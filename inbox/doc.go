// Package inbox makes the database writes of a message handler happen exactly
// once, however often the message is delivered.
//
// The loop takes deliveries from a [broker.Source], derives a business key from
// each message (package keyfunc), inserts the key into the inbox table in the
// same transaction in which the handler runs, commits, and only then acks. The
// primary key of the table decides races. A message whose key is already there
// is a replay: the handler does not run and the stored result is given back.
//
// There are three depths, so that nobody has to take more than they need:
//
//   - [Consumer.Run] is the loop: lanes, batches, retries, dead letters, acks.
//   - [Consumer.Process] handles one message from anywhere.
//   - [Store].Claim takes a key inside a transaction that the caller owns.
//
// Reading order: [New], [Config], [Handler] and the verdicts a handler can
// return ([Permanent], [RetryAfter], [Skip]); then [Outcome] and [Result]; then,
// for authors of stores, [Store] and [Batch].
package inbox
