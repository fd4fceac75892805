package inboxpgx

import "strings"

// controlIn returns the first statement in an SQL text that would end or begin
// the transaction, or touch the savepoint of the run, in a few words; "" when
// there is none. The text may hold several statements. Savepoints by other names
// are the handler's own business.
//
// It is a courtesy with a clear message, not the safeguard: what gets past it
// (through the connection itself) is noticed by the savepoint and the guard row.
func controlIn(sql string) string {
	word, _ := control(sql)
	return word
}

// control is controlIn; complete tells that the text does not end within a
// quote or comment.
func control(sql string) (found string, complete bool) {
	l := lexer{text: sql}
	for {
		if found == "" {
			found = l.statement()
		} else {
			l.statement()
		}
		if l.at >= len(l.text) {
			return found, !l.cut
		}
	}
}

// settingsIn tells whether an SQL text changes settings of the transaction or the
// session, so that the next handler would find them changed.
func settingsIn(sql string) bool {
	l := lexer{text: sql}
	first := true // of a statement
	for t := l.next(); t.kind != end; t = l.next() {
		if first && t.is("set", "reset", "discard") || t.is("set_config") {
			return true
		}
		first = t.kind == symbol && t.text == ";"
	}
	return false
}

// lexer reads SQL text as far as needed to find where statements begin.
type lexer struct {
	text string
	at   int
	cut  bool // the text ended within a quote or comment
}

// kind of a token.
type kind int

const (
	end    kind = iota // of the text
	word               // an unquoted word
	quoted             // a quoted identifier
	symbol             // one character
	value              // a string or number
)

type token struct {
	kind kind
	text string // words in lower case, quoted identifiers without quotes
}

func (t token) is(words ...string) bool {
	for _, w := range words {
		if t.kind == word && t.text == w {
			return true
		}
	}
	return false
}

// statement reads one statement with its semicolon and tells whether it is
// control.
func (l *lexer) statement() string {
	var head [5]token
	n, depth, atomic := 0, 0, 0
	for previous := (token{}); ; {
		t := l.next()
		if n < len(head) {
			head[n] = t
			n++
		}
		switch {
		case t.kind == end:
			return controls(head)
		case t.kind == symbol && t.text == "(":
			depth++
		case t.kind == symbol && t.text == ")":
			depth = max(depth-1, 0)
		case t.kind == symbol && t.text == ";" && depth == 0 && atomic == 0:
			return controls(head)
		case !head[0].is("create"):
		case atomic == 0 && previous.is("begin") && t.is("atomic"):
			atomic = 1 // The body of a function: statements up to its END.
		case atomic > 0 && t.is("case"):
			atomic++
		case atomic > 0 && t.is("end"):
			atomic--
		}
		previous = t
	}
}

// controls looks at the first tokens of a statement.
func controls(head [5]token) string {
	first, rest := head[0], head[1:]
	switch {
	case first.is("begin", "start", "commit", "end", "abort"):
		return first.text
	case first.is("rollback"):
		if rest[0].is("work", "transaction") {
			rest = rest[1:]
		}
		if !rest[0].is("to") {
			return first.text
		}
		if ours(rest[1:]) {
			return "rollback to " + runSavepoint
		}
	case first.is("prepare") && rest[0].is("transaction"):
		return "prepare transaction"
	case first.is("savepoint") && ours(rest), first.is("release") && ours(rest):
		return first.text + " " + runSavepoint
	case first.is("set"):
		if rest[0].is("local", "session") {
			rest = rest[1:]
		}
		if rest[0].is("transaction") {
			return "set transaction"
		}
	}
	return ""
}

// ours tells whether a savepoint is named that belongs to the run.
func ours(rest []token) bool {
	if rest[0].is("savepoint") && len(rest) > 1 && (rest[1].kind == word || rest[1].kind == quoted) {
		rest = rest[1:]
	}
	return (rest[0].kind == word || rest[0].kind == quoted) && rest[0].text == runSavepoint
}

// next reads one token.
func (l *lexer) next() token {
	l.space()
	if l.at >= len(l.text) {
		return token{}
	}
	start, c := l.at, l.text[l.at]
	switch {
	case isLetter(c):
		return l.word()
	case c == '\'':
		l.quote('\'', false)
		return token{kind: value}
	case c == '"':
		l.quote('"', false)
		inside := strings.TrimSuffix(l.text[start+1:l.at], `"`)
		return token{quoted, strings.ReplaceAll(inside, `""`, `"`)}
	case c == '$' && l.dollar():
		return token{kind: value}
	case c >= '0' && c <= '9':
		for l.at < len(l.text) && (isLetter(l.text[l.at]) || isDigit(l.text[l.at])) {
			l.at++
		}
		return token{kind: value}
	}
	l.at++
	return token{symbol, l.text[start:l.at]}
}

// word reads a word, or a string with a letter in front.
func (l *lexer) word() token {
	start := l.at
	for l.at < len(l.text) && (isLetter(l.text[l.at]) || isDigit(l.text[l.at]) || l.text[l.at] == '$') {
		l.at++
	}
	text := strings.ToLower(l.text[start:l.at])
	if l.at < len(l.text) && l.text[l.at] == '\'' && (text == "e" || text == "b" || text == "x" || text == "n") {
		l.quote('\'', text == "e")
		return token{kind: value}
	}
	return token{word, text}
}

// quote reads up to the closing quote; a doubled one stands for itself.
func (l *lexer) quote(q byte, escapes bool) {
	for l.at++; l.at < len(l.text); l.at++ {
		switch {
		case escapes && l.text[l.at] == '\\':
			l.at++
		case l.text[l.at] != q:
		case l.at+1 < len(l.text) && l.text[l.at+1] == q:
			l.at++
		default:
			l.at++
			return
		}
	}
	l.at, l.cut = len(l.text), true
}

// dollar reads a dollar-quoted string, if there is one.
func (l *lexer) dollar() bool {
	i := l.at + 1
	for i < len(l.text) && (isLetter(l.text[i]) || i > l.at+1 && isDigit(l.text[i])) {
		i++
	}
	if i >= len(l.text) || l.text[i] != '$' {
		return false
	}
	tag := l.text[l.at : i+1]
	closing := strings.Index(l.text[i+1:], tag)
	if closing < 0 {
		l.at, l.cut = len(l.text), true
		return true
	}
	l.at = i + 1 + closing + len(tag)
	return true
}

// space skips white space and comments; those of the form /* */ nest.
func (l *lexer) space() {
	for l.at < len(l.text) {
		rest := l.text[l.at:]
		switch {
		case strings.IndexByte(" \t\n\r\f\v", rest[0]) >= 0:
			l.at++
		case strings.HasPrefix(rest, "--"):
			if n := strings.IndexAny(rest, "\n\r"); n >= 0 {
				l.at += n
				continue
			}
			l.at, l.cut = len(l.text), true
		case strings.HasPrefix(rest, "/*"):
			l.comment()
		default:
			return
		}
	}
}

func (l *lexer) comment() {
	for depth := 0; l.at < len(l.text); {
		switch rest := l.text[l.at:]; {
		case strings.HasPrefix(rest, "/*"):
			depth++
			l.at += 2
		case strings.HasPrefix(rest, "*/"):
			depth--
			l.at += 2
			if depth == 0 {
				return
			}
		default:
			l.at++
		}
	}
	l.cut = true
}

func isLetter(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c >= 0x80
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }
