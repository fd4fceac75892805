// Package inboxsql keeps the inbox in a database that is reached through
// database/sql: SQLite, the embedded default, and PostgreSQL. Handlers get a
// *sql.Tx.
//
//	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN("orders.db")) // modernc.org/sqlite
//	store, err := inboxsql.New(db)
//	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
//		func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
//			_, err := tx.ExecContext(ctx, `insert into charges ...`)
//			return err
//		}, nil)
//
// The package imports no driver. It works with modernc.org/sqlite and with
// github.com/jackc/pgx/v5/stdlib; programs that use pgx directly are better
// served by package inboxpgx. The tables are made by "ackafter migrate up" or
// from package migrations.
//
// # The transaction that a handler gets
//
// The *sql.Tx of a handler belongs to the inbox: the key is in the same
// transaction, and so may be the work of other messages. It is a real *sql.Tx,
// over the connection that the store holds, and it knows its place:
//
//   - Commit, Rollback and SQL statements that begin or end a transaction are
//     refused with ErrRefused, and the run has failed, even if the handler ignores
//     the error. (The usual "defer tx.Rollback()" is harmless only in a handler
//     that returns an error: take it out.) Should such a statement get through by
//     a way that the store does not know, a deferred foreign key that points
//     nowhere makes the database refuse the COMMIT, and Finish or Commit say
//     inbox.ErrRefused.
//   - Savepoints are the handler's to use.
//   - A statement that failed fails the run, even if the handler ignores the
//     error (inbox.ErrSwallowed, with the statement), unless the handler rolled
//     back to a savepoint of its own. PostgreSQL would refuse all further
//     statements anyway; SQLite would not, and the rule is the same for both.
//     Where an error is expected, use "on conflict" or a savepoint.
//   - Rows and statements that are left open are closed. After the handler has
//     returned, the transaction refuses everything.
//   - Statements that were prepared on the *sql.DB cannot be used in it through
//     Tx.Stmt ("statement from different database used"); prepare them on the
//     transaction.
//
// # SQLite
//
// SQLite lets one transaction write at a time, so a Store runs one batch at a
// time and PoolSize is 1, see Store.PoolSize. Use the transaction for everything
// that the handler writes: a write through the *sql.DB would wait for the
// handler's own transaction.
//
// Several processes may use one file, also for their parked messages: asking for
// messages that are due only reads as long as there are none.
//
// Durability needs "synchronous" FULL or EXTRA, and the guard against foreign
// COMMITs needs "foreign_keys" on every connection. SQLiteDSN sets both, and
// Check says when they are missing. In-memory databases are refused: every
// connection would have one of its own, and nothing in it is durable.
//
// # PostgreSQL
//
// The guard is a deferred constraint, so a handler must not execute
// "set constraints all immediate"; naming the constraints works. Behind a pooler
// in transaction mode, configure pgx as it needs to be there
// (default_query_exec_mode=exec or simple_protocol).
package inboxsql
