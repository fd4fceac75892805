package integration_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
)

const (
	outagePartitions = 4
	outageBuffer     = 1 << 20
)

// kafkaOutage is a topic.
type kafkaOutage struct {
	*outage
	topic   *topic
	network network
	source  *kafka.Source
	before  kafka.Stats
	revoked atomic.Int64

	fetches, beats, requests int // until half of the outage
}

func newKafkaOutage(o *outage) outageBroker {
	return &kafkaOutage{outage: o, topic: newTopic(o.T, servers.Kafka(o.T), outagePartitions)}
}

func (o *kafkaOutage) produce(from, n, size int) {
	o.Helper()
	w := &kafkago.Writer{
		Addr: kafkago.TCP(o.topic.brokers...), Topic: o.topic.name, RequiredAcks: kafkago.RequireAll,
		Balancer: &kafkago.RoundRobin{}, BatchTimeout: 10 * time.Millisecond,
	}
	defer w.Close()
	ms := make([]kafkago.Message, n)
	for i := range ms {
		ms[i] = kafkago.Message{Key: fmt.Appendf(nil, "k%d", from+i), Value: fmt.Appendf(nil, `{"id":"m-%d","more":"%0*d"}`, from+i, size, 0)}
	}
	if err := w.WriteMessages(o.Context(), ms...); err != nil {
		o.Fatal(err)
	}
}

func (o *kafkaOutage) open(log *slog.Logger) broker.Source {
	o.Helper()
	var err error
	o.source, err = kafka.Open(o.Context(), o.topic.brokers, o.topic.name, []string{o.topic.name}, &kafka.Config{
		HeartbeatInterval: 500 * time.Millisecond, SessionTimeout: 6 * time.Second, CommitInterval: 20 * time.Millisecond,
		BufferBytes: outageBuffer, Dial: o.network.dial, Logger: log, Hooks: []kafka.Hook{o},
	})
	if err != nil {
		o.Fatal(err)
	}
	return o.source
}

// OnRevoked implements kafka.OnRevoked.
func (o *kafkaOutage) OnRevoked(context.Context, kafka.RevokedEvent) { o.revoked.Add(1) }

func (o *kafkaOutage) inFlight() int {
	held := 0
	for _, p := range o.source.Stats().Partitions {
		held += p.InFlight
	}
	return held
}

func (o *kafkaOutage) begin() { o.before = o.source.Stats() }

func (o *kafkaOutage) half() {
	o.fetches, o.beats, o.requests = o.network.sent(fetchRequest), o.network.sent(heartbeatRequest), o.network.sentAll()
}

func (o *kafkaOutage) end(length time.Duration) {
	o.Helper()
	fetches, beats, requests := o.network.sent(fetchRequest)-o.fetches, o.network.sent(heartbeatRequest)-o.beats, o.network.sentAll()-o.requests
	o.Logf("in the second half %d fetches, %d heartbeats, %d requests in all", fetches, beats, requests)
	if fetches > 0 {
		o.Errorf("%d fetches although nothing is handled", fetches)
	}
	if beats == 0 || requests > 20*int(length.Seconds()) {
		o.Errorf("%d heartbeats, %d requests", beats, requests)
	}
}

func (o *kafkaOutage) sample() {
	o.Helper()
	st := o.source.Stats()
	if !st.Joined || st.Generation != o.before.Generation || st.Member != o.before.Member {
		o.Errorf("the membership is lost: %+v", st)
	}
	held, bytes := 0, 0
	for _, p := range st.Partitions {
		held += p.InFlight
		bytes += p.Bytes
		if p.Committed != 0 {
			o.Errorf("%s/%d is committed up to %d", p.Topic, p.Partition, p.Committed)
		}
	}
	// Each partition may exceed its share by one batch.
	if held > outageMaxInFlight || bytes > outageBuffer+outagePartitions<<19 {
		o.Errorf("%d deliveries are out, %d bytes wait", held, bytes)
	}
}

func (o *kafkaOutage) drained() bool { return o.topic.lag(o.topic.name) == 0 }

func (o *kafkaOutage) check() {
	o.Helper()
	if n := o.revoked.Load(); n != 1 { // by the stop
		o.Errorf("the partitions were revoked %d times", n-1)
	}
}
