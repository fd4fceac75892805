package keyfunc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/ackafter/ackafter/broker"
)

// JSON makes the key of the values at paths in a JSON body, in the order of
// paths.
//
// A path is made of names joined by dots: "order.id". A backslash takes the
// meaning of the next dot or backslash away: `order\.id` is one name with a dot
// in it. A step of decimal digits (no leading zero, up to 9 of them) is an
// index, from 0, where it meets an array, and a name where it meets an object:
// "items.0.id". Names are compared exactly, including their case, after JSON's
// escapes in the body are resolved.
//
// Beware: encoding/json decodes {"orderId":"A","ORDERID":"B"} into a struct's
// orderId as "B", while the key is made of "A".
//
// The body must be one JSON value with nothing but white space around it; a
// byte order mark is refused, as encoding/json refuses it. Each path must lead
// to a string, a number or a boolean, through names that are not repeated; see
// the package comment for what else is refused and how values are written. When
// one of several paths is invalid the key is invalid, else when one is absent it
// is ErrMissing. A message without a body (nil, a tombstone) is ErrMissing; an
// empty body is invalid.
//
// No paths, a blank one, an empty name ("a..b"), a backslash before anything
// else, a path with control characters, with more than 32 steps or one that begins
// with "$.", a path given twice, or one that goes on where another one ends
// ("order", "order.id") is a construction error, see [Validate].
func JSON(paths ...string) Func {
	p, err := newJSONPart("json", paths, false)
	if err != nil {
		return failed(err)
	}
	return newFunc("json", p)
}

// Rules for bodies.
const (
	ruleNoBody    = "message has no body"
	ruleEmptyBody = "body is empty"
)

// maxSteps bounds a path, and with it the recursion of walk.
const maxSteps = 32

// step is a node in the tree of all paths of a jsonPart.
type step struct {
	id    int    // index into walk.found
	path  string // as the user wrote it, up to here; "" at the root
	name  string
	index int // -1 when name is no index
	next  []*step
}

// jsonPart is a tuple of values of a JSON body.
type jsonPart struct {
	kind        string
	definition  string
	stringsOnly bool
	root        *step
	leaves      []*step // in the order of the paths
	steps       int
}

func newJSONPart(kind string, paths []string, stringsOnly bool) (*jsonPart, error) {
	if len(paths) == 0 {
		return nil, unusable(kind, "", "needs at least one path")
	}
	p := &jsonPart{kind: kind, stringsOnly: stringsOnly, root: &step{index: -1}, steps: 1}
	escaped := make([]string, len(paths))
	for i, path := range paths {
		names, rule := parsePath(path)
		if rule != "" {
			return nil, unusable(kind, "", fmt.Sprintf("path %d %s", i+1, rule))
		}
		leaf, rule := p.add(names)
		if rule != "" {
			return nil, unusable(kind, path, rule)
		}
		p.leaves = append(p.leaves, leaf)
		for j, name := range names {
			names[j] = strings.ReplaceAll(escapeDefinition(name), ".", `\.`)
		}
		escaped[i] = strings.Join(names, ".")
	}
	p.definition = kind + ":" + strings.Join(escaped, ",")
	return p, nil
}

// parsePath splits path into names.
func parsePath(path string) (names []string, rule string) {
	if rule := checkName(path); rule != "" {
		return nil, rule
	}
	var name strings.Builder
	for i := 0; i <= len(path); i++ {
		switch {
		case i == len(path) || path[i] == '.':
			if name.Len() == 0 {
				return nil, "has an empty step"
			}
			names = append(names, name.String())
			name.Reset()
		case path[i] != '\\':
			name.WriteByte(path[i])
		case i+1 < len(path) && (path[i+1] == '.' || path[i+1] == '\\'):
			i++
			name.WriteByte(path[i])
		default:
			return nil, `has a backslash that is not before a dot or a backslash`
		}
	}
	if len(names) > maxSteps {
		return nil, "has more than 32 steps"
	}
	if len(names) > 1 && names[0] == "$" {
		return nil, `begins with "$.": a path is names joined by dots, "order.id"`
	}
	return names, ""
}

// add puts a path into the tree and returns its leaf.
func (p *jsonPart) add(names []string) (leaf *step, rule string) {
	at := p.root
	for i, name := range names {
		next := at.member([]byte(name), false)
		switch last := i == len(names)-1; {
		case next == nil:
			next = &step{id: p.steps, name: name, path: joinPath(at.path, name), index: parseIndex(name)}
			p.steps++
			at.next = append(at.next, next)
		case last && len(next.next) == 0:
			return nil, "is given twice"
		case last || len(next.next) == 0:
			return nil, "and another path lead into each other"
		}
		at = next
	}
	return at, ""
}

func joinPath(path, name string) string {
	name = strings.NewReplacer(`\`, `\\`, `.`, `\.`).Replace(name)
	if path == "" {
		return name
	}
	return path + "." + name
}

// parseIndex returns the index that name is, else -1.
func parseIndex(name string) int {
	if len(name) > 9 || len(name) > 1 && name[0] == '0' {
		return -1
	}
	for _, c := range []byte(name) {
		if c < '0' || c > '9' {
			return -1
		}
	}
	index, err := strconv.Atoi(name)
	if err != nil {
		return -1
	}
	return index
}

// fewSteps is the number of steps for which no memory is allocated.
const fewSteps = 16

func (p *jsonPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	if len(m.Body) == 0 || !json.Valid(m.Body) {
		return dst, p.diagnose(m.Body)
	}
	var few [fewSteps]span
	w := walk{body: m.Body, found: few[:]}
	if p.steps > fewSteps {
		w.found = make([]span, p.steps)
	}
	if _, f := w.value(skipSpace(m.Body, 0), p.root); f != (fault{}) {
		return dst, invalid(p.kind, f.path, f.rule)
	}
	var absent *step
	for i, leaf := range p.leaves {
		at := w.found[leaf.id]
		if at.end == 0 {
			if absent == nil {
				absent = leaf
			}
			continue
		}
		if i > 0 {
			dst = append(dst, separator)
		}
		var rule string
		if dst, rule = p.appendScalar(dst, m.Body[at.start:at.end]); rule != "" {
			return dst, invalid(p.kind, leaf.path, rule)
		}
	}
	// Only now: First may go on when something is absent, but not when something
	// else is there and wrong.
	if absent != nil {
		return dst, missing(p.kind, absent.path, "is missing")
	}
	return dst, nil
}

// appendScalar appends a JSON value as one component.
func (p *jsonPart) appendScalar(dst, value []byte) (_ []byte, rule string) {
	start := len(dst)
	switch c := value[0]; {
	case c == '"':
		if dst, rule = appendUnescaped(dst, value[1:len(value)-1]); rule != "" {
			return dst, rule
		}
		return finish(dst, start)
	case p.stringsOnly:
		return dst, "is " + describe(c) + ", must be a string"
	case c == '-' || '0' <= c && c <= '9':
		return appendNumber(dst, value)
	case c == 't' || c == 'f':
		return append(dst, value...), ""
	default:
		return dst, "is " + describe(c) + ", must be a string, a number or a boolean"
	}
}

// describe names the kind of the JSON value that begins with c.
func describe(c byte) string {
	switch c {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case 'n':
		return "null"
	case 't', 'f':
		return "a boolean"
	default:
		return "a number"
	}
}

func (p *jsonPart) text() string { return p.definition }
func (p *jsonPart) arity() int   { return len(p.leaves) }

// diagnose says why body is not JSON. It names the first byte (case K9), and
// what that byte hints at.
func (p *jsonPart) diagnose(body []byte) error {
	switch {
	case body == nil:
		return missing(p.kind, "", ruleNoBody)
	case len(body) == 0:
		return invalid(p.kind, "", ruleEmptyBody)
	}
	text := fmt.Sprintf("body is not JSON: first byte is 0x%02x", body[0])
	switch {
	case bytes.HasPrefix(body, []byte("\xef\xbb\xbf")):
		text += ", a byte order mark"
	case body[0] == 0:
		text += ", as in the frame of a schema registry (see ConfluentFrame)"
	case bytes.HasPrefix(body, []byte("\x1f\x8b")):
		text += ", as in gzip (see Gzip)"
	default:
		text += ", " + syntaxFault(body)
	}
	return invalid(p.kind, "", text)
}

// syntaxFault says where body stops to be JSON. The decoder's own words are not
// used: they quote the body.
func syntaxFault(body []byte) string {
	decoder := json.NewDecoder(bytes.NewReader(body))
	var value json.RawMessage
	err := decoder.Decode(&value)
	var syntax *json.SyntaxError
	switch {
	case err == nil:
		return fmt.Sprintf("data follows the JSON value at byte %d", decoder.InputOffset())
	case errors.As(err, &syntax) && syntax.Offset <= int64(len(body)):
		return fmt.Sprintf("syntax error near byte %d", syntax.Offset)
	default:
		return fmt.Sprintf("body ends too early, at byte %d", len(body))
	}
}
