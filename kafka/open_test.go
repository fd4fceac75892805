package kafka

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	franzscram "github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

func TestOpenMissingTopics(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"), kfake.AllowAutoTopicCreation())
	_, err := Open(t.Context(), c.ListenAddrs(), "billing", []string{"refunds", "orders", "returns"}, quick(t))
	if !errors.Is(err, ErrNoTopic) || !strings.Contains(err.Error(), `"refunds", "returns"`) || strings.Contains(err.Error(), `"orders"`) {
		t.Errorf("got %v, want the two that are missing", err)
	}
	if c.TopicInfo("refunds") != nil {
		t.Error("the missing topic was created")
	}
}

// A topic that was just created may not have got around yet.
func TestOpenNewTopic(t *testing.T) {
	t.Parallel()
	c := newFake(t)
	time.AfterFunc(300*time.Millisecond, func() { _ = c.CreateTopic("orders", 1, nil) })
	openSource(t, c, []string{"orders"}, quick(t))
}

func TestOpenUnreachable(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	_ = l.Close() // nobody listens there now
	log := &buffer{}
	cfg := quick(t)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err = Open(ctx, []string{address}, "billing", []string{"orders"}, cfg)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("got %v, want the context's error and the reason", err)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("took %v", took)
	}
	if !strings.Contains(log.String(), "what=open") || !strings.Contains(log.String(), address) {
		t.Errorf("the log does not say so: %s", log)
	}
}

// The last attempt is broken off by the end of the context: the reason is what
// failed before.
func TestOpenTellsTheReason(t *testing.T) {
	t.Parallel()
	cfg := quick(t)
	reason := errors.New("the reason")
	var dials atomic.Int32
	cfg.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
		if dials.Add(1) == 1 {
			return nil, reason
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := Open(ctx, []string{"127.0.0.1:1"}, "billing", []string{"orders"}, cfg)
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, reason) || dials.Load() < 2 {
		t.Errorf("got %v after %d attempts, want the context's error and the reason", err, dials.Load())
	}
}

func TestOpenWaitsForBrokers(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	network := &cuttable{isCut: true}
	cfg := quick(t)
	cfg.Dial = network.dial
	time.AfterFunc(300*time.Millisecond, func() { _ = network.restore() })
	openSource(t, c, []string{"orders"}, cfg)
}

func TestPermissions(t *testing.T) {
	t.Parallel()
	allow := func(resource kmsg.ACLResourceType, name string, op kmsg.ACLOperation) kfake.ACL {
		return kfake.ACL{Resource: resource, Name: name, Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: op, Allow: true}
	}
	topic, group := kmsg.ACLResourceTypeTopic, kmsg.ACLResourceTypeGroup
	read, describe := kmsg.ACLOperationRead, kmsg.ACLOperationDescribe
	for _, tc := range []struct {
		name string
		acls []kfake.ACL
		says string
	}{
		{"all", []kfake.ACL{allow(topic, "orders", read), allow(group, "billing", read)}, ""},
		{"not even describe", nil, `topic "orders": permission is missing to describe`},
		{"only describe", []kfake.ACL{allow(topic, "orders", describe), allow(group, "billing", read)}, `topic "orders": permission is missing to read`},
		{"no group", []kfake.ACL{allow(topic, "orders", read)}, `group "billing": permission is missing to read`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := newFake(t, kfake.SeedTopics(1, "orders"), kfake.EnableSASL(), kfake.EnableACLs(),
				kfake.Superuser("PLAIN", "admin", "admin"), kfake.User("PLAIN", "app", "secret", tc.acls...))
			cfg := quick(t)
			cfg.SASL = &SASL{Mechanism: SASLPlain, Credentials: StaticCredentials("app", "secret")}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			s, err := Open(ctx, c.ListenAddrs(), "billing", []string{"orders"}, cfg)
			if tc.says != "" {
				if !errors.Is(err, ErrForbidden) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("got %v, want %q", err, tc.says)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "joined", func() bool { return s.Stats().Joined })
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// To describe the group is enough to find its coordinator, but not to be a member.
func TestOpenGroupMayOnlyBeDescribed(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	c.ControlKey(int16(kmsg.Heartbeat), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		res := req.ResponseKind().(*kmsg.HeartbeatResponse)
		res.ErrorCode = int16(kafkago.GroupAuthorizationFailed)
		return res, nil, true
	})
	_, err := Open(t.Context(), c.ListenAddrs(), "billing", []string{"orders"}, quick(t))
	if !errors.Is(err, ErrForbidden) || !strings.Contains(err.Error(), `group "billing": permission is missing to read`) {
		t.Errorf("got %v, want that the permission is missing", err)
	}
}

func TestOpenRefusedLogin(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"), kfake.EnableSASL(), kfake.Superuser("PLAIN", "admin", "admin"))
	c.ControlKey(int16(kmsg.SASLAuthenticate), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		res := req.ResponseKind().(*kmsg.SASLAuthenticateResponse)
		res.ErrorCode = int16(kafkago.SASLAuthenticationFailed)
		return res, nil, true
	})
	cfg := quick(t)
	cfg.SASL = &SASL{Mechanism: SASLPlain, Credentials: StaticCredentials("admin", "wrong")}
	_, err := Open(t.Context(), c.ListenAddrs(), "billing", []string{"orders"}, cfg)
	var auth *wire.AuthError
	if !errors.As(err, &auth) || !errors.Is(err, kafkago.SASLAuthenticationFailed) {
		t.Errorf("got %v, want the refusal at once", err)
	}
	if strings.Contains(err.Error(), "wrong") {
		t.Errorf("the error tells the password: %v", err)
	}
}

// A changed password is used from the next connection on.
func TestCredentialsChange(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"), kfake.EnableSASL(),
		kfake.Superuser("SCRAM-SHA-256", "old", "old"), kfake.Superuser("SCRAM-SHA-256", "new", "new"))
	network := &cuttable{}
	var user atomic.Value
	user.Store("old")
	var asked atomic.Int32
	events := newSpy()
	cfg := quick(t)
	cfg.Dial, cfg.Hooks, cfg.DrainTimeout = network.dial, []Hook{events}, -1
	cfg.SASL = &SASL{Mechanism: SASLScram256, Credentials: func(context.Context) (string, string, error) {
		u := user.Load().(string)
		if u == "new" {
			asked.Add(1)
		}
		return u, u, nil
	}}
	s := openSource(t, c, []string{"orders"}, cfg)
	await(t, events.assigned)
	user.Store("new")
	network.cut()
	await(t, events.revoked)
	if err := network.restore(); err != nil {
		t.Fatal(err)
	}
	await(t, events.assigned)
	p := producer(t, c, kgo.SASL(franzscram.Auth{User: "new", Pass: "new"}.AsSha256Mechanism()))
	produce(t, p, numbered("orders", 0, 1)...)
	receive(t, s, 1)
	if asked.Load() == 0 {
		t.Error("the new credentials were not asked for")
	}
}

// Nothing answers any more, and no connection breaks: neither a hang nor a hot
// loop.
func TestBlackHole(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	var hole atomic.Bool
	var dials atomic.Int32
	events := newSpy()
	cfg := quick(t)
	cfg.RequestTimeout, cfg.DialTimeout, cfg.DrainTimeout, cfg.Hooks = 200*time.Millisecond, 200*time.Millisecond, -1, []Hook{events}
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		dials.Add(1)
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		return &holed{conn, &hole}, err
	}
	s := openSource(t, c, []string{"orders"}, cfg)
	p := producer(t, c)
	produce(t, p, numbered("orders", 0, 2)...)
	ds := receive(t, s, 1)
	hole.Store(true)
	ack(t, ds...)
	await(t, events.revoked)
	before := dials.Load()
	<-time.After(time.Second)
	if n := dials.Load() - before; n > 40 {
		t.Errorf("%d connections were opened in a second", n)
	}
	hole.Store(false)
	eventually(t, "back", func() bool { return s.Stats().Joined })
	// It was acked, but nobody could be told.
	again := receive(t, s, 1)
	ack(t, again...)
	eventually(t, "the rest has its turn", func() bool {
		if committed(c, "orders", 0) == 2 {
			return true
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if ds, err := s.Receive(ctx, 1); err == nil {
			_ = ds[0].Ack(ctx)
		}
		return false
	})

	produce(t, p, numbered("orders", 0, 1)...)
	ds = receive(t, s, 1)
	hole.Store(true)
	ack(t, ds...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	began := time.Now()
	if err := s.Close(ctx); err == nil {
		t.Error("no error from Close although nobody was told")
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("Close took %v", took)
	}
}

// holed is a connection whose bytes can vanish.
type holed struct {
	net.Conn
	hole *atomic.Bool
}

func (h *holed) Write(b []byte) (int, error) {
	if h.hole.Load() {
		return len(b), nil
	}
	return h.Conn.Write(b)
}

// Close while the group waits for another member must not wait for it.
func TestCloseWhileJoining(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	joining := make(chan struct{})
	release := make(chan struct{})
	c.ControlKey(int16(kmsg.JoinGroup), func(kmsg.Request) (kmsg.Response, error, bool) {
		close(joining)
		c.SleepControl(func() { <-release })
		return nil, nil, false
	})
	s := openSource(t, c, []string{"orders"}, quick(t))
	<-joining
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	began := time.Now()
	err := s.Close(ctx)
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("took %v", took)
	}
	if err == nil {
		t.Error("no error although the group was not left")
	}
	close(release)
}

// case K7: what was acked before a stop is committed.
func TestClose(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 3)...)
	cfg := quick(t)
	cfg.CommitInterval = -1
	s := openSource(t, c, []string{"orders"}, cfg)
	ds := receive(t, s, 2)
	ack(t, ds[0])
	received := make(chan error, 1)
	go func() {
		for {
			if _, err := s.Receive(t.Context(), 1); err != nil {
				received <- err
				return
			}
		}
	}()
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-received; !errors.Is(err, broker.ErrClosed) {
		t.Errorf("Receive returns %v, want ErrClosed", err)
	}
	if got := committed(c, "orders", 0); got != 1 {
		t.Errorf("committed is %d, want 1", got)
	}
	if info := c.GroupInfo("billing"); len(info.Members) != 0 {
		t.Errorf("the group has %d members, want none", len(info.Members))
	}
	if err := ds[1].Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
		t.Errorf("got %v, want ErrLost", err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Errorf("second Close: %v", err)
	}
	if err := s.Health(); !errors.Is(err, broker.ErrClosed) {
		t.Errorf("health is %v, want ErrClosed", err)
	}
	if n := s.dialer.Open() + s.groupDialer.Open(); n != 0 {
		t.Errorf("%d connections are open", n)
	}
}

// buffer is a log that may be written concurrently.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
