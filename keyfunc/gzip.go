package keyfunc

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math"
)

// defaultGzipLimit is what Gzip(0) lets a body grow to.
const defaultGzipLimit = 16 << 20

var gzipReaders = pool[*gzip.Reader]{fresh: func() *gzip.Reader { return new(gzip.Reader) }}

// Gzip is a body compressed with gzip (RFC 1952, concatenated members
// included). limit bounds the uncompressed body in bytes, so that a small
// message cannot fill the memory; a longer one is invalid. Zero means 16 MiB. A
// negative limit is a construction error: this limit cannot be switched off.
// The limit plays no part in the definition, because no key depends on it.
//
// A body that does not begin with 1f 8b has no frame (ErrMissing); one that is
// cut off or damaged is invalid.
func Gzip(limit int64) Frame {
	const name = "gzip"
	switch {
	case limit < 0:
		return &layer{name: name, err: unusable(name, "", "limit must not be negative")}
	case limit == 0:
		limit = defaultGzipLimit
	}
	limit = min(limit, math.MaxInt64-1) // gunzip reads one byte more
	return &layer{name: name, body: func(body []byte) ([]byte, error) { return gunzip(name, body, limit) }}
}

func gunzip(name string, body []byte, limit int64) ([]byte, error) {
	if body[0] != 0x1f || len(body) > 1 && body[1] != 0x8b {
		return nil, missing(name, "", fmt.Sprintf("body is not gzip, which begins with 0x1f 0x8b: first byte is 0x%02x", body[0]))
	}
	r := gzipReaders.get()
	defer gzipReaders.put(r)
	if err := r.Reset(bytes.NewReader(body)); err != nil {
		return nil, &Error{Func: name, Rule: "frame is broken", Err: err}
	}
	plain, err := io.ReadAll(io.LimitReader(r, limit+1))
	switch {
	case err != nil:
		return nil, &Error{Func: name, Rule: "frame is broken", Err: err}
	case int64(len(plain)) > limit:
		return nil, invalid(name, "", fmt.Sprintf("body is longer than %d bytes uncompressed", limit))
	}
	return plain, nil
}
