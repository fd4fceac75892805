package integration_test

import (
	"bytes"
	"context"
	"crypto/pbkdf2"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"hash"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl/plain"

	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
)

// secureLab is a topic and a group of its own on a broker that asks for TLS, a
// login and permissions, with the super user's client.
type secureLab struct {
	*testing.T
	server       *servers.SecureKafka
	tls          *tls.Config
	client       *kafkago.Client
	topic, group string
}

func newSecureLab(t *testing.T) *secureLab {
	t.Helper()
	s := servers.KafkaSecure(t)
	l := &secureLab{T: t, server: s, tls: s.TLS(t), topic: servers.Name(t), group: servers.Name(t)}
	transport := &kafkago.Transport{TLS: l.tls, SASL: plain.Mechanism{Username: s.User, Password: s.Password}}
	t.Cleanup(transport.CloseIdleConnections)
	l.client = &kafkago.Client{Addr: kafkago.TCP(s.Broker), Timeout: 10 * time.Second, Transport: transport}
	r, err := l.client.CreateTopics(t.Context(), &kafkago.CreateTopicsRequest{Topics: []kafkago.TopicConfig{{
		Topic: l.topic, NumPartitions: 1, ReplicationFactor: 1,
	}}})
	if err != nil || r.Errors[l.topic] != nil {
		t.Fatalf("create topic: %v, %+v", err, r)
	}
	return l
}

// produce writes n messages as the super user.
func (l *secureLab) produce(n int) {
	l.Helper()
	w := &kafkago.Writer{Addr: l.client.Addr, Topic: l.topic, RequiredAcks: kafkago.RequireAll, Transport: l.client.Transport}
	defer w.Close()
	ms := make([]kafkago.Message, n)
	for i := range ms {
		ms[i].Value = fmt.Appendf(nil, "%d", i)
	}
	if err := w.WriteMessages(l.Context(), ms...); err != nil {
		l.Fatal(err)
	}
}

// newUser makes a user for SCRAM with a name of its own.
func (l *secureLab) newUser(mechanism, password string) string {
	l.Helper()
	user := servers.Name(l)
	l.setPassword(user, mechanism, password)
	return user
}

func (l *secureLab) setPassword(user, mechanism, password string) {
	l.Helper()
	const iterations = 4096
	salt := []byte(servers.Name(l))
	m, newHash, size := kafkago.ScramMechanismSha256, sha256.New, sha256.Size
	if mechanism == kafka.SASLScram512 {
		m, newHash, size = kafkago.ScramMechanismSha512, func() hash.Hash { return sha512.New() }, sha512.Size
	}
	salted, err := pbkdf2.Key(newHash, password, salt, iterations, size)
	if err != nil {
		l.Fatal(err)
	}
	l.alterUser(&kafkago.AlterUserScramCredentialsRequest{Upsertions: []kafkago.UserScramCredentialsUpsertion{{
		Name: user, Mechanism: m, Iterations: iterations, Salt: salt, SaltedPassword: salted,
	}}})
}

func (l *secureLab) dropPassword(user string) {
	l.Helper()
	l.alterUser(&kafkago.AlterUserScramCredentialsRequest{Deletions: []kafkago.UserScramCredentialsDeletion{{
		Name: user, Mechanism: kafkago.ScramMechanismSha256,
	}}})
}

func (l *secureLab) alterUser(req *kafkago.AlterUserScramCredentialsRequest) {
	l.Helper()
	r, err := l.client.AlterUserScramCredentials(l.Context(), req)
	if err == nil {
		err = r.Results[0].Error
	}
	if err != nil {
		l.Fatalf("alter user: %v", err)
	}
}

// right is a permission on the topic or the group of a lab.
type right struct {
	resource  kafkago.ResourceType
	operation kafkago.ACLOperationType
}

var (
	readTopic     = right{kafkago.ResourceTypeTopic, kafkago.ACLOperationTypeRead}
	describeTopic = right{kafkago.ResourceTypeTopic, kafkago.ACLOperationTypeDescribe}
	readGroup     = right{kafkago.ResourceTypeGroup, kafkago.ACLOperationTypeRead}
)

func (l *secureLab) nameOf(r kafkago.ResourceType) string {
	if r == kafkago.ResourceTypeGroup {
		return l.group
	}
	return l.topic
}

func (l *secureLab) allow(user string, rights ...right) {
	l.Helper()
	var entries []kafkago.ACLEntry
	for _, r := range rights {
		entries = append(entries, kafkago.ACLEntry{
			ResourceType: r.resource, ResourceName: l.nameOf(r.resource), ResourcePatternType: kafkago.PatternTypeLiteral,
			Principal: "User:" + user, Host: "*", Operation: r.operation, PermissionType: kafkago.ACLPermissionTypeAllow,
		})
	}
	r, err := l.client.CreateACLs(l.Context(), &kafkago.CreateACLsRequest{ACLs: entries})
	if err == nil {
		err = errors.Join(r.Errors...)
	}
	if err != nil {
		l.Fatalf("allow: %v", err)
	}
}

func (l *secureLab) forbid(user string, r right) {
	l.Helper()
	res, err := l.client.DeleteACLs(l.Context(), &kafkago.DeleteACLsRequest{Filters: []kafkago.DeleteACLsFilter{{
		ResourceTypeFilter: r.resource, ResourceNameFilter: l.nameOf(r.resource), ResourcePatternTypeFilter: kafkago.PatternTypeLiteral,
		PrincipalFilter: "User:" + user, HostFilter: "*", Operation: r.operation, PermissionType: kafkago.ACLPermissionTypeAllow,
	}}})
	if err == nil {
		err = res.Results[0].Error
	}
	if err != nil || len(res.Results[0].MatchingACLs) != 1 {
		l.Fatalf("forbid: %v, %+v", err, res)
	}
}

func (l *secureLab) config(mechanism, user, password string) *kafka.Config {
	return &kafka.Config{
		TLS:  l.tls,
		SASL: &kafka.SASL{Mechanism: mechanism, Credentials: kafka.StaticCredentials(user, password)},
		// The tests break connections and wait for what comes of it.
		HeartbeatInterval: 200 * time.Millisecond, SessionTimeout: 6 * time.Second, DrainTimeout: -1,
		CommitInterval: 50 * time.Millisecond, MaxBackoff: 500 * time.Millisecond, FetchWait: 100 * time.Millisecond,
		Logger: slog.New(slog.DiscardHandler),
	}
}

// open opens a source; the error is the caller's.
func (l *secureLab) open(cfg *kafka.Config) (*kafka.Source, error) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), time.Minute)
	defer cancel()
	s, err := kafka.Open(ctx, []string{l.server.Broker}, l.group, []string{l.topic}, cfg)
	if err == nil {
		l.Cleanup(func() { _ = s.Close(context.WithoutCancel(l.Context())) })
	}
	return s, err
}

func (l *secureLab) mustOpen(cfg *kafka.Config) *kafka.Source {
	l.Helper()
	s, err := l.open(cfg)
	if err != nil {
		l.Fatal(err)
	}
	return s
}

// mustNotOpen checks that Open fails at once, and returns the error.
func (l *secureLab) mustNotOpen(cfg *kafka.Config) error {
	l.Helper()
	began := time.Now()
	_, err := l.open(cfg)
	if err == nil {
		l.Fatal("opened")
	}
	if took := time.Since(began); took > 20*time.Second {
		l.Errorf("failed after %v, not at once", took)
	}
	return err
}

// take receives and acks n messages.
func (l *secureLab) take(s *kafka.Source, n int) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), time.Minute)
	defer cancel()
	for got := 0; got < n; {
		ds, err := s.Receive(ctx, n-got)
		if err != nil {
			l.Fatalf("receive %d of %d: %v; health: %v", got+1, n, err, s.Health())
		}
		for _, d := range ds {
			if d.Ack(ctx) == nil {
				got++ // A lost one comes again.
			}
		}
	}
}

// unhealthy waits until Health says all of the words.
func (l *secureLab) unhealthy(s *kafka.Source, words ...string) {
	l.Helper()
	eventually(l.T, time.Minute, fmt.Sprintf("Health says %q", words), func() bool { return s.Health() != nil && says(s.Health(), words...) })
}

func (l *secureLab) healthy(s *kafka.Source) {
	l.Helper()
	eventually(l.T, time.Minute, "Health is green", func() bool { return s.Health() == nil })
}

func says(err error, words ...string) bool { return holds(err.Error(), words...) }

func holds(text string, words ...string) bool {
	for _, w := range words {
		if !strings.Contains(text, w) {
			return false
		}
	}
	return true
}

func TestSecureLogin(t *testing.T) {
	t.Parallel()
	for _, mechanism := range []string{kafka.SASLPlain, kafka.SASLScram256, kafka.SASLScram512} {
		t.Run(mechanism, func(t *testing.T) {
			t.Parallel()
			l := newSecureLab(t)
			user, password := "app", "app-secret"
			if mechanism != kafka.SASLPlain {
				password = "päss, \"word\"="
				user = l.newUser(mechanism, password)
			}
			l.allow(user, readTopic, readGroup)
			l.produce(3)
			s := l.mustOpen(l.config(mechanism, user, password))
			l.take(s, 3)
			l.healthy(s)
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
			r, err := l.client.OffsetFetch(t.Context(), &kafkago.OffsetFetchRequest{GroupID: l.group, Topics: map[string][]int{l.topic: {0}}})
			if err != nil || r.Topics[l.topic][0].CommittedOffset != 3 {
				t.Errorf("committed: %+v, %v, want 3", r, err)
			}
		})
	}
}

// A login that is refused is an error at once that says so, and not what was
// tried.
func TestSecureRefusedLogin(t *testing.T) {
	t.Parallel()
	for _, mechanism := range []string{kafka.SASLPlain, kafka.SASLScram256, kafka.SASLScram512} {
		for _, row := range []struct{ name, user string }{{"password", "app"}, {"user", "nobody"}} {
			t.Run(mechanism+"/wrong "+row.name, func(t *testing.T) {
				t.Parallel()
				l := newSecureLab(t)
				user := row.user
				if user == "app" && mechanism != kafka.SASLPlain {
					user = l.newUser(mechanism, "right")
				}
				err := l.mustNotOpen(l.config(mechanism, user, "xyzzy"))
				t.Log(err)
				if !errors.Is(err, kafkago.SASLAuthenticationFailed) || !says(err, "SASL "+mechanism, l.server.Broker) || says(err, "xyzzy") {
					t.Errorf("got %v", err)
				}
			})
		}
	}
}

// Somebody else's certificate, and somebody else's name.
func TestSecureUnverifiedBroker(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name   string
		change func(*tls.Config)
		says   string
	}{
		{"unknown authority", func(c *tls.Config) { c.RootCAs = x509.NewCertPool() }, "unknown authority"},
		{"other name", func(c *tls.Config) { c.ServerName = "kafka.example" }, "kafka.example"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			l := newSecureLab(t)
			cfg := l.config(kafka.SASLPlain, l.server.User, l.server.Password)
			cfg.TLS = cfg.TLS.Clone()
			row.change(cfg.TLS)
			err := l.mustNotOpen(cfg)
			t.Log(err)
			var certificate *tls.CertificateVerificationError
			if !errors.As(err, &certificate) || !says(err, "TLS", row.says, l.server.Broker) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// Client and broker that do not speak the same protocol. It may be somebody in
// between, so Open goes on trying; but both the log and the error say what is
// likely.
func TestSecureOtherProtocol(t *testing.T) {
	t.Parallel()
	secure, plainBroker := newSecureLab(t), servers.Kafka(t)[0]
	tp := newTopic(t, []string{plainBroker}, 1)
	for _, row := range []struct {
		name   string
		broker string
		topic  string
		change func(*kafka.Config)
		says   []string
	}{
		{"no TLS where it is asked for", secure.server.Broker, secure.topic, func(c *kafka.Config) { c.TLS = nil }, []string{"TLS"}},
		{"TLS where nobody speaks it", plainBroker, tp.name, func(c *kafka.Config) { c.SASL = nil }, []string{"TLS"}},
		{"no login where one is asked for", secure.server.Broker, secure.topic, func(c *kafka.Config) { c.SASL = nil }, []string{"SASL"}},
		{"login where nobody asks for it", plainBroker, tp.name, func(c *kafka.Config) { c.TLS = nil }, []string{"SASL"}},
		{"neither", secure.server.Broker, secure.topic, func(c *kafka.Config) { c.TLS, c.SASL = nil, nil }, []string{"TLS"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			var log logBuffer
			cfg := secure.config(kafka.SASLPlain, secure.server.User, secure.server.Password)
			cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
			row.change(cfg)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			began := time.Now()
			_, err := kafka.Open(ctx, []string{row.broker}, row.topic, []string{row.topic}, cfg)
			if err == nil {
				t.Fatal("opened")
			}
			t.Logf("after %v: %v\n%s", time.Since(began), err, log.String())
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("failed after %v", took)
			}
			if !says(err, append(row.says, row.broker)...) {
				t.Errorf("got %v, want %q in it", err, row.says)
			}
			if errors.Is(err, context.DeadlineExceeded) && !holds(log.String(), row.says...) {
				t.Errorf("the log does not say so meanwhile: %s", log.String())
			}
		})
	}
}

// logBuffer is a log that may be written concurrently.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Open says which topic or which permission is missing.
func TestSecureMissing(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name   string
		rights []right
		want   error
		says   string
	}{
		{"all", nil, kafka.ErrForbidden, "topic %[1]q: permission is missing to describe"},
		{"all but the group", []right{readGroup}, kafka.ErrForbidden, "topic %[1]q: permission is missing to describe"},
		{"read", []right{describeTopic, readGroup}, kafka.ErrForbidden, "topic %[1]q: permission is missing to read"},
		{"group", []right{readTopic}, kafka.ErrForbidden, "group %[2]q: permission is missing to read"},
		{"topic", []right{readTopic, readGroup}, kafka.ErrNoTopic, "%[1]q"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			l := newSecureLab(t)
			if errors.Is(row.want, kafka.ErrNoTopic) {
				l.topic = servers.Name(t) // never made
			}
			user := l.newUser(kafka.SASLScram256, "secret")
			if len(row.rights) > 0 {
				l.allow(user, row.rights...)
			}
			err := l.mustNotOpen(l.config(kafka.SASLScram256, user, "secret"))
			t.Log(err)
			if want := fmt.Sprintf(row.says+"%.0[1]s%.0[2]s", l.topic, l.group); !errors.Is(err, row.want) || !says(err, want) {
				t.Errorf("got %v, want %v: %s", err, row.want, want)
			}
		})
	}
}

// A topic that the login may not see does not exist for it.
func TestSecureMissingHiddenTopic(t *testing.T) {
	t.Parallel()
	l := newSecureLab(t)
	l.topic = servers.Name(t) // never made
	user := l.newUser(kafka.SASLScram256, "secret")
	l.allow(user, readGroup)
	if err := l.mustNotOpen(l.config(kafka.SASLScram256, user, "secret")); !errors.Is(err, kafka.ErrForbidden) || !says(err, l.topic) {
		t.Errorf("got %v, want ErrForbidden", err)
	}
}

// The password is changed on the broker, and the provider gives the new one: the
// source goes on after its connections are gone, without a restart.
func TestSecurePasswordRotates(t *testing.T) {
	t.Parallel()
	l := newSecureLab(t)
	user := l.newUser(kafka.SASLScram512, "old")
	l.allow(user, readTopic, readGroup)
	var password atomic.Value
	password.Store("old")
	var asked atomic.Int64
	n := &network{}
	cfg := l.config(kafka.SASLScram512, "", "")
	cfg.Dial = n.dial
	cfg.SASL.Credentials = func(context.Context) (string, string, error) {
		p := password.Load().(string)
		if p == "new" {
			asked.Add(1)
		}
		return user, p, nil
	}
	s := l.mustOpen(cfg)
	l.produce(2)
	l.take(s, 2)

	l.setPassword(user, kafka.SASLScram512, "new")
	password.Store("new")
	l.produce(2)
	l.take(s, 2) // Connections that are logged in stay so.
	before := s.Stats()
	n.cut()
	l.produce(2)
	l.take(s, 2)
	l.healthy(s)
	if asked.Load() == 0 || s.Stats().Rebalances == before.Rebalances {
		t.Errorf("the new password was asked for %d times, generations %d -> %d", asked.Load(), before.Rebalances, s.Stats().Rebalances)
	}
}

// A password that is revoked while the source runs: Health says so, nothing ends,
// and it goes on when there is one again.
func TestSecurePasswordRevoked(t *testing.T) {
	t.Parallel()
	l := newSecureLab(t)
	user := l.newUser(kafka.SASLScram256, "secret")
	l.allow(user, readTopic, readGroup)
	n := &network{}
	cfg := l.config(kafka.SASLScram256, user, "secret")
	cfg.Dial = n.dial
	s := l.mustOpen(cfg)
	l.produce(1)
	l.take(s, 1)
	l.dropPassword(user)
	n.cut()
	l.unhealthy(s, "SASL SCRAM-SHA-256", "Authentication")
	before := n.dials.Load()
	<-time.After(2 * time.Second)
	if dials := n.dials.Load() - before; dials > 40 {
		t.Errorf("%d connections were opened in 2 s", dials)
	}
	t.Log(s.Health())
	l.setPassword(user, kafka.SASLScram256, "secret")
	l.produce(1)
	l.take(s, 1)
	l.healthy(s)
}

// A permission that is taken away while the source runs: Health says so at once; it
// goes on when the permission comes back soon, and ends with ErrForbidden when it
// does not. All wait together, for it takes half a minute.
func TestSecurePermissionRemoved(t *testing.T) {
	t.Parallel()
	var all []*removal
	for _, row := range []struct {
		right right
		cut   bool
		says  string
	}{
		{readTopic, false, "Topic Authorization Failed"},
		{readGroup, false, "Group Authorization Failed"},
		{readTopic, true, "Topic Authorization Failed"},
		{readGroup, true, "Group Authorization Failed"},
	} {
		r := newRemoval(t, row.right, row.cut)
		r.remove()
		r.unhealthy(r.source, row.says)
		r.allow(r.user, r.right)
		r.produce(1)
		r.take(r.source, 1)
		r.healthy(r.source)
		all = append(all, r)
	}
	for _, r := range all {
		r.remove()
		r.await()
	}
	for _, r := range all {
		e := <-r.end
		t.Logf("%s, cut %v: after %v: %v", r.nameOf(r.right.resource), r.cut, e.after, e.err)
		if !errors.Is(e.err, kafka.ErrForbidden) || !says(e.err, r.nameOf(r.right.resource)) {
			t.Errorf("Receive = %v, want ErrForbidden with the name", e.err)
		}
		if e.after < 20*time.Second {
			t.Errorf("ended after %v, permissions come and go", e.after)
		}
		if !errors.Is(r.source.Health(), kafka.ErrForbidden) {
			t.Errorf("Health = %v", r.source.Health())
		}
	}
}

// removal is a source whose login loses a permission.
type removal struct {
	*secureLab
	user    string
	right   right
	cut     bool // the connections break, too
	network network
	source  *kafka.Source
	end     chan removalEnd
}

type removalEnd struct {
	err   error
	after time.Duration
}

func newRemoval(t *testing.T, r right, cut bool) *removal {
	t.Helper()
	m := &removal{secureLab: newSecureLab(t), right: r, cut: cut, end: make(chan removalEnd, 1)}
	m.user = m.newUser(kafka.SASLScram256, "secret")
	m.allow(m.user, readTopic, readGroup)
	cfg := m.config(kafka.SASLScram256, m.user, "secret")
	cfg.Dial = m.network.dial
	m.source = m.mustOpen(cfg)
	m.produce(1)
	m.take(m.source, 1)
	return m
}

func (m *removal) remove() {
	m.Helper()
	m.forbid(m.user, m.right)
	if m.cut {
		m.network.cut()
	}
}

// await waits in the background until the source ends.
func (m *removal) await() {
	began := time.Now()
	go func() {
		ctx, cancel := context.WithTimeout(m.Context(), 2*time.Minute)
		defer cancel()
		_, err := m.source.Receive(ctx, 1)
		m.end <- removalEnd{err, time.Since(began)}
	}()
}
