package kafka

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/brokertest"
)

// TestConformance checks the rules that hold for every source.
func TestConformance(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.NumBrokers(3))
	cl, err := kgo.NewClient(kgo.SeedBrokers(c.ListenAddrs()...), kgo.RetryTimeout(10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	q := &conformance{cluster: c, client: cl}
	brokertest.Run(t, brokertest.Harness{
		Setup: q.setup,
		// A log with one committed offset cannot leave out an earlier message, and
		// Kafka does not count deliveries.
		Without: []brokertest.Feature{brokertest.SelectiveAck, brokertest.Attempts},
		Timing:  brokertest.Timing{Idle: 4 * time.Second},
	})
}

type conformance struct {
	cluster *kfake.Cluster
	client  *kgo.Client
	topics  atomic.Int32
}

func (q *conformance) setup(t testing.TB) brokertest.Queue {
	topic := fmt.Sprintf("topic-%d", q.topics.Add(1))
	group := "group-of-" + topic
	if err := q.cluster.CreateTopic(topic, 3, nil); err != nil {
		t.Fatal(err)
	}
	network := &cuttable{}
	rebalance := func(context.Context, broker.Source) error {
		q.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Heartbeat}, Group: group, Err: kerr.RebalanceInProgress})
		return nil
	}
	return brokertest.Queue{
		Open: func(ctx context.Context) (broker.Source, error) {
			return Open(ctx, q.cluster.ListenAddrs(), group, []string{topic}, &Config{
				HeartbeatInterval: 100 * time.Millisecond,
				SessionTimeout:    2 * time.Second,
				RebalanceTimeout:  4 * time.Second,
				DrainTimeout:      1500 * time.Millisecond,
				CommitInterval:    20 * time.Millisecond,
				MaxBackoff:        200 * time.Millisecond,
				DialTimeout:       time.Second,
				RequestTimeout:    time.Second,
				Dial:              network.dial,
				Logger:            slog.New(slog.DiscardHandler),
			})
		},
		Publish: func(ctx context.Context, messages ...*broker.Message) error {
			for _, m := range messages {
				r := &kgo.Record{Topic: topic, Key: m.Key, Value: m.Body, Timestamp: m.Time}
				for _, h := range m.Headers {
					r.Headers = append(r.Headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
				}
				if err := q.client.ProduceSync(ctx, r).FirstErr(); err != nil {
					return err
				}
			}
			return nil
		},
		Lose:   rebalance,
		Recall: rebalance,
		Crash: func(_ context.Context, source broker.Source) error {
			crash(source.(*Source))
			return nil
		},
		Cut: func(context.Context) (func() error, error) {
			network.cut()
			return network.restore, nil
		},
		Committed: func(context.Context) (map[string]int64, error) {
			offsets := make(map[string]int64)
			if info := q.cluster.GroupInfo(group); info != nil {
				for id, c := range info.Commits[topic] {
					offsets["kafka:"+partitionLane(topic, id)] = c.Offset
				}
			}
			return offsets, nil
		},
	}
}

// crash ends what a source does as the end of its process would: nothing more
// is sent.
func crash(s *Source) {
	s.groupDialer.Shut()
	s.dialer.Shut()
}

// cuttable is a network that can be cut.
type cuttable struct {
	mu    sync.Mutex
	isCut bool
	conns map[net.Conn]struct{}
}

var errCut = errors.New("the network is cut")

func (c *cuttable) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isCut {
		return nil, errCut
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err == nil {
		if c.conns == nil {
			c.conns = make(map[net.Conn]struct{})
		}
		c.conns[conn] = struct{}{}
	}
	return conn, err
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
