package keyfunc

// walk finds the values at the paths of a jsonPart in one pass over a body that
// json.Valid has accepted: it relies on the syntax and never looks behind the end.
// It does not decode: what is not on a path is skipped byte by byte.
//
// It recurses once per step of a path, not per level of the body.
type walk struct {
	body  []byte
	found []span // by step.id; on the caller's stack, so nothing here may escape
}

// fault says that the value at path breaks a rule; the zero fault is none.
type fault struct{ path, rule string }

// span is a value's place in the body; end is 0 for a value that is not there.
type span struct{ start, end int }

// value looks at the value that starts at i and returns the index behind it.
func (w *walk) value(i int, at *step) (int, fault) {
	if len(at.next) == 0 {
		end := skipValue(w.body, i)
		w.found[at.id] = span{start: i, end: end}
		return end, fault{}
	}
	switch c := w.body[i]; c {
	case '{':
		return w.object(i, at)
	case '[':
		return w.array(i, at)
	default:
		return i, wrongKind(at, c)
	}
}

func wrongKind(at *step, c byte) fault {
	rule := "is " + describe(c) + ", must be an object"
	if at.path == "" {
		rule = "body " + rule
	}
	return fault{at.path, rule}
}

func (w *walk) object(i int, at *step) (int, fault) {
	i = skipSpace(w.body, i+1)
	for w.body[i] != '}' {
		name := i + 1
		end, escaped := skipString(w.body, i)
		i = skipSpace(w.body, end) + 1 // behind the colon
		i = skipSpace(w.body, i)
		if next := at.member(w.body[name:end-1], escaped); next == nil {
			i = skipValue(w.body, i)
		} else {
			if w.found[next.id].end != 0 {
				return i, fault{next.path, "is repeated"}
			}
			w.found[next.id].end = i // seen; a leaf gets its real place
			var f fault
			if i, f = w.value(i, next); f != (fault{}) {
				return i, f
			}
		}
		if i = skipSpace(w.body, i); w.body[i] == ',' {
			i = skipSpace(w.body, i+1)
		}
	}
	return i + 1, fault{}
}

func (w *walk) array(i int, at *step) (int, fault) {
	for _, next := range at.next {
		if next.index < 0 {
			return i, wrongKind(at, '[')
		}
	}
	i = skipSpace(w.body, i+1)
	for index := 0; w.body[i] != ']'; index++ {
		if next := at.element(index); next == nil {
			i = skipValue(w.body, i)
		} else {
			var f fault
			if i, f = w.value(i, next); f != (fault{}) {
				return i, f
			}
		}
		if i = skipSpace(w.body, i); w.body[i] == ',' {
			i = skipSpace(w.body, i+1)
		}
	}
	return i + 1, fault{}
}

// member returns the step for a member called name, the inside of a JSON string
// that has escapes if escaped. A name that is not valid Unicode is nobody's.
func (s *step) member(name []byte, escaped bool) *step {
	if escaped {
		var buffer [64]byte
		plain, rule := appendUnescaped(buffer[:0], name)
		if rule != "" {
			return nil
		}
		name = plain
	}
	for _, next := range s.next {
		if next.name == string(name) {
			return next
		}
	}
	return nil
}

// element returns the step for the element of an array at index.
func (s *step) element(index int) *step {
	for _, next := range s.next {
		if next.index == index {
			return next
		}
	}
	return nil
}

// skipSpace returns the index of the first byte from i that is no white space.
func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipString returns the index behind the string that starts at i, and whether
// it has escapes.
func skipString(b []byte, i int) (end int, escaped bool) {
	for i++; b[i] != '"'; i++ {
		if b[i] == '\\' {
			escaped = true
			i++
		}
	}
	return i + 1, escaped
}

// skipValue returns the index behind the value that starts at i. It counts
// levels instead of recursing.
func skipValue(b []byte, i int) int {
	for depth := 0; ; {
		switch b[i] {
		case '"':
			i, _ = skipString(b, i)
		case '{', '[':
			depth++
			i++
		case '}', ']':
			depth--
			i++
		case ' ', '\n', '\t', '\r', ',', ':': // only within a container
			i++
			continue
		default:
			i = skipLiteral(b, i)
		}
		if depth == 0 {
			return i
		}
	}
}

// skipLiteral returns the index behind the number, true, false or null at i,
// which lies in a container: something follows it.
func skipLiteral(b []byte, i int) int {
	for {
		switch b[i] {
		case ',', ']', '}', ' ', '\n', '\t', '\r':
			return i
		}
		i++
	}
}
