package kafka

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/ackafter/ackafter/broker"
)

// cutBack lets the leaders of orders/0 say that their log agrees with what was
// read up to an offset, as one does that was elected uncleanly.
func cutBack(c *kfake.Cluster, end int64) {
	c.ControlKey(int16(kmsg.OffsetForLeaderEpoch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		asked := req.(*kmsg.OffsetForLeaderEpochRequest).Topics[0]
		p := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
		p.Partition, p.LeaderEpoch, p.EndOffset = asked.Partitions[0].Partition, asked.Partitions[0].LeaderEpoch, end
		topic := kmsg.NewOffsetForLeaderEpochResponseTopic()
		topic.Topic, topic.Partitions = asked.Topic, append(topic.Partitions, p)
		res := req.ResponseKind().(*kmsg.OffsetForLeaderEpochResponse)
		res.Topics = append(res.Topics, topic)
		return res, nil, true
	})
}

// case K5: the log was cut back and has grown again beyond the offset, while it
// is read: nothing but the leader epochs shows it.
func TestLogIsCutBack(t *testing.T) {
	t.Parallel()
	setup := func(t *testing.T, policy ResetPolicy) (*kfake.Cluster, *Source, *spy, *broker.Delivery) {
		c := newFake(t, kfake.NumBrokers(2), kfake.SeedTopics(1, "orders"))
		if err := c.MoveTopicPartition("orders", 0, 0); err != nil {
			t.Fatal(err)
		}
		produce(t, producer(t, c), numbered("orders", 0, 10)...)
		events := newSpy()
		cfg := quick(t)
		cfg.Hooks, cfg.OnReset = []Hook{events}, policy
		s := openSource(t, c, []string{"orders"}, cfg)
		ds := receive(t, s, 10)
		ack(t, ds[:9]...)
		awaitCommitted(t, c, "orders", 0, 9)
		cutBack(c, 6)
		if err := c.MoveTopicPartition("orders", 0, 1); err != nil {
			t.Fatal(err)
		}
		return c, s, events, ds[9]
	}
	want := ResetError{Topic: "orders", Partition: 0, Reason: ResetCut, Offset: 10, End: 6}
	t.Run("stop", func(t *testing.T) {
		t.Parallel()
		_, s, events, _ := setup(t, ResetStop)
		if e := await(t, events.resets); e != want {
			t.Errorf("event is %+v, want %+v", e, want)
		}
		_, err := s.Receive(t.Context(), 1)
		var reset *ResetError
		if !errors.As(err, &reset) || *reset != want {
			t.Errorf("got %v, want %v", err, &want)
		}
	})
	t.Run("restart", func(t *testing.T) {
		t.Parallel()
		c, s, events, out := setup(t, ResetRestart)
		if e := await(t, events.resets); e != want {
			t.Errorf("event is %+v, want %+v", e, want)
		}
		ds := receive(t, s, 4)
		if got := values(ds); !slices.Equal(got, []string{"6", "7", "8", "9"}) {
			t.Errorf("got %q again, want what is in the log from 6 on", got)
		}
		if err := out.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
			t.Errorf("ack of what was out: got %v, want ErrLost", err)
		}
		awaitCommitted(t, c, "orders", 0, 6)
		ack(t, ds...)
		awaitCommitted(t, c, "orders", 0, 10)
		if n := s.Stats().Resets; n != 1 {
			t.Errorf("%d resets", n)
		}
	})
}

// case K5: the log was cut back while nobody read.
func TestLogIsCutBackMeanwhile(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 10)...)
	s := openSource(t, c, []string{"orders"}, quick(t))
	ack(t, receive(t, s, 8)...)
	awaitCommitted(t, c, "orders", 0, 8)
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	cutBack(c, 3)
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.OnReset = []Hook{events}, ResetRestart
	s = openSource(t, c, []string{"orders"}, cfg)
	want := ResetError{Topic: "orders", Partition: 0, Reason: ResetCut, Offset: 8, End: 3}
	if e := await(t, events.resets); e != want {
		t.Errorf("event is %+v, want %+v", e, want)
	}
	if got := values(receive(t, s, 7)); got[0] != "3" {
		t.Errorf("goes on with %q, want 3", got[0])
	}
}

// Leaders that have the whole log are asked and raise no alarm; an offset without
// an epoch is no reason to ask.
func TestEpochsRaiseNoAlarm(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.NumBrokers(3), kfake.SeedTopics(1, "orders"))
	commitOffset(t, c, 0)
	asked := countRequests(c, kmsg.OffsetForLeaderEpoch)
	p := producer(t, c)
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks = []Hook{events}
	s := openSource(t, c, []string{"orders"}, cfg)
	total := 0
	for round := range int32(6) {
		produce(t, p, numbered("orders", 0, 5)...)
		ds := receive(t, s, 5)
		for i, d := range ds {
			if d.Message.Position != broker.At(int64(total+i)) {
				t.Fatalf("got offset %s, want %d", d.Message.Position, total+i)
			}
		}
		if round == 0 && asked.Load() != 0 {
			t.Error("a leader is asked about an unknown epoch")
		}
		ack(t, ds...)
		total += 5
		awaitCommitted(t, c, "orders", 0, int64(total))
		if err := c.MoveTopicPartition("orders", 0, round%3); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the leaders are asked", func() bool { return asked.Load() >= 3 })
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := asked.Load()
	s = openSource(t, c, []string{"orders"}, cfg)
	produce(t, p, numbered("orders", 0, 1)...)
	receive(t, s, 1)
	if asked.Load() == before {
		t.Error("nobody is asked about the committed epoch")
	}
	if n := len(events.resets); n != 0 {
		t.Errorf("%d false alarms: %+v", n, <-events.resets)
	}
}

// A leader that refuses an epoch is looked for again; nothing is skipped.
func TestEpochErrors(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	p := producer(t, c)
	s := openSource(t, c, []string{"orders"}, quick(t))
	next := 0
	for _, key := range []kmsg.Key{kmsg.Fetch, kmsg.OffsetForLeaderEpoch} {
		for _, e := range []*kerr.Error{kerr.FencedLeaderEpoch, kerr.UnknownLeaderEpoch} {
			// The second makes the fetcher connect again, and so ask for the epoch.
			fault := c.Fault(kfake.Fault{Keys: []kmsg.Key{key}, Err: e, Count: 2}, kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}, Err: e})
			produce(t, p, numbered("orders", 0, 3)...)
			ds := receive(t, s, 3)
			for _, d := range ds {
				if d.Message.Position != broker.At(int64(next)) {
					t.Fatalf("%v of %v: got offset %s, want %d", e, key, d.Message.Position, next)
				}
				next++
			}
			ack(t, ds...)
			eventually(t, fmt.Sprint("met ", e, " of ", key), func() bool { return fault.Hits() >= 3 })
		}
	}
	awaitCommitted(t, c, "orders", 0, int64(next))
}

// case K5: a topic that was created anew, with fewer records than were read, and
// in the same leader epoch: it looks as if the log was cut back, but nothing of it
// may be skipped.
func TestCreatedAnewIsNotCutBack(t *testing.T) {
	t.Parallel()
	for _, watched := range []bool{true, false} {
		t.Run(fmt.Sprint("watched=", watched), func(t *testing.T) {
			t.Parallel()
			c := newFake(t, kfake.SeedTopics(1, "orders"))
			produce(t, producer(t, c), numbered("orders", 0, 30)...)
			events := newSpy()
			cfg := quick(t)
			cfg.Hooks, cfg.OnReset = []Hook{events}, ResetRestart
			if !watched {
				cfg.WatchInterval = -1
			}
			s := openSource(t, c, []string{"orders"}, cfg)
			ack(t, receive(t, s, 30)...)
			awaitCommitted(t, c, "orders", 0, 30)
			if err := c.DeleteTopic("orders"); err != nil {
				t.Fatal(err)
			}
			if err := c.CreateTopic("orders", 1, nil); err != nil {
				t.Fatal(err)
			}
			produce(t, producer(t, c), numbered("orders", 0, 10)...)
			if e := await(t, events.resets); e.Reason == ResetCut {
				t.Errorf("event is %+v", e)
			}
			ds := receive(t, s, 10)
			if ds[0].Message.Position != broker.At(0) {
				t.Errorf("begins at %s, want 0", ds[0].Message.Position)
			}
			ack(t, ds...)
			awaitCommitted(t, c, "orders", 0, 10)
		})
	}
}

// Without topic ids a cut log and a topic that was created anew look the same: all
// comes again.
func TestCutBackWithoutTopicIDs(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.NumBrokers(2), kfake.SeedTopics(1, "orders"), kfake.MaxVersions(kversion.V2_4_0()))
	if err := c.MoveTopicPartition("orders", 0, 0); err != nil {
		t.Fatal(err)
	}
	produce(t, producer(t, c), numbered("orders", 0, 10)...)
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.OnReset = []Hook{events}, ResetRestart
	s := openSource(t, c, []string{"orders"}, cfg)
	ack(t, receive(t, s, 10)...)
	cutBack(c, 6)
	if err := c.MoveTopicPartition("orders", 0, 1); err != nil {
		t.Fatal(err)
	}
	if e := await(t, events.resets); e.Reason != ResetCut || e.Offset != 10 || e.End != 6 {
		t.Errorf("event is %+v", e)
	}
	if ds := receive(t, s, 10); ds[0].Message.Position != broker.At(0) {
		t.Errorf("begins at %s, want 0", ds[0].Message.Position)
	}
}
