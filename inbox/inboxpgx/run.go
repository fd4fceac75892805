package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/ackafter/ackafter/inbox"
)

// run is the transaction of one run of a handler: a pgx.Tx on the batch's
// connection that cannot end the transaction and is dead once the run is over.
type run struct {
	batch *batch
	conn  *pgx.Conn
	index int
	ctx   context.Context // of Start, for methods that take none

	dead    atomic.Bool
	exposed atomic.Bool // the handler had the connection itself
	resets  atomic.Bool // settings of the transaction may have been changed

	// mu is held while something uses the connection. It is only ever tried:
	// concurrent use is an error, as with pgx itself, and not a wait.
	mu      sync.Mutex
	prelude []string // sets the run's savepoint; goes before its first statement
	broken  error    // the savepoint could not be set: the batch is unusable
	used    bool     // something may have reached the server
	open    closer
	failed  *inbox.StatementError // that the transaction is in error for
	refused *inbox.StatementError // the first statement that was not let through
	nested  int
}

var _ pgx.Tx = (*run)(nil)

// closer is rows or batch results that the handler may leave open.
type closer interface{ finish() }

var (
	errDead     = fmt.Errorf("inboxpgx: the run of the handler that this transaction belongs to is over: %w", pgx.ErrTxClosed)
	errOpenRows = errors.New("inboxpgx: the handler has rows or batch results open; close them before the next statement")
	errInUse    = errors.New("inboxpgx: the transaction is in use by another goroutine, or by the call that this one was made in")
)

// unknownSQL stands for statements that did not pass the run.
const unknownSQL = "(sent on the connection itself, text not known)"

func newRun(ctx context.Context, b *batch, i int) *run {
	return &run{batch: b, conn: b.conn, index: i, ctx: ctx}
}

// enter takes the connection for one call.
func (r *run) enter() error {
	if r.dead.Load() {
		return errDead
	}
	if !r.mu.TryLock() {
		return errInUse
	}
	if r.dead.Load() {
		r.mu.Unlock()
		return errDead
	}
	return nil
}

// enterFree is enter for calls that send something: not beside open rows, which
// pgx would answer by breaking the connection.
func (r *run) enterFree() error {
	if err := r.enter(); err != nil {
		return err
	}
	if r.conn.PgConn().IsBusy() {
		r.mu.Unlock()
		return errOpenRows
	}
	return nil
}

// leave gives the connection up, notes what became of the statement, and
// returns its error.
func (r *run) leave(sql string, err error) error {
	defer r.mu.Unlock()
	return r.note(sql, err)
}

func (r *run) note(sql string, err error) error {
	r.used = true
	pg := r.conn.PgConn()
	switch {
	case r.conn.IsClosed() || pg.IsBusy():
	case pg.TxStatus() != 'E':
		r.failed = nil // Whatever failed was undone by the handler.
	case err != nil && r.failed == nil:
		r.failed = &inbox.StatementError{SQL: sql, Err: err}
	}
	return marked(r.conn, err)
}

// refuse notes an attempt to end the transaction.
func (r *run) refuse(sql, word string) error {
	if r.dead.Load() {
		return errDead
	}
	return r.deny(sql, fmt.Errorf("inboxpgx: %s: %w", word, ErrRefused))
}

// deny notes that a statement was not let through because of err.
func (r *run) deny(sql string, err error) error {
	if !r.mu.TryLock() {
		return err
	}
	defer r.mu.Unlock()
	if r.refused == nil {
		r.refused = &inbox.StatementError{SQL: sql, Err: err}
	}
	return err
}

// ask asks whoever wants to be asked before a statement.
func (r *run) ask(sql string) error {
	if r.batch.before == nil || r.dead.Load() {
		return nil
	}
	if err := r.batch.before(sql); err != nil {
		return r.deny(sql, err)
	}
	return nil
}

// allow refuses text that would end the transaction, or that ask is against.
func (r *run) allow(sql string) error {
	if word := controlIn(sql); word != "" {
		return r.refuse(sql, word)
	}
	if settingsIn(sql) {
		r.resets.Store(true)
	}
	return r.ask(sql)
}

// close ends the run. It closes what the handler left open. The error says that
// a goroutine of the handler still uses the connection.
func (r *run) close() error {
	if !r.mu.TryLock() {
		r.dead.Store(true)
		return errInUse
	}
	defer r.mu.Unlock()
	r.dead.Store(true)
	if r.open != nil {
		r.open.finish()
		r.open = nil
	}
	return nil
}

// touched tells whether anything may have reached the server.
func (r *run) touched() bool { return r.used || r.exposed.Load() }

// failure returns why a run that reports success has failed, or nil. aborted
// tells that the transaction is in error.
func (r *run) failure(aborted bool) error {
	switch {
	case aborted && r.failed != nil:
		return r.failed
	case aborted:
		return &inbox.StatementError{SQL: unknownSQL, Err: errors.New("a statement failed")}
	case r.refused != nil:
		return r.refused
	}
	return nil
}

// Exec implements pgx.Tx.
func (r *run) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	sql, args, err := r.rewrite(ctx, sql, args)
	if err == nil {
		err = r.allow(sql)
	}
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	return r.exec(ctx, sql, args...)
}

// exec runs a statement that was allowed.
func (r *run) exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := r.enterFree(); err != nil {
		return pgconn.CommandTag{}, err
	}
	var tag pgconn.CommandTag
	var err error
	if len(args) > 0 && r.travels(sql, args) { // pgx runs texts without arguments in the simple protocol.
		tag, err = r.execBehind(ctx, sql, args)
	} else if err = r.ready(ctx); err == nil {
		tag, err = r.conn.Exec(ctx, sql, args...)
	}
	if err == nil {
		r.saw(sql, args)
	}
	return tag, r.leave(sql, err)
}

// Query implements pgx.Tx.
func (r *run) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	sql, args, err := r.rewrite(ctx, sql, args)
	if err == nil {
		err = r.allow(sql)
	}
	if err == nil {
		err = r.enterFree()
	}
	if err != nil {
		return &rows{run: r, err: err}, err
	}
	out := &rows{run: r, sql: sql, args: args, own: true}
	if r.travels(sql, args) {
		out.in, out.results, err = r.queryBehind(ctx, sql, args)
	} else if err = r.ready(ctx); err == nil {
		out.in, err = r.conn.Query(ctx, sql, args...)
	}
	if err == nil {
		r.open = out
	} else if out.in == nil {
		out.err = err
	}
	return out, r.leave(sql, err)
}

// QueryRow implements pgx.Tx.
func (r *run) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	out, _ := r.Query(ctx, sql, args...)
	return row{out}
}

// SendBatch implements pgx.Tx.
func (r *run) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	for _, q := range b.QueuedQueries {
		var err error
		if q.SQL, q.Arguments, err = r.rewrite(ctx, q.SQL, q.Arguments); err == nil {
			err = r.allow(q.SQL)
		}
		if err != nil {
			return pgx.FailedBatchResults(b, err)
		}
	}
	if err := r.enterFree(); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	if err := r.ready(ctx); err != nil {
		return pgx.FailedBatchResults(b, r.leave("", err))
	}
	out, free := newBatchResults(r, b), !r.conn.PgConn().IsBusy()
	out.in = r.conn.SendBatch(ctx, b)
	if free {
		r.open = out
	}
	_ = r.leave("", nil)
	return out
}

// CopyFrom implements pgx.Tx.
func (r *run) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, source pgx.CopyFromSource) (int64, error) {
	sql := "copy " + table.Sanitize() + " from stdin"
	if err := r.ask(sql); err != nil {
		return 0, err
	}
	if err := r.enterFree(); err != nil {
		return 0, err
	}
	var n int64
	err := r.ready(ctx)
	if err == nil {
		n, err = r.conn.CopyFrom(ctx, table, columns, source)
	}
	return n, r.leave(sql, err)
}

// Prepare implements pgx.Tx.
func (r *run) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := r.allow(sql); err != nil {
		return nil, err
	}
	if err := r.enterFree(); err != nil {
		return nil, err
	}
	var d *pgconn.StatementDescription
	err := r.ready(ctx)
	if err == nil {
		d, err = r.conn.Prepare(ctx, name, sql)
	}
	return d, r.leave(sql, err)
}

// LargeObjects implements pgx.Tx. Its statements do not pass the run; what they
// do to the transaction is seen when the run ends.
func (r *run) LargeObjects() pgx.LargeObjects {
	if r.Conn() == nil {
		return closedTx().LargeObjects()
	}
	return r.batch.tx.LargeObjects()
}

// closedTx returns a pgx.Tx that answers everything with pgx.ErrTxClosed.
func closedTx() pgx.Tx {
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(b, errDead).Tx()
}

// Conn implements pgx.Tx. It returns nil when the run is over: the connection
// may be somebody else's by then.
func (r *run) Conn() *pgx.Conn {
	if r.dead.Load() {
		return nil
	}
	r.exposed.Store(true)
	if err := r.enter(); err == nil { // Otherwise a statement is going on behind the savepoint.
		if err := r.ready(r.ctx); err != nil && r.broken == nil {
			r.broken = err // What follows is beyond our sight, and not under a savepoint.
		}
		r.mu.Unlock()
	}
	return r.conn
}

// Commit implements pgx.Tx; it is refused.
func (r *run) Commit(context.Context) error { return r.refuse("commit", "commit") }

// Rollback implements pgx.Tx; it is refused.
func (r *run) Rollback(context.Context) error { return r.refuse("rollback", "rollback") }

// Begin implements pgx.Tx: a nested transaction on a savepoint.
func (r *run) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := r.enterFree(); err != nil {
		return nil, err
	}
	r.nested++
	name := "ackafter_nested_" + strconv.Itoa(r.nested)
	sql := "savepoint " + name
	err := r.ready(ctx)
	if err == nil {
		_, err = r.conn.Exec(ctx, sql)
	}
	if err = r.leave(sql, err); err != nil {
		return nil, err
	}
	return &nested{run: r, name: name}, nil
}

// rewrite applies a query rewriter of the handler's own, so that the text that
// reaches the server is the one that is looked at. pgx's named arguments only
// replace names by numbers and are left to pgx.
func (r *run) rewrite(ctx context.Context, sql string, args []any) (string, []any, error) {
	var options []any
	var rewriter pgx.QueryRewriter
	rest := args
loop:
	for len(rest) > 0 {
		switch a := rest[0].(type) {
		case pgx.NamedArgs, pgx.StrictNamedArgs:
			return sql, args, nil
		case pgx.QueryResultFormats, pgx.QueryResultFormatsByOID, pgx.QueryExecMode:
			options = append(options, a)
		case pgx.QueryRewriter:
			rewriter = a
		default:
			break loop
		}
		rest = rest[1:]
	}
	if rewriter == nil {
		return sql, args, nil
	}
	conn := r.Conn()
	if conn == nil {
		return sql, args, errDead
	}
	sql, rest, err := rewriter.RewriteQuery(ctx, conn, sql, rest)
	if err != nil {
		return sql, args, fmt.Errorf("inboxpgx: rewrite query: %w", err)
	}
	return sql, append(options, rest...), nil
}
