package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/rabbitmq"
)

func (l *lab) publisher(exchange string, cfg *rabbitmq.PublisherConfig) *rabbitmq.Publisher {
	l.Helper()
	if cfg == nil {
		cfg = &rabbitmq.PublisherConfig{}
	}
	cfg.Logger = quiet()
	ctx, cancel := context.WithTimeout(l.Context(), time.Minute)
	defer cancel()
	p, err := rabbitmq.OpenPublisher(ctx, []string{l.url}, exchange, cfg)
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(l.Context()), 30*time.Second)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			l.Error(err)
		}
	})
	return p
}

// What a source hands out can be published, and comes out as it was.
func TestPublishAndReceive(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	exchange := l.queue + "-exchange"
	t.Cleanup(func() { _ = l.channel().ExchangeDelete(exchange, false, false) })
	s := l.open(&rabbitmq.Config{Declare: &rabbitmq.Declare{Exchange: exchange, BindingKeys: []string{"orders.#"}}})
	p := l.publisher(exchange, &rabbitmq.PublisherConfig{ExchangeType: "topic"})
	sent := &broker.Message{
		ID: "id-1", Key: []byte("orders.paid"), Body: []byte(`{"orderId":"A1"}`), Time: time.Now().Truncate(time.Second),
		Headers: broker.Headers{{Name: "content-type", Value: []byte("application/json")}, {Name: "trace", Value: []byte("t1")}},
	}
	if err := p.Publish(t.Context(), sent); err != nil {
		t.Fatal(err)
	}
	d := l.receive(s, 1)[0]
	first := *d.Message
	l.ack(d)
	if err := p.Publish(t.Context(), &first); err != nil {
		t.Fatal(err)
	}
	d = l.receive(s, 1)[0]
	l.ack(d)
	for _, m := range []*broker.Message{&first, d.Message} {
		text := func(m *broker.Message) string {
			return fmt.Sprintf("%s %s %s %s %q", m.ID, m.Key, m.Body, m.Time.UTC(), m.Headers)
		}
		want := *sent
		want.Headers = append(slices.Clone(sent.Headers[:1]), broker.Header{Name: "amqp-exchange", Value: []byte(exchange)}, sent.Headers[1])
		if text(m) != text(&want) {
			t.Errorf("received %s, want %s", text(m), text(&want))
		}
	}
	if err := p.Health(); err != nil {
		t.Error(err)
	}
}

// A message that no queue takes is an error, and the others are published.
func TestPublishUnroutable(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	p := l.publisher("", nil)
	message := func(key string) *broker.Message { return &broker.Message{Key: []byte(key), Body: []byte(key)} }
	err := p.Publish(t.Context(), message(l.queue), message("nobody"), message(l.queue), message(l.queue+"-not"))
	var failed *rabbitmq.PublishError
	if !errors.As(err, &failed) || !errors.Is(err, rabbitmq.ErrUnroutable) || !slices.Equal(failed.Failed, []int{1, 3}) || failed.Of != 4 {
		t.Errorf("publish: %v, want 1 and 3 to be unroutable", err)
	}
	s := l.open(nil)
	l.ack(l.receive(s, 2)...)
	l.nothing(s)
	if err := p.Publish(t.Context()); err != nil {
		t.Errorf("publish nothing: %v", err)
	}
}

func TestPublisherSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cfg := &rabbitmq.PublisherConfig{Logger: quiet()}
	if _, err := rabbitmq.OpenPublisher(ctx, []string{l.url}, l.queue+"-not", cfg); !errors.Is(err, rabbitmq.ErrNoExchange) {
		t.Errorf("unknown exchange: %v", err)
	}
	if _, err := rabbitmq.OpenPublisher(ctx, []string{l.url}, "amq.topic", &rabbitmq.PublisherConfig{Logger: quiet(), ExchangeType: "direct"}); !errors.Is(err, rabbitmq.ErrMismatch) && !errors.Is(err, rabbitmq.ErrForbidden) {
		t.Errorf("exchange of another type: %v", err)
	}
	reader := l.user("^$", "^$", ".*")
	p, err := rabbitmq.OpenPublisher(ctx, []string{reader}, "amq.topic", cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close(ctx) }()
	if err := p.Publish(ctx, &broker.Message{}); !errors.Is(err, rabbitmq.ErrForbidden) {
		t.Errorf("no permission to write: %v", err)
	}
	for _, row := range []struct {
		exchange string
		cfg      rabbitmq.PublisherConfig
		want     string
	}{
		{strings.Repeat("x", 256), rabbitmq.PublisherConfig{}, "exchange: has 256 bytes"},
		{"x", rabbitmq.PublisherConfig{DialTimeout: -1}, "DialTimeout"},
		{"x", rabbitmq.PublisherConfig{RequestTimeout: -1}, "RequestTimeout"},
		{"x", rabbitmq.PublisherConfig{PublishTimeout: -1}, "PublishTimeout"},
		{"x", rabbitmq.PublisherConfig{CloseTimeout: -1}, "CloseTimeout"},
		{"x", rabbitmq.PublisherConfig{MaxBackoff: -1}, "MaxBackoff"},
		{"x", rabbitmq.PublisherConfig{Heartbeat: time.Millisecond}, "Heartbeat"},
		{"x", rabbitmq.PublisherConfig{Heartbeat: 1500 * time.Millisecond}, "Heartbeat"},
		{"x", rabbitmq.PublisherConfig{RoutingKey: strings.Repeat("x", 256)}, "RoutingKey"},
		{"x", rabbitmq.PublisherConfig{MaxMessageBytes: -1}, "MaxMessageBytes"},
		{"x", rabbitmq.PublisherConfig{Hooks: []rabbitmq.Hook{1}}, "Hooks[0]"},
	} {
		if _, err := rabbitmq.OpenPublisher(ctx, []string{l.url}, row.exchange, &row.cfg); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%+v: %v, want %q", row.cfg, err, row.want)
		}
	}
}

// A queue that is full refuses: tried again until the time is over, or until there
// is room.
func TestPublishToAFullQueue(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", amqp.Table{"x-max-length": 1, "x-overflow": "reject-publish"})
	p := l.publisher("", &rabbitmq.PublisherConfig{RoutingKey: l.queue, MaxBackoff: 100 * time.Millisecond})
	if err := p.Publish(t.Context(), &broker.Message{Body: []byte("first")}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	err := p.Publish(ctx, &broker.Message{Body: []byte("second")})
	if !errors.Is(err, rabbitmq.ErrRefused) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("publish to a full queue: %v", err)
	}
	published := make(chan error, 1)
	go func() { published <- p.Publish(t.Context(), &broker.Message{Body: []byte("third")}) }()
	s := l.open(nil)
	l.ack(l.receive(s, 1)...)
	if err := next(l, published); err != nil {
		t.Error(err)
	}
	if got := bodies(l.receive(s, 1)); got[0] != "third" {
		t.Errorf("received %v", got)
	}
}

// Many callers publish while the network breaks again and again: nothing is lost.
func TestPublishThroughCuts(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("quorum", nil)
	n := &network{}
	p := l.publisher("", &rabbitmq.PublisherConfig{RoutingKey: l.queue, Dial: n.dial, MaxBackoff: 100 * time.Millisecond})
	const callers, calls, each = 4, 20, 5
	done := make(chan struct{})
	var working sync.WaitGroup
	for c := range callers {
		working.Go(func() {
			for i := range calls {
				var messages []*broker.Message
				for m := range each {
					messages = append(messages, &broker.Message{Body: fmt.Appendf(nil, "%d/%d/%d", c, i, m)})
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				if err := p.Publish(ctx, messages...); err != nil {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	go func() { working.Wait(); close(done) }()
	for cuts := 0; ; cuts++ {
		select {
		case <-done:
			t.Logf("%d cuts", cuts)
		case <-time.After(30 * time.Millisecond):
			if cuts < 10 {
				n.cut()
				n.restore()
			}
			continue
		}
		break
	}
	s := l.open(nil)
	seen := map[string]bool{}
	for len(seen) < callers*calls*each {
		d := l.receive(s, 1)[0]
		seen[string(d.Message.Body)] = true
		l.ack(d)
	}
}

// A connection that swallows everything does not hold up who has a deadline.
func TestPublishIntoABlackHole(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	n := &network{}
	p := l.publisher("", &rabbitmq.PublisherConfig{RoutingKey: l.queue, Dial: n.dial, Heartbeat: time.Second, MaxBackoff: 100 * time.Millisecond})
	n.blackHole()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	err := p.Publish(ctx, &broker.Message{Body: []byte("lost")})
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > 10*time.Second {
		t.Errorf("publish: %v after %v", err, time.Since(began))
	}
	// The connection is given up, and another one is made.
	if err := p.Publish(t.Context(), &broker.Message{Body: []byte("later")}); err != nil {
		t.Error(err)
	}
	s := l.open(nil)
	if got := bodies(l.receive(s, 1)); got[0] != "later" {
		t.Errorf("received %v", got)
	}
}

func TestPublisherClose(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	n := &network{}
	p := l.publisher("", &rabbitmq.PublisherConfig{RoutingKey: l.queue, Dial: n.dial})
	n.blackHole()
	published := make(chan error, 1)
	go func() { published <- p.Publish(t.Context(), &broker.Message{}) }()
	<-time.After(100 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := p.Close(ctx); !errors.Is(err, rabbitmq.ErrPublisherClosed) || ctx.Err() != nil {
		t.Errorf("close: %v; its time is over: %v", err, ctx.Err())
	}
	if err := next(l, published); !errors.Is(err, rabbitmq.ErrPublisherClosed) {
		t.Errorf("publish that was cut off: %v", err)
	}
	if err := p.Publish(t.Context(), &broker.Message{}); !errors.Is(err, rabbitmq.ErrPublisherClosed) {
		t.Errorf("publish after close: %v", err)
	}
	if err := p.Health(); !errors.Is(err, rabbitmq.ErrPublisherClosed) {
		t.Errorf("health after close: %v", err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Errorf("second close: %v", err)
	}
}

type blocks chan rabbitmq.BlockedEvent

func (b blocks) OnBlocked(_ context.Context, e rabbitmq.BlockedEvent) { b <- e }

// While the broker has an alarm, publishing does not hang, and consuming goes on.
func TestAlarm(t *testing.T) { //nolint:paralleltest // it changes the broker for a moment
	l := newLab(t).declare("classic", nil)
	l.publish(0, 3)
	blocked := make(blocks, 100)
	s := l.open(nil)
	p := l.publisher("", &rabbitmq.PublisherConfig{RoutingKey: l.queue, Hooks: []rabbitmq.Hook{blocked}})
	l.ctl("set_vm_memory_high_watermark", "absolute", "1")
	restored := false
	restore := func() {
		if !restored {
			restored = true
			l.ctl("set_vm_memory_high_watermark", "absolute", "1GB")
		}
	}
	defer restore()
	l.eventually("publishing is blocked", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		err := p.Publish(ctx, &broker.Message{Body: []byte("blocked")})
		return err != nil && errors.Is(err, context.DeadlineExceeded) && strings.Contains(err.Error(), "alarm")
	})
	if e := next(l, blocked); !e.Blocked || e.Reason == "" {
		t.Errorf("blocked %+v", e)
	}
	if err := p.Health(); err == nil || !strings.Contains(err.Error(), "alarm") {
		t.Errorf("health: %v", err)
	}
	l.ack(l.receive(s, 3)...)
	published := make(chan error, 1)
	go func() { published <- p.Publish(t.Context(), &broker.Message{Body: []byte("after")}) }()
	restore()
	if e := next(l, blocked); e.Blocked {
		t.Errorf("blocked %+v", e)
	}
	if err := next(l, published); err != nil {
		t.Error(err)
	}
	l.eventually("it is healthy", func() bool { return p.Health() == nil })
}
