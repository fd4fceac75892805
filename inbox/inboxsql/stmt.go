package inboxsql

import (
	"context"
	"database/sql/driver"
	"errors"
)

// stmt is a prepared statement of a run, or of the store itself.
type stmt struct {
	l      *link
	raw    driver.Stmt
	query  string
	closed bool
}

var (
	_ driver.StmtExecContext   = (*stmt)(nil)
	_ driver.StmtQueryContext  = (*stmt)(nil)
	_ driver.NamedValueChecker = (*stmt)(nil)
)

func (s *stmt) shut() error {
	if s.closed {
		return nil
	}
	s.closed = true
	return s.raw.Close()
}

// Close closes the statement.
func (s *stmt) Close() error {
	if err := s.l.s.acquire(context.Background()); err != nil {
		return err
	}
	defer s.l.s.yield()
	s.l.forget(s)
	return s.shut()
}

// NumInput returns the number of arguments.
func (s *stmt) NumInput() int { return s.raw.NumInput() }

// CheckNamedValue lets the driver accept the types that it knows.
func (s *stmt) CheckNamedValue(v *driver.NamedValue) error {
	if c, ok := s.raw.(driver.NamedValueChecker); ok {
		return c.CheckNamedValue(v)
	}
	return s.l.CheckNamedValue(v)
}

// ExecContext runs the statement.
func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (result driver.Result, err error) {
	err = s.l.do(ctx, s.query, func(ctx context.Context, done func()) (err error) {
		if s.closed {
			return errRunOver
		}
		if result, err = stmtExec(ctx, s.raw, args); err == nil {
			done()
		}
		return err
	})
	return result, err
}

// QueryContext runs the statement as a query.
func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (result driver.Rows, err error) {
	err = s.l.do(ctx, s.query, func(ctx context.Context, done func()) error {
		if s.closed {
			return errRunOver
		}
		r, err := stmtQuery(ctx, s.raw, args)
		if err == nil {
			result = s.l.newRows(r, s.query, done)
		}
		return err
	})
	return result, err
}

// Exec is there for the interface only.
func (s *stmt) Exec(args []driver.Value) (driver.Result, error) {
	return s.ExecContext(context.Background(), named(args))
}

// Query is there for the interface only.
func (s *stmt) Query(args []driver.Value) (driver.Rows, error) {
	return s.QueryContext(context.Background(), named(args))
}

// stmtExec runs a driver's statement, also of a driver that knows no contexts.
func stmtExec(ctx context.Context, st driver.Stmt, args []driver.NamedValue) (driver.Result, error) {
	if x, ok := st.(driver.StmtExecContext); ok {
		return x.ExecContext(ctx, args)
	}
	vs, err := unnamed(args)
	if err != nil {
		return nil, err
	}
	return st.Exec(vs) //nolint:staticcheck // All that such a driver has.
}

func stmtQuery(ctx context.Context, st driver.Stmt, args []driver.NamedValue) (driver.Rows, error) {
	if x, ok := st.(driver.StmtQueryContext); ok {
		return x.QueryContext(ctx, args)
	}
	vs, err := unnamed(args)
	if err != nil {
		return nil, err
	}
	return st.Query(vs) //nolint:staticcheck // All that such a driver has.
}

func named(args []driver.Value) []driver.NamedValue {
	vs := make([]driver.NamedValue, len(args))
	for i, v := range args {
		vs[i] = driver.NamedValue{Ordinal: i + 1, Value: v}
	}
	return vs
}

func unnamed(args []driver.NamedValue) ([]driver.Value, error) {
	vs := make([]driver.Value, len(args))
	for i, v := range args {
		if v.Name != "" {
			return nil, errors.New("inboxsql: the driver does not support named arguments")
		}
		vs[i] = v.Value
	}
	return vs, nil
}
