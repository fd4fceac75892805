package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/ackafter/ackafter/internal/retry"
)

// Open begins to consume from a queue.
//
// urls are the addresses of one broker, or of several nodes of one cluster, which
// are tried in a random order: "amqp://user:password@host:port/vhost", or amqps://
// for TLS. What is special in a part is written as %XX; the virtual host "/" is no
// path, or "/". The port is 5672, or 5671 with TLS, when it is left out.
//
// Before it returns, Open makes sure that the login works and that the queue exists
// and may be consumed from; Config.Declare creates what is missing. While no broker
// can be reached it tries again, logging why, until ctx ends; the error then wraps
// ctx's error and the last reason. What only a person can mend is an error at once:
// a wrong argument or Config, ErrNoQueue, ErrNotAMQP, ErrLogin, ErrVHost,
// ErrForbidden, ErrLocked, ErrMismatch, and a certificate that cannot be verified;
// ErrNotAMQP and the certificate only when all addresses are like that. ctx has no
// part in what happens afterwards. Close the source when done.
func Open(ctx context.Context, urls []string, queue string, cfg *Config) (*Source, error) {
	addresses, err := parseAddresses(urls)
	if err != nil {
		return nil, fmt.Errorf("rabbitmq: open: %w", err)
	}
	if err := validateName("queue", queue); err != nil {
		return nil, fmt.Errorf("rabbitmq: open: %w", err)
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := newSource(addresses, queue, cfg)
	if w := cfg.Declare.warning(); w != "" {
		s.log.WarnContext(ctx, "rabbitmq: the queue that is to be declared can lose messages", "reason", w)
	}
	l, err := s.begin(ctx)
	if err != nil {
		s.stop()
		s.cancel()
		return nil, err
	}
	s.running.Go(func() { s.supervise(l) }) //nolint:contextcheck // hooks get a context of their own
	return s, nil
}

func newSource(addresses []address, queue string, cfg *Config) *Source {
	s := &Source{
		queue: queue, name: "rabbitmq:" + queue, instance: strconv.FormatUint(uint64(rand.Uint32()), 36), //nolint:gosec // no secret
		cfg: cfg, log: cfg.Logger.With("queue", queue), window: newWindow(cfg.Prefetch),
		woken: make(chan struct{}, 1), wanted: make(chan struct{}, 1), received: time.Now(),
	}
	s.dialer = &dialer{
		addresses: addresses, clientID: cfg.ClientID, tls: cfg.TLS, credentials: cfg.Credentials, dial: cfg.Dial,
		dialTimeout: cfg.DialTimeout, requestTimeout: cfg.RequestTimeout, heartbeat: cfg.Heartbeat, blocked: s.alarm,
	}
	if cfg.Stream != nil {
		s.offsets = newProgress()
	}
	s.counts.Store(cfg.Declare != nil && cfg.Declare.Type == QueueQuorum)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.closing, s.stop = context.WithCancel(s.ctx)
	return s
}

// validateName checks a name that travels as a short string.
func validateName(what, name string) error {
	switch {
	case strings.TrimSpace(name) == "":
		return fmt.Errorf("%s: must not be blank", what)
	case len(name) > maxShort:
		return fmt.Errorf("%s: has %d bytes, at most %d are allowed", what, len(name), maxShort)
	}
	return nil
}

// begin establishes the first link. It waits for a broker that cannot be reached.
func (s *Source) begin(ctx context.Context) (link, error) {
	wait := retry.Backoff{Most: s.cfg.MaxBackoff}
	bad := newTrouble(s.log, "open")
	var l link
	var last error
	for {
		var err error
		l, err = s.establish(ctx, l)
		if err == nil {
			bad.Over(ctx)
			return l, nil
		}
		if last == nil || ctx.Err() == nil {
			last = err // an attempt that the end of ctx broke off tells nothing
		}
		final := isFinal(err)
		if !final && ctx.Err() == nil {
			bad.Note(ctx, err, "hosts", hosts(s.dialer.addresses))
		}
		if !final && wait.Sleep(ctx) {
			continue
		}
		if l.conn != nil {
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.RequestTimeout)
			err = errors.Join(err, l.conn.shut(closing))
			cancel()
		}
		if final {
			return link{}, fmt.Errorf("rabbitmq: open: %w", err)
		}
		return link{}, fmt.Errorf("rabbitmq: open: %w; last: %w", ctx.Err(), last)
	}
}
