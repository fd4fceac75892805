// Package column turns values that come from outside into values that a text
// column takes, the same in every store.
package column

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ackafter/ackafter/broker"
)

// maxKey is the length in bytes up to which a key is stored as it is. A B-tree
// entry has room for about 2,700.
const maxKey = 512

// prefix is how much of a longer key stays readable.
const prefix = 128

// Key returns the stored form of a message key: the key itself up to 512
// bytes, else a readable prefix and the key's SHA-256. Two keys never share a
// stored form: a hashed form is 129 + 71 bytes long or a little less, and a key
// that itself looks like one is hashed too.
func Key(key string) string {
	if len(key) <= maxKey && !looksHashed(key) {
		return key
	}
	cut := prefix
	if len(key) <= cut {
		cut = 0
	}
	for cut > 0 && !utf8.RuneStart(key[cut]) {
		cut--
	}
	sum := sha256.Sum256([]byte(key))
	return key[:cut] + mark + hex.EncodeToString(sum[:])
}

// Stored returns the stored form of a message key that may have been read from a
// table: one that is not too long is a stored form.
func Stored(key string) string {
	if len(key) <= maxKey {
		return key
	}
	return Key(key)
}

// Forms returns the stored forms under which a text that a person has may be
// found, the likelier first: a key, or what a table shows for a long one.
func Forms(text string) []string {
	key := Key(text)
	if len(text) <= maxKey && key != text {
		return []string{key, text}
	}
	return []string{key}
}

// Lane returns the stored form of a lane: up to 512 bytes as it is, else a prefix
// and its SHA-256. A stored form is its own.
func Lane(lane string) []byte {
	if len(lane) <= maxKey {
		return []byte(lane)
	}
	sum := sha256.Sum256([]byte(lane))
	return []byte(lane[:prefix] + mark + hex.EncodeToString(sum[:]))
}

// mark stands between the prefix and the hash.
const mark = "…sha256:"

func looksHashed(key string) bool {
	const sum = 2 * sha256.Size
	return len(key) >= len(mark)+sum && key[len(key)-sum-len(mark):len(key)-sum] == mark
}

// Text returns s as a text column takes it: valid UTF-8, without NUL, at most
// limit bytes.
func Text(s string, limit int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}

// header is the stored form of a header; names are bytes too, since brokers do
// not promise UTF-8.
type header struct {
	Name  []byte `json:"n"`
	Value []byte `json:"v"`
}

// EncodeHeaders returns the stored form of headers; nil for none.
func EncodeHeaders(h broker.Headers) []byte {
	if len(h) == 0 {
		return nil
	}
	rows := make([]header, len(h))
	for i := range h {
		rows[i] = header{Name: []byte(h[i].Name), Value: h[i].Value}
	}
	b, err := json.Marshal(rows)
	if err != nil {
		panic(err) // Byte slices always marshal.
	}
	return b
}

// DecodeHeaders is the reverse of EncodeHeaders.
func DecodeHeaders(b []byte) (broker.Headers, error) {
	if len(b) == 0 {
		return nil, nil
	}
	var rows []header
	if err := json.Unmarshal(b, &rows); err != nil {
		return nil, fmt.Errorf("column: decode headers: %w", err)
	}
	h := make(broker.Headers, len(rows))
	for i := range rows {
		h[i] = broker.Header{Name: string(rows[i].Name), Value: rows[i].Value}
	}
	return h, nil
}
