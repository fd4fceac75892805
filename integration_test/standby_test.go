package integration_test

import (
	"context"
	"errors"
	"log/slog"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/keyfunc"
)

// case D12: the first delivery's COMMIT waits for a standby that is away, and
// its caller gives up: from then on everybody sees its row. The second delivery must
// not be acked on the strength of it, since the standby, once promoted, has no such
// row.
func TestSynchronousStandby(t *testing.T) {
	t.Parallel()
	for name, messages := range map[string]int{"alone": 1, "batch": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			primary := servers.OwnPostgres(t)
			standby := servers.OwnStandby(t, primary)
			pool, either := openPool(t, primary.Address), eitherOf(t, primary.Address, standby.Address)
			if _, err := pool.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
				t.Fatal(err)
			}
			if _, err := pool.Exec(t.Context(), "alter system set synchronous_standby_names = '*'"); err != nil {
				t.Fatal(err)
			}
			if _, err := pool.Exec(t.Context(), "select pg_reload_conf()"); err != nil {
				t.Fatal(err)
			}
			eventually(t, time.Minute, "the standby is synchronous", func() bool {
				return count(t, pool, "select count(*) from pg_stat_replication where sync_state = 'sync'") == 1
			})
			b := memory.New("orders", nil)
			var sent []*broker.Message
			for i := range messages {
				sent = append(sent, &broker.Message{ID: string(rune('a' + i)), Body: []byte(`{"id":"k-` + string(rune('0'+i)) + `"}`)})
			}

			// It has begun before the fault: its own writes at the start would wait, too.
			b.Publish(&broker.Message{ID: "before", Body: []byte(`{"id":"before"}`)})
			stop := runStandbyConsumer(t, either, b)
			eventually(t, time.Minute, "the consumer is at work", func() bool { return b.Stats().Acked == 1 })

			standby.Crash(t) // A frozen one would find the row in its connection later.
			giveUpCommit(t, pool, sent)
			eventually(t, time.Minute, "its row is visible", func() bool {
				return count(t, pool, "select count(*) from inbox") == 1+messages
			})
			b.Publish(sent...)
			eventually(t, time.Minute, "the second delivery waits for the standby", func() bool {
				return count(t, pool, "select count(*) from pg_stat_activity where wait_event = 'SyncRep'") > 0
			})
			if n := b.Stats().Acked; n != 1 {
				t.Fatalf("%d acks on the strength of rows that the standby does not have", n-1)
			}

			primary.Crash(t)
			standby.Start(t)
			promoted := connectTo(t, standby.Address)
			if _, err := promoted.Exec(t.Context(), "select pg_promote()"); err != nil {
				t.Fatal(err)
			}
			eventually(t, time.Minute, "all is acked after the promotion", func() bool { return b.Stats().Acked == 1+messages })
			if err := stop(); err != nil {
				t.Errorf("Run = %v", err)
			}
			var effects, keys int
			if err := promoted.QueryRow(t.Context(), "select count(*), count(distinct key) from effects where key <> 'lost'").Scan(&effects, &keys); err != nil {
				t.Fatal(err)
			}
			if want := 1 + messages; effects != want || keys != want {
				t.Errorf("%d effects of %d keys on the new primary, want %d of %d", effects, keys, want, want)
			}
		})
	}
}

// giveUpCommit handles messages in one transaction, and ceases to wait for the answer
// to its COMMIT.
func giveUpCommit(t *testing.T, pool *pgxpool.Pool, sent []*broker.Message) {
	t.Helper()
	store, err := inboxpgx.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	key := keyfunc.JSON("id")
	var claims []inbox.Claim
	for _, m := range sent {
		k, err := keyfunc.Derive(key, m)
		if err != nil {
			t.Fatal(err)
		}
		claims = append(claims, inbox.Claim{Key: inbox.Key{Consumer: "billing", MessageKey: k}, Attempt: 1})
	}
	batch, err := store.Begin(t.Context(), claims, inbox.BeginOptions{LockTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer batch.Abort()
	for i := range claims {
		tx, err := batch.Start(t.Context(), i)
		if err != nil {
			t.Fatal(err)
		}
		if err := effect(t.Context(), tx, &inbox.Message{Message: *sent[i], MessageKey: "lost"}); err != nil {
			t.Fatal(err)
		}
		if err := batch.Finish(t.Context(), i, true, nil); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := batch.Commit(ctx); !errors.Is(err, inbox.ErrCommitUnknown) {
		t.Fatalf("Commit = %v, want no answer", err)
	}
}

// eitherOf opens a pool for that one of two servers which takes writes.
func eitherOf(t *testing.T, first, second string) *pgxpool.Pool {
	t.Helper()
	a, err := url.Parse(first)
	if err != nil {
		t.Fatal(err)
	}
	b, err := url.Parse(second)
	if err != nil {
		t.Fatal(err)
	}
	a.Host += "," + b.Host
	q := a.Query()
	q.Set("target_session_attrs", "read-write")
	q.Set("connect_timeout", "3")
	a.RawQuery = q.Encode()
	pool, err := pgxpool.New(t.Context(), a.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func connectTo(t *testing.T, address string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func runStandbyConsumer(t *testing.T, pool *pgxpool.Pool, b *memory.Queue) (stop func() error) {
	t.Helper()
	store, err := inboxpgx.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	c, err := inbox.New(store, "billing", keyfunc.JSON("id"), effect, &inbox.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx, b.Source()) }()
	return func() error {
		cancel()
		return <-done
	}
}
