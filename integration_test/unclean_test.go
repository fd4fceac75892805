package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
)

type resetEvents chan kafka.ResetError

func (c resetEvents) OnReset(_ context.Context, e kafka.ResetError) { c <- e }

// case K5: a follower that lags behind is elected as the leader, uncleanly, and
// new records take the places of those that only the old leader had. The log has
// grown beyond the group's offset again before anybody looks: the offsets do not
// show it. It is noticed, and none of the new records is skipped.
func TestUncleanElection(t *testing.T) { //nolint:paralleltest // It breaks the cluster, and the machine is small.
	cluster := servers.Kafka3(t)
	tp := newTopicOf(t, cluster.Brokers, kafkago.TopicConfig{
		// Broker 3 is there for the controllers' majority only.
		NumPartitions: -1, ReplicationFactor: -1,
		ReplicaAssignments: []kafkago.ReplicaAssignment{{Partition: 0, Replicas: []int{1, 2}}},
		ConfigEntries: []kafkago.ConfigEntry{
			{ConfigName: "unclean.leader.election.enable", ConfigValue: "true"}, {ConfigName: "min.insync.replicas", ConfigValue: "1"},
		},
	})
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	publish := func(from, n int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		p, err := kafka.OpenPublisher(ctx, cluster.Brokers, tp.name, &kafka.PublisherConfig{PublishTimeout: time.Minute, Logger: log})
		if err != nil {
			t.Fatal(err)
		}
		var messages []*broker.Message
		for i := range n {
			messages = append(messages, &broker.Message{Key: []byte("k"), Body: fmt.Append(nil, from+i)})
		}
		if err = p.Publish(ctx, messages...); err != nil {
			t.Fatal(err)
		}
		if err := p.Close(ctx); err != nil {
			t.Fatal(err)
		}
	}
	events := make(resetEvents, 10)
	src, err := kafka.Open(t.Context(), cluster.Brokers, tp.name, []string{tp.name}, &kafka.Config{
		OnReset: kafka.ResetRestart, CommitInterval: 50 * time.Millisecond, Hooks: []kafka.Hook{events}, Logger: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = src.Close(context.WithoutCancel(t.Context())) }()
	seen := make(map[string]bool)
	receive := func(n int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		for len(seen) < n {
			ds, err := src.Receive(ctx, 100)
			if err != nil {
				t.Fatalf("%d of %d messages: %v", len(seen), n, err)
			}
			for _, d := range ds {
				if err := d.Ack(ctx); err == nil {
					seen[string(d.Message.Body)] = true
				} else if !errors.Is(err, broker.ErrLost) {
					t.Fatal(err)
				}
			}
		}
	}
	publish(0, 5)
	receive(5)
	cluster.Stop(t, 2)
	publish(5, 5) // only broker 1 has these
	receive(10)
	eventually(t, time.Minute, "all is committed", func() bool { return tp.lag(tp.name) == 0 })
	cluster.Kill(t, 1)
	cluster.Start(t, 2)
	publish(100, 10) // the offsets 5 to 14

	select {
	case e := <-events:
		if e.Reason != kafka.ResetCut || e.Offset != 10 || e.End != 5 {
			t.Errorf("event is %+v, want that the log was cut back from 10 to 5", e)
		}
	case <-time.After(2 * time.Minute):
		t.Error("nothing was noticed within 2 minutes")
	}
	receive(20)
	eventually(t, time.Minute, "lag 0", func() bool { return tp.lag(tp.name) == 0 })
	if len(events) > 0 {
		t.Errorf("another event: %+v", <-events)
	}
}
