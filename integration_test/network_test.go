package integration_test

import (
	"context"
	"encoding/binary"
	"net"
	"slices"
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
	spoils   []spoil
}

// spoil is what is to happen to the next request of a kind.
type spoil struct {
	key     int16
	reaches bool // the broker gets the request, but nobody its answer
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

// spoilNext breaks the connection at the next request of a kind: right after it was
// sent, if it is to reach the broker, so that nobody gets the answer; else before
// the broker has the whole of it. Called again, it spoils one more.
func (n *network) spoilNext(key int16, reaches bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.spoils = append(n.spoils, spoil{key, reaches})
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

// request notes a request, and returns what is to happen to it; nil: nothing.
func (n *network) request(key int16) *spoil {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.requests == nil {
		return nil
	}
	n.requests[key]++
	i := slices.IndexFunc(n.spoils, func(s spoil) bool { return s.key == key })
	if i < 0 {
		return nil
	}
	sp := n.spoils[i]
	n.spoils = slices.Delete(n.spoils, i, i+1)
	return &sp
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
	sp := l.follow(b)
	if sp != nil && !sp.reaches {
		_ = l.Conn.Close()
		return 0, net.ErrClosed
	}
	n, err := l.Conn.Write(b)
	if sp != nil {
		_ = l.Conn.Close()
	}
	return n, err
}

// follow looks at what is written, and returns what is to happen to the request
// that ends in it.
func (l *link) follow(b []byte) (sp *spoil) {
	for len(b) > 0 {
		if l.rest == 0 {
			take := min(6-len(l.head), len(b))
			l.head = append(l.head, b[:take]...)
			b = b[take:]
			if len(l.head) < 6 {
				return sp
			}
			l.rest = max(int(binary.BigEndian.Uint32(l.head))-2, 0)
		}
		take := min(l.rest, len(b))
		l.rest -= take
		b = b[take:]
		if l.rest == 0 {
			if got := l.network.request(int16(binary.BigEndian.Uint16(l.head[4:]))); got != nil {
				sp = got
			}
			l.head = l.head[:0]
		}
	}
	return sp
}

func (l *link) Close() error {
	l.network.mu.Lock()
	delete(l.network.links, l)
	l.network.mu.Unlock()
	return l.Conn.Close()
}
