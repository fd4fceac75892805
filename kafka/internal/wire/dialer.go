// Package wire is the adapter's own way to talk to Kafka brokers where the
// client library cannot be used as it is.
//
// The library's group membership, its message types and its codecs are used.
// What is done here instead of there, and why:
//
//   - Reading a Fetch response ([Conn.Fetch]). The library's readers drop either
//     the list of aborted transactions (so that read_committed hands out aborted
//     records) or the last offset of a batch (so that a compacted batch is
//     fetched for ever).
//   - Metadata with topic ids ([Conn.Metadata]), which tell a topic from its
//     re-creation under the same name.
//   - Connections ([Dialer], [Conn]) whose every step has a deadline, including
//     the TLS and SASL handshakes, and that can all be ended at once.
package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/apiversions"
	"github.com/segmentio/kafka-go/protocol/saslauthenticate"
	"github.com/segmentio/kafka-go/protocol/saslhandshake"
	"github.com/segmentio/kafka-go/sasl"
)

// ErrShut is returned by a Dialer, and by the connections it made, after Shut.
var ErrShut = errors.New("connections are shut")

// AuthError is a refused login. Whoever sees it need not try again with the
// same credentials.
type AuthError struct {
	Mechanism string
	Err       error
}

// Error implements error.
func (e *AuthError) Error() string {
	return "SASL " + e.Mechanism + ": " + e.Err.Error()
}

// Unwrap returns the broker's error.
func (e *AuthError) Unwrap() error { return e.Err }

// Dialer opens connections that are ready for requests: TLS and SASL are done.
// It knows all connections that it made. Its methods may be called
// concurrently.
type Dialer struct {
	clientID  string
	tls       *tls.Config
	mechanism sasl.Mechanism
	dial      func(ctx context.Context, network, address string) (net.Conn, error)
	dialTime  time.Duration
	roundTrip time.Duration

	ctx    context.Context // ends with Shut
	cancel context.CancelFunc
	mu     sync.Mutex
	open   map[*tracked]struct{}
}

// Options are what a Dialer needs. TLS and Mechanism are optional.
type Options struct {
	ClientID  string
	TLS       *tls.Config
	Mechanism sasl.Mechanism
	Dial      func(ctx context.Context, network, address string) (net.Conn, error)
	// DialTimeout bounds opening a connection, TLS and SASL included.
	DialTimeout time.Duration
	// RequestTimeout bounds every request, in addition to what the request asks
	// the broker to wait.
	RequestTimeout time.Duration
}

// NewDialer returns a Dialer.
func NewDialer(o Options) *Dialer {
	ctx, cancel := context.WithCancel(context.Background())
	return &Dialer{
		clientID: o.ClientID, tls: o.TLS, mechanism: o.Mechanism, dial: o.Dial,
		dialTime: o.DialTimeout, roundTrip: o.RequestTimeout,
		ctx: ctx, cancel: cancel, open: make(map[*tracked]struct{}),
	}
}

// Shut ends all connections and refuses new ones. Requests that are running
// return at once. It may be called more than once.
func (d *Dialer) Shut() {
	d.cancel()
	d.mu.Lock()
	open := d.open
	d.open = nil
	d.mu.Unlock()
	for c := range open {
		_ = c.Conn.Close() // nothing to tell anybody: the connection is given up
	}
}

// Open returns how many connections are open.
func (d *Dialer) Open() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.open)
}

// DialContext opens a connection to a broker, TLS and SASL done, that carries
// no request yet. It returns within DialTimeout.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.dialTime)
	defer cancel()
	defer context.AfterFunc(d.ctx, cancel)() //nolint:contextcheck // Shut ends it too

	raw, err := d.dial(ctx, network, address)
	if err != nil {
		return nil, d.explain("connect to", address, err)
	}
	nc, err := d.track(raw)
	if err != nil {
		_ = raw.Close()
		return nil, d.explain("connect to", address, err)
	}
	secured, err := d.secure(ctx, nc, address)
	if err != nil {
		_ = nc.Close()
		return nil, d.explain("connect to", address, err)
	}
	return secured, nil
}

// Connect opens a connection for requests.
func (d *Dialer) Connect(ctx context.Context, address string) (*Conn, error) {
	nc, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	c := &Conn{nc: nc, pc: protocol.NewConn(nc, d.clientID), clientID: d.clientID, address: address, timeout: d.roundTrip}
	if err := c.negotiate(ctx); err != nil {
		c.Close()
		return nil, d.explain("talk to", address, err)
	}
	if d.mechanism == nil {
		c.guess = "it may ask for a login by SASL"
	}
	return c, nil
}

// secure does TLS and SASL, all of it within ctx.
func (d *Dialer) secure(ctx context.Context, nc net.Conn, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if d.tls != nil {
		conf := d.tls
		if conf.ServerName == "" {
			conf = conf.Clone()
			conf.ServerName = host
		}
		tc := tls.Client(nc, conf)
		if err := tc.HandshakeContext(ctx); err != nil {
			return nil, fmt.Errorf("TLS: %w", guess(err, "it may not speak TLS on this port"))
		}
		nc = tc
	}
	nc = guard(nc)
	if d.mechanism == nil {
		return nc, nil
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return nil, err
	}
	ctx = sasl.WithMetadata(ctx, &sasl.Metadata{Host: host, Port: n})
	if err := within(ctx, nc, func() error { return d.login(ctx, nc) }); err != nil {
		return nil, err
	}
	return nc, nc.SetDeadline(time.Time{})
}

// login runs the SASL exchange.
func (d *Dialer) login(ctx context.Context, nc net.Conn) error {
	name := d.mechanism.Name()
	pc := protocol.NewConn(nc, d.clientID)
	res, err := pc.RoundTrip(new(apiversions.Request))
	if err != nil {
		return err
	}
	pc.SetVersions(newVersions(res.(*apiversions.Response)).forLibrary())

	res, err = pc.RoundTrip(&saslhandshake.Request{Mechanism: name})
	if err != nil {
		return err
	}
	switch h := res.(*saslhandshake.Response); kafkago.Error(h.ErrorCode) {
	case 0:
	case kafkago.IllegalSASLState:
		return &AuthError{name, fmt.Errorf("the broker takes no login on this port: %w", kafkago.IllegalSASLState)}
	default:
		return &AuthError{name, fmt.Errorf("the broker offers %q: %w", h.Mechanisms, kafkago.Error(h.ErrorCode))}
	}
	session, response, err := d.mechanism.Start(ctx)
	if err != nil {
		return fmt.Errorf("SASL %s: %w", name, err)
	}
	for done := false; !done; {
		res, err := pc.RoundTrip(&saslauthenticate.Request{AuthBytes: response})
		if err != nil {
			return fmt.Errorf("SASL %s: %w", name, err)
		}
		auth := res.(*saslauthenticate.Response)
		if auth.ErrorCode != 0 {
			return &AuthError{name, fmt.Errorf("%s: %w", auth.ErrorMessage, kafkago.Error(auth.ErrorCode))}
		}
		if done, response, err = session.Next(ctx, auth.AuthBytes); err != nil {
			return &AuthError{name, err}
		}
	}
	return nil
}

// guess adds to an error what it probably means, when it says that the broker
// ended the connection or speaks something else. It may be somebody in between,
// so it is no more than a guess.
func guess(err error, why string) error {
	var other tls.RecordHeaderError
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.As(err, &other) {
		return fmt.Errorf("%w (the broker ended the connection: %s)", err, why)
	}
	return err
}

// explain says what was tried, and puts ErrShut for what Shut brings about.
func (d *Dialer) explain(what, address string, err error) error {
	if d.ctx.Err() != nil {
		err = ErrShut
	}
	return fmt.Errorf("%s %s: %w", what, address, err)
}

// track keeps the connection so that Shut can end it.
func (d *Dialer) track(nc net.Conn) (net.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open == nil {
		return nil, ErrShut
	}
	t := &tracked{Conn: nc, dialer: d}
	d.open[t] = struct{}{}
	return t, nil
}

// tracked is a connection that the dialer knows until it is closed.
type tracked struct {
	net.Conn
	dialer *Dialer
}

func (t *tracked) Close() error {
	t.dialer.mu.Lock()
	delete(t.dialer.open, t)
	t.dialer.mu.Unlock()
	return t.Conn.Close()
}

// longAgo is a deadline that has passed.
var longAgo = time.Unix(1, 0)

// within runs f, which reads and writes nc, under ctx's deadline and ends it
// when ctx ends. After an error nc is of no more use.
func within(ctx context.Context, nc net.Conn, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	deadline, _ := ctx.Deadline() // zero: none
	if err := nc.SetDeadline(deadline); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.SetDeadline(longAgo) })
	err := f()
	if !stop() && err == nil {
		err = ctx.Err() // the deadline of the past may still hit the next user
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded):
		return ctx.Err()
	case ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("no answer in time: %w", context.DeadlineExceeded)
	}
	return err
}
