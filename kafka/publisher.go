package kafka

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// topologyAge is how old the publisher's knowledge of a topic's partitions may
// get.
const topologyAge = time.Minute

// Publisher writes messages to one topic, for dead letters, for what handlers
// send on, and for tests. Make it with OpenPublisher. Its methods may be called
// concurrently.
//
// A message with a key goes to the partition where the Java client, and those
// that agree with it, put the key (murmur2), as long as the number of partitions
// does not change. Messages without a key go to one partition of those that can
// be written to, chosen for each call.
//
// It sends the library's produce requests itself, and not through its Writer:
// that goes on sending when the caller has given up, puts messages of several
// callers into one batch with one fate, and tries again by number and not by time.
type Publisher struct {
	topic   string
	cfg     *PublisherConfig
	log     *slog.Logger
	dialer  *wire.Dialer
	cluster *cluster

	ctx    context.Context // ends when nothing may run any more
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup   // calls of Publish
	lines   map[string]*line // by address
	stale   time.Time        // what is known about leaders must be newer
	trouble trouble
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
	p := &Publisher{
		topic: topic, cfg: cfg, log: cfg.Logger.With("topic", topic),
		dialer: wire.NewDialer(wire.Options{
			ClientID: cfg.ClientID, TLS: cfg.TLS, Mechanism: cfg.SASL.mechanism(), Dial: cfg.Dial,
			DialTimeout: cfg.DialTimeout, RequestTimeout: cfg.RequestTimeout,
		}),
		lines: make(map[string]*line),
	}
	p.trouble = trouble{log: p.log, what: "publish"}
	p.cluster = newCluster(p.dialer, brokers, []string{topic})
	p.cluster.permissions = true
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	if err := patiently(ctx, p.log, brokers, cfg.MaxBackoff, p.check); err != nil {
		p.cancel(nil)
		p.dialer.Shut()
		return nil, err
	}
	return p, nil
}

func (p *Publisher) check(ctx context.Context, settled bool) error {
	m, err := p.cluster.metadata(ctx, time.Now())
	if err != nil {
		return err
	}
	if err := checkTopics(m, []string{p.topic}, settled); err != nil {
		return err
	}
	topic := m.Topics[p.topic]
	if !topic.MayWrite() {
		return fmt.Errorf("topic %q: %w to write", p.topic, ErrForbidden)
	}
	return nil
}

// Publish writes messages and returns when all in-sync replicas of their
// partitions have confirmed them. Key, headers in their order, body and time are
// written as they are: a nil body is a tombstone, a zero time becomes the time of
// writing; ID, Source and Position are not written. The messages must not be
// changed before it returns.
//
// Messages of one partition are written in their order. What fails for a reason
// that may pass is written again, until ctx ends or, when it has no deadline, for
// Config.PublishTimeout; so a message can be there twice, as after a Publish that
// is called again. One message that is refused does not stop the others.
//
// A message that is too large for PublisherConfig.MaxMessageBytes (ErrTooLarge),
// or nil, is refused before anything is written, and so is everything after Close
// (ErrPublisherClosed). Every other error is a *PublishError that tells which
// messages were not confirmed; it wraps the reason: ctx's error, ErrTooLarge,
// ErrForbidden, ErrNoTopic, or what the broker says. After it no more is sent, but
// a broker that was slow may still write what it has got.
func (p *Publisher) Publish(ctx context.Context, messages ...*broker.Message) error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return fmt.Errorf("kafka: publish: %w", ErrPublisherClosed)
	}
	p.running.Add(1)
	p.mu.Unlock()
	defer p.running.Done()

	for i, m := range messages {
		if m == nil {
			return fmt.Errorf("kafka: publish: message %d is nil", i)
		}
		if n := publishedSize(m); n > p.cfg.MaxMessageBytes {
			return fmt.Errorf("kafka: publish: message %d: %w: it has %d bytes, PublisherConfig.MaxMessageBytes allows %d",
				i, ErrTooLarge, n, p.cfg.MaxMessageBytes)
		}
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, p.cfg.PublishTimeout)
		defer cancel()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.ctx, func() { cancel(context.Cause(p.ctx)) })() //nolint:contextcheck // Close ends it too
	return newPublication(p, messages).run(ctx)
}

// Close waits for the calls of Publish that run, and frees everything. It returns
// before ctx ends, or within PublisherConfig.CloseTimeout when ctx has no
// deadline; calls that still run then are cut off and return ErrPublisherClosed,
// and so does Close. A second Close returns nil.
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
	soft, cancel := context.WithTimeout(ctx, rest-min(rest/5, time.Second))
	defer cancel()
	ended := make(chan struct{})
	go func() {
		p.running.Wait()
		close(ended)
	}()
	var err error
	select {
	case <-ended:
	case <-soft.Done():
		err = fmt.Errorf("kafka: close: %w while messages were written: %w", ErrPublisherClosed, soft.Err())
	}
	p.cancel(ErrPublisherClosed)
	p.dialer.Shut()
	<-ended
	return err
}

// line returns the line to a broker.
func (p *Publisher) line(address string) *line {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.lines[address]
	if l == nil {
		l = newLine(p.dialer, address)
		p.lines[address] = l
	}
	return l
}

// topology returns what the cluster says about the topic; the error says why
// nothing can be written to it.
func (p *Publisher) topology(ctx context.Context) (*wire.Metadata, error) {
	p.mu.Lock()
	since := time.Now().Add(-topologyAge)
	if p.stale.After(since) {
		since = p.stale
	}
	p.mu.Unlock()
	m, err := p.cluster.metadata(ctx, since)
	if err != nil {
		return nil, err
	}
	if err := m.Topics[p.topic].Err; err != nil {
		return nil, err
	}
	if len(m.Topics[p.topic].Leaders) == 0 {
		return nil, kafkago.LeaderNotAvailable
	}
	return m, nil
}

// noteFailure notes that something has to be tried again.
func (p *Publisher) noteFailure(ctx context.Context, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stale = time.Now()
	p.trouble.note(ctx, err)
}

func (p *Publisher) noteSuccess(ctx context.Context) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trouble.over(ctx)
}
