package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/keyfunc"
)

// case D6: two consumers in batch mode over the same 200 keys, shuffled, over and
// over. No deadlock reaches a message, and every key has one effect.
func TestSharedKeysShuffled(t *testing.T) {
	t.Parallel()
	const keys = 200
	rounds := sized(50, 1000)
	pool := openPool(t, servers.Postgres(t))
	if _, err := pool.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var logs bytes.Buffer
	log := slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return logs.Write(p)
	}), &slog.HandlerOptions{Level: slog.LevelWarn}))
	var ends sync.WaitGroup
	for i := range 2 {
		store, err := inboxpgx.New(pool)
		if err != nil {
			t.Fatal(err)
		}
		c, err := inbox.New(store, "shared", keyfunc.JSON("id"), func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
			_, err := tx.Exec(ctx, "insert into effects values ($1)", m.MessageKey)
			return err
		}, &inbox.Config{Workers: 2, Logger: log})
		if err != nil {
			t.Fatal(err)
		}
		queue := memory.New(fmt.Sprint("q", i), &memory.Config{Lane: memory.Unordered})
		for range rounds {
			for _, k := range rand.Perm(keys) {
				queue.Publish(&broker.Message{Body: fmt.Appendf(nil, `{"id":"k-%d"}`, k)})
			}
		}
		ctx, stop := context.WithCancel(t.Context())
		ends.Go(func() {
			if err := c.Run(ctx, queue.Source()); err != nil {
				t.Errorf("Run = %v", err)
			}
		})
		ends.Go(func() {
			defer stop()
			wait, cancel := context.WithTimeout(ctx, 10*time.Minute)
			defer cancel()
			if err := queue.Drained(wait); err != nil {
				t.Error(err)
			}
		})
	}
	ends.Wait()
	if n := count(t, pool, "select count(*) from effects"); n != keys {
		t.Errorf("%d effects, want %d", n, keys)
	}
	if n := count(t, pool, "select count(*) from inbox"); n != keys {
		t.Errorf("%d inbox rows, want %d", n, keys)
	}
	if strings.Contains(logs.String(), "40P01") {
		t.Errorf("a deadlock reached a message:\n%s", logs.String())
	}
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }
