package cutproxy_test

import (
	"bufio"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ackafter/ackafter/inbox/internal/cutproxy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo is a server that answers each line, and counts them.
func echo(t *testing.T) (addr string, lines *atomic.Int64) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	lines = new(atomic.Int64)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for in := bufio.NewScanner(c); in.Scan(); {
					lines.Add(1)
					if _, err := c.Write([]byte("re: " + in.Text() + "\n")); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String(), lines
}

type client struct {
	net.Conn
	in *bufio.Reader
}

func dial(t *testing.T, p *cutproxy.Proxy) *client {
	t.Helper()
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &client{c, bufio.NewReader(c)}
}

// ask sends a line and returns the answer, or "" when none comes.
func (c *client) ask(line string) string {
	_ = c.SetDeadline(time.Now().Add(300 * time.Millisecond))
	if _, err := c.Write([]byte(line + "\n")); err != nil {
		return ""
	}
	s, err := c.in.ReadString('\n')
	if err != nil {
		return ""
	}
	return strings.TrimSpace(s)
}

func TestProxy(t *testing.T) {
	t.Parallel()
	addr, lines := echo(t)
	p := cutproxy.New(t, addr)
	c := dial(t, p)
	for range 3 {
		if got := c.ask("hello"); got != "re: hello" {
			t.Fatalf("answer %q", got)
		}
	}
	if n := p.Turns(); n != 2 {
		t.Errorf("%d turns after three requests, want 2", n)
	}

	p.CutOnRequest([]byte("commit"), false)
	if got, n := c.ask("please commit"), lines.Load(); got != "" || n != 3 {
		t.Errorf("request cut: answer %q, the server has %d lines", got, n)
	}
	c = dial(t, p)
	p.CutOnRequest([]byte("commit"), true)
	// The pattern is found across writes.
	if _, err := c.Write([]byte("com")); err != nil {
		t.Fatal(err)
	}
	if got, n := c.ask("mit"), lines.Load(); got != "" || n != 4 {
		t.Errorf("answer cut: answer %q, the server has %d lines", got, n)
	}
	if n := p.Cuts(); n != 2 {
		t.Errorf("%d cuts, want 2", n)
	}
	c = dial(t, p)
	if got := c.ask("commit"); got != "re: commit" {
		t.Errorf("after the cut: %q", got)
	}

	p.BlackHole(true)
	if got, n := c.ask("x"), lines.Load(); got != "" || n != 5 {
		t.Errorf("in the dark: answer %q, the server has %d lines", got, n)
	}
	p.BlackHole(false)
	if got := c.ask("y"); got != "re: y" {
		t.Errorf("after the dark: %q", got)
	}

	p.Refuse(true)
	if got := c.ask("x"); got != "" {
		t.Errorf("refused: %q", got)
	}
	if got := dial(t, p).ask("x"); got != "" {
		t.Errorf("refused: %q", got)
	}
	p.Refuse(false)
	c = dial(t, p)
	if got := c.ask("x"); got != "re: x" {
		t.Errorf("accepted again: %q", got)
	}
	p.CutAll()
	if got := c.ask("x"); got != "" {
		t.Errorf("after CutAll: %q", got)
	}
}
