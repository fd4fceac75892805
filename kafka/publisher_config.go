package kafka

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/ackafter/ackafter/internal/retry"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// The defaults of PublisherConfig that differ from those of Config.
const (
	defaultPublishTimeout  = 30 * time.Second
	defaultMaxMessageBytes = 1_000_000
)

// PublisherConfig configures a Publisher. A nil *PublisherConfig means all
// defaults. The rule for numbers and durations is that of Config: zero is the
// default; negative is an error here, for nothing can be turned off safely. It is
// copied by OpenPublisher and may be changed and reused afterwards.
// Config.ForPublisher makes one that connects and logs in as a Source does.
type PublisherConfig struct {
	// ClientID names this client in the broker's logs and quotas. Default
	// "ackafter".
	ClientID string

	// TLS secures all connections. Nil: plain text. An empty ServerName is taken
	// from each broker's address.
	TLS *tls.Config

	// SASL logs in on every connection. Nil: no login. PLAIN without TLS sends
	// the password readably.
	SASL *SASL

	// Dial opens the TCP connections. Nil: a net.Dialer. It may be called
	// concurrently and must obey its context.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// DialTimeout bounds opening one connection, TLS and SASL included. Default
	// 5 s. Negative is an error.
	DialTimeout time.Duration

	// RequestTimeout bounds every request to a broker. A connection that does not
	// answer is given up, and what was sent over it is sent again. Half of it is
	// what the brokers may take to replicate. Default 10 s. Negative is an error.
	RequestTimeout time.Duration

	// PublishTimeout bounds Publish, as its context does: what fails for reasons that
	// may pass is tried again for so long. Default 30 s. Negative is an error.
	PublishTimeout time.Duration

	// CloseTimeout bounds Publisher.Close when its context has no deadline. Default
	// 10 s. Negative is an error.
	CloseTimeout time.Duration

	// MaxBackoff caps the time between attempts; it grows from 100 ms. Default 5 s.
	// At least 100 ms; negative is an error.
	MaxBackoff time.Duration

	// MaxMessageBytes is how large a message may be as it travels, uncompressed:
	// key, body, headers, and 22 bytes around them; and how large the messages that
	// travel together. The topic must allow 100 bytes more (max.message.bytes, after
	// compression): when it does not, it may refuse together what it takes one by
	// one. Default 1,000,000, which suits topics that are not configured. At most
	// 512 MiB; negative is an error.
	MaxMessageBytes int

	// Compression is how messages that travel together are compressed. Default
	// CompressionNone.
	Compression Compression

	// Logger gets the events that a person should see; never keys or bodies.
	// Nil: slog.Default().
	Logger *slog.Logger
}

// Compression is how a Publisher compresses.
type Compression int

// The codecs, by the numbers that Kafka gives them.
const (
	CompressionNone Compression = iota
	CompressionGzip
	CompressionSnappy
	CompressionLz4
	CompressionZstd
)

// ForPublisher returns a PublisherConfig that connects, logs in, waits and logs as
// a Source with this Config does. A nil *Config gives the defaults.
func (c *Config) ForPublisher() *PublisherConfig {
	if c == nil {
		return &PublisherConfig{}
	}
	return &PublisherConfig{
		ClientID: c.ClientID, TLS: c.TLS, SASL: c.SASL, Dial: c.Dial,
		DialTimeout: c.DialTimeout, RequestTimeout: c.RequestTimeout, CloseTimeout: c.CloseTimeout,
		MaxBackoff: c.MaxBackoff, Logger: c.Logger,
	}
}

// withDefaults returns a copy of c with every default filled in.
func (c *PublisherConfig) withDefaults() *PublisherConfig {
	var d PublisherConfig
	if c != nil {
		d = *c
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
	orDefault(&d.MaxMessageBytes, defaultMaxMessageBytes)
	if d.Logger == nil {
		d.Logger = slog.Default()
	}
	return &d
}

// wire returns what a dialer needs.
func (c *PublisherConfig) wire() wire.Options {
	return wire.Options{
		ClientID: c.ClientID, TLS: c.TLS, Mechanism: c.SASL.mechanism(), Dial: c.Dial,
		DialTimeout: c.DialTimeout, RequestTimeout: c.RequestTimeout,
	}
}

// validate checks a configuration that has its defaults.
func (c *PublisherConfig) validate() error {
	const most = 512 << 20
	if err := validateTimes(
		configTime{"DialTimeout", c.DialTimeout, minTimeout},
		configTime{"RequestTimeout", c.RequestTimeout, minTimeout},
		configTime{"PublishTimeout", c.PublishTimeout, minTimeout},
		configTime{"CloseTimeout", c.CloseTimeout, minTimeout},
		configTime{"MaxBackoff", c.MaxBackoff, retry.MinBackoff},
	); err != nil {
		return err
	}
	if c.MaxMessageBytes < 1 || c.MaxMessageBytes > most {
		return configError("MaxMessageBytes", c.MaxMessageBytes, fmt.Sprintf("must be from 1 to %d", most))
	}
	if c.Compression < CompressionNone || c.Compression > CompressionZstd {
		return configError("Compression", int(c.Compression), "is not one of the Compression constants")
	}
	return c.SASL.validate()
}
