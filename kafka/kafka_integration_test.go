package kafka_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/brokertest"
	"github.com/ackafter/ackafter/kafka"
)

// realBrokers returns the addresses of a real cluster, from ACKAFTER_TEST_KAFKA
// (comma separated); without it the test is skipped, or fails if
// ACKAFTER_TEST_REQUIRE is 1.
func realBrokers(t *testing.T) []string {
	t.Helper()
	env := os.Getenv("ACKAFTER_TEST_KAFKA")
	if env == "" {
		if os.Getenv("ACKAFTER_TEST_REQUIRE") == "1" {
			t.Fatal("ACKAFTER_TEST_KAFKA is not set")
		}
		t.Skip("ACKAFTER_TEST_KAFKA is not set")
	}
	return strings.Split(env, ",")
}

var names atomic.Int64

// lab is a topic and a group of its own on a real cluster, with a client to
// arrange things that is not ours.
type lab struct {
	testing.TB
	brokers      []string
	topic, group string
	client       *kgo.Client
}

func newLab(t testing.TB, brokers []string, partitions int32, configs map[string]string) *lab {
	t.Helper()
	name := fmt.Sprintf("ackafter-%d-%d", time.Now().UnixNano(), names.Add(1))
	l := &lab{TB: t, brokers: brokers, topic: name, group: name + "-group"}
	l.client = l.newClient()
	l.createTopic(partitions, configs)
	t.Cleanup(func() {
		req := kmsg.NewPtrDeleteTopicsRequest()
		topic := kmsg.NewDeleteTopicsRequestTopic()
		topic.Topic = &l.topic
		req.TopicNames, req.Topics = []string{l.topic}, []kmsg.DeleteTopicsRequestTopic{topic}
		_, _ = req.RequestWith(context.WithoutCancel(t.Context()), l.client) // as good as it can
		l.client.Close()
	})
	return l
}

func (l *lab) newClient(opts ...kgo.Opt) *kgo.Client {
	l.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(l.brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner())}, opts...)...)
	if err != nil {
		l.Fatal(err)
	}
	return cl
}

func (l *lab) createTopic(partitions int32, configs map[string]string) {
	l.Helper()
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = l.topic, partitions, -1
	for k, v := range configs {
		c := kmsg.NewCreateTopicsRequestTopicConfig()
		c.Name, c.Value = k, &v
		topic.Configs = append(topic.Configs, c)
	}
	req := kmsg.NewPtrCreateTopicsRequest()
	req.Topics = append(req.Topics, topic)
	res, err := req.RequestWith(l.Context(), l.client)
	if err == nil {
		err = kerr.ErrorForCode(res.Topics[0].ErrorCode)
	}
	if err != nil {
		l.Fatal(err)
	}
}

func (l *lab) deleteTopic() {
	l.Helper()
	req := kmsg.NewPtrDeleteTopicsRequest()
	topic := kmsg.NewDeleteTopicsRequestTopic()
	topic.Topic = &l.topic
	req.TopicNames, req.Topics = []string{l.topic}, []kmsg.DeleteTopicsRequestTopic{topic}
	res, err := req.RequestWith(l.Context(), l.client)
	if err == nil {
		err = kerr.ErrorForCode(res.Topics[0].ErrorCode)
	}
	if err != nil {
		l.Fatal(err)
	}
}

func (l *lab) produce(cl *kgo.Client, records ...*kgo.Record) {
	l.Helper()
	for _, r := range records {
		r.Topic = l.topic
		if err := cl.ProduceSync(l.Context(), r).FirstErr(); err != nil {
			l.Fatal(err)
		}
	}
}

// numbers produces n keyed records to a partition.
func (l *lab) numbers(partition int32, n int) {
	l.Helper()
	for i := range n {
		v := []byte(fmt.Sprint(i))
		l.produce(l.client, &kgo.Record{Partition: partition, Key: v, Value: v})
	}
}

// committed returns the group's offsets by partition; -1 for none.
func (l *lab) committed(partitions int32) map[int32]int64 {
	l.Helper()
	req := kmsg.NewPtrOffsetFetchRequest()
	topic := kmsg.NewOffsetFetchRequestTopic()
	topic.Topic = l.topic
	group := kmsg.NewOffsetFetchRequestGroup()
	group.Group = l.group
	groupTopic := kmsg.NewOffsetFetchRequestGroupTopic()
	groupTopic.Topic = l.topic
	for id := range partitions {
		topic.Partitions = append(topic.Partitions, id)
		groupTopic.Partitions = append(groupTopic.Partitions, id)
	}
	group.Topics = append(group.Topics, groupTopic)
	req.Group, req.Topics, req.Groups = l.group, []kmsg.OffsetFetchRequestTopic{topic}, []kmsg.OffsetFetchRequestGroup{group}
	cl := l.newClient(kgo.MaxVersions(kversion.V3_9_0()))
	defer cl.Close()
	res, err := req.RequestWith(l.Context(), cl)
	if err != nil {
		l.Fatal(err)
	}
	offsets := make(map[int32]int64)
	for _, t := range res.Topics {
		for _, p := range t.Partitions {
			offsets[p.Partition] = p.Offset
		}
	}
	for _, g := range res.Groups {
		for _, t := range g.Topics {
			for _, p := range t.Partitions {
				offsets[p.Partition] = p.Offset
			}
		}
	}
	return offsets
}

func (l *lab) awaitCommitted(want int64) {
	l.Helper()
	l.eventually(fmt.Sprintf("partition 0 is committed up to %d", want), func() bool {
		return l.committed(1)[0] == want
	})
}

// commit sets the group's offset as an administrator does.
func (l *lab) commit(partition int32, offset int64) {
	l.Helper()
	p := kmsg.NewOffsetCommitRequestTopicPartition()
	p.Partition, p.Offset = partition, offset
	topic := kmsg.NewOffsetCommitRequestTopic()
	topic.Topic = l.topic
	topic.Partitions = append(topic.Partitions, p)
	req := kmsg.NewPtrOffsetCommitRequest()
	req.Group, req.Generation = l.group, -1
	req.Topics = append(req.Topics, topic)
	cl := l.newClient(kgo.MaxVersions(kversion.V3_9_0()))
	defer cl.Close()
	res, err := req.RequestWith(l.Context(), cl)
	if err == nil {
		err = kerr.ErrorForCode(res.Topics[0].Partitions[0].ErrorCode)
	}
	if err != nil {
		l.Fatal(err)
	}
}

func (l *lab) deleteRecords(partition int32, before int64) {
	l.Helper()
	p := kmsg.NewDeleteRecordsRequestTopicPartition()
	p.Partition, p.Offset = partition, before
	topic := kmsg.NewDeleteRecordsRequestTopic()
	topic.Topic = l.topic
	topic.Partitions = append(topic.Partitions, p)
	req := kmsg.NewPtrDeleteRecordsRequest()
	req.Topics = append(req.Topics, topic)
	if _, err := req.RequestWith(l.Context(), l.client); err != nil {
		l.Fatal(err)
	}
}

func (l *lab) eventually(what string, holds func() bool) {
	l.Helper()
	for deadline := time.Now().Add(60 * time.Second); !holds(); {
		if time.Now().After(deadline) {
			l.Fatalf("not within 60 s: %s", what)
		}
		<-time.After(50 * time.Millisecond)
	}
}

func (l *lab) config() *kafka.Config {
	return &kafka.Config{
		HeartbeatInterval: 500 * time.Millisecond,
		SessionTimeout:    6 * time.Second,
		RebalanceTimeout:  6 * time.Second,
		CommitInterval:    100 * time.Millisecond,
		WatchInterval:     time.Second,
		Logger:            slog.New(slog.NewTextHandler(testLog{l}, nil)),
	}
}

// testLog writes to a test's log.
type testLog struct{ t testing.TB }

func (l testLog) Write(b []byte) (int, error) {
	l.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

func (l *lab) open(cfg *kafka.Config) *kafka.Source {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), 30*time.Second)
	defer cancel()
	s, err := kafka.Open(ctx, l.brokers, l.group, []string{l.topic}, cfg)
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = s.Close(context.Background()) })
	return s
}

func (l *lab) close(s *kafka.Source) {
	l.Helper()
	if err := s.Close(l.Context()); err != nil {
		l.Fatal(err)
	}
}

func (l *lab) receive(s *kafka.Source, n int) []*broker.Delivery {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), 60*time.Second)
	defer cancel()
	var all []*broker.Delivery
	for len(all) < n {
		ds, err := s.Receive(ctx, n-len(all))
		if err != nil {
			l.Fatalf("receive %d of %d: %v", len(all)+1, n, err)
		}
		all = append(all, ds...)
	}
	return all
}

func (l *lab) ack(ds ...*broker.Delivery) {
	l.Helper()
	for _, d := range ds {
		if err := d.Ack(l.Context()); err != nil {
			l.Fatal(err)
		}
	}
}

func bodies(ds []*broker.Delivery) []string {
	var vs []string
	for _, d := range ds {
		vs = append(vs, string(d.Message.Body))
	}
	return vs
}

func TestRealConformance(t *testing.T) {
	t.Parallel()
	brokers := realBrokers(t)
	brokertest.Run(t, brokertest.Harness{
		Setup: func(t testing.TB) brokertest.Queue { return realQueue(newLab(t, brokers, 3, nil)) },
		// A log with one committed offset cannot leave out an earlier message, and
		// Kafka does not count deliveries.
		Without: []brokertest.Feature{brokertest.SelectiveAck, brokertest.Attempts},
		Timing:  brokertest.Timing{Wait: 60 * time.Second, Idle: 8 * time.Second},
	})
}

func realQueue(l *lab) brokertest.Queue {
	var mu sync.Mutex
	networks := make(map[broker.Source]*network)
	keyed := l.newClient(kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)))
	l.Cleanup(keyed.Close)
	isCut := false
	lose := func(ctx context.Context, source broker.Source) error {
		member := kmsg.NewLeaveGroupRequestMember()
		member.MemberID = source.(*kafka.Source).Stats().Member
		req := kmsg.NewPtrLeaveGroupRequest()
		req.Group, req.Members = l.group, []kmsg.LeaveGroupRequestMember{member}
		_, err := req.RequestWith(ctx, l.client)
		return err
	}
	return brokertest.Queue{
		Open: func(ctx context.Context) (broker.Source, error) {
			mu.Lock()
			defer mu.Unlock()
			n := &network{down: isCut}
			cfg := l.config()
			cfg.Logger = slog.New(slog.DiscardHandler)
			cfg.DrainTimeout, cfg.Dial, cfg.MaxBackoff = 1500*time.Millisecond, n.dial, time.Second
			cfg.DialTimeout, cfg.RequestTimeout = 2*time.Second, 2*time.Second
			s, err := kafka.Open(ctx, l.brokers, l.group, []string{l.topic}, cfg)
			if err != nil {
				return nil, err
			}
			networks[s] = n
			return s, nil
		},
		Publish: func(ctx context.Context, messages ...*broker.Message) error {
			for _, m := range messages {
				r := &kgo.Record{Topic: l.topic, Key: m.Key, Value: m.Body, Timestamp: m.Time}
				for _, h := range m.Headers {
					r.Headers = append(r.Headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
				}
				if err := keyed.ProduceSync(ctx, r).FirstErr(); err != nil {
					return err
				}
			}
			return nil
		},
		Lose: lose,
		Recall: func(context.Context, broker.Source) error {
			l.visit()
			return nil
		},
		Crash: func(_ context.Context, source broker.Source) error {
			mu.Lock()
			defer mu.Unlock()
			networks[source].set(true)
			return nil
		},
		Cut: func(context.Context) (func() error, error) {
			set := func(down bool) {
				mu.Lock()
				defer mu.Unlock()
				isCut = down
				for _, n := range networks {
					n.set(down)
				}
			}
			set(true)
			return func() error { set(false); return nil }, nil
		},
		Committed: func(context.Context) (map[string]int64, error) {
			offsets := make(map[string]int64)
			for id, o := range l.committed(3) { //nolint:contextcheck // the lab has the test's
				if o >= 0 {
					offsets[fmt.Sprintf("kafka:%s/%d", l.topic, id)] = o
				}
			}
			return offsets, nil
		},
	}
}

// visit lets another member join the group and leave it again, which it does when
// it has got partitions.
func (l *lab) visit() {
	leave := make(chan struct{}, 1)
	visitor := l.newClient(kgo.ConsumerGroup(l.group), kgo.ConsumeTopics(l.topic), kgo.Balancers(kgo.RangeBalancer()), kgo.DisableAutoCommit(),
		kgo.OnPartitionsAssigned(func(context.Context, *kgo.Client, map[string][]int32) {
			select {
			case leave <- struct{}{}:
			default:
			}
		}))
	var gone sync.WaitGroup
	gone.Go(func() {
		select {
		case <-leave:
		case <-l.Context().Done():
		}
		visitor.Close()
	})
	l.Cleanup(gone.Wait)
}

// network is one that can go down.
type network struct {
	mu    sync.Mutex
	down  bool
	conns []net.Conn
}

func (n *network) dial(ctx context.Context, kind, address string) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return nil, errors.New("the network is down")
	}
	c, err := new(net.Dialer).DialContext(ctx, kind, address)
	if err == nil {
		n.conns = append(n.conns, c)
	}
	return c, err
}

func (n *network) set(down bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down = down
	if down {
		for _, c := range n.conns {
			_ = c.Close()
		}
		n.conns = nil
	}
}

// case K1
func TestRealCommittedOffset(t *testing.T) {
	t.Parallel()
	l := newLab(t, realBrokers(t), 1, nil)
	l.numbers(0, 10)
	s := l.open(l.config())
	ds := l.receive(s, 10)
	for _, i := range []int{9, 0, 8, 1, 7, 2, 6, 5, 4} {
		l.ack(ds[i])
	}
	l.awaitCommitted(3)
	last := int64(3)
	for range 10 {
		if o := l.committed(1)[0]; o != last {
			t.Fatalf("committed is %d while 3 is not done", o)
		}
		<-time.After(50 * time.Millisecond)
	}
	l.ack(ds[3])
	l.awaitCommitted(10)
}

// case K1: what was not committed when the process died comes again.
func TestRealCrash(t *testing.T) {
	t.Parallel()
	l := newLab(t, realBrokers(t), 1, nil)
	l.numbers(0, 10)
	n := &network{}
	cfg := l.config()
	cfg.Dial = n.dial
	s := l.open(cfg)
	ds := l.receive(s, 10)
	l.ack(ds[0], ds[1], ds[2], ds[7])
	l.awaitCommitted(3)
	n.set(true)
	again := l.receive(l.open(l.config()), 7)
	if got := bodies(again); !slices.Equal(got, []string{"3", "4", "5", "6", "7", "8", "9"}) {
		t.Errorf("got %q again", got)
	}
	l.ack(again...)
	l.awaitCommitted(10)
}

// case K3
func TestRealQuietPartition(t *testing.T) {
	t.Parallel()
	l := newLab(t, realBrokers(t), 3, nil)
	l.numbers(0, 1)
	cfg := l.config()
	cfg.Start = kafka.StartEarliest
	s := l.open(cfg)
	l.ack(l.receive(s, 1)...)
	l.eventually("every partition has an offset", func() bool {
		c := l.committed(3)
		return c[0] == 1 && c[1] == 0 && c[2] == 0
	})
	l.close(s)
	l.numbers(2, 5)
	if got := bodies(l.receive(l.open(cfg), 5)); !slices.Equal(got, []string{"0", "1", "2", "3", "4"}) {
		t.Errorf("got %q", got)
	}
}

// case K4
func TestRealGap(t *testing.T) {
	t.Parallel()
	brokers := realBrokers(t)
	for _, policy := range []kafka.GapPolicy{kafka.GapContinue, kafka.GapStop} {
		t.Run(fmt.Sprint(policy), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, brokers, 1, nil)
			var batch []*kgo.Record
			for range 600 {
				batch = append(batch, &kgo.Record{Topic: l.topic, Value: []byte("v")})
			}
			if err := l.client.ProduceSync(t.Context(), batch...).FirstErr(); err != nil {
				t.Fatal(err)
			}
			l.commit(0, 100)
			l.deleteRecords(0, 500)
			events := make(gaps, 10)
			cfg := l.config()
			cfg.OnGap, cfg.Hooks = policy, []kafka.Hook{events}
			s := l.open(cfg)
			want := kafka.GapError{Topic: l.topic, From: 100, To: 500}
			if e := <-events; e != want || e.Count() != 400 {
				t.Errorf("event is %+v, want %+v", e, want)
			}
			if policy == kafka.GapStop {
				_, err := s.Receive(t.Context(), 1)
				var gap *kafka.GapError
				if !errors.As(err, &gap) || *gap != want {
					t.Errorf("got %v, want the gap", err)
				}
				return
			}
			ds := l.receive(s, 100)
			if o := ds[0].Message.Position.Offset; o != 500 {
				t.Errorf("goes on at %d, want 500", o)
			}
			l.ack(ds...)
			l.awaitCommitted(600)
			if s.Health() == nil {
				t.Error("health is silently green")
			}
		})
	}
}

type gaps chan kafka.GapError

func (c gaps) OnGap(_ context.Context, e kafka.GapError) { c <- e }

type resets chan kafka.ResetError

func (c resets) OnReset(_ context.Context, e kafka.ResetError) { c <- e }

// case K5
func TestRealTopicCreatedAnew(t *testing.T) {
	t.Parallel()
	brokers := realBrokers(t)
	for _, policy := range []kafka.ResetPolicy{kafka.ResetStop, kafka.ResetRestart} {
		t.Run(fmt.Sprint(policy), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, brokers, 1, nil)
			l.numbers(0, 3)
			l.commit(0, 0)
			events := make(resets, 10)
			cfg := l.config()
			cfg.OnReset, cfg.Hooks = policy, []kafka.Hook{events}
			s := l.open(cfg)
			l.ack(l.receive(s, 3)...)
			l.awaitCommitted(3)
			l.deleteTopic()
			l.eventually("the topic is created anew", func() bool {
				topic := kmsg.NewCreateTopicsRequestTopic()
				topic.Topic, topic.NumPartitions, topic.ReplicationFactor = l.topic, 1, -1
				req := kmsg.NewPtrCreateTopicsRequest()
				req.Topics = append(req.Topics, topic)
				res, err := req.RequestWith(t.Context(), l.client)
				return err == nil && res.Topics[0].ErrorCode == 0
			})
			began := time.Now()
			cl := l.newClient()
			defer cl.Close()
			for i := range 10 {
				l.produce(cl, &kgo.Record{Value: []byte(fmt.Sprint(i))})
			}
			e := <-events
			if took := time.Since(began); took > 30*time.Second {
				t.Errorf("noticed after %v", took)
			}
			if e.Topic != l.topic || (e.Reason != kafka.ResetRecreated && e.Reason != kafka.ResetDeleted) {
				t.Errorf("event is %+v", e)
			}
			if policy == kafka.ResetStop {
				l.eventually("Receive says so", func() bool {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					_, err := s.Receive(ctx, 1)
					var reset *kafka.ResetError
					return errors.As(err, &reset)
				})
				return
			}
			// Some may have come before it was noticed; then they come again.
			seen := make(map[string]bool)
			l.eventually("all of the new topic is done", func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				defer cancel()
				ds, _ := s.Receive(ctx, 100)
				for _, d := range ds {
					seen[string(d.Message.Body)] = true
					_ = d.Ack(t.Context()) // a lost one comes again
				}
				return len(seen) == 10 && l.committed(1)[0] == 10
			})
		})
	}
}

// case K5: nothing but the offsets shows it.
func TestRealBeyondEnd(t *testing.T) {
	t.Parallel()
	l := newLab(t, realBrokers(t), 1, nil)
	l.numbers(0, 10)
	l.commit(0, 1000)
	events := make(resets, 10)
	cfg := l.config()
	cfg.OnReset, cfg.Hooks = kafka.ResetRestart, []kafka.Hook{events}
	s := l.open(cfg)
	want := kafka.ResetError{Topic: l.topic, Reason: kafka.ResetBeyondEnd, Offset: 1000, End: 10}
	if e := <-events; e != want {
		t.Errorf("event is %+v, want %+v", e, want)
	}
	l.ack(l.receive(s, 10)...)
	l.awaitCommitted(10)
}

// case K8
func TestRealTransactions(t *testing.T) {
	t.Parallel()
	l := newLab(t, realBrokers(t), 1, nil)
	tx := l.newClient(kgo.TransactionalID(l.topic))
	defer tx.Close()
	transact := func(how kgo.TransactionEndTry, value string) {
		t.Helper()
		if err := tx.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		l.produce(tx, &kgo.Record{Value: []byte(value)})
		if err := tx.EndTransaction(t.Context(), how); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 10 {
		transact(kgo.TryCommit, fmt.Sprint(i))
	}
	s := l.open(l.config())
	ds := l.receive(s, 10)
	if o := ds[9].Message.Position.Offset; o != 18 {
		t.Errorf("the last is at %d, want 18", o)
	}
	l.ack(ds...)
	l.awaitCommitted(20)
	transact(kgo.TryAbort, "aborted")
	l.awaitCommitted(22)
	transact(kgo.TryCommit, "after")
	if got := bodies(l.receive(s, 1)); got[0] != "after" {
		t.Errorf("got %q, want what was committed", got)
	}
	if lag := s.Stats().Partitions[0].Lag; lag > 2 {
		t.Errorf("lag is %d", lag)
	}
}

// case K8
func TestRealCompacted(t *testing.T) {
	t.Parallel()
	l := newLab(t, realBrokers(t), 1, map[string]string{
		"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.001", "min.compaction.lag.ms": "0",
	})
	var batch []*kgo.Record
	for i := range 51 {
		key := "same"
		if i == 3 || i == 7 || i == 40 {
			key = fmt.Sprint(i)
		}
		batch = append(batch, &kgo.Record{Topic: l.topic, Key: []byte(key), Value: []byte(fmt.Sprint(i))})
	}
	if err := l.client.ProduceSync(t.Context(), batch...).FirstErr(); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"same", "other"} {
		<-time.After(200 * time.Millisecond) // segment.ms
		l.produce(l.client, &kgo.Record{Key: []byte(key), Value: []byte(key)})
	}
	// Until the cleaner has been there, which another client sees.
	l.eventually("the topic is compacted", func() bool {
		cl := l.newClient(kgo.ConsumeTopics(l.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
		defer cl.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		seen := 0
		for last := ""; last != "other" && ctx.Err() == nil; {
			cl.PollFetches(ctx).EachRecord(func(r *kgo.Record) { seen, last = seen+1, string(r.Value) })
		}
		return ctx.Err() == nil && seen == 5
	})
	s := l.open(l.config())
	ds := l.receive(s, 5)
	if got := bodies(ds); !slices.Equal(got, []string{"3", "7", "40", "same", "other"}) {
		t.Errorf("got %q", got)
	}
	l.ack(ds...)
	l.awaitCommitted(53)
}

// case K9
func TestRealOddBodies(t *testing.T) {
	t.Parallel()
	brokers := realBrokers(t)
	for _, codec := range []kgo.CompressionCodec{kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()} {
		l := newLab(t, brokers, 1, nil)
		cl := l.newClient(kgo.ProducerBatchCompression(codec))
		want := [][]byte{nil, {}, []byte("\x00\x00\x00\x00\x0c{}"), {0x1f, 0x8b, 8, 0}, make([]byte, 500_000)}
		for _, v := range want {
			l.produce(cl, &kgo.Record{Value: v})
		}
		cl.Close()
		s := l.open(l.config())
		for i, d := range l.receive(s, len(want)) {
			if got := d.Message.Body; string(got) != string(want[i]) || (got == nil) != (want[i] == nil) {
				t.Errorf("%+v: body %d is %.20q", codec, i, got)
			}
		}
		l.close(s)
	}
}

// Two members come and go while messages flow.
func TestRealRebalance(t *testing.T) {
	t.Parallel()
	const partitions, messages = 4, 4000
	l := newLab(t, realBrokers(t), partitions, nil)
	var mu sync.Mutex
	done := make(map[string]bool)
	last := make(map[string]int)
	handle := func(m *broker.Message) {
		mu.Lock()
		defer mu.Unlock()
		if done[m.ID] {
			return
		}
		done[m.ID] = true
		var n int
		_, _ = fmt.Sscan(string(m.Body), &n)
		if n < last[string(m.Key)] {
			t.Errorf("key %s: %d after %d", m.Key, n, last[string(m.Key)])
		}
		last[string(m.Key)] = n
	}
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(done)
	}
	var workers sync.WaitGroup
	start := func(cfg *kafka.Config) *kafka.Source {
		s := l.open(cfg)
		workers.Go(func() {
			for {
				ds, err := s.Receive(t.Context(), 50)
				if err != nil {
					return
				}
				for _, d := range ds {
					if d.Context().Err() == nil {
						handle(d.Message)
						_ = d.Ack(t.Context()) // a lost one comes again
					}
				}
			}
		})
		return s
	}
	cfg := l.config()
	cfg.DrainTimeout = time.Second
	steady := start(cfg)
	produced := make(chan struct{})
	go func() {
		defer close(produced)
		for i := range messages {
			k := i % 40
			r := &kgo.Record{Topic: l.topic, Partition: int32(k % partitions), Key: []byte(fmt.Sprint(k)), Value: []byte(fmt.Sprint(i))}
			if err := l.client.ProduceSync(t.Context(), r).FirstErr(); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for round := range 4 {
		n := &network{}
		c := l.config()
		c.Dial, c.DrainTimeout = n.dial, time.Second
		s := start(c)
		<-time.After(1500 * time.Millisecond)
		if round%2 == 0 {
			_ = s.Close(t.Context())
		} else {
			n.set(true) // as if killed
			<-time.After(time.Second)
			_ = s.Close(t.Context())
		}
	}
	<-produced
	l.eventually("everything has its effect", func() bool { return count() == messages })
	l.eventually("all is committed", func() bool {
		for _, o := range l.committed(partitions) {
			if o != messages/partitions {
				return false
			}
		}
		return true
	})
	t.Logf("%+v", steady.Stats())
	_ = steady.Close(t.Context())
	workers.Wait()
}
