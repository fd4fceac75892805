//go:build go1.27

package inboxsql

import "database/sql/driver"

// scanningRows are rows of a driver that scans into the destination itself.
type scanningRows struct {
	*rows
	scanner driver.RowsColumnScanner
}

var _ driver.RowsColumnScanner = scanningRows{}

// asDriverRows returns rows that can do what the driver's can.
func (r *rows) asDriverRows() driver.Rows {
	if scanner, ok := r.raw.(driver.RowsColumnScanner); ok {
		return scanningRows{r, scanner}
	}
	return r
}

// NextRow reads a row.
func (r scanningRows) NextRow() error { return r.step(r.scanner.NextRow) }

// ScanColumn scans a column of the row. An error of it is the destination's
// fault, which is not a failed statement.
func (r scanningRows) ScanColumn(scanCtx driver.ScanContext, index int, dest any) error {
	err := errRunOver
	r.peek(func() { err = r.scanner.ScanColumn(scanCtx, index, dest) })
	return err
}
