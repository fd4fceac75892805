package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"

	"github.com/ackafter/ackafter/broker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// case K9
func TestMessage(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(2, "orders"))
	at := time.UnixMilli(1_750_000_000_123)
	gzip := []byte{0x1f, 0x8b, 8, 0, 0}
	produce(t, producer(t, c),
		&kgo.Record{Topic: "orders", Partition: 1, Key: []byte("A 1"), Value: []byte("body"), Timestamp: at, Headers: []kgo.RecordHeader{
			{Key: "a", Value: []byte("1")}, {Key: "b", Value: []byte{0xff, 0}}, {Key: "a", Value: []byte("2")},
		}},
		&kgo.Record{Topic: "orders", Partition: 1, Key: []byte("A 1")},
		&kgo.Record{Topic: "orders", Partition: 1, Value: []byte{}},
		&kgo.Record{Topic: "orders", Partition: 1, Key: []byte{}, Value: []byte("\x00\x00\x00\x00\x0c{}")},
		&kgo.Record{Topic: "orders", Partition: 1, Value: gzip},
	)
	s := openSource(t, c, []string{"orders"}, quick(t))
	ds := receive(t, s, 5)
	m := ds[0].Message
	if m.ID != "orders/1/0" || m.Source != "kafka:orders/1" || m.Position != broker.At(0) || string(m.Key) != "A 1" ||
		string(m.Body) != "body" || !m.Time.Equal(at) || ds[0].Lane != "orders/1/A%201" || ds[0].Attempt != 0 {
		t.Errorf("got %+v in lane %q", m, ds[0].Lane)
	}
	if got := m.Headers.Values("a"); len(got) != 2 || string(got[0]) != "1" || string(got[1]) != "2" || len(m.Headers) != 3 {
		t.Errorf("headers are %v", m.Headers)
	}
	if b := ds[1].Message.Body; b != nil {
		t.Errorf("a tombstone's body is %q, want nil", b)
	}
	if m := ds[2].Message; m.Body == nil || len(m.Body) != 0 || m.Key != nil || ds[2].Lane != "orders/1" {
		t.Errorf("empty body, no key: got %+v in lane %q", m, ds[2].Lane)
	}
	if m := ds[3].Message; m.Key == nil || string(m.Body) != "\x00\x00\x00\x00\x0c{}" || ds[3].Lane != "orders/1/" {
		t.Errorf("framed body, empty key: got %+v in lane %q", m, ds[3].Lane)
	}
	if !bytes.Equal(ds[4].Message.Body, gzip) {
		t.Errorf("compressed body is %x", ds[4].Message.Body)
	}
	ack(t, ds...)
	awaitCommitted(t, c, "orders", 1, 5)
}

// case K1
func TestCommittedOffsetWaits(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 10)...)
	s := openSource(t, c, []string{"orders"}, quick(t))
	ds := receive(t, s, 10)
	last := int64(-1)
	sample := func() {
		t.Helper()
		o := committed(c, "orders", 0)
		if o < last {
			t.Fatalf("the committed offset went back from %d to %d", last, o)
		}
		last = o
	}
	for _, i := range []int{9, 0, 8, 1, 7, 2, 6, 5, 4} {
		ack(t, ds[i])
		<-time.After(25 * time.Millisecond) // longer than CommitInterval
		sample()
		if last > 3 {
			t.Fatalf("the committed offset is %d while 3 is not done", last)
		}
	}
	awaitCommitted(t, c, "orders", 0, 3)
	ack(t, ds[3])
	awaitCommitted(t, c, "orders", 0, 10)
	if st := s.Stats(); st.Partitions[0].Lag != 0 || st.Partitions[0].InFlight != 0 || st.CommitErrors != 0 {
		t.Errorf("stats are %+v", st)
	}
}

// case K2
func TestCommitErrorIsRetried(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks = []Hook{events}
	fault := c.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.CoordinatorLoadInProgress, Count: 3})
	s := openSource(t, c, []string{"orders"}, cfg)
	p := producer(t, c)
	produce(t, p, numbered("orders", 0, 2)...)
	ack(t, receive(t, s, 1)...)
	e := await(t, events.commits)
	if e.Attempt != 1 || !errors.Is(e.Err, kafkago.GroupLoadInProgress) {
		t.Errorf("event is %+v", e)
	}
	if err := s.Health(); !errors.Is(err, kafkago.GroupLoadInProgress) && fault.Hits() < 3 {
		t.Errorf("health is %v, want the commit error", err)
	}
	ds := receive(t, s, 1)
	if ds[0].Message.Position.Offset != 1 {
		t.Errorf("got offset %d again", ds[0].Message.Position.Offset)
	}
	ack(t, ds...)
	awaitCommitted(t, c, "orders", 0, 2)
	receiveNothing(t, s)
	if n := s.Stats().CommitErrors; n != 3 {
		t.Errorf("%d commit errors are counted, want 3", n)
	}
	eventually(t, "healthy again", func() bool { return s.Health() == nil })
}

// case K1: one record takes long, and more records than may be done ahead of it were
// fetched. When it is done the rest must come, though nothing new is written.
func TestMaxAheadGoesOn(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 20)...)
	cfg := quick(t)
	cfg.MaxAhead = 5
	s := openSource(t, c, []string{"orders"}, cfg)
	ds := receive(t, s, 5)
	ack(t, ds[1:]...)
	receiveNothing(t, s)
	acked := make(chan error)
	go func() {
		<-time.After(50 * time.Millisecond) // Receive waits by then
		acked <- ds[0].Ack(t.Context())
	}()
	for range 3 {
		ack(t, receive(t, s, 5)...)
	}
	if err := <-acked; err != nil {
		t.Error(err)
	}
	awaitCommitted(t, c, "orders", 0, 20)
}

// case K2: nothing was committed for so long that the broker may have closed the
// connection.
func TestCommitAfterQuietTime(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	p := producer(t, c)
	s := openSource(t, c, []string{"orders"}, quick(t))
	produce(t, p, numbered("orders", 0, 1)...)
	ack(t, receive(t, s, 1)...)
	awaitCommitted(t, c, "orders", 0, 1)
	<-s.coordinator.turn
	s.coordinator.used = time.Now().Add(-2 * idleConn)
	s.coordinator.conn.Close() // as the broker does
	s.coordinator.turn <- struct{}{}
	produce(t, p, numbered("orders", 0, 1)...)
	ack(t, receive(t, s, 1)...)
	awaitCommitted(t, c, "orders", 0, 2)
	if n := s.Stats().CommitErrors; n != 0 {
		t.Errorf("%d commits failed", n)
	}
}

// case K3
func TestQuietPartition(t *testing.T) {
	t.Parallel()
	for _, start := range []Start{StartEarliest, StartLatest} {
		t.Run(fmt.Sprint(start), func(t *testing.T) {
			t.Parallel()
			c := newFake(t, kfake.SeedTopics(3, "orders"))
			p := producer(t, c)
			produce(t, p, numbered("orders", 0, 1)...)
			cfg := quick(t)
			cfg.Start = start
			s := openSource(t, c, []string{"orders"}, cfg)
			if start == StartEarliest {
				ack(t, receive(t, s, 1)...)
			}
			for id, want := range []int64{1, 0, 0} {
				awaitCommitted(t, c, "orders", int32(id), want)
			}
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			produce(t, p, numbered("orders", 2, 5)...)
			s = openSource(t, c, []string{"orders"}, cfg)
			if got := values(receive(t, s, 5)); !slices.Equal(got, []string{"0", "1", "2", "3", "4"}) {
				t.Errorf("got %q", got)
			}
		})
	}
}

// case K4
func TestGap(t *testing.T) {
	t.Parallel()
	setup := func(t *testing.T, policy GapPolicy) (*kfake.Cluster, *Source, *spy) {
		c := newFake(t, kfake.SeedTopics(1, "orders"))
		p := producer(t, c)
		produce(t, p, numbered("orders", 0, 60)...)
		s := openSource(t, c, []string{"orders"}, quick(t))
		ack(t, receive(t, s, 10)...)
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.DeleteRecords("orders", 0, 50); err != nil {
			t.Fatal(err)
		}
		events := newSpy()
		cfg := quick(t)
		cfg.Hooks, cfg.OnGap = []Hook{events}, policy
		return c, openSource(t, c, []string{"orders"}, cfg), events
	}
	want := GapError{Topic: "orders", Partition: 0, From: 10, To: 50}
	t.Run("continue", func(t *testing.T) {
		t.Parallel()
		c, s, events := setup(t, GapContinue)
		if e := await(t, events.gaps); e != want || e.Count() != 40 {
			t.Errorf("event is %+v, want %+v", e, want)
		}
		ds := receive(t, s, 10)
		if ds[0].Message.Position.Offset != 50 {
			t.Errorf("goes on at %d, want 50", ds[0].Message.Position.Offset)
		}
		ack(t, ds...)
		awaitCommitted(t, c, "orders", 0, 60)
		var gap *GapError
		if err := s.Health(); !errors.As(err, &gap) || *gap != want {
			t.Errorf("health is %v, want the gap", err)
		}
		if st := s.Stats(); st.Gaps != 1 || st.GapOffsets != 40 {
			t.Errorf("stats are %+v", st)
		}
	})
	t.Run("stop", func(t *testing.T) {
		t.Parallel()
		c, s, events := setup(t, GapStop)
		await(t, events.gaps)
		for range 2 { // it is final
			_, err := s.Receive(t.Context(), 1)
			var gap *GapError
			if !errors.As(err, &gap) || *gap != want {
				t.Fatalf("got %v, want %v", err, &want)
			}
		}
		if s.Health() == nil {
			t.Error("health is green")
		}
		if got := committed(c, "orders", 0); got != 10 {
			t.Errorf("the committed offset is %d, want 10", got)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// case K5: the offset is beyond the end of the log, and there is nothing else
// to tell that by.
func TestBeyondEnd(t *testing.T) {
	t.Parallel()
	setup := func(t *testing.T, policy ResetPolicy) (*kfake.Cluster, *Source, *spy) {
		c := newFake(t, kfake.SeedTopics(1, "orders"))
		commitOffset(t, c, 1000)
		produce(t, producer(t, c), numbered("orders", 0, 10)...)
		events := newSpy()
		cfg := quick(t)
		cfg.Hooks, cfg.OnReset = []Hook{events}, policy
		return c, openSource(t, c, []string{"orders"}, cfg), events
	}
	want := ResetError{Topic: "orders", Partition: 0, Reason: ResetBeyondEnd, Offset: 1000, End: 10}
	t.Run("stop", func(t *testing.T) {
		t.Parallel()
		_, s, events := setup(t, ResetStop)
		began := time.Now()
		if e := await(t, events.resets); e != want {
			t.Errorf("event is %+v, want %+v", e, want)
		}
		_, err := s.Receive(t.Context(), 1)
		var reset *ResetError
		if !errors.As(err, &reset) || *reset != want {
			t.Fatalf("got %v, want %v", err, &want)
		}
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("took %v", took)
		}
	})
	t.Run("restart", func(t *testing.T) {
		t.Parallel()
		c, s, events := setup(t, ResetRestart)
		await(t, events.resets)
		ds := receive(t, s, 10)
		if ds[0].Message.Position.Offset != 0 {
			t.Errorf("begins at %d, want 0", ds[0].Message.Position.Offset)
		}
		ack(t, ds...)
		awaitCommitted(t, c, "orders", 0, 10)
		if err := s.Health(); err == nil || s.Stats().Resets != 1 {
			t.Errorf("health is %v, stats are %+v", err, s.Stats())
		}
	})
}

// commitOffset sets the group's offset as an administrator does.
func commitOffset(t *testing.T, c *kfake.Cluster, offset int64) {
	t.Helper()
	p := kmsg.NewOffsetCommitRequestTopicPartition()
	p.Offset = offset
	topic := kmsg.NewOffsetCommitRequestTopic()
	topic.Topic = "orders"
	topic.TopicID = c.TopicInfo("orders").TopicID
	topic.Partitions = append(topic.Partitions, p)
	req := kmsg.NewPtrOffsetCommitRequest()
	req.Group, req.Generation = "billing", -1
	req.Topics = append(req.Topics, topic)
	res, err := req.RequestWith(t.Context(), producer(t, c))
	if err != nil {
		t.Fatal(err)
	}
	if err := kerr.ErrorForCode(res.Topics[0].Partitions[0].ErrorCode); err != nil {
		t.Fatal(err)
	}
}

// case K5: the topic is created anew while it is read, with more records than
// the offset counts: the offsets alone do not show it.
func TestTopicCreatedAnew(t *testing.T) {
	t.Parallel()
	setup := func(t *testing.T, policy ResetPolicy) (*kfake.Cluster, *Source, *spy, *broker.Delivery) {
		c := newFake(t, kfake.SeedTopics(1, "orders"))
		produce(t, producer(t, c), numbered("orders", 0, 5)...)
		events := newSpy()
		cfg := quick(t)
		cfg.Hooks, cfg.OnReset, cfg.Start = []Hook{events}, policy, StartLatest
		commitOffset(t, c, 0)
		s := openSource(t, c, []string{"orders"}, cfg)
		ds := receive(t, s, 5)
		ack(t, ds[:4]...)
		awaitCommitted(t, c, "orders", 0, 4)
		if err := c.DeleteTopic("orders"); err != nil {
			t.Fatal(err)
		}
		if err := c.CreateTopic("orders", 1, nil); err != nil {
			t.Fatal(err)
		}
		produce(t, producer(t, c), numbered("orders", 0, 20)...)
		return c, s, events, ds[4]
	}
	t.Run("stop", func(t *testing.T) {
		t.Parallel()
		_, s, events, _ := setup(t, ResetStop)
		if e := await(t, events.resets); e.Reason != ResetRecreated || e.Topic != "orders" {
			t.Errorf("event is %+v", e)
		}
		eventually(t, "Receive says so", func() bool {
			_, err := s.Receive(t.Context(), 1)
			var reset *ResetError
			return errors.As(err, &reset)
		})
	})
	t.Run("restart", func(t *testing.T) {
		t.Parallel()
		c, s, events, out := setup(t, ResetRestart)
		if e := await(t, events.resets); e.Reason != ResetRecreated {
			t.Errorf("event is %+v", e)
		}
		eventually(t, "the delivery of the topic that is gone is lost", func() bool { return out.Context().Err() != nil })
		if err := out.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
			t.Errorf("ack of the topic that is gone: got %v, want ErrLost", err)
		}
		// Some may have come before it was noticed; then they come again.
		seen := make(map[string]bool)
		eventually(t, "all of the new topic is done", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			ds, _ := s.Receive(ctx, 100)
			for _, d := range ds {
				seen[d.Message.ID] = true
				_ = d.Ack(t.Context()) // a lost one comes again
			}
			return len(seen) == 20 && committed(c, "orders", 0) == 20
		})
	})
}

// case K5: the topic is created anew while nobody reads.
func TestTopicCreatedAnewMeanwhile(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 5)...)
	cfg := quick(t)
	cfg.OnReset = ResetRestart
	events := newSpy()
	cfg.Hooks = []Hook{events}
	s := openSource(t, c, []string{"orders"}, cfg)
	ack(t, receive(t, s, 5)...)
	awaitCommitted(t, c, "orders", 0, 5)
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	note := c.GroupInfo("billing").Commits["orders"][0].Metadata
	if err := c.DeleteTopic("orders"); err != nil {
		t.Fatal(err)
	}
	if err := c.CreateTopic("orders", 1, nil); err != nil {
		t.Fatal(err)
	}
	produce(t, producer(t, c), numbered("orders", 0, 20)...)
	// Brokers drop the offsets of a deleted topic, but not at once and not all:
	// the old one is there again.
	c.ControlKey(int16(kmsg.OffsetFetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		if committed(c, "orders", 0) >= 0 {
			return nil, nil, false
		}
		res := req.ResponseKind().(*kmsg.OffsetFetchResponse)
		p := kmsg.NewOffsetFetchResponseTopicPartition()
		p.Offset, p.Metadata = 5, &note
		topic := kmsg.NewOffsetFetchResponseTopic()
		topic.Topic = "orders"
		topic.Partitions = append(topic.Partitions, p)
		res.Topics = append(res.Topics, topic)
		return res, nil, true
	})
	s = openSource(t, c, []string{"orders"}, cfg)
	e := await(t, events.resets)
	if e.Reason != ResetRecreated || e.Offset != 5 {
		t.Errorf("event is %+v", e)
	}
	ds := receive(t, s, 20)
	if ds[0].Message.Position.Offset != 0 {
		t.Errorf("begins at %d, want 0", ds[0].Message.Position.Offset)
	}
}

func TestTopicDeleted(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders", "refunds"))
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks = []Hook{events}
	s := openSource(t, c, []string{"orders", "refunds"}, cfg)
	await(t, events.assigned)
	if err := c.DeleteTopic("refunds"); err != nil {
		t.Fatal(err)
	}
	want := ResetError{Topic: "refunds", Partition: -1, Reason: ResetDeleted, Offset: -1, End: -1}
	if e := await(t, events.resets); e != want {
		t.Errorf("event is %+v, want %+v", e, want)
	}
	_, err := s.Receive(t.Context(), 1)
	var reset *ResetError
	if !errors.As(err, &reset) || *reset != want {
		t.Errorf("got %v, want %v", err, &want)
	}
}

// case K8
func TestTransactions(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	tx := producer(t, c, kgo.TransactionalID("tx"))
	for i := range 10 {
		transact(t, tx, kgo.TryCommit, fmt.Sprint(i))
	}
	s := openSource(t, c, []string{"orders"}, quick(t))
	ds := receive(t, s, 10)
	ack(t, ds...)
	awaitCommitted(t, c, "orders", 0, 20) // behind the last mark
	if lag := s.Stats().Partitions[0].Lag; lag != 0 {
		t.Errorf("lag is %d, want 0", lag)
	}

	transact(t, tx, kgo.TryAbort, "aborted")
	awaitCommitted(t, c, "orders", 0, 22)
	transact(t, tx, kgo.TryCommit, "after")
	if got := values(receive(t, s, 1)); got[0] != "after" {
		t.Errorf("got %q, want the one that was committed", got)
	}
}

func transact(t *testing.T, tx *kgo.Client, how kgo.TransactionEndTry, value string) {
	t.Helper()
	if err := tx.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	produce(t, tx, &kgo.Record{Topic: "orders", Value: []byte(value)})
	if err := tx.EndTransaction(t.Context(), how); err != nil {
		t.Fatal(err)
	}
}

func TestReadUncommitted(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	transact(t, producer(t, c, kgo.TransactionalID("tx")), kgo.TryAbort, "aborted")
	cfg := quick(t)
	cfg.Isolation = ReadUncommitted
	s := openSource(t, c, []string{"orders"}, cfg)
	ack(t, receive(t, s, 1)...)
	awaitCommitted(t, c, "orders", 0, 2)
}

// case K8: a compacted topic with holes between the records.
func TestCompacted(t *testing.T) {
	t.Parallel()
	c := newFake(t)
	if err := c.CreateTopic("orders", 1, map[string]string{"cleanup.policy": "compact", "min.compaction.lag.ms": "0", "segment.ms": "1", "min.cleanable.dirty.ratio": "0"}); err != nil {
		t.Fatal(err)
	}
	p := producer(t, c)
	// One batch a client sends, so that compaction makes holes inside batches.
	var batch []*kgo.Record
	for i := range 51 {
		key := "same"
		if i == 3 || i == 7 || i == 40 {
			key = fmt.Sprint(i)
		}
		batch = append(batch, &kgo.Record{Topic: "orders", Key: []byte(key), Value: []byte(fmt.Sprint(i))})
	}
	if err := p.ProduceSync(t.Context(), batch...).FirstErr(); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*kgo.Record{{Key: []byte("same"), Value: []byte("newer")}, {Key: []byte("other"), Value: []byte("last")}} {
		<-time.After(5 * time.Millisecond) // segment.ms: the one before can be compacted
		r.Topic = "orders"
		produce(t, p, r)
	}
	c.Compact()
	s := openSource(t, c, []string{"orders"}, quick(t))
	ds := receive(t, s, 5)
	if got := values(ds); !slices.Equal(got, []string{"3", "7", "40", "newer", "last"}) {
		t.Errorf("got %q", got)
	}
	ack(t, ds...)
	awaitCommitted(t, c, "orders", 0, 53)
	if lag := s.Stats().Partitions[0].Lag; lag != 0 {
		t.Errorf("lag is %d, want 0", lag)
	}
}

func TestSeveralTopics(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(2, "orders", "refunds"))
	p := producer(t, c)
	produce(t, p, numbered("orders", 1, 3)...)
	produce(t, p, numbered("refunds", 0, 3)...)
	s := openSource(t, c, []string{"orders", "refunds"}, quick(t))
	ds := receive(t, s, 6)
	ack(t, ds...)
	awaitCommitted(t, c, "orders", 1, 3)
	awaitCommitted(t, c, "refunds", 0, 3)
}

func TestReceiveArguments(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	s := openSource(t, c, []string{"orders"}, quick(t))
	for _, limit := range []int{0, -1} {
		if _, err := s.Receive(t.Context(), limit); err == nil {
			t.Errorf("no error for limit %d", limit)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Receive(ctx, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
}
