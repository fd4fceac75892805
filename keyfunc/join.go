package keyfunc

import (
	"errors"
	"strings"

	"github.com/ackafter/ackafter/broker"
)

// Join makes one key of the keys of fs: one tuple of all their components, in
// their order. Join(Header("tenant"), JSON("id", "version")) gives the same
// text as a JSON of three fields. All parts must be there; when one is invalid the
// key is invalid, else when one is absent it is ErrMissing.
//
// No fs, or one that does not [Validate], is a construction error.
func Join(fs ...Func) Func {
	parts, err := asParts("join", fs)
	if err != nil {
		return failed(err)
	}
	return newFunc("join", joinPart{parts: parts, definition: partsDefinition("join", parts)})
}

type joinPart struct {
	parts      []part
	definition string
}

func (p joinPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	var absent error
	for i, operand := range p.parts {
		if i > 0 {
			dst = append(dst, separator)
		}
		start := len(dst)
		var err error
		dst, err = operand.appendKey(dst, m)
		switch {
		case errors.Is(err, ErrMissing):
			if absent == nil {
				absent = err
			}
			continue
		case err != nil:
			return dst, err
		}
		if operand.arity() == 0 {
			// Where its components end cannot be told from the others': nest it.
			var rule string
			if dst, rule = finish(dst, start); rule != "" {
				return dst, invalid("join", "", rule)
			}
		}
	}
	return dst, absent
}

func (p joinPart) text() string { return p.definition }

func (p joinPart) arity() int {
	n := 0
	for _, operand := range p.parts {
		n += max(operand.arity(), 1)
	}
	return n
}

// Prefix puts text before the key of f, as a component of its own: Prefix("order",
// JSON("id")) gives "order|17". Use it where keys of two kinds may meet, for
// instance in the alternatives of a First.
//
// A text that could not be a component, or an f that does not [Validate], is a
// construction error.
func Prefix(text string, f Func) Func {
	if rule := checkText(text); rule != "" {
		return failed(unusable("prefix", "", "text "+rule))
	}
	p, err := asPart(f)
	if err != nil {
		return failed(&Error{Func: "prefix", Rule: "part cannot be used", Err: err})
	}
	return newFunc("prefix", joinPart{
		parts:      []part{constPart(text), p},
		definition: callDefinition("prefix", escapeDefinition(text), p.text()),
	})
}

// constPart is a component that is always the same, and checked.
type constPart string

func (p constPart) appendKey(dst []byte, _ *broker.Message) ([]byte, error) {
	return appendText(dst, "prefix", "", string(p))
}

func (p constPart) text() string { return escapeDefinition(string(p)) }
func (p constPart) arity() int   { return 1 }

// First takes the key of the first of fs that is there: it goes on to the next
// one only on ErrMissing. One that is there and invalid (blank, null, repeated)
// makes the key invalid: a fallback from a broken id to something weaker would
// be a guess.
//
// The alternatives are taken to name the same thing in several places (an id
// that moved from "id" to "orderId"): equal texts are one key, whichever
// alternative they come from. Where that is wrong, tell them apart with [Prefix].
//
// No fs, or one that does not [Validate], is a construction error.
func First(fs ...Func) Func {
	parts, err := asParts("first", fs)
	if err != nil {
		return failed(err)
	}
	components := parts[0].arity()
	for _, p := range parts[1:] {
		if p.arity() != components {
			components = 0
		}
	}
	return newFunc("first", firstPart{parts: parts, components: components})
}

type firstPart struct {
	parts      []part
	components int
}

func (p firstPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	start := len(dst)
	var absent []error
	for _, alternative := range p.parts {
		var err error
		dst, err = alternative.appendKey(dst[:start], m)
		if !errors.Is(err, ErrMissing) {
			return dst, err
		}
		absent = append(absent, err)
	}
	return dst, missing("first", "", "no alternative is there ("+listErrors(absent)+")")
}

func (p firstPart) text() string { return partsDefinition("first", p.parts) }
func (p firstPart) arity() int   { return p.components }

func listErrors(errs []error) string {
	var b strings.Builder
	for i, err := range errs {
		if i > 0 {
			b.WriteString("; ")
		}
		if own, ok := err.(*Error); ok { //nolint:errorlint // only the bare error is ours to shorten
			own.writeTo(&b)
		} else {
			b.WriteString(err.Error())
		}
	}
	return b.String()
}
