package inboxsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/migrations"
)

// orders opens a new database file with the inbox tables and a table of charges.
func orders() (db *sql.DB, remove func()) {
	dir, err := os.MkdirTemp("", "orders")
	must(err)
	db, err = sql.Open("sqlite", inboxsql.SQLiteDSN(filepath.Join(dir, "orders.db")))
	must(err)
	// "ackafter migrate up" does this, too.
	tables, err := migrations.Script(migrations.SQLite())
	must(err)
	for _, query := range []string{tables, "create table charges (order_id text, cents integer)"} {
		_, err := db.ExecContext(context.Background(), query)
		must(err)
	}
	return db, func() { must(errors.Join(db.Close(), os.RemoveAll(dir))) }
}

// must keeps the examples short; programs handle their errors.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func ExampleNew() {
	ctx := context.Background()
	db, remove := orders()
	defer remove()

	store, err := inboxsql.New(db)
	must(err)
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
			_, err := tx.ExecContext(ctx, "insert into charges values ($1, 995)", m.MessageKey)
			return err
		}, nil)
	must(err)
	// The same message, three times. Run takes messages from a broker.
	for range 3 {
		result, err := consumer.Process(ctx, &broker.Message{Body: []byte(`{"orderId":"A-1"}`)})
		must(err)
		fmt.Println(result.Outcome)
	}
	var charges int
	must(db.QueryRowContext(ctx, "select count(*) from charges").Scan(&charges))
	fmt.Println("charges:", charges)
	// Output:
	// first_attempt
	// replay
	// replay
	// charges: 1
}

func ExampleNewWithConfig() {
	db, remove := orders()
	defer remove()

	_, err := inboxsql.NewWithConfig(db, &inboxsql.Config{Isolation: sql.LevelReadCommitted})
	fmt.Println(err)
	// Output:
	// inboxsql: config: Isolation = Read Committed: SQLite is always serializable
}

func ExampleSQLiteDSN() {
	dir, err := os.MkdirTemp("", "orders")
	must(err)
	defer func() { _ = os.RemoveAll(dir) }()

	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(filepath.Join(dir, "orders 50%.db")))
	must(err)
	defer func() { _ = db.Close() }()
	var journal string
	var foreignKeys, synchronous int
	err = db.QueryRowContext(context.Background(),
		"select * from pragma_journal_mode, pragma_foreign_keys, pragma_synchronous").Scan(&journal, &foreignKeys, &synchronous)
	fmt.Println(journal, foreignKeys, synchronous, err)
	// Output:
	// wal 1 2 <nil>
}

// Taking a key in a transaction of one's own: for code that has a transaction
// already, in an HTTP handler for example.
func ExampleStore_Claim() {
	ctx := context.Background()
	db, remove := orders()
	defer remove()
	store, err := inboxsql.New(db)
	must(err)

	charge := func(orderID string) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }() // Does nothing after Commit.
		entry, err := store.Claim(ctx, tx, "billing", orderID)
		if err != nil {
			return err
		}
		fmt.Println(orderID, entry.Outcome)
		if !entry.Claimed() {
			return nil
		}
		if _, err := tx.ExecContext(ctx, "insert into charges values ($1, 995)", orderID); err != nil {
			return err
		}
		return tx.Commit()
	}
	for _, orderID := range []string{"A-1", "A-2", "A-1"} {
		must(charge(orderID))
	}
	// Output:
	// A-1 first_attempt
	// A-2 first_attempt
	// A-1 replay
}

func ExampleStore_SaveResult() {
	ctx := context.Background()
	db, remove := orders()
	defer remove()
	store, err := inboxsql.New(db)
	must(err)
	tx, err := db.BeginTx(ctx, nil)
	must(err)
	defer func() { _ = tx.Rollback() }()
	_, err = store.Claim(ctx, tx, "billing", "A-1")
	must(err)
	must(store.SaveResult(ctx, tx, "billing", "A-1", []byte(`{"invoice":7}`)))
	entry, err := store.Claim(ctx, tx, "billing", "A-1")
	must(err)
	fmt.Printf("%s %s\n", entry.Outcome, entry.Stored.Result)
	// Output:
	// replay {"invoice":7}
}

// Who handled a key first, when, from where and with what result.
func ExampleStore_Lookup() {
	ctx := context.Background()
	db, remove := orders()
	defer remove()
	store, err := inboxsql.New(db)
	must(err)
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(_ context.Context, _ *sql.Tx, m *inbox.Message) error {
			return m.SetResult(map[string]int{"invoice": 7})
		}, nil)
	must(err)
	m := &broker.Message{ID: "orders/3/4711", Source: "kafka:orders/3", Position: broker.At(4711), Body: []byte(`{"orderId":"A-1"}`)}
	_, err = consumer.Process(ctx, m)
	must(err)
	record, err := store.Lookup(ctx, inbox.Key{Consumer: "billing", MessageKey: "A-1"})
	must(err)
	fmt.Printf("%s by %s, %s\n", record.Status, record.MessageID, record.Result)
	_, err = store.Lookup(ctx, inbox.Key{Consumer: "billing", MessageKey: "A-2"})
	fmt.Println(errors.Is(err, inbox.ErrNotFound))
	// Output:
	// done by orders/3/4711, {"invoice":7}
	// true
}
