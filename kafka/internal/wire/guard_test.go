package wire

import (
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// talker starts a server that says something as soon as it is asked anything, and
// then nothing more.
func talker(t *testing.T, says string) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { _ = l.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 1024))
			_, _ = io.WriteString(c, says)
			t.Cleanup(func() { _ = c.Close() })
		}
	}()
	return l.Addr().String()
}

func TestOtherServers(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ says, want string }{
		"web":             {"HTTP/1.1 400 Bad Request\r\n\r\n", "no Kafka broker"},
		"shell":           {"SSH-2.0-OpenSSH_9.2\r\n", "no Kafka broker"},
		"telnet":          {"\xff\xfd\x18\xff\xfd\x20", "no Kafka broker"},
		"negative size":   {"\xff\xff\xff\xff\x00\x00\x00\x01", "no Kafka broker"},
		"database":        {"E\x00\x00\x00\x8fSFATAL\x00", "no Kafka broker"},
		"huge size":       {"\x3f\xff\xff\xff\x00\x00\x00\x01", "no Kafka broker"},
		"HTTP/2":          {"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x7f\xff\xff\xff", "no Kafka broker"},
		"foreign request": {"\x00\x00\x00\x0a\x00\x00\x00\x63\x00\x00\x7f\xff\xff\xff", "no Kafka broker"},
		"TLS alert":       {"\x15\x03\x03\x00\x02\x02\x46\x00", "TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			_, err := newTestDialer(t, Options{RequestTimeout: time.Minute, DialTimeout: time.Minute}).Connect(t.Context(), talker(t, tt.says))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q in it", err, tt.want)
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("it took %v to notice", took)
			}
		})
	}
}

// pieces is a connection from which every Read returns a single byte.
type pieces struct {
	net.Conn
	from io.Reader
}

func (p pieces) Read(b []byte) (int, error)  { return p.from.Read(b[:min(1, len(b))]) }
func (p pieces) Write(b []byte) (int, error) { return len(b), nil }

func TestGuardFollowsResponses(t *testing.T) {
	t.Parallel()
	const request = "\x00\x00\x00\x0a\x00\x12\x00\x00\x00\x00\x00\x07\x00\x00"
	const good = "\x00\x00\x00\x06\x00\x00\x00\x07ab" + "\x00\x00\x00\x00" + "\x00\x20\x00\x00" // a later one may be of 2 MiB
	for name, says := range map[string]string{"good": good, "bad": good + strings.Repeat("x", 2<<20) + "\xff\xff\xff\xff"} {
		c := guard(pieces{from: strings.NewReader(says)})
		if _, err := io.WriteString(c, request[:9]); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, request[9:]); err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(c)
		switch bad := name == "bad"; {
		case bad && err == nil:
			t.Error("a negative size was handed out")
		case !bad && (err != nil || string(b) != says):
			t.Errorf("got %q, %v", b, err)
		}
	}
}
