package wire

import (
	"encoding/binary"
	"fmt"
	"net"
)

const (
	// maxFirst is the size beyond which the first response on a connection is
	// taken for nonsense.
	maxFirst = 1 << 20
	// firstHead is the size and the correlation id of a response.
	firstHead = 8
	sizeHead  = 4
)

// guarded is a connection on which no response is handed out whose size makes no
// sense, nor a first one that is not to the first request. The library trusts
// them: what it makes of the bytes of another kind of server takes gigabytes and
// minutes, or is a panic. It is read by one goroutine at a time, and written to by
// one.
type guarded struct {
	net.Conn
	request  [12]byte // the head of the first request; its last part is the correlation id
	written  int      // bytes of it
	answered bool     // the first response has begun well

	head []byte // of the response that begins
	left int    // bytes of the response behind it
	err  error
}

func guard(nc net.Conn) net.Conn { return &guarded{Conn: nc, head: make([]byte, 0, firstHead)} }

// Write implements net.Conn.
func (c *guarded) Write(b []byte) (int, error) {
	if c.written < len(c.request) {
		c.written += copy(c.request[c.written:], b)
	}
	return c.Conn.Write(b)
}

// Read implements net.Conn. What comes together with a bad head is not handed out.
func (c *guarded) Read(b []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	n, err := c.Conn.Read(b)
	for rest := b[:n]; len(rest) > 0; {
		if c.left > 0 {
			skip := min(c.left, len(rest))
			c.left -= skip
			rest = rest[skip:]
			continue
		}
		want := sizeHead
		if len(c.head) >= sizeHead {
			want = firstHead
		}
		more := min(want-len(c.head), len(rest))
		c.head = append(c.head, rest[:more]...)
		rest = rest[more:]
		if len(c.head) == want {
			if c.err = c.judge(); c.err != nil {
				return 0, c.err
			}
		}
	}
	return n, err
}

// judge looks at what there is of a head, and begins with what is behind it when
// it is complete.
func (c *guarded) judge() error {
	size := int32(binary.BigEndian.Uint32(c.head))
	least, most := 0, maxResponse
	if !c.answered {
		least, most = sizeHead, maxFirst
	}
	good := int(size) >= least && int(size) <= most
	if good && !c.answered {
		if len(c.head) < firstHead {
			return nil
		}
		good = string(c.head[sizeHead:]) == string(c.request[len(c.request)-sizeHead:])
	}
	switch {
	case good:
		c.left = int(size) - (len(c.head) - sizeHead)
		c.answered = true
		c.head = c.head[:0]
		return nil
	case c.head[0] == 0x15 && c.head[1] == 3: // an alert
		return fmt.Errorf("it speaks TLS on this port: it began a response with %q", c.head)
	}
	return fmt.Errorf("it is no Kafka broker, or speaks something else on this port: it began a response with %q", c.head)
}
