// Package inboxpgx keeps an inbox in PostgreSQL through pgx v5: handlers get a
// [pgx.Tx]. It is for PostgreSQL 15 to 18; the oldest and the newest are tested,
// with and without prepared statements, at every isolation level, and behind
// PgBouncer in transaction mode.
//
//	pool, err := pgxpool.New(ctx, url)
//	store, err := inboxpgx.New(pool)
//	consumer, err := inbox.New(store, "billing", key, handler, nil)
//
// The tables come from package migrations ("ackafter migrate up").
//
// # What a handler may do with its transaction
//
// Everything that pgx offers, on the handler's own savepoint: Exec, Query,
// SendBatch, CopyFrom, Prepare, large objects, nested transactions by Begin,
// savepoints of its own, and the connection itself by Conn. What it may not do
// is end the transaction, which also holds the claims and the work of other
// messages:
//
//   - Commit and Rollback of the Tx, and SQL text with a statement that ends or
//     begins a transaction, are refused with [ErrRefused] before they reach the
//     server. The attempt is remembered: a handler that ignores the refusal and
//     returns nil has failed with inbox.ErrSwallowed. So a "defer tx.Rollback(ctx)"
//     out of habit fails the message instead of being silently without effect;
//     take it out.
//   - Through Conn, or a large object, statements reach the server unseen. A
//     transaction ended that way is noticed when the handler returns
//     (inbox.ErrTxEnded), and in a batch a COMMIT of it fails.
//
// A failed statement makes PostgreSQL refuse the rest of the transaction. A
// handler that ignores the error and returns nil has failed, and the error names
// the first failed statement. To go on after an error that is expected, use a
// nested transaction (tx.Begin) around the statement.
//
// Rows that a handler leaves open are closed when it returns, and their error
// counts. The Tx is dead from then on; values got from Conn and LargeObjects
// must not be used any more either.
//
// Settings that a handler makes for the transaction (SET LOCAL, set_config) last
// until its end. They do not reach the handler of another message: a batch in
// which a run with such a statement, or one that used Conn, was kept starts no
// further handler, and the rest goes into the next batch. The inbox's own
// statements at the end do run under them: handlers that change search_path or the
// role need Config.Schema and a role that may write the inbox tables.
//
// # Round trips
//
// A batch begins in one round trip: BEGIN, the time limits, the claims, the look
// for parked duplicates, the first handler's savepoint. It ends in one: results,
// claims given up, COMMIT. The savepoints of later messages travel in front of the
// handlers' first statements when these are an Exec with arguments or a Query whose
// text has succeeded on the connection before; otherwise one costs a round trip.
// (A tracer of pgx sees such a statement as a batch.) A message alone costs two and the handler's own, and so does a bulk handler. A
// batch of duplicates costs two: the claims, and the rows that are there. Duplicates
// beside new messages, an expired key or a parked duplicate cost one or two more;
// so does the failure of a handler. On a new
// connection pgx prepares the statements first, which costs one more each time
// a text is seen for the first time.
//
// # Parked messages
//
// [Store.Lease] asks the tables in one round trip, by indexes; what waits behind the
// first message of a lane costs nothing, and neither do dead letters. It costs about
// ten microseconds of the server for each lane that has parked messages. When
// something is due, a second round trip leases it: rows that others have locked are
// passed over. Lanes take turns when more is due than was asked for.
//
// A message that has waited longer than its lease lasts is still worked on, if
// nobody else has leased it meanwhile: its row is locked for the transaction.
//
// Whether the lane of a live message is free is read with its claim, in the same
// round trip. A message alone has statements without arrays for that, so that the
// server keeps their plans.
//
// # Poolers
//
// Behind PgBouncer in transaction mode, or any pooler that does not keep
// prepared statements, set the pool's DefaultQueryExecMode to
// pgx.QueryExecModeExec, QueryExecModeCacheDescribe or
// QueryExecModeSimpleProtocol, as for any other use of pgx.
package inboxpgx
