package inboxtest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
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

// shop is an SQLite database with the inbox and a table for the work.
type shop struct {
	db    *sql.DB
	store *inboxsql.Store
}

func newShop(t *testing.T) *shop {
	t.Helper()
	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(filepath.Join(t.TempDir(), "shop.db")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	tables, err := migrations.Script(migrations.SQLite())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), tables+"; create table charges (order_id text)"); err != nil {
		t.Fatal(err)
	}
	store, err := inboxsql.New(db)
	if err != nil {
		t.Fatal(err)
	}
	return &shop{db: db, store: store}
}

func (s *shop) consumer(t *testing.T, key keyfunc.Func, h inbox.Handler[*sql.Tx]) *inbox.Consumer[*sql.Tx] {
	t.Helper()
	c, err := inbox.New(s.store, "billing", key, h, &inbox.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (s *shop) charges(t *testing.T) func() any {
	return func() any {
		var n int
		if err := s.db.QueryRowContext(t.Context(), "select count(*) from charges").Scan(&n); err != nil {
			t.Error(err)
		}
		return n
	}
}

func charge(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
	if _, err := tx.ExecContext(ctx, "insert into charges values (?)", m.MessageKey); err != nil {
		return err
	}
	return m.SetResult("receipt")
}

// record is a TB that keeps failures instead of failing.
type record struct {
	*testing.T
	failures []string
}

type fatal struct{}

func (r *record) Errorf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

func (r *record) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	panic(fatal{})
}

// failures returns what a check finds.
func failures(t *testing.T, check func(inboxtest.TB)) string {
	t.Helper()
	r := &record{T: t}
	func() {
		defer func() {
			if p := recover(); p != nil && p != any(fatal{}) {
				panic(p)
			}
		}()
		check(r)
	}()
	return strings.Join(r.failures, "\n")
}

func message() *broker.Message {
	return &broker.Message{ID: "1", Position: broker.At(1), Body: []byte(`{"orderId":"A1"}`)}
}

func TestOncePasses(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	c := s.consumer(t, keyfunc.JSON("orderId"), charge)
	if r := inboxtest.Once(t, c, message(), s.charges(t)); string(r.Value) != `"receipt"` || s.charges(t)() != 1 {
		t.Errorf("%+v, %v charges", r, s.charges(t)())
	}
	inboxtest.Conflict(t, c, &broker.Message{Body: []byte(`{"orderId":"A1","amount":2}`)}, s.charges(t))
	failing := s.consumer(t, keyfunc.JSON("orderId"), func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
		_ = charge(ctx, tx, m)
		return errors.New("no")
	})
	if err := inboxtest.RolledBack(t, failing, s.store, &broker.Message{Body: []byte(`{"orderId":"A2"}`)}, s.charges(t)); err == nil {
		t.Error("RolledBack gives no error back")
	}
}

// Each check must find what it is for.
func TestChecksFail(t *testing.T) {
	t.Parallel()
	nothing := func(context.Context, *sql.Tx, *inbox.Message) error { return nil }
	for _, c := range []struct {
		name  string
		key   keyfunc.Func
		check func(*testing.T, *shop, *inbox.Consumer[*sql.Tx]) func(inboxtest.TB)
		want  string
	}{
		{"key is the broker's id", keyfunc.MessageID(), func(t *testing.T, s *shop, c *inbox.Consumer[*sql.Tx]) func(inboxtest.TB) {
			return func(tb inboxtest.TB) { inboxtest.Once(tb, c, message(), s.charges(t)) }
		}, "does the key depend on the broker's id"},
		{"state changes", keyfunc.JSON("orderId"), func(_ *testing.T, _ *shop, c *inbox.Consumer[*sql.Tx]) func(inboxtest.TB) {
			n := 0
			return func(tb inboxtest.TB) { inboxtest.Once(tb, c, message(), func() any { n++; return n }) }
		}, "changed from 1 to 2"},
		{"handled before", keyfunc.JSON("orderId"), func(t *testing.T, _ *shop, c *inbox.Consumer[*sql.Tx]) func(inboxtest.TB) {
			if _, err := c.Process(t.Context(), message()); err != nil {
				t.Fatal(err)
			}
			return func(tb inboxtest.TB) { inboxtest.Once(tb, c, message(), nil) }
		}, "handled before this test"},
		{"no key", keyfunc.JSON("missing"), func(_ *testing.T, _ *shop, c *inbox.Consumer[*sql.Tx]) func(inboxtest.TB) {
			return func(tb inboxtest.TB) { inboxtest.Once(tb, c, message(), nil) }
		}, "not handled"},
		{"no conflict", keyfunc.JSON("orderId"), func(_ *testing.T, _ *shop, c *inbox.Consumer[*sql.Tx]) func(inboxtest.TB) {
			return func(tb inboxtest.TB) { inboxtest.Conflict(tb, c, message(), nil) }
		}, `the outcome is "first_attempt"`},
		{"does not fail", keyfunc.JSON("orderId"), func(_ *testing.T, s *shop, c *inbox.Consumer[*sql.Tx]) func(inboxtest.TB) {
			return func(tb inboxtest.TB) { _ = inboxtest.RolledBack(tb, c, s.store, message(), nil) }
		}, "did not fail"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			found := failures(t, c.check(t, s, s.consumer(t, c.key, nothing)))
			if !strings.Contains(found, c.want) {
				t.Errorf("found %q, want %q", found, c.want)
			}
		})
	}
}

// case D8: a handler that commits by itself gets the same answer on every store.
func TestRefusedIsPermanent(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for name, h := range map[string]inbox.Handler[*sql.Tx]{
		"returned": func(_ context.Context, tx *sql.Tx, _ *inbox.Message) error { return tx.Commit() },
		"ignored":  func(_ context.Context, tx *sql.Tx, _ *inbox.Message) error { _ = tx.Commit(); return nil },
		"as SQL": func(ctx context.Context, tx *sql.Tx, _ *inbox.Message) error {
			_, err := tx.ExecContext(ctx, "commit")
			return err
		},
	} {
		_, err := s.consumer(t, keyfunc.JSON("orderId"), h).Process(t.Context(), message())
		if !inbox.IsPermanent(err) || !errors.Is(err, inbox.ErrRefused) || errors.Is(err, inbox.ErrTxEnded) {
			t.Errorf("%s: Process = %v, want a permanent ErrRefused", name, err)
		}
	}
}
