package inbox

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ackafter/ackafter/broker"
)

// DefaultRetention is how long keys are kept by default.
const DefaultRetention = 7 * 24 * time.Hour

// The defaults of Config.
const (
	defaultWorkers          = 4
	defaultBatchSize        = 50
	maxBatchSize            = 1000
	maxWorkers              = 1000
	maxTimeout              = 20 * 24 * time.Hour
	defaultBatchTime        = 200 * time.Millisecond
	defaultHandlerTimeout   = 30 * time.Second
	defaultLockTimeout      = 5 * time.Second
	defaultShutdownTimeout  = 20 * time.Second
	defaultAckTimeout       = 10 * time.Second
	minMaxInFlight          = 1000
	defaultMaxInFlightBytes = 64 << 20
	defaultMaxAttempts      = 15
	defaultMaxCrashes       = 3
	defaultBackoff          = 200 * time.Millisecond
	defaultMaxBackoff       = 10 * time.Minute
	defaultHold             = time.Second
	defaultMaxWaiting       = 1000
	defaultMaxWaitingBytes  = 16 << 20
	defaultPoll             = 5 * time.Second
	minPoll                 = 10 * time.Millisecond
	defaultLease            = 10 * time.Minute
	leaseMargin             = time.Minute
	defaultDeadRetention    = 30 * 24 * time.Hour
	// idleMargin is what a transaction may sit idle beyond a handler's timeout.
	idleMargin = 10 * time.Second
)

// Config configures a Consumer. A nil *Config means all defaults. One rule holds
// for numbers and durations: zero is the documented default, negative turns the
// thing off; where off would be unsafe, negative is an error. A Config is copied
// by New and may be changed and reused afterwards.
type Config struct {
	// Workers is how many transactions run at once, each with a connection of
	// its own. Default 4, or one less than the store has connections if that is
	// less. Where handlers, or anybody else, use the same pool, leave connections
	// for them: a handler that waits for one that all workers hold waits until
	// its timeout. More than the store has connections, more than 1000, and negative is
	// an error of New.
	Workers int

	// BatchSize is the highest number of messages in one transaction. The loop
	// never waits for a batch to fill. A batch is never visible in the outcome:
	// a failing message does not harm its neighbours. Default 50; above about 60
	// PostgreSQL slows down every other reader. Negative or 1: single messages.
	// At most 1000.
	BatchSize int

	// BatchTime bounds how long a batch's transaction stays open: no further
	// handler is started after it. It does not interrupt a handler. Default
	// 200 ms. Negative: no bound.
	BatchTime time.Duration

	// HandlerTimeout bounds one run of the handler. A handler that does not
	// return is left behind: its connection is cut, its lane goes on, the
	// attempt has failed. Default 30 s. Negative: no bound. At most 20 days.
	HandlerTimeout time.Duration

	// LockTimeout bounds the wait for a key that another transaction holds. After
	// it the message is tried again later and uses no attempt. A batch waits only
	// a moment (200 ms) and then runs one by one, and so does a message that has
	// waited before. Default 5 s. Negative is an error: a wait has to end. At most 20
	// days.
	LockTimeout time.Duration

	// ShutdownTimeout is the grace that running handlers get when Run's context
	// ends; then their contexts are cancelled and their work is rolled back.
	// Default 20 s. Negative: no grace. Run returns after it plus the time that a
	// COMMIT under way (up to 30 s), the last acks, the nacks, giving back parked
	// messages and closing the source (up to AckTimeout each) may take; with servers
	// that answer, these are milliseconds.
	ShutdownTimeout time.Duration

	// AckTimeout bounds the acks of one batch together, giving back what is left
	// at a stop (to the broker and to the parked table), and closing the source. Acks are sent even while Run is
	// stopping. Default 10 s. Negative is an error.
	AckTimeout time.Duration

	// MaxInFlight is the highest number of deliveries that Run holds at once,
	// waiting or in work. Full batches need about Workers x BatchSize x 2.
	// Deliveries that queue behind one of their lane that waits for its next attempt
	// (see Parking.Hold) count: when they fill it, the other lanes wait as well.
	// Parked messages that are fed back, 20 at most, come on top. Default: that
	// number, at least 1000. Negative: no bound.
	MaxInFlight int

	// MaxInFlightBytes bounds their memory, by broker.Message.Size. It may be
	// exceeded by what one call of the source brings when messages are suddenly
	// much larger than those before. Default 64 MiB. Negative: no bound.
	MaxInFlightBytes int64

	// Retry says how often and when a failed message is tried again.
	Retry Retry

	// Parking says where a failed message waits for its next attempt, and what
	// becomes of those behind it.
	Parking Parking

	// OnConflict says what becomes of a message whose key was handled before
	// with another body. Default ConflictDeadLetter.
	OnConflict ConflictPolicy

	// Fingerprint tells "same key, same body" from "same key, other body".
	// Nil: SHA-256 of the body. When bodies carry timestamps or nonces, choose
	// what counts. It must always give the same for the same message; more than
	// 256 bytes are stored as their SHA-256. An error makes the message a dead
	// letter. Like Tenant, EventTime and the key function it is called by one
	// goroutine of Run, must not block, and may be called concurrently by other
	// Runs and Process.
	Fingerprint func(m *broker.Message) ([]byte, error)

	// Tenant reads a second scope of the key from the message. Nil: none. An
	// error makes the message a dead letter.
	Tenant func(m *broker.Message) (string, error)

	// EventTime reads when the event happened. Nil: the broker's time. An error
	// makes the message a dead letter. Messages that are re-published keep their
	// meaning only when this reads the body or a header.
	EventTime func(m *broker.Message) (time.Time, error)

	// Retention is the window: how long a key is kept after its message was
	// handled. Within it a repeated message is a replay, after it the key counts
	// as new. Default 7 days (DefaultRetention); 24 hours is usual for payments.
	// Negative: for ever. Less than a second is an error.
	Retention time.Duration

	// Worker names this process in the inbox and the logs. Default: host name
	// and process id.
	Worker string

	// ReplacesKey confirms a changed key function: it is the definition that the
	// consumer's stored keys were made by. Default: none; a changed definition is
	// then an error (*KeyDefinitionError) when the consumer starts, because every
	// key would count as new.
	ReplacesKey string

	// Logger gets one line for every message that is done with, and one for each
	// event worth one. Keys are logged, bodies never. Nil: slog.Default().
	Logger *slog.Logger

	// Hooks observe the consumer, see Hook. Nil: none.
	Hooks []Hook
}

// Parking says where failed messages wait. Between attempts that come soon a
// message waits in its lane; before a later one it is parked: stored in the
// database, acked at the broker, and fed back by any process of the consumer when
// its time has come. With the defaults the fourth failure parks. A message that was
// fed back and fails again goes back into the table, however soon its next attempt
// is. It needs a store that is a Parker, as all of this module are; with another
// one failed messages wait in their lanes.
type Parking struct {
	// Hold is the longest time between two attempts (before jitter) for which a
	// failed message holds its lane; before a longer one it is parked. That goes for
	// RetryAfter, too. Default 1 s. Negative: no message is parked for a later
	// attempt, however long it waits. Dead letters are kept in any case.
	Hold time.Duration

	// Unordered lets messages of a lane overtake one that is parked. Default:
	// they wait behind it in the database (ParkedWaiting), while other lanes go
	// on. Messages without a lane never wait for one another.
	Unordered bool

	// OnDead says what becomes of the messages behind one that died. Default
	// DeadPass. DeadBlock with Unordered is an error.
	OnDead OnDead

	// MaxWaiting and MaxWaitingBytes bound what waits behind one parked message of
	// a lane: number and sum of bodies; one batch may exceed them. Beyond, the
	// messages of that lane are not parked and not acked: they stay in the process,
	// and when they fill MaxInFlight the source pauses. Default 1000 and 16 MiB.
	// Negative: no bound.
	MaxWaiting      int
	MaxWaitingBytes int64

	// Poll is how often the database is asked for due messages when nothing else
	// tells that there are some. Default 5 s. Negative: this process feeds nothing
	// back, and purges no dead letters. Less than 10 ms is an error.
	Poll time.Duration

	// Lease is how long a process keeps due messages to itself; after it, others
	// take what a crashed one had. One that runs is safe for as long as its
	// transaction is open. Default: HandlerTimeout plus one minute, or ten
	// minutes when that has no bound. Less than a second, negative, and more than
	// 20 days is an error.
	Lease time.Duration

	// DeadRetention is how long dead letters are kept: they hold bodies. Default 30
	// days. Negative: for ever. Less than a second is an error. Those that hold a
	// lane (DeadBlock) stay until a person has seen to them.
	DeadRetention time.Duration
}

// OnDead says what becomes of a lane when a message of it died.
type OnDead int

// The policies.
const (
	// DeadPass lets the lane go on.
	DeadPass OnDead = iota
	// DeadBlock holds the lane until a person has retried or discarded the
	// message.
	DeadBlock
)

// Retry says how often and when a failed message is tried again, in its lane or
// from the parked table, see Parking. There is one series of attempts and delays,
// wherever it waits. No transaction is open meanwhile.
type Retry struct {
	// MaxAttempts is how many failed attempts a message gets; after the last one
	// it becomes a dead letter. Runs that failed because of infrastructure are no
	// attempts. Default 15: with the other defaults the last one comes half an hour
	// after the first at the latest, and after a quarter of an hour on average.
	// Negative: no limit.
	MaxAttempts int

	// MaxCrashes is how many times the process may die while it runs a message alone;
	// then the message becomes a dead letter (ReasonProcessDied) and is not run again.
	// It is looked for after a Run has ended without a stop: what that may have had in
	// work is then run one message at a time, each after a mark was committed. The first
	// death is not counted, as nobody knows which message it was. Ending a process in
	// any other way while a message runs alone (kill -9, no memory) counts as well, so
	// 1 is for those who do neither. Default 3. Negative: it is not looked for. It needs
	// a store that is a Marker, as all of this module are.
	MaxCrashes int

	// Backoff is the time before the second attempt; it doubles with each
	// further one. The actual time is random, anything up to it, so that messages
	// that failed together do not come back together. Default 200 ms. Negative:
	// none.
	Backoff time.Duration

	// MaxBackoff caps the time between attempts. Default 10 minutes, or Backoff if
	// that is more; must not be less than Backoff. Negative is an error.
	MaxBackoff time.Duration

	// Classify turns errors of the handler into verdicts: it returns err wrapped by
	// Permanent or RetryAfter, or another error that counts in err's place. Nil, and
	// a Skip, leave err as it is: a failed run cannot become a success. It is asked
	// about every failed attempt, a panic (*PanicError) and a timeout
	// (ErrHandlerTimeout) too, but not when err is a verdict already, nor about
	// infrastructure. A panic of it counts as nil and is logged. It is called from
	// several goroutines at once and must not block. Default: none.
	Classify func(err error) error
}

// ConflictPolicy says what becomes of a message whose key was handled before
// with another body. The first write always wins.
type ConflictPolicy int

// The policies.
const (
	// ConflictDeadLetter keeps the message as a dead letter, for a person.
	ConflictDeadLetter ConflictPolicy = iota
	// ConflictSkip acks it. It is still logged and counted as a conflict.
	ConflictSkip
	// ConflictFail does not ack it and ends Run with an error that wraps
	// ErrConflict. For systems that must stop rather than go on.
	ConflictFail
)

// withDefaults returns a copy of c with every default filled in.
func (c *Config) withDefaults(poolSize int) *Config {
	var d Config
	if c != nil {
		d = *c
		d.Hooks = append([]Hook(nil), c.Hooks...)
	}
	if d.Workers == 0 {
		d.Workers = defaultWorkers
		if poolSize > 0 {
			d.Workers = max(min(d.Workers, poolSize-1), 1)
		}
	}
	d.BatchSize = number(d.BatchSize, defaultBatchSize, 1)
	d.BatchTime = number(d.BatchTime, defaultBatchTime, 0)
	d.HandlerTimeout = number(d.HandlerTimeout, defaultHandlerTimeout, 0)
	d.ShutdownTimeout = number(d.ShutdownTimeout, defaultShutdownTimeout, 0)
	d.MaxInFlight = number(d.MaxInFlight, max(minMaxInFlight, 2*d.Workers*d.BatchSize), 0)
	d.MaxInFlightBytes = number(d.MaxInFlightBytes, int64(defaultMaxInFlightBytes), 0)
	d.Retention = number(d.Retention, DefaultRetention, 0)
	d.Retry.MaxAttempts = number(d.Retry.MaxAttempts, defaultMaxAttempts, 0)
	d.Retry.MaxCrashes = number(d.Retry.MaxCrashes, defaultMaxCrashes, 0)
	d.Retry.Backoff = number(d.Retry.Backoff, defaultBackoff, 0)
	if d.LockTimeout == 0 {
		d.LockTimeout = defaultLockTimeout
	}
	if d.AckTimeout == 0 {
		d.AckTimeout = defaultAckTimeout
	}
	if d.Retry.MaxBackoff == 0 {
		d.Retry.MaxBackoff = max(defaultMaxBackoff, d.Retry.Backoff)
	}
	d.Parking.setDefaults(d.HandlerTimeout)
	if d.Worker == "" {
		d.Worker = defaultWorker()
	}
	if d.Logger == nil {
		d.Logger = slog.Default()
	}
	return &d
}

// setDefaults fills in the defaults; handler is HandlerTimeout.
func (p *Parking) setDefaults(handler time.Duration) {
	p.Hold = number(p.Hold, defaultHold, -1)
	p.MaxWaiting = number(p.MaxWaiting, defaultMaxWaiting, 0)
	p.MaxWaitingBytes = number(p.MaxWaitingBytes, int64(defaultMaxWaitingBytes), 0)
	p.Poll = number(p.Poll, defaultPoll, 0)
	p.DeadRetention = number(p.DeadRetention, defaultDeadRetention, 0)
	switch {
	case p.Lease != 0:
	case handler > 0:
		p.Lease = min(handler+leaseMargin, maxTimeout)
	default:
		p.Lease = defaultLease
	}
}

// number applies the rule: zero is the default, negative is off.
func number[N int | int64 | time.Duration](v, byDefault, off N) N {
	switch {
	case v == 0:
		return byDefault
	case v < 0:
		return off
	}
	return v
}

// validate checks a configuration that has its defaults.
func (c *Config) validate(poolSize int) error {
	switch {
	case c.Workers < 0:
		return configError("Workers", c.Workers, "must not be negative")
	case poolSize > 0 && c.Workers > poolSize:
		return configError("Workers", c.Workers, fmt.Sprintf(
			"each worker needs a connection and the store has only %d; enlarge the pool (SQLite has one writer, whatever its pool) or lower Workers", poolSize))
	case c.Workers > maxWorkers:
		return configError("Workers", c.Workers, fmt.Sprintf("must be at most %d", maxWorkers))
	case c.BatchSize > maxBatchSize:
		return configError("BatchSize", c.BatchSize, fmt.Sprintf("must be at most %d", maxBatchSize))
	case c.LockTimeout < time.Millisecond:
		return configError("LockTimeout", c.LockTimeout, "must be at least 1ms: a wait has to end")
	case c.BatchTime > 0 && c.BatchTime < time.Millisecond:
		return configError("BatchTime", c.BatchTime, "must be at least 1ms, or negative for no bound")
	case c.HandlerTimeout > 0 && c.HandlerTimeout < time.Millisecond:
		return configError("HandlerTimeout", c.HandlerTimeout, "must be at least 1ms, or negative for no bound")
	case c.ShutdownTimeout > 0 && c.ShutdownTimeout < time.Millisecond:
		return configError("ShutdownTimeout", c.ShutdownTimeout, "must be at least 1ms, or negative for no grace")
	case c.LockTimeout > maxTimeout:
		return configError("LockTimeout", c.LockTimeout, fmt.Sprintf("must be at most %v", maxTimeout))
	case c.HandlerTimeout > maxTimeout:
		return configError("HandlerTimeout", c.HandlerTimeout, fmt.Sprintf("must be at most %v, or negative for no bound", maxTimeout))
	case c.AckTimeout < time.Millisecond:
		return configError("AckTimeout", c.AckTimeout, "must be at least 1ms: an ack needs time")
	case c.Retention != 0 && c.Retention < time.Second:
		return configError("Retention", c.Retention, "must be at least 1s, or negative for ever")
	case c.Retry.MaxBackoff < c.Retry.Backoff:
		return configError("Retry.MaxBackoff", c.Retry.MaxBackoff, fmt.Sprintf("must not be less than Retry.Backoff (%v)", c.Retry.Backoff))
	case c.OnConflict < ConflictDeadLetter || c.OnConflict > ConflictFail:
		return configError("OnConflict", int(c.OnConflict), "is not one of ConflictDeadLetter, ConflictSkip, ConflictFail")
	}
	if err := c.Parking.validate(); err != nil {
		return err
	}
	if !utf8.ValidString(c.Worker) || len(c.Worker) > maxName || strings.ContainsRune(c.Worker, 0) {
		return configError("Worker", strconv.Quote(fmt.Sprintf("%.40s", c.Worker)), fmt.Sprintf("must be valid UTF-8 without NUL, of at most %d bytes", maxName))
	}
	for i, h := range c.Hooks {
		if !isHook(h) {
			return configError(fmt.Sprintf("Hooks[%d]", i), fmt.Sprintf("%T", h), "implements none of the On... interfaces")
		}
	}
	return nil
}

// validate checks a Parking that has its defaults.
func (p *Parking) validate() error {
	switch {
	case p.OnDead < DeadPass || p.OnDead > DeadBlock:
		return configError("Parking.OnDead", int(p.OnDead), "is not one of DeadPass, DeadBlock")
	case p.OnDead == DeadBlock && p.Unordered:
		return configError("Parking.OnDead", "DeadBlock", "says nothing when Parking.Unordered is set")
	case p.Poll > 0 && p.Poll < minPoll:
		return configError("Parking.Poll", p.Poll, fmt.Sprintf("must be at least %v, or negative to feed nothing back", minPoll))
	case p.Lease < time.Second:
		return configError("Parking.Lease", p.Lease, "must be at least 1s")
	case p.Lease > maxTimeout:
		return configError("Parking.Lease", p.Lease, fmt.Sprintf("must be at most %v", maxTimeout))
	case p.DeadRetention != 0 && p.DeadRetention < time.Second:
		return configError("Parking.DeadRetention", p.DeadRetention, "must be at least 1s, or negative for ever")
	}
	return nil
}

func isHook(h Hook) bool {
	switch h.(type) {
	case OnHandle, OnOutcome, OnRetry, OnStaleAck, OnPause, OnBatch:
		return true
	}
	return false
}

// defaultWorker names this process.
func defaultWorker() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s:%d", host, os.Getpid())
}

// hookCtx is the context hooks get: it has Run's values and does not end.
func hookCtx(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }
