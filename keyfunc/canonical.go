package keyfunc

import (
	"bytes"
	"unicode"
	"unicode/utf8"
)

// The canonical text of a tuple: components joined by separator, in each of them
// an escape before every separator and escape. It is injective for tuples of
// every length, because no component is blank and so none is empty.
const (
	separator = '|'
	escape    = '\\'
)

// Rules for components and keys, as errors name them.
const (
	ruleBlank   = "is blank"
	ruleNUL     = "holds a NUL character"
	ruleUTF8    = "is not valid UTF-8"
	ruleTooLong = "is longer than 65536 bytes"
)

// finish takes dst[start:] as the raw text of one component, checks and escapes
// it in place. The rule is "" when it is fine.
func finish(dst []byte, start int) (_ []byte, rule string) {
	value := dst[start:]
	if len(value) > MaxSize {
		return dst, ruleTooLong
	}
	var (
		specials int
		visible  bool // a visible ASCII character was seen
		wide     bool // something else than ASCII was seen
	)
	for _, c := range value {
		switch {
		case c == 0:
			return dst, ruleNUL
		case c >= utf8.RuneSelf:
			wide = true
		case c > ' ' && c < 0x7f:
			visible = true
			if c == separator || c == escape {
				specials++
			}
		}
	}
	if wide && !utf8.Valid(value) {
		return dst, ruleUTF8
	}
	if !visible && (!wide || isBlank(value)) {
		return dst, ruleBlank
	}
	if specials > 0 {
		dst = escapeTail(dst, specials)
	}
	return dst, ""
}

// escapeTail writes an escape before each of the last specials of dst.
func escapeTail(dst []byte, specials int) []byte {
	from := len(dst)
	for range specials {
		dst = append(dst, 0)
	}
	for to := len(dst); to > from; { // equal once all are escaped
		from--
		to--
		dst[to] = dst[from]
		if c := dst[from]; c == separator || c == escape {
			to--
			dst[to] = escape
		}
	}
	return dst
}

// isBlank tells whether valid UTF-8 shows nothing at all.
func isBlank(value []byte) bool {
	return bytes.IndexFunc(value, func(r rune) bool {
		return !unicode.IsSpace(r) && !unicode.In(r, unicode.Cc, unicode.Cf)
	}) < 0
}

// checkText holds a text that is no tuple of ours to the rules of a component.
func checkText(text string) (rule string) {
	if len(text) > MaxSize {
		return ruleTooLong
	}
	_, rule = finish([]byte(text), 0)
	return rule
}

// appendText appends text as one component.
func appendText[T ~string | ~[]byte](dst []byte, kind, field string, text T) ([]byte, error) {
	if len(text) > MaxSize {
		return dst, invalid(kind, field, ruleTooLong)
	}
	start := len(dst)
	dst, rule := finish(append(dst, text...), start)
	if rule != "" {
		return dst, invalid(kind, field, rule)
	}
	return dst, nil
}
