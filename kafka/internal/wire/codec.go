package wire

import (
	"encoding/binary"
	"errors"
)

// errShort tells that a response ends before it is complete.
var errShort = errors.New("response is cut off")

func appendString(b []byte, s string) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(len(s))) //nolint:gosec // names are checked to be shorter
	return append(b, s...)
}

func appendCompactString(b []byte, s string) []byte {
	b = binary.AppendUvarint(b, uint64(len(s))+1)
	return append(b, s...)
}

// reader takes a response apart. After the first error everything reads as
// zero; what it returns as bytes belongs to the response.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail() {
	if r.err == nil {
		r.err = errShort
	}
	r.b = nil
}

func (r *reader) take(n int) []byte {
	if n < 0 || n > len(r.b) {
		r.fail()
		return nil
	}
	b := r.b[:n:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) int16() int16 {
	if b := r.take(2); b != nil {
		return int16(binary.BigEndian.Uint16(b))
	}
	return 0
}

func (r *reader) int32() int32 {
	if b := r.take(4); b != nil {
		return int32(binary.BigEndian.Uint32(b))
	}
	return 0
}

func (r *reader) int64() int64 {
	if b := r.take(8); b != nil {
		return int64(binary.BigEndian.Uint64(b))
	}
	return 0
}

func (r *reader) varint() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) string() string { return string(r.take(int(r.int16()))) }

// compactString reads a nullable compact string; null reads as "".
func (r *reader) compactString() string {
	n := r.uvarint()
	if n == 0 {
		return ""
	}
	return string(r.bytesOf(n - 1))
}

// length reads the length of an array; null reads as 0. No array has more
// elements than bytes that are left, so that nonsense allocates nothing.
func (r *reader) length() int {
	n := int(r.int32())
	if n > len(r.b) {
		r.fail()
	}
	if r.err != nil || n < 0 {
		return 0
	}
	return n
}

// compactLength is length for the compact encoding.
func (r *reader) compactLength() int {
	n := r.uvarint()
	if n > uint64(len(r.b))+1 {
		r.fail()
	}
	if r.err != nil || n == 0 {
		return 0
	}
	return int(n - 1) //nolint:gosec // not more than the length of r.b
}

func (r *reader) bytesOf(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.fail()
		return nil
	}
	return r.take(int(n)) //nolint:gosec // not more than the length of r.b
}

// skipTags skips the tagged fields that end every part of a flexible message.
func (r *reader) skipTags() {
	for range r.uvarint() {
		if r.err != nil {
			return
		}
		r.uvarint()
		r.bytesOf(r.uvarint())
	}
}
