package inboxsql

import (
	"context"
	"database/sql"

	"github.com/ackafter/ackafter/inbox"
)

// run is one run of a handler. All but the first group of fields is guarded by
// the session's turn.
type run struct {
	entry  int // that it is for
	tx     *sql.Tx
	cancel context.CancelFunc // ends tx
	closed chan struct{}      // closed when database/sql is done with it

	over   bool                  // nothing is accepted any more
	failed *inbox.StatementError // the first statement that failed
	open   map[child]struct{}    // rows and statements
	resets bool                  // it changed settings of the transaction
}

// child is something that a run left open.
type child interface {
	// shut closes it; the caller holds the turn.
	shut() error
}

// fail remembers the first statement that failed.
func (r *run) fail(query string, err error) {
	if err != nil && r.failed == nil {
		r.failed = &inbox.StatementError{SQL: query, Err: err}
	}
}
