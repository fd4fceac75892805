package kafka_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/kafka"
)

func (l *lab) publisher(cfg *kafka.PublisherConfig) *kafka.Publisher {
	l.Helper()
	p, err := kafka.OpenPublisher(l.Context(), l.brokers, l.topic, cfg)
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = p.Close(l.Context()) })
	return p
}

func TestRealPublish(t *testing.T) {
	t.Parallel()
	const partitions, keys = 5, 100
	l := newLab(t, realBrokers(t), partitions, nil)
	other := l.newClient(kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)))
	defer other.Close()
	theirs := make(map[string]int32)
	at := time.UnixMilli(1_750_000_000_123)
	var messages []*broker.Message
	for i := range keys {
		r := &kgo.Record{Topic: l.topic, Key: []byte(fmt.Sprint(i)), Value: []byte("theirs")}
		if err := other.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
		theirs[string(r.Key)] = r.Partition
		messages = append(messages, &broker.Message{Key: r.Key, Time: at, Headers: broker.Headers{{Name: "a"}, {Name: "a", Value: []byte("2")}}})
	}
	cfg := l.config().ForPublisher()
	cfg.Compression = kafka.CompressionZstd
	p := l.publisher(cfg)
	if err := p.Publish(t.Context(), messages...); err != nil {
		t.Fatal(err)
	}
	ours := 0
	for _, d := range l.receive(l.open(l.config()), 2*keys) {
		m := d.Message
		if string(m.Body) == "theirs" {
			continue
		}
		ours++
		if want := fmt.Sprintf("kafka:%s/%d", l.topic, theirs[string(m.Key)]); m.Source != want {
			t.Errorf("key %s is in %s, another client puts it into %s", m.Key, m.Source, want)
		}
		if m.Body != nil || !m.Time.Equal(at) || len(m.Headers) != 2 || m.Headers[0].Value != nil || string(m.Headers[1].Value) != "2" {
			t.Errorf("message is %+v", m)
		}
	}
	if ours != keys {
		t.Errorf("%d messages, want %d", ours, keys)
	}
}

// What the broker refuses it refuses with what travels beside it, and nothing of
// that is written.
func TestRealPublishRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, realBrokers(t), 1, map[string]string{"cleanup.policy": "compact", "max.message.bytes": "5000"})
	cfg := l.config().ForPublisher()
	cfg.MaxMessageBytes = 100_000
	p := l.publisher(cfg)
	key := []byte("k")
	err := p.Publish(t.Context(), &broker.Message{Key: key, Body: make([]byte, 3000)}, &broker.Message{Key: key, Body: make([]byte, 6000)})
	var failed *kafka.PublishError
	if !errors.As(err, &failed) || !slices.Equal(failed.Failed, []int{0, 1}) || !errors.Is(err, kafka.ErrTooLarge) {
		t.Errorf("got %v, want that it is too large", err)
	}
	// A compacted topic takes no message without a key.
	err = p.Publish(t.Context(), &broker.Message{Key: key}, &broker.Message{Body: []byte("no key")})
	if !errors.As(err, &failed) || !slices.Equal(failed.Failed, []int{0, 1}) {
		t.Errorf("got %v, want that the message is refused", err)
	}
	t.Log(err)
	// With the topic's limit, less 100 bytes, batches are as large as it allows.
	cfg.MaxMessageBytes = 4900
	var fitting []*broker.Message
	for i := range 20 {
		fitting = append(fitting, &broker.Message{Key: key, Body: make([]byte, 4870-i%3*2000)})
	}
	p = l.publisher(cfg)
	if err := p.Publish(t.Context(), fitting...); err != nil {
		t.Error(err)
	}
	if ds := l.receive(l.open(l.config()), 20); ds[0].Message.Position != broker.At(0) {
		t.Errorf("the first message is at %v: something was written that was refused", ds[0].Message.Position)
	}

	_, err = kafka.OpenPublisher(t.Context(), l.brokers, l.topic+"-missing", cfg)
	if !errors.Is(err, kafka.ErrNoTopic) {
		t.Errorf("got %v, want that the topic is missing", err)
	}
}
