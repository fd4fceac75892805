package rabbitmq

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// frameSize is the largest frame, the broker's own default.
const frameSize = 128 << 10

// dialer opens connections.
type dialer struct {
	addresses      []address
	clientID       string
	tls            *tls.Config
	credentials    func(ctx context.Context) (user, password string, err error)
	dial           func(ctx context.Context, network, address string) (net.Conn, error)
	dialTimeout    time.Duration
	requestTimeout time.Duration
	heartbeat      time.Duration
	blocked        func(amqp.Blocking) // is told of alarms
}

// connection is one connection to a broker.
type connection struct {
	*amqp.Connection
	host           string
	raw            net.Conn
	requestTimeout time.Duration
	watch          sync.WaitGroup
}

// addressErrors are why each of several addresses could not be used.
type addressErrors []error

// Error implements error.
func (e addressErrors) Error() string { return errors.Join(e...).Error() }

// Unwrap returns the reasons.
func (e addressErrors) Unwrap() []error { return e }

// connect tries the brokers in turn, in a random order.
func (d *dialer) connect(ctx context.Context) (*connection, error) {
	var errs addressErrors
	for _, a := range shuffled(d.addresses) {
		c, err := d.connectTo(ctx, a)
		if err == nil {
			return c, nil
		}
		errs = append(errs, fmt.Errorf("connect to %s: %w", a.host, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errs
}

func (d *dialer) connectTo(ctx context.Context, a address) (*connection, error) {
	ctx, cancel := context.WithTimeout(ctx, d.dialTimeout)
	defer cancel()
	user, password := a.user, a.password
	if d.credentials != nil {
		var err error
		if user, password, err = d.credentials(ctx); err != nil {
			return nil, fmt.Errorf("get credentials: %w", err)
		}
	}
	raw, err := d.dial(ctx, "tcp", a.host)
	if err != nil {
		return nil, err
	}
	c, err := d.open(ctx, a, raw, user, password)
	if err != nil {
		_ = raw.Close()
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return nil, explain(err, stepLogin)
	}
	return c, nil
}

func (d *dialer) open(ctx context.Context, a address, raw net.Conn, user, password string) (*connection, error) {
	// The library's calls take no context: what ends them is the end of the
	// connection.
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer stop()
	var conn net.Conn = &timedConn{Conn: raw, timeout: d.requestTimeout}
	if a.tls {
		config := d.tls.Clone() // Nil stays nil.
		if config == nil {
			config = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		if config.ServerName == "" {
			config.ServerName = a.name
		}
		secure := tls.Client(conn, config)
		if err := secure.HandshakeContext(ctx); err != nil {
			return nil, explainTLS(err)
		}
		conn = secure
	}
	greeted := &greeting{Conn: conn}
	properties := amqp.NewConnectionProperties()
	properties.SetClientConnectionName(d.clientID)
	opened, err := amqp.Open(greeted, amqp.Config{
		SASL:  []amqp.Authentication{&login{PlainAuth: amqp.PlainAuth{Username: user, Password: password}, properties: properties}},
		Vhost: a.vhost, Heartbeat: d.heartbeat, Properties: properties, Locale: "en_US", FrameSize: frameSize,
	})
	if err != nil {
		return nil, greeted.explain(err)
	}
	if !stop() {
		return nil, ctx.Err()
	}
	c := &connection{Connection: opened, host: a.host, raw: raw, requestTimeout: d.requestTimeout}
	// The library waits for whoever does not read these.
	notices := opened.NotifyBlocked(make(chan amqp.Blocking, 1))
	c.watch.Go(func() {
		for b := range notices {
			d.blocked(b)
		}
	})
	return c, nil
}

// call makes a request. One that is not answered in time, or when ctx ends, costs
// the connection.
func (c *connection) call(ctx context.Context, request func() error) error {
	ctx, cancel := context.WithTimeout(ctx, c.requestTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = c.raw.Close() })
	err := request()
	if !stop() {
		return fmt.Errorf("no answer from %s: %w", c.host, ctx.Err())
	}
	return err
}

// shut ends the connection, politely if it can until ctx ends, and waits for what
// belongs to it.
func (c *connection) shut(ctx context.Context) error {
	err := c.call(ctx, func() error { return c.Close() })
	_ = c.raw.Close()
	c.watch.Wait()
	if errors.Is(err, amqp.ErrClosed) {
		return nil
	}
	return err
}

// kill ends the connection as it is.
func (c *connection) kill() {
	_ = c.raw.Close()
	c.watch.Wait()
}

// timedConn does not wait for ever for a peer that takes nothing.
type timedConn struct {
	net.Conn
	timeout time.Duration
}

// Write implements net.Conn.
func (c *timedConn) Write(b []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

// login is PLAIN. It tells the broker, too, that this client wants to hear of a
// refusal: otherwise the broker just hangs up, which cannot be told from any other
// trouble. The library fixes the capabilities just before it asks for the response.
type login struct {
	amqp.PlainAuth
	properties amqp.Table
}

// Response implements amqp.Authentication.
func (l *login) Response() string {
	if capabilities, ok := l.properties["capabilities"].(amqp.Table); ok {
		capabilities["authentication_failure_close"] = true
	}
	return l.PlainAuth.Response()
}
