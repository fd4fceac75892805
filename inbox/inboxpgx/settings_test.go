package inboxpgx_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
)

// withSettings is a rig whose sessions have the settings.
func withSettings(t *testing.T, settings map[string]string) *rig {
	t.Helper()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	pool := db.Pool(t, func(c *pgxpool.Config) {
		for k, v := range settings {
			c.ConnConfig.RuntimeParams[k] = v
		}
	})
	return &rig{t, db, pool, pgxharness.NewStore(t, pool, "")}
}

// Handlers see the session's own time limits, whatever way the claims took, and
// the session has them back afterwards.
func TestSessionSettingsAreKept(t *testing.T) {
	t.Parallel()
	want := map[string]string{"lock_timeout": "123ms", "statement_timeout": "45s", "idle_in_transaction_session_timeout": "67s"}
	r := withSettings(t, want)
	show := func(name string) (got string) {
		t.Helper()
		if err := r.pool.QueryRow(t.Context(), "select current_setting($1::text)", name).Scan(&got); err != nil {
			t.Fatal(err)
		}
		return got
	}
	brief := claims("brief")
	brief[0].Retention = time.Millisecond
	for _, keys := range [][]string{{"k1"}, {"k1", "k2"}, {"brief", "k3"}} {
		cs := claims(keys...)
		if keys[0] == "brief" {
			b, err := r.store.Begin(t.Context(), brief, inbox.BeginOptions{LockTimeout: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(b.Finish(t.Context(), 0, true, nil), b.Commit(t.Context())); err != nil {
				t.Fatal(err)
			}
			r.sql("select pg_sleep(0.02)")
		}
		b, err := r.store.Begin(t.Context(), cs, inbox.BeginOptions{LockTimeout: time.Second, IdleTimeout: 89 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		i := len(cs) - 1
		err = r.use(b, i, true, func(ctx context.Context, tx pgx.Tx) error {
			for name, value := range map[string]string{"lock_timeout": "123ms", "statement_timeout": "45s", "idle_in_transaction_session_timeout": "89s"} {
				var got string
				if err := tx.QueryRow(ctx, "select current_setting($1::text)", name).Scan(&got); err != nil || got != value {
					t.Errorf("%v: handler sees %s = %q, %v; want %q", keys, name, got, err, value)
				}
			}
			return nil
		})
		if err := errors.Join(err, b.Commit(t.Context())); err != nil {
			t.Fatal(err)
		}
		for name, value := range want {
			if got := show(name); got != value {
				t.Errorf("%v: the session is left with %s = %q, want %q", keys, name, got, value)
			}
		}
	}
}

// The server ends a transaction whose client is gone, and lets its keys go.
func TestIdleTimeout(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	b, err := r.store.Begin(t.Context(), claims("k1"), inbox.BeginOptions{LockTimeout: time.Second, IdleTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Abort()
	tx, err := b.Start(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	other := r.begin("k1") // Waits until the server has let go.
	if got := other.Entries()[0].Outcome; got != inbox.FirstAttempt {
		t.Errorf("outcome %q", got)
	}
	_, err = tx.Exec(t.Context(), "select 1")
	if err == nil || r.store.Classify(err) != inbox.ClassUnavailable {
		t.Errorf("a statement after the idle timeout: %v: class %d", err, r.store.Classify(err))
	}
	err = b.Finish(t.Context(), 0, false, nil)
	if err == nil || r.store.Classify(err) != inbox.ClassUnavailable {
		t.Errorf("Finish after the idle timeout: %v: class %d", err, r.store.Classify(err))
	}
}

// When the database's default keeps one snapshot for a transaction, a twin still
// sees that its message was parked while it waited.
//
// case D13
func TestDefaultIsolation(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			r := withSettings(t, map[string]string{"default_transaction_isolation": level})
			for range 2 {
				r.sql("truncate inbox_parked")
				b := r.begin("k1")
				err := r.use(b, 0, false, func(ctx context.Context, tx pgx.Tx) error {
					var got string
					err := tx.QueryRow(ctx, "show transaction_isolation").Scan(&got)
					return errors.Join(err, same(got, level))
				})
				p := inbox.Parked{Key: claims("k1")[0].Key, Fingerprint: []byte("fp"), Message: &broker.Message{}, State: inbox.ParkedDead, Reason: inbox.ReasonAttempts}
				if err := errors.Join(err, b.Park(t.Context(), 0, p)); err != nil {
					t.Fatal(err)
				}
				type begun struct {
					b   inbox.Batch[pgx.Tx]
					err error
				}
				twin := make(chan begun, 1)
				go func() {
					b, err := r.store.Begin(t.Context(), claims("k1"), inbox.BeginOptions{LockTimeout: 10 * time.Second})
					twin <- begun{b, err}
				}()
				for r.count("select count(*) from pg_locks where not granted and pid in (select pid from pg_locks l join pg_class c on c.oid = l.relation join pg_namespace n on n.oid = c.relnamespace where n.nspname = current_schema())") == 0 {
					if len(twin) > 0 {
						t.Fatal("the twin does not wait")
					}
				}
				if err := b.Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
				got := <-twin
				if got.err != nil {
					t.Fatal(got.err)
				}
				if o := got.b.Entries()[0].Outcome; o != inbox.Dead {
					t.Errorf("outcome %q, want dead", o)
				}
				got.b.Abort()
			}
		})
	}
}

// Probes for parked rows leave nothing behind.
func TestProbesAreRemoved(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	store := pgxharness.NewStore(t, r.pool, pgx.Serializable)
	b, err := store.Begin(t.Context(), claims("k1", "k2"), inbox.BeginOptions{LockTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if err := b.Finish(t.Context(), i, true, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := r.count("select count(*) from inbox_parked"); n != 0 {
		t.Errorf("%d parked rows", n)
	}
	if n := r.count("select count(*) from inbox_guard"); n != 0 {
		t.Errorf("%d guard rows", n)
	}
}
