package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/internal/retry"
)

// quickPublisher is a configuration that does not make a test wait.
func quickPublisher(t *testing.T) *PublisherConfig {
	t.Helper()
	return &PublisherConfig{
		MaxBackoff: 100 * time.Millisecond,
		Logger:     slog.New(slog.NewTextHandler(logTo{t}, nil)),
	}
}

func openPublisher(t *testing.T, c *kfake.Cluster, cfg *PublisherConfig) *Publisher {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	p, err := OpenPublisher(ctx, c.ListenAddrs(), "orders", cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close(context.WithoutCancel(t.Context())) })
	return p
}

func publish(t *testing.T, p *Publisher, messages ...*broker.Message) {
	t.Helper()
	if err := p.Publish(t.Context(), messages...); err != nil {
		t.Fatal(err)
	}
}

// consume returns the next n records of the topic, read by another client.
func consume(t *testing.T, c *kfake.Cluster, n int) []*kgo.Record {
	t.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(c.ListenAddrs()...), kgo.ConsumeTopics("orders"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var records []*kgo.Record
	for len(records) < n {
		fetches := cl.PollFetches(ctx)
		if ctx.Err() != nil {
			t.Fatalf("%d of %d records: %v", len(records), n, ctx.Err())
		}
		records = append(records, fetches.Records()...)
	}
	return records
}

func TestPublish(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_750_000_000_123)
	messages := []*broker.Message{
		{
			ID: "elsewhere/1", Source: "elsewhere", Position: broker.At(7), Key: []byte("A1"), Body: []byte("body"), Time: at,
			Headers: broker.Headers{{Name: "a", Value: []byte("1")}, {Name: "b", Value: []byte{}}, {Name: "a", Value: nil}, {Name: "", Value: []byte{0xff}}},
		},
		{Key: []byte("A1")}, // a tombstone
		{Key: []byte("A1"), Body: []byte{}, Time: at.Add(-time.Hour)},
		{Key: []byte("A1"), Body: bytes.Repeat([]byte("x"), 300_000)},
	}
	for _, codec := range []Compression{CompressionNone, CompressionGzip, CompressionSnappy, CompressionLz4, CompressionZstd} {
		t.Run(fmt.Sprint(codec), func(t *testing.T) {
			t.Parallel()
			c := newFake(t, kfake.SeedTopics(1, "orders"))
			cfg := quickPublisher(t)
			cfg.Compression = codec
			p := openPublisher(t, c, cfg)
			var used atomic.Int32
			c.ControlKey(int16(kmsg.Produce), func(req kmsg.Request) (kmsg.Response, error, bool) {
				c.KeepControl()
				if acks := req.(*kmsg.ProduceRequest).Acks; acks != -1 {
					t.Errorf("acks = %d, want those of all in-sync replicas", acks)
				}
				var batch kmsg.RecordBatch
				if err := batch.ReadFrom(req.(*kmsg.ProduceRequest).Topics[0].Partitions[0].Records); err != nil {
					t.Error(err)
				}
				used.Store(int32(batch.Attributes & 7))
				return nil, nil, false
			})
			before := time.Now().Add(-time.Second)
			publish(t, p, messages...)
			publish(t, p)                                                    // nothing
			publish(t, p, &broker.Message{Key: []byte{}}, &broker.Message{}) // an empty key, and none
			s := openSource(t, c, []string{"orders"}, quick(t))
			ds := receive(t, s, 6)
			for i, want := range messages {
				got := ds[i].Message
				if !bytes.Equal(got.Key, want.Key) || !bytes.Equal(got.Body, want.Body) || (got.Body == nil) != (want.Body == nil) {
					t.Errorf("message %d is %.40q: %.40q", i, got.Key, got.Body)
				}
				if want.Time.IsZero() && got.Time.Before(before) || !want.Time.IsZero() && !got.Time.Equal(want.Time) {
					t.Errorf("message %d is of %v, want %v", i, got.Time, want.Time)
				}
				if !slices.EqualFunc(got.Headers, want.Headers, func(a, b broker.Header) bool {
					return a.Name == b.Name && bytes.Equal(a.Value, b.Value) && (a.Value == nil) == (b.Value == nil)
				}) {
					t.Errorf("message %d has headers %q", i, got.Headers)
				}
			}
			if ds[4].Message.Key == nil || ds[5].Message.Key != nil {
				t.Error("an empty key and none became the same")
			}
			if got := Compression(used.Load()); got != codec {
				t.Errorf("codec %d was used", got)
			}
		})
	}
}

// Keys land where other clients put them.
func TestPublishPartitions(t *testing.T) {
	t.Parallel()
	const partitions, keys = 7, 300
	c := newFake(t, kfake.NumBrokers(3), kfake.SeedTopics(partitions, "orders"))
	other := producer(t, c, kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)))
	p := openPublisher(t, c, quickPublisher(t))
	var messages []*broker.Message
	for i := range keys {
		key := []byte(strings.Repeat("k", i%9) + fmt.Sprint(i*7919))
		if i == 0 {
			key = []byte{}
		}
		produce(t, other, &kgo.Record{Topic: "orders", Key: key, Value: []byte("theirs")})
		messages = append(messages, &broker.Message{Key: key, Body: []byte("ours")})
	}
	publish(t, p, messages...)
	theirs := make(map[string]int32)
	ours := make(map[string]int32)
	for _, r := range consume(t, c, 2*keys) {
		if string(r.Value) == "ours" {
			ours[string(r.Key)] = r.Partition
		} else {
			theirs[string(r.Key)] = r.Partition
		}
	}
	used := make(map[int32]bool)
	for key, partition := range ours {
		used[partition] = true
		if theirs[key] != partition {
			t.Errorf("key %q is in partition %d, another client puts it into %d", key, partition, theirs[key])
		}
	}
	if len(ours) != keys || len(used) != partitions {
		t.Errorf("%d keys in %d partitions", len(ours), len(used))
	}
}

// What the Java client computes: its own test vectors.
func TestMurmur2(t *testing.T) {
	t.Parallel()
	const partitions = 1 << 20 // a power of two: the hash's lowest bits
	ids := make([]int, partitions)
	for i := range ids {
		ids[i] = i
	}
	for key, hash := range map[string]int32{
		"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536,
		"a-little-bit-longer-string": -1486304829, "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
		"abc": 479470107,
	} {
		want := int(hash&0x7fffffff) % partitions
		if got := (kafkago.Murmur2Balancer{}).Balance(kafkago.Message{Key: []byte(key)}, ids...); got != want {
			t.Errorf("key %q: partition %d, want %d", key, got, want)
		}
	}
}

// Many messages make many requests: nothing is lost and order is kept, also when
// brokers ask for another attempt.
func TestPublishOrder(t *testing.T) {
	t.Parallel()
	const n = 3000
	c := newFake(t, kfake.NumBrokers(3), kfake.SeedTopics(5, "orders"))
	cfg := quickPublisher(t)
	cfg.MaxMessageBytes = 2000
	p := openPublisher(t, c, cfg)
	fault := c.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.NotEnoughReplicas, Count: 5})
	var messages []*broker.Message
	for i := range n {
		m := &broker.Message{Body: []byte(fmt.Sprint(i))}
		if i%3 > 0 {
			m.Key = []byte(fmt.Sprint(i % 20))
		}
		messages = append(messages, m)
	}
	publish(t, p, messages...)
	if fault.Hits() != 5 {
		t.Errorf("%d faults were met", fault.Hits())
	}
	last := make(map[int32]int)
	seen := make(map[string]bool)
	for _, r := range consume(t, c, n) {
		var i int
		if _, err := fmt.Sscan(string(r.Value), &i); err != nil {
			t.Fatal(err)
		}
		if before, ok := last[r.Partition]; ok && i <= before {
			t.Fatalf("partition %d: %d after %d", r.Partition, i, before)
		}
		last[r.Partition] = i
		seen[string(r.Value)] = true
	}
	if len(seen) != n {
		t.Errorf("%d messages", len(seen))
	}
}

func TestPublishTooLarge(t *testing.T) {
	t.Parallel()
	c := newFake(t)
	if err := c.CreateTopic("orders", 1, map[string]string{"max.message.bytes": "5000"}); err != nil {
		t.Fatal(err)
	}
	cfg := quickPublisher(t)
	cfg.MaxMessageBytes = 20_000
	p := openPublisher(t, c, cfg)
	small := func() *broker.Message { return &broker.Message{Key: []byte("A1"), Body: make([]byte, 1000)} }

	err := p.Publish(t.Context(), small(), &broker.Message{Body: make([]byte, 20_000)})
	if !errors.Is(err, ErrTooLarge) || err.Error() != "kafka: publish: message 1: message is too large: PublisherConfig.MaxMessageBytes allows 20000 bytes" {
		t.Errorf("got %v, want that it is too large", err)
	}
	// The topic's own limit: the broker refuses what comes together.
	err = p.Publish(t.Context(), small(), small(), &broker.Message{Key: []byte("A1"), Body: make([]byte, 6000)})
	var failed *PublishError
	if !errors.As(err, &failed) || !slices.Equal(failed.Failed, []int{0, 1, 2}) || failed.Of != 3 || failed.Topic != "orders" ||
		!errors.Is(err, ErrTooLarge) || !errors.Is(err, kafkago.MessageSizeTooLarge) ||
		!strings.Contains(err.Error(), `kafka: publish to "orders": 3 of 3 messages are not confirmed: message is too large for the topic`) {
		t.Errorf("got %v, want that it is too large", err)
	}
	publish(t, p, small())
	if got := consume(t, c, 1); len(got) != 1 || len(got[0].Value) != 1000 {
		t.Errorf("%d records, want the last", len(got))
	}
}

// The attempts last as long as a call may.
func TestPublishAttempts(t *testing.T) {
	t.Parallel()
	for _, within := range []time.Duration{time.Millisecond, 30 * time.Second, 24 * time.Hour} {
		for _, most := range []time.Duration{retry.MinBackoff, 250 * time.Millisecond, 5 * time.Second, 24 * time.Hour} {
			n := attempts(within, most)
			var waits time.Duration
			for i := 1; i < n; i++ {
				waits += min(time.Duration(i*i)*retry.MinBackoff, most)
			}
			if n > 100_000 || waits < min(within, 100_000*retry.MinBackoff-retry.MinBackoff) {
				t.Errorf("%d attempts last %v, want %v", n, waits, within)
			}
		}
	}
}

// What is as large as MaxMessageBytes allows by default, alone and together, fits
// in a topic that is not configured.
func TestPublishDefaultSize(t *testing.T) {
	t.Parallel()
	const brokersDefault = 1<<20 + 12
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	p := openPublisher(t, c, quickPublisher(t))
	var most atomic.Int64
	c.ControlKey(int16(kmsg.Produce), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		most.Store(max(most.Load(), int64(len(req.(*kmsg.ProduceRequest).Topics[0].Partitions[0].Records))))
		return nil, nil, false
	})
	publish(t, p, &broker.Message{Body: make([]byte, 1_000_000-23)})
	for _, size := range []int{1, 100, 10_000, 100_000} {
		var messages []*broker.Message
		for i := range min(200, 2_000_000/size) {
			messages = append(messages, &broker.Message{Body: make([]byte, size), Time: time.UnixMilli(int64(1 + i%2*1_750_000_000_000)), Headers: broker.Headers{{Name: "a"}}})
		}
		publish(t, p, messages...)
	}
	if got := most.Load(); got < 1_000_000 || got > brokersDefault {
		t.Errorf("a batch had %d bytes", got)
	}
	if err := p.Publish(t.Context(), &broker.Message{Body: make([]byte, 1_000_000)}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v, want that it is too large", err)
	}
}

// What is refused for good does not stop other partitions, and is not tried for
// ever.
func TestPublishRefused(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(2, "orders"))
	p := openPublisher(t, c, quickPublisher(t))
	bad := []byte("not this one")
	c.ControlKey(int16(kmsg.Produce), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		part := req.(*kmsg.ProduceRequest).Topics[0].Partitions[0]
		if !bytes.Contains(part.Records, bad) {
			return nil, nil, false
		}
		res := req.ResponseKind().(*kmsg.ProduceResponse)
		a := kmsg.NewProduceResponseTopicPartition()
		a.Partition = part.Partition
		a.ErrorCode, a.ErrorMessage = kerr.InvalidRecord.Code, kmsg.StringPtr("a rule of the broker")
		topic := kmsg.NewProduceResponseTopic()
		topic.Topic, topic.Partitions = "orders", append(topic.Partitions, a)
		res.Topics = append(res.Topics, topic)
		return res, nil, true
	})
	one, other := keysOfTwo(t)
	err := p.Publish(t.Context(), &broker.Message{Key: one, Body: []byte("0")}, &broker.Message{Key: other, Body: bad},
		&broker.Message{Key: one, Body: []byte("2")}, &broker.Message{Key: other, Body: []byte("beside the bad one")})
	var failed *PublishError
	if !errors.As(err, &failed) || !slices.Equal(failed.Failed, []int{1, 3}) || !strings.Contains(err.Error(), "a rule of the broker") {
		t.Errorf("got %v, want that messages 1 and 3 are refused", err)
	}
	if got := consume(t, c, 2); string(got[0].Value) != "0" || string(got[1].Value) != "2" {
		t.Errorf("got %q, %q", got[0].Value, got[1].Value)
	}
}

// keysOfTwo returns keys that are in different partitions of two.
func keysOfTwo(t *testing.T) (one, other []byte) {
	t.Helper()
	in := func(key string) int {
		return kafkago.Murmur2Balancer{}.Balance(kafkago.Message{Key: []byte(key)}, 0, 1)
	}
	for i := range 100 {
		if key := fmt.Sprint(i); in(key) != in("one") {
			return []byte("one"), []byte(key)
		}
	}
	t.Fatal("all keys are in one partition")
	return nil, nil
}

func TestOpenPublisherErrors(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"), kfake.AllowAutoTopicCreation())
	_, err := OpenPublisher(t.Context(), c.ListenAddrs(), "refunds", quickPublisher(t))
	if !errors.Is(err, ErrNoTopic) || !strings.Contains(err.Error(), `"refunds"`) {
		t.Errorf("got %v, want that the topic is missing", err)
	}
	if c.TopicInfo("refunds") != nil {
		t.Error("the missing topic was created")
	}
	for _, tc := range []struct {
		brokers []string
		topic   string
		config  PublisherConfig
		says    string
	}{
		{nil, "orders", PublisherConfig{}, "kafka: open: brokers: there must be at least one"},
		{[]string{"a:1"}, "", PublisherConfig{}, `kafka: open: topic is "": must not be blank`},
		{[]string{"a:1"}, "a b", PublisherConfig{}, `kafka: open: topic is "a b": must be of letters`},
		{[]string{"a:1"}, "orders", PublisherConfig{DialTimeout: -1}, "kafka: config: DialTimeout = -1ns: must be from"},
		{[]string{"a:1"}, "orders", PublisherConfig{RequestTimeout: -1}, "kafka: config: RequestTimeout = -1ns"},
		{[]string{"a:1"}, "orders", PublisherConfig{PublishTimeout: -1}, "kafka: config: PublishTimeout = -1ns"},
		{[]string{"a:1"}, "orders", PublisherConfig{CloseTimeout: 25 * time.Hour}, "kafka: config: CloseTimeout = 25h0m0s"},
		{[]string{"a:1"}, "orders", PublisherConfig{MaxBackoff: 1}, "kafka: config: MaxBackoff = 1ns: must be from 100ms"},
		{[]string{"a:1"}, "orders", PublisherConfig{MaxMessageBytes: -1}, "kafka: config: MaxMessageBytes = -1: must be from 1 to 536870912"},
		{[]string{"a:1"}, "orders", PublisherConfig{MaxMessageBytes: 1 << 30}, "kafka: config: MaxMessageBytes = 1073741824"},
		{[]string{"a:1"}, "orders", PublisherConfig{Compression: 5}, "kafka: config: Compression = 5: is not one of"},
		{[]string{"a:1"}, "orders", PublisherConfig{SASL: &SASL{Mechanism: "NONE"}}, `kafka: config: SASL.Mechanism = "NONE"`},
	} {
		_, err := OpenPublisher(t.Context(), tc.brokers, tc.topic, &tc.config)
		if err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("got %v, want %q", err, tc.says)
		}
	}
	d := (*PublisherConfig)(nil).withDefaults()
	if err := d.validate(); err != nil || d.ClientID != "ackafter" || d.DialTimeout != 5*time.Second || d.RequestTimeout != 10*time.Second ||
		d.PublishTimeout != 30*time.Second || d.CloseTimeout != 10*time.Second || d.MaxBackoff != 5*time.Second ||
		d.MaxMessageBytes != 1_000_000 || d.Compression != CompressionNone || d.Dial == nil || d.Logger == nil {
		t.Errorf("a default differs from its comment: %+v, %v", d, err)
	}
	cfg := quick(t)
	cfg.ClientID, cfg.RequestTimeout, cfg.SASL = "me", time.Second, &SASL{}
	got := cfg.ForPublisher()
	if got.ClientID != "me" || got.RequestTimeout != time.Second || got.SASL != cfg.SASL || got.MaxBackoff != cfg.MaxBackoff || got.Logger != cfg.Logger {
		t.Errorf("for a publisher: %+v", got)
	}
	if (*Config)(nil).ForPublisher() == nil {
		t.Error("nil gives nil")
	}
}

func TestPublisherPermissions(t *testing.T) {
	t.Parallel()
	allow := func(op kmsg.ACLOperation) kfake.ACL {
		return kfake.ACL{Resource: kmsg.ACLResourceTypeTopic, Name: "orders", Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: op, Allow: true}
	}
	for _, tc := range []struct {
		name string
		acls []kfake.ACL
		says string
	}{
		{"may write", []kfake.ACL{allow(kmsg.ACLOperationWrite)}, ""},
		{"nothing", nil, `kafka: open: topic "orders": permission is missing to describe`},
		{"only read", []kfake.ACL{allow(kmsg.ACLOperationRead)}, `kafka: open: topic "orders": permission is missing to write`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := newFake(t, kfake.SeedTopics(1, "orders"), kfake.EnableSASL(), kfake.EnableACLs(),
				kfake.Superuser("PLAIN", "admin", "admin"), kfake.User("PLAIN", "app", "secret", tc.acls...))
			source := quick(t)
			source.SASL = &SASL{Mechanism: SASLPlain, Credentials: StaticCredentials("app", "secret")}
			p, err := OpenPublisher(t.Context(), c.ListenAddrs(), "orders", source.ForPublisher())
			if tc.says != "" {
				if !errors.Is(err, ErrForbidden) || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("got %v, want %q", err, tc.says)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			publish(t, p, &broker.Message{Body: []byte("v")})
			if err := p.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A login that gets no answer is given up, and what comes behind it goes on.
func TestPublisherLoginHangs(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"), kfake.EnableSASL(), kfake.Superuser("PLAIN", "user", "secret"))
	release := make(chan struct{})
	defer close(release)
	var logins, asked atomic.Int32
	c.ControlKey(int16(kmsg.SASLHandshake), func(kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		if logins.Add(1) == 2 { // after that of the check, the writer's first
			c.SleepControl(func() { <-release })
		}
		return nil, nil, false
	})
	cfg := quickPublisher(t)
	cfg.DialTimeout = 300 * time.Millisecond
	cfg.SASL = &SASL{Mechanism: SASLPlain, Credentials: func(context.Context) (string, string, error) {
		asked.Add(1)
		return "user", "secret", nil
	}}
	publish(t, openPublisher(t, c, cfg), &broker.Message{})
	if logins.Load() < 3 || asked.Load() < logins.Load()-1 {
		t.Errorf("%d logins, credentials were asked for %d times", logins.Load(), asked.Load())
	}
}

// The permission is taken away while the publisher is open.
func TestPublishForbidden(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	p := openPublisher(t, c, quickPublisher(t))
	c.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.TopicAuthorizationFailed, Count: -1})
	err := p.Publish(t.Context(), &broker.Message{}, &broker.Message{})
	var failed *PublishError
	if !errors.As(err, &failed) || !slices.Equal(failed.Failed, []int{0, 1}) || !errors.Is(err, ErrForbidden) || !strings.Contains(err.Error(), `topic "orders"`) {
		t.Errorf("got %v, want that it is forbidden", err)
	}
}

func TestPublishToDeletedTopic(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"), kfake.AllowAutoTopicCreation())
	p := openPublisher(t, c, quickPublisher(t))
	publish(t, p, &broker.Message{})
	if err := c.DeleteTopic("orders"); err != nil {
		t.Fatal(err)
	}
	err := p.Publish(t.Context(), &broker.Message{}, &broker.Message{})
	var failed *PublishError
	if !errors.As(err, &failed) || len(failed.Failed) != 2 || !errors.Is(err, ErrNoTopic) {
		t.Errorf("got %v, want that there is no topic", err)
	}
	if c.TopicInfo("orders") != nil {
		t.Error("the deleted topic was created")
	}
}

// Leaders move, answers go missing, connections break: everything arrives.
func TestPublishWhileLeadersMove(t *testing.T) {
	t.Parallel()
	const n = 200
	c := newFake(t, kfake.NumBrokers(3), kfake.SeedTopics(3, "orders"))
	network := &cuttable{}
	cfg := quickPublisher(t)
	cfg.Dial, cfg.RequestTimeout, cfg.PublishTimeout = network.dial, 2*time.Second, 2*time.Minute
	p := openPublisher(t, c, cfg)
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range n / 4 {
				m := &broker.Message{Key: []byte(fmt.Sprint(worker, i)), Body: []byte(fmt.Sprint(worker, i))}
				if err := p.Publish(t.Context(), m); err != nil {
					t.Error(err)
				}
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		wg.Wait()
		close(ended)
	}()
	// Not all the time: to find a leader again takes the library up to 6 s.
	moves, cuts := time.NewTimer(50*time.Millisecond), time.NewTicker(70*time.Millisecond)
	defer moves.Stop()
	defer cuts.Stop()
	for moving := true; moving; {
		select {
		case <-ended:
			moving = false
		case <-moves.C:
			c.ShufflePartitionLeaders()
		case <-cuts.C:
			network.cut()
			if err := network.restore(); err != nil {
				t.Error(err)
			}
		}
	}
	seen := make(map[string]bool)
	for _, r := range consume(t, c, n) {
		seen[string(r.Value)] = true
	}
	if len(seen) < n { // a broken connection may have made doubles
		for _, r := range consume(t, c, n+(n-len(seen))) {
			seen[string(r.Value)] = true
		}
	}
	if len(seen) != n {
		t.Errorf("%d of %d messages arrived", len(seen), n)
	}
}

// A partition without a leader gets its messages when it has one again. The
// writer alone would give up at once.
func TestPublishWithoutLeader(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	p := openPublisher(t, c, quickPublisher(t))
	var elected atomic.Bool
	c.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		if elected.Load() {
			return nil, nil, false
		}
		return withoutLeader(c, req), nil, true
	})
	client := kafkago.Client{Addr: p.writer.Addr, Transport: p.transport}
	eventually(t, "the leader is gone", func() bool {
		res, err := client.Metadata(t.Context(), &kafkago.MetadataRequest{Topics: []string{"orders"}})
		return err == nil && res.Topics[0].Partitions[0].Error != nil
	})
	published := make(chan error, 1)
	go func() { published <- p.Publish(t.Context(), &broker.Message{Body: []byte("late")}) }()
	eventually(t, "an attempt fails", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.failure != nil
	})
	elected.Store(true)
	if err := <-published; err != nil {
		t.Fatal(err)
	}
	if got := consume(t, c, 1); string(got[0].Value) != "late" {
		t.Errorf("got %q", got[0].Value)
	}
}

// withoutLeader is the answer of a cluster whose topic has no leader.
func withoutLeader(c *kfake.Cluster, req kmsg.Request) kmsg.Response {
	res := req.ResponseKind().(*kmsg.MetadataResponse)
	at := netip.MustParseAddrPort(c.ListenAddrs()[0])
	b := kmsg.NewMetadataResponseBroker()
	b.Host, b.Port = at.Addr().String(), int32(at.Port())
	part := kmsg.NewMetadataResponseTopicPartition()
	part.Leader, part.ErrorCode = -1, kerr.LeaderNotAvailable.Code
	topic := kmsg.NewMetadataResponseTopic()
	topic.Topic, topic.Partitions = kmsg.StringPtr("orders"), append(topic.Partitions, part)
	res.Brokers, res.Topics = append(res.Brokers, b), append(res.Topics, topic)
	return res
}

// Nothing answers: every call ends in its time and says why, and it is logged
// once.
func TestPublishDeadlines(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	var hole atomic.Bool
	var dials atomic.Int32
	log := &buffer{}
	cfg := quickPublisher(t)
	cfg.RequestTimeout, cfg.DialTimeout, cfg.PublishTimeout = 200*time.Millisecond, 200*time.Millisecond, 700*time.Millisecond
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		dials.Add(1)
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		return &holed{conn, &hole}, err
	}
	p := openPublisher(t, c, cfg)
	publish(t, p, &broker.Message{Body: []byte("0")})
	hole.Store(true)
	before := dials.Load()
	for _, limit := range []time.Duration{500 * time.Millisecond, 0} {
		ctx, cancel := t.Context(), context.CancelFunc(func() {})
		if limit > 0 {
			ctx, cancel = context.WithTimeout(ctx, limit)
		}
		began := time.Now()
		err := p.Publish(ctx, &broker.Message{}, &broker.Message{})
		cancel()
		var failed *PublishError
		if !errors.As(err, &failed) || len(failed.Failed) != 2 || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "last: ") {
			t.Errorf("got %v, want that the time ran out, and why", err)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("took %v", took)
		}
	}
	if n := dials.Load() - before; n > 30 {
		t.Errorf("%d connections were opened", n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Publish(ctx, &broker.Message{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
	hole.Store(false)
	publish(t, p, &broker.Message{Body: []byte("1")})
	if logged(log, "an attempt to publish failed") != 1 {
		t.Errorf("the log is %s", log)
	}
}

func TestPublisherClose(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	p := openPublisher(t, c, quickPublisher(t))
	publish(t, p, &broker.Message{})
	if err := p.Publish(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "message 0 is nil") {
		t.Errorf("got %v, want that it is nil", err)
	}
	writing := make(chan struct{})
	release := make(chan struct{})
	defer close(release)
	c.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		close(writing)
		c.SleepControl(func() { <-release })
		return nil, nil, false
	})
	cut := make(chan error, 1)
	go func() { cut <- p.Publish(t.Context(), &broker.Message{}) }()
	<-writing
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	began := time.Now()
	if err := p.Close(ctx); !errors.Is(err, ErrPublisherClosed) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("close: got %v, want that a call was cut off", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("close took %v", took)
	}
	var failed *PublishError
	if err := <-cut; !errors.Is(err, ErrPublisherClosed) || !errors.As(err, &failed) || len(failed.Failed) != 1 {
		t.Errorf("the call that was cut off: got %v, want ErrPublisherClosed", err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Errorf("second close: %v", err)
	}
	if err := p.Publish(t.Context(), &broker.Message{}); !errors.Is(err, ErrPublisherClosed) {
		t.Errorf("got %v, want ErrPublisherClosed", err)
	}
	if n := p.dialer.Open(); n != 0 {
		t.Errorf("%d connections are open", n)
	}
}
