package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/orders"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
)

// stormEvent is a line of a member's log.
type stormEvent struct {
	Time       time.Time     `json:"time"`
	Msg        string        `json:"msg"`
	Generation int32         `json:"generation"`
	Partitions int           `json:"partitions"`
	Lost       int           `json:"lost"`
	Drain      time.Duration `json:"drain"`
	Err        string        `json:"err"`
}

// events returns the events of one kind of all members.
func (s *storm) events(msg string) []stormEvent {
	var found []stormEvent
	for _, m := range s.all {
		for _, e := range m.events() {
			if e.Msg == msg {
				found = append(found, e)
			}
		}
	}
	return found
}

// events reads the member's log; a last line cut off by a kill is left out.
func (m *stormMember) events() []stormEvent {
	b, err := os.ReadFile(m.log)
	if err != nil {
		m.t.Error(err)
	}
	var found []stormEvent
	for line := range bytes.Lines(b) {
		var e stormEvent
		if json.Unmarshal(line, &e) == nil {
			found = append(found, e)
		}
	}
	return found
}

// stormChild is the main function of a member.
func stormChild(ctx context.Context) error {
	name, topic := os.Getenv("CHILD_NAME"), os.Getenv("CHILD_TOPIC")
	cfg, err := pgxpool.ParseConfig(os.Getenv("CHILD_URL"))
	if err != nil {
		return err
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = name
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	store, err := inboxpgx.New(pool)
	if err != nil {
		return err
	}
	quiet := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	consumer, err := inbox.New(store, "storm", keyfunc.JSON("orderId", "eventType"), inbox.JSON(stormHandler(name)), &inbox.Config{
		Workers: 3, BatchSize: 10, Worker: name, Logger: quiet,
	})
	if err != nil {
		return err
	}
	src, err := kafka.Open(ctx, strings.Split(os.Getenv("CHILD_BROKERS"), ","), topic, []string{topic}, &kafka.Config{
		SessionTimeout: stormSession, CommitInterval: 100 * time.Millisecond, Logger: quiet,
		Hooks: []kafka.Hook{stormHook{slog.New(slog.NewJSONHandler(os.Stdout, nil))}},
	})
	if err != nil {
		return err
	}
	return consumer.Run(ctx, src)
}

// stormHandler writes the effect of an event, and how many effects of its order
// it saw. One in a hundred takes long, one in five thousand longer than a rebalance
// waits.
func stormHandler(name string) func(context.Context, pgx.Tx, *inbox.Message, orders.Event) error {
	return func(ctx context.Context, tx pgx.Tx, m *inbox.Message, e orders.Event) error {
		took := time.Duration(rand.IntN(1000)) * time.Microsecond
		switch n := rand.IntN(10_000); {
		case n < 2:
			took = stormSession / 2
		case n < 100:
			took = stormSession / 10
		}
		select {
		case <-time.After(took):
		case <-ctx.Done():
			return ctx.Err()
		}
		_, err := tx.Exec(ctx, `insert into effects (order_id, event_type, worker, source, source_offset, seen)
			select $1, $2, $3, $4, $5, (select count(*) from effects where order_id = $1)`,
			e.OrderID, e.EventType, name, m.Source, m.Position.Offset)
		return err
	}
}

// stormHook writes what happens to the membership into the log, at once: a
// member may be killed.
type stormHook struct{ log *slog.Logger }

func (h stormHook) OnAssigned(ctx context.Context, e kafka.AssignedEvent) {
	h.log.InfoContext(ctx, "assigned", "generation", e.Generation, "partitions", len(e.Partitions))
}

func (h stormHook) OnRevoked(ctx context.Context, e kafka.RevokedEvent) {
	err := ""
	if e.Err != nil {
		err = e.Err.Error()
	}
	h.log.InfoContext(ctx, "revoked", "generation", e.Generation, "partitions", len(e.Partitions), "lost", e.Lost, "drain", e.Drain, "err", err)
}

func (h stormHook) OnStaleAck(ctx context.Context, e kafka.StaleAckEvent) {
	h.log.InfoContext(ctx, "stale ack", "partition", e.Partition)
}

func (h stormHook) OnCommitError(ctx context.Context, e kafka.CommitErrorEvent) {
	h.log.InfoContext(ctx, "commit error", "err", e.Err.Error())
}
