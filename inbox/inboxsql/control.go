package inboxsql

import "strings"

// endsTransaction tells whether a text holds a statement that begins or ends a
// transaction. Savepoints do neither.
//
// It reads SQL only as far as that takes: the first words of each statement.
// What it takes for harmless by mistake, the guard row stops.
func endsTransaction(query string) bool {
	s := statements{rest: query}
	for words := s.next(); words != nil; words = s.next() {
		switch words[0] {
		case "COMMIT", "END", "ABORT", "BEGIN":
			return true
		case "ROLLBACK":
			if !toSavepoint(words) {
				return true
			}
		case "START", "PREPARE":
			if len(words) > 1 && words[1] == "TRANSACTION" {
				return true
			}
		case "CREATE":
			// The bodies of triggers and functions have statements of their own,
			// with BEGIN and END around them.
			for _, w := range words[1:] {
				switch w {
				case "TRIGGER", "FUNCTION", "PROCEDURE":
					return false
				}
			}
		}
	}
	return false
}

// changesSettings tells whether a text changes settings of the transaction or the
// session, so that the next handler would find them changed.
func changesSettings(query string) bool {
	if strings.Contains(strings.ToLower(query), "set_config") {
		return true
	}
	s := statements{rest: query}
	for words := s.next(); words != nil; words = s.next() {
		switch words[0] {
		case "SET", "RESET", "DISCARD", "PRAGMA":
			return true
		}
	}
	return false
}

// rollsBackToSavepoint tells whether a text is a ROLLBACK TO.
func rollsBackToSavepoint(query string) bool {
	s := statements{rest: query}
	words := s.next()
	return words != nil && words[0] == "ROLLBACK" && toSavepoint(words)
}

// toSavepoint tells ROLLBACK [TRANSACTION | WORK] TO from ROLLBACK.
func toSavepoint(words []string) bool {
	for _, w := range words[1:] {
		switch w {
		case "TRANSACTION", "WORK":
		default:
			return w == "TO"
		}
	}
	return false
}

// statements goes through the statements of an SQL text.
type statements struct{ rest string }

// firstWords is how many words of a statement matter:
// CREATE OR REPLACE CONSTRAINT TRIGGER.
const firstWords = 5

// next returns the first words of the next statement in upper case, nil at the
// end of the text.
func (s *statements) next() []string {
	var words []string
	for s.rest != "" {
		c := s.rest[0]
		switch {
		case c == ';':
			s.rest = s.rest[1:]
			if words != nil {
				return words
			}
		case isWord(c) && c != '$':
			w := s.word()
			if len(words) < firstWords {
				words = append(words, strings.ToUpper(w))
			} else if strings.IndexByte(s.rest, ';') < 0 {
				s.rest = "" // The usual case: one statement, the rest does not matter.
			}
		default:
			s.skip(c)
		}
	}
	return words
}

// word takes the word at the start of the rest. A prefix of a string literal
// (E'...') is taken with what it stands before, because it changes how that
// ends.
func (s *statements) word() string {
	n := 1
	for n < len(s.rest) && isWord(s.rest[n]) {
		n++
	}
	w := s.rest[:n]
	s.rest = s.rest[n:]
	if strings.EqualFold(w, "e") && strings.HasPrefix(s.rest, "'") {
		s.quoted('\'', true)
	}
	return w
}

func isWord(c byte) bool {
	return c == '_' || c == '$' || c >= 0x80 || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// skip takes what is neither a word nor the end of a statement.
func (s *statements) skip(c byte) {
	switch {
	case c == '\'' || c == '"' || c == '`':
		s.quoted(c, false)
	case c == '$':
		s.dollar()
	case strings.HasPrefix(s.rest, "--"):
		_, s.rest, _ = strings.Cut(s.rest, "\n")
	case strings.HasPrefix(s.rest, "/*"):
		s.comment()
	default:
		s.rest = s.rest[1:]
	}
}

// quoted takes a string or a quoted name; a doubled quote needs no care, it
// looks like the start of another string.
func (s *statements) quoted(quote byte, backslash bool) {
	for i := 1; i < len(s.rest); i++ {
		switch {
		case backslash && s.rest[i] == '\\':
			i++
		case s.rest[i] == quote:
			s.rest = s.rest[i+1:]
			if backslash && strings.HasPrefix(s.rest, string(quote)) {
				s.quoted(quote, true)
			}
			return
		}
	}
	s.rest = ""
}

// dollar takes $tag$ text $tag$, or the $ of a parameter.
func (s *statements) dollar() {
	n := 1
	for n < len(s.rest) && isWord(s.rest[n]) && s.rest[n] != '$' {
		n++
	}
	isTag := n < len(s.rest) && s.rest[n] == '$' && (n == 1 || s.rest[1] < '0' || s.rest[1] > '9')
	if !isTag {
		s.rest = s.rest[n:]
		return
	}
	tag := s.rest[:n+1]
	_, s.rest, _ = strings.Cut(s.rest[n+1:], tag)
}

// comment takes a comment and those within it: to PostgreSQL they nest. To SQLite
// they do not; a text that makes use of that is for the guard row.
func (s *statements) comment() {
	depth, i := 0, 0
	for i < len(s.rest) {
		switch {
		case strings.HasPrefix(s.rest[i:], "/*"):
			depth++
			i += 2
		case strings.HasPrefix(s.rest[i:], "*/"):
			depth--
			i += 2
			if depth == 0 {
				s.rest = s.rest[i:]
				return
			}
		default:
			i++
		}
	}
	s.rest = ""
}
