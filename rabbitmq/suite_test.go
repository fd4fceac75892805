package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/brokertest"
)

// serverURL returns the address of a real server, from ACKAFTER_TEST_RABBITMQ;
// without it the test is skipped, or fails if ACKAFTER_TEST_REQUIRE is 1.
func serverURL(t testing.TB) string {
	t.Helper()
	address := os.Getenv("ACKAFTER_TEST_RABBITMQ")
	if address == "" {
		if os.Getenv("ACKAFTER_TEST_REQUIRE") == "1" {
			t.Fatal("ACKAFTER_TEST_RABBITMQ is not set")
		}
		t.Skip("ACKAFTER_TEST_RABBITMQ is not set")
	}
	return address
}

// The rules that no queue of RabbitMQ can keep: a routing key has at most 255 bytes
// and is never nil, a body neither; header names are unique.
var withoutInGeneral = []brokertest.Feature{
	brokertest.Keys, brokertest.NilKey, brokertest.NilBody, brokertest.RepeatedHeaders,
}

// TestConformance checks the rules that hold for every source.
func TestConformance(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		declare Declare
		cfg     Config
		without []brokertest.Feature
	}{
		{"classic", Declare{Type: QueueClassic}, Config{}, []brokertest.Feature{brokertest.Lanes, brokertest.Attempts, brokertest.Positions, brokertest.Committed}},
		// What comes again here, without the broker's help, it does not count.
		{"quorum", Declare{}, Config{}, []brokertest.Feature{brokertest.Lanes, brokertest.Attempts, brokertest.Positions, brokertest.Committed}},
		{"quorum in one lane", Declare{SingleActiveConsumer: true}, Config{Lanes: LaneQueue}, []brokertest.Feature{brokertest.Attempts, brokertest.Positions, brokertest.Committed}},
		{"classic by header", Declare{Type: QueueClassic, SingleActiveConsumer: true}, Config{Lanes: LaneByHeader("lane")}, []brokertest.Feature{brokertest.Attempts, brokertest.Positions, brokertest.Committed}},
		{"stream", Declare{Type: QueueStream}, Config{Stream: &Stream{}, Lanes: LaneByRoutingKey}, []brokertest.Feature{
			brokertest.Attempts, brokertest.SelectiveAck, brokertest.Competing,
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			q := &conformance{url: serverURL(t), declare: row.declare, cfg: row.cfg}
			without := append(row.without, withoutInGeneral...)
			if row.cfg.Lanes == LaneQueue {
				// There is one lane, so a delayed message holds up all.
				without = append(without, brokertest.NackDelay)
			}
			brokertest.Run(t, brokertest.Harness{
				Setup: q.setup, Without: without,
				Timing: brokertest.Timing{Idle: 2 * time.Second, Quiet: 300 * time.Millisecond, Wait: 60 * time.Second, Prompt: 10 * time.Second},
			})
		})
	}
}

type conformance struct {
	url     string
	declare Declare
	cfg     Config
}

var queues atomic.Int64

// newName returns a name for a queue that nothing else uses.
func newName(what string) string {
	return fmt.Sprintf("ackafter-%s-%d-%d", what, time.Now().UnixNano(), queues.Add(1))
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// client is one that is not ours.
func client(t testing.TB, address string) *amqp.Channel {
	t.Helper()
	conn, err := amqp.DialConfig(address, amqp.Config{Dial: amqp.DefaultDial(20 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

func (q *conformance) setup(t testing.TB) brokertest.Queue {
	name := newName("rule")
	ch := client(t, q.url)
	d := q.declare
	d.Exchange, d.ExchangeType, d.BindingKeys = name, "topic", []string{"#"}
	if err := declare(ch, name, d.clone()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = ch.QueueDelete(name, false, false, false)
		_ = ch.ExchangeDelete(name, false, false)
	})
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	network := &cuttable{}
	var mu sync.Mutex
	var last *Source // of a stream: who goes on keeps the position
	return brokertest.Queue{
		Open: func(ctx context.Context) (broker.Source, error) {
			cfg := q.cfg
			cfg.Declare = &d
			cfg.MaxBackoff, cfg.DialTimeout, cfg.RequestTimeout = 200*time.Millisecond, 20*time.Second, 20*time.Second
			cfg.Dial, cfg.Logger = network.dial, quiet()
			cfg.lookEvery = 50 * time.Millisecond
			mu.Lock()
			defer mu.Unlock()
			if last != nil && cfg.Stream != nil {
				if offset, known := last.Position(); known {
					cfg.Stream = &Stream{Start: StreamOffset, Offset: offset}
				}
			}
			s, err := Open(ctx, []string{q.url}, name, &cfg)
			if err != nil {
				return nil, err
			}
			last = s
			return s, nil
		},
		Publish: func(ctx context.Context, messages ...*broker.Message) error {
			for _, m := range messages {
				p := amqp.Publishing{Body: m.Body, Timestamp: m.Time, DeliveryMode: amqp.Persistent, Headers: amqp.Table{"lane": string(m.Key)}}
				for _, h := range m.Headers {
					p.Headers[h.Name] = string(h.Value)
				}
				confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, name, string(m.Key), true, false, p)
				if err != nil {
					return err
				}
				if ok, err := confirm.WaitContext(ctx); !ok {
					return fmt.Errorf("not confirmed: %w", err)
				}
			}
			return nil
		},
		Lose: func(_ context.Context, source broker.Source) error {
			crash(source.(*Source))
			return nil
		},
		Recall: func(_ context.Context, source broker.Source) error {
			return recall(source.(*Source))
		},
		Crash: func(_ context.Context, source broker.Source) error {
			s := source.(*Source)
			crash(s)
			s.cancel() // it does not connect again
			return nil
		},
		Cut: func(context.Context) (func() error, error) {
			network.cut()
			return network.restore, nil
		},
		Committed: func(context.Context) (map[string]int64, error) {
			mu.Lock()
			defer mu.Unlock()
			offsets := make(map[string]int64)
			if offset, known := last.Position(); known {
				offsets["rabbitmq:"+name] = offset
			}
			return offsets, nil
		},
	}
}

func (s *Source) current() *epoch {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.epoch
}

// crash breaks the connection, as the end of the process would.
func crash(s *Source) {
	if e := s.current(); e != nil {
		_ = e.conn.raw.Close()
	}
}

// recall makes everything look old.
func recall(s *Source) error {
	e := s.current()
	if e == nil {
		return errors.New("there is no epoch")
	}
	e.ledger.mu.Lock()
	defer e.ledger.mu.Unlock()
	for _, t := range e.ledger.tags.open() {
		if t.entry != nil {
			t.entry.pushed = t.entry.pushed.Add(-e.ledger.limit)
		}
	}
	return nil
}

// cuttable is a network that can be cut.
type cuttable struct {
	mu    sync.Mutex
	isCut bool
	conns map[net.Conn]struct{}
}

var errCut = errors.New("the network is cut")

func (c *cuttable) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isCut {
		_ = conn.Close()
		return nil, errCut
	}
	if c.conns == nil {
		c.conns = make(map[net.Conn]struct{})
	}
	c.conns[conn] = struct{}{}
	return conn, nil
}

func (c *cuttable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isCut = true
	for conn := range c.conns {
		_ = conn.Close()
	}
	c.conns = nil
}

func (c *cuttable) restore() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isCut = false
	return nil
}
