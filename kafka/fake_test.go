package kafka

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/ackafter/ackafter/broker"
)

// newFake starts a fake cluster that speaks Kafka's protocol.
func newFake(t *testing.T, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1), kfake.GroupMinSessionTimeout(100 * time.Millisecond)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// producer returns a client to write with.
func producer(t *testing.T, c *kfake.Cluster, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(c.ListenAddrs()...), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.RetryTimeout(10 * time.Second),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

// produce writes records, one after the other.
func produce(t *testing.T, cl *kgo.Client, records ...*kgo.Record) {
	t.Helper()
	for _, r := range records {
		if err := cl.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

// numbered returns records "0", "1", ... for a partition, keyed by their value.
func numbered(topic string, partition int32, n int) []*kgo.Record {
	records := make([]*kgo.Record, n)
	for i := range records {
		v := []byte(fmt.Sprint(i))
		records[i] = &kgo.Record{Topic: topic, Partition: partition, Key: v, Value: v}
	}
	return records
}

// quick is a configuration that does not make a test wait.
func quick(t *testing.T) *Config {
	t.Helper()
	return &Config{
		HeartbeatInterval: 50 * time.Millisecond,
		SessionTimeout:    6 * time.Second,
		RebalanceTimeout:  6 * time.Second,
		CommitInterval:    20 * time.Millisecond,
		FetchWait:         100 * time.Millisecond,
		WatchInterval:     50 * time.Millisecond,
		MaxBackoff:        200 * time.Millisecond,
		Logger:            slog.New(slog.NewTextHandler(logTo{t}, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

// logTo writes to a test's log.
type logTo struct{ t *testing.T }

func (l logTo) Write(b []byte) (int, error) {
	l.t.Log(string(b))
	return len(b), nil
}

// openSource opens a source that is closed with the test.
func openSource(t *testing.T, c *kfake.Cluster, topics []string, cfg *Config) *Source {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, err := Open(ctx, c.ListenAddrs(), "billing", topics, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	return s
}

// receive returns exactly n deliveries.
func receive(t *testing.T, s broker.Source, n int) []*broker.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var all []*broker.Delivery
	for len(all) < n {
		ds, err := s.Receive(ctx, n-len(all))
		if err != nil {
			t.Fatalf("receive %d of %d: %v", len(all)+1, n, err)
		}
		all = append(all, ds...)
	}
	return all
}

func ack(t *testing.T, ds ...*broker.Delivery) {
	t.Helper()
	for _, d := range ds {
		if err := d.Ack(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSmoke(t *testing.T) {
	c := newFake(t, kfake.SeedTopics(2, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 5)...)
	s := openSource(t, c, []string{"orders"}, quick(t))
	ds := receive(t, s, 5)
	for _, d := range ds {
		t.Logf("%+v lane %s", d.Message, d.Lane)
	}
	ack(t, ds...)
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", c.GroupInfo("billing"))
}
