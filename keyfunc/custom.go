package keyfunc

import "github.com/ackafter/ackafter/broker"

// Custom makes the key of what fn returns, as one component: it is checked by
// the rules of this package and escaped like every other. For a tuple, Join
// several Customs; do not glue fields together in fn, where ("a-b", "c") and
// ("a", "b-c") easily become one text.
//
// definition names what fn does, for people and for the next release, e.g.
// "base32 of the serial number, rev 2". Change it exactly when fn starts to give
// other keys. It becomes "custom:DEFINITION;v1", with a backslash before the
// characters that have a meaning in definitions.
//
// fn must be pure and safe for concurrent use, must not change the message, and
// should put no values into its errors. Return ErrMissing, wrapped or not, for a
// key that is absent, so that First can go on; every other error, and a panic,
// makes the key invalid.
//
// A blank definition, one with control characters, or a nil fn is a
// construction error, see [Validate].
func Custom(definition string, fn func(*broker.Message) (string, error)) Func {
	if rule := checkName(definition); rule != "" {
		return failed(unusable("custom", "", "definition "+rule))
	}
	if fn == nil {
		return failed(unusable("custom", definition, "function must not be nil"))
	}
	return newFunc("custom", customPart{definition: definition, fn: fn})
}

type customPart struct {
	definition string
	fn         func(*broker.Message) (string, error)
}

func (p customPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	key, err := guard("custom", p.definition, func() (string, error) { return p.fn(m) })
	if err != nil {
		return dst, err
	}
	return appendText(dst, "custom", p.definition, key)
}

func (p customPart) text() string { return "custom:" + escapeDefinition(p.definition) }
func (p customPart) arity() int   { return 1 }
