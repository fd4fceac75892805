package keyfunc

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"

	"github.com/ackafter/ackafter/broker"
)

// Func derives the business key of a message. It is pure: the same message
// always gives the same key or the same error, in every process and at any time.
//
// The Funcs of this package may be used concurrently, and so must others. Their
// constructors never panic and return no error, so that they can be written in
// place; arguments that make no sense give a Func whose Key always fails with
// an error that is ErrDefinition, and which [Validate] refuses.
//
// Own implementations are welcome; for a mere function, [Custom] is shorter.
type Func interface {
	// Key returns the key of m, which it does not change. An error means that m
	// has no key that can be trusted; those of this package are ErrInvalid, and
	// ErrMissing where the key is absent. A nil m is an error, too.
	Key(m *broker.Message) (string, error)

	// Definition returns the canonical text of what the key is made of, e.g.
	// "json:orderId,eventType;v1". It is stored beside the keys and outlives the
	// process: it must change exactly when keys do. It holds no secrets.
	Definition() string
}

// MaxSize is the largest key in bytes. (A store may keep a hash of a long key;
// the limit is what a message may cost.)
const MaxSize = 64 << 10

// maxDefinition bounds Definition in bytes.
const maxDefinition = 4 << 10

// version names the canonical form in every definition.
const version = ";v1"

// Validate tells whether keys can be derived with f. It returns an *Error that
// is ErrDefinition, naming the rule, when f is nil (or an interface around a nil
// pointer or function), when it was constructed with unusable arguments (f has a method
// Err() error that returns non-nil), or when its definition is blank, longer
// than 4 KiB, not valid UTF-8 or holds control characters. Else it returns nil.
func Validate(f Func) error {
	if isNil(f) {
		return unusable("func", "", "key function must not be nil")
	}
	if failed, ok := f.(interface{ Err() error }); ok {
		err := failed.Err()
		if err != nil && !errors.Is(err, ErrDefinition) {
			err = &Error{Func: "func", Rule: "cannot be used", Err: errors.Join(ErrDefinition, err)}
		}
		if err != nil {
			return err
		}
	}
	if rule := checkDefinition(f.Definition()); rule != "" {
		return unusable("func", "", "definition "+rule)
	}
	return nil
}

// Derive returns f's key of m, and holds foreign Funcs to the rules of this
// package: a key that [Check] refuses is an error, every error is ErrInvalid
// (or ErrDefinition), and a panic of f is an error. It does not validate f's
// definition. A nil f is an error.
func Derive(f Func, m *broker.Message) (string, error) {
	if own, ok := f.(*derived); ok && own != nil {
		return own.Key(m)
	}
	if isNil(f) {
		return "", unusable("func", "", "key function must not be nil")
	}
	if m == nil {
		return "", invalid("func", "", "message is nil")
	}
	key, err := guard("func", "", func() (string, error) { return f.Key(m) })
	if err != nil {
		return "", err
	}
	if err := Check(key); err != nil {
		return "", err
	}
	return key, nil
}

// Check tells whether key can be a message key, wherever it comes from: it must
// not be blank, hold no NUL, be valid UTF-8 and at most MaxSize bytes long. The
// error is an *Error and ErrInvalid.
func Check(key string) error {
	if rule := checkText(key); rule != "" {
		return invalid("key", "", rule)
	}
	return nil
}

// part is what the Funcs of this package are made of. It appends the canonical
// text of a tuple, so that parts can be put together.
type part interface {
	// appendKey appends to dst. After an error, what it appended is undefined;
	// what was in dst before is not.
	appendKey(dst []byte, m *broker.Message) ([]byte, error)

	// text is the definition without the version.
	text() string

	// arity is the number of components of every key, 0 when that can vary.
	arity() int
}

// derived is the one Func of this package: a part, or the error that its
// constructor met.
type derived struct {
	part       part
	definition string
	err        error
}

func newFunc(kind string, p part) Func {
	definition := p.text() + version
	if rule := checkDefinition(definition); rule != "" {
		return failed(unusable(kind, "", "definition "+rule))
	}
	return &derived{part: p, definition: definition}
}

func failed(err error) Func { return &derived{err: err} }

// buffers are where keys are put together.
var buffers = pool[*[]byte]{fresh: func() *[]byte { b := make([]byte, 0, 256); return &b }}

// maxPooled is the capacity up to which a buffer is kept.
const maxPooled = 4 << 10

func (d *derived) Key(m *broker.Message) (string, error) {
	if d.err != nil {
		return "", d.err
	}
	if m == nil {
		return "", invalid("func", "", "message is nil")
	}
	buffer := buffers.get()
	dst, err := d.part.appendKey((*buffer)[:0], m)
	var key string
	switch {
	case err != nil:
	case len(dst) > MaxSize:
		err = invalid("func", "", ruleTooLong)
	default:
		key = string(dst)
	}
	if cap(dst) <= maxPooled {
		*buffer = dst[:0]
	}
	buffers.put(buffer)
	return key, err
}

func (d *derived) Definition() string { return d.definition }

// Err returns the error of the construction, nil when the Func can be used.
func (d *derived) Err() error { return d.err }

// asPart returns what f is made of; a Func from elsewhere becomes a part of one
// component.
func asPart(f Func) (part, error) {
	if err := Validate(f); err != nil {
		return nil, err
	}
	if own, ok := f.(*derived); ok {
		return own.part, nil
	}
	return foreign{f: f, definition: "func:" + escapeDefinition(f.Definition())}, nil
}

// asParts is asPart for the operands of kind.
func asParts(kind string, fs []Func) ([]part, error) {
	if len(fs) == 0 {
		return nil, unusable(kind, "", "needs at least one part")
	}
	parts := make([]part, len(fs))
	for i, f := range fs {
		p, err := asPart(f)
		if err != nil {
			return nil, &Error{Func: kind, Rule: fmt.Sprintf("part %d cannot be used", i+1), Err: err}
		}
		parts[i] = p
	}
	return parts, nil
}

// foreign is a Func from outside of this package as a part of another one.
type foreign struct {
	f          Func
	definition string
}

func (p foreign) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	key, err := guard("func", "", func() (string, error) { return p.f.Key(m) })
	if err != nil {
		return dst, err
	}
	return appendText(dst, "func", "", key)
}

func (p foreign) text() string { return p.definition }
func (p foreign) arity() int   { return 1 }

// guard runs a user's code. Its error becomes an *Error of kind unless it is one
// already, and so does a panic: one message must not bring the process down. The
// value of the panic is not shown unless the runtime made it: it may quote the
// message.
func guard[T any](kind, field string, fn func() (T, error)) (result T, err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case runtime.Error:
			err = &Error{Func: kind, Field: field, Rule: "function panicked", Err: p}
		default:
			err = invalid(kind, field, fmt.Sprintf("function panicked with a value of type %T", p))
		}
	}()
	result, err = fn()
	if err == nil {
		return result, nil
	}
	if own := (*Error)(nil); errors.As(err, &own) {
		return result, err
	}
	rule := "function failed"
	if errors.Is(err, ErrMissing) {
		rule = "function found no key"
	}
	return result, &Error{Func: kind, Field: field, Rule: rule, Err: err}
}

// isNil tells whether v is nil or an interface that holds a nil pointer or
// function, on which calling a method would most likely panic.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	r := reflect.ValueOf(v)
	return (r.Kind() == reflect.Pointer || r.Kind() == reflect.Func) && r.IsNil()
}
