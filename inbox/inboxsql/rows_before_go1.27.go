//go:build !go1.27

package inboxsql

import "database/sql/driver"

// asDriverRows returns rows that can do what the driver's can.
func (r *rows) asDriverRows() driver.Rows { return r }
