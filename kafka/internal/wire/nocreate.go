package wire

import (
	"encoding/binary"
	"net"
	"slices"

	"github.com/segmentio/kafka-go/protocol"
)

// NeverCreate returns a connection that carries requests to a broker as they
// are, but for one bit: a Metadata request that goes through it does not allow
// the broker to create the topics that it names. The library's group leader
// allows that, which would bring back a topic that somebody has deleted.
//
// Only the versions 4 to 7 of the request are known here, of which the library
// uses 6. Before version 4, which came with Kafka 0.11, it cannot be forbidden.
func NeverCreate(nc net.Conn) net.Conn { return &neverCreate{Conn: nc} }

// neverCreate follows the requests that are written, in whatever pieces: each is
// its size, a head that begins with key and version, and a body, of which a
// Metadata request's last byte is the permission to create. It is written to by
// one goroutine at a time.
type neverCreate struct {
	net.Conn
	head     [8]byte // size, key, version
	got      int     // bytes of head
	left     int     // bytes of the request behind them
	metadata bool
}

// Write implements net.Conn.
func (c *neverCreate) Write(b []byte) (int, error) {
	out, own := b, false
	for i := 0; i < len(b); {
		if c.got < len(c.head) {
			n := copy(c.head[c.got:], b[i:])
			c.got += n
			i += n
			if c.got == len(c.head) {
				c.begin()
			}
			continue
		}
		n := min(c.left, len(b)-i)
		c.left -= n
		i += n
		if c.left > 0 {
			continue
		}
		if c.metadata {
			if !own { // what is written belongs to the caller
				out, own = slices.Clone(b), true
			}
			out[i-1] = 0
		}
		c.got = 0
	}
	return c.Conn.Write(out)
}

// begin reads the head.
func (c *neverCreate) begin() {
	const counted = 4 // bytes of the head that the size counts
	be := binary.BigEndian
	c.left = int(be.Uint32(c.head[:])) - counted
	version := int16(be.Uint16(c.head[6:]))
	c.metadata = protocol.ApiKey(be.Uint16(c.head[4:])) == protocol.Metadata && version >= 4 && version <= 7
	if c.left <= 0 {
		c.got = 0
	}
}
