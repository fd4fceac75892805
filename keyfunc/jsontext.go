package keyfunc

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

const ruleSurrogate = "holds a lone surrogate"

// appendUnescaped appends the text of a JSON string, given without its quotes and
// known to be well-formed. Unlike encoding/json it replaces nothing: a surrogate
// escape without its other half breaks a rule, and invalid UTF-8 stays as it is
// for finish to refuse.
func appendUnescaped(dst, raw []byte) (_ []byte, rule string) {
	for {
		n := bytes.IndexByte(raw, '\\')
		if n < 0 {
			return append(dst, raw...), ""
		}
		dst = append(dst, raw[:n]...)
		c := raw[n+1]
		raw = raw[n+2:]
		switch c {
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		case 'u':
			r := hex4(raw)
			raw = raw[4:]
			if utf16.IsSurrogate(r) {
				if len(raw) < 6 || raw[0] != '\\' || raw[1] != 'u' {
					return dst, ruleSurrogate
				}
				if r = utf16.DecodeRune(r, hex4(raw[2:])); r == utf8.RuneError {
					return dst, ruleSurrogate
				}
				raw = raw[6:]
			}
			dst = utf8.AppendRune(dst, r)
			continue
		}
		dst = append(dst, c) // also a quote, a slash or a backslash itself
	}
}

// hex4 is the value of four hex digits.
func hex4(digits []byte) (r rune) {
	for _, c := range digits[:4] {
		r = r<<4 | rune(nibble(c))
	}
	return r
}

// nibble is the value of a hex digit.
func nibble(c byte) byte {
	switch {
	case c >= 'a':
		return c - 'a' + 10
	case c >= 'A':
		return c - 'A' + 10
	default:
		return c - '0'
	}
}

// maxNumber is the longest number that is written out, in bytes.
const maxNumber = 1024

const ruleNumber = "is a number of more than 1024 characters"

// appendNumber appends the exact value of a JSON number in plain decimal digits:
// no exponent, no zeros that say nothing, no negative zero. Numbers of one value
// have one text. It works on the digits and needs memory for the result only.
func appendNumber(dst, text []byte) (_ []byte, rule string) {
	negative := text[0] == '-'
	if negative {
		text = text[1:]
	}
	whole, exponent := text, int64(0)
	if n := bytes.IndexAny(text, "eE"); n >= 0 {
		whole, exponent = text[:n], parseExponent(text[n+1:])
	}
	whole, fraction, _ := bytes.Cut(whole, []byte("."))

	// The value is 0.DIGITS times ten to the power of point.
	digits := decimals{whole, fraction}
	point := int64(len(whole)) + exponent
	first, last := 0, digits.len()
	for first < last && digits.at(first) == '0' {
		first++
		point--
	}
	for first < last && digits.at(last-1) == '0' {
		last--
	}
	if first == last {
		return append(dst, '0'), ""
	}
	count := int64(last - first)
	if count > maxNumber || point > maxNumber || point < -maxNumber {
		return dst, ruleNumber
	}

	start := len(dst)
	if negative {
		dst = append(dst, '-')
	}
	if point <= 0 {
		dst = append(dst, '0', '.')
		for range -point {
			dst = append(dst, '0')
		}
	}
	for i := range count {
		if i == point && i > 0 {
			dst = append(dst, '.')
		}
		dst = append(dst, digits.at(first+int(i)))
	}
	for range point - count {
		dst = append(dst, '0')
	}
	if len(dst)-start > maxNumber {
		return dst[:start], ruleNumber
	}
	return dst, ""
}

// decimals are the digits before and behind a decimal point.
type decimals struct{ whole, fraction []byte }

func (d decimals) len() int { return len(d.whole) + len(d.fraction) }

func (d decimals) at(i int) byte {
	if i < len(d.whole) {
		return d.whole[i]
	}
	return d.fraction[i-len(d.whole)]
}

// parseExponent is the value of a JSON exponent, cut off where it makes no
// difference any more: no body has that many digits to make up for it.
func parseExponent(text []byte) (value int64) {
	const limit = 1 << 53
	negative := text[0] == '-'
	if negative || text[0] == '+' {
		text = text[1:]
	}
	for _, c := range text {
		if value = value*10 + int64(c-'0'); value > limit {
			value = limit
		}
	}
	if negative {
		return -value
	}
	return value
}
