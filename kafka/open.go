package kafka

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/internal/retry"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// newTopicGrace is how long a topic may be unknown to the brokers before it
// counts as missing: a new one takes a moment to get around.
const newTopicGrace = 3 * time.Second

// Open joins the consumer group and begins to receive from the topics.
//
// brokers are addresses ("host:port"; the port is 9092 when it is left out) of
// some of the cluster's brokers; the others are found. group names the consumer
// group: its members share the partitions, and its offsets say what is done.
//
// No topic is ever created, by Open or later, whatever the brokers allow (but for
// brokers older than Kafka 2.0, which do not let a client forbid it).
//
// Before it returns, Open makes sure that the topics exist and may be read, and
// that the group may be used. While no broker can be reached it tries again,
// logging why, until ctx ends; the error then wraps ctx's error and the last
// reason. A topic that is missing for some seconds (ErrNoTopic; it may be quite
// new), a wrong argument or Config, a missing
// permission (ErrForbidden), a refused login and a certificate that cannot be
// verified are errors at once. ctx has no part in what happens afterwards.
// Close the source when done.
func Open(ctx context.Context, brokers []string, group string, topics []string, cfg *Config) (*Source, error) {
	brokers, err := validateBrokers(brokers)
	if err != nil {
		return nil, err
	}
	if err := validateNames(group, topics); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := newSource(brokers, group, slices.Clone(topics), cfg)
	if err = s.check(ctx); err == nil {
		s.members, err = s.joinGroup()
	}
	if err != nil {
		s.stop()
		s.cancel()
		s.dialer.Shut()
		s.groupDialer.Shut()
		return nil, err
	}
	s.running.Go(func() { s.members.run(s.closing) })
	return s, nil
}

func newSource(brokers []string, group string, topics []string, cfg *Config) *Source {
	options := wire.Options{
		ClientID: cfg.ClientID, TLS: cfg.TLS, Mechanism: cfg.SASL.mechanism(), Dial: cfg.Dial,
		DialTimeout: cfg.DialTimeout, RequestTimeout: cfg.RequestTimeout,
	}
	s := &Source{
		brokers: brokers, name: group, topics: topics, cfg: cfg, log: cfg.Logger.With("group", group),
		dialer: wire.NewDialer(options), groupDialer: wire.NewDialer(options),
		ids: newTopicIDs(), woken: make(chan struct{}, 1),
	}
	s.cluster = newCluster(s.dialer, brokers, topics)
	s.coordinator = newCoordinator(s.cluster, group)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.closing, s.stop = context.WithCancel(s.ctx)
	return s
}

// validateBrokers returns the addresses with their ports.
func validateBrokers(brokers []string) ([]string, error) {
	if len(brokers) == 0 {
		return nil, errors.New("kafka: open: brokers: there must be at least one")
	}
	addresses := make([]string, len(brokers))
	for i, b := range brokers {
		bad := func(rule string) error {
			return fmt.Errorf("kafka: open: brokers[%d] is %q: %s", i, b, rule)
		}
		if strings.TrimSpace(b) == "" {
			return nil, bad("must not be blank")
		}
		if strings.ContainsAny(b, " \t\r\n,/") {
			return nil, bad("must be one address, host:port")
		}
		host, port, err := net.SplitHostPort(b)
		if err != nil {
			host, port = strings.Trim(b, "[]"), "9092"
			if strings.Count(b, ":") == 1 {
				return nil, bad("must be one address, host:port")
			}
		}
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 || host == "" {
			return nil, bad("must be one address, host:port")
		}
		addresses[i] = net.JoinHostPort(host, port)
	}
	return addresses, nil
}

func validateNames(group string, topics []string) error {
	const maxGroup = 32767
	switch {
	case strings.TrimSpace(group) == "":
		return errors.New("kafka: open: group: must not be empty")
	case len(group) > maxGroup:
		return fmt.Errorf("kafka: open: group: has %d bytes, at most %d are allowed", len(group), maxGroup)
	case len(topics) == 0:
		return errors.New("kafka: open: topics: there must be at least one")
	}
	for i, t := range topics {
		rule := topicRule(t)
		if rule == "" && slices.Contains(topics[:i], t) {
			rule = "is there twice"
		}
		if rule != "" {
			return fmt.Errorf("kafka: open: topics[%d] is %q: %s", i, t, rule)
		}
	}
	return nil
}

// topicRule returns the rule that a topic's name breaks; "" for none.
func topicRule(name string) string {
	const most = 249
	switch {
	case strings.TrimSpace(name) == "":
		return "must not be blank"
	case len(name) > most:
		return fmt.Sprintf("has %d bytes, at most %d are allowed", len(name), most)
	case strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") != "" || strings.Trim(name, ".") == "":
		return "must be of letters, digits, '.', '_' and '-'"
	}
	return ""
}

// check waits for the brokers, and makes sure that the topics and the group can
// be used.
func (s *Source) check(ctx context.Context) error {
	return patiently(ctx, s.log, s.brokers, s.cfg.MaxBackoff, s.checkOnce)
}

// patiently calls check until it returns no error, one that is final, or ctx
// ends. settled tells check that new topics had the time to get around.
func patiently(ctx context.Context, log *slog.Logger, brokers []string, maxBackoff time.Duration, check func(ctx context.Context, settled bool) error) error {
	wait := retry.Backoff{Most: maxBackoff}
	bad := newTrouble(log, "open")
	began, waits := time.Now(), 0
	var last error
	for {
		err := check(ctx, time.Since(began) > newTopicGrace)
		if last == nil || !ended(ctx) {
			last = err // an attempt that the end of ctx broke off tells nothing
		}
		switch {
		case err == nil:
			bad.Over(ctx)
			return nil
		case isFinal(err) && !errors.Is(err, kafkago.UnknownTopicOrPartition):
			return fmt.Errorf("kafka: open: %w", err)
		case errors.Is(err, kafkago.UnknownTopicOrPartition):
			if waits++; waits == 1 {
				log.InfoContext(ctx, "kafka: a topic is missing; it may be new", "error", err, "wait", newTopicGrace)
			}
		case !ended(ctx):
			bad.Note(ctx, err, "brokers", brokers)
		}
		if !wait.Sleep(ctx) {
			return fmt.Errorf("kafka: open: %w; last: %w", ctx.Err(), last)
		}
	}
}

// ended tells whether ctx has ended, or should have by the clock, which what is
// under its deadline may notice a moment earlier.
func ended(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// isFinal tells whether trying again is of no use.
func isFinal(err error) bool {
	var auth *wire.AuthError
	var cert *tls.CertificateVerificationError
	return errors.Is(err, ErrNoTopic) || errors.Is(err, ErrForbidden) || errors.Is(err, wire.ErrVersion) ||
		errors.Is(err, kafkago.InvalidTopic) || errors.As(err, &auth) || errors.As(err, &cert)
}

func (s *Source) checkOnce(ctx context.Context, settled bool) error {
	m, err := s.cluster.metadata(ctx, time.Now())
	if err != nil {
		return err
	}
	if err := checkTopics(m, s.topics, settled); err != nil {
		return err
	}
	for _, name := range s.topics {
		s.ids.see(name, m.Topics[name].ID)
		s.ids.opened(name, len(m.Topics[name].Leaders))
		if err := s.checkRead(ctx, name, m); err != nil {
			return err
		}
	}
	err = s.coordinator.alive(ctx, epoch{generation: 1, member: "no member"})
	if errors.Is(err, kafkago.GroupAuthorizationFailed) {
		return fmt.Errorf("group %q: %w to read: %w", s.name, ErrForbidden, err)
	}
	return err
}

// checkTopics makes sure that the topics exist and may be described.
func checkTopics(m *wire.Metadata, topics []string, settled bool) error {
	var missing []string
	for _, name := range topics {
		topic := m.Topics[name]
		switch {
		case errors.Is(topic.Err, kafkago.UnknownTopicOrPartition):
			missing = append(missing, strconv.Quote(name))
		case errors.Is(topic.Err, kafkago.TopicAuthorizationFailed):
			return fmt.Errorf("topic %q: %w to describe: %w", name, ErrForbidden, topic.Err)
		case topic.Err != nil:
			return fmt.Errorf("topic %q: %w", name, topic.Err)
		}
	}
	switch {
	case len(missing) > 0 && settled:
		return fmt.Errorf("%w: %s", ErrNoTopic, strings.Join(missing, ", "))
	case len(missing) > 0:
		return fmt.Errorf("%w: %s: %w", ErrNoTopic, strings.Join(missing, ", "), kafkago.UnknownTopicOrPartition)
	}
	return nil
}

// checkRead makes sure that the topic may be read, by reading nothing from it.
func (s *Source) checkRead(ctx context.Context, topic string, m *wire.Metadata) error {
	for partition, leader := range m.Topics[topic].Leaders {
		address, ok := m.Brokers[leader]
		if !ok {
			continue
		}
		conn, err := s.dialer.Connect(ctx, address)
		if err != nil {
			return err
		}
		defer conn.Close()
		res, err := conn.Fetch(ctx, &wire.FetchRequest{Topic: topic, Partition: partition, MaxBytes: 1})
		if err != nil {
			return err
		}
		if errors.Is(res.Err, kafkago.TopicAuthorizationFailed) {
			return fmt.Errorf("topic %q: %w to read: %w", topic, ErrForbidden, res.Err)
		}
		return nil
	}
	return fmt.Errorf("topic %q: %w", topic, kafkago.LeaderNotAvailable)
}
