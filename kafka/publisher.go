package kafka

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/internal/retry"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// Publisher writes messages to one topic, for dead letters, for what handlers
// send on, and for tests. Make it with OpenPublisher. Its methods may be called
// concurrently.
//
// It is kafka-go's Writer, waiting for all in-sync replicas. A message with a key
// goes to the partition where the Java client puts the key (murmur2), as long as
// the number of partitions does not change; one without a key to any.
//
// It is at least once, and no more: every message that it confirms is in the
// topic, and it can be there twice. Readers must take that, as an inbox does. In
// particular:
//
//   - What a caller has given up on is still tried, for about
//     PublisherConfig.PublishTimeout, and what comes later for that partition waits
//     behind it, in memory. So much can pile up while a partition cannot be written
//     to and callers go on. Close drops it.
//   - Messages for one partition that come within 5 ms travel together, those of
//     several callers too. If the broker refuses one of them, it refuses all, and
//     all callers get the error.
//   - It takes up to 6 s until it knows that a partition has a new leader.
type Publisher struct {
	topic     string
	cfg       *PublisherConfig
	dialer    *wire.Dialer
	transport *kafkago.Transport
	writer    *kafkago.Writer

	ctx    context.Context // ends when nothing may be sent any more
	cancel context.CancelFunc

	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup // calls of Publish
	failure error          // of the last attempt
	logged  time.Time      // when one was
}

// OpenPublisher makes a Publisher. brokers are as for Open.
//
// Before it returns, it makes sure that the topic exists and may be written to
// (the latter if the brokers tell, which they do since Kafka 2.8). While no
// broker can be reached it tries again, logging why, until ctx ends; the error
// then wraps ctx's error and the last reason. A topic that is missing for some
// seconds (ErrNoTopic), a missing permission (ErrForbidden), a wrong argument or
// PublisherConfig, a refused login and a certificate that cannot be verified are
// errors at once. The topic is never created. ctx has no part in what happens
// afterwards. Close the publisher when done.
func OpenPublisher(ctx context.Context, brokers []string, topic string, cfg *PublisherConfig) (*Publisher, error) {
	brokers, err := validateBrokers(brokers)
	if err != nil {
		return nil, err
	}
	if rule := topicRule(topic); rule != "" {
		return nil, fmt.Errorf("kafka: open: topic is %q: %s", topic, rule)
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	probe := wire.NewDialer(cfg.wire())
	defer probe.Shut()
	cluster := newCluster(probe, brokers, []string{topic})
	cluster.permissions = true
	p := newPublisher(brokers, topic, cfg)
	if err := patiently(ctx, cfg.Logger.With("topic", topic), brokers, cfg.MaxBackoff, func(ctx context.Context, settled bool) error {
		m, err := cluster.metadata(ctx, time.Now())
		if err != nil {
			return err
		}
		return p.check(ctx, m, settled)
	}); err != nil {
		p.end()
		return nil, err
	}
	return p, nil
}

func newPublisher(brokers []string, topic string, cfg *PublisherConfig) *Publisher {
	p := &Publisher{topic: topic, cfg: cfg, dialer: wire.NewDialer(cfg.wire())}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	// TLS and SASL are the dialer's: the transport's own SASL has no deadline.
	p.transport = &kafkago.Transport{
		Dial: p.dialer.DialContext, DialTimeout: cfg.DialTimeout, ClientID: cfg.ClientID, MetadataTopics: []string{topic},
	}
	p.writer = &kafkago.Writer{
		Addr: kafkago.TCP(brokers...), Topic: topic, Transport: sender{p},
		Balancer: kafkago.Murmur2Balancer{}, RequiredAcks: kafkago.RequireAll,
		BatchTimeout: 5 * time.Millisecond, BatchBytes: int64(cfg.MaxMessageBytes),
		ReadTimeout: cfg.RequestTimeout, WriteTimeout: cfg.RequestTimeout, Compression: kafkago.Compression(cfg.Compression), //nolint:gosec // validated
		MaxAttempts: attempts(cfg.PublishTimeout, cfg.MaxBackoff), WriteBackoffMin: retry.MinBackoff, WriteBackoffMax: cfg.MaxBackoff,
		ErrorLogger: kafkago.LoggerFunc(p.noteFailure),
	}
	return p
}

// attempts returns how many attempts take at least the given time, so that it is
// the call's deadline that decides. The n-th is followed by n*n*retry.MinBackoff, which
// must not overflow.
func attempts(within, maxBackoff time.Duration) int {
	const most = 100_000
	growing := math.Sqrt(float64(maxBackoff) / float64(retry.MinBackoff))
	return min(2+int(growing)+int(within/maxBackoff), most)
}

// check makes sure that the topic may be written to, and that the transport has
// heard of it, too.
func (p *Publisher) check(ctx context.Context, m *wire.Metadata, settled bool) error {
	if err := checkTopics(m, []string{p.topic}, settled); err != nil {
		return err
	}
	topic := m.Topics[p.topic]
	if !topic.MayWrite() {
		return fmt.Errorf("topic %q: %w to write", p.topic, ErrForbidden)
	}
	client := kafkago.Client{Addr: p.writer.Addr, Transport: p.writer.Transport}
	res, err := client.Metadata(ctx, &kafkago.MetadataRequest{Topics: []string{p.topic}})
	if err != nil {
		return err
	}
	return res.Topics[0].Error
}

// Publish writes messages and returns when all in-sync replicas of their
// partitions have confirmed them. Key, headers in their order, body and time are
// written as they are: a nil body is a tombstone, a zero time becomes the time of
// writing; ID, Source and Position are not written. The messages must not be
// changed before it returns, and their bytes not after an error either.
//
// Messages of one partition are written in their order. What fails for a reason
// that may pass is written again, until ctx ends, for at most
// PublisherConfig.PublishTimeout.
//
// A message that is too large for PublisherConfig.MaxMessageBytes (ErrTooLarge),
// or nil, is refused before anything is written, and so is everything after Close
// (ErrPublisherClosed). Every other error is a *PublishError that tells which
// messages were not confirmed (all of them, when the time ran out); it wraps the
// reason: ctx's error, ErrTooLarge, ErrForbidden, ErrNoTopic, ErrPublisherClosed,
// or what the broker says.
func (p *Publisher) Publish(ctx context.Context, messages ...*broker.Message) error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return fmt.Errorf("kafka: publish: %w", ErrPublisherClosed)
	}
	p.running.Add(1)
	p.mu.Unlock()
	defer p.running.Done()

	records := make([]kafkago.Message, len(messages))
	for i, m := range messages {
		if m == nil {
			return fmt.Errorf("kafka: publish: message %d is nil", i)
		}
		records[i] = kafkago.Message{Key: m.Key, Value: m.Body, Time: m.Time, WriterData: i}
		for _, h := range m.Headers {
			records[i].Headers = append(records[i].Headers, kafkago.Header{Key: h.Name, Value: h.Value})
		}
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.PublishTimeout)
	defer cancel()
	ctx, stop := p.untilClosed(ctx)
	defer stop()
	if ctx.Err() != nil {
		return p.result(ctx, ctx.Err(), len(records))
	}
	return p.result(ctx, p.writer.WriteMessages(ctx, records...), len(records))
}

// result is the error of Publish for the writer's error about n messages.
func (p *Publisher) result(ctx context.Context, err error, n int) error {
	var tooLarge kafkago.MessageTooLargeError
	var each kafkago.WriteErrors
	p.mu.Lock()
	last := p.failure
	if err == nil {
		p.failure = nil
	}
	p.mu.Unlock()
	switch {
	case err == nil:
		return nil
	case errors.As(err, &tooLarge):
		return fmt.Errorf("kafka: publish: message %v: %w: PublisherConfig.MaxMessageBytes allows %d bytes",
			tooLarge.Message.WriterData, ErrTooLarge, p.cfg.MaxMessageBytes)
	case errors.As(err, &each):
	case ctx.Err() != nil:
		if err = context.Cause(ctx); last != nil {
			err = fmt.Errorf("%w; last: %v", err, last) //nolint:errorlint // it may be about another call
		}
	}
	failed := &PublishError{Topic: p.topic, Of: n, Err: p.reason(err)}
	for i := range n {
		if each != nil && each[i] == nil {
			continue
		}
		if len(failed.Failed) == 0 && each != nil {
			failed.Err = p.reason(each[i])
		}
		failed.Failed = append(failed.Failed, i)
	}
	return failed
}

// reason names an error by this package's.
func (p *Publisher) reason(err error) error {
	switch {
	case errors.Is(err, kafkago.MessageSizeTooLarge) || errors.Is(err, kafkago.RecordListTooLarge):
		return fmt.Errorf("%w for the topic (max.message.bytes), alone or together with others: %w", ErrTooLarge, err)
	case errors.Is(err, kafkago.TopicAuthorizationFailed):
		return fmt.Errorf("topic %q: %w to write: %w", p.topic, ErrForbidden, err)
	case errors.Is(err, kafkago.UnknownTopicOrPartition) || errors.Is(err, protocol.ErrNoTopic) || errors.Is(err, protocol.ErrNoPartition):
		return fmt.Errorf("%w: %q: %w", ErrNoTopic, p.topic, err)
	}
	return err
}

// noteFailure is what the writer calls after a failed attempt, the error last.
func (p *Publisher) noteFailure(_ string, args ...any) {
	err, ok := args[len(args)-1].(error)
	if !ok || p.ctx.Err() != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failure = err
	if now := time.Now(); now.Sub(p.logged) >= retry.RemindEvery {
		p.logged = now
		p.cfg.Logger.Warn("kafka: an attempt to publish failed", "topic", p.topic, "error", err)
	}
}

// Close waits for the calls of Publish that run, and frees everything. It returns
// before ctx ends, or within PublisherConfig.CloseTimeout when ctx has no
// deadline; calls that still run then are cut off and return ErrPublisherClosed,
// and so does Close. What other callers have given up on is dropped; it can take
// PublisherConfig.MaxBackoff until the last goroutine has ended. A second Close
// returns nil.
func (p *Publisher) Close(ctx context.Context) error {
	p.mu.Lock()
	first := !p.closed
	p.closed = true
	p.mu.Unlock()
	if !first {
		return nil
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(p.cfg.CloseTimeout)
	}
	// A part of the time is kept for ending what did not end by itself.
	rest := time.Until(deadline)
	soft, cancel := context.WithTimeout(ctx, rest-min(rest/2, p.cfg.MaxBackoff))
	defer cancel()
	hard, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		// Not while Publish runs: the writer would wait for ever for its own goroutine.
		p.running.Wait()
		p.end()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-soft.Done():
	}
	p.cancel()
	select {
	case <-ended:
	case <-hard.Done():
	}
	return fmt.Errorf("kafka: close: %w while messages were written: %w", ErrPublisherClosed, soft.Err())
}

// end ends the writer and its connections.
func (p *Publisher) end() {
	p.cancel()
	_ = p.writer.Close() // never an error
	p.transport.CloseIdleConnections()
	p.dialer.Shut()
}

// untilClosed returns a context that ends with ctx, and when nothing may be sent
// any more.
func (p *Publisher) untilClosed(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.ctx, func() { cancel(ErrPublisherClosed) })
	return ctx, func() { stop(); cancel(nil) }
}

// sender takes the writer's requests to the transport. Two things are its own: it
// ends them when the publisher closes, and it tells the writer, which gives up at
// once while a partition has no leader, that most failures pass.
type sender struct{ *Publisher }

// RoundTrip implements kafkago.RoundTripper.
func (s sender) RoundTrip(ctx context.Context, brokers net.Addr, req kafkago.Request) (kafkago.Response, error) {
	ctx, stop := s.untilClosed(ctx)
	defer stop()
	res, err := s.transport.RoundTrip(ctx, brokers, req)
	switch {
	case err == nil:
		return res, nil
	case s.ctx.Err() != nil:
		return nil, ErrPublisherClosed
	case isFinal(s.reason(err)):
		return nil, err
	}
	return nil, &passing{err}
}

// passing is an error that the writer takes for temporary.
type passing struct{ error }

// Temporary is what the writer asks for.
func (*passing) Temporary() bool { return true }

// Unwrap returns the error itself.
func (p *passing) Unwrap() error { return p.error }
