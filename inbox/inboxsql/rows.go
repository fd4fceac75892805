package inboxsql

import (
	"context"
	"database/sql/driver"
	"io"
	"reflect"
)

// rows are the rows of a query of a run, or of the store itself. Drivers go on
// talking to the database while rows are read, so each step takes its turn.
type rows struct {
	l      *link
	raw    driver.Rows
	query  string
	done   func() // ends the query's context
	names  []string
	closed bool
}

var (
	_ driver.RowsNextResultSet              = (*rows)(nil)
	_ driver.RowsColumnTypeScanType         = (*rows)(nil)
	_ driver.RowsColumnTypeDatabaseTypeName = (*rows)(nil)
	_ driver.RowsColumnTypeLength           = (*rows)(nil)
	_ driver.RowsColumnTypeNullable         = (*rows)(nil)
	_ driver.RowsColumnTypePrecisionScale   = (*rows)(nil)
)

// newRows wraps the driver's rows; the caller holds the turn.
func (l *link) newRows(raw driver.Rows, query string, done func()) driver.Rows {
	r := &rows{l: l, raw: raw, query: query, done: done}
	l.keep(r)
	return r.asDriverRows()
}

func (r *rows) shut() error {
	if r.closed {
		return nil
	}
	r.closed = true
	err := r.raw.Close()
	r.done() // Not before: ending the context may cost the connection.
	return err
}

// step calls the driver's rows.
func (r *rows) step(call func() error) error {
	ctx := context.Background() // The query's own ends the call.
	if err := r.l.s.acquire(ctx); err != nil {
		return err
	}
	defer r.l.s.yield()
	if r.closed {
		return errRunOver
	}
	err := call()
	if err == io.EOF { //nolint:errorlint // The end of the rows is io.EOF itself; a wrapped one is a lost connection.
		return err
	}
	return r.l.note(ctx, r.query, err)
}

// Next reads a row.
func (r *rows) Next(dest []driver.Value) error {
	return r.step(func() error { return r.raw.Next(dest) })
}

// Close closes the rows. An error that only shows now counts as the query's.
func (r *rows) Close() error {
	ctx := context.Background()
	if err := r.l.s.acquire(ctx); err != nil {
		return err
	}
	defer r.l.s.yield()
	r.l.forget(r)
	return r.l.note(ctx, r.query, r.shut())
}

// peek asks the driver's rows something that takes no talk to the database. It
// does nothing once the rows are closed: the driver may use their memory again.
func (r *rows) peek(ask func()) {
	if err := r.l.s.acquire(context.Background()); err != nil {
		return
	}
	defer r.l.s.yield()
	if !r.closed {
		ask()
	}
}

// Columns returns the names of the columns.
func (r *rows) Columns() []string {
	r.peek(func() { r.names = r.raw.Columns() })
	return r.names
}

// HasNextResultSet tells whether there is another set of rows.
func (r *rows) HasNextResultSet() (has bool) {
	if n, ok := r.raw.(driver.RowsNextResultSet); ok {
		r.peek(func() { has = n.HasNextResultSet() })
	}
	return has
}

// NextResultSet goes on to the next set of rows.
func (r *rows) NextResultSet() error {
	n, ok := r.raw.(driver.RowsNextResultSet)
	if !ok {
		return io.EOF
	}
	return r.step(n.NextResultSet)
}

// ColumnTypeScanType is any where the driver does not say.
func (r *rows) ColumnTypeScanType(i int) reflect.Type {
	t := reflect.TypeFor[any]()
	if c, ok := r.raw.(driver.RowsColumnTypeScanType); ok {
		r.peek(func() { t = c.ColumnTypeScanType(i) })
	}
	return t
}

// ColumnTypeDatabaseTypeName is empty where the driver does not say.
func (r *rows) ColumnTypeDatabaseTypeName(i int) (name string) {
	if c, ok := r.raw.(driver.RowsColumnTypeDatabaseTypeName); ok {
		r.peek(func() { name = c.ColumnTypeDatabaseTypeName(i) })
	}
	return name
}

// ColumnTypeLength passes on what the driver says.
func (r *rows) ColumnTypeLength(i int) (length int64, known bool) {
	if c, ok := r.raw.(driver.RowsColumnTypeLength); ok {
		r.peek(func() { length, known = c.ColumnTypeLength(i) })
	}
	return length, known
}

// ColumnTypeNullable passes on what the driver says.
func (r *rows) ColumnTypeNullable(i int) (nullable, known bool) {
	if c, ok := r.raw.(driver.RowsColumnTypeNullable); ok {
		r.peek(func() { nullable, known = c.ColumnTypeNullable(i) })
	}
	return nullable, known
}

// ColumnTypePrecisionScale passes on what the driver says.
func (r *rows) ColumnTypePrecisionScale(i int) (precision, scale int64, known bool) {
	if c, ok := r.raw.(driver.RowsColumnTypePrecisionScale); ok {
		r.peek(func() { precision, scale, known = c.ColumnTypePrecisionScale(i) })
	}
	return precision, scale, known
}
