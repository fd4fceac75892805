package kafka

import (
	"context"
	"crypto/tls"
	"strings"
	"testing"
	"time"
)

func TestConfigDefaults(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]*Config{"nil": nil, "empty": {}} {
		d := c.withDefaults()
		if err := d.validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if d.ClientID != "ackafter" || d.DialTimeout != 5*time.Second || d.RequestTimeout != 10*time.Second ||
			d.CloseTimeout != 10*time.Second || d.MaxBackoff != 5*time.Second || d.HeartbeatInterval != 3*time.Second ||
			d.SessionTimeout != 30*time.Second || d.RebalanceTimeout != time.Minute || d.DrainTimeout != 30*time.Second ||
			d.CommitInterval != time.Second || d.CommitCount != 1000 || d.WatchInterval != 10*time.Second || d.LagInterval != 10*time.Second ||
			d.MaxAhead != 10_000 || d.BufferBytes != 64<<20 || d.FetchBytes != 1<<20 || d.FetchWait != time.Second ||
			d.Start != StartEarliest || d.Isolation != ReadCommitted || d.Lanes != LaneByKey || d.Framing != FramingNone || d.OnGap != GapContinue ||
			d.OnReset != ResetStop || d.Dial == nil || d.Logger == nil {
			t.Errorf("%s: a default differs from its comment: %+v", name, d)
		}
	}
	off := (&Config{DrainTimeout: -1, CommitInterval: -1, CommitCount: -1, WatchInterval: -1, LagInterval: -1, MaxAhead: -1}).withDefaults()
	if err := off.validate(); err != nil {
		t.Error(err)
	}
	if off.DrainTimeout != 0 || off.CommitInterval != 0 || off.CommitCount != 0 || off.WatchInterval != 0 || off.LagInterval != 0 || off.MaxAhead != 0 {
		t.Errorf("negative is not off: %+v", off)
	}
	if err := (&Config{DrainTimeout: 59 * time.Second}).withDefaults().validate(); err != nil {
		t.Errorf("a drain that is longer than the session: %v", err)
	}
	if d := (&Config{SessionTimeout: 9 * time.Second, RebalanceTimeout: 4 * time.Second}).withDefaults().DrainTimeout; d != 2*time.Second {
		t.Errorf("DrainTimeout is %v, want half of RebalanceTimeout", d)
	}
}

func TestConfigIsCopied(t *testing.T) {
	t.Parallel()
	c := &Config{TLS: &tls.Config{MinVersion: tls.VersionTLS13}, Hooks: []Hook{&spy{}}}
	d := c.withDefaults()
	c.TLS.ServerName = "changed"
	c.Hooks[0] = nil
	if d.TLS.ServerName != "" || d.Hooks[0] == nil {
		t.Error("the copy shares something with the original")
	}
	if c.ClientID != "" {
		t.Error("the original was changed")
	}
}

func TestConfigErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		config Config
		says   string
	}{
		{Config{DialTimeout: -1}, "DialTimeout = -1ns: must be from 10ms to 24h0m0s"},
		{Config{RequestTimeout: time.Millisecond}, "RequestTimeout = 1ms: must be from"},
		{Config{CloseTimeout: -time.Second}, "CloseTimeout = -1s: must be from"},
		{Config{MaxBackoff: time.Millisecond}, "MaxBackoff = 1ms: must be from 100ms"},
		{Config{HeartbeatInterval: -1}, "HeartbeatInterval = -1ns"},
		{Config{HeartbeatInterval: 11 * time.Second}, "HeartbeatInterval = 11s: must be at most a third of SessionTimeout (30s)"},
		{Config{SessionTimeout: -1}, "SessionTimeout = -1ns"},
		{Config{SessionTimeout: 25 * time.Hour}, "SessionTimeout = 25h0m0s"},
		{Config{RebalanceTimeout: -1}, "RebalanceTimeout = -1ns"},
		{Config{DrainTimeout: time.Minute}, "DrainTimeout = 1m0s: must be less than RebalanceTimeout (1m0s)"},
		{Config{DrainTimeout: 20 * time.Second, RebalanceTimeout: 20 * time.Second}, "DrainTimeout = 20s: must be less than RebalanceTimeout (20s)"},
		{Config{CommitInterval: 1}, "CommitInterval = 1ns"},
		{Config{WatchInterval: 1}, "WatchInterval = 1ns"},
		{Config{LagInterval: 1}, "LagInterval = 1ns: must be at least 10ms, or negative for never"},
		{Config{BufferBytes: -1}, "BufferBytes = -1: must not be negative: memory has to be bounded"},
		{Config{FetchBytes: -1}, "FetchBytes = -1: must be from 16384"},
		{Config{FetchBytes: 1 << 30}, "FetchBytes = 1073741824"},
		{Config{FetchWait: -1}, "FetchWait = -1ns"},
		{Config{Start: 2}, "Start = 2: is not one of StartEarliest, StartLatest"},
		{Config{Isolation: -1}, "Isolation = -1: is not one of"},
		{Config{Lanes: 9}, "Lanes = 9: is not one of"},
		{Config{Framing: -1}, "Framing = -1: is not one of FramingNone, FramingConfluent, FramingConfluentProtobuf"},
		{Config{Framing: 3}, "Framing = 3: is not one of"},
		{Config{OnGap: 9}, "OnGap = 9: is not one of"},
		{Config{OnReset: 9}, "OnReset = 9: is not one of"},
		{Config{Hooks: []Hook{&spy{}, 7}}, "Hooks[1] = int: implements none of the On... interfaces"},
		{Config{SASL: &SASL{Mechanism: "GSSAPI"}}, `SASL.Mechanism = "GSSAPI": is not one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512`},
		{Config{SASL: &SASL{Mechanism: SASLPlain}}, "SASL.Credentials = <nil>: must be set"},
	} {
		_, err := Open(t.Context(), []string{"127.0.0.1:1"}, "billing", []string{"orders"}, &tc.config)
		if err == nil || !strings.HasPrefix(err.Error(), "kafka: config: ") || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("got %v, want %q", err, tc.says)
		}
	}
}

func TestOpenArguments(t *testing.T) {
	t.Parallel()
	ok, orders := []string{"127.0.0.1:9092"}, []string{"orders"}
	for _, tc := range []struct {
		brokers []string
		group   string
		topics  []string
		says    string
	}{
		{nil, "g", orders, "brokers: there must be at least one"},
		{[]string{"a:1", " "}, "g", orders, `brokers[1] is " ": must not be blank`},
		{[]string{"a:1,b:2"}, "g", orders, "must be one address, host:port"},
		{[]string{"kafka://a:1"}, "g", orders, "must be one address, host:port"},
		{[]string{"a:"}, "g", orders, "must be one address, host:port"},
		{[]string{":9092"}, "g", orders, "must be one address, host:port"},
		{[]string{"a:99999"}, "g", orders, "must be one address, host:port"},
		{[]string{"a:x"}, "g", orders, "must be one address, host:port"},
		{ok, "", orders, "group: must not be empty"},
		{ok, "  ", orders, "group: must not be empty"},
		{ok, strings.Repeat("g", 40_000), orders, "group: has 40000 bytes"},
		{ok, "g", nil, "topics: there must be at least one"},
		{ok, "g", []string{"a", ""}, `topics[1] is "": must not be blank`},
		{ok, "g", []string{"a", "b", "a"}, `topics[2] is "a": is there twice`},
		{ok, "g", []string{"a b"}, "must be of letters, digits"},
		{ok, "g", []string{"a/b"}, "must be of letters, digits"},
		{ok, "g", []string{".."}, "must be of letters, digits"},
		{ok, "g", []string{strings.Repeat("t", 250)}, "has 250 bytes"},
	} {
		_, err := Open(t.Context(), tc.brokers, tc.group, tc.topics, nil)
		if err == nil || !strings.HasPrefix(err.Error(), "kafka: open: ") || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("Open(%q, %.10q, %.20q): got %v, want %q", tc.brokers, tc.group, tc.topics, err, tc.says)
		}
	}
	got, err := validateBrokers([]string{"kafka", "kafka:9093", "::1", "[::1]", "[::1]:9094", "10.0.0.1"})
	want := "kafka:9092 kafka:9093 [::1]:9092 [::1]:9092 [::1]:9094 10.0.0.1:9092"
	if err != nil || strings.Join(got, " ") != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

// The password that counts is the one of the moment.
func TestCredentialsAreAskedAgain(t *testing.T) {
	t.Parallel()
	asked := 0
	s := &SASL{Mechanism: SASLScram256, Credentials: func(context.Context) (string, string, error) {
		asked++
		return "user", strings.Repeat("p", asked/2+1), nil // changes with every other time
	}}
	m := s.mechanism().(*freshMechanism)
	for range 4 {
		if _, _, err := m.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if asked != 4 || m.password != "ppp" {
		t.Errorf("asked %d times, last password %q", asked, m.password)
	}
	if _, _, err := (&SASL{Mechanism: SASLPlain, Credentials: StaticCredentials("", "")}).mechanism().Start(t.Context()); err == nil {
		t.Error("no error for an empty user")
	}
	if (*SASL)(nil).mechanism() != nil {
		t.Error("no SASL gives a mechanism")
	}
}

func TestTopicIDs(t *testing.T) {
	t.Parallel()
	ids := newTopicIDs()
	if ids.see("orders", [16]byte{}) || ids.note("orders") != "" {
		t.Error("no id is an id")
	}
	if ids.see("orders", [16]byte{1}) {
		t.Error("the first id is a re-creation")
	}
	first := ids.note("orders")
	if got := ids.owner("orders", first); got != ours {
		t.Errorf("own note: %v", got)
	}
	for _, note := range []string{"", "somebody's", "topic-id=xx", "topic-id=00"} {
		if got := ids.owner("orders", note); got != unknown {
			t.Errorf("note %q: %v", note, got)
		}
	}
	if got := ids.owner("refunds", first); got != unknown {
		t.Errorf("topic without an id: %v", got)
	}
	if !ids.see("orders", [16]byte{2}) {
		t.Error("another id is no re-creation")
	}
	if ids.see("orders", [16]byte{1}) || ids.see("orders", [16]byte{2}) {
		t.Error("a broker that lags behind makes a re-creation")
	}
	if got := ids.owner("orders", first); got != theirs {
		t.Errorf("note of the topic that is gone: %v", got)
	}
}

// spy collects events.
type spy struct {
	assigned   chan AssignedEvent
	revoked    chan RevokedEvent
	gaps       chan GapError
	resets     chan ResetError
	stale      chan StaleAckEvent
	commits    chan CommitErrorEvent
	pauses     chan PauseEvent
	reconnects chan ReconnectEvent
	back       chan ReconnectedEvent
	lags       chan LagEvent
}

func newSpy() *spy {
	const many = 10_000
	return &spy{
		make(chan AssignedEvent, many), make(chan RevokedEvent, many), make(chan GapError, many), make(chan ResetError, many),
		make(chan StaleAckEvent, many), make(chan CommitErrorEvent, many), make(chan PauseEvent, many), make(chan ReconnectEvent, many),
		make(chan ReconnectedEvent, many), make(chan LagEvent, 10*many),
	}
}

func (s *spy) OnAssigned(_ context.Context, e AssignedEvent)       { s.assigned <- e }
func (s *spy) OnRevoked(_ context.Context, e RevokedEvent)         { s.revoked <- e }
func (s *spy) OnGap(_ context.Context, e GapError)                 { s.gaps <- e }
func (s *spy) OnReset(_ context.Context, e ResetError)             { s.resets <- e }
func (s *spy) OnStaleAck(_ context.Context, e StaleAckEvent)       { s.stale <- e }
func (s *spy) OnCommitError(_ context.Context, e CommitErrorEvent) { s.commits <- e }
func (s *spy) OnPause(_ context.Context, e PauseEvent)             { s.pauses <- e }
func (s *spy) OnReconnect(_ context.Context, e ReconnectEvent)     { s.reconnects <- e }

func (s *spy) OnReconnected(_ context.Context, e ReconnectedEvent) { s.back <- e }
func (s *spy) OnLag(_ context.Context, e LagEvent)                 { s.lags <- e }

// await returns the next event.
func await[E any](t *testing.T, events <-chan E) E {
	t.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(20 * time.Second):
		t.Fatalf("no %T within 20 s", *new(E))
		panic("unreachable")
	}
}
