package inboxsql

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
)

// link is a connection of a session's inner database: the driver's connection
// as one run of a handler may use it, or, with a nil run, the store itself.
type link struct {
	s   *session
	run *run
}

var (
	_ driver.Conn               = (*link)(nil)
	_ driver.ConnBeginTx        = (*link)(nil)
	_ driver.ConnPrepareContext = (*link)(nil)
	_ driver.ExecerContext      = (*link)(nil)
	_ driver.QueryerContext     = (*link)(nil)
	_ driver.NamedValueChecker  = (*link)(nil)
)

// do calls the driver for one statement. The function that it hands out with
// the context must be called when the statement is done.
func (l *link) do(ctx context.Context, query string, call func(ctx context.Context, done func()) error) error {
	denied := l.ask(query) // Without the turn: it may take its time.
	if err := l.s.acquire(ctx); err != nil {
		return err
	}
	defer l.s.yield()
	if err := l.refuse(query); err != nil {
		return err
	}
	if denied != nil {
		l.run.fail(query, denied)
		return denied
	}
	err := ctx.Err() // Some drivers call an ended context a bad connection.
	if err == nil {
		joined, done := l.join(ctx)
		if err = call(joined, done); err != nil {
			done()
		}
	}
	return l.note(ctx, query, err)
}

// ask asks whoever wants to be asked before a handler's statement.
func (l *link) ask(query string) error {
	if l.run == nil || l.s.before == nil {
		return nil
	}
	return l.s.before(query)
}

// join returns a context for a statement: for a handler's, one that also ends when
// the session is cut.
func (l *link) join(ctx context.Context) (context.Context, func()) {
	if l.run == nil {
		return l.s.unhurried(ctx), func() {}
	}
	joined, cancel := context.WithCancel(ctx)
	unhook := context.AfterFunc(l.s.cutCtx, cancel)
	return joined, func() {
		unhook()
		cancel()
	}
}

// refuse tells why a statement must not run.
func (l *link) refuse(query string) error {
	switch r := l.run; {
	case l.s.lost != nil:
		return l.s.lost
	case r == nil:
		return nil
	case r.over || l.s.cutCtx.Err() != nil:
		return errRunOver
	case endsTransaction(query):
		r.fail(query, ErrRefused)
		return ErrRefused
	}
	l.run.resets = l.run.resets || changesSettings(query)
	return nil
}

// note remembers the failed statement of a run; rolling back to a savepoint is
// the way to go on after one.
func (l *link) note(ctx context.Context, query string, err error) error {
	if err == nil && l.run != nil && l.run.failed != nil && rollsBackToSavepoint(query) {
		l.run.failed = nil
	}
	busy := err != nil && l.rowsOpen()
	if busy && errors.Is(err, driver.ErrBadConn) {
		err = fmt.Errorf("inboxsql: %w (%v)", errRowsOpen, err) //nolint:errorlint // The driver's error is misleading.
	}
	err = l.s.note(ctx, err, busy)
	if l.run != nil && !errors.Is(err, driver.ErrSkip) {
		l.run.fail(query, err)
	}
	return err
}

// rowsOpen tells that the run reads the rows of another query. The driver of
// PostgreSQL cannot run a statement meanwhile and calls that a bad connection.
func (l *link) rowsOpen() bool {
	if l.run == nil {
		return false
	}
	for c := range l.run.open {
		if _, ok := c.(*rows); ok {
			return true
		}
	}
	return false
}

// keep registers something that the run has to close.
func (l *link) keep(c child) {
	if l.run != nil {
		l.run.open[c] = struct{}{}
	}
}

func (l *link) forget(c child) {
	if l.run != nil {
		delete(l.run.open, c)
	}
}

// ExecContext runs a statement.
func (l *link) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (result driver.Result, err error) {
	x, ok := l.s.raw.(driver.ExecerContext)
	if !ok {
		return nil, driver.ErrSkip // database/sql prepares it instead.
	}
	err = l.do(ctx, query, func(ctx context.Context, done func()) (err error) {
		if result, err = x.ExecContext(ctx, query, args); err == nil {
			done()
		}
		return err
	})
	return result, err
}

// QueryContext runs a query.
func (l *link) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (result driver.Rows, err error) {
	x, ok := l.s.raw.(driver.QueryerContext)
	if !ok {
		return nil, driver.ErrSkip
	}
	err = l.do(ctx, query, func(ctx context.Context, done func()) error {
		r, err := x.QueryContext(ctx, query, args)
		if err == nil {
			result = l.newRows(r, query, done)
		}
		return err
	})
	return result, err
}

// PrepareContext prepares a statement.
func (l *link) PrepareContext(ctx context.Context, query string) (result driver.Stmt, err error) {
	err = l.do(ctx, query, func(ctx context.Context, done func()) error {
		st, err := prepare(ctx, l.s.raw, query)
		if err == nil {
			done()
			s := &stmt{l: l, raw: st, query: query}
			l.keep(s)
			result = s
		}
		return err
	})
	return result, err
}

// Prepare is there for the interface only.
func (l *link) Prepare(query string) (driver.Stmt, error) {
	return l.PrepareContext(context.Background(), query)
}

// CheckNamedValue lets the driver accept the types that it knows.
func (l *link) CheckNamedValue(v *driver.NamedValue) error {
	if c, ok := l.s.raw.(driver.NamedValueChecker); ok {
		return c.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

// BeginTx gives a run its transaction, which is part of the session's.
func (l *link) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	if l.run == nil {
		return nil, ErrRefused
	}
	return l, nil
}

// Begin is there for the interface only.
func (l *link) Begin() (driver.Tx, error) {
	return l.BeginTx(context.Background(), driver.TxOptions{})
}

// Commit is called for the handler's tx.Commit.
func (l *link) Commit() error { return l.end("(*sql.Tx).Commit()") }

// Rollback is called for the handler's tx.Rollback, and when a retired run's
// context ends.
func (l *link) Rollback() error { return l.end("(*sql.Tx).Rollback()") }

func (l *link) end(call string) error {
	if err := l.s.acquire(context.Background()); err != nil {
		return err
	}
	defer l.s.yield()
	if l.run.over || l.s.cutCtx.Err() != nil {
		return nil
	}
	l.run.fail(call, ErrRefused)
	return ErrRefused
}

// Close is called when database/sql is done with a run's transaction. The
// driver's connection is the session's.
func (l *link) Close() error {
	if l.run != nil {
		close(l.run.closed)
	}
	return nil
}

// prepare prepares a statement with the driver's connection.
func prepare(ctx context.Context, c driver.Conn, query string) (driver.Stmt, error) {
	if p, ok := c.(driver.ConnPrepareContext); ok {
		return p.PrepareContext(ctx, query)
	}
	return c.Prepare(query)
}
