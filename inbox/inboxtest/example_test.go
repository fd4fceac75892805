package inboxtest_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/migrations"
)

// printer stands in for the *testing.T of a test.
type printer struct{}

func (printer) Helper()                           {}
func (printer) Context() context.Context          { return context.Background() }
func (printer) Errorf(format string, args ...any) { fmt.Printf(format+"\n", args...) }
func (printer) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// A handler is delivered a message four times at once, again, and as a replay with
// another broker id. The second handler is wrong: its key is the broker's id.
func ExampleOnce() {
	dir, err := os.MkdirTemp("", "shop")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(filepath.Join(dir, "shop.db")))
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	ctx := context.Background()
	tables, err := migrations.Script(migrations.SQLite())
	if err != nil {
		panic(err)
	}
	if _, err := db.ExecContext(ctx, tables+"; create table charges (order_id text)"); err != nil {
		panic(err)
	}
	store, err := inboxsql.New(db)
	if err != nil {
		panic(err)
	}

	charge := func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
		_, err := tx.ExecContext(ctx, "insert into charges values (?)", m.MessageKey)
		return err
	}
	charges := func() any {
		var n int
		if err := db.QueryRowContext(ctx, "select count(*) from charges").Scan(&n); err != nil {
			panic(err)
		}
		return n
	}
	for _, c := range []struct {
		name string
		key  keyfunc.Func
	}{{"good", keyfunc.JSON("orderId")}, {"bad", keyfunc.MessageID()}} {
		consumer, err := inbox.New(store, c.name, c.key, charge, &inbox.Config{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			panic(err)
		}
		fmt.Println(c.name)
		inboxtest.Once(printer{}, consumer, &broker.Message{ID: "m-1", Body: []byte(`{"orderId":"A1"}`)}, charges)
	}
	// Output:
	// good
	// bad
	// inboxtest: replayed with another broker id: the outcome is "first_attempt", want "replay": does the key depend on the broker's id or position?
	// inboxtest: replayed with another broker id: the handler's work changed from 2 to 3
}
