package rabbitmq

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"math"
	"net"
	"slices"
	"time"

	"github.com/ackafter/ackafter/internal/retry"
)

// The defaults of Config and PublisherConfig.
const (
	defaultClientID       = "ackafter"
	defaultDialTimeout    = 5 * time.Second
	defaultRequestTimeout = 10 * time.Second
	defaultCloseTimeout   = 10 * time.Second
	defaultMaxBackoff     = 5 * time.Second
	defaultHeartbeat      = 10 * time.Second
	defaultPrefetch       = 200
	defaultAckTimeout     = 30 * time.Minute

	// minTimeout is the least that makes sense for a round trip to a broker.
	minTimeout = 10 * time.Millisecond
	// maxTimeout is a sane bound.
	maxTimeout = 24 * time.Hour
	// minHeartbeat and maxHeartbeat: the protocol counts seconds in 16 bits.
	minHeartbeat = time.Second
	maxHeartbeat = time.Hour
	// minAckTimeout leaves time to give anything back.
	minAckTimeout = time.Second
)

// Config configures a Source. A nil *Config means all defaults. One rule holds for
// numbers and durations: zero is the documented default, negative turns the thing
// off; where off would be unsafe, negative is an error. A Config is copied by Open
// and may be changed and reused afterwards.
type Config struct {
	// ClientID names the connection in the broker's logs and its management pages.
	// Default "ackafter".
	ClientID string

	// TLS secures the connections to addresses that begin with amqps://. Nil: the
	// system's certificates. An empty ServerName is taken from each address.
	TLS *tls.Config

	// Credentials returns the user and the password for a connection that is about
	// to be opened, so that a changed password is used from the next reconnect on.
	// It must obey its context. Nil: those of the address.
	Credentials func(ctx context.Context) (user, password string, err error)

	// Dial opens the TCP connections. Nil: a net.Dialer. It must obey its context.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// DialTimeout bounds opening one connection, TLS and login included. Default
	// 5 s. Negative is an error: nothing waits for ever.
	DialTimeout time.Duration

	// RequestTimeout bounds every request to the broker, and every write to it. A
	// connection that does not answer is given up. Default 10 s. Negative is an
	// error.
	RequestTimeout time.Duration

	// CloseTimeout bounds Source.Close when its context has no deadline. Default
	// 10 s. Negative is an error.
	CloseTimeout time.Duration

	// MaxBackoff caps the time between attempts to reach a broker; it grows from
	// 100 ms by doubling, with jitter. Default 5 s. At least 100 ms; negative is an
	// error: it would be a hot loop.
	MaxBackoff time.Duration

	// Heartbeat is how long the connection may be silent before either side looks
	// for the other; it is given up after one and a half times as long. The broker
	// may ask for less. Default 10 s, at least 1 s, in whole seconds. Negative is an
	// error: a dead connection would not be noticed.
	Heartbeat time.Duration

	// Prefetch is how many messages the broker hands to this source before it gets
	// acks for some of them, and so bounds what waits here and what is out,
	// together. Default 200: a full batch for each worker of an inbox.Consumer with
	// its defaults. More is of use when there are more workers or larger batches;
	// less shares a queue more evenly among many processes. From 1 to 65535;
	// negative is an error: without a bound the broker would push everything here.
	//
	// When messages grow old here (AckTimeout), fewer are fetched for a while; not with
	// Lanes, where it would cost the order. Messages are of any size: it times the
	// size of the largest is the memory that they may take.
	Prefetch int

	// AckTimeout is what the broker has as its consumer_timeout: it closes the
	// channel of a consumer that has not acked a message for so long since it was
	// pushed. Default 30 min, which is RabbitMQ's. Negative: the broker has none.
	// At least 1 s.
	//
	// What waits here for half of that time is given back to the broker; deliveries
	// that are out for so long are asked back (broker.Delivery.Recall). When nobody
	// calls Receive, because the database is down, say, the source stops to consume
	// until somebody does. So messages that wait do not run into the timeout. A
	// handler that runs longer than AckTimeout does, and its message comes again.
	//
	// With Lanes, and for a stream, all that is out has to be settled, for at most
	// nine tenths of AckTimeout, before it goes on, so that the order stays. Then
	// everything that waits comes again, which counts towards the delivery limit of a
	// quorum queue, so let Prefetch be what is handled in half of AckTimeout.
	AckTimeout time.Duration

	// Lanes says what is worked on in order. Default LaneNone.
	Lanes LaneBy

	// OnQueueDeleted says what happens when the queue does not exist any more.
	// Default QueueDeletedStop.
	OnQueueDeleted QueueDeletedPolicy

	// Stream says where to begin in a stream (x-queue-type stream), and that the
	// queue is one. Nil: it is none.
	Stream *Stream

	// Declare creates what is missing: the queue, an exchange, bindings. It is done
	// on every (re)connect. Nil: the queue must exist.
	Declare *Declare

	// Logger gets the events that a person should see; never bodies, headers or
	// routing keys. Nil: slog.Default().
	Logger *slog.Logger

	// Hooks observe the source, see Hook. Nil: none.
	Hooks []Hook

	// lookEvery is how often ages are looked at; zero: as AckTimeout demands.
	lookEvery time.Duration
}

// QueueDeletedPolicy says what happens when the queue does not exist any more.
type QueueDeletedPolicy int

// The policies.
const (
	// QueueDeletedStop ends Receive with ErrNoQueue.
	QueueDeletedStop QueueDeletedPolicy = iota
	// QueueDeletedWait reports it and waits for the queue to be there again.
	QueueDeletedWait
)

// withDefaults returns a copy of c with every default filled in.
func (c *Config) withDefaults() *Config {
	var d Config
	if c != nil {
		d = *c
		d.Hooks = slices.Clone(c.Hooks)
		d.Declare = c.Declare.clone()
		if c.Stream != nil {
			stream := *c.Stream
			d.Stream = &stream
		}
	}
	if d.ClientID == "" {
		d.ClientID = defaultClientID
	}
	if d.TLS != nil {
		d.TLS = d.TLS.Clone()
	}
	if d.Dial == nil {
		d.Dial = new(net.Dialer).DialContext
	}
	orDefault(&d.DialTimeout, defaultDialTimeout)
	orDefault(&d.RequestTimeout, defaultRequestTimeout)
	orDefault(&d.CloseTimeout, defaultCloseTimeout)
	orDefault(&d.MaxBackoff, defaultMaxBackoff)
	orDefault(&d.Heartbeat, defaultHeartbeat)
	orDefault(&d.Prefetch, defaultPrefetch)
	orDefault(&d.AckTimeout, defaultAckTimeout)
	orDefault(&d.lookEvery, max(d.AckTimeout/16, minTimeout))
	if d.Logger == nil {
		d.Logger = slog.Default()
	}
	return &d
}

func orDefault[N int | time.Duration](v *N, byDefault N) {
	if *v == 0 {
		*v = byDefault
	}
}

// duration is a field that has bounds.
type duration struct {
	field       string
	value       time.Duration
	least, most time.Duration
}

func checkDurations(durations ...duration) error {
	for _, t := range durations {
		if t.value < t.least || t.value > t.most {
			return configError(t.field, t.value, fmt.Sprintf("must be from %v to %v", t.least, t.most))
		}
	}
	return nil
}

// validate checks a configuration that has its defaults.
func (c *Config) validate() error {
	if err := checkDurations(
		duration{"DialTimeout", c.DialTimeout, minTimeout, maxTimeout},
		duration{"RequestTimeout", c.RequestTimeout, minTimeout, maxTimeout},
		duration{"CloseTimeout", c.CloseTimeout, minTimeout, maxTimeout},
		duration{"MaxBackoff", c.MaxBackoff, retry.MinBackoff, maxTimeout},
		duration{"Heartbeat", c.Heartbeat, minHeartbeat, maxHeartbeat},
	); err != nil {
		return err
	}
	switch {
	case c.Heartbeat%time.Second != 0:
		return configError("Heartbeat", c.Heartbeat, "must be whole seconds")
	case c.Prefetch < 1 || c.Prefetch > math.MaxUint16:
		return configError("Prefetch", c.Prefetch, fmt.Sprintf("must be from 1 to %d: memory has to be bounded", math.MaxUint16))
	case c.AckTimeout > 0 && c.AckTimeout < minAckTimeout:
		return configError("AckTimeout", c.AckTimeout, fmt.Sprintf("must be at least %v, or negative for none", minAckTimeout))
	case !c.Lanes.valid():
		return configError("Lanes", fmt.Sprintf("%q", string(c.Lanes)), "is not one of LaneNone, LaneQueue, LaneByRoutingKey, LaneByHeader of a name")
	case c.OnQueueDeleted < QueueDeletedStop || c.OnQueueDeleted > QueueDeletedWait:
		return configError("OnQueueDeleted", int(c.OnQueueDeleted), "is not one of QueueDeletedStop, QueueDeletedWait")
	}
	if err := checkHooks(c.Hooks); err != nil {
		return err
	}
	if err := c.Stream.validate(); err != nil {
		return err
	}
	return c.Declare.validate(c.Stream != nil)
}

func checkHooks(hooks []Hook) error {
	for i, h := range hooks {
		if !isHook(h) {
			return configError(fmt.Sprintf("Hooks[%d]", i), fmt.Sprintf("%T", h), "implements none of the On... interfaces")
		}
	}
	return nil
}

func configError(field string, value any, rule string) error {
	return fmt.Errorf("rabbitmq: config: %s = %v: %s", field, value, rule)
}
