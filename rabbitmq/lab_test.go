package rabbitmq_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/rabbitmq"
)

// unavailable ends a test that cannot have what it needs.
func unavailable(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("ACKAFTER_TEST_REQUIRE") == "1" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// lab is a queue of its own on a real server, with a client to arrange things that
// is not ours.
type lab struct {
	testing.TB
	url        string
	management string // its API; needed by some
	queue      string
	ch         *amqp.Channel
}

var labs atomic.Int64

func newLab(t testing.TB) *lab {
	t.Helper()
	address := os.Getenv("ACKAFTER_TEST_RABBITMQ")
	if address == "" {
		unavailable(t, "ACKAFTER_TEST_RABBITMQ is not set")
	}
	l := &lab{TB: t, url: address, management: os.Getenv("ACKAFTER_TEST_RABBITMQ_MANAGEMENT")}
	l.queue = fmt.Sprintf("ackafter-lab-%d-%d", time.Now().UnixNano(), labs.Add(1))
	l.ch = l.channel()
	t.Cleanup(func() {
		if _, err := l.channel().QueueDelete(l.queue, false, false, false); err != nil {
			t.Log(err)
		}
	})
	return l
}

// channel opens one with confirms.
func (l *lab) channel() *amqp.Channel {
	l.Helper()
	conn, err := amqp.DialConfig(l.url, amqp.Config{Dial: amqp.DefaultDial(20 * time.Second)})
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err == nil {
		err = ch.Confirm(false)
	}
	if err != nil {
		l.Fatal(err)
	}
	return ch
}

func (l *lab) declare(kind string, arguments amqp.Table) *lab {
	l.Helper()
	all := amqp.Table{"x-queue-type": kind}
	for k, v := range arguments {
		all[k] = v
	}
	if _, err := l.ch.QueueDeclare(l.queue, true, false, false, false, all); err != nil {
		l.Fatal(err)
	}
	return l
}

// publish sends bodies "m0" to "m(n-1)" to the queue, numbered from first.
func (l *lab) publish(first, n int) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), time.Minute)
	defer cancel()
	var confirms []*amqp.DeferredConfirmation
	for i := range n {
		c, err := l.ch.PublishWithDeferredConfirmWithContext(ctx, "", l.queue, true, false,
			amqp.Publishing{Body: fmt.Appendf(nil, "m%d", first+i), DeliveryMode: amqp.Persistent})
		if err != nil {
			l.Fatal(err)
		}
		confirms = append(confirms, c)
	}
	for _, c := range confirms {
		if ok, err := c.WaitContext(ctx); !ok {
			l.Fatalf("not confirmed: %v", err)
		}
	}
}

// ready is how many messages wait in the queue and are with nobody.
func (l *lab) ready() int {
	l.Helper()
	q, err := l.ch.QueueDeclarePassive(l.queue, true, false, false, false, nil)
	if err != nil {
		l.Fatal(err)
	}
	return q.Messages
}

// eventually polls.
func (l *lab) eventually(what string, f func() bool) {
	l.Helper()
	deadline := time.Now().Add(time.Minute)
	for !f() {
		if time.Now().After(deadline) {
			l.Fatalf("not within a minute: %s", what)
		}
		<-time.After(20 * time.Millisecond)
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// open opens a source that is closed at the end.
func (l *lab) open(cfg *rabbitmq.Config) *rabbitmq.Source {
	l.Helper()
	if cfg == nil {
		cfg = &rabbitmq.Config{}
	}
	if cfg.Logger == nil {
		cfg.Logger = quiet()
	}
	ctx, cancel := context.WithTimeout(l.Context(), time.Minute)
	defer cancel()
	s, err := rabbitmq.Open(ctx, []string{l.url}, l.queue, cfg)
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { l.close(s) })
	return s
}

func (l *lab) close(s *rabbitmq.Source) {
	l.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.Context()), 30*time.Second)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		l.Logf("close: %v", err)
	}
}

// receive takes exactly n deliveries.
func (l *lab) receive(s *rabbitmq.Source, n int) []*broker.Delivery {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), time.Minute)
	defer cancel()
	var got []*broker.Delivery
	for len(got) < n {
		ds, err := s.Receive(ctx, n-len(got))
		if err != nil {
			l.Fatalf("receive: %v; got only %v", err, bodies(got))
		}
		got = append(got, ds...)
	}
	return got
}

// nothing checks that nothing comes for a while.
func (l *lab) nothing(s *rabbitmq.Source) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), 500*time.Millisecond)
	defer cancel()
	if ds, err := s.Receive(ctx, 100); !errors.Is(err, context.DeadlineExceeded) {
		l.Errorf("received %v, %v; want nothing", bodies(ds), err)
	}
}

func (l *lab) ack(ds ...*broker.Delivery) {
	l.Helper()
	for _, d := range ds {
		if err := d.Ack(l.Context()); err != nil {
			l.Fatal(err)
		}
	}
}

func bodies(ds []*broker.Delivery) []string {
	var names []string
	for _, d := range ds {
		names = append(names, string(d.Message.Body))
	}
	return names
}

// api calls the management API.
func (l *lab) api(method, path string, body, answer any) {
	l.Helper()
	if l.management == "" {
		unavailable(l, "ACKAFTER_TEST_RABBITMQ_MANAGEMENT is not set")
	}
	text, err := json.Marshal(body)
	if err != nil {
		l.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.Context()), time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, l.management+"/api/"+path, bytes.NewReader(text))
	if err != nil {
		l.Fatal(err)
	}
	request.Close = true
	request.Header.Set("Content-Type", "application/json")
	response, err := (&http.Client{Timeout: time.Minute}).Do(request)
	if err != nil {
		l.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode >= 300 {
		l.Fatalf("%s %s: %s: %s (%v)", method, path, response.Status, content, err)
	}
	if answer != nil {
		if err := json.Unmarshal(content, answer); err != nil {
			l.Fatal(err)
		}
	}
}

// user makes a user who may do what the patterns say on the default virtual host,
// and returns an address with that login.
func (l *lab) user(configure, write, read string) string {
	l.Helper()
	name := l.queue + "-user"
	l.api(http.MethodPut, "users/"+name, map[string]string{"password": "p@ss/word", "tags": ""}, nil)
	l.Cleanup(func() { l.api(http.MethodDelete, "users/"+name, nil, nil) })
	l.api(http.MethodPut, "permissions/%2F/"+name, map[string]string{"configure": configure, "write": write, "read": read}, nil)
	u, err := url.Parse(l.url)
	if err != nil {
		l.Fatal(err)
	}
	u.User = url.UserPassword(name, "p@ss/word")
	return u.String()
}

// closeConnections lets the broker close the connections of a client.
func (l *lab) closeConnections(clientID string) {
	l.Helper()
	closed := 0
	l.eventually("the connection is listed", func() bool {
		var connections []struct {
			Name       string                           `json:"name"`
			Properties struct{ Connection_name string } `json:"client_properties"` //nolint:revive // as it is called
		}
		l.api(http.MethodGet, "connections", nil, &connections)
		for _, c := range connections {
			if c.Properties.Connection_name == clientID {
				l.api(http.MethodDelete, "connections/"+url.PathEscape(c.Name), nil, nil)
				closed++
			}
		}
		return closed > 0
	})
}

// ctl runs rabbitmqctl on the server, if it is the one of the service script.
func (l *lab) ctl(arguments ...string) {
	l.Helper()
	script, err := filepath.Abs("../integration_test/services/rabbitmq")
	if err != nil {
		l.Fatal(err)
	}
	run := func(arguments ...string) string {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(l.Context()), time.Minute)
		defer cancel()
		out, err := exec.CommandContext(ctx, script, arguments...).Output()
		if err != nil {
			unavailable(l, fmt.Sprintf("rabbitmqctl cannot be used: %v", err))
		}
		return string(out)
	}
	if !strings.Contains(run("env"), "'"+l.url+"'") {
		unavailable(l, "the server is not the one of integration_test/services: rabbitmqctl cannot be used")
	}
	run(append([]string{"ctl"}, arguments...)...)
}

// network is a way to the server that can be cut and swallow everything.
type network struct {
	mu    sync.Mutex
	isCut bool
	conns []*wire
}

func (n *network) dial(ctx context.Context, kind, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, kind, address)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.isCut {
		_ = conn.Close()
		return nil, errors.New("the network is cut")
	}
	w := &wire{Conn: conn, network: n}
	n.conns = append(n.conns, w)
	return w, nil
}

// cut breaks all connections, and lets none be made until restore.
func (n *network) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.isCut = true
	n.breakAll()
}

func (n *network) breakAll() {
	for _, w := range n.conns {
		_ = w.Conn.Close()
	}
	n.conns = nil
}

// blackHole swallows everything on the connections that there are.
func (n *network) blackHole() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, w := range n.conns {
		w.dark.Store(true)
	}
	n.conns = nil
}

func (n *network) restore() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.isCut = false
}

// wire is one connection.
type wire struct {
	net.Conn
	network *network
	dark    atomic.Bool
}

func (w *wire) Write(b []byte) (int, error) {
	if w.dark.Load() {
		return len(b), nil
	}
	return w.Conn.Write(b)
}

func (w *wire) Read(b []byte) (int, error) {
	for {
		n, err := w.Conn.Read(b)
		if err != nil || !w.dark.Load() {
			return n, err
		}
	}
}

// events are hooks.
type events struct {
	consuming chan rabbitmq.ConsumingEvent
	ended     chan rabbitmq.EndedEvent
	stale     chan rabbitmq.StaleAckEvent
	recall    chan rabbitmq.RecallEvent
	pause     chan rabbitmq.PauseEvent
	deleted   chan rabbitmq.QueueDeletedEvent
	failed    chan rabbitmq.ReconnectEvent
}

func newEvents() *events {
	const many = 1000
	return &events{
		make(chan rabbitmq.ConsumingEvent, many), make(chan rabbitmq.EndedEvent, many), make(chan rabbitmq.StaleAckEvent, many),
		make(chan rabbitmq.RecallEvent, many), make(chan rabbitmq.PauseEvent, many), make(chan rabbitmq.QueueDeletedEvent, many),
		make(chan rabbitmq.ReconnectEvent, many),
	}
}

func (e *events) OnConsuming(_ context.Context, v rabbitmq.ConsumingEvent)       { e.consuming <- v }
func (e *events) OnEnded(_ context.Context, v rabbitmq.EndedEvent)               { e.ended <- v }
func (e *events) OnStaleAck(_ context.Context, v rabbitmq.StaleAckEvent)         { e.stale <- v }
func (e *events) OnRecall(_ context.Context, v rabbitmq.RecallEvent)             { e.recall <- v }
func (e *events) OnPause(_ context.Context, v rabbitmq.PauseEvent)               { e.pause <- v }
func (e *events) OnQueueDeleted(_ context.Context, v rabbitmq.QueueDeletedEvent) { e.deleted <- v }
func (e *events) OnReconnect(_ context.Context, v rabbitmq.ReconnectEvent)       { e.failed <- v }

// next waits for an event.
func next[E any](l *lab, events <-chan E) E {
	l.Helper()
	select {
	case e := <-events:
		return e
	case <-time.After(time.Minute):
		var none E
		l.Fatalf("no %T within a minute", none)
		return none
	}
}
