package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/migrations"
)

// quiet is a configuration that does not log.
var quiet = &inbox.Config{Logger: slog.New(slog.DiscardHandler)}

// openShop opens an SQLite database with the inbox tables and a table for the
// examples' work.
func openShop() (db *sql.DB, store *inboxsql.Store, remove func()) {
	dir, err := os.MkdirTemp("", "shop")
	if err != nil {
		panic(err)
	}
	db, err = sql.Open("sqlite", inboxsql.SQLiteDSN(filepath.Join(dir, "shop.db")))
	if err != nil {
		panic(err)
	}
	tables, err := migrations.Script(migrations.SQLite())
	if err != nil {
		panic(err)
	}
	if _, err := db.ExecContext(context.Background(), tables+"; create table charges (order_id text, amount integer)"); err != nil {
		panic(err)
	}
	store, err = inboxsql.New(db)
	if err != nil {
		panic(err)
	}
	return db, store, func() {
		_ = db.Close()
		_ = os.RemoveAll(dir)
	}
}

func Example() {
	db, store, remove := openShop()
	defer remove()

	consumer, err := inbox.New(store, "billing",
		keyfunc.JSON("orderId", "eventType"),
		func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error { // Tx is inferred.
			_, err := tx.ExecContext(ctx, "insert into charges values (?, 100)", m.MessageKey)
			return err
		}, quiet)
	if err != nil {
		fmt.Println(err)
		return
	}

	// The same event three times, as at-least-once delivery has it.
	queue := memory.New("orders", nil)
	for range 3 {
		queue.Publish(&broker.Message{Body: []byte(`{"orderId":"A1","eventType":"paid"}`)})
	}

	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- consumer.Run(ctx, queue.Source()) }()
	if err := queue.Drained(ctx); err != nil {
		fmt.Println(err)
	}
	stop()
	fmt.Println("run ended with", <-done)

	var charges int
	if err := db.QueryRowContext(context.Background(), "select count(*) from charges").Scan(&charges); err != nil {
		fmt.Println(err)
	}
	fmt.Println("charges:", charges)
	// Output:
	// run ended with <nil>
	// charges: 1
}

func ExampleConsumer_Process() {
	_, store, remove := openShop()
	defer remove()
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
			if _, err := tx.ExecContext(ctx, "insert into charges values (?, 100)", m.MessageKey); err != nil {
				return err
			}
			return m.SetResult(map[string]string{"receipt": "R-" + m.MessageKey})
		}, quiet)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, body := range []string{`{"orderId":"A1"}`, `{"orderId":"A1"}`, `{"orderId":"A1","amount":9}`, `{"orderId":null}`} {
		r, err := consumer.Process(context.Background(), &broker.Message{Body: []byte(body)})
		switch {
		case errors.Is(err, inbox.ErrConflict):
			fmt.Println(r.Outcome, "- the key was used with another body")
		case err != nil:
			fmt.Println("permanent:", inbox.IsPermanent(err), "- untrusted key:", errors.Is(err, keyfunc.ErrInvalid))
		default:
			fmt.Println(r.Outcome, string(r.Value))
		}
	}
	// Output:
	// first_attempt {"receipt":"R-A1"}
	// replay {"receipt":"R-A1"}
	// conflict - the key was used with another body
	// permanent: true - untrusted key: true
}

func ExampleNew() {
	_, store, remove := openShop()
	defer remove()
	handler := func(context.Context, *sql.Tx, *inbox.Message) error { return nil }
	_, err := inbox.New(store, "", keyfunc.JSON("orderId"), handler, nil)
	fmt.Println(err)
	_, err = inbox.New(store, "billing", keyfunc.JSON("orderId"), handler, &inbox.Config{LockTimeout: -1})
	fmt.Println(err)
	// Output:
	// inbox: consumer: must not be empty
	// inbox: config: LockTimeout = -1ns: must be at least 1ms: a wait has to end
}

func ExampleNewBulk() {
	db, store, remove := openShop()
	defer remove()
	consumer, err := inbox.NewBulk(store, "billing", keyfunc.JSON("orderId"),
		func(ctx context.Context, tx *sql.Tx, ms []*inbox.Message) error {
			// One statement for the whole set.
			keys := "["
			for i, m := range ms {
				if i > 0 {
					keys += ","
				}
				keys += fmt.Sprintf("%q", m.MessageKey)
			}
			_, err := tx.ExecContext(ctx, "insert into charges select value, 100 from json_each(?)", keys+"]")
			return err
		}, quiet)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, id := range []string{"A1", "A2", "A1"} {
		if _, err := consumer.Process(context.Background(), &broker.Message{Body: fmt.Appendf(nil, `{"orderId":%q}`, id)}); err != nil {
			fmt.Println(err)
		}
	}
	var charges int
	if err := db.QueryRowContext(context.Background(), "select count(*) from charges").Scan(&charges); err != nil {
		fmt.Println(err)
	}
	fmt.Println("charges:", charges)
	// Output: charges: 2
}

func ExampleJSON() {
	type order struct {
		OrderID string `json:"orderId"`
		Amount  int    `json:"amount"`
	}
	_, store, remove := openShop()
	defer remove()
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		inbox.JSON(func(ctx context.Context, tx *sql.Tx, _ *inbox.Message, o order) error {
			fmt.Println("charge", o.OrderID, o.Amount)
			_, err := tx.ExecContext(ctx, "insert into charges values (?, ?)", o.OrderID, o.Amount)
			return err
		}), quiet)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, body := range []string{`{"orderId":"A1","amount":100}`, `{"orderId":"A2","amount":"much"}`} {
		_, err := consumer.Process(context.Background(), &broker.Message{Body: []byte(body)})
		fmt.Println("permanent:", inbox.IsPermanent(err))
	}
	// Output:
	// charge A1 100
	// permanent: false
	// permanent: true
}

func ExampleRouter() {
	_, store, remove := openShop()
	defer remove()
	say := func(what string) inbox.Handler[*sql.Tx] {
		return func(_ context.Context, _ *sql.Tx, m *inbox.Message) error {
			fmt.Println(what, m.MessageKey)
			return nil
		}
	}
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId", "eventType"),
		inbox.Router(keyfunc.JSON("eventType"), inbox.Routes[*sql.Tx]{
			"paid":      say("charge"),
			"cancelled": say("refund"),
			"viewed":    nil, // Done, nothing to do.
		}), quiet)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, eventType := range []string{"paid", "cancelled", "viewed", "unknown"} {
		r, err := consumer.Process(context.Background(), &broker.Message{Body: fmt.Appendf(nil, `{"orderId":"A1","eventType":%q}`, eventType)})
		if err != nil {
			fmt.Println("dead letter:", inbox.IsPermanent(err))
		} else if r.Skipped != "" {
			fmt.Println("skipped")
		}
	}
	// Output:
	// charge A1|paid
	// refund A1|cancelled
	// skipped
	// dead letter: true
}

func ExampleStore_claim() {
	db, store, remove := openShop()
	defer remove()
	ctx := context.Background()

	// A transaction of your own: the key is taken if and only if it commits.
	pay := func() (string, error) {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return "", err
		}
		defer tx.Rollback() //nolint:errcheck // After Commit it does nothing.
		entry, err := store.Claim(ctx, tx, "payments", "order-4711")
		if err != nil {
			return "", err
		}
		if !entry.Claimed() {
			return "already done: " + string(entry.Stored.Result), nil
		}
		if _, err := tx.ExecContext(ctx, "insert into charges values ('order-4711', 100)"); err != nil {
			return "", err
		}
		if err := store.SaveResult(ctx, tx, "payments", "order-4711", []byte("receipt 1")); err != nil {
			return "", err
		}
		return "charged", tx.Commit()
	}
	for range 2 {
		fmt.Println(pay())
	}
	// Output:
	// charged <nil>
	// already done: receipt 1 <nil>
}

func ExamplePermanent() {
	err := inbox.Permanent(errors.New("amount is negative"))
	fmt.Println(err, inbox.IsPermanent(err), inbox.IsPermanent(errors.New("busy")))
	// Output: amount is negative true false
}

func ExampleRetryAfter() {
	fmt.Println(inbox.RetryAfter(errors.New("gateway asks for patience"), 30e9))
	// Output: gateway asks for patience (retry after 30s)
}

func ExampleSkip() {
	fmt.Println(inbox.Skip("a newer version was handled before"))
	// Output: skipped: a newer version was handled before
}

// counter is a hook: it implements one or more of the On... interfaces.
type counter map[inbox.Outcome]int

func (c counter) OnOutcome(_ context.Context, e inbox.OutcomeEvent) { c[e.Outcome]++ }

func ExampleHook() {
	_, store, remove := openShop()
	defer remove()
	seen := counter{}
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(context.Context, *sql.Tx, *inbox.Message) error { return nil },
		&inbox.Config{Logger: quiet.Logger, Hooks: []inbox.Hook{seen}})
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 3 {
		if _, err := consumer.Process(context.Background(), &broker.Message{Body: []byte(`{"orderId":"A1"}`)}); err != nil {
			fmt.Println(err)
		}
	}
	fmt.Println(seen)
	// Output: map[first_attempt:1 replay:2]
}
