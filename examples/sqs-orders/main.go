// Command sqs-orders is a consumer as a team would write it: it takes order events
// from an Amazon SQS queue and books each exactly once in PostgreSQL, however often it
// is delivered, sent or redriven and whenever the process dies.
//
// On a server of your own that speaks SQS (ElasticMQ, LocalStack, at :9324 here; it
// takes any key):
//
//	createdb shop
//	ackafter migrate up --database postgres://localhost/shop
//	export AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x AWS_DEFAULT_REGION=us-east-1
//	aws --endpoint-url http://localhost:9324 sqs create-queue --queue-name orders
//	go run ./examples/sqs-orders -database postgres://localhost/shop -endpoint http://localhost:9324
//	aws --endpoint-url http://localhost:9324 sqs send-message --queue-url http://localhost:9324/000000000000/orders \
//		--message-body '{"orderId":"8f14e45f","eventType":"paid","amount":1999}'
//
// On AWS, with the credentials and the region that the aws command uses, too:
//
//	aws sqs create-queue --queue-name orders
//	go run ./examples/sqs-orders -database postgres://localhost/shop
//
// A FIFO queue needs nothing else than its name: -queue orders.fifo. Events of one
// message group are booked in their order then, groups in parallel.
//
// It differs from kafka-orders in where messages come from, and in nothing else: a
// team that moves from Kafka to SQS keeps the database and the consumer's name, and
// what was booked once stays booked once.
//
// An event looks like {"orderId":"8f14e45f","eventType":"paid","amount":1999}.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/sqs"
)

// event is the body of a message.
type event struct {
	OrderID   string `json:"orderId"`
	EventType string `json:"eventType"`
	Amount    int64  `json:"amount"` // in cents
}

// book is the work: one row an event. There is no unique constraint on it, and
// no check whether the row is there: the inbox sees to that.
func book(ctx context.Context, tx pgx.Tx, m *inbox.Message, e event) error {
	if e.Amount < 0 {
		return inbox.Permanent(errors.New("amount is negative"))
	}
	_, err := tx.Exec(ctx, `insert into bookings (order_id, event_type, amount, source, message_id) values ($1, $2, $3, $4, $5)`,
		e.OrderID, e.EventType, e.Amount, m.Source, m.ID)
	return err
}

const schema = `create table if not exists bookings (
	id         bigint generated always as identity primary key,
	order_id   text        not null,
	event_type text        not null,
	amount     bigint      not null,
	source     text        not null,
	message_id text        not null,
	booked_at  timestamptz not null default now()
)`

func main() {
	log := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: logLevel()}))
	slog.SetDefault(log) // Consumer and source log there by default.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		log.Error("sqs-orders ended", slog.Any("error", err))
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("sqs-orders", flag.ContinueOnError)
	database := flags.String("database", os.Getenv("DATABASE_URL"), "PostgreSQL URL; default $DATABASE_URL")
	queue := flags.String("queue", "orders", "queue to consume from: name, URL or ARN")
	endpoint := flags.String("endpoint", "", "base URL of a server that is not AWS's")
	name := flags.String("consumer", "billing", "name under which keys are kept")
	workers := flags.Int("workers", 4, "transactions at once")
	batch := flags.Int("batch", 0, "messages in one transaction; 0: the default")
	visibility := flags.Duration("visibility", 0, "after how long what a dead process had comes again; 0: the default")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}

	poolConfig, err := pgxpool.ParseConfig(*database)
	if err != nil {
		return fmt.Errorf("database URL: %w", err)
	}
	poolConfig.MaxConns = int32(*workers) + 2 //nolint:gosec // G115: a number of workers that does not fit is refused below.
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer pool.Close()
	if err := makeTable(ctx, pool); err != nil {
		return fmt.Errorf("make table: %w", err)
	}

	store, err := inboxpgx.New(pool)
	if err != nil {
		return err
	}
	if err := store.Check(ctx); err != nil {
		return err // Better now than after taking messages that others could handle.
	}
	consumer, err := inbox.New(store, *name, keyfunc.JSON("orderId", "eventType"), inbox.JSON(book), &inbox.Config{
		Workers:   *workers,
		BatchSize: *batch,
		Retention: 7 * 24 * time.Hour,
	})
	if err != nil {
		return err
	}
	source, err := sqs.Open(ctx, *queue, &sqs.Config{Endpoint: *endpoint, VisibilityTimeout: *visibility})
	if err != nil {
		return err
	}
	return consumer.Run(ctx, source)
}

// makeTable makes the business table; two processes may start at once.
func makeTable(ctx context.Context, pool *pgxpool.Pool) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "select pg_advisory_xact_lock(hashtext('bookings'))"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, schema)
		return err
	})
}

func logLevel() slog.Level {
	var level slog.Level
	if err := level.UnmarshalText([]byte(os.Getenv("LOG_LEVEL"))); err != nil {
		return slog.LevelInfo
	}
	return level
}
