package keyfunc

import (
	"fmt"
	"slices"

	"github.com/ackafter/ackafter/broker"
)

// Header makes the key of the values of the headers called names, in the order
// of names.
//
// The case of ASCII letters in names does not matter, because brokers, gateways
// and HTTP/2 change it on the way. Each header must be there exactly once,
// whatever the spelling: with "X-Id" and "x-id" in one message, or "X-Id" twice,
// one cannot tell which is meant. Values are taken as they are, without
// trimming.
//
// No names, a blank name, one with a control character or one given twice is a
// construction error, see [Validate]. A header that is not there is ErrMissing.
func Header(names ...string) Func {
	if len(names) == 0 {
		return failed(unusable("header", "", "needs at least one name"))
	}
	lower := make([]string, len(names))
	for i, name := range names {
		if rule := checkName(name); rule != "" {
			return failed(unusable("header", "", fmt.Sprintf("name %d %s", i+1, rule)))
		}
		lower[i] = lowerASCII(name)
		if slices.Contains(lower[:i], lower[i]) {
			return failed(unusable("header", name, "is named twice"))
		}
	}
	return newFunc("header", headerPart{names: lower})
}

// headerPart has its names in lower case.
type headerPart struct{ names []string }

func (p headerPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	var absent string
	for i, name := range p.names {
		value, count := findHeader(m.Headers, name)
		switch {
		case count == 0:
			if absent == "" {
				absent = name
			}
			continue
		case count > 1:
			return dst, invalid("header", name, "is repeated")
		case value == nil:
			return dst, invalid("header", name, "has no value")
		}
		if i > 0 {
			dst = append(dst, separator)
		}
		var err error
		if dst, err = appendText(dst, "header", name, value); err != nil {
			return dst, err
		}
	}
	// Only now: First may go on when something is absent, but not when something
	// else is there and wrong.
	if absent != "" {
		return dst, missing("header", absent, "is missing")
	}
	return dst, nil
}

func (p headerPart) text() string { return listDefinition("header", p.names) }
func (p headerPart) arity() int   { return len(p.names) }

// findHeader returns the value of the last header called lower, in any case, and
// how many there are.
func findHeader(headers broker.Headers, lower string) (value []byte, count int) {
	for i := range headers {
		if equalASCII(headers[i].Name, lower) {
			value = headers[i].Value
			count++
		}
	}
	return value, count
}

// equalASCII compares without regard to the case of ASCII letters; lower has
// none in upper case. Unicode folding would let a Kelvin sign pass for a k.
func equalASCII(name, lower string) bool {
	if len(name) != len(lower) {
		return false
	}
	for i := range len(name) {
		if toLowerASCII(name[i]) != lower[i] {
			return false
		}
	}
	return true
}

func lowerASCII(s string) string {
	b := []byte(s)
	for i, c := range b {
		b[i] = toLowerASCII(c)
	}
	return string(b)
}

func toLowerASCII(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		c += 'a' - 'A'
	}
	return c
}
