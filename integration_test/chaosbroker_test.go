package integration_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	amqp "github.com/rabbitmq/amqp091-go"
	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/integration_test/servers"
)

// chaosBroker is a broker that is broken, with a client that is not ours.
type chaosBroker interface {
	// server is what is crashed and frozen, address its host and port.
	server() *servers.Own
	address() string
	// describe says where consumers receive.
	describe(s *chaosSetup)
	// send returns when the broker has the messages, in their order; it may have some
	// of them twice. It is called by one goroutine at a time.
	send(ctx context.Context, messages []chaosMessage) error
	// left says what the broker still has for the consumers; empty when it has
	// nothing.
	left() string
	// order returns the messages of the lanes in their order.
	order(stream *chaosStream) map[string][]entryID
}

// chaosKafka is a topic on a broker of its own.
type chaosKafka struct {
	*topic
	own      *servers.Own
	consumer string
	traffic  *traffic
}

func newChaosKafka(t *testing.T, consumer string) *chaosKafka {
	t.Helper()
	own := servers.OwnKafka(t)
	k := &chaosKafka{topic: newTopic(t, []string{own.Address}, 6), own: own, consumer: consumer}
	k.traffic = &traffic{writer: &kafkago.Writer{
		Addr: kafkago.TCP(own.Address), Topic: k.name, Balancer: &kafkago.Hash{}, RequiredAcks: kafkago.RequireAll,
		BatchTimeout: 5 * time.Millisecond, WriteTimeout: 3 * time.Second, ReadTimeout: 3 * time.Second,
		Transport: &kafkago.Transport{MetadataTTL: 500 * time.Millisecond},
	}}
	t.Cleanup(func() {
		_ = k.traffic.writer.Close()
		k.traffic.writer.Transport.(*kafkago.Transport).CloseIdleConnections()
	})
	return k
}

func (k *chaosKafka) server() *servers.Own { return k.own }

func (k *chaosKafka) address() string { return k.own.Address }

func (k *chaosKafka) describe(s *chaosSetup) {
	s.Broker, s.Addresses, s.Name = "kafka", k.brokers, k.name
}

func (k *chaosKafka) send(ctx context.Context, messages []chaosMessage) error {
	batch := make([]kafkago.Message, len(messages))
	for i, m := range messages {
		batch[i] = kafkago.Message{Key: []byte(m.lane), Value: m.body}
	}
	return k.traffic.write(ctx, batch)
}

func (k *chaosKafka) left() string {
	if n := k.lag(k.consumer); n != 0 {
		return fmt.Sprintf("lag %d", n)
	}
	return ""
}

// order reads the log: what the writer could not be told about is there twice, maybe
// later.
func (k *chaosKafka) order(stream *chaosStream) map[string][]entryID {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(k.t.Context(), time.Minute)
	defer cancel()
	known := map[string]entryID{}
	for e := range stream.sent {
		known[e.fingerprint] = e
	}
	lanes, found := map[string][]entryID{}, map[entryID]bool{}
	for p := range k.parts {
		ends, err := k.client.ListOffsets(ctx, &kafkago.ListOffsetsRequest{Topics: map[string][]kafkago.OffsetRequest{k.name: {kafkago.LastOffsetOf(p)}}})
		if err != nil || ends.Topics[k.name][0].Error != nil {
			k.t.Fatalf("the end of partition %d: %v, %+v", p, err, ends)
		}
		log := kafkago.NewReader(kafkago.ReaderConfig{Brokers: k.brokers, Topic: k.name, Partition: p, MaxWait: 100 * time.Millisecond})
		for log.Offset() < ends.Topics[k.name][0].LastOffset {
			m, err := log.ReadMessage(ctx)
			if err != nil {
				k.t.Fatalf("read partition %d: %v", p, err)
			}
			e, lane := known[fingerprintOf(m.Value)], fmt.Sprintf("%d %s", p, m.Key)
			lanes[lane] = append(lanes[lane], e)
			found[e] = true
		}
		if err := log.Close(); err != nil {
			k.t.Error(err)
		}
	}
	if len(found) != len(known) {
		k.t.Errorf("Kafka has %d of the %d messages that it has confirmed", len(found), len(known))
	}
	return lanes
}

// chaosRabbit is a quorum queue on a server of its own.
type chaosRabbit struct {
	*rabbitLine
	own *servers.Own
	// Of the producer; out is nil when there is none.
	out           *amqp.Channel
	outConnection *amqp.Connection
}

func newChaosRabbit(t *testing.T) *chaosRabbit {
	t.Helper()
	own, server := servers.OwnRabbitMQ(t)
	return &chaosRabbit{rabbitLine: newRabbitQueue(t, server, "quorum", nil, nil), own: own}
}

func (r *chaosRabbit) server() *servers.Own { return r.own }

func (r *chaosRabbit) address() string {
	u, err := url.Parse(r.rabbitLine.server.URL)
	if err != nil {
		r.Fatal(err)
	}
	return u.Host
}

func (r *chaosRabbit) describe(s *chaosSetup) {
	s.Broker, s.Addresses, s.Name = "rabbitmq", []string{r.rabbitLine.server.URL}, r.queue
}

func (r *chaosRabbit) send(ctx context.Context, messages []chaosMessage) error {
	for {
		var err error
		if messages, err = r.trySend(ctx, messages); len(messages) == 0 {
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(200 * time.Millisecond): // Not in a hot loop.
		case <-ctx.Done():
		}
	}
}

// trySend returns what was not confirmed.
func (r *chaosRabbit) trySend(ctx context.Context, messages []chaosMessage) (left []chaosMessage, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	defer func() {
		if err != nil && r.out != nil {
			_ = r.outConnection.CloseDeadline(time.Now().Add(time.Second))
			r.out = nil
		}
	}()
	if r.out == nil {
		conn, err := amqp.DialConfig(r.rabbitLine.server.URL, amqp.Config{Dial: amqp.DefaultDial(3 * time.Second), Heartbeat: 2 * time.Second})
		if err != nil {
			return messages, err
		}
		r.outConnection = conn
		if r.out, err = conn.Channel(); err == nil {
			err = r.out.Confirm(false)
		}
		if err != nil {
			return messages, err
		}
	}
	confirms := make([]*amqp.DeferredConfirmation, len(messages))
	for i, m := range messages {
		confirms[i], err = r.out.PublishWithDeferredConfirmWithContext(ctx, "", r.queue, true, false,
			amqp.Publishing{Body: m.body, DeliveryMode: amqp.Persistent})
		if err != nil {
			break
		}
	}
	for i, c := range confirms {
		if c == nil {
			left = append(left, messages[i])
			continue
		}
		if ok, failed := c.WaitContext(ctx); !ok {
			left = append(left, messages[i])
			err = errors.Join(errors.New("not confirmed"), failed)
		}
	}
	return left, err
}

func (r *chaosRabbit) left() string {
	if messages, unacked := r.totals(); messages != 0 || unacked != 0 {
		return fmt.Sprintf("%d messages, %d out", messages, unacked)
	}
	return ""
}

func (r *chaosRabbit) order(*chaosStream) map[string][]entryID { return nil }

// chaosSQS is a FIFO queue on a server of its own.
type chaosSQS struct {
	*sqsQueue
	own *servers.Own
	has []chaosMessage // the messages of the server's, in order
}

func newChaosSQS(t *testing.T) *chaosSQS {
	t.Helper()
	own := servers.OwnSQS(t)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	q := &chaosSQS{own: own, sqsQueue: &sqsQueue{T: t, address: own.Address, name: servers.Name(t) + ".fifo", fifo: true}}
	q.client = awssqs.New(awssqs.Options{
		Region: sqsEnvironment["AWS_REGION"], BaseEndpoint: aws.String(q.sqsQueue.address), HTTPClient: &http.Client{Transport: transport},
		Credentials: credentials.NewStaticCredentialsProvider("key", "secret", ""),
	})
	ctx, cancel := q.within(time.Minute)
	defer cancel()
	made, err := q.client.CreateQueue(ctx, &awssqs.CreateQueueInput{QueueName: &q.name, Attributes: map[string]string{"FifoQueue": "true"}})
	if err != nil {
		t.Fatal(err)
	}
	q.url = *made.QueueUrl
	return q
}

func (q *chaosSQS) server() *servers.Own { return q.own }

func (q *chaosSQS) address() string { return strings.TrimPrefix(q.own.Address, "http://") }

func (q *chaosSQS) describe(s *chaosSetup) {
	s.Broker, s.Addresses, s.Name = "sqs", []string{q.address()}, q.name
}

// send waits while the queue is long, for which this server is no good. It sends one
// batch after the other, with ids, by which the server knows repeats.
func (q *chaosSQS) send(ctx context.Context, messages []chaosMessage) error {
	for len(messages) > 0 {
		some := messages[:min(10, len(messages))]
		if err := q.trySend(ctx, some); err == nil {
			q.has = append(q.has, some...)
			messages = messages[len(some):]
			continue
		} else if ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(200 * time.Millisecond): // Not in a hot loop.
		case <-ctx.Done():
		}
	}
	return nil
}

func (q *chaosSQS) trySend(ctx context.Context, messages []chaosMessage) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if n, err := q.tryDepth(ctx); err != nil || n > sqsBacklog {
		return fmt.Errorf("the queue has %d messages: %w", n, err)
	}
	in := &awssqs.SendMessageBatchInput{QueueUrl: &q.url}
	for i, m := range messages {
		in.Entries = append(in.Entries, types.SendMessageBatchRequestEntry{
			Id: aws.String(strconv.Itoa(i)), MessageBody: aws.String(string(m.body)),
			MessageGroupId: aws.String(m.lane), MessageDeduplicationId: aws.String(strconv.Itoa(m.number)),
		})
	}
	answer, err := q.client.SendMessageBatch(ctx, in)
	if err == nil && len(answer.Failed) > 0 {
		err = fmt.Errorf("%d messages were not sent: %s", len(answer.Failed), aws.ToString(answer.Failed[0].Message))
	}
	return err
}

// tryDepth returns how many messages the queue has.
func (q *chaosSQS) tryDepth(ctx context.Context) (n int, err error) {
	answer, err := q.client.GetQueueAttributes(ctx, &awssqs.GetQueueAttributesInput{QueueUrl: &q.url, AttributeNames: []types.QueueAttributeName{types.QueueAttributeNameAll}})
	if err != nil {
		return 0, err
	}
	for _, name := range []types.QueueAttributeName{
		types.QueueAttributeNameApproximateNumberOfMessages, types.QueueAttributeNameApproximateNumberOfMessagesDelayed,
		types.QueueAttributeNameApproximateNumberOfMessagesNotVisible,
	} {
		some, err := strconv.Atoi(answer.Attributes[string(name)])
		if err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		n += some
	}
	return n, nil
}

func (q *chaosSQS) left() string {
	if visible, inFlight := q.depth(); visible != 0 || inFlight != 0 {
		return fmt.Sprintf("%d messages, %d out", visible, inFlight)
	}
	return ""
}

func (q *chaosSQS) order(*chaosStream) map[string][]entryID {
	lanes := map[string][]entryID{}
	for _, m := range q.has {
		lanes[m.lane] = append(lanes[m.lane], m.entry)
	}
	return lanes
}
