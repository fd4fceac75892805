package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/ackafter/ackafter/inbox"
)

// SQLSTATEs that something is decided by. Messages are never read: they may be
// in any language.
const (
	stateSerialization   = "40001"
	stateDeadlock        = "40P01"
	stateLockTimeout     = "55P03"
	stateQueryCanceled   = "57014"
	stateForeignKey      = "23503"
	stateNoTable         = "42P01"
	stateNoSchema        = "3F000"
	stateNoSavepoint     = "3B001"
	stateStalePlan       = "0A000"
	stateOwnLimit        = "53400" // a limit that is set for statements, as temp_file_limit
	stateNoStatement     = "26000"
	stateReadOnly        = "25006"
	stateIdleTooLong     = "25P03"
	stateOpenTooLong     = "25P04"
	classConnection      = "08"
	classResources       = "53"
	classSystem          = "58"
	classOperator        = "57P"
	guardTable           = "inbox_guard"
	severityOfLiveErrors = "ERROR"
)

// Classify tells whose fault an error is, by SQLSTATE and error type only.
//
// Serialization failures, deadlocks and lock timeouts are ClassContention; so is
// a handler's "set constraints all immediate" in a batch, which meets the guard
// of the batch and works alone. Errors of the classes 08 (connection), 53
// (resources), 57P (operator), 58 (system), a server that has become read-only,
// transactions ended by the server's own timeouts, broken connections and all
// failures to get a connection are ClassUnavailable. Context errors are
// ClassMessage, except where a connection could not be got in time. Network
// errors that did not come through a store, such as those of a handler's other
// calls, are ClassMessage.
func (s *Store) Classify(err error) inbox.Class {
	var (
		acquire *acquireError
		connect *pgconn.ConnectError
		lost    *lostError
		pg      *pgconn.PgError
	)
	switch {
	case err == nil:
		return inbox.ClassMessage
	case errors.Is(err, inbox.ErrInFlight):
		return inbox.ClassContention
	case errors.Is(err, inbox.ErrCommitUnknown), errors.As(err, &acquire), errors.As(err, &connect):
		return inbox.ClassUnavailable
	case errors.As(err, &pg):
		if c := classOfState(pg); c != inbox.ClassMessage || !errors.As(err, &lost) {
			return c
		}
		return inbox.ClassUnavailable
	case isContext(err):
		return inbox.ClassMessage
	case errors.As(err, &lost), errors.Is(err, pgconn.ErrConnClosed):
		return inbox.ClassUnavailable
	}
	return inbox.ClassMessage
}

func classOfState(e *pgconn.PgError) inbox.Class {
	switch e.Code {
	case stateSerialization, stateDeadlock, stateLockTimeout:
		return inbox.ClassContention
	case stateOwnLimit:
		return inbox.ClassMessage
	case stateStalePlan:
		if e.Routine == "RevalidateCachedQuery" { // The table was changed meanwhile.
			return inbox.ClassContention
		}
	case stateForeignKey:
		if e.TableName == guardTable {
			return inbox.ClassContention
		}
	case stateReadOnly, stateIdleTooLong, stateOpenTooLong:
		return inbox.ClassUnavailable
	}
	for _, class := range []string{classConnection, classResources, classSystem, classOperator} {
		if strings.HasPrefix(e.Code, class) {
			return inbox.ClassUnavailable
		}
	}
	return inbox.ClassMessage
}

// acquireError is a connection that could not be got from the pool.
type acquireError struct{ err error }

func (e *acquireError) Error() string { return "acquire connection: " + e.err.Error() }
func (e *acquireError) Unwrap() error { return e.err }

// lostError marks an error of a connection that is gone. It tells the network
// errors of the database from those of a handler's other calls.
type lostError struct{ err error }

func (e *lostError) Error() string { return e.err.Error() }
func (e *lostError) Unwrap() error { return e.err }

// marked returns err, as a lostError when it came with the connection's end.
func marked(conn *pgx.Conn, err error) error {
	if err == nil || !conn.IsClosed() || unencodable(err) {
		return err
	}
	return &lostError{err}
}

// unencodable tells that the arguments of a statement could not be encoded in
// the middle of a round trip, for which pgx gives up the connection.
func unencodable(err error) bool {
	var early pgx.ErrPreprocessingBatch
	var network net.Error
	return errors.As(err, &early) && state(err) == "" && !errors.As(err, &network) && !isContext(err) &&
		!errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, pgconn.ErrConnClosed)
}

// markedByPool is marked for statements on the pool itself, whose connection is
// out of sight: whatever is neither the server's answer nor the caller's context
// is the connection's end.
func markedByPool(err error) error {
	var pg *pgconn.PgError
	if err == nil || errors.Is(err, pgx.ErrNoRows) || errors.As(err, &pg) || isContext(err) {
		return err
	}
	return &lostError{err}
}

// state returns the SQLSTATE of err, or "".
func state(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

func isContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// withoutSchema makes an error about missing tables say what to do.
func withoutSchema(err error) error {
	switch state(err) {
	case stateNoTable, stateNoSchema:
		return fmt.Errorf("%w: %w", inbox.ErrNoSchema, err)
	}
	return err
}
