package wire

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/sasl"
	saslplain "github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newCluster(t *testing.T, opts ...kfake.Opt) string {
	t.Helper()
	return startCluster(t, opts...).ListenAddrs()[0]
}

func startCluster(t *testing.T, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1), kfake.SeedTopics(2, "orders")}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func newTestDialer(t *testing.T, o Options) *Dialer {
	t.Helper()
	o.ClientID = "test"
	if o.Dial == nil {
		o.Dial = new(net.Dialer).DialContext
	}
	if o.DialTimeout == 0 {
		o.DialTimeout = 5 * time.Second
	}
	if o.RequestTimeout == 0 {
		o.RequestTimeout = 5 * time.Second
	}
	d := NewDialer(o)
	t.Cleanup(d.Shut)
	return d
}

func TestConnRequests(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		opts  []kfake.Opt
		hasID bool
	}{
		{"newest", nil, true},
		{"without topic ids", []kfake.Opt{kfake.MaxVersions(kversion.V2_4_0())}, false},
		{"oldest", []kfake.Opt{kfake.MaxVersions(kversion.V0_11_0())}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			address := newCluster(t, tc.opts...)
			conn, err := newTestDialer(t, Options{}).Connect(t.Context(), address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if conn.Address() != address {
				t.Errorf("address is %q, want %q", conn.Address(), address)
			}
			m, err := conn.Metadata(t.Context(), []string{"orders", "missing"})
			if err != nil {
				t.Fatal(err)
			}
			if o := m.Topics["orders"]; o.Err != nil || len(o.Leaders) != 2 || (o.ID != TopicID{}) != tc.hasID {
				t.Errorf("orders: %+v", o)
			}
			if !errors.Is(m.Topics["missing"].Err, kafkago.UnknownTopicOrPartition) {
				t.Errorf("missing: %+v", m.Topics["missing"])
			}
			res, err := conn.Fetch(t.Context(), &FetchRequest{Topic: "orders", Partition: 1, MaxBytes: 1 << 20, MaxWait: 10 * time.Millisecond})
			if err != nil || res.Err != nil || res.Next != 0 || res.HighWatermark != 0 {
				t.Errorf("fetch: %+v, %v", res, err)
			}
			if res, err = conn.Fetch(t.Context(), &FetchRequest{Topic: "orders", Offset: 9, MaxBytes: 1}); err != nil || !errors.Is(res.Err, kafkago.OffsetOutOfRange) {
				t.Errorf("fetch beyond the end: %+v, %v", res, err)
			}
			req := &listoffsets.Request{ReplicaID: -1, Topics: []listoffsets.RequestTopic{{Topic: "orders", Partitions: []listoffsets.RequestPartition{{Timestamp: -1, CurrentLeaderEpoch: -1}}}}}
			if _, err := conn.RoundTrip(t.Context(), req); err != nil {
				t.Errorf("list offsets: %v", err)
			}
		})
	}
}

func mechanism(t *testing.T, name, password string) sasl.Mechanism {
	t.Helper()
	algorithm := scram.SHA256
	switch name {
	case "PLAIN":
		return saslplain.Mechanism{Username: "user", Password: password}
	case "SCRAM-SHA-512":
		algorithm = scram.SHA512
	}
	m, err := scram.Mechanism(algorithm, "user", password)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestDialerLogin(t *testing.T) {
	t.Parallel()
	server, client := certificate(t)
	for _, name := range []string{"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := newCluster(t, kfake.EnableSASL(), kfake.Superuser(name, "user", "secret"), kfake.TLS(server))
			conn, err := newTestDialer(t, Options{TLS: client, Mechanism: mechanism(t, name, "secret")}).Connect(t.Context(), address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Metadata(t.Context(), []string{"orders"}); err != nil {
				t.Error(err)
			}

			d := newTestDialer(t, Options{TLS: client, Mechanism: mechanism(t, name, "wrong")})
			if _, err := d.Connect(t.Context(), address); err == nil {
				t.Error("no error with a wrong password")
			}
			if d.Open() != 0 {
				t.Error("the failed connection stays open")
			}
		})
	}
}

// A broker that refuses a login says so; one that only closes the connection
// may have other reasons.
func TestAuthError(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		key  kmsg.Key
		edit func(kmsg.Response)
		want error
	}{
		{"password", kmsg.SASLAuthenticate, func(r kmsg.Response) { r.(*kmsg.SASLAuthenticateResponse).ErrorCode = 58 }, kafkago.SASLAuthenticationFailed},
		{"mechanism", kmsg.SASLHandshake, func(r kmsg.Response) { r.(*kmsg.SASLHandshakeResponse).ErrorCode = 33 }, kafkago.UnsupportedSASLMechanism},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := startCluster(t, kfake.EnableSASL(), kfake.Superuser("PLAIN", "user", "secret"))
			c.ControlKey(int16(tc.key), func(req kmsg.Request) (kmsg.Response, error, bool) {
				res := req.ResponseKind()
				tc.edit(res)
				return res, nil, true
			})
			d := newTestDialer(t, Options{Mechanism: mechanism(t, "PLAIN", "wrong")})
			_, err := d.Connect(t.Context(), c.ListenAddrs()[0])
			var auth *AuthError
			if !errors.As(err, &auth) || auth.Mechanism != "PLAIN" || !errors.Is(err, tc.want) {
				t.Errorf("got %v, want an AuthError with %v", err, tc.want)
			}
		})
	}
}

func TestDialerTLS(t *testing.T) {
	t.Parallel()
	server, client := certificate(t)
	address := newCluster(t, kfake.TLS(server))
	var refused *tls.CertificateVerificationError
	if _, err := newTestDialer(t, Options{TLS: &tls.Config{MinVersion: tls.VersionTLS13}}).Connect(t.Context(), address); !errors.As(err, &refused) {
		t.Errorf("unknown authority: got %v, want a CertificateVerificationError", err)
	}
	conn, err := newTestDialer(t, Options{TLS: client}).Connect(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if _, err := newTestDialer(t, Options{}).Connect(t.Context(), address); err == nil {
		t.Error("no error without TLS")
	}
}

// A broker that ends the connection gives no reason; the likely one is said.
func TestDialerGuesses(t *testing.T) {
	t.Parallel()
	_, client := certificate(t)
	if _, err := newTestDialer(t, Options{TLS: client}).Connect(t.Context(), hangUp(t)); err == nil || !strings.Contains(err.Error(), "may not speak TLS") {
		t.Errorf("TLS: got %v", err)
	}
	secure := newCluster(t, kfake.EnableSASL(), kfake.Superuser("PLAIN", "user", "secret"))
	conn, err := newTestDialer(t, Options{}).Connect(t.Context(), secure)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Metadata(t.Context(), []string{"orders"}); err == nil || !strings.Contains(err.Error(), "login by SASL") {
		t.Errorf("no login: got %v", err)
	}
}

// hangUp ends every connection at once.
func hangUp(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		accepting.Wait()
	})
	return l.Addr().String()
}

// silent accepts connections and never answers.
func silent(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		var conns []net.Conn
		for {
			c, err := l.Accept()
			if err != nil {
				for _, c := range conns {
					_ = c.Close()
				}
				return
			}
			conns = append(conns, c)
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return l.Addr().String()
}

// A peer that accepts and then says nothing must not hang anybody.
func TestBlackHole(t *testing.T) {
	t.Parallel()
	address := silent(t)
	_, client := certificate(t)
	for _, tc := range []struct {
		name string
		o    Options
	}{
		{"plain", Options{}},
		{"TLS", Options{TLS: client}},
		{"SASL", Options{Mechanism: mechanism(t, "SCRAM-SHA-256", "secret")}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			tc.o.DialTimeout, tc.o.RequestTimeout = 50*time.Millisecond, 50*time.Millisecond
			d := newTestDialer(t, tc.o)
			began := time.Now()
			if _, err := d.Connect(t.Context(), address); err == nil {
				t.Error("no error")
			}
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("took %v", took)
			}
			if n := d.Open(); n != 0 {
				t.Errorf("%d connections are open", n)
			}

			tc.o.DialTimeout, tc.o.RequestTimeout = time.Hour, time.Hour
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if _, err := newTestDialer(t, tc.o).Connect(ctx, address); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v, want the end of the context", err)
			}
		})
	}
}

func TestShut(t *testing.T) {
	t.Parallel()
	d := newTestDialer(t, Options{RequestTimeout: time.Hour, DialTimeout: time.Hour})
	conn, err := d.Connect(t.Context(), newCluster(t))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 2)
	go func() {
		_, err := conn.Fetch(t.Context(), &FetchRequest{Topic: "orders", MaxBytes: 1 << 20, MaxWait: time.Hour})
		ended <- err
	}()
	hole := silent(t)
	go func() {
		_, err := d.Connect(t.Context(), hole)
		ended <- err
	}()
	for d.Open() < 2 {
		<-time.After(time.Millisecond) // until both are under way
	}
	d.Shut()
	for range 2 {
		if err := <-ended; err == nil {
			t.Error("no error")
		}
	}
	if _, err := d.Connect(t.Context(), hole); !errors.Is(err, ErrShut) {
		t.Errorf("got %v, want ErrShut", err)
	}
	if _, err := conn.Metadata(t.Context(), nil); err == nil {
		t.Error("no error on a connection that is shut")
	}
	d.Shut()
}

// After an answer that did not come in time the connection is given up: the
// answer would be taken for that of the next request.
func TestConnIsGivenUp(t *testing.T) {
	t.Parallel()
	d := newTestDialer(t, Options{})
	conn, err := d.Connect(t.Context(), newCluster(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := conn.Fetch(ctx, &FetchRequest{Topic: "orders", MaxBytes: 1, MaxWait: time.Minute}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the end of the context", err)
	}
	if _, err := conn.Metadata(t.Context(), nil); err == nil || d.Open() != 0 {
		t.Errorf("the connection is used again: %v, %d open", err, d.Open())
	}
}

func TestVersions(t *testing.T) {
	t.Parallel()
	conn, err := newTestDialer(t, Options{}).Connect(t.Context(), newCluster(t, kfake.MaxVersions(kversion.V0_10_0())))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 2 { // it does not harm the connection
		if _, err := conn.Fetch(t.Context(), &FetchRequest{Topic: "orders"}); !errors.Is(err, ErrVersion) {
			t.Errorf("got %v, want ErrVersion", err)
		}
	}
}

// certificate returns the sides of TLS for 127.0.0.1.
func certificate(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(parsed)
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		&tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}
}
