package inbox

import (
	"errors"
	"fmt"
	"time"
)

// Permanent marks err as one that no further attempt can cure: the message
// becomes a dead letter at once. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

// IsPermanent tells whether no further attempt is of use: err was marked by
// Permanent, or the handler tried to end the transaction (ErrRefused) or ended it
// (ErrTxEnded).
func IsPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p) || errors.Is(err, ErrRefused) || errors.Is(err, ErrTxEnded)
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// RetryAfter marks err so that the next attempt comes after d instead of after
// the configured backoff. It counts as an attempt. Zero or negative d: at once. With
// more than Parking.Hold the message is parked until then.
// RetryAfter(nil, d) is nil.
func RetryAfter(err error, d time.Duration) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{err, max(d, 0)}
}

type retryAfterError struct {
	err   error
	after time.Duration
}

func (e *retryAfterError) Error() string { return fmt.Sprintf("%v (retry after %v)", e.err, e.after) }
func (e *retryAfterError) Unwrap() error { return e.err }

// Skip says that there is nothing to do for the message: it is done, its key is
// kept, and what the handler wrote before is committed. The reason goes into
// the log and must not hold personal data. Joined with another error it counts
// for nothing.
func Skip(reason string) error { return &skipError{reason} }

type skipError struct{ reason string }

func (e *skipError) Error() string { return "skipped: " + e.reason }

// skipReason returns the reason and true when err is a Skip, possibly wrapped. A
// Skip that is joined with another error is not: that error must not vanish.
func skipReason(err error) (string, bool) {
	for ; err != nil; err = errors.Unwrap(err) {
		if s, ok := err.(*skipError); ok { //nolint:errorlint // The chain is walked here, without its branches.
			return s.reason, true
		}
	}
	return "", false
}
