package kafka

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	produceapi "github.com/segmentio/kafka-go/protocol/produce"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// maxRequest is how much goes into a request, if it is for several partitions.
// Brokers hang up on one of more than 100 MB.
const maxRequest = 16 << 20

// publication is one call of Publish. It belongs to one goroutine, but for its
// queues while they are sent.
type publication struct {
	*Publisher
	messages []*broker.Message
	queues   []*queue
	backoff  backoff   // of what concerns all queues
	unknown  time.Time // since when the topic is unknown; zero: it is not
	reason   error     // why something was tried again, the last time
}

// queue is the messages for one partition that are not confirmed yet, in order.
type queue struct {
	partition int32
	left      []int // by their places in the call
	batch     int   // how many messages go into a request at most
	due       time.Time
	backoff   backoff

	refused []int // messages that will not be confirmed
	reason  error // why the first of them
}

func newPublication(p *Publisher, messages []*broker.Message) *publication {
	return &publication{Publisher: p, messages: messages, backoff: backoff{most: p.cfg.MaxBackoff}}
}

// run writes until nothing is left, ctx ends, or nothing can be written at all.
func (p *publication) run(ctx context.Context) error {
	if len(p.messages) == 0 {
		return nil
	}
	for {
		due, err := p.round(ctx)
		switch {
		case err != nil:
			return p.result(err)
		case due.IsZero():
			return p.result(nil)
		case ctx.Err() != nil || !sleep(ctx, time.Until(due)):
			err := context.Cause(ctx)
			if p.reason != nil {
				err = fmt.Errorf("%w; last: %w", err, p.reason)
			}
			return p.result(err)
		}
	}
}

// round sends one request to each leader for which something is due. It returns
// when the next round is due; zero: nothing is left. An error is final.
func (p *publication) round(ctx context.Context) (due time.Time, err error) {
	m, err := p.topology(ctx)
	if err != nil {
		return p.noTopology(ctx, err)
	}
	p.unknown = time.Time{}
	p.backoff.reset()
	topic := m.Topics[p.topic]
	if p.queues == nil {
		p.queues = p.sort(&topic, m)
	}
	now := time.Now()
	ready := make(map[string][]*queue)
	for _, q := range p.queues {
		if len(q.left) == 0 || q.due.After(now) {
			continue
		}
		if address, ok := m.Brokers[topic.Leaders[q.partition]]; ok {
			ready[address] = append(ready[address], q)
		} else {
			p.postpone(ctx, kafkago.LeaderNotAvailable, q)
		}
	}
	if err := p.sendAll(ctx, ready); err != nil {
		return time.Time{}, err
	}
	for _, q := range p.queues {
		if len(q.left) > 0 && (due.IsZero() || q.due.Before(due)) {
			due = maxTime(q.due, now)
		}
	}
	return due, nil
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// noTopology decides what to do when the topic's partitions are not known.
func (p *publication) noTopology(ctx context.Context, err error) (due time.Time, final error) {
	switch {
	case errors.Is(err, kafkago.UnknownTopicOrPartition):
		if p.unknown.IsZero() {
			p.unknown = time.Now()
		}
		if time.Since(p.unknown) > newTopicGrace {
			return time.Time{}, fmt.Errorf("%w: %q", ErrNoTopic, p.topic)
		}
	case errors.Is(err, kafkago.TopicAuthorizationFailed):
		return time.Time{}, fmt.Errorf("topic %q: %w to describe: %w", p.topic, ErrForbidden, err)
	case isFinal(err):
		return time.Time{}, err
	}
	if !ended(ctx) {
		p.reason = err
		p.noteFailure(ctx, err)
	}
	return time.Now().Add(p.backoff.next()), nil
}

// sort puts the messages into queues.
func (p *publication) sort(topic *wire.Topic, m *wire.Metadata) []*queue {
	partitions := make([]int, len(topic.Leaders))
	var writable []int32
	for i := range partitions {
		partitions[i] = i
		if _, ok := m.Brokers[topic.Leaders[int32(i)]]; ok {
			writable = append(writable, int32(i))
		}
	}
	keyless := int32(rand.IntN(len(partitions))) //nolint:gosec // a choice, no secret
	if len(writable) > 0 {
		keyless = writable[rand.IntN(len(writable))] //nolint:gosec // a choice, no secret
	}
	queues := make(map[int32]*queue)
	var all []*queue
	for i, message := range p.messages {
		id := keyless
		if message.Key != nil {
			id = int32(kafkago.Murmur2Balancer{}.Balance(kafkago.Message{Key: message.Key}, partitions...)) //nolint:gosec // partitions count in 32 bits
		}
		q := queues[id]
		if q == nil {
			q = &queue{partition: id, batch: len(p.messages), backoff: backoff{most: p.cfg.MaxBackoff}}
			queues[id] = q
			all = append(all, q)
		}
		q.left = append(q.left, i)
	}
	return all
}

// sendAll sends to all leaders at once. An error is final.
func (p *publication) sendAll(ctx context.Context, ready map[string][]*queue) error {
	failures := make(chan error, len(ready))
	var wg sync.WaitGroup
	for address, queues := range ready {
		wg.Go(func() { failures <- p.send(ctx, address, queues) })
	}
	wg.Wait()
	close(failures)
	for err := range failures {
		if err == nil {
			continue
		}
		if isFinal(err) {
			return err
		}
		if p.reason == nil || !ended(ctx) {
			p.reason = err // one that the end of ctx broke off tells nothing
		}
	}
	return nil
}

// send sends the next messages of some queues to their leader and notes the
// answer. It returns why some have to be sent again.
func (p *publication) send(ctx context.Context, address string, queues []*queue) error {
	topic := produceapi.RequestTopic{Topic: p.topic}
	counts := make(map[int32]int)
	total := 0
	for i, q := range queues {
		records, bytes := p.records(q)
		if total += bytes; i > 0 && total > maxRequest {
			queues = queues[:i] // the others have their turn in the next round
			break
		}
		counts[q.partition] = len(records)
		topic.Partitions = append(topic.Partitions, produceapi.RequestPartition{
			Partition: q.partition,
			RecordSet: protocol.RecordSet{
				Version: 2, Attributes: protocol.Attributes(codecs[p.cfg.Compression]), Records: protocol.NewRecordReader(records...),
			},
		})
	}
	const allInSync = -1
	res, err := p.line(address).roundTrip(ctx, &produceapi.Request{
		Acks: allInSync, Timeout: int32((p.cfg.RequestTimeout / 2).Milliseconds()), //nolint:gosec // at most a day
		Topics: []produceapi.RequestTopic{topic},
	})
	if err != nil {
		p.postpone(ctx, err, queues...)
		return err
	}
	answers := make(map[int32]produceapi.ResponsePartition)
	for _, t := range res.(*produceapi.Response).Topics {
		for _, a := range t.Partitions {
			answers[a.Partition] = a
		}
	}
	var failure error
	for _, q := range queues {
		a, ok := answers[q.partition]
		if !ok {
			err = fmt.Errorf("the answer lacks %s", topicPartition{p.topic, q.partition})
		} else {
			err = p.answer(ctx, q, counts[q.partition], &a)
		}
		if err != nil {
			failure = err
			p.postpone(ctx, err, q)
		}
	}
	return failure
}

// records returns the first messages of a queue, as many as fit in a batch, and
// their size.
func (p *publication) records(q *queue) (records []protocol.Record, bytes int) {
	for _, i := range q.left[:min(len(q.left), q.batch)] {
		m := p.messages[i]
		size := publishedSize(m)
		if len(records) > 0 && bytes+size > p.cfg.MaxMessageBytes {
			break
		}
		bytes += size
		r := protocol.Record{Time: m.Time, Key: protocol.NewBytes(m.Key), Value: protocol.NewBytes(m.Body)}
		for _, h := range m.Headers {
			r.Headers = append(r.Headers, protocol.Header{Key: h.Name, Value: h.Value})
		}
		records = append(records, r)
	}
	return records, bytes
}

// answer notes what the leader says about the first n messages of a queue. The
// error is one that may pass.
func (p *publication) answer(ctx context.Context, q *queue, n int, a *produceapi.ResponsePartition) error {
	code := kafkago.Error(a.ErrorCode)
	switch {
	case code == 0:
		q.left = q.left[n:]
		q.batch = min(2*q.batch, len(p.messages))
		q.backoff.reset()
		p.noteSuccess(ctx)
	case code == kafkago.TopicAuthorizationFailed:
		q.refuse(len(q.left), fmt.Errorf("topic %q: %w to write: %w", p.topic, ErrForbidden, code))
	case code == kafkago.MessageSizeTooLarge || code == kafkago.RecordListTooLarge:
		if q.batch = n / 2; n == 1 {
			q.refuse(1, fmt.Errorf("message %d: %w: it has %d bytes, the topic allows less (max.message.bytes): %w",
				q.left[0], ErrTooLarge, publishedSize(p.messages[q.left[0]]), code))
		}
	case code.Temporary():
		return fmt.Errorf("partition %s: %w", topicPartition{p.topic, q.partition}, code)
	case n > 1:
		q.batch = 1 // one of them is refused, and the others are not to blame
	default:
		err := fmt.Errorf("message %d: %w", q.left[0], code)
		if a.ErrorMessage != "" {
			err = fmt.Errorf("message %d: %s: %w", q.left[0], a.ErrorMessage, code)
		}
		q.refuse(1, err)
	}
	return nil
}

// refuse gives up the first n messages.
func (q *queue) refuse(n int, err error) {
	if q.reason == nil {
		q.reason = err
	}
	q.refused = append(q.refused, q.left[:n]...)
	q.left = q.left[n:]
	q.batch = max(q.batch, 1)
}

// postpone makes queues wait for their next attempt.
func (p *publication) postpone(ctx context.Context, err error, queues ...*queue) {
	for _, q := range queues {
		q.due = time.Now().Add(q.backoff.next())
	}
	if !ended(ctx) {
		p.noteFailure(ctx, err)
	}
}

// result is the error of Publish. err is why what is left is not confirmed; nil
// when nothing is.
func (p *publication) result(err error) error {
	e := &PublishError{Topic: p.topic, Of: len(p.messages), Err: err}
	for _, q := range p.queues {
		e.Failed = append(append(e.Failed, q.refused...), q.left...)
		if q.reason != nil && e.Err == nil {
			e.Err = q.reason
		}
	}
	if p.queues == nil && err != nil {
		for i := range p.messages {
			e.Failed = append(e.Failed, i)
		}
	}
	if len(e.Failed) == 0 {
		return nil
	}
	slices.Sort(e.Failed)
	return e
}

// publishedSize is how many bytes a message takes in a request of its own,
// uncompressed.
func publishedSize(m *broker.Message) int {
	const batchHead, fixed = 61, 3 // attributes, time and offset, which begin at 0
	n := fixed + varintSize(len(m.Key)) + len(m.Key) + varintSize(len(m.Body)) + len(m.Body) + varintSize(len(m.Headers))
	for _, h := range m.Headers {
		n += varintSize(len(h.Name)) + len(h.Name) + varintSize(len(h.Value)) + len(h.Value)
	}
	return batchHead + varintSize(n) + n
}

// varintSize is the length of a zigzag varint.
func varintSize(n int) int {
	size := 1
	for n > 63 {
		n >>= 7
		size++
	}
	return size
}
