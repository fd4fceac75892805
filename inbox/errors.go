package inbox

import (
	"errors"
	"fmt"
)

// Errors of this package. Test with errors.Is.
var (
	// ErrNoSchema is returned by Store.Check, Run and Process when the inbox
	// tables are missing.
	ErrNoSchema = errors.New("the inbox tables are missing (make them with `ackafter migrate up`)")

	// ErrSchemaVersion is returned by Store.Check, Run and Process when the
	// inbox tables are of a version that this release does not work with.
	ErrSchemaVersion = errors.New("the inbox tables have another version")

	// ErrNotFound is returned by Lookup, GetParked and SaveResult.
	ErrNotFound = errors.New("not found")

	// ErrInFlight: another transaction holds the key and did not end in time.
	// Nothing was done; try again later.
	ErrInFlight = errors.New("the key is being worked on elsewhere")

	// ErrConflict: the key was handled before with another body.
	ErrConflict = errors.New("the key was handled before with another body")

	// ErrSwallowed: a statement of the handler failed, the handler ignored it.
	ErrSwallowed = errors.New("the handler reported success although one of its statements failed")

	// ErrTxEnded: the handler committed or rolled back the transaction that
	// belongs to the inbox.
	ErrTxEnded = errors.New("the handler ended the transaction, which belongs to the inbox")

	// ErrRefused is what a handler gets that tries to commit or roll back the
	// transaction, which belongs to the inbox. Nothing was ended and the run's
	// writes are rolled back; another attempt is of no use.
	ErrRefused = errors.New("refused: the transaction belongs to the inbox")

	// ErrNotCommitted: the transaction was rolled back instead of committed.
	ErrNotCommitted = errors.New("the transaction was rolled back")

	// ErrCommitUnknown: the answer to COMMIT did not come.
	ErrCommitUnknown = errors.New("no answer to COMMIT: it is not known whether it happened")

	// ErrHandlerTimeout: the handler did not end within Config.HandlerTimeout.
	ErrHandlerTimeout = errors.New("the handler ran past its timeout")

	// ErrPanic: the handler panicked; the error is a *PanicError.
	ErrPanic = errors.New("the handler panicked")
)

// KeyDefinitionError is returned by Run and Process when the consumer's key
// function is not the one that its stored keys were made with: every key would
// count as new. It names both.
type KeyDefinitionError struct {
	Consumer string
	Stored   string
	Now      string
}

func (e *KeyDefinitionError) Error() string {
	return fmt.Sprintf("inbox: consumer %q: the stored keys were made by %q, the key function is now %q: "+
		"every message would count as new; to accept that set Config.ReplacesKey to the stored definition",
		e.Consumer, e.Stored, e.Now)
}

// SchemaVersionError is what Store.Check returns for tables of another version.
// It matches ErrSchemaVersion.
type SchemaVersionError struct {
	Have, Need int
}

func (e *SchemaVersionError) Error() string {
	todo := "run `ackafter migrate up`"
	if e.Have > e.Need {
		todo = "use a newer release of ackafter"
	}
	return fmt.Sprintf("the inbox tables have version %d, this release needs version %d; %s", e.Have, e.Need, todo)
}

// Is reports that the error is an ErrSchemaVersion.
func (e *SchemaVersionError) Is(target error) bool { return target == ErrSchemaVersion }

// PanicError is the failed attempt of a handler that panicked. It matches
// ErrPanic.
type PanicError struct {
	// Value is what the handler panicked with.
	Value any
	// Stack is the handler's stack.
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("%v: %v", ErrPanic, e.Value) }

// Is reports that the error is an ErrPanic.
func (e *PanicError) Is(target error) bool { return target == ErrPanic }

// StatementError is a statement of a handler that failed. Stores wrap it
// together with ErrSwallowed.
type StatementError struct {
	// SQL is the statement's text, without arguments.
	SQL string
	// Err is the database's error.
	Err error
}

func (e *StatementError) Error() string { return fmt.Sprintf("statement %q: %v", e.SQL, e.Err) }

// Unwrap returns the database's error.
func (e *StatementError) Unwrap() error { return e.Err }

// configError is one field of the configuration that breaks a rule.
func configError(field string, value any, rule string) error {
	return fmt.Errorf("inbox: config: %s = %v: %s", field, value, rule)
}
