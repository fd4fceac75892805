package kafka

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

// The defaults of Config.
const (
	defaultClientID          = "ackafter"
	defaultDialTimeout       = 5 * time.Second
	defaultRequestTimeout    = 10 * time.Second
	defaultCloseTimeout      = 10 * time.Second
	defaultMaxBackoff        = 5 * time.Second
	defaultHeartbeatInterval = 3 * time.Second
	defaultSessionTimeout    = 30 * time.Second
	defaultRebalanceTimeout  = 60 * time.Second
	defaultDrainTimeout      = 30 * time.Second
	defaultCommitInterval    = time.Second
	defaultCommitCount       = 1000
	defaultWatchInterval     = 10 * time.Second
	defaultLagInterval       = 10 * time.Second
	defaultMaxAhead          = 10_000
	defaultBufferBytes       = 64 << 20
	defaultFetchBytes        = 1 << 20
	defaultFetchWait         = time.Second

	// minTimeout is the least that makes sense for a round trip to a broker.
	minTimeout = 10 * time.Millisecond
	// maxTimeout is a sane bound; the protocol counts milliseconds in 32 bits.
	maxTimeout = 24 * time.Hour
	// minFetchBytes keeps small shares of the buffer from making tiny fetches.
	minFetchBytes = 16 << 10
	maxFetchBytes = 256 << 20
)

// Config configures a Source. A nil *Config means all defaults. One rule holds
// for numbers and durations: zero is the documented default, negative turns the
// thing off; where off would be unsafe, negative is an error. A Config is copied
// by Open and may be changed and reused afterwards.
type Config struct {
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
	// 5 s. Negative is an error: nothing waits for ever.
	DialTimeout time.Duration

	// RequestTimeout bounds every request to a broker, in addition to the time
	// that the request itself asks the broker to wait (FetchWait,
	// RebalanceTimeout). A connection that does not answer is given up. Default
	// 10 s. Negative is an error.
	RequestTimeout time.Duration

	// CloseTimeout bounds Source.Close when its context has no deadline. Default
	// 10 s. Negative is an error.
	CloseTimeout time.Duration

	// MaxBackoff caps the time between attempts to reach a broker; it grows
	// from 100 ms by doubling, with jitter. Default 5 s. At least 100 ms;
	// negative is an error: it would be a hot loop.
	MaxBackoff time.Duration

	// Start says where a partition begins for which the group has no offset.
	// Default StartEarliest.
	Start Start

	// Isolation says whether records of open and aborted transactions are handed
	// out. Default ReadCommitted.
	Isolation Isolation

	// Lanes says what is worked on in order. Default LaneByKey.
	Lanes LaneBy

	// Framing says what stands before the payload in the values, and is taken off
	// before they are handed out, whichever topic they come from. Default
	// FramingNone. What was taken off becomes headers (HeaderSchemaID), which come
	// before the record's own. A value without the frame, or with a broken one, is
	// handed out as it is, without these headers; a null value stays null. Keys are
	// never touched: a number may begin with the same bytes as a frame, and two
	// keys must not become one. Offsets and lanes do not change.
	//
	// With a Framing, what derives the message key sees the bare payload, so
	// keyfunc's Unwrap around a registry frame is not needed, and would not find
	// one. The fingerprint of the body leaves the schema id out, too; so when
	// Framing is changed, a message that was handled before and comes again is a
	// conflict and no replay, unless inbox.Config.Fingerprint says otherwise.
	Framing Framing

	// OnGap says what happens when offsets that were not handled are gone from
	// the log. Default GapContinue.
	OnGap GapPolicy

	// OnReset says what happens when the group's offset makes no sense in the
	// log: the topic was deleted or created anew, or the log was cut back, after an
	// unclean leader election for example. The latter is noticed by leader epochs,
	// even if the log has grown again, by brokers since Kafka 2.3; older ones show it
	// only while the log is shorter than the offset. Default ResetStop.
	OnReset ResetPolicy

	// HeartbeatInterval is how often the group's coordinator is told that this
	// member is alive, which happens in the background. Default 3 s, or a third
	// of SessionTimeout if that is less, which is also the most that is allowed.
	// Negative is an error.
	HeartbeatInterval time.Duration

	// SessionTimeout is after how long without heartbeats the coordinator gives
	// the partitions to others. Default 30 s. The broker has bounds of its own
	// (6 s to 30 min unless configured). Negative is an error.
	SessionTimeout time.Duration

	// RebalanceTimeout is how long the coordinator waits for a member to come
	// back when the group rebalances: for what DrainTimeout and the last commit
	// take. Default 60 s. Negative is an error.
	RebalanceTimeout time.Duration

	// DrainTimeout is how long deliveries that are out when the group rebalances
	// may still be settled. The whole group waits for that long at most; what is
	// not settled then is lost and comes again. Heartbeats go on meanwhile, so it
	// may be longer than SessionTimeout. Default: half of RebalanceTimeout, at most
	// 30 s. It must be less than RebalanceTimeout, and should leave time for noticing
	// the rebalance (a HeartbeatInterval) and for a commit. Negative: no grace,
	// deliveries are lost at once.
	DrainTimeout time.Duration

	// CommitInterval is how often offsets are committed. Default 1 s. Negative:
	// not by time, only by CommitCount, when the group rebalances, and in Close.
	CommitInterval time.Duration

	// CommitCount is after how many acks offsets are committed without waiting
	// for CommitInterval. Default 1000. Negative: not by count.
	CommitCount int

	// WatchInterval is how often the topics are looked at: for new partitions,
	// and whether a topic was deleted or created anew. Default 10 s. Negative:
	// never; then a re-created topic is noticed only when the offset is beyond
	// its end.
	WatchInterval time.Duration

	// LagInterval is how often OnLag is told how far the partitions are behind. The
	// end of a log comes with what is fetched from it; for partitions that are not
	// fetched, because there is no room or their leader cannot be reached, it is
	// asked for at this interval, with one request for each broker. Default 10 s.
	// Negative: never; then the numbers of Stats are as old as the last fetch.
	LagInterval time.Duration

	// MaxAhead is how many records of a partition may be handed out, or wait in
	// the buffer, ahead of the first one that is not done. One record that takes
	// very long, or is given back again and again, stops its partition when that
	// many others were done behind it. What one fetch brings may wait on top.
	// Default 10,000. Negative: no bound.
	MaxAhead int

	// BufferBytes bounds what is fetched and not handed out yet, over all
	// partitions; each gets an equal share. Records count as they are in memory,
	// unpacked. It can be exceeded by one batch of each partition, as batches
	// are unpacked as a whole. Deliveries that are out are not counted: how many
	// there are is up to the caller of Receive. Default 64 MiB. Negative is an
	// error: memory has to be bounded.
	BufferBytes int

	// FetchBytes is how much one fetch of one partition asks for at most, as it
	// travels; it asks for less when there is less room. A larger batch still
	// comes. Default 1 MiB. At least 16 KiB, at most 256 MiB; negative is an
	// error.
	FetchBytes int

	// FetchWait is how long a broker may wait for new records before it answers
	// a fetch. New records arrive at once whatever it is. Default 1 s. Negative
	// is an error: it would be a hot loop.
	FetchWait time.Duration

	// Logger gets the events that a person should see; never keys or bodies.
	// Nil: slog.Default().
	Logger *slog.Logger

	// Hooks observe the source, see Hook. Nil: none.
	Hooks []Hook
}

// Start says where a partition begins for which the group has no offset.
type Start int

// Where to begin.
const (
	// StartEarliest begins with the oldest record that the log still has.
	StartEarliest Start = iota
	// StartLatest begins with the next record that is written. The group commits
	// that offset at once, so that nothing written later is skipped, also when
	// the process is down meanwhile. Partitions that are added while the source is
	// open are read from their beginning. Those that are added while none is open
	// begin, as all that the group does not know, where they end when it comes back;
	// so do those of a topic that was deleted and created anew, unless a source was
	// open meanwhile and OnReset is ResetRestart.
	StartLatest
)

// Isolation says which records of transactions are handed out.
type Isolation int

// The isolation levels.
const (
	// ReadCommitted hands out only records of committed transactions, and those
	// outside of any.
	ReadCommitted Isolation = iota
	// ReadUncommitted hands out everything.
	ReadUncommitted
)

// LaneBy says what the lanes of deliveries are: what is worked on in order.
type LaneBy int

// The lanes.
const (
	// LaneByKey makes a lane of each record key within a partition. Records
	// without a key share the partition's lane.
	LaneByKey LaneBy = iota
	// LaneByPartition makes one lane of each partition.
	LaneByPartition
)

// GapPolicy says what happens when offsets that were not handled are gone.
type GapPolicy int

// The policies.
const (
	// GapContinue reports the gap and goes on where the log begins now.
	GapContinue GapPolicy = iota
	// GapStop ends Receive with a *GapError.
	GapStop
)

// ResetPolicy says what happens when an offset makes no sense in the log.
type ResetPolicy int

// The policies.
const (
	// ResetStop ends Receive with a *ResetError. Brokers forget a group's offsets
	// together with a topic that is deleted: then a source that is opened again
	// begins at Config.Start.
	ResetStop ResetPolicy = iota
	// ResetRestart reports it and begins at the earliest offset, or, in a log that
	// was cut back, where it stops being what it was, if the brokers know topics by
	// ids (since Kafka 2.8). Deliveries that are out are lost. A deleted topic is
	// waited for.
	ResetRestart
)

// withDefaults returns a copy of c with every default filled in.
func (c *Config) withDefaults() *Config {
	var d Config
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
	orDefault(&d.CloseTimeout, defaultCloseTimeout)
	orDefault(&d.MaxBackoff, defaultMaxBackoff)
	orDefault(&d.SessionTimeout, defaultSessionTimeout)
	orDefault(&d.HeartbeatInterval, min(defaultHeartbeatInterval, max(d.SessionTimeout/3, minTimeout)))
	orDefault(&d.RebalanceTimeout, defaultRebalanceTimeout)
	orDefault(&d.DrainTimeout, min(defaultDrainTimeout, d.RebalanceTimeout/2))
	orDefault(&d.CommitInterval, defaultCommitInterval)
	orDefault(&d.CommitCount, defaultCommitCount)
	orDefault(&d.WatchInterval, defaultWatchInterval)
	orDefault(&d.LagInterval, defaultLagInterval)
	orDefault(&d.MaxAhead, defaultMaxAhead)
	orDefault(&d.BufferBytes, defaultBufferBytes)
	orDefault(&d.FetchBytes, defaultFetchBytes)
	orDefault(&d.FetchWait, defaultFetchWait)
	for _, off := range []*time.Duration{&d.DrainTimeout, &d.CommitInterval, &d.WatchInterval, &d.LagInterval} {
		*off = max(*off, 0)
	}
	d.CommitCount = max(d.CommitCount, 0)
	d.MaxAhead = max(d.MaxAhead, 0)
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
	if err := validateTimes(
		configTime{"DialTimeout", c.DialTimeout, minTimeout},
		configTime{"RequestTimeout", c.RequestTimeout, minTimeout},
		configTime{"CloseTimeout", c.CloseTimeout, minTimeout},
		configTime{"MaxBackoff", c.MaxBackoff, retry.MinBackoff},
		configTime{"HeartbeatInterval", c.HeartbeatInterval, minTimeout},
		configTime{"SessionTimeout", c.SessionTimeout, minTimeout},
		configTime{"RebalanceTimeout", c.RebalanceTimeout, minTimeout},
		configTime{"FetchWait", c.FetchWait, time.Millisecond},
	); err != nil {
		return err
	}
	switch {
	case c.HeartbeatInterval > c.SessionTimeout/3:
		return configError("HeartbeatInterval", c.HeartbeatInterval, fmt.Sprintf("must be at most a third of SessionTimeout (%v)", c.SessionTimeout))
	case c.DrainTimeout >= c.RebalanceTimeout:
		return configError("DrainTimeout", c.DrainTimeout, fmt.Sprintf("must be less than RebalanceTimeout (%v)", c.RebalanceTimeout))
	case c.CommitInterval > 0 && c.CommitInterval < time.Millisecond:
		return configError("CommitInterval", c.CommitInterval, "must be at least 1ms, or negative for never")
	case c.WatchInterval > 0 && c.WatchInterval < minTimeout:
		return configError("WatchInterval", c.WatchInterval, fmt.Sprintf("must be at least %v, or negative for never", minTimeout))
	case c.LagInterval > 0 && c.LagInterval < minTimeout:
		return configError("LagInterval", c.LagInterval, fmt.Sprintf("must be at least %v, or negative for never", minTimeout))
	case c.BufferBytes < 1:
		return configError("BufferBytes", c.BufferBytes, "must not be negative: memory has to be bounded")
	case c.FetchBytes < minFetchBytes || c.FetchBytes > maxFetchBytes:
		return configError("FetchBytes", c.FetchBytes, fmt.Sprintf("must be from %d to %d", minFetchBytes, maxFetchBytes))
	}
	return c.validateChoices()
}

// configTime is a duration of a configuration and the least that it may be.
type configTime struct {
	field string
	value time.Duration
	least time.Duration
}

func validateTimes(times ...configTime) error {
	for _, t := range times {
		if t.value < t.least || t.value > maxTimeout {
			return configError(t.field, t.value, fmt.Sprintf("must be from %v to %v", t.least, maxTimeout))
		}
	}
	return nil
}

func (c *Config) validateChoices() error {
	switch {
	case c.Start < StartEarliest || c.Start > StartLatest:
		return configError("Start", int(c.Start), "is not one of StartEarliest, StartLatest")
	case c.Isolation < ReadCommitted || c.Isolation > ReadUncommitted:
		return configError("Isolation", int(c.Isolation), "is not one of ReadCommitted, ReadUncommitted")
	case c.Lanes < LaneByKey || c.Lanes > LaneByPartition:
		return configError("Lanes", int(c.Lanes), "is not one of LaneByKey, LaneByPartition")
	case c.Framing < FramingNone || c.Framing > FramingConfluentProtobuf:
		return configError("Framing", int(c.Framing), "is not one of FramingNone, FramingConfluent, FramingConfluentProtobuf")
	case c.OnGap < GapContinue || c.OnGap > GapStop:
		return configError("OnGap", int(c.OnGap), "is not one of GapContinue, GapStop")
	case c.OnReset < ResetStop || c.OnReset > ResetRestart:
		return configError("OnReset", int(c.OnReset), "is not one of ResetStop, ResetRestart")
	}
	for i, h := range c.Hooks {
		if !isHook(h) {
			return configError(fmt.Sprintf("Hooks[%d]", i), fmt.Sprintf("%T", h), "implements none of the On... interfaces")
		}
	}
	return c.SASL.validate()
}

func configError(field string, value any, rule string) error {
	return fmt.Errorf("kafka: config: %s = %v: %s", field, value, rule)
}
