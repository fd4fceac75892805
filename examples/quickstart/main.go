// Command quickstart shows the promise on ten orders, with nothing to set up: a
// queue in memory and an SQLite file. Every order is delivered three times, two
// processes are killed on the way, everything is replayed from the beginning,
// and one key comes with another body. It checks its own numbers and ends with
// exit code 1 if one is off.
//
//	go run ./examples/quickstart
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	_ "modernc.org/sqlite"

	"github.com/pressly/goose/v3"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/migrations"
)

// order is the body of a message.
type order struct {
	OrderID   string `json:"orderId"`
	EventType string `json:"eventType"`
	Amount    int    `json:"amount"`
}

// charge is the work. It does not check for duplicates; the table has no unique
// constraint. That is the inbox's part.
func charge(ctx context.Context, tx *sql.Tx, m *inbox.Message, o order) error {
	if _, err := tx.ExecContext(ctx, "insert into charges (order_id, amount) values (?, ?)", o.OrderID, o.Amount); err != nil {
		return err
	}
	crash(beforeCommit, o.OrderID)
	return m.SetResult(map[string]string{"receipt": "R-" + o.OrderID})
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var err error
	if file := os.Getenv(envFile); file != "" {
		err = victim(ctx, file)
	} else {
		err = show(ctx, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// show runs the story and prints it.
func show(ctx context.Context, out io.Writer) error {
	dir, err := os.MkdirTemp("", "ackafter-quickstart-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "shop.db")
	db, err := open(ctx, file)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()

	t := &table{out: out, db: db}
	t.head()
	for _, v := range []struct {
		point, order, what string
		want               numbers
	}{
		{beforeCommit, "order-4", "killed in the handler of order-4, before COMMIT", numbers{first: 3, charges: 3}},
		{beforeAck, "order-7", "killed after COMMIT of order-7, before its ack", numbers{first: 3, replays: 3, charges: 7}},
	} {
		n, err := kill(ctx, file, v.point, v.order)
		if err != nil {
			return err
		}
		if err := t.row(ctx, v.what, n, v.want); err != nil {
			return err
		}
	}

	queue := deliveries()
	n, err := consume(ctx, db, queue, queue.Source())
	if err != nil {
		return err
	}
	if err := t.row(ctx, "a third process gets all 30 deliveries", n, numbers{first: 3, replays: 27, charges: 10}); err != nil {
		return err
	}
	queue.Rewind()
	if n, err = consume(ctx, db, queue, queue.Source()); err != nil {
		return err
	}
	if err := t.row(ctx, "replay from the beginning, with new broker ids", n, numbers{replays: 30, charges: 10}); err != nil {
		return err
	}
	queue.Publish(message(order{"order-5", "paid", 999_999}))
	if n, err = consume(ctx, db, queue, queue.Source()); err != nil {
		return err
	}
	if err := t.row(ctx, "order-5 again, with another amount", n, numbers{conflicts: 1, charges: 10, dead: 1}); err != nil {
		return err
	}
	return t.end(ctx)
}

// open opens the database and makes the tables.
func open(ctx context.Context, file string) (*sql.DB, error) {
	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(file))
	if err != nil {
		return nil, err
	}
	up, err := goose.NewProvider(goose.DialectSQLite3, db, migrations.Goose(migrations.SQLite()))
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	if _, err := up.Up(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	_, err = db.ExecContext(ctx, "create table if not exists charges (order_id text not null, amount integer not null)")
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// deliveries returns a queue in which each of ten orders comes three times.
func deliveries() *memory.Queue {
	q := memory.New("orders", nil)
	for range 3 {
		for i := 1; i <= 10; i++ {
			q.Publish(message(order{fmt.Sprintf("order-%d", i), "paid", 100 * i}))
		}
	}
	return q
}

func message(o order) *broker.Message {
	return &broker.Message{
		Key:  []byte(o.OrderID),
		Body: fmt.Appendf(nil, `{"orderId":%q,"eventType":%q,"amount":%d}`, o.OrderID, o.EventType, o.Amount),
	}
}

// consume runs the consumer until the queue is drained. One message at a time,
// so that a kill hits exactly one.
func consume(ctx context.Context, db *sql.DB, queue *memory.Queue, src broker.Source) (numbers, error) {
	store, err := inboxsql.New(db) //nolint:contextcheck // It asks the driver, not the database.
	if err != nil {
		return numbers{}, err
	}
	seen := &counter{}
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId", "eventType"), inbox.JSON(charge), &inbox.Config{
		Workers:   1,
		BatchSize: 1,
		Logger:    slog.New(slog.DiscardHandler),
		Hooks:     []inbox.Hook{seen},
	})
	if err != nil {
		return numbers{}, err
	}
	run, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(run, src) }()
	err = queue.Drained(ctx)
	stop()
	err = errors.Join(err, <-ended) // The hook has seen everything only then.
	return seen.numbers(), err
}

// counter is a hook that counts outcomes.
type counter struct {
	mu sync.Mutex
	n  numbers
}

func (c *counter) OnOutcome(_ context.Context, e inbox.OutcomeEvent) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch e.Outcome {
	case inbox.FirstAttempt:
		c.n.first++
	case inbox.Replay:
		c.n.replays++
	case inbox.Conflict:
		c.n.conflicts++
	}
	report(e)
}

func (c *counter) numbers() numbers {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}
