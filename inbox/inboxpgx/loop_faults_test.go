package inboxpgx_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
	"github.com/ackafter/ackafter/keyfunc"
)

type loopRig struct {
	pool  *pgxpool.Pool
	queue *memory.Queue
	logs  *logBuffer
}

// logBuffer is written by the loop while the test reads it.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newLoopRig(t *testing.T, cfg *inbox.Config, lane func(*broker.Message) string, h inbox.Handler[pgx.Tx], bulk inbox.BulkHandler[pgx.Tx], bodies ...string) *loopRig {
	t.Helper()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	r := &loopRig{pool: db.Pool(t, nil), queue: memory.New("q", &memory.Config{Lane: lane}), logs: &logBuffer{}}
	if _, err := r.pool.Exec(t.Context(), `create table effects (key text)`); err != nil {
		t.Fatal(err)
	}
	store := pgxharness.NewStore(t, r.pool, "")
	cfg.Logger = slog.New(slog.NewTextHandler(r.logs, nil))
	var c *inbox.Consumer[pgx.Tx]
	var err error
	if bulk != nil {
		c, err = inbox.NewBulk(store, "billing", keyfunc.JSON("id"), bulk, cfg)
	} else {
		c, err = inbox.New(store, "billing", keyfunc.JSON("id"), h, cfg)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range bodies {
		r.queue.Publish(&broker.Message{Key: []byte("k"), Body: []byte(b)})
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx, r.queue.Source()) }()
	t.Cleanup(func() { stop(); <-done })
	return r
}

func (r *loopRig) wait(t *testing.T, d time.Duration) error {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	return r.queue.Drained(ctx)
}

func (r *loopRig) count(t *testing.T, sql string) (n int) {
	t.Helper()
	if err := r.pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func effectOf(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
	_, err := tx.Exec(ctx, `insert into effects values ($1)`, m.MessageKey)
	return err
}

func TestLoopLargeFingerprint(t *testing.T) {
	t.Parallel()
	pad := make([]byte, 6000)
	_, _ = rand.Read(pad)
	var runs atomic.Int64
	r := newLoopRig(t, &inbox.Config{Fingerprint: func(m *broker.Message) ([]byte, error) { return m.Body, nil }}, nil,
		func(context.Context, pgx.Tx, *inbox.Message) error {
			runs.Add(1)
			return inbox.Permanent(errors.New("no"))
		}, nil,
		`{"id":"a","pad":"`+base64.StdEncoding.EncodeToString(pad)+`"}`)
	if err := r.wait(t, 20*time.Second); err != nil {
		lines := strings.Split(r.logs.String(), "\n")
		t.Errorf("%v; the handler ran %d times\n%s", err, runs.Load(), lines[len(lines)-2])
	}
}

func TestLoopDiskFull(t *testing.T) {
	t.Parallel()
	r := newLoopRig(t, &inbox.Config{}, nil, func(ctx context.Context, tx pgx.Tx, _ *inbox.Message) error {
		_, err := tx.Exec(ctx, `do $$ begin raise exception 'could not extend file: No space left on device' using errcode = '53100'; end $$`)
		return err
	}, nil, `{"id":"a"}`, `{"id":"b"}`)
	_ = r.wait(t, 20*time.Second)
	if n := r.count(t, `select count(*) from inbox_parked where state = 'dead'`); n != 0 {
		t.Errorf("%d dead letters while the disk is full", n)
	}
}

func rollbackAndGoOn(ctx context.Context, tx pgx.Tx, key string) error {
	// Through the connection itself: ROLLBACK, then autocommit.
	if _, err := tx.Conn().PgConn().Exec(ctx, "rollback").ReadAll(); err != nil {
		return err
	}
	_, err := tx.Conn().PgConn().Exec(ctx, fmt.Sprintf("insert into effects values ('%s')", key)).ReadAll()
	return err
}

func TestLoopBulkRollback(t *testing.T) {
	t.Parallel()
	r := newLoopRig(t, &inbox.Config{Workers: 1}, nil, nil, func(ctx context.Context, tx pgx.Tx, ms []*inbox.Message) error {
		_, _ = tx.Conn().PgConn().Exec(ctx, "rollback").ReadAll()
		for _, m := range ms {
			_, _ = tx.Conn().PgConn().Exec(ctx, fmt.Sprintf("insert into effects values ('%s')", m.MessageKey)).ReadAll()
		}
		return nil
	}, `{"id":"a"}`, `{"id":"b"}`, `{"id":"c"}`)
	_ = r.wait(t, 20*time.Second)
	if n := r.count(t, `select count(*) from effects`); n > 3 {
		t.Errorf("%d rows for 3 messages", n)
	}
}

func TestLoopTwinRollback(t *testing.T) {
	t.Parallel()
	r := newLoopRig(t, &inbox.Config{Workers: 1}, func(*broker.Message) string { return "" }, func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		if m.MessageKey == "a" {
			return rollbackAndGoOn(ctx, tx, "a")
		}
		return effectOf(ctx, tx, m)
	}, nil, `{"id":"a"}`, `{"id":"a"}`, `{"id":"b"}`)
	_ = r.wait(t, 20*time.Second)
	if n := r.count(t, `select count(*) from effects where key = 'a'`); n > 1 {
		t.Errorf("%d rows for key a", n)
	}
}

// The user's code leaked the pool's connections: who is told?
func TestLoopPoolExhausted(t *testing.T) {
	t.Parallel()
	pauses := &pauseCounter{}
	var r *loopRig
	hold := make(chan struct{})
	r = newLoopRig(t, &inbox.Config{Hooks: []inbox.Hook{pauses}}, nil, effectOf, nil, `{"id":"a"}`)
	_ = r.wait(t, 5*time.Second)
	for range int(r.pool.Config().MaxConns) {
		c, err := r.pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		go func() { <-hold; c.Release() }()
	}
	r.queue.Publish(&broker.Message{Key: []byte("k"), Body: []byte(`{"id":"b"}`)})
	_ = r.wait(t, 30*time.Second)
	if pauses.n.Load() == 0 {
		t.Errorf("no connection for 30s, and no pause and no line:\n%s", r.logs)
	}
	close(hold)
}

type pauseCounter struct{ n atomic.Int64 }

func (p *pauseCounter) OnPause(context.Context, inbox.PauseEvent) { p.n.Add(1) }

// Settings that one handler makes for the transaction must not reach the handler
// of the next message.
func TestLoopSettingsDoNotLeak(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"set local": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "/* x */ set local search_path = pg_catalog")
			return err
		},
		"set_config": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select set_config('search_path', $1, true)", "pg_catalog")
			return err
		},
		"conn": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Conn().Exec(ctx, "set local search_path = pg_catalog")
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLoopRig(t, &inbox.Config{Workers: 1}, memory.Unordered,
				func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
					if _, err := tx.Exec(ctx, "insert into effects values ($1)", m.MessageKey); err != nil {
						return err
					}
					if m.MessageKey == "a" {
						return set(ctx, tx)
					}
					return nil
				}, nil, `{"id":"a"}`, `{"id":"b"}`, `{"id":"c"}`)
			if err := r.wait(t, 20*time.Second); err != nil {
				t.Fatalf("%v\n%s", err, r.logs)
			}
			if n := r.count(t, "select count(*) from effects"); n != 3 {
				t.Errorf("%d effects, want 3", n)
			}
			if strings.Contains(r.logs.String(), "attempt failed") {
				t.Errorf("a message failed on its neighbour's settings:\n%s", r.logs)
			}
		})
	}
}

// case D8: a handler that commits by itself gets the same answer on every store.
func TestLoopRefusedIsPermanent(t *testing.T) {
	t.Parallel()
	runs := 0
	r := newLoopRig(t, &inbox.Config{}, memory.Unordered, func(ctx context.Context, tx pgx.Tx, _ *inbox.Message) error {
		runs++
		return tx.Commit(ctx)
	}, nil, `{"id":"a"}`)
	if err := r.wait(t, 20*time.Second); err != nil {
		t.Fatalf("%v\n%s", err, r.logs)
	}
	if n := r.count(t, "select count(*) from inbox_parked where state = 'dead' and reason = 'permanent error' and attempts = 1"); n != 1 || runs != 1 {
		t.Errorf("%d dead letters after one attempt, %d runs; want 1 and 1\n%s", n, runs, r.logs)
	}
	c, err := inbox.New(pgxharness.NewStore(t, r.pool, ""), "other", keyfunc.JSON("id"),
		func(ctx context.Context, tx pgx.Tx, _ *inbox.Message) error { _ = tx.Rollback(ctx); return nil },
		&inbox.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Process(t.Context(), &broker.Message{Body: []byte(`{"id":"a"}`)}); !inbox.IsPermanent(err) || !errors.Is(err, inbox.ErrRefused) {
		t.Errorf("Process = %v, want a permanent ErrRefused", err)
	}
}

// A database with synchronous_commit off must not cost messages that were acked.
func TestCommitsAreDurable(t *testing.T) {
	t.Parallel()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	for set, want := range map[string]string{"off": "on", "local": "local", "on": "on"} {
		pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["synchronous_commit"] = set })
		var got string
		c, err := inbox.New(pgxharness.NewStore(t, pool, ""), "billing-"+set, keyfunc.JSON("id"),
			func(ctx context.Context, tx pgx.Tx, _ *inbox.Message) error {
				return tx.QueryRow(ctx, "show synchronous_commit").Scan(&got)
			}, &inbox.Config{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Process(t.Context(), &broker.Message{Body: []byte(`{"id":"a"}`)}); err != nil || got != want {
			t.Errorf("with %s a transaction of the inbox has %q, want %q (%v)", set, got, want, err)
		}
		if err := pool.QueryRow(t.Context(), "show synchronous_commit").Scan(&got); err != nil || got != set {
			t.Errorf("afterwards the session has %q, want %q (%v)", got, set, err)
		}
	}
}

// case D11: one message that always looks like an outage, with nobody else about.
func TestLoopLonelyPoison(t *testing.T) {
	t.Parallel()
	for name, poison := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"terminates its backend": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select pg_terminate_backend(pg_backend_pid())")
			return err
		},
		"closes its connection": func(ctx context.Context, tx pgx.Tx) error { return tx.Conn().Close(ctx) },
		"a limit of its own": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "do $$ begin raise exception 'temporary file size' using errcode = '53400'; end $$")
			return err
		},
		"writes while it reads": func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, "select generate_series(1, 3)")
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
				if _, err := tx.Exec(ctx, "insert into effects values ('x')"); err != nil {
					return err
				}
			}
			return rows.Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLoopRig(t, &inbox.Config{Retry: inbox.Retry{MaxAttempts: 2}}, memory.Unordered,
				func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
					if m.MessageKey == "poison" {
						return poison(ctx, tx)
					}
					_, err := tx.Exec(ctx, "insert into effects values ($1)", m.MessageKey)
					return err
				}, nil, `{"id":"a"}`, `{"id":"b"}`, `{"id":"poison"}`)
			if err := r.wait(t, 30*time.Second); err != nil {
				t.Fatalf("%v\n%s", err, r.logs)
			}
			dead, effects := r.count(t, "select count(*) from inbox_parked where state = 'dead'"), r.count(t, "select count(*) from effects")
			if dead != 1 || effects != 2 {
				t.Errorf("%d dead letters and %d effects, want 1 and 2", dead, effects)
			}
		})
	}
}

// Keys that others hold must not stand in the way of keys that are free.
func TestLoopHeldKeys(t *testing.T) {
	t.Parallel()
	const held, free = 20, 200
	var bodies []string
	for i := range held + free {
		bodies = append(bodies, fmt.Sprintf(`{"id":"k%03d"}`, i))
	}
	var release func()
	r := newLoopRig(t, &inbox.Config{Workers: 2}, memory.Unordered, func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		_, err := tx.Exec(ctx, "insert into effects values ($1)", m.MessageKey)
		return err
	}, nil)
	store := pgxharness.NewStore(t, r.pool, "")
	var claims []inbox.Claim
	for i := range held {
		claims = append(claims, inbox.Claim{Key: inbox.Key{Consumer: "billing", MessageKey: fmt.Sprintf("k%03d", i)}})
	}
	b, err := store.Begin(t.Context(), claims, inbox.BeginOptions{LockTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	release = b.Abort
	defer release()
	for _, body := range bodies {
		r.queue.Publish(&broker.Message{Body: []byte(body)})
	}
	deadline := time.After(30 * time.Second)
	for n := 0; n < free; n = r.count(t, "select count(*) from effects") {
		select {
		case <-deadline:
			t.Fatalf("%d of %d free messages are done while %d keys are held", n, free, held)
		case <-time.After(50 * time.Millisecond):
		}
	}
	release()
	if err := r.wait(t, 60*time.Second); err != nil {
		t.Fatal(err)
	}
	if n := r.count(t, "select count(*) from effects"); n != held+free {
		t.Errorf("%d effects, want %d", n, held+free)
	}
}
