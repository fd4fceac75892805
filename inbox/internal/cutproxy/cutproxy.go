// Package cutproxy stands between a test and a server and breaks the connection
// in ways that only networks do: it cuts it before or after a request, swallows
// answers, or lets nothing through any more. It is for tests.
package cutproxy

import (
	"bytes"
	"context"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy forwards connections to one server. All methods may be called
// concurrently.
type Proxy struct {
	listener net.Listener
	upstream string
	wg       sync.WaitGroup

	mu      sync.Mutex
	links   map[*link]bool
	closed  bool
	refuse  bool
	dark    bool
	pattern []byte
	reached bool
	cuts    int
	turns   int
}

// New starts a proxy to upstream ("host:port") on a port of its own; it ends
// with the test.
func New(tb testing.TB, upstream string) *Proxy {
	tb.Helper()
	l, err := new(net.ListenConfig).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatalf("cutproxy: %v", err)
	}
	p := &Proxy{listener: l, upstream: upstream, links: map[*link]bool{}}
	p.wg.Go(p.accept)
	tb.Cleanup(p.close)
	return p
}

// Addr is where the proxy listens, "host:port".
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// CutOnRequest breaks the next connection whose client sends pattern: with
// reached, after the server has answered it and without the answer; else before
// the server has the whole of it.
func (p *Proxy) CutOnRequest(pattern []byte, reached bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pattern, p.reached = bytes.Clone(pattern), reached
}

// Cuts returns how many connections CutOnRequest has broken.
func (p *Proxy) Cuts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts
}

// CutAll breaks all connections that are open now.
func (p *Proxy) CutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.close()
	}
}

// Refuse makes the proxy break all connections and drop new ones at once, as a
// server that is down does, or accept them again.
func (p *Proxy) Refuse(on bool) {
	p.mu.Lock()
	p.refuse = on
	p.mu.Unlock()
	if on {
		p.CutAll()
	}
}

// BlackHole makes the proxy swallow everything in both directions, with all
// connections left open. What was swallowed does not come back when it is turned
// off.
func (p *Proxy) BlackHole(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dark = on
}

// Turns returns how often a client spoke after the server had, over all
// connections: the number of round trips of a protocol in which both take turns.
func (p *Proxy) Turns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.turns
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	_ = p.listener.Close()
	p.CutAll()
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	server, err := new(net.Dialer).DialContext(ctx, "tcp", p.upstream)
	if err != nil {
		_ = client.Close()
		return
	}
	l := &link{proxy: p, client: client, server: server}
	defer l.close()
	p.mu.Lock()
	if p.closed || p.refuse {
		p.mu.Unlock()
		return
	}
	p.links[l] = true
	p.mu.Unlock()
	p.wg.Go(l.down)
	l.up()
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// link is one forwarded connection.
type link struct {
	proxy          *Proxy
	client, server net.Conn
	tail           []byte // of what the client sent, to find a pattern across reads
	spoke          bool   // the server was the last to speak; under proxy.mu
	mute           bool   // the next answer is swallowed and the link cut; under proxy.mu
}

func (l *link) close() {
	_ = l.client.Close()
	_ = l.server.Close()
}

// up forwards requests.
func (l *link) up() {
	buf := make([]byte, 64<<10)
	for {
		n, err := l.client.Read(buf)
		if n > 0 && !l.request(buf[:n]) {
			l.close()
			return
		}
		if err != nil {
			l.close()
			return
		}
	}
}

func (l *link) request(b []byte) bool {
	p := l.proxy
	p.mu.Lock()
	if p.dark {
		p.mu.Unlock()
		return true
	}
	if l.spoke {
		p.turns++
		l.spoke = false
	}
	hit := false
	if len(p.pattern) > 0 {
		seen := append(l.tail, b...)
		hit = bytes.Contains(seen, p.pattern)
		l.tail = bytes.Clone(seen[max(0, len(seen)-len(p.pattern)+1):])
		if hit {
			p.pattern, l.mute = nil, p.reached
			p.cuts++
		}
	}
	forward := !hit || l.mute
	p.mu.Unlock()
	if !forward {
		return false
	}
	_, err := l.server.Write(b)
	return err == nil
}

// down forwards answers.
func (l *link) down() {
	defer l.close()
	buf := make([]byte, 64<<10)
	for {
		n, err := l.server.Read(buf)
		if n > 0 && !l.answer(buf[:n]) {
			return
		}
		if err != nil {
			return
		}
	}
}

func (l *link) answer(b []byte) bool {
	p := l.proxy
	p.mu.Lock()
	l.spoke = true
	mute, dark := l.mute, p.dark
	p.mu.Unlock()
	switch {
	case mute:
		return false
	case dark:
		return true
	}
	_, err := l.client.Write(b)
	return err == nil
}
