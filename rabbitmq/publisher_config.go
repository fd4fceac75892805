package rabbitmq

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/ackafter/ackafter/internal/retry"
)

// The defaults of PublisherConfig that Config does not have.
const (
	defaultPublishTimeout  = 30 * time.Second
	defaultMaxMessageBytes = 16 << 20
)

// PublisherConfig configures a Publisher. A nil *PublisherConfig means all
// defaults. The rule for numbers and durations is that of Config: zero is the
// default; negative is an error here, for nothing can be turned off safely. It is
// copied by OpenPublisher and may be changed and reused afterwards.
// Config.ForPublisher makes one that connects and logs in as a Source does.
type PublisherConfig struct {
	// ClientID names the connection in the broker's logs and its management pages.
	// Default "ackafter".
	ClientID string

	// TLS secures the connections to addresses that begin with amqps://. Nil: the
	// system's certificates. An empty ServerName is taken from each address.
	TLS *tls.Config

	// Credentials returns the user and the password for a connection that is about
	// to be opened. It must obey its context. Nil: those of the address.
	Credentials func(ctx context.Context) (user, password string, err error)

	// Dial opens the TCP connections. Nil: a net.Dialer. It must obey its context.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// DialTimeout bounds opening one connection, TLS and login included. Default
	// 5 s. Negative is an error.
	DialTimeout time.Duration

	// RequestTimeout bounds every request to the broker, and every write to it. A
	// connection that takes nothing is given up, and what was not confirmed on it is
	// sent again. Default 10 s. Negative is an error.
	RequestTimeout time.Duration

	// PublishTimeout bounds Publish when its context has no deadline: what fails for
	// reasons that may pass is tried again for that long. Default 30 s. Negative is
	// an error.
	PublishTimeout time.Duration

	// CloseTimeout bounds Publisher.Close when its context has no deadline. Default
	// 10 s. Negative is an error.
	CloseTimeout time.Duration

	// MaxBackoff caps the time between attempts; it grows from 100 ms by doubling,
	// with jitter. Default 5 s. At least 100 ms; negative is an error.
	MaxBackoff time.Duration

	// Heartbeat is as in Config.
	Heartbeat time.Duration

	// ExchangeType creates the exchange, durable, when it is missing: "direct",
	// "fanout", "topic", "headers", or what a plug-in adds. Empty: it must exist.
	ExchangeType string

	// RoutingKey is used for all messages, in place of their own keys. With the
	// default exchange it names the queue that they go to. Empty: Message.Key is the
	// routing key, at most 255 bytes; none is the empty one.
	RoutingKey string

	// MaxMessageBytes is how large the body of a message may be. Default 16 MiB, as
	// RabbitMQ 4 has it (max_message_size); the broker closes the channel on a larger
	// one, which hurts all that is under way. At most 512 MiB; negative is an error.
	MaxMessageBytes int

	// Logger gets the events that a person should see; never bodies, headers or
	// routing keys. Nil: slog.Default().
	Logger *slog.Logger

	// Hooks observe the publisher: OnBlocked and OnReconnect are called. Nil: none.
	Hooks []Hook
}

// ForPublisher returns a PublisherConfig that connects, logs in, waits and logs as a
// Source with this Config does. A nil *Config gives the defaults.
func (c *Config) ForPublisher() *PublisherConfig {
	if c == nil {
		return &PublisherConfig{}
	}
	return &PublisherConfig{
		ClientID: c.ClientID, TLS: c.TLS, Credentials: c.Credentials, Dial: c.Dial, DialTimeout: c.DialTimeout,
		RequestTimeout: c.RequestTimeout, CloseTimeout: c.CloseTimeout, MaxBackoff: c.MaxBackoff, Heartbeat: c.Heartbeat,
		Logger: c.Logger,
	}
}

// withDefaults returns a copy of c with every default filled in.
func (c *PublisherConfig) withDefaults() *PublisherConfig {
	var d PublisherConfig
	if c != nil {
		d = *c
		d.Hooks = slices.Clone(c.Hooks)
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
	orDefault(&d.PublishTimeout, defaultPublishTimeout)
	orDefault(&d.CloseTimeout, defaultCloseTimeout)
	orDefault(&d.MaxBackoff, defaultMaxBackoff)
	orDefault(&d.Heartbeat, defaultHeartbeat)
	orDefault(&d.MaxMessageBytes, defaultMaxMessageBytes)
	if d.Logger == nil {
		d.Logger = slog.Default()
	}
	return &d
}

// validate checks a configuration that has its defaults.
func (c *PublisherConfig) validate() error {
	const most = 512 << 20
	if err := checkDurations(
		duration{"DialTimeout", c.DialTimeout, minTimeout, maxTimeout},
		duration{"RequestTimeout", c.RequestTimeout, minTimeout, maxTimeout},
		duration{"PublishTimeout", c.PublishTimeout, minTimeout, maxTimeout},
		duration{"CloseTimeout", c.CloseTimeout, minTimeout, maxTimeout},
		duration{"MaxBackoff", c.MaxBackoff, retry.MinBackoff, maxTimeout},
		duration{"Heartbeat", c.Heartbeat, minHeartbeat, maxHeartbeat},
	); err != nil {
		return err
	}
	switch {
	case c.Heartbeat%time.Second != 0:
		return configError("Heartbeat", c.Heartbeat, "must be whole seconds")
	case len(c.RoutingKey) > maxShort:
		return configError("RoutingKey", fmt.Sprintf("%d bytes", len(c.RoutingKey)), fmt.Sprintf("must have at most %d", maxShort))
	case c.MaxMessageBytes < 1 || c.MaxMessageBytes > most:
		return configError("MaxMessageBytes", c.MaxMessageBytes, fmt.Sprintf("must be from 1 to %d", most))
	}
	return checkHooks(c.Hooks)
}
