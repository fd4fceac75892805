package integration_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/rabbitmq"
	"github.com/ackafter/ackafter/sqs"
)

// The limits of the consumers in the chaos.
const (
	// chaosAttempts is how many attempts a message gets. The worst that is no poison
	// fails chaosFailures times; a process that is frozen for longer than a handler
	// may take can cost another attempt.
	chaosAttempts = 7
	chaosFailures = 4

	chaosHandler   = 3 * time.Second
	chaosShutdown  = 2 * time.Second
	chaosAck       = 3 * time.Second
	chaosSession   = 6 * time.Second // the least that a Kafka broker allows
	chaosHidden    = 2 * time.Second // SQS's messages
	chaosParked    = 5 * time.Second // the lease of parked ones
	chaosHeartbeat = 2 * time.Second // RabbitMQ's
)

// chaosOrder is the body of a message. It says itself how its handler fails.
type chaosOrder struct {
	ID      string `json:"id"`
	Account int    `json:"account"`
	// Fails is how many of the first attempts fail; negative: all.
	Fails int    `json:"fails"`
	How   string `json:"how"`
	Note  int64  `json:"note"`
}

// The ways to fail.
const (
	byError     = "error"
	bySQL       = "sql error"
	bySwallow   = "swallowed sql error"
	byPanic     = "panic"
	byPermanent = "permanent error"
)

// chaosSetup is what a consumer process is told.
type chaosSetup struct {
	Broker    string
	Consumer  string
	Worker    string
	Addresses []string
	Name      string            // of the topic or the queue
	Database  string            // its URL
	Routes    map[string]string // addresses by those that they are reached through
	Events    string            // a file that gets a line for each event
	Workers   int
	BatchSize int
	// Sabotage breaks something, see the constants.
	Sabotage string
}

// The sabotages, by which the checks show that they can fail: values of
// ACKAFTER_TEST_CHAOS_SABOTAGE.
const (
	sabotageAck   = "ack before commit"   // messages get lost
	sabotageTx    = "effect outside"      // effects are doubled
	sabotageOrder = "lanes without order" // parked messages are overtaken
)

const envChaos = "CHILD_CHAOS"

// chaosChild is the main function of a consumer process.
func chaosChild(ctx context.Context) error {
	var s chaosSetup
	if err := json.Unmarshal([]byte(os.Getenv(envChaos)), &s); err != nil {
		return fmt.Errorf("%s: %w", envChaos, err)
	}
	events, err := os.OpenFile(s.Events, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer events.Close()
	cfg, err := pgxpool.ParseConfig(s.Database)
	if err != nil {
		return err
	}
	cfg.ConnConfig.DialFunc = s.dial
	cfg.ConnConfig.ConnectTimeout = 2 * time.Second
	cfg.MaxConns = int32(s.Workers) + 2
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	store, err := inboxpgx.New(pool)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
	handler := chaosHandle
	if s.Sabotage == sabotageTx {
		handler = func(ctx context.Context, _ pgx.Tx, m *inbox.Message) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return chaosHandle(ctx, tx, m) })
		}
	}
	consumer, err := inbox.New(store, s.Consumer, keyfunc.JSON("id"), handler, &inbox.Config{
		Workers: s.Workers, BatchSize: s.BatchSize, Worker: s.Worker,
		HandlerTimeout: chaosHandler, LockTimeout: 2 * time.Second, ShutdownTimeout: chaosShutdown, AckTimeout: chaosAck,
		Retry: inbox.Retry{MaxAttempts: chaosAttempts, Backoff: 50 * time.Millisecond, MaxBackoff: time.Second},
		Parking: inbox.Parking{
			Hold: 100 * time.Millisecond, MaxWaiting: 10, Poll: time.Second, Lease: chaosParked,
			Unordered: s.Sabotage == sabotageOrder,
		},
		Logger: slog.New(quieter{log.Handler(), slog.LevelWarn}), Hooks: []inbox.Hook{chaosHook{events}},
	})
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		opening, opened := context.WithTimeout(ctx, 10*time.Second)
		src, err := s.open(opening, log)
		opened()
		if err == nil {
			return consumer.Run(ctx, src)
		}
		log.WarnContext(ctx, "the source does not open", "error", err)
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return nil
}

// quieter leaves out what is below a level.
type quieter struct {
	slog.Handler
	least slog.Level
}

func (q quieter) Enabled(_ context.Context, l slog.Level) bool { return l >= q.least }

// dial connects through the network that the test breaks.
func (s *chaosSetup) dial(ctx context.Context, network, address string) (net.Conn, error) {
	route, ok := s.Routes[address]
	if !ok {
		return nil, fmt.Errorf("there is no way to %s", address)
	}
	return new(net.Dialer).DialContext(ctx, network, route)
}

func (s *chaosSetup) open(ctx context.Context, log *slog.Logger) (src broker.Source, err error) {
	switch s.Broker {
	case "kafka":
		src, err = kafka.Open(ctx, s.Addresses, s.Consumer, []string{s.Name}, &kafka.Config{
			Dial: s.dial, DialTimeout: 2 * time.Second, RequestTimeout: 3 * time.Second, SessionTimeout: chaosSession, Logger: log,
		})
	case "rabbitmq":
		src, err = rabbitmq.Open(ctx, s.Addresses, s.Name, &rabbitmq.Config{
			Dial: s.dial, DialTimeout: 2 * time.Second, RequestTimeout: 3 * time.Second, Heartbeat: chaosHeartbeat, Prefetch: 100, Logger: log,
		})
	case "sqs":
		src, err = sqs.Open(ctx, s.Name, &sqs.Config{
			Endpoint: "http://" + s.Routes[s.Addresses[0]], VisibilityTimeout: chaosHidden, WaitTime: time.Second,
			RequestTimeout: 3 * time.Second, Logger: log,
		})
	default:
		return nil, fmt.Errorf("there is no broker %q", s.Broker)
	}
	if err == nil && s.Sabotage == sabotageAck {
		src = hastySource{src}
	}
	return src, err
}

// chaosHandle writes an effect, and then fails as often as the message wants.
func chaosHandle(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
	var o chaosOrder
	if err := json.Unmarshal(m.Body, &o); err != nil {
		return inbox.Permanent(err)
	}
	if _, err := tx.Exec(ctx, "insert into effects (consumer, key, fingerprint, attempt) values ($1, $2, $3, $4)",
		m.Consumer, m.MessageKey, fingerprintOf(m.Body), m.Attempt); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `insert into accounts as a (consumer, account, effects) values ($1, $2, 1)
		on conflict (consumer, account) do update set effects = a.effects + 1`, m.Consumer, o.Account); err != nil {
		return err
	}
	if o.Fails >= 0 && m.Attempt > o.Fails {
		return nil
	}
	const wanted = "the message wants its handler to fail"
	switch o.How {
	case bySQL:
		_, err := tx.Exec(ctx, "select 1 / 0")
		return err
	case bySwallow:
		_, _ = tx.Exec(ctx, "select 1 / 0")
		return nil
	case byPanic:
		panic(wanted)
	case byPermanent:
		return inbox.Permanent(errors.New(wanted))
	default:
		return errors.New(wanted)
	}
}

// fingerprintOf is how the ledger names a body.
func fingerprintOf(body []byte) string {
	sum := sha256.Sum256(body)
	return hex.EncodeToString(sum[:])
}

// chaosHook writes what happens to the messages into a file, at once: the process may
// be killed.
type chaosHook struct{ events *os.File }

// chaosEvent is a line of that file.
type chaosEvent struct {
	Time        time.Time `json:"t"`
	What        string    `json:"what"` // the outcome, or the constants below
	Key         string    `json:"key,omitempty"`
	Fingerprint string    `json:"fp,omitempty"`
	Source      string    `json:"source,omitempty"`
	Offset      int64     `json:"offset,omitempty"`
	Attempt     int       `json:"attempt,omitempty"`
	Reason      string    `json:"reason,omitempty"`
}

const (
	chaosRetry = "retry"
	chaosStale = "stale ack"
	chaosPause = "pause"
)

func (h chaosHook) write(e chaosEvent, m *broker.Message) {
	e.Time = time.Now()
	if m != nil {
		e.Fingerprint, e.Source, e.Offset = fingerprintOf(m.Body), m.Source, m.Position.Offset
	}
	line, err := json.Marshal(e)
	if err == nil {
		_, _ = h.events.Write(append(line, '\n'))
	}
}

func (h chaosHook) OnOutcome(_ context.Context, e inbox.OutcomeEvent) {
	reason := string(e.Reason)
	if e.Err != nil {
		reason += ": " + e.Err.Error()
	}
	h.write(chaosEvent{What: string(e.Outcome), Key: e.MessageKey, Attempt: e.Attempt, Reason: reason}, e.Message)
}

func (h chaosHook) OnRetry(_ context.Context, e inbox.RetryEvent) {
	if e.Counted {
		h.write(chaosEvent{What: chaosRetry, Key: e.MessageKey, Attempt: e.Attempt, Reason: e.Err.Error()}, e.Message)
	}
}

func (h chaosHook) OnStaleAck(_ context.Context, e inbox.StaleAckEvent) {
	h.write(chaosEvent{What: chaosStale}, e.Message)
}

func (h chaosHook) OnPause(_ context.Context, e inbox.PauseEvent) {
	if e.Paused {
		h.write(chaosEvent{What: chaosPause, Reason: e.Err.Error()}, nil)
	}
}

// hastySource acks before anything is done: sabotage.
type hastySource struct{ broker.Source }

func (s hastySource) Receive(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	ds, err := s.Source.Receive(ctx, limit)
	for i, d := range ds {
		if err := d.Ack(ctx); err != nil {
			return nil, err
		}
		ds[i] = broker.NewDelivery(d.Context(), d.Message, d.Lane, deaf{}) //nolint:contextcheck // it is lost when the first one is
	}
	return ds, err
}

// deaf settles nothing.
type deaf struct{}

func (deaf) Ack(context.Context, *broker.Delivery) error                 { return nil }
func (deaf) Nack(context.Context, *broker.Delivery, time.Duration) error { return nil }
