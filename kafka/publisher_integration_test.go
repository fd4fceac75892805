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

// What the broker refuses is told by message, and the others are written.
func TestRealPublishRefused(t *testing.T) {
	t.Parallel()
	l := newLab(t, realBrokers(t), 1, map[string]string{"cleanup.policy": "compact", "max.message.bytes": "5000"})
	cfg := l.config().ForPublisher()
	cfg.MaxMessageBytes = 100_000
	p := l.publisher(cfg)
	key := []byte("k")
	err := p.Publish(t.Context(),
		&broker.Message{Key: key, Body: make([]byte, 3000)}, &broker.Message{Key: key, Body: make([]byte, 6000)},
		&broker.Message{Key: key, Body: make([]byte, 3000)}, &broker.Message{Key: key, Body: []byte("last")})
	var failed *kafka.PublishError
	if !errors.As(err, &failed) || !slices.Equal(failed.Failed, []int{1}) || !errors.Is(err, kafka.ErrTooLarge) {
		t.Errorf("got %v, want that message 1 is too large", err)
	}
	// A compacted topic takes no message without a key.
	err = p.Publish(t.Context(), &broker.Message{Key: key}, &broker.Message{Body: []byte("no key")}, &broker.Message{Key: key, Body: []byte("last")})
	if !errors.As(err, &failed) || !slices.Equal(failed.Failed, []int{1}) {
		t.Errorf("got %v, want that message 1 is refused", err)
	}
	t.Log(err)

	_, err = kafka.OpenPublisher(t.Context(), l.brokers, l.topic+"-missing", cfg)
	if !errors.Is(err, kafka.ErrNoTopic) {
		t.Errorf("got %v, want that the topic is missing", err)
	}
}
