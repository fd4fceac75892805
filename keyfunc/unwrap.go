package keyfunc

import (
	"fmt"

	"github.com/ackafter/ackafter/broker"
)

// Frame is one layer around a message's payload: a prefix, a compression, an
// envelope. This package has [ConfluentFrame], [ConfluentProtobufFrame] and
// [Gzip]; own ones may be added. A Frame is pure and safe for concurrent use.
type Frame interface {
	// Strip returns a copy of m without the layer. It changes neither m nor what
	// m refers to, and the copy may share memory with it; an envelope may replace
	// headers and key as well as the body. An error that is ErrMissing says that
	// m does not have the layer at all, every other one that it is broken.
	Strip(m *broker.Message) (*broker.Message, error)

	// Definition names what Strip does; keys depend on it. It changes when Strip
	// starts to give something else.
	Definition() string
}

// Unwrap gives f a message without its frame. Frames are stacked from the
// outside in: Unwrap(ConfluentFrame(), Unwrap(Gzip(0), JSON("id"))).
//
// A message without the frame is ErrMissing, so that a topic in which only some
// messages are framed is served by First(Unwrap(frame, f), f). A broken frame is
// invalid.
//
// Unwrap is about the key only: the handler, and the fingerprint of the body,
// get the message as it was delivered. A handler can call Strip itself.
//
// A nil frame, one that was constructed with unusable arguments, one with a
// blank definition or with control characters in it, or an f that does not
// [Validate], is a construction error.
func Unwrap(frame Frame, f Func) Func {
	if isNil(frame) {
		return failed(unusable("unwrap", "", "frame must not be nil"))
	}
	if broken, ok := frame.(interface{ Err() error }); ok && broken.Err() != nil {
		err := fmt.Errorf("%w: %w", ErrDefinition, broken.Err())
		return failed(&Error{Func: "unwrap", Rule: "frame cannot be used", Err: err})
	}
	if rule := checkName(frame.Definition()); rule != "" {
		return failed(unusable("unwrap", "", "definition of the frame "+rule))
	}
	p, err := asPart(f)
	if err != nil {
		return failed(&Error{Func: "unwrap", Rule: "part cannot be used", Err: err})
	}
	name := escapeDefinition(frame.Definition())
	if _, own := frame.(*layer); !own {
		name = "frame:" + name
	}
	return newFunc("unwrap", unwrapPart{frame: frame, part: p, definition: callDefinition("unwrap", name, p.text())})
}

type unwrapPart struct {
	frame      Frame
	part       part
	definition string
}

func (p unwrapPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	inner, err := guard("unwrap", p.frame.Definition(), func() (*broker.Message, error) { return p.frame.Strip(m) })
	if err != nil {
		return dst, err
	}
	if inner == nil {
		return dst, invalid("unwrap", p.frame.Definition(), "frame returned no message")
	}
	return p.part.appendKey(dst, inner)
}

func (p unwrapPart) text() string { return p.definition }
func (p unwrapPart) arity() int   { return p.part.arity() }

// layer is a Frame around the body, or the error that its constructor met.
type layer struct {
	name string
	err  error
	body func(body []byte) ([]byte, error) // body is not empty
}

func (l *layer) Strip(m *broker.Message) (*broker.Message, error) {
	switch {
	case l.err != nil:
		return nil, l.err
	case m == nil:
		return nil, invalid(l.name, "", "message is nil")
	case m.Body == nil:
		return nil, missing(l.name, "", ruleNoBody)
	case len(m.Body) == 0:
		return nil, invalid(l.name, "", ruleEmptyBody)
	}
	body, err := l.body(m.Body)
	if err != nil {
		return nil, err
	}
	inner := *m
	inner.Body = body
	return &inner, nil
}

func (l *layer) Definition() string { return l.name }

// Err returns the error of the construction, nil when the Frame can be used.
func (l *layer) Err() error { return l.err }
