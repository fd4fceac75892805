package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
)

// Publishers on a cluster whose brokers are killed, stopped and restarted: every
// call ends in success, what was confirmed is there, and each key's messages are
// in their order. Doubles are allowed.
func TestPublisherBrokerFaults(t *testing.T) { //nolint:paralleltest // It breaks the cluster, and the machine is small.
	const workers = 4
	cluster := servers.Kafka3(t)
	tp := newCopiedTopic(t, cluster.Brokers, 3, 3)
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	p, err := kafka.OpenPublisher(t.Context(), cluster.Brokers, tp.name, &kafka.PublisherConfig{PublishTimeout: 3 * time.Minute, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var published [workers]atomic.Int64
	var running sync.WaitGroup
	for w := range workers {
		running.Go(func() {
			for n := int64(0); !stop.Load(); n += 3 {
				var messages []*broker.Message
				for i := range int64(3) {
					messages = append(messages, &broker.Message{Key: fmt.Append(nil, w), Body: fmt.Append(nil, n+i)})
				}
				if err := p.Publish(t.Context(), messages...); err != nil {
					t.Error(err)
				}
				published[w].Add(3)
			}
		})
	}
	total := func() (n int64) {
		for w := range workers {
			n += published[w].Load()
		}
		return n
	}
	goesOn := func(what string) {
		t.Helper()
		began := time.Now()
		var before [workers]int64
		for w := range workers {
			before[w] = published[w].Load()
		}
		eventually(t, 2*time.Minute, "all publish again after "+what, func() bool {
			for w := range workers {
				if published[w].Load() < before[w]+30 {
					return false
				}
			}
			return true
		})
		t.Logf("%s: publishing again after %v, %d so far", what, time.Since(began).Round(10*time.Millisecond), total())
	}
	goesOn("the start")
	for id := 1; id <= 3; id++ {
		cluster.Kill(t, id)
		goesOn(fmt.Sprint("broker ", id, " was killed"))
		cluster.Start(t, id)
		goesOn(fmt.Sprint("broker ", id, " is back"))
	}
	cluster.Stop(t, 1, 2, 3)
	<-time.After(10 * time.Second) // This is how long the fault lasts.
	cluster.Start(t, 1, 2, 3)
	goesOn("all were stopped")
	stop.Store(true)
	running.Wait()
	if err := p.Close(t.Context()); err != nil {
		t.Error(err)
	}

	src, err := kafka.Open(t.Context(), cluster.Brokers, tp.name, []string{tp.name}, &kafka.Config{Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = src.Close(context.WithoutCancel(t.Context())) }()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var next [workers]int64
	var doubles, seen int64
	for want := total(); seen < want; {
		ds, err := src.Receive(ctx, 500)
		if err != nil {
			t.Fatalf("%d of %d messages are there: %v", seen, want, err)
		}
		for _, d := range ds {
			var w int
			var n int64
			if _, err := fmt.Sscan(string(d.Message.Key)+" "+string(d.Message.Body), &w, &n); err != nil {
				t.Fatal(err)
			}
			switch {
			case n < next[w]:
				doubles++
			case n > next[w]:
				t.Fatalf("key %d: message %d comes before %d", w, n, next[w])
			default:
				next[w]++
				seen++
			}
			if err := d.Ack(ctx); err != nil && !errors.Is(err, broker.ErrLost) {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%d messages, %d of them twice", seen, doubles)
}
