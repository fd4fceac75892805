package inboxsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/keyfunc"
)

// Two subscribers, one of them with two instances, over one database, with the
// default configuration: messages come several times, some fail at first, one
// ends the transaction, one swallows an error. Every other key has one effect
// for each subscriber, and those two are dead letters.
//
// case D4, D7, D8.
func TestConsumers(t *testing.T) {
	t.Parallel()
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		const keys = 150
		ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
		defer stop()
		var failed sync.Map
		var handled atomic.Int64
		handler := func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
			handled.Add(1)
			effect := m.Consumer + " " + m.MessageKey
			if _, err := tx.ExecContext(ctx, "insert into effects (k) values ($1)", effect); err != nil {
				return err
			}
			switch m.MessageKey {
			case "1":
				return tx.Commit()
			case "2":
				_, _ = tx.ExecContext(ctx, "insert into nothing values (1)")
			case "3", "13", "23":
				if _, before := failed.LoadOrStore(effect, true); !before {
					return errors.New("at first")
				}
			}
			return nil
		}
		queues := map[string]*memory.Queue{"billing": memory.New("orders", nil), "shipping": memory.New("orders", nil)}
		var wg sync.WaitGroup
		errs := make(chan error, 3)
		for _, name := range []string{"billing", "billing", "shipping"} {
			consumer, err := inbox.New(store, name, keyfunc.JSON("id"), handler, &inbox.Config{
				Retry: inbox.Retry{MaxAttempts: 3, Backoff: time.Millisecond}, Logger: slog.New(slog.DiscardHandler),
			})
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() { errs <- consumer.Run(ctx, queues[name].Source()) })
		}
		for _, q := range queues {
			for i := range 3 * keys {
				k := fmt.Sprint(i * 7 % keys)
				q.Publish(&broker.Message{Key: []byte(k), Body: fmt.Appendf(nil, `{"id":"%s"}`, k)})
			}
		}
		for round := range 2 {
			for _, q := range queues {
				if err := q.Drained(ctx); err != nil {
					t.Fatal(err)
				}
				if round == 0 {
					q.Rewind()
				}
			}
		}
		stop()
		wg.Wait()
		for range 3 {
			if err := <-errs; err != nil {
				t.Errorf("Run: %v", err)
			}
		}
		if n, d := count(t, db, "select count(*) from effects"), count(t, db, "select count(distinct k) from effects"); n != 2*(keys-2) || d != n {
			t.Errorf("%d effects, %d distinct; want %d", n, d, 2*(keys-2))
		}
		if n := count(t, db, "select count(*) from inbox"); n != 2*(keys-2) {
			t.Errorf("%d inbox rows, want %d", n, 2*(keys-2))
		}
		if n := handled.Load(); n < 2*keys || n > 3*2*keys {
			t.Errorf("%d runs of handlers for %d keys", n, keys)
		}
		dead, err := store.ListParked(t.Context(), inbox.ParkedFilter{})
		if err != nil || len(dead) != 4 {
			t.Fatalf("%d dead letters, %v; want 4", len(dead), err)
		}
		for _, d := range dead {
			want := map[string]string{"1": "belongs to the inbox", "2": "insert into nothing"}[d.MessageKey]
			if d.State != inbox.ParkedDead || want == "" || !strings.Contains(d.Error, want) || d.Duplicates == 0 {
				t.Errorf("dead letter %q: %s, %d duplicates, error %q; want one that says %q", d.MessageKey, d.Reason, d.Duplicates, d.Error, want)
			}
		}
	})
}

// A message is handled by Process while Run works with the same store; a handler
// that runs past its timeout inside a statement is interrupted and retried.
func TestHandlerTimeout(t *testing.T) {
	t.Parallel()
	slow := map[bool]string{
		true:  "insert into effects (k, n) with recursive r (i) as (select 1 union all select i + 1 from r where i < 1000000000) select 'x', i from r",
		false: "select pg_sleep(60)",
	}
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		var runs atomic.Int64
		consumer, err := inbox.New(store, "billing", keyfunc.JSON("id"), func(ctx context.Context, tx *sql.Tx, _ *inbox.Message) error {
			if runs.Add(1) == 1 {
				_, err := tx.ExecContext(ctx, slow[strings.HasSuffix(t.Name(), "SQLite")])
				return err
			}
			_, err := tx.ExecContext(ctx, "insert into effects (k) values ('done')")
			return err
		}, &inbox.Config{HandlerTimeout: 100 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		m := &broker.Message{Body: []byte(`{"id":"a"}`)}
		if _, err := consumer.Process(t.Context(), m); !errors.Is(err, inbox.ErrHandlerTimeout) && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Process: %v, want the handler's timeout", err)
		}
		r, err := consumer.Process(t.Context(), m)
		if err != nil || r.Outcome != inbox.FirstAttempt {
			t.Errorf("Process again: %q, %v", r.Outcome, err)
		}
		if n := count(t, db, "select count(*) from effects"); n != 1 {
			t.Errorf("%d effects, want 1", n)
		}
	})
}
