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
	t.Cleanup(func() { _ = s.Close(context.WithoutCancel(t.Context())) })
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

// values returns the bodies.
func values(ds []*broker.Delivery) []string {
	var vs []string
	for _, d := range ds {
		vs = append(vs, string(d.Message.Body))
	}
	return vs
}

// committed returns the group's offset; -1 when there is none.
func committed(c *kfake.Cluster, topic string, partition int32) int64 {
	if info := c.GroupInfo("billing"); info != nil {
		if o, ok := info.Commits[topic][partition]; ok {
			return o.Offset
		}
	}
	return -1
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !holds(); {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
		<-time.After(5 * time.Millisecond)
	}
}

// awaitCommitted waits until the group's offset is as wanted.
func awaitCommitted(t *testing.T, c *kfake.Cluster, topic string, partition int32, want int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s/%d is committed up to %d", topic, partition, want), func() bool {
		return committed(c, topic, partition) == want
	})
}

// receiveNothing makes sure that nothing comes for a while.
func receiveNothing(t *testing.T, s broker.Source) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if ds, err := s.Receive(ctx, 10); err == nil {
		t.Fatalf("got %q, want nothing", values(ds))
	}
}
