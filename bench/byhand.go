package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/integration_test/orders"
)

// consumeByHand is the loop that people write: a reader and a goroutine for
// each worker, and for each message BEGIN, the key, the work, COMMIT.
//
// Its offsets are committed in the background once a second, as ours are; a
// commit for each message, which kafka-go does unless told otherwise, is
// slower.
func consumeByHand(ctx context.Context, j *job) (err error) {
	readers := make([]*kafka.Reader, workers)
	for i := range readers {
		readers[i] = kafka.NewReader(kafka.ReaderConfig{
			Brokers: j.topic.brokers, GroupID: j.group, Topic: j.topic.name,
			StartOffset: kafka.FirstOffset, CommitInterval: time.Second,
			MaxWait: time.Second, // Closing a reader takes as long.
		})
	}
	defer func() {
		var closing sync.WaitGroup
		problems := make([]error, len(readers))
		for i, r := range readers {
			closing.Go(func() { problems[i] = r.Close() })
		}
		closing.Wait()
		err = errors.Join(err, errors.Join(problems...))
	}()
	if err := j.topic.waitAssigned(ctx, j.group, workers); err != nil {
		return err
	}
	reading, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var running sync.WaitGroup
	for _, r := range readers {
		running.Go(func() {
			if err := readByHand(reading, j, r); err != nil && reading.Err() == nil {
				stop(err)
			}
		})
	}
	select {
	case <-j.meter.full:
		stop(errEnough)
	case <-reading.Done():
	}
	running.Wait()
	if cause := context.Cause(reading); !errors.Is(cause, errEnough) {
		return cause
	}
	return nil
}

// errEnough ends the reading when everything is done.
var errEnough = errors.New("everything is done")

func readByHand(ctx context.Context, j *job, r *kafka.Reader) error {
	for {
		m, err := r.FetchMessage(ctx)
		if err != nil {
			return fmt.Errorf("fetch: %w", err)
		}
		if err := bookByHand(ctx, j.pool, m.Value); err != nil {
			return err
		}
		j.meter.commit(1)
		if err := r.CommitMessages(ctx, m); err != nil {
			return fmt.Errorf("commit the offset: %w", err)
		}
		j.meter.done()
	}
}

func bookByHand(ctx context.Context, pool *pgxpool.Pool, body []byte) error {
	var e orders.Event
	if err := json.Unmarshal(body, &e); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	tx, err := pool.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(ctx) }() // After a commit it does nothing.
	tag, err := tx.Exec(ctx, `insert into processed_messages (consumer, message_key) values ($1, $2) on conflict do nothing`,
		consumerName, e.OrderID+"/"+e.EventType)
	if err != nil {
		return fmt.Errorf("insert the key: %w", err)
	}
	if tag.RowsAffected() == 1 {
		if _, err := tx.Exec(ctx, insertBooking, e.OrderID, e.EventType, e.Amount, e.Customer); err != nil {
			return fmt.Errorf("insert the booking: %w", err)
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}
