package main

import (
	"context"
	"database/sql"
	"log/slog"
	"strings"
	"testing"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/keyfunc"
)

// What a real consumer stored is found by the text of its key, also when the key
// is too long to be stored as it is.
func TestShowAfterConsumer(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		term.must("migrate", "up")
		db := term.open()
		defer func() { _ = db.Close() }()
		store, err := inboxsql.New(db)
		if err != nil {
			t.Fatal(err)
		}
		handle := func(_ context.Context, _ *sql.Tx, m *inbox.Message) error {
			return m.SetResult(map[string]string{"charge": "ch_1"})
		}
		config := &inbox.Config{Worker: "worker-1", Logger: slog.New(slog.DiscardHandler)}
		consumer, err := inbox.New(store, "billing", keyfunc.JSON("id", "type"), handle, config)
		if err != nil {
			t.Fatal(err)
		}
		long := strings.Repeat("0123456789", 100)
		for _, id := range []string{"A1", long} {
			m := &broker.Message{ID: "m-1", Source: "kafka:orders/3", Position: broker.At(7), Body: []byte(`{"id":"` + id + `","type":"paid"}`)}
			result, err := consumer.Process(t.Context(), m)
			if err != nil || result.Outcome != inbox.FirstAttempt {
				t.Fatalf("%+v, %v", result, err)
			}
			term.run("show", id+"|paid").expect(t, exitOK, "consumer billing\n", "by worker    worker-1\n",
				"kafka:orders/3 at position 7\n", "message id   m-1\n", "attempts     1\n", "{\"charge\":\"ch_1\"}\n")
		}
		term.run("show", long+"x|paid").expect(t, exitNotFound, "nothing is known of the key", "billing  json:id,type;v1")
	})
}
