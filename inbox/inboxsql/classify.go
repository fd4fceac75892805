package inboxsql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"reflect"
	"strings"
	"syscall"

	"github.com/ackafter/ackafter/inbox"
)

// Classify tells whose fault an error is that came from this store's database:
// by SQLSTATE, by SQLite's result code, and by what the store itself saw of a
// connection that was lost. Texts are not looked at.
//
// A network error that a handler got elsewhere is the message's; so that the two
// can be told apart, errors about this database's connections are marked where
// they happen.
func (s *Store) Classify(err error) inbox.Class {
	switch {
	case err == nil:
		return inbox.ClassMessage
	case errors.Is(err, inbox.ErrInFlight):
		return inbox.ClassContention
	case errors.Is(err, inbox.ErrCommitUnknown), isMarked(err):
		return inbox.ClassUnavailable
	}
	return s.d.classify(err)
}

// unavailableError marks an error that says that this database cannot be
// reached.
type unavailableError struct{ err error }

func (e *unavailableError) Error() string { return e.err.Error() }
func (e *unavailableError) Unwrap() error { return e.err }

// marked marks err if it says that the connection was lost. It is called only
// with errors that a driver returned.
func marked(err error) error {
	if err == nil || isMarked(err) || !connectionLost(err) || contextEnded(err) {
		return err
	}
	return &unavailableError{err}
}

func isMarked(err error) bool {
	var e *unavailableError
	return errors.As(err, &e)
}

// hasCode tells that an error is the database's answer.
func hasCode(err error) bool {
	_, isSQLite := sqliteCode(err)
	return isSQLite || sqlState(err) != ""
}

// contextEnded tells that the caller's own context ended, which says nothing
// about the database.
func contextEnded(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

func connectionLost(err error) bool {
	for _, e := range []error{
		driver.ErrBadConn, sql.ErrConnDone, net.ErrClosed, io.EOF, io.ErrUnexpectedEOF,
		syscall.ECONNRESET, syscall.ECONNREFUSED, syscall.ECONNABORTED, syscall.EPIPE, syscall.ETIMEDOUT,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	// Drivers for PostgreSQL say with SafeToRetry that the connection could not
	// be used at all.
	var retry interface{ SafeToRetry() bool }
	if errors.As(err, &retry) && retry.SafeToRetry() {
		return true
	}
	var operation *net.OpError
	return errors.As(err, &operation)
}

// sqlState returns the SQLSTATE of an error, "" when it has none.
func sqlState(err error) string {
	var e interface{ SQLState() string }
	if errors.As(err, &e) {
		return e.SQLState()
	}
	return ""
}

// sqliteCode returns the result code of an error of an SQLite driver, with its
// extension. Other errors have Code methods as well, so the type has to come
// from such a driver.
func sqliteCode(err error) (int, bool) {
	for err != nil {
		if c, ok := err.(interface{ Code() int }); ok {
			t := reflect.TypeOf(err)
			if t.Kind() == reflect.Pointer {
				t = t.Elem()
			}
			if strings.Contains(t.PkgPath(), "sqlite") {
				return c.Code(), true
			}
		}
		switch u := err.(type) { //nolint:errorlint // This is a walk along the chain.
		case interface{ Unwrap() error }:
			err = u.Unwrap()
		case interface{ Unwrap() []error }:
			for _, e := range u.Unwrap() {
				if code, ok := sqliteCode(e); ok {
					return code, true
				}
			}
			return 0, false
		default:
			return 0, false
		}
	}
	return 0, false
}
