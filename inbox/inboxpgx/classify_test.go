package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/inbox/internal/cutproxy"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
)

// lazyPool is a pool that never connects.
func lazyPool(tb testing.TB, url string) *pgxpool.Pool {
	tb.Helper()
	pool, err := pgxpool.New(tb.Context(), url)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(pool.Close)
	return pool
}

// SQLSTATEs decide, whatever the language of the message.
//
// case D1
func TestClassifyByState(t *testing.T) {
	t.Parallel()
	store := pgxharness.NewStore(t, lazyPool(t, "postgres://u@127.0.0.1:1/d"), "")
	for code, want := range map[string]inbox.Class{
		"40001": inbox.ClassContention, "40P01": inbox.ClassContention, "55P03": inbox.ClassContention,
		"08000": inbox.ClassUnavailable, "08006": inbox.ClassUnavailable, "53100": inbox.ClassUnavailable, "53300": inbox.ClassUnavailable,
		"57P01": inbox.ClassUnavailable, "57P02": inbox.ClassUnavailable, "57P03": inbox.ClassUnavailable, "57P05": inbox.ClassUnavailable,
		"58030": inbox.ClassUnavailable, "25P03": inbox.ClassUnavailable, "25P04": inbox.ClassUnavailable, "25006": inbox.ClassUnavailable,
		"23505": inbox.ClassMessage, "23503": inbox.ClassMessage, "22012": inbox.ClassMessage, "25P02": inbox.ClassMessage,
		"42P01": inbox.ClassMessage, "57014": inbox.ClassMessage, "XX000": inbox.ClassMessage, "": inbox.ClassMessage,
	} {
		err := fmt.Errorf("handler: %w", &pgconn.PgError{Severity: "FEHLER", Code: code, Message: "etwas mit Deadlock 40P01 ging schief"})
		if got := store.Classify(err); got != want {
			t.Errorf("SQLSTATE %q: class %d, want %d", code, got, want)
		}
	}
}

// A database that is not there is unavailable at every method, and says so
// within the caller's time.
func TestUnreachable(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	store := pgxharness.NewStore(t, lazyPool(t, "postgres://u@"+addr+"/d?sslmode=disable"), "")
	ctx := t.Context()
	key := inbox.Key{Consumer: "c", MessageKey: "k"}
	_, beginErr := store.Begin(ctx, claims("k"), inbox.BeginOptions{LockTimeout: time.Second})
	_, lookupErr := store.Lookup(ctx, key)
	_, findErr := store.Find(ctx, "k")
	_, listErr := store.ListParked(ctx, inbox.ParkedFilter{})
	_, getErr := store.GetParked(ctx, 1)
	for i, err := range []error{
		store.Check(ctx), store.Register(ctx, inbox.Registration{Consumer: "c", KeyDefinition: "d"}), beginErr, lookupErr, findErr, listErr, getErr,
	} {
		if err == nil || store.Classify(err) != inbox.ClassUnavailable {
			t.Errorf("call %d: %v: class %d, want ClassUnavailable", i, err, store.Classify(err))
		}
		if errors.Is(err, inbox.ErrNoSchema) || errors.Is(err, inbox.ErrNotFound) || errors.Is(err, inbox.ErrInFlight) {
			t.Errorf("call %d: %v", i, err)
		}
	}
}

// A pool without a free connection is unavailable, though the error is the
// context's; and so is a closed pool.
func TestPoolExhausted(t *testing.T) {
	t.Parallel()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	store := pgxharness.NewStore(t, pool, "")
	if n := store.PoolSize(); n != 1 {
		t.Errorf("PoolSize() = %d, want 1", n)
	}
	b, err := store.Begin(t.Context(), claims("k1"), inbox.BeginOptions{LockTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = store.Begin(ctx, claims("k2"), inbox.BeginOptions{LockTimeout: time.Second})
	if !errors.Is(err, context.DeadlineExceeded) || store.Classify(err) != inbox.ClassUnavailable {
		t.Errorf("Begin without a free connection: %v: class %d", err, store.Classify(err))
	}
	b.Abort()
	pool.Close()
	_, err = store.Begin(t.Context(), claims("k2"), inbox.BeginOptions{LockTimeout: time.Second})
	if err == nil || store.Classify(err) != inbox.ClassUnavailable {
		t.Errorf("Begin on a closed pool: %v: class %d", err, store.Classify(err))
	}
}

// A server that does not answer any more is given up when the caller's time is
// over: nobody waits for ever, and no connection is lost to the pool.
func TestBlackHole(t *testing.T) {
	t.Parallel()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	var proxy *cutproxy.Proxy
	pool := db.Pool(t, func(c *pgxpool.Config) {
		proxy = cutproxy.New(t, net.JoinHostPort(c.ConnConfig.Host, pgxharness.Port(c)))
		pgxharness.Through(c, proxy)
		c.MaxConns = 1
	})
	store := pgxharness.NewStore(t, pool, "")
	o := inbox.BeginOptions{LockTimeout: time.Second}
	for _, stage := range []string{"never", "commit", "begin", "start", "finish", "abort"} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		dark := func(at string) {
			if at == stage {
				proxy.BlackHole(true)
			}
		}
		err := func() error {
			dark("begin")
			b, err := store.Begin(ctx, claims("a-"+stage, "b-"+stage), o)
			if err != nil {
				return err
			}
			defer b.Abort()
			for i := range 2 {
				tx, err := b.Start(ctx, i)
				if err != nil {
					return err
				}
				if _, err := tx.Exec(ctx, "select 1"); err != nil {
					return err
				}
				dark("finish")
				if err := b.Finish(ctx, i, false, nil); err != nil {
					return err
				}
				dark("start")
			}
			if stage == "abort" {
				dark("abort")
				return context.DeadlineExceeded
			}
			dark("commit")
			return b.Commit(ctx)
		}()
		cancel()
		if stage == "never" {
			if err != nil {
				t.Fatal(err)
			}
			continue // The statements are prepared now, on the one connection.
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("dark at %s: %v, want the deadline's error", stage, err)
		}
		if stage == "commit" != errors.Is(err, inbox.ErrCommitUnknown) {
			t.Errorf("dark at %s: %v", stage, err)
		}
		proxy.BlackHole(false)
		proxy.CutAll()
		b, err := store.Begin(t.Context(), claims("next-"+stage), o)
		if err != nil {
			t.Fatalf("after darkness at %s: %v", stage, err)
		}
		if err := b.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	pool := lazyPool(t, "postgres://u@127.0.0.1:1/d")
	long := string(make([]byte, 64))
	for _, c := range []struct {
		name   string
		config inboxpgx.Config
		want   string
	}{
		{"blank schema", inboxpgx.Config{Schema: " \t"}, `inboxpgx: config: Schema = " \t": must not be blank`},
		{"long schema", inboxpgx.Config{Schema: long}, "inboxpgx: config: Schema: has 64 bytes, a PostgreSQL name has at most 63"},
		{"schema with NUL", inboxpgx.Config{Schema: "a\x00"}, `inboxpgx: config: Schema = "a\x00": must be valid UTF-8 without NUL`},
		{"schema of bytes", inboxpgx.Config{Schema: "\xff"}, `inboxpgx: config: Schema = "\xff": must be valid UTF-8 without NUL`},
		{"isolation", inboxpgx.Config{Isolation: "snapshot"}, `inboxpgx: config: Isolation = "snapshot": is none of pgx's isolation levels`},
	} {
		_, err := inboxpgx.NewWithConfig(pool, &c.config)
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
	}
	if _, err := inboxpgx.New(nil); err == nil || err.Error() != "inboxpgx: new: pool must not be nil" {
		t.Errorf("New(nil): %v", err)
	}
	if _, err := inboxpgx.NewWithConfig(pool, nil); err != nil {
		t.Errorf("nil config: %v", err)
	}
}

func TestWrongUse(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	ctx := t.Context()
	begin := func(o inbox.BeginOptions, cs ...inbox.Claim) error {
		b, err := r.store.Begin(ctx, cs, o)
		if err == nil {
			b.Abort()
		}
		return err
	}
	fine := inbox.BeginOptions{LockTimeout: time.Second}
	_, claimErr := r.store.Claim(ctx, nil, "c", "k")
	b := r.begin("k1", "k2")
	_, outside := b.Start(ctx, 2)
	for i, err := range []error{
		begin(inbox.BeginOptions{}, claims("a")...), begin(inbox.BeginOptions{LockTimeout: -1}), begin(fine, claims("a", "b", "a")...),
		claimErr, r.store.SaveResult(ctx, nil, "c", "k", nil), outside, b.Finish(ctx, -1, true, nil), b.Park(ctx, 5, inbox.Parked{}), b.Park(ctx, 0, inbox.Parked{}),
	} {
		if err == nil {
			t.Errorf("wrong use %d is no error", i)
		}
	}
	if _, err := b.Start(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Start(ctx, 1); err == nil {
		t.Error("a second Start without Finish succeeds")
	}
	if err := b.Finish(ctx, 1, true, nil); err == nil {
		t.Error("Finish of another entry during a run succeeds")
	}
	if err := b.Commit(ctx); !errors.Is(err, inbox.ErrNotCommitted) {
		t.Errorf("Commit during a run: %v, want ErrNotCommitted", err)
	}
	if n := r.count("select count(*) from inbox"); n != 0 {
		t.Errorf("%d claims were committed", n)
	}
}

// The tables can be in a schema that search_path does not name, with any name.
func TestSchema(t *testing.T) {
	t.Parallel()
	const schema = `odd "schema"`
	db := pgtest.Database(t, pgtest.URL(t, pgtest.Postgres), pgtest.URL(t, pgtest.Postgres))
	pool := db.Pool(t, nil)
	for _, q := range []string{
		`create schema "odd ""schema"""`, "alter table inbox set schema x", "alter table inbox_parked set schema x", "alter table inbox_consumers set schema x",
		"alter table inbox_guard set schema x", "alter table inbox_schema set schema x",
	} {
		if len(q) > 2 && q[len(q)-1] == 'x' {
			q = q[:len(q)-1] + `"odd ""schema"""`
		}
		if _, err := pool.Exec(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	store, err := inboxpgx.NewWithConfig(pool, &inboxpgx.Config{Schema: schema})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	b, err := store.Begin(t.Context(), claims("k1", "k2"), inbox.BeginOptions{LockTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Abort()
	tx, err := b.Start(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "set local search_path = nowhere"); err != nil {
		t.Fatal(err)
	}
	if err := b.Finish(t.Context(), 0, true, []byte("r")); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r, err := store.Lookup(t.Context(), claims("k1")[0].Key); err != nil || string(r.Result) != "r" {
		t.Errorf("Lookup: %v, %v", r, err)
	}
	plain := pgxharness.NewStore(t, pool, "")
	if err := plain.Check(t.Context()); !errors.Is(err, inbox.ErrNoSchema) {
		t.Errorf("Check without the schema: %v, want ErrNoSchema", err)
	}
	missing, err := inboxpgx.NewWithConfig(pool, &inboxpgx.Config{Schema: "missing"})
	if err != nil {
		t.Fatal(err)
	}
	if err := missing.Check(t.Context()); !errors.Is(err, inbox.ErrNoSchema) {
		t.Errorf("Check in a missing schema: %v, want ErrNoSchema", err)
	}
}
