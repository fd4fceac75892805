package kafka

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/ackafter/ackafter/broker"
)

// effects are what handlers have done: each message once, as behind an inbox.
type effects struct {
	t    *testing.T
	mu   sync.Mutex
	done map[string]bool
	last map[string]int // by key, the number of the last first effect
}

func newEffects(t *testing.T) *effects {
	return &effects{t: t, done: make(map[string]bool), last: make(map[string]int)}
}

// handle does a message whose body is a number that grows with its key.
func (e *effects) handle(m *broker.Message) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.done[m.ID] {
		return
	}
	e.done[m.ID] = true
	var n int
	if _, err := fmt.Sscan(string(m.Body), &n); err != nil {
		e.t.Error(err)
	}
	key := string(m.Key)
	if last, ok := e.last[key]; ok && n < last {
		e.t.Errorf("key %s: %d after %d", key, n, last)
	}
	e.last[key] = n
}

func (e *effects) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.done)
}

// work handles what a source delivers until it is closed.
func (e *effects) work(s broker.Source) {
	for {
		ds, err := s.Receive(context.Background(), 20)
		if err != nil {
			if !errors.Is(err, broker.ErrClosed) {
				e.t.Error(err)
			}
			return
		}
		for _, d := range ds {
			if d.Context().Err() != nil {
				continue
			}
			e.handle(d.Message)
			if err := d.Ack(context.Background()); err != nil && !errors.Is(err, broker.ErrLost) {
				e.t.Error(err)
			}
		}
	}
}

// worker is a source with somebody who works for it.
type worker struct {
	source *Source
	ended  chan struct{}
}

func newWorker(t *testing.T, c *kfake.Cluster, e *effects, cfg *Config) *worker {
	t.Helper()
	w := &worker{source: openSource(t, c, []string{"orders"}, cfg), ended: make(chan struct{})}
	go func() {
		defer close(w.ended)
		e.work(w.source)
	}()
	return w
}

func (w *worker) close(t *testing.T) {
	t.Helper()
	_ = w.source.Close(context.WithoutCancel(t.Context())) // a crashed one has errors to tell
	<-w.ended
}

// Members come and go, half of them without a word, while messages flow.
func TestRebalanceWhileMessagesFlow(t *testing.T) {
	t.Parallel()
	const partitions, keys, messages = 6, 60, 6000
	c := newFake(t, kfake.NumBrokers(3), kfake.SeedTopics(partitions, "orders"))
	e := newEffects(t)
	cfg := quick(t)
	cfg.SessionTimeout, cfg.RebalanceTimeout = 500*time.Millisecond, 500*time.Millisecond
	cfg.DrainTimeout = 100 * time.Millisecond
	steady := newWorker(t, c, e, cfg)

	produced := make(chan struct{})
	p := producer(t, c)
	go func() {
		defer close(produced)
		for i := range messages {
			k := i % keys
			r := &kgo.Record{Topic: "orders", Partition: int32(k % partitions), Key: []byte(fmt.Sprint(k)), Value: []byte(fmt.Sprint(i))}
			if err := p.ProduceSync(t.Context(), r).FirstErr(); err != nil {
				t.Error(err)
				return
			}
		}
	}()

	last := make(map[int32]int64)
	sample := func() {
		for id := range int32(partitions) {
			o := committed(c, "orders", id)
			if before, ok := last[id]; ok && o < before {
				t.Errorf("orders/%d: the committed offset went back from %d to %d", id, before, o)
			}
			last[id] = o
		}
	}
	round := 0
	for done := false; !done; round++ {
		w := newWorker(t, c, e, cfg)
		for range 20 {
			sample()
			<-time.After(10 * time.Millisecond)
		}
		if round%2 == 0 {
			w.close(t)
		} else {
			crash(w.source)
			<-time.After(50 * time.Millisecond)
			w.close(t)
		}
		select {
		case <-produced:
			done = round >= 5
		default:
		}
	}
	eventually(t, "everything has its effect", func() bool { return e.count() == messages })
	for id := range int32(partitions) {
		awaitCommitted(t, c, "orders", id, messages/partitions)
	}
	eventually(t, "the lag is 0", func() bool {
		st := steady.source.Stats()
		return len(st.Partitions) == partitions && !slices.ContainsFunc(st.Partitions, func(p PartitionStats) bool { return p.Lag != 0 })
	})
	t.Logf("%d rounds: %+v", round, steady.source.Stats())
	steady.close(t)
}

// joinAndLeave makes the group rebalance.
func rebalance(c *kfake.Cluster) {
	c.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Heartbeat}, Group: "billing", Err: kerr.RebalanceInProgress})
}

// What is in flight when the group rebalances may be settled, and is committed.
func TestDrain(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 4)...)
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.DrainTimeout, cfg.CommitInterval = []Hook{events}, 5*time.Second, -1
	s := openSource(t, c, []string{"orders"}, cfg)
	await(t, events.assigned)
	ds := receive(t, s, 3)
	rebalance(c)
	eventually(t, "nothing is handed out any more", func() bool {
		st := s.Stats()
		return len(st.Partitions) == 1 && st.Partitions[0].Waiting == 0
	})
	if ds[0].Context().Err() != nil {
		t.Error("the delivery is lost before its time")
	}
	ack(t, ds...)
	e := await(t, events.revoked)
	if e.Lost != 0 || e.Err != nil || e.Drain > 4*time.Second || len(e.Partitions) != 1 {
		t.Errorf("event is %+v", e)
	}
	if got := committed(c, "orders", 0); got != 3 {
		t.Errorf("committed is %d, want 3", got)
	}
	if got := values(receive(t, s, 1)); got[0] != "3" {
		t.Errorf("goes on with %q, want 3", got)
	}
	if st := s.Stats(); st.Rebalances != 2 || st.StaleAcks != 0 {
		t.Errorf("stats are %+v", st)
	}
}

// What is not settled in time is lost, and comes again.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 3)...)
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.DrainTimeout = []Hook{events}, 50*time.Millisecond
	s := openSource(t, c, []string{"orders"}, cfg)
	ds := receive(t, s, 3)
	ack(t, ds[0])
	rebalance(c)
	e := await(t, events.revoked)
	if e.Lost != 2 || e.Drain < 50*time.Millisecond {
		t.Errorf("event is %+v, want 2 lost", e)
	}
	if ds[1].Context().Err() == nil {
		t.Error("a lost delivery's context has not ended")
	}
	if err := ds[1].Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
		t.Errorf("got %v, want ErrLost", err)
	}
	if err := ds[2].Nack(t.Context(), 0); !errors.Is(err, broker.ErrLost) {
		t.Errorf("got %v, want ErrLost", err)
	}
	if e := await(t, events.stale); e.Topic != "orders" || e.Offset != 1 {
		t.Errorf("event is %+v", e)
	}
	again := receive(t, s, 2)
	if got := values(again); !slices.Equal(got, []string{"1", "2"}) {
		t.Errorf("got %q again, want 1 and 2", got)
	}
	ack(t, again...)
	awaitCommitted(t, c, "orders", 0, 3)
	if st := s.Stats(); st.StaleAcks != 2 || st.Lost != 2 {
		t.Errorf("stats are %+v", st)
	}
}

// The coordinator has thrown the member out: what it commits is refused, and it
// joins again.
func TestFencedCommit(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 1)...)
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.DrainTimeout = []Hook{events}, 5*time.Second
	s := openSource(t, c, []string{"orders"}, cfg)
	ds := receive(t, s, 1)
	awaitCommitted(t, c, "orders", 0, 0)
	c.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.IllegalGeneration})
	ack(t, ds...)
	e := await(t, events.revoked)
	if !errors.Is(e.Err, errGenerationOver) || e.Drain > time.Second {
		t.Errorf("event is %+v, want that acks were in vain, at once", e)
	}
	again := receive(t, s, 1)
	ack(t, again...)
	awaitCommitted(t, c, "orders", 0, 1)
}

// A coordinator that lets the member in and then refuses what it sends must not
// make a hot loop.
func TestFlapping(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	c.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.IllegalGeneration, Count: -1})
	cfg := quick(t)
	cfg.MaxBackoff = time.Second
	s := openSource(t, c, []string{"orders"}, cfg)
	eventually(t, "the first refusal", func() bool { return s.Stats().CommitErrors > 0 })
	<-time.After(2 * time.Second)
	if n := s.Stats().Rebalances; n > 10 {
		t.Errorf("%d generations in two seconds", n)
	}
}

func TestNewPartitions(t *testing.T) {
	t.Parallel()
	for _, start := range []Start{StartEarliest, StartLatest} {
		t.Run(fmt.Sprint(start), func(t *testing.T) {
			t.Parallel()
			testNewPartitions(t, start)
		})
	}
}

func testNewPartitions(t *testing.T, start Start) {
	t.Helper()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	cfg := quick(t)
	cfg.Start, cfg.WatchInterval = start, time.Second
	s := openSource(t, c, []string{"orders"}, cfg)
	eventually(t, "joined", func() bool { return s.Stats().Joined })
	req := kmsg.NewPtrCreatePartitionsRequest()
	topic := kmsg.NewCreatePartitionsRequestTopic()
	topic.Topic, topic.Count = "orders", 3
	req.Topics = append(req.Topics, topic)
	p := producer(t, c)
	if _, err := req.RequestWith(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	produce(t, p, numbered("orders", 2, 1)...) // before anybody may have noticed
	eventually(t, "the new partitions are assigned", func() bool { return len(s.Stats().Partitions) == 3 })
	ack(t, receive(t, s, 1)...)
	produce(t, p, numbered("orders", 2, 1)...)
	ack(t, receive(t, s, 1)...)
	awaitCommitted(t, c, "orders", 2, 2)
}

// More members than partitions: the spare one waits, and takes over.
func TestSpareMember(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	a := openSource(t, c, []string{"orders"}, quick(t))
	b := openSource(t, c, []string{"orders"}, quick(t))
	if _, err := c.WaitGroupStable(t.Context(), "billing", 2); err != nil {
		t.Fatal(err)
	}
	eventually(t, "both are members", func() bool { return a.Stats().Joined && b.Stats().Joined })
	owner, spare := a, b
	if len(a.Stats().Partitions) == 0 {
		owner, spare = b, a
	}
	if err := spare.Health(); err != nil {
		t.Errorf("health of the spare member is %v", err)
	}
	if err := owner.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	produce(t, producer(t, c), numbered("orders", 0, 1)...)
	receive(t, spare, 1)
}

func TestLeadersMove(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.NumBrokers(3), kfake.SeedTopics(3, "orders"))
	e := newEffects(t)
	w := newWorker(t, c, e, quick(t))
	p := producer(t, c)
	const n = 900
	for i := range n {
		k := i % 21
		if i%100 == 0 {
			c.ShufflePartitionLeaders()
			c.RehashCoordinators()
		}
		produce(t, p, &kgo.Record{Topic: "orders", Partition: int32(k % 3), Key: []byte(fmt.Sprint(k)), Value: []byte(fmt.Sprint(i))})
	}
	eventually(t, "everything has its effect", func() bool { return e.count() == n })
	for id := range int32(3) {
		awaitCommitted(t, c, "orders", id, n/3)
	}
	w.close(t)
}

// The network is gone for longer than the session lasts: another attempt every
// now and then, no more, and then on as if nothing had been.
func TestOutage(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.NumBrokers(2), kfake.SeedTopics(2, "orders"))
	network := &cuttable{}
	events := newSpy()
	cfg := quick(t)
	cfg.Dial, cfg.Hooks = network.dial, []Hook{events}
	cfg.SessionTimeout, cfg.DrainTimeout = 500*time.Millisecond, 50*time.Millisecond
	s := openSource(t, c, []string{"orders"}, cfg)
	p := producer(t, c)
	produce(t, p, numbered("orders", 0, 1)...)
	ack(t, receive(t, s, 1)...)
	awaitCommitted(t, c, "orders", 0, 1)

	network.cut()
	await(t, events.reconnects)
	eventually(t, "health says so", func() bool { return s.Health() != nil })
	<-time.After(time.Second)
	produce(t, p, numbered("orders", 1, 1)...)
	if n := len(events.reconnects); n > 60 {
		t.Errorf("%d attempts in a second", n)
	}
	if err := network.restore(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	ack(t, receive(t, s, 1)...)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("back after %v", took)
	}
	awaitCommitted(t, c, "orders", 1, 1)
	eventually(t, "healthy again", func() bool { return s.Health() == nil })
}

// A member that is cut off and comes back keeps its id, so that the group does
// not wait for the one it had.
func TestMemberComesBack(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	network := &cuttable{}
	events := newSpy()
	cfg := quick(t)
	cfg.Dial, cfg.Hooks = network.dial, []Hook{events}
	cfg.SessionTimeout, cfg.DrainTimeout = time.Minute, -1
	openSource(t, c, []string{"orders"}, cfg)
	first := await(t, events.assigned)
	network.cut()
	await(t, events.revoked)
	await(t, events.reconnects)
	if err := network.restore(); err != nil {
		t.Fatal(err)
	}
	second := await(t, events.assigned)
	if first.Member != second.Member || second.Generation <= first.Generation {
		t.Errorf("member %s of generation %d came back as %s of generation %d", first.Member, first.Generation, second.Member, second.Generation)
	}
}

// What was acked before the outage is committed after it, when the group still
// knows the generation.
func TestCommitAfterOutage(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 2)...)
	network := &cuttable{}
	events := newSpy()
	cfg := quick(t)
	cfg.Dial, cfg.Hooks = network.dial, []Hook{events}
	cfg.SessionTimeout, cfg.DrainTimeout, cfg.CommitInterval, cfg.CommitCount = 8*time.Second, -1, -1, -1
	s := openSource(t, c, []string{"orders"}, cfg)
	await(t, events.assigned)
	ds := receive(t, s, 1)
	network.cut()
	ack(t, ds...)
	if e := await(t, events.revoked); e.Err == nil {
		t.Errorf("event is %+v, want that the commit failed", e)
	}
	if err := network.restore(); err != nil {
		t.Fatal(err)
	}
	await(t, events.assigned)
	if got := committed(c, "orders", 0); got != 1 {
		t.Errorf("committed is %d, want 1", got)
	}
	if got := values(receive(t, s, 1)); got[0] != "1" {
		t.Errorf("goes on with %q, want 1", got)
	}
	eventually(t, "healthy again", func() bool { return s.Health() == nil })
}

func TestPause(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	p := producer(t, c, kgo.ProducerBatchCompression(kgo.NoCompression()))
	body := make([]byte, 1000)
	for range 100 {
		produce(t, p, &kgo.Record{Topic: "orders", Value: body})
	}
	events := newSpy()
	cfg := quick(t)
	cfg.BufferBytes, cfg.FetchBytes, cfg.Hooks = 32<<10, 16<<10, []Hook{events}
	cfg.SessionTimeout = pauseNotice * 4 / 5 // shorter than the pause
	log := &buffer{}
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	s := openSource(t, c, []string{"orders"}, cfg)
	if e := await(t, events.pauses); !e.Paused || e.For < pauseNotice {
		t.Errorf("event is %+v", e)
	}
	st := s.Stats().Partitions[0]
	if st.Bytes > 64<<10 || st.Waiting == 100 || !st.Paused {
		t.Errorf("while paused: %+v", st)
	}
	ack(t, receive(t, s, 100)...)
	if e := await(t, events.pauses); e.Paused {
		t.Errorf("event is %+v", e)
	}
	if n := s.Stats().Rebalances; n != 1 {
		t.Errorf("%d generations, want 1: the membership must stay", n)
	}
	if logged(log, "fetching is paused") != 1 || logged(log, "fetching goes on") != 1 {
		t.Errorf("the log is %s", log)
	}
}

func TestRefusedSessionTimeout(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"), kfake.GroupMinSessionTimeout(10*time.Second))
	s := openSource(t, c, []string{"orders"}, quick(t))
	_, err := s.Receive(t.Context(), 1)
	if !errors.Is(err, kafkago.InvalidSessionTimeout) {
		t.Errorf("got %v, want the broker's refusal", err)
	}
}
