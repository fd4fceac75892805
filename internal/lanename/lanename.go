// Package lanename makes names of lanes from the keys of messages, for the broker
// adapters.
package lanename

import (
	"crypto/sha256"
	"encoding/hex"
)

// maxKey is how long an encoded key in a name may be; longer ones appear as their
// hash.
const maxKey = 200

// Of names the lane of a key within a domain: "orders/3/A1". Two keys never share a
// name: bytes other than printable ASCII, and '%', are written as %XX, and a key too
// long for a name is "%sha256:" and its hash, which no key is written as. A nil and
// an empty key are the same.
func Of(domain string, key []byte) string {
	name := make([]byte, 0, len(domain)+1+len(key))
	name = append(name, domain...)
	name = append(name, '/')
	start := len(name)
	for _, c := range key {
		if len(name)-start > maxKey {
			break
		}
		if c > ' ' && c < 0x7f && c != '%' {
			name = append(name, c)
			continue
		}
		const digits = "0123456789ABCDEF"
		name = append(name, '%', digits[c>>4], digits[c&15])
	}
	if len(name)-start > maxKey {
		sum := sha256.Sum256(key)
		name = append(name[:start], "%sha256:"...)
		name = hex.AppendEncode(name, sum[:])
	}
	return string(name)
}
