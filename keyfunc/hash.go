package keyfunc

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"hash"

	"github.com/ackafter/ackafter/broker"
)

// BodyHash makes the key of the body's SHA-256, in hex. It fits messages that
// have no id but are never legitimately equal. Two heartbeats, or two orders of
// one coffee, with the same bytes are one message to it; and the same event
// written anew with other spacing, or with another timestamp, is two.
//
// A nil body is ErrMissing, an empty one is invalid.
func BodyHash() Func { return newFunc("body-hash", bodyHashPart{}) }

type bodyHashPart struct{}

func (bodyHashPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	switch {
	case m.Body == nil:
		return dst, missing("body-hash", "", ruleNoBody)
	case len(m.Body) == 0:
		return dst, invalid("body-hash", "", ruleEmptyBody)
	}
	sum := sha256.Sum256(m.Body)
	return hex.AppendEncode(dst, sum[:]), nil
}

func (bodyHashPart) text() string { return "body-hash:sha256" }
func (bodyHashPart) arity() int   { return 1 }

// minSecret is the shortest secret of HMAC in bytes.
const minSecret = 16

// HMAC replaces the key of f by its HMAC-SHA256 under secret, in hex. Use it
// for keys made of personal data (an e-mail address, a national id): what is
// stored and logged cannot be read or tried out without the secret. To find a
// message later, derive its key again.
//
// Another secret gives other keys, so that everything handled before looks new.
// The definition therefore names the secret by a fingerprint: the first 8 hex
// digits of an HMAC under it. That reveals nothing about a random secret; one
// that people made up could be tried out against it, as against the keys
// themselves. Use 32 random bytes, and keep them as long as the keys.
//
// A secret shorter than 16 bytes, or an f that does not [Validate], is a
// construction error. The secret is copied.
func HMAC(secret []byte, f Func) Func {
	if len(secret) < minSecret {
		return failed(unusable("hmac", "", "secret is shorter than 16 bytes"))
	}
	p, err := asPart(f)
	if err != nil {
		return failed(&Error{Func: "hmac", Rule: "part cannot be used", Err: err})
	}
	h := &hmacPart{part: p}
	secret = bytes.Clone(secret)
	h.hashes.fresh = func() *keyedHash { return &keyedHash{Hash: hmac.New(sha256.New, secret)} }
	// No key holds a NUL, so that no key has this text.
	fingerprint := h.appendSum(nil, []byte("keyfunc\x00fingerprint of the secret"))[:8]
	h.definition = callDefinition("hmac", "sha256-"+string(fingerprint), p.text())
	return newFunc("hmac", h)
}

type hmacPart struct {
	part       part
	definition string
	hashes     pool[*keyedHash]
}

// keyedHash is a hash with room for its sum.
type keyedHash struct {
	hash.Hash
	sum [sha256.Size]byte
}

func (p *hmacPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	start := len(dst)
	dst, err := p.part.appendKey(dst, m)
	if err != nil {
		return dst, err
	}
	if len(dst)-start > MaxSize {
		return dst, invalid("hmac", "", ruleTooLong)
	}
	return p.appendSum(dst[:start], dst[start:]), nil
}

// appendSum appends the HMAC of text, which may lie behind the end of dst, in hex.
func (p *hmacPart) appendSum(dst, text []byte) []byte {
	h := p.hashes.get()
	defer p.hashes.put(h)
	h.Reset()
	_, _ = h.Write(text) // a hash never fails
	return hex.AppendEncode(dst, h.Sum(h.sum[:0]))
}

func (p *hmacPart) text() string { return p.definition }
func (p *hmacPart) arity() int   { return 1 }
