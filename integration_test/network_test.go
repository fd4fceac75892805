package integration_test

import (
	"context"
	"encoding/binary"
	"net"
	"sync"
	"sync/atomic"
)

// network is what lies between a source and its brokers, for kafka.Config.Dial.
// All methods may be called concurrently.
type network struct {
	dials atomic.Int64

	mu       sync.Mutex
	links    map[*link]struct{}
	requests map[int16]int // by API key, of connections without TLS
	spoilKey int16
	spoil    bool
}

// Keys of Kafka's requests.
const (
	fetchRequest        = 1
	offsetCommitRequest = 8
	joinGroupRequest    = 11
	heartbeatRequest    = 12
)

func (n *network) dial(ctx context.Context, kind, address string) (net.Conn, error) {
	n.dials.Add(1)
	conn, err := new(net.Dialer).DialContext(ctx, kind, address)
	if err != nil {
		return nil, err
	}
	l := &link{Conn: conn, network: n}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.links == nil {
		n.links, n.requests = make(map[*link]struct{}), make(map[int16]int)
	}
	n.links[l] = struct{}{}
	return l, nil
}

// cut breaks all connections; new ones can be made.
func (n *network) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for l := range n.links {
		_ = l.Conn.Close()
	}
	n.links = nil
}

// spoilNext breaks the connection right after the next request of a kind was
// sent, so that nobody gets the answer.
func (n *network) spoilNext(key int16) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.spoil, n.spoilKey = true, key
}

// sent returns how many requests of a kind were sent.
func (n *network) sent(key int16) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.requests[key]
}

// sentAll returns how many requests were sent.
func (n *network) sentAll() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := 0
	for _, count := range n.requests {
		all += count
	}
	return all
}

// request notes a request that was sent and tells whether to break its
// connection.
func (n *network) request(key int16) (spoil bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.requests == nil {
		return false
	}
	n.requests[key]++
	if n.spoil && key == n.spoilKey {
		n.spoil = false
		return true
	}
	return false
}

// link is one connection. It reads along: a request begins with its size and its
// API key.
type link struct {
	net.Conn
	network *network

	mu   sync.Mutex
	head []byte // of the request that is being written
	rest int    // bytes of it that are still to come
}

func (l *link) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.Conn.Write(b)
	spoil := false
	for sent := b[:n]; len(sent) > 0; {
		if l.rest == 0 {
			take := min(6-len(l.head), len(sent))
			l.head = append(l.head, sent[:take]...)
			sent = sent[take:]
			if len(l.head) < 6 {
				break
			}
			l.rest = max(int(binary.BigEndian.Uint32(l.head))-2, 0)
		}
		take := min(l.rest, len(sent))
		l.rest -= take
		sent = sent[take:]
		if l.rest == 0 {
			spoil = l.network.request(int16(binary.BigEndian.Uint16(l.head[4:]))) || spoil
			l.head = l.head[:0]
		}
	}
	if spoil {
		_ = l.Conn.Close()
	}
	return n, err
}

func (l *link) Close() error {
	l.network.mu.Lock()
	delete(l.network.links, l)
	l.network.mu.Unlock()
	return l.Conn.Close()
}
