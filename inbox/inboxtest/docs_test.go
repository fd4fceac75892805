package inboxtest_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/migrations"
)

// What follows is the code of docs/testing.md.

type Order struct {
	OrderID string
	Event   string
	Cents   int
}

var orderKey = keyfunc.JSON("orderId", "event")

var chargeOrder = inbox.JSON(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, o Order) error {
	if o.Cents <= 0 {
		return inbox.Permanent(errors.New("nothing to charge"))
	}
	_, err := tx.ExecContext(ctx, "insert into charges (order_id, cents) values (?, ?)", o.OrderID, o.Cents)
	return err
})

// openBilling returns a new database with the inbox and your own tables.
func openBilling(t testing.TB) (*sql.DB, *inboxsql.Store) {
	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(filepath.Join(t.TempDir(), "billing.db")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	tables, err := migrations.Script(migrations.SQLite())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), tables+"; create table charges (order_id text, cents integer)"); err != nil {
		t.Fatal(err)
	}
	store, err := inboxsql.New(db)
	if err != nil {
		t.Fatal(err)
	}
	return db, store
}

// charged is what the handler's work has left.
func charged(ctx context.Context, db *sql.DB) (any, error) {
	var state struct{ Charges, Cents int }
	err := db.QueryRowContext(ctx, "select count(*), coalesce(sum(cents), 0) from charges").Scan(&state.Charges, &state.Cents)
	return state, err
}

func TestChargeOrder(t *testing.T) {
	t.Parallel()
	db, store := openBilling(t)
	consumer, err := inbox.New(store, "billing", orderKey, chargeOrder, nil)
	if err != nil {
		t.Fatal(err)
	}
	state := func() any {
		s, err := charged(t.Context(), db)
		if err != nil {
			t.Error(err)
		}
		return s
	}
	paid := &broker.Message{Body: []byte(`{"orderId":"A1","event":"paid","cents":995}`)}
	inboxtest.Once(t, consumer, paid, state)

	other := &broker.Message{Body: []byte(`{"orderId":"A1","event":"paid","cents":1}`)}
	inboxtest.Conflict(t, consumer, other, state)

	free := &broker.Message{Body: []byte(`{"orderId":"A2","event":"paid","cents":0}`)}
	if err := inboxtest.RolledBack(t, consumer, store, free, state); !inbox.IsPermanent(err) {
		t.Errorf("a free order is tried again: %v", err)
	}
}

func TestChargeOrderUnderChaos(t *testing.T) {
	t.Parallel()
	messages := []*broker.Message{
		{Key: []byte("A1"), Body: []byte(`{"orderId":"A1","event":"paid","cents":995}`)},
		{Key: []byte("A2"), Body: []byte(`{"orderId":"A2","event":"paid","cents":250}`)},
		{Key: []byte("A1"), Body: []byte(`{"orderId":"A1","event":"paid again","cents":5}`)},
		{Key: []byte("A3"), Body: []byte(`{"orderId":"A3","event":"paid","cents":0}`)},
	}
	inboxtest.Chaos(t, func(t testing.TB) *inboxtest.World[*sql.Tx] {
		db, store := openBilling(t)
		return &inboxtest.World[*sql.Tx]{
			Store:   store,
			Handler: chargeOrder,
			State:   func(ctx context.Context) (any, error) { return charged(ctx, db) },
		}
	}, orderKey, messages, nil)
}

// Every block of Go in docs/testing.md stands in this file, word for word.
func TestDocsCompile(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/testing.md")
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile("docs_test.go")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllSubmatch(page, -1)
	if len(blocks) < 4 {
		t.Errorf("docs/testing.md has %d blocks of Go", len(blocks))
	}
	for _, b := range blocks {
		if !strings.Contains(string(code), string(b[1])) {
			t.Errorf("this code of docs/testing.md is not in docs_test.go:\n%s", b[1])
		}
	}
}
