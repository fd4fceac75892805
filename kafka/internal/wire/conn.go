package wire

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/apiversions"
)

// maxResponse is the size beyond which a response is taken for nonsense.
const maxResponse = 1 << 30

// ErrVersion tells that a broker is too old or too new for a request.
var ErrVersion = errors.New("unsupported broker version")

// Conn is a connection to one broker. It carries one request at a time; its
// methods may be called concurrently and then wait for one another. After an
// error that is not a kafka-go Error the connection is closed and every later
// request fails.
type Conn struct {
	nc       net.Conn
	pc       *protocol.Conn
	clientID string
	address  string
	timeout  time.Duration
	versions versions

	mu     sync.Mutex
	guess  string // why the broker may end the connection; empty once it has answered
	broken error
	lastID int32
	buf    bytes.Buffer
}

// Address returns the broker's address.
func (c *Conn) Address() string { return c.address }

// Version returns the version that RoundTrip uses of a request; -1 when the broker
// does not know any that can be used.
func (c *Conn) Version(key protocol.ApiKey) int16 {
	version, err := c.versions.pick(key, 0, libraryMax[key])
	if err != nil {
		return -1
	}
	return version
}

// Close closes the connection; a request that is running fails.
func (c *Conn) Close() { _ = c.nc.Close() }

// RoundTrip sends a request of the library and returns its response.
func (c *Conn) RoundTrip(ctx context.Context, req protocol.Message) (protocol.Message, error) {
	key := req.ApiKey()
	var res protocol.Message
	err := c.exchange(ctx, 0, func() (err error) {
		if _, err := c.versions.pick(key, 0, libraryMax[key]); err != nil {
			return err
		}
		res, err = c.pc.RoundTrip(req)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s request to %s: %w", key, c.address, err)
	}
	return res, nil
}

// exchange has the connection to itself while f talks to the broker, which may
// take wait longer than the timeout of a request.
func (c *Conn) exchange(ctx context.Context, wait time.Duration, f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken != nil {
		return c.broken
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout+wait)
	defer cancel()
	err := within(ctx, c.nc, f)
	switch {
	case err == nil:
		c.guess = ""
	case c.guess != "":
		err = guess(err, c.guess)
	}
	if err != nil && !errors.Is(err, ErrVersion) {
		c.broken = fmt.Errorf("connection was lost: %w", err)
		c.Close()
	}
	return err
}

// raw sends a request body that was encoded here and returns the body of the
// response, which is valid until the next request.
func (c *Conn) raw(key protocol.ApiKey, version int16, flexible bool, body []byte) ([]byte, error) {
	c.lastID++
	head := make([]byte, 0, 32+len(c.clientID))
	head = binary.BigEndian.AppendUint32(head, 0) // size, below
	head = binary.BigEndian.AppendUint16(head, uint16(key))
	head = binary.BigEndian.AppendUint16(head, uint16(version))
	head = binary.BigEndian.AppendUint32(head, uint32(c.lastID))
	head = appendString(head, c.clientID)
	if flexible {
		head = append(head, 0) // no tagged fields
	}
	binary.BigEndian.PutUint32(head, uint32(len(head)-4+len(body))) //nolint:gosec // requests are small
	if _, err := c.pc.Write(append(head, body...)); err != nil {
		return nil, err
	}

	var prefix [8]byte
	if _, err := io.ReadFull(c.pc, prefix[:]); err != nil {
		return nil, err
	}
	size := int32(binary.BigEndian.Uint32(prefix[:4]))
	if id := int32(binary.BigEndian.Uint32(prefix[4:])); id != c.lastID || size < 4 || size > maxResponse {
		return nil, fmt.Errorf("not a response to this request: size %d, correlation id %d, want %d", size, id, c.lastID)
	}
	c.buf.Reset()
	if _, err := io.CopyN(&c.buf, c.pc, int64(size)-4); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	r := &reader{b: c.buf.Bytes()}
	if flexible {
		r.skipTags()
	}
	return r.b, r.err
}

// negotiate asks the broker which versions of the requests it knows.
func (c *Conn) negotiate(ctx context.Context) error {
	return c.exchange(ctx, 0, func() error {
		res, err := c.pc.RoundTrip(new(apiversions.Request))
		if err != nil {
			return err
		}
		r := res.(*apiversions.Response)
		if r.ErrorCode != 0 {
			return kafkago.Error(r.ErrorCode)
		}
		c.versions = newVersions(r)
		c.pc.SetVersions(c.versions.forLibrary())
		return nil
	})
}

// versions are the ranges that a broker offers.
type versions map[protocol.ApiKey]apiversions.ApiKeyResponse

func newVersions(r *apiversions.Response) versions {
	v := make(versions, len(r.ApiKeys))
	for _, k := range r.ApiKeys {
		v[protocol.ApiKey(k.ApiKey)] = k
	}
	return v
}

// libraryMax are the requests that go through the library's encoding, and the
// highest version that is used of each: the ones before the flexible encoding,
// which the library does not get right for all of them. Heartbeat and LeaveGroup
// stay at version 0: of the later ones it reads the throttle time as the error,
// so that every answer passes for success.
var libraryMax = map[protocol.ApiKey]int16{
	protocol.Metadata:         8,
	protocol.ListOffsets:      5,
	protocol.OffsetCommit:     7,
	protocol.OffsetFetch:      5,
	protocol.FindCoordinator:  2,
	protocol.Heartbeat:        0,
	protocol.LeaveGroup:       0,
	protocol.SaslHandshake:    1,
	protocol.SaslAuthenticate: 1,
}

// forLibrary returns the versions to use with the library's encoding.
func (v versions) forLibrary() map[protocol.ApiKey]int16 {
	m := make(map[protocol.ApiKey]int16, len(libraryMax))
	for key, most := range libraryMax {
		if version, err := v.pick(key, 0, most); err == nil {
			m[key] = version
		}
	}
	return m
}

// pick returns the highest version from least to most that the broker knows.
func (v versions) pick(key protocol.ApiKey, least, most int16) (int16, error) {
	k, ok := v[key]
	if !ok {
		return 0, fmt.Errorf("%w: the broker does not know %s requests", ErrVersion, key)
	}
	version := min(most, k.MaxVersion)
	if version < max(least, k.MinVersion) {
		return 0, fmt.Errorf("%w: %s requests: the broker knows %d to %d, this client %d to %d",
			ErrVersion, key, k.MinVersion, k.MaxVersion, least, most)
	}
	return version, nil
}
