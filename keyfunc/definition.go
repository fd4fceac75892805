package keyfunc

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// definitionEscaper marks the characters that have a meaning in definitions, so
// that no two lists of names have one definition.
var definitionEscaper = strings.NewReplacer(
	`\`, `\\`, `,`, `\,`, `(`, `\(`, `)`, `\)`, `|`, `\|`, `:`, `\:`, `;`, `\;`)

func escapeDefinition(text string) string { return definitionEscaper.Replace(text) }

// listDefinition is kind:name,name of escaped names.
func listDefinition(kind string, names []string) string {
	escaped := make([]string, len(names))
	for i, name := range names {
		escaped[i] = escapeDefinition(name)
	}
	return kind + ":" + strings.Join(escaped, ",")
}

// callDefinition is kind(a|b) of texts that are definitions or escaped.
func callDefinition(kind string, operands ...string) string {
	return kind + "(" + strings.Join(operands, "|") + ")"
}

// partsDefinition is kind(a|b) of parts.
func partsDefinition(kind string, parts []part) string {
	texts := make([]string, len(parts))
	for i, p := range parts {
		texts[i] = p.text()
	}
	return callDefinition(kind, texts...)
}

// checkDefinition returns the rule that a whole definition breaks, or "".
func checkDefinition(text string) (rule string) {
	if len(text) > maxDefinition {
		return "is longer than 4096 bytes"
	}
	return checkName(text)
}

// checkName returns the rule that a name in a definition breaks, or "".
func checkName(name string) (rule string) {
	switch {
	case !utf8.ValidString(name):
		return ruleUTF8
	case isBlank([]byte(name)):
		return ruleBlank
	case strings.ContainsFunc(name, unicode.IsControl):
		return "holds a control character"
	default:
		return ""
	}
}
