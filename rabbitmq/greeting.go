package rabbitmq

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
)

// greeting is a connection that keeps the first bytes of the other end, which tell
// what kind of server it is: what the library says of others is hard to understand.
type greeting struct {
	net.Conn

	mu    sync.Mutex
	first []byte
}

const greetingBytes = 8

// Read implements net.Conn.
func (g *greeting) Read(b []byte) (int, error) {
	n, err := g.Conn.Read(b)
	g.mu.Lock()
	defer g.mu.Unlock()
	if missing := greetingBytes - len(g.first); missing > 0 {
		g.first = append(g.first, b[:min(n, missing)]...)
	}
	return n, err
}

// explain adds what the server probably is to the error of a connection that could
// not be opened.
func (g *greeting) explain(err error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	with := func(what string) error { return fmt.Errorf("%w: %s: %w", ErrNotAMQP, what, err) }
	const frameMethod, alert, tlsMajor = 1, 21, 3
	switch f := g.first; {
	case len(f) == 0:
		// A broker may do so, too, when it starts or hangs.
		return fmt.Errorf("nothing was answered: the broker hangs, starts or stops, or this is not its port for AMQP, or one that wants TLS: %w", err)
	case f[0] == frameMethod:
		return err
	case bytes.HasPrefix(f, []byte{alert, tlsMajor}):
		return with("it wants TLS: let the address begin with amqps://")
	case bytes.HasPrefix(f, []byte("HTTP")):
		return with("it is an HTTP server, such as the management: AMQP has the port 5672, or 5671 with TLS")
	case bytes.HasPrefix(f, []byte("AMQP")):
		return with("it speaks another version of AMQP")
	}
	return with("it is another kind of server, or wants TLS (amqps://): AMQP has the port 5672, or 5671 with TLS")
}

// explainTLS does so for a TLS handshake that failed.
func explainTLS(err error) error {
	var record tls.RecordHeaderError
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.As(err, &record):
		return fmt.Errorf("%w: it does not speak TLS: let the address begin with amqp://, or name the port for TLS (5671): %w", ErrNotAMQP, err)
	case errors.As(err, &certificate):
		return fmt.Errorf("its certificate is not trusted, see Config.TLS: %w", err)
	}
	return err
}
