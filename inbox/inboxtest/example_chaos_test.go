package inboxtest_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/migrations"
)

// console stands in for the *testing.T of a test.
type console struct{ testing.TB }

func (console) Helper()                           {}
func (console) Context() context.Context          { return context.Background() }
func (console) Errorf(format string, args ...any) { fmt.Printf(format+"\n", args...) }
func (console) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// Two handlers go through a hundred schedules of duplicates, crashes, lost
// connections and the like. The second one sends its receipt by itself, which is
// not undone when its transaction is. In your test the first argument is t.
func ExampleChaos() {
	messages := []*broker.Message{
		{Key: []byte("A1"), Body: []byte(`{"orderId":"A1","event":"paid"}`)},
		{Key: []byte("A2"), Body: []byte(`{"orderId":"A2","event":"paid"}`)},
		{Key: []byte("A1"), Body: []byte(`{"orderId":"A1","event":"shipped"}`)},
	}
	for _, sendsReceipts := range []bool{false, true} {
		fmt.Println("sends receipts:", sendsReceipts)
		open := func(t testing.TB) *inboxtest.World[*sql.Tx] {
			db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(filepath.Join(t.TempDir(), "shop.db")))
			if err != nil {
				t.Fatalf("open: %v", err)
			}
			t.Cleanup(func() { _ = db.Close() })
			tables, err := migrations.Script(migrations.SQLite())
			if err != nil {
				t.Fatalf("read migrations: %v", err)
			}
			if _, err := db.ExecContext(t.Context(), tables+"; create table events (name text)"); err != nil {
				t.Fatalf("migrate: %v", err)
			}
			store, err := inboxsql.New(db)
			if err != nil {
				t.Fatalf("store: %v", err)
			}
			var receipts []string
			return &inboxtest.World[*sql.Tx]{
				Store: store,
				Handler: func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
					if sendsReceipts {
						receipts = append(receipts, m.MessageKey)
					}
					_, err := tx.ExecContext(ctx, "insert into events values (?)", m.MessageKey)
					return err
				},
				State: func(ctx context.Context) (any, error) {
					var events int
					err := db.QueryRowContext(ctx, "select count(*) from events").Scan(&events)
					slices.Sort(receipts)
					return []any{events, receipts}, err
				},
			}
		}
		inboxtest.Chaos(console{}, open, keyfunc.JSON("orderId", "event"), messages,
			&inboxtest.ChaosConfig{Faults: inboxtest.FaultReorder | inboxtest.FaultCrash})
	}
	// Output:
	// sends receipts: false
	// sends receipts: true
	// inboxtest: chaos: seed 1: the state is not that of an undisturbed run
	//   undisturbed: [1 [A1|shipped]]
	//   now:         [1 [A1|shipped A1|shipped]]
	// the shortest schedule found that shows it (the seed's own has 5 faults):
	//   - delivered in the order 3
	//   - message 3 (key "A1|shipped"), commit 1: the process dies before COMMIT
	// what happened:
	//    1. process 1 starts, with transactions of up to 1
	//    2. process 1: handler of message 3 (key "A1|shipped"), attempt 1
	//    3. process 1: FAULT: message 3 (key "A1|shipped"), commit 1: the process dies before COMMIT
	//    4. process 2 starts, with transactions of up to 1
	//    5. process 2: handler of message 3 (key "A1|shipped"), attempt 1
	//    6. process 2: message 3 (key "A1|shipped"): committed
	//    7. message 3 (key "A1|shipped"): first_attempt
	// to run this seed alone: inboxtest.ChaosConfig{Seed: 1, Rounds: 1}
}
