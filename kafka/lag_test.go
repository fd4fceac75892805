package kafka

import (
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// awaitLag waits for an event of a partition that is as wanted.
func awaitLag(t *testing.T, events *spy, partition int32, what string, holds func(LagEvent) bool) LagEvent {
	t.Helper()
	var last LagEvent
	for deadline := time.After(20 * time.Second); ; {
		select {
		case e := <-events.lags:
			if e.Partition != partition {
				continue
			}
			if last = e; holds(e) {
				return e
			}
		case <-deadline:
			t.Fatalf("not within 20 s: %s; the last event is %+v", what, last)
		}
	}
}

// countRequests counts the requests of a kind that the cluster gets.
func countRequests(c *kfake.Cluster, key kmsg.Key) *atomic.Int32 {
	var n atomic.Int32
	c.ControlKey(int16(key), func(kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		n.Add(1)
		return nil, nil, false
	})
	return &n
}

func TestLag(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(2, "orders"))
	p := producer(t, c)
	made := time.UnixMilli(1_750_000_000_000)
	for i := range 5 {
		produce(t, p, &kgo.Record{Topic: "orders", Value: []byte("v"), Timestamp: made.Add(time.Duration(i) * time.Second)})
	}
	commitOffset(t, c, 0)
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.LagInterval, cfg.FetchWait = []Hook{events}, 30*time.Millisecond, 10*time.Millisecond
	s := openSource(t, c, []string{"orders"}, cfg)
	ds := receive(t, s, 4)
	awaitLag(t, events, 0, "nothing is done", func(e LagEvent) bool {
		return e.Lag == 5 && e.Committed == 0 && e.End == 5 && e.Oldest.Equal(made)
	})
	ack(t, ds[0], ds[2])
	e := awaitLag(t, events, 0, "one is done, and one behind a hole", func(e LagEvent) bool { return e.Committed == 1 })
	if e.Topic != "orders" || e.Lag != 4 || !e.Oldest.Equal(made.Add(time.Second)) || time.Since(e.EndAt) > 10*time.Second {
		t.Errorf("event is %+v", e)
	}
	ack(t, ds[1], ds[3])
	ack(t, receive(t, s, 1)...)
	awaitLag(t, events, 0, "all is done", func(e LagEvent) bool {
		return e.Lag == 0 && e.Committed == 5 && e.Oldest.IsZero()
	})
	awaitLag(t, events, 1, "the empty partition", func(e LagEvent) bool {
		return e.Lag == 0 && e.Committed == 0 && e.End == 0 && !e.EndAt.IsZero()
	})
	st := s.Stats().Partitions[0]
	if st.Lag != 0 || st.End != 5 || !st.Oldest.IsZero() || st.EndAt.IsZero() {
		t.Errorf("stats are %+v", st)
	}
}

// While nothing is fetched the end is asked for: one request for all partitions
// of a leader, and none for those that are fetched.
func TestLagWhilePaused(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(3, "orders"))
	p := producer(t, c)
	for id := range int32(2) {
		produce(t, p, numbered("orders", id, 2)...)
	}
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.MaxAhead, cfg.LagInterval, cfg.FetchWait = []Hook{events}, 1, 600*time.Millisecond, 10*time.Millisecond
	s := openSource(t, c, []string{"orders"}, cfg)
	ds := receive(t, s, 2) // one of each; no room for more
	awaitLag(t, events, 2, "the third one is fetched, too", func(e LagEvent) bool { return e.End == 0 })
	for id := range int32(2) {
		produce(t, p, numbered("orders", id, 8)...)
	}
	var asked atomic.Int32 // partitions
	requests := func() *atomic.Int32 {
		var n atomic.Int32
		c.ControlKey(int16(kmsg.ListOffsets), func(req kmsg.Request) (kmsg.Response, error, bool) {
			c.KeepControl()
			n.Add(1)
			for _, topic := range req.(*kmsg.ListOffsetsRequest).Topics {
				for _, part := range topic.Partitions {
					asked.Add(1)
					if part.Partition == 2 {
						t.Error("a partition is asked for that is fetched")
					}
				}
			}
			return nil, nil, false
		})
		return &n
	}()
	for id := range int32(2) {
		awaitLag(t, events, id, "the end is known while nothing is fetched", func(e LagEvent) bool { return e.End == 10 && e.Lag == 10 })
	}
	for range 3 {
		awaitLag(t, events, 0, "another interval", func(LagEvent) bool { return true })
	}
	// At first the fetches before the pause may have told the end of one of them.
	if n := requests.Load(); n < 2 || asked.Load() < 2*n-1 {
		t.Errorf("%d requests for %d partitions, want both in each", n, asked.Load())
	}
	for id := range int32(2) { // and it goes on where it was
		ack(t, ds[id])
	}
	for range 18 {
		ack(t, receive(t, s, 1)...)
	}
	awaitLag(t, events, 1, "all is done", func(e LagEvent) bool { return e.Lag == 0 })
	before := requests.Load()
	for range 5 {
		awaitLag(t, events, 0, "another interval", func(LagEvent) bool { return true })
	}
	if n := requests.Load() - before; n > 1 { // one may have been under way
		t.Errorf("%d requests although everything is fetched", n)
	}
}

// A leader that cannot be asked: the events go on and tell how old the end is,
// and it is logged once.
func TestLagWithoutLeader(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 2)...)
	network := &cuttable{}
	log := &buffer{}
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.MaxAhead, cfg.LagInterval, cfg.Dial = []Hook{events}, 1, 30*time.Millisecond, network.dial
	cfg.SessionTimeout, cfg.HeartbeatInterval = time.Minute, 20*time.Second // stays in its generation
	cfg.CommitInterval, cfg.WatchInterval = -1, -1
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	s := openSource(t, c, []string{"orders"}, cfg)
	receive(t, s, 1)
	awaitLag(t, events, 0, "the end is known", func(e LagEvent) bool { return e.End == 2 })
	network.cut()
	old := awaitLag(t, events, 0, "the end is old", func(e LagEvent) bool { return time.Since(e.EndAt) > time.Second })
	if old.End != 2 || old.Lag != 2 {
		t.Errorf("event is %+v", old)
	}
	if n := strings.Count(log.String(), "ask for the ends of the logs"); n != 1 {
		t.Errorf("logged %d times, want once: %s", n, log)
	}
	if err := network.restore(); err != nil {
		t.Fatal(err)
	}
	awaitLag(t, events, 0, "the end is new", func(e LagEvent) bool { return time.Since(e.EndAt) < time.Second })
}

func TestLagOff(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	requests := countRequests(c, kmsg.ListOffsets)
	commitOffset(t, c, 0)
	produce(t, producer(t, c), numbered("orders", 0, 2)...)
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.LagInterval, cfg.MaxAhead = []Hook{events}, -1, 1
	s := openSource(t, c, []string{"orders"}, cfg)
	receive(t, s, 1)
	<-time.After(300 * time.Millisecond)
	if n := len(events.lags); n != 0 || requests.Load() != 0 {
		t.Errorf("%d events, %d requests, want none", n, requests.Load())
	}
	if st := s.Stats().Partitions[0]; st.Lag != 2 {
		t.Errorf("stats are %+v", st)
	}
}
