// Package inbox makes the database writes of a message handler happen exactly
// once, however often the message is delivered.
//
// The loop takes deliveries from a [broker.Source], derives a business key from
// each message (package keyfunc), inserts the key into the inbox table in the
// same transaction in which the handler runs, commits, and only then acks. The
// primary key of the table decides races. A message whose key is already there
// is a replay: the handler does not run and the stored result is given back.
//
// A message that fails is tried again: soon in its place, later from the parked
// table, where it waits with all that is behind it in its lane while the broker has
// been told that it is done (see [Parking]). After its last attempt it is a dead
// letter, for a person.
//
// There are three depths, so that nobody has to take more than they need:
//
//   - [Consumer.Run] is the loop: lanes, batches, retries, parking, dead letters,
//     acks.
//   - [Consumer.Process] handles one message from anywhere.
//   - [Store].Claim takes a key inside a transaction that the caller owns.
//
// Reading order: [New], [Config], [Handler] and the verdicts a handler can
// return ([Permanent], [RetryAfter], [Skip]); then [Outcome] and [Result]; then,
// for authors of stores, [Store] and [Batch].
package inbox
