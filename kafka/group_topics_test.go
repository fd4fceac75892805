package kafka

import (
	"slices"
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// case K5: one of the topics is deleted and waited for. The group must neither
// create it, however often it rebalances and whatever the broker allows, nor
// leave the other topics alone.
func TestDeletedTopicStaysDeleted(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(2, "orders", "refunds"), kfake.AllowAutoTopicCreation())
	events := newSpy()
	cfg := quick(t)
	cfg.OnReset, cfg.Hooks = ResetRestart, []Hook{events}
	s := openSource(t, c, []string{"orders", "refunds"}, cfg)
	await(t, events.assigned)
	if err := c.DeleteTopic("refunds"); err != nil {
		t.Fatal(err)
	}
	await(t, events.resets)
	for range 3 {
		rebalance(c)
		e := await(t, events.assigned)
		want := []TopicPartition{{"orders", 0}, {"orders", 1}}
		if !slices.Equal(e.Partitions, want) {
			t.Errorf("assigned %v, want %v", e.Partitions, want)
		}
	}
	if c.TopicInfo("refunds") != nil {
		t.Fatal("the deleted topic was created")
	}
	produce(t, producer(t, c), numbered("orders", 1, 1)...)
	ack(t, receive(t, s, 1)...)

	if err := c.CreateTopic("refunds", 1, nil); err != nil {
		t.Fatal(err)
	}
	produce(t, producer(t, c), numbered("refunds", 0, 1)...)
	ack(t, receive(t, s, 1)...)
}

// case K5: the group's offset was set by a tool, which notes no topic. It gets its
// note before anything is handled, so that a topic that is created anew with more
// partitions shows, which makes the group rebalance at the same time.
func TestOffsetsOfOthersAreNoted(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 5)...)
	commitOffset(t, c, 5)
	cfg := quick(t)
	cfg.OnReset = ResetRestart
	s := openSource(t, c, []string{"orders"}, cfg)
	noted := func() string { return c.GroupInfo("billing").Commits["orders"][0].Metadata }
	eventually(t, "the offset has its note", func() bool { return noted() == s.ids.note("orders") })
	if o := committed(c, "orders", 0); o != 5 {
		t.Errorf("committed %d, want 5 as before", o)
	}
	if st := s.Stats().Partitions[0]; st.Committed != 5 || st.Lag > 0 {
		t.Errorf("stats are %+v", st)
	}
}

// What was done of a topic that is gone cannot be committed: neither a rebalance
// nor Close may wait for that.
func TestDeletedTopicIsNotCommitted(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders", "refunds"))
	events := newSpy()
	cfg := quick(t)
	cfg.OnReset, cfg.Hooks = ResetRestart, []Hook{events}
	s := openSource(t, c, []string{"orders", "refunds"}, cfg)
	await(t, events.assigned)
	produce(t, producer(t, c), numbered("refunds", 0, 1)...)
	ds := receive(t, s, 1)
	if err := c.DeleteTopic("refunds"); err != nil {
		t.Fatal(err)
	}
	await(t, events.resets)
	c.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.UnknownTopicOrPartition, Count: 1 << 20}) // as real brokers do
	ack(t, ds...)
	rebalance(c)
	if e := await(t, events.revoked); e.Err != nil {
		t.Errorf("the generation ended with %v", e.Err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Errorf("closing ended with %v", err)
	}
}

// Partitions are added when the leader has just shared out those that there were:
// nobody may go without them.
func TestPartitionsAddedWhileJoining(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	p := producer(t, c)
	var done atomic.Bool
	c.ControlKey(int16(kmsg.SyncGroup), func(kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		if done.CompareAndSwap(false, true) { // another request may come while this one sleeps
			c.SleepControl(func() {
				req := kmsg.NewPtrCreatePartitionsRequest()
				topic := kmsg.NewCreatePartitionsRequestTopic()
				topic.Topic, topic.Count = "orders", 3
				req.Topics = append(req.Topics, topic)
				if _, err := req.RequestWith(t.Context(), p); err != nil {
					t.Error(err)
				}
			})
		}
		return nil, nil, false
	})
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks = []Hook{events}
	openSource(t, c, []string{"orders"}, cfg)
	if e := await(t, events.assigned); len(e.Partitions) != 1 {
		t.Fatalf("assigned %v, want what there was", e.Partitions)
	}
	if e := await(t, events.assigned); len(e.Partitions) != 3 {
		t.Errorf("assigned %v, want all", e.Partitions)
	}
}
