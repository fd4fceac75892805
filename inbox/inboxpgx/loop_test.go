package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// The loop and the store together: two processes on one queue, batches whose
// handlers lock the same rows in different orders, handlers that swallow errors,
// end the transaction or check their constraints early, and every message
// twice. Cases D4, D6, D7, D8.
func TestUnderTheLoop(t *testing.T) {
	t.Parallel()
	const n = 200
	r := withSettings(t, map[string]string{"deadlock_timeout": "20ms"})
	r.sql("create table effects (k text not null, note text not null)")
	r.sql("create table accounts (id integer primary key, n integer not null)")
	r.sql("insert into accounts values (0, 0), (1, 0)")

	queue := memory.New("orders", &memory.Config{Lane: memory.Unordered})
	for range 2 {
		for i := range n {
			queue.Publish(&broker.Message{Body: fmt.Appendf(nil, `{"id": "%d"}`, i)})
		}
	}
	config := &inbox.Config{
		Workers: 3, BatchSize: 20, Logger: slog.New(slog.DiscardHandler),
		Retry: inbox.Retry{MaxAttempts: 2, Backoff: time.Millisecond},
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	runCtx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 2)
	for range 2 {
		consumer, err := inbox.New(r.store, "billing", keyfunc.JSON("id"), oddHandler, config)
		if err != nil {
			t.Fatal(err)
		}
		go func() { ended <- consumer.Run(runCtx, queue.Source()) }()
	}
	if err := queue.Drained(ctx); err != nil {
		t.Error(err)
	}
	stop()
	for range 2 {
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	good, dead := 0, 0
	for i := range n {
		k := strconv.Itoa(i)
		effects := r.count("select count(*) from effects where k = $1::text", k)
		rows := r.count("select count(*) from inbox where message_key = $1::text", k)
		parked := r.count("select count(*) from inbox_parked where message_key = $1::text and state = 'dead'", k)
		want := [3]int{1, 1, 0}
		switch i % 20 {
		case 3, 9:
			want = [3]int{0, 0, 1}
		case 7:
			// In a batch the handler could not commit; alone it could. Either way a
			// person is told, and the key is not there without the work.
			want = [3]int{min(effects, 1), min(effects, 1), 1}
		}
		if got := [3]int{effects, rows, parked}; got != want {
			t.Errorf("message %d: effects, rows, dead letters are %v, want %v", i, got, want)
		}
		good += effects
		dead += parked
	}
	if got := r.count("select sum(n) from accounts"); got != 2*good {
		t.Errorf("accounts have %d, want %d", got, 2*good)
	}
	if good < 170 || good > 180 || dead != 30 {
		t.Errorf("%d effects and %d dead letters, want 170 to 180 and 30", good, dead)
	}
	if n := r.count("select count(*) from inbox_guard"); n != 0 {
		t.Errorf("%d guard rows are left", n)
	}
}

// oddHandler does its work, and by the message's number something wrong.
func oddHandler(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
	i, err := strconv.Atoi(m.MessageKey)
	if err != nil {
		return err
	}
	for j := range 2 {
		if _, err := tx.Exec(ctx, "update accounts set n = n + 1 where id = $1", (i+j)%2); err != nil {
			return err
		}
	}
	if _, err := tx.Exec(ctx, "insert into effects values ($1, 'work')", m.MessageKey); err != nil {
		return err
	}
	switch i % 20 {
	case 3:
		_, _ = tx.Exec(ctx, "select 1/0")
	case 7:
		_, _ = tx.Conn().Exec(ctx, "commit")
	case 9:
		_ = tx.Rollback(ctx)
	case 11:
		_, err = tx.Exec(ctx, "set constraints all immediate")
	case 13:
		if m.Attempt == 1 {
			return errors.New("once")
		}
	}
	return err
}
