package keyfunc

import (
	"errors"
	"fmt"
	"strings"
)

// Errors of this package. Test with errors.Is.
var (
	// ErrInvalid says that the message has no key that can be trusted. It is
	// returned by Func.Key and by Derive and Check. Trying again is useless: the
	// same message gives the same error.
	ErrInvalid = errors.New("message key cannot be trusted")

	// ErrMissing says that what the key is made of is absent from the message:
	// no such field, header, broker key, body or frame. It is the one error on
	// which First goes on to its next alternative. ErrMissing is also ErrInvalid.
	ErrMissing = fmt.Errorf("%w: absent", ErrInvalid)

	// ErrDefinition says that a Func was made of arguments that no key can be
	// made of. It is returned by Validate, and by Key of such a Func. It says
	// nothing about the message: it is not ErrInvalid.
	ErrDefinition = errors.New("key definition is not usable")
)

// Error tells which part of a key is wrong, and why. Its texts name fields and
// rules and never hold a value of the message, because values may be personal
// data; the first byte of a body that is not JSON is the one exception. (The
// error of a function given to Custom is passed on as it is.)
//
// An Error is ErrInvalid unless its Err is ErrDefinition.
type Error struct {
	// Func is the kind of the Func or Frame, as in its definition: "json",
	// "header", "gzip".
	Func string

	// Field is the path, header or attribute. Empty when the error is about the
	// whole.
	Field string

	// Rule is the rule that was broken: "is blank", "is repeated".
	Rule string

	// Err is ErrInvalid, ErrMissing or ErrDefinition, or a cause of another kind
	// (a decompression error, the error of a user's function). Nil means
	// ErrInvalid.
	Err error
}

// Error returns "keyfunc: FUNC "FIELD": RULE", and the cause when there is one.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("keyfunc: ")
	e.writeTo(&b)
	return b.String()
}

// writeTo writes the text without the package's name, for errors that list others.
func (e *Error) writeTo(b *strings.Builder) {
	b.WriteString(e.Func)
	if e.Field != "" {
		b.WriteString(` "` + e.Field + `"`)
	}
	b.WriteString(": " + e.Rule)
	if e.Err != nil && !isSentinel(e.Err) {
		b.WriteString(": " + e.Err.Error())
	}
}

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

// Is makes every Error an ErrInvalid that is not an ErrDefinition.
func (e *Error) Is(target error) bool {
	return target == ErrInvalid && !errors.Is(e.Err, ErrDefinition)
}

// isSentinel tells whether err is a bare sentinel, which a rule has put in words.
func isSentinel(err error) bool {
	return err == ErrInvalid || err == ErrMissing || err == ErrDefinition //nolint:errorlint // wrapped ones say more
}

func invalid(kind, field, rule string) *Error {
	return &Error{Func: kind, Field: field, Rule: rule, Err: ErrInvalid}
}

func missing(kind, field, rule string) *Error {
	return &Error{Func: kind, Field: field, Rule: rule, Err: ErrMissing}
}

func unusable(kind, field, rule string) *Error {
	return &Error{Func: kind, Field: field, Rule: rule, Err: ErrDefinition}
}
