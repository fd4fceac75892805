package rabbitmq_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/rabbitmq"
)

// with changes an address.
func (l *lab) with(change func(u *url.URL)) string {
	l.Helper()
	u, err := url.Parse(l.url)
	if err != nil {
		l.Fatal(err)
	}
	change(u)
	return u.String()
}

// What only a person can mend is said at once, with what to do and without the
// password.
func TestOpenSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	exclusive := l.queue + "-exclusive"
	if _, err := l.ch.QueueDeclare(exclusive, false, true, true, false, nil); err != nil {
		t.Fatal(err)
	}
	alone := newLab(t).declare("classic", nil) // a quorum queue does not know exclusive consumers
	if _, err := alone.ch.Consume(alone.queue, "", false, true, false, false, nil); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct { //nolint:paralleltest // quick, and the queues end with their test
		name, url, queue string
		cfg              rabbitmq.Config
		want             error
		text             string
	}{
		{"unknown queue", l.url, l.queue + "-not", rabbitmq.Config{}, rabbitmq.ErrNoQueue, "Config.Declare"},
		{"wrong password", l.with(func(u *url.URL) { u.User = url.UserPassword("guest", "s3cret") }), l.queue, rabbitmq.Config{}, rabbitmq.ErrLogin, "check the user and the password"},
		{"unknown user", l.with(func(u *url.URL) { u.User = url.UserPassword("nobody-of-ours", "s3cret") }), l.queue, rabbitmq.Config{}, rabbitmq.ErrLogin, "check the user"},
		{"wrong virtual host", l.with(func(u *url.URL) { u.Path = "/not-there" }), l.queue, rabbitmq.Config{}, rabbitmq.ErrVHost, "not-there"},
		{"no permission", l.user("^$", "^$", "^$"), l.queue, rabbitmq.Config{}, rabbitmq.ErrForbidden, "permission"},
		{"exclusive queue", l.url, exclusive, rabbitmq.Config{}, rabbitmq.ErrLocked, "exclusive"},
		{"exclusive consumer", l.url, alone.queue, rabbitmq.Config{}, rabbitmq.ErrLocked, "other consumer"},
		{"other properties", l.url, l.queue, rabbitmq.Config{Declare: &rabbitmq.Declare{}}, rabbitmq.ErrMismatch, "Config.Declare"},
		{"a stream that is none", l.url, l.queue, rabbitmq.Config{Declare: &rabbitmq.Declare{Type: rabbitmq.QueueStream}, Stream: &rabbitmq.Stream{}}, rabbitmq.ErrMismatch, "x-queue-type"},
		{"credentials", l.url, l.queue, rabbitmq.Config{Credentials: func(context.Context) (string, string, error) { return "guest", "s3cret", nil }}, rabbitmq.ErrLogin, "check"},
		{"no exchange to bind to", l.url, l.queue, rabbitmq.Config{Declare: &rabbitmq.Declare{Type: rabbitmq.QueueClassic, Exchange: "amq.none", ExchangeType: "topic"}}, rabbitmq.ErrNoExchange, "amq.none"},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.cfg.Logger = quiet()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			s, err := rabbitmq.Open(ctx, []string{row.url}, row.queue, &row.cfg)
			if err == nil {
				_ = s.Close(ctx)
			}
			if !errors.Is(err, row.want) || !strings.Contains(err.Error(), row.text) {
				t.Fatalf("got %v, want %v and %q", err, row.want, row.text)
			}
			if strings.Contains(err.Error(), "s3cret") || strings.Contains(err.Error(), "p@ss") {
				t.Errorf("the error shows the password: %v", err)
			}
			t.Log(err)
		})
	}
}

func TestOpenChecksItsArguments(t *testing.T) {
	t.Parallel()
	const good = "amqp://localhost"
	for _, row := range []struct {
		urls  []string
		queue string
		cfg   rabbitmq.Config
		want  string
	}{
		{nil, "q", rabbitmq.Config{}, "urls: there must be at least one"},
		{[]string{"localhost:5672"}, "q", rabbitmq.Config{}, "urls[0]: must be amqp://"},
		{[]string{"http://localhost"}, "q", rabbitmq.Config{}, "urls[0]: must be amqp://"},
		{[]string{good, "amqp://user:s3cr/t@host"}, "q", rabbitmq.Config{}, "urls[1]: must be amqp://"},
		{[]string{"amqp://user:s3cret@host:0/x"}, "q", rabbitmq.Config{}, "urls[0]: must be amqp://"},
		{[]string{"amqp://user:s3cret@/x"}, "q", rabbitmq.Config{}, "urls[0]: must be amqp://"},
		{[]string{"amqp://host/a/b"}, "q", rabbitmq.Config{}, "urls[0]: must be amqp://"},
		{[]string{"amqp://host?heartbeat=5"}, "q", rabbitmq.Config{}, "urls[0]: must not have a query"},
		{[]string{"amqp://a/x", "amqp://b/y"}, "q", rabbitmq.Config{}, "urls[1]: must name the same virtual host"},
		{[]string{good}, " ", rabbitmq.Config{}, "queue: must not be blank"},
		{[]string{good}, strings.Repeat("q", 256), rabbitmq.Config{}, "queue: has 256 bytes"},
		{[]string{good}, "q", rabbitmq.Config{DialTimeout: -1}, "DialTimeout = -1ns: must be from"},
		{[]string{good}, "q", rabbitmq.Config{RequestTimeout: -1}, "RequestTimeout = -1ns: must be from"},
		{[]string{good}, "q", rabbitmq.Config{CloseTimeout: -1}, "CloseTimeout = -1ns: must be from"},
		{[]string{good}, "q", rabbitmq.Config{MaxBackoff: time.Millisecond}, "MaxBackoff = 1ms: must be from"},
		{[]string{good}, "q", rabbitmq.Config{Heartbeat: -1}, "Heartbeat = -1ns: must be from"},
		{[]string{good}, "q", rabbitmq.Config{Heartbeat: 1500 * time.Millisecond}, "Heartbeat = 1.5s: must be whole seconds"},
		{[]string{good}, "q", rabbitmq.Config{Prefetch: -1}, "Prefetch = -1: must be from 1 to 65535"},
		{[]string{good}, "q", rabbitmq.Config{Prefetch: 65536}, "Prefetch = 65536: must be from 1 to 65535"},
		{[]string{good}, "q", rabbitmq.Config{AckTimeout: time.Millisecond}, "AckTimeout = 1ms: must be at least 1s"},
		{[]string{good}, "q", rabbitmq.Config{Lanes: "key"}, `Lanes = "key": is not one of`},
		{[]string{good}, "q", rabbitmq.Config{OnQueueDeleted: 2}, "OnQueueDeleted = 2: is not one of"},
		{[]string{good}, "q", rabbitmq.Config{Hooks: []rabbitmq.Hook{1}}, "Hooks[0] = int: implements none"},
		{[]string{good}, "q", rabbitmq.Config{Stream: &rabbitmq.Stream{Start: 5}}, "Stream.Start = 5: is not one of"},
		{[]string{good}, "q", rabbitmq.Config{Stream: &rabbitmq.Stream{Offset: -1}}, "Stream.Offset = -1: must not be negative"},
		{[]string{good}, "q", rabbitmq.Config{Stream: &rabbitmq.Stream{Offset: 1}}, "Stream.Offset = 1: is for Start: StreamOffset only"},
		{[]string{good}, "q", rabbitmq.Config{Stream: &rabbitmq.Stream{Start: rabbitmq.StreamTimestamp}}, "Stream.Time = "},
		{[]string{good}, "q", rabbitmq.Config{Stream: &rabbitmq.Stream{Time: time.Now()}}, "is for Start: StreamTimestamp only"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{Type: "log"}}, `Declare.Type = "log": is not one of`},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{Type: rabbitmq.QueueStream}}, "Config.Stream is for QueueStream"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{}, Stream: &rabbitmq.Stream{}}, "Config.Stream is for QueueStream"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{Transient: true}}, "Declare.Transient = true: is for QueueClassic only"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{Type: rabbitmq.QueueStream, SingleActiveConsumer: true}, Stream: &rabbitmq.Stream{}}, "Declare.SingleActiveConsumer = true: is not for"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{Type: rabbitmq.QueueClassic, DeliveryLimit: 3}}, "Declare.DeliveryLimit = 3: is for QueueQuorum only"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{Type: rabbitmq.QueueStream, DeadLetterExchange: "x"}, Stream: &rabbitmq.Stream{}}, "Declare.DeadLetterExchange = x: is not for"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{DeadLetterRoutingKey: "x"}}, "Declare.DeadLetterRoutingKey = x: needs"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{BindingKeys: []string{"#"}}}, "Declare.Exchange = \"\": must be set"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{Arguments: map[string]any{"x-queue-type": "quorum"}}}, "Declare.Arguments = x-queue-type: is said by a field"},
		{[]string{good}, "q", rabbitmq.Config{Declare: &rabbitmq.Declare{Arguments: map[string]any{"x-max-length": struct{}{}}}}, "not supported"},
	} {
		_, err := rabbitmq.Open(t.Context(), row.urls, row.queue, &row.cfg)
		if err == nil || !strings.Contains(err.Error(), row.want) || !strings.HasPrefix(err.Error(), "rabbitmq: ") {
			t.Errorf("%v, %q, %+v: %v, want %q", row.urls, row.queue, row.cfg, err, row.want)
		} else if strings.Contains(err.Error(), "s3cr") {
			t.Errorf("the error shows the password: %v", err)
		}
	}
}

// A broker that cannot be reached is waited for, as long as the context allows.
func TestOpenWaitsForTheBroker(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	n := &network{}
	n.cut()
	cfg := &rabbitmq.Config{Dial: n.dial, MaxBackoff: 100 * time.Millisecond, Logger: quiet()}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := rabbitmq.Open(ctx, []string{l.url}, l.queue, cfg)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "the network is cut") {
		t.Errorf("got %v, want the deadline and the reason", err)
	}
	opened := make(chan *rabbitmq.Source)
	go func() {
		s, err := rabbitmq.Open(t.Context(), []string{l.url}, l.queue, cfg)
		if err != nil {
			t.Error(err)
		}
		opened <- s
	}()
	<-time.After(300 * time.Millisecond)
	n.restore()
	s := next(l, opened)
	defer l.close(s)
	l.publish(0, 1)
	l.ack(l.receive(s, 1)...)
}

// One of several hosts is enough.
func TestOpenTriesAllHosts(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	closed, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := l.with(func(u *url.URL) { u.Host = closed.Addr().String() })
	_ = closed.Close()
	for range 4 { // the order is random
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		s, err := rabbitmq.Open(ctx, []string{dead, l.url, dead}, l.queue, &rabbitmq.Config{Logger: quiet()})
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		l.close(s)
	}
}

// Credentials are asked for again on every connection.
func TestCredentialsAreFresh(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	u, err := url.Parse(l.url)
	if err != nil {
		t.Fatal(err)
	}
	password, _ := u.User.Password()
	var mu sync.Mutex
	asked := 0
	n, ev := &network{}, newEvents()
	s := l.open(&rabbitmq.Config{Dial: n.dial, Hooks: []rabbitmq.Hook{ev}, MaxBackoff: 100 * time.Millisecond,
		Credentials: func(context.Context) (string, string, error) {
			mu.Lock()
			defer mu.Unlock()
			asked++
			return u.User.Username(), password, nil
		}})
	next(l, ev.consuming)
	n.cut()
	n.restore()
	next(l, ev.consuming)
	mu.Lock()
	defer mu.Unlock()
	if asked < 2 {
		t.Errorf("asked %d times, want at least 2", asked)
	}
	if err := s.Health(); err != nil {
		t.Error(err)
	}
}

// amqps:// speaks TLS, and the certificate is checked.
func TestTLS(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	u, err := url.Parse(l.url)
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewTLSServer(nil) // for its certificate
	defer web.Close()
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: web.TLS.Certificates})
	if err != nil {
		t.Fatal(err)
	}
	var forwarding sync.WaitGroup
	defer forwarding.Wait()
	defer func() { _ = listener.Close() }()
	forwarding.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			forwarding.Go(func() { forward(t, conn, u.Host) })
		}
	})
	pool := x509.NewCertPool()
	pool.AddCert(web.Certificate())
	secure := l.with(func(u *url.URL) { u.Scheme, u.Host = "amqps", listener.Addr().String() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := rabbitmq.Open(ctx, []string{secure}, l.queue, &rabbitmq.Config{Logger: quiet(), TLS: &tls.Config{RootCAs: pool}})
	if err != nil {
		t.Fatal(err)
	}
	l.publish(0, 1)
	l.ack(l.receive(s, 1)...)
	l.close(s)

	var certificate *tls.CertificateVerificationError
	if _, err := rabbitmq.Open(ctx, []string{secure}, l.queue, &rabbitmq.Config{Logger: quiet()}); !errors.As(err, &certificate) || !strings.Contains(err.Error(), "Config.TLS") {
		t.Errorf("a certificate of nobody: %v", err)
	}
	plain := l.with(func(u *url.URL) { u.Scheme = "amqps" })
	if _, err := rabbitmq.Open(ctx, []string{plain}, l.queue, &rabbitmq.Config{Logger: quiet()}); !errors.Is(err, rabbitmq.ErrNotAMQP) || !strings.Contains(err.Error(), "begin with amqp://") {
		t.Errorf("TLS to a port without: %v", err)
	}
}

// Servers of other kinds are told from a broker that is not there yet.
func TestOpenOfAnotherServer(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, answer string
		hangUp       bool
		final        bool
		text         string
	}{
		{"HTTP", "HTTP/1.1 400 Bad Request\r\n\r\n", true, true, "HTTP server"},
		{"another AMQP", "AMQP\x00\x01\x00\x00", true, true, "another version of AMQP"},
		{"TLS", "\x15\x03\x03\x00\x02\x02\x32", true, true, "amqps://"},
		{"something else", "220 mail ESMTP\r\n", false, true, "5672"},
		{"hangs up", "", true, false, "its port for AMQP"},
		{"says nothing", "", false, false, "its port for AMQP"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			var serving sync.WaitGroup
			defer serving.Wait()
			defer func() { _ = listener.Close() }()
			serving.Go(func() {
				for {
					conn, err := listener.Accept()
					if err != nil {
						return
					}
					serving.Go(func() {
						defer func() { _ = conn.Close() }()
						_, _ = io.ReadFull(conn, make([]byte, len("AMQP\x00\x00\x09\x01")))
						_, _ = conn.Write([]byte(row.answer))
						if !row.hangUp {
							_, _ = io.Copy(io.Discard, conn)
						}
					})
				}
			})
			limit := time.Second
			if row.final {
				limit = time.Minute
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			cfg := &rabbitmq.Config{Logger: quiet(), DialTimeout: 300 * time.Millisecond, MaxBackoff: 100 * time.Millisecond}
			if row.final {
				cfg.DialTimeout = time.Minute
			}
			_, err = rabbitmq.Open(ctx, []string{"amqp://guest:s3cret@" + listener.Addr().String()}, "q", cfg)
			if err == nil || errors.Is(err, rabbitmq.ErrNotAMQP) != row.final || errors.Is(err, context.DeadlineExceeded) == row.final || !strings.Contains(err.Error(), row.text) {
				t.Errorf("got %v, want %q, final: %v", err, row.text, row.final)
			}
			if err != nil && strings.Contains(err.Error(), "s3cret") {
				t.Errorf("the error shows the password: %v", err)
			}
			t.Log(err)
		})
	}
}

func forward(t *testing.T, client net.Conn, address string) {
	defer func() { _ = client.Close() }()
	server, err := new(net.Dialer).DialContext(context.WithoutCancel(t.Context()), "tcp", address)
	if err != nil {
		return
	}
	var down sync.WaitGroup
	down.Go(func() {
		_, _ = io.Copy(client, server)
		_ = client.Close()
	})
	_, _ = io.Copy(server, client)
	_ = server.Close()
	down.Wait()
}

// Declare makes what is missing, and is content with what is there.
func TestDeclare(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	exchange, dead := l.queue+"-exchange", l.queue+"-dead"
	t.Cleanup(func() {
		ch := l.channel()
		_ = ch.ExchangeDelete(exchange, false, false)
		_, _ = ch.QueueDelete(dead, false, false, false)
	})
	if _, err := l.ch.QueueDeclare(dead, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	d := &rabbitmq.Declare{
		Exchange: exchange, BindingKeys: []string{"orders.*", "refunds.#"}, SingleActiveConsumer: true, DeliveryLimit: 2,
		DeadLetterExchange: "amq.topic", DeadLetterRoutingKey: dead, Arguments: map[string]any{"x-max-length": 1000},
	}
	if err := l.ch.QueueBind(dead, dead, "amq.topic", false, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s := l.open(&rabbitmq.Config{Declare: d, Prefetch: 1})
		for _, key := range []string{"orders.paid", "other", "refunds.a.b"} {
			if err := l.ch.PublishWithContext(t.Context(), exchange, key, false, false, amqp.Publishing{Body: []byte(key)}); err != nil {
				t.Fatal(err)
			}
		}
		for _, want := range []string{"orders.paid", "refunds.a.b"} {
			got := l.receive(s, 1)[0]
			if string(got.Message.Key) != want || got.Attempt != 1 {
				t.Errorf("received %q, attempt %d, want %q and 1", got.Message.Key, got.Attempt, want)
			}
			l.ack(got)
		}
		l.close(s)
	}
	// The broker counts, and gives up at the limit: x-death says so.
	if err := l.ch.PublishWithContext(t.Context(), exchange, "orders.bad", false, false, amqp.Publishing{Body: []byte("bad")}); err != nil {
		t.Fatal(err)
	}
	for attempt := 1; attempt <= 3; attempt++ {
		s := l.open(&rabbitmq.Config{Declare: d})
		if got := l.receive(s, 1)[0]; got.Attempt != attempt {
			t.Errorf("attempt %d, want %d", got.Attempt, attempt)
		}
		l.close(s)
	}
	letters := &lab{TB: t, url: l.url, queue: dead, ch: l.ch}
	s := letters.open(nil)
	got := letters.receive(s, 1)[0]
	if death, ok := got.Message.Headers.Get("x-death"); !ok || !strings.Contains(string(death), `"reason":"delivery_limit"`) {
		t.Errorf("x-death is %s", death)
	}
	letters.ack(got)
}

var _ broker.Source = (*rabbitmq.Source)(nil)

// A slash in the name of a virtual host is written as %2F.
func TestVirtualHostWithASlash(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	l.url = strings.TrimSuffix(l.url, "/") + "/%2F"
	l.publish(0, 1)
	l.ack(l.receive(l.open(nil), 1)...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	other := strings.TrimSuffix(l.url, "%2F") + "no%2Fsuch"
	if _, err := rabbitmq.Open(ctx, []string{other}, l.queue, &rabbitmq.Config{Logger: quiet()}); !errors.Is(err, rabbitmq.ErrVHost) {
		t.Errorf("open: %v, want ErrVHost", err)
	}
}

// What is wrong with one address only is no reason to give up while the others may
// come back.
func TestOneOfSeveralAddressesIsWrong(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	other := httptest.NewTLSServer(nil)
	t.Cleanup(other.Close)
	wrong := "amqps://guest:guest@" + other.Listener.Addr().String()
	gone, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	down := "amqp://guest:guest@" + gone.Addr().String()
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	open := func(patience time.Duration, urls ...string) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		s, err := rabbitmq.Open(ctx, urls, l.queue, &rabbitmq.Config{Logger: quiet()})
		if err == nil {
			l.close(s)
		}
		return err
	}
	if err := open(time.Second, wrong, down); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one is wrong, one is down: %v, want that it is tried again", err)
	}
	var certificate *tls.CertificateVerificationError
	if err := open(time.Minute, wrong, wrong); !errors.As(err, &certificate) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("all are wrong: %v, want to be told at once", err)
	}
	if err := open(time.Minute, wrong, l.url, down); err != nil {
		t.Errorf("one is right: %v", err)
	}
}
