package sqs

import (
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/ackafter/ackafter/internal/retry"
)

// The defaults of Config, and the limits of SQS.
const (
	defaultVisibility     = 30 * time.Second
	defaultWaitTime       = 5 * time.Second
	defaultPollers        = 8
	defaultAckDelay       = 100 * time.Millisecond
	defaultRequestTimeout = 10 * time.Second
	defaultCloseTimeout   = 10 * time.Second
	defaultMaxBackoff     = 5 * time.Second

	minTimeout    = 10 * time.Millisecond
	maxTimeout    = 24 * time.Hour
	minVisibility = time.Second
	maxVisibility = 12 * time.Hour // also of all together, from the receive on
	maxWaitTime   = 20 * time.Second
	maxAckDelay   = time.Minute
	maxPollers    = 100

	// batch is how many entries a call takes.
	batch = 10
	// senders is how many calls at a time renew leases, and how many settle messages at
	// least: as many as Pollers do, so that deletes keep up with what is received.
	senders = 4
	// maxUnsent is how many acks may wait for their deletes before no more is asked
	// for: what is deleted too late comes again.
	maxUnsent = 10 * batch
)

// Config configures a Source. A nil *Config means all defaults. One rule holds for
// numbers and durations: zero is the documented default, negative turns the thing
// off; where off would be unsafe, negative is an error. A Config is copied by Open
// and may be changed and reused afterwards.
type Config struct {
	// Client makes the calls. Nil: one from the default AWS configuration chain
	// (environment, shared files, role).
	Client Client

	// Region is the AWS region of the queue. Default: that of the ARN or the URL, else
	// that of the configuration chain. Not used with Client.
	Region string

	// Endpoint is the base URL of the server, "http://host:port", for a VPC endpoint or
	// a server that is not AWS's. Default: that of a URL whose host is not AWS's, else
	// AWS's of the region. Not used with Client.
	Endpoint string

	// VisibilityTimeout is for how long a message is hidden from others, and so leased
	// to this source, at a time. Default 30 s. In whole seconds, from 1 s to 12 h;
	// negative is an error. After a crash the messages come again when it has passed.
	VisibilityTimeout time.Duration

	// Heartbeat is how often leases are renewed, for VisibilityTimeout from then on;
	// buffered messages, too. Default a third of VisibilityTimeout, of which it may be
	// half at most. Negative: never, so handlers must be quicker than
	// VisibilityTimeout. SQS ends every lease 12 h after the receive.
	Heartbeat time.Duration

	// WaitTime is for how long a request waits for messages (long polling). Default 5 s,
	// in whole seconds, from 1 s to 20 s; negative is an error: it would be a hot loop.
	// Longer saves requests while the queue is empty, and makes Close take longer, which
	// waits for a request that is under way: keep it below 0.7 times CloseTimeout, or
	// inbox.Config.AckTimeout.
	WaitTime time.Duration

	// Pollers is how many requests for messages may be under way at once. There is one
	// while the queue is nearly empty, and more when they come back full. Default 8,
	// from 1 to 100; negative is an error.
	Pollers int

	// AckDelay is for how long acks wait for others, so that ten go in one call. Default
	// 100 ms, at most 1 min. Negative: they do not wait.
	AckDelay time.Duration

	// RequestTimeout bounds every request, on top of WaitTime for receiving. Default
	// 10 s. Negative is an error.
	RequestTimeout time.Duration

	// CloseTimeout bounds Source.Close when its context has no deadline. Default 10 s.
	// Negative is an error.
	CloseTimeout time.Duration

	// MaxBackoff caps the time between attempts of what fails; it grows from 100 ms by
	// doubling, with jitter. Default 5 s. At least 100 ms; negative is an error: it
	// would be a hot loop.
	MaxBackoff time.Duration

	// OnQueueDeleted says what happens when the queue does not exist any more.
	// Default QueueDeletedStop.
	OnQueueDeleted QueueDeletedPolicy

	// UnwrapSNS takes SNS notifications off: the body becomes the notification's
	// Message, and its attributes become headers. A body is one when it is a JSON
	// object with Type "Notification", an ARN as TopicArn, and a Message; anything
	// else stays as it is. Default false: who may write to the queue could imitate one.
	UnwrapSNS bool

	// Logger gets the events that a person should see; never bodies, headers or
	// groups. Nil: slog.Default().
	Logger *slog.Logger

	// Hooks observe the source, see Hook. Nil: none.
	Hooks []Hook
}

// QueueDeletedPolicy says what happens when the queue does not exist any more.
type QueueDeletedPolicy int

// The policies.
const (
	// QueueDeletedStop ends Receive with ErrNoQueue once that has lasted for 30 s.
	QueueDeletedStop QueueDeletedPolicy = iota
	// QueueDeletedWait asks again, with backoff, until the queue is there again. SQS
	// lets nobody make a queue of the same name for 60 s.
	QueueDeletedWait
)

// withDefaults returns a copy of c with every default filled in.
func (c *Config) withDefaults() *Config {
	var d Config
	if c != nil {
		d = *c
		d.Hooks = slices.Clone(c.Hooks)
	}
	orDefault(&d.VisibilityTimeout, defaultVisibility)
	orDefault(&d.Heartbeat, d.VisibilityTimeout/3)
	orDefault(&d.WaitTime, defaultWaitTime)
	orDefault(&d.Pollers, defaultPollers)
	orDefault(&d.AckDelay, defaultAckDelay)
	orDefault(&d.RequestTimeout, defaultRequestTimeout)
	orDefault(&d.CloseTimeout, defaultCloseTimeout)
	orDefault(&d.MaxBackoff, defaultMaxBackoff)
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

// validate checks a configuration that has its defaults.
func (c *Config) validate() error {
	for _, t := range []struct {
		field       string
		value       time.Duration
		least, most time.Duration
		whole       bool
	}{
		{"VisibilityTimeout", c.VisibilityTimeout, minVisibility, maxVisibility, true},
		{"WaitTime", c.WaitTime, time.Second, maxWaitTime, true},
		{"RequestTimeout", c.RequestTimeout, minTimeout, maxTimeout, false},
		{"CloseTimeout", c.CloseTimeout, minTimeout, maxTimeout, false},
		{"MaxBackoff", c.MaxBackoff, retry.MinBackoff, maxTimeout, false},
	} {
		if t.value < t.least || t.value > t.most {
			return configError(t.field, t.value, fmt.Sprintf("must be from %v to %v", t.least, t.most))
		}
		if t.whole && t.value%time.Second != 0 {
			return configError(t.field, t.value, "must be whole seconds")
		}
	}
	switch {
	case c.Heartbeat > 0 && (c.Heartbeat < minTimeout || c.Heartbeat > c.VisibilityTimeout/2):
		return configError("Heartbeat", c.Heartbeat, fmt.Sprintf("must be from %v to half of VisibilityTimeout, or negative for none", minTimeout))
	case c.Pollers < 1 || c.Pollers > maxPollers:
		return configError("Pollers", c.Pollers, fmt.Sprintf("must be from 1 to %d", maxPollers))
	case c.OnQueueDeleted < QueueDeletedStop || c.OnQueueDeleted > QueueDeletedWait:
		return configError("OnQueueDeleted", int(c.OnQueueDeleted), "is not one of QueueDeletedStop, QueueDeletedWait")
	case c.Region != "" && !isRegion(c.Region):
		return configError("Region", strconv.Quote(c.Region), regionRule)
	case c.AckDelay > maxAckDelay:
		return configError("AckDelay", c.AckDelay, fmt.Sprintf("must be at most %v", maxAckDelay))
	}
	if c.Endpoint != "" {
		u, err := url.Parse(c.Endpoint)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return configError("Endpoint", "...", "must be a URL http(s)://host:port")
		}
	}
	for i, h := range c.Hooks {
		if !isHook(h) {
			return configError(fmt.Sprintf("Hooks[%d]", i), fmt.Sprintf("%T", h), "implements none of the On... interfaces")
		}
	}
	return nil
}

func configError(field string, value any, rule string) error {
	return fmt.Errorf("sqs: config: %s = %v: %s", field, value, rule)
}
