package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/orders"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
)

// The work, for one event and for many.
const (
	insertBooking  = `insert into bookings (order_id, event_type, amount, customer) values ($1, $2, $3, $4)`
	insertBookings = `insert into bookings (order_id, event_type, amount, customer)
select * from unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[])`
)

// book is a handler as users write it.
func book(ctx context.Context, tx pgx.Tx, _ *inbox.Message, e orders.Event) error {
	_, err := tx.Exec(ctx, insertBooking, e.OrderID, e.EventType, e.Amount, e.Customer)
	return err
}

// bookAll is the set-based one.
func bookAll(ctx context.Context, tx pgx.Tx, ms []*inbox.Message) error {
	ids, types := make([]string, len(ms)), make([]string, len(ms))
	amounts, customers := make([]int64, len(ms)), make([]int64, len(ms))
	for i, m := range ms {
		var e orders.Event
		if err := json.Unmarshal(m.Body, &e); err != nil {
			return inbox.Permanent(err)
		}
		ids[i], types[i], amounts[i], customers[i] = e.OrderID, e.EventType, e.Amount, e.Customer
	}
	_, err := tx.Exec(ctx, insertBookings, ids, types, amounts, customers)
	return err
}

// defaultMaxInFlight is that of inbox.Config.
const defaultMaxInFlight = 1000

var byOrder = keyfunc.JSON("orderId", "eventType")

// consumeSingly runs the handler for one message, in transactions of batchSize
// messages; 0 is the default.
func consumeSingly(batchSize int) func(context.Context, *job) error {
	return func(ctx context.Context, j *job) error {
		return consume(ctx, j, batchSize, func(s *inboxpgx.Store, c *inbox.Config) (*inbox.Consumer[pgx.Tx], error) {
			return inbox.New(s, consumerName, byOrder, inbox.JSON(book), c)
		})
	}
}

// consumeInBulk runs the set-based handler.
func consumeInBulk(batchSize int) func(context.Context, *job) error {
	return func(ctx context.Context, j *job) error {
		return consume(ctx, j, batchSize, func(s *inboxpgx.Store, c *inbox.Config) (*inbox.Consumer[pgx.Tx], error) {
			return inbox.NewBulk(s, consumerName, byOrder, bookAll, c)
		})
	}
}

func consume(ctx context.Context, j *job, batchSize int, open func(*inboxpgx.Store, *inbox.Config) (*inbox.Consumer[pgx.Tx], error)) error {
	silent := slog.New(slog.DiscardHandler)
	store, err := inboxpgx.New(j.pool)
	if err != nil {
		return err
	}
	watch := &watch{meter: j.meter}
	config := &inbox.Config{Workers: workers, BatchSize: batchSize, Logger: silent, Hooks: []inbox.Hook{watch}}
	if n := 2 * workers * batchSize; n > defaultMaxInFlight {
		config.MaxInFlight = n // Else batches would not fill: one for each worker, and the next.
	}
	consumer, err := open(store, config)
	if err != nil {
		return err
	}
	source, err := kafka.Open(ctx, j.topic.brokers, j.group, []string{j.topic.name}, &kafka.Config{Logger: silent})
	if err != nil {
		return err
	}
	running, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(running, source) }()
	select {
	case <-j.meter.full:
		stop(errEnough)
		err = <-ended
	case err = <-ended:
		err = errors.Join(err, ctx.Err())
		if err == nil {
			err = errors.New("the consumer ended before everything was done")
		}
	}
	if err != nil {
		return err
	}
	return watch.problem()
}

// watch tells the meter what the consumer has done.
type watch struct {
	meter   *meter
	retries atomic.Int64
	failed  atomic.Int64
}

// OnBatch implements inbox.OnBatch.
func (w *watch) OnBatch(_ context.Context, e inbox.BatchEvent) {
	if e.Err != nil {
		w.failed.Add(1)
		return
	}
	w.meter.commit(e.Size)
}

// OnOutcome implements inbox.OnOutcome.
func (w *watch) OnOutcome(context.Context, inbox.OutcomeEvent) { w.meter.done() }

// OnRetry implements inbox.OnRetry.
func (w *watch) OnRetry(context.Context, inbox.RetryEvent) { w.retries.Add(1) }

// problem says what did not go as it does when nothing is wrong: then other
// work was measured than was meant.
func (w *watch) problem() error {
	if failed, retries := w.failed.Load(), w.retries.Load(); failed > 0 || retries > 0 {
		return fmt.Errorf("%d transactions failed and %d attempts were repeated: this is not what was to be measured", failed, retries)
	}
	return nil
}
