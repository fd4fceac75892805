package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

// content is bytes of any kind as JSON: text where they are valid UTF-8, else
// base64.
type content struct {
	Text   *string `json:"text,omitempty"`
	Base64 []byte  `json:"base64,omitempty"`
}

// newContent returns nil for nil, which JSON shows as null.
func newContent(b []byte) *content {
	switch {
	case b == nil:
		return nil
	case utf8.Valid(b):
		s := string(b)
		return &content{Text: &s}
	}
	return &content{Base64: b}
}

// block returns b for people: text with its lines and tabs, but with nothing
// that a terminal would obey; a hex dump when it is no text.
func block(b []byte) string {
	if !utf8.Valid(b) || strings.ContainsRune(string(b), 0) {
		return strings.TrimSuffix(hex.Dump(b), "\n")
	}
	lines := strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
	for i, line := range lines {
		parts := strings.Split(strings.TrimSuffix(line, "\r"), "\t")
		for j := range parts {
			parts[j] = printable(parts[j])
		}
		lines[i] = strings.Join(parts, "\t")
	}
	return strings.Join(lines, "\n")
}

// resultLimit is how many characters of a stored result are shown in one line.
const resultLimit = 100

// resultLine returns a stored result in one line of bounded length.
func resultLine(b []byte) string {
	if b == nil {
		return "none stored"
	}
	text := string(b)
	if json.Valid(b) {
		text = compactJSON(b)
	}
	if utf8.RuneCountInString(text) <= resultLimit {
		return text
	}
	return fmt.Sprintf("%s (%s bytes; --full shows all)", shortened(text, resultLimit), grouped(int64(len(b))))
}

// fingerprint returns the beginning of a hash, enough to compare by eye.
func fingerprint(b []byte) string {
	const short = 6
	return hex.EncodeToString(b[:min(len(b), short)])
}
