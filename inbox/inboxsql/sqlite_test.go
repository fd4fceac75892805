package inboxsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/migrations"
)

func claimOf(key string) inbox.Claim {
	return inbox.Claim{Key: inbox.Key{Consumer: "billing", MessageKey: key}, Attempt: 1}
}

func begin(t *testing.T, store *inboxsql.Store, keys ...string) inbox.Batch[*sql.Tx] {
	t.Helper()
	claims := make([]inbox.Claim, len(keys))
	for i, k := range keys {
		claims[i] = claimOf(k)
	}
	b, err := store.Begin(t.Context(), claims, inbox.BeginOptions{LockTimeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Abort)
	return b
}

func start(t *testing.T, b inbox.Batch[*sql.Tx], i int) *sql.Tx {
	t.Helper()
	tx, err := b.Start(t.Context(), i)
	if err != nil {
		t.Fatal(err)
	}
	return tx
}

func mustExec(t *testing.T, q interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}, query string, args ...any,
) {
	t.Helper()
	if _, err := q.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func count(t *testing.T, db *sql.DB, query string) (n int) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), query).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// sqliteStore is a store with a table for its handlers.
func sqliteStore(t *testing.T) (*inboxsql.Store, *sql.DB) {
	t.Helper()
	db, _ := newSQLite(t)
	mustExec(t, db, "create table effects (k text not null, n integer not null default 1)")
	store, err := inboxsql.New(db)
	if err != nil {
		t.Fatal(err)
	}
	return store, db
}

func TestCheckSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	_, path := newSQLite(t)
	good := inboxsql.SQLiteDSN(path)
	for name, c := range map[string]struct{ dsn, want string }{
		"the right settings":         {good, ""},
		"a plain file name":          {path, "foreign_keys is off"},
		"synchronous normal":         {strings.ReplaceAll(good, "FULL", "NORMAL"), "synchronous is 1"},
		"synchronous extra":          {strings.ReplaceAll(good, "FULL", "EXTRA"), ""},
		"rollback journal":           {strings.ReplaceAll(good, "WAL", "DELETE"), ""},
		"no journal":                 {strings.ReplaceAll(good, "WAL", "OFF"), "journal_mode is off"},
		"in memory":                  {"file::memory:?_pragma=foreign_keys(1)", "in memory"},
		"a file without tables":      {inboxsql.SQLiteDSN(filepath.Join(t.TempDir(), "new.db")), "ackafter migrate up"},
		"a folder that is not there": {inboxsql.SQLiteDSN(filepath.Join(t.TempDir(), "no", "x.db")), "unable to open"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The journal mode is the file's: it needs one of its own.
			newFile := strings.Contains(c.dsn, "DELETE") || strings.Contains(c.dsn, "OFF")
			dsn := c.dsn
			if newFile {
				dsn = strings.ReplaceAll(dsn, path, filepath.Join(t.TempDir(), "own.db"))
			}
			db, err := sql.Open("sqlite", dsn)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = db.Close() })
			if newFile {
				mustExec(t, db, migration(t, migrations.SQLite()))
			}
			store, err := inboxsql.New(db)
			if err != nil {
				t.Fatal(err)
			}
			err = store.Check(t.Context())
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("Check: %v, want %q", err, c.want)
			}
		})
	}
}

// Settings are per connection: one that lacks them is not used, whatever Check
// has seen on another.
func TestBeginChecksItsConnection(t *testing.T) {
	t.Parallel()
	db, path := newSQLite(t)
	plain, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plain.Close() })
	store, err := inboxsql.New(plain)
	if err != nil {
		t.Fatal(err)
	}
	_, err = store.Begin(t.Context(), []inbox.Claim{claimOf("k")}, inbox.BeginOptions{LockTimeout: time.Second})
	if err == nil || !strings.Contains(err.Error(), "foreign_keys is off") {
		t.Errorf("Begin: %v", err)
	}
	if n := count(t, db, "select count(*) from inbox"); n != 0 {
		t.Errorf("%d rows", n)
	}
}

func TestPoolSize(t *testing.T) {
	t.Parallel()
	store, db := sqliteStore(t)
	for _, c := range []struct{ limit, want int }{{0, 1}, {4, 4}, {1, 1}} {
		db.SetMaxOpenConns(c.limit)
		if got := store.PoolSize(); got != c.want {
			t.Errorf("PoolSize with a limit of %d connections = %d, want %d", c.limit, got, c.want)
		}
	}
	// One connection is enough for everything that does not happen inside a
	// handler.
	if err := store.Check(t.Context()); err != nil {
		t.Error(err)
	}
	b := begin(t, store, "k")
	mustExec(t, start(t, b, 0), "insert into effects (k) values ('k')")
	if err := b.Finish(t.Context(), 0, true, nil); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Lookup(t.Context(), claimOf("k").Key); err != nil {
		t.Error(err)
	}
}

// Another program that writes holds up Begin for LockTimeout, and no longer,
// whatever the connection's own busy_timeout is; that is as it was afterwards.
func TestForeignWriter(t *testing.T) {
	t.Parallel()
	db, path := newSQLite(t)
	other := openFile(t, path)
	tx, err := other.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	store, err := inboxsql.New(db)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	_, err = store.Begin(t.Context(), []inbox.Claim{claimOf("k")}, inbox.BeginOptions{LockTimeout: 200 * time.Millisecond})
	if took := time.Since(began); !errors.Is(err, inbox.ErrInFlight) || took < 150*time.Millisecond || took > 4*time.Second {
		t.Errorf("Begin: %v after %v, want ErrInFlight after 200ms", err, took)
	}
	if n := count(t, db, "select timeout from pragma_busy_timeout"); n != 5000 {
		t.Errorf("busy_timeout is %d afterwards, want 5000", n)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	begin(t, store, "k").Abort()
}

// SQLite rolls a transaction back by itself when the disk is full. That is not
// the handler's doing, and nothing that comes after it may be committed by
// itself.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	store, db := sqliteStore(t)
	db.SetMaxOpenConns(1) // The limit is the connection's.
	pages := count(t, db, "pragma page_count")
	mustExec(t, db, fmt.Sprintf("pragma max_page_count = %d", pages+5))
	for _, ok := range []bool{true, false} {
		b := begin(t, store, "k1", "k2")
		mustExec(t, start(t, b, 0), "insert into effects (k) values ('k1')")
		if err := b.Finish(t.Context(), 0, true, nil); err != nil {
			t.Fatal(err)
		}
		tx := start(t, b, 1)
		_, full := tx.ExecContext(t.Context(), "insert into effects (k) values (hex(randomblob(100000)))")
		if got := store.Classify(full); got != inbox.ClassUnavailable {
			t.Fatalf("a full disk: %v: class %d, want ClassUnavailable", full, got)
		}
		if _, err := tx.ExecContext(t.Context(), "insert into effects (k) values ('autocommit')"); err == nil {
			t.Error("a statement after the end of the transaction was accepted")
		}
		err := b.Finish(t.Context(), 1, ok, nil)
		if err == nil || errors.Is(err, inbox.ErrTxEnded) || errors.Is(err, inbox.ErrSwallowed) || store.Classify(err) != inbox.ClassUnavailable {
			t.Errorf("Finish(%v): %v: class %d; want an error that blames the database", ok, err, store.Classify(err))
		}
		if err := b.Commit(t.Context()); !errors.Is(err, inbox.ErrNotCommitted) {
			t.Errorf("Commit: %v, want ErrNotCommitted", err)
		}
		if n := count(t, db, "select (select count(*) from effects) + (select count(*) from inbox)"); n != 0 {
			t.Errorf("%d rows are left of a transaction that was rolled back", n)
		}
	}
	mustExec(t, db, "pragma max_page_count = 1000000")
	begin(t, store, "k1").Abort()
}

// A write that is interrupted takes the transaction along, too.
func TestInterruptedWrite(t *testing.T) {
	t.Parallel()
	store, db := sqliteStore(t)
	b := begin(t, store, "k1")
	tx := start(t, b, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := tx.ExecContext(ctx, `insert into effects (k, n)
		with recursive r (i) as (select 1 union all select i + 1 from r where i < 1000000000) select 'x', i from r`)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the write: %v, want its context's error", err)
	}
	if _, err := tx.ExecContext(t.Context(), "insert into effects (k) values ('autocommit')"); err == nil {
		t.Error("a statement after the end of the transaction was accepted")
	}
	err = b.Finish(t.Context(), 0, false, nil)
	if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, inbox.ErrTxEnded) {
		t.Errorf("Finish: %v, want the write's error", err)
	}
	b.Abort()
	if n := count(t, db, "select count(*) from effects"); n != 0 {
		t.Errorf("%d rows are left", n)
	}
	begin(t, store, "k1").Abort()
}

// A transaction that began as a reader and finds that others have written since
// cannot write any more: Claim says so.
func TestClaimInAReader(t *testing.T) {
	t.Parallel()
	store, _ := sqliteStore(t)
	_, path := newSQLite(t)
	plain, err := sql.Open("sqlite", strings.ReplaceAll(inboxsql.SQLiteDSN(path), "_txlock=immediate", "_txlock=deferred"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plain.Close() })
	tx, err := plain.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	var n int
	if err := tx.QueryRowContext(t.Context(), "select count(*) from inbox").Scan(&n); err != nil {
		t.Fatal(err)
	}
	mustExec(t, plain, "insert into inbox_guard_target values (1)")
	_, err = store.Claim(t.Context(), tx, "billing", "k")
	if !errors.Is(err, inbox.ErrInFlight) || store.Classify(err) != inbox.ClassContention {
		t.Errorf("Claim: %v, want ErrInFlight", err)
	}
}

// The guard alone keeps a foreign COMMIT out, also of a batch of one.
func TestGuardIsInEveryBatch(t *testing.T) {
	t.Parallel()
	store, db := sqliteStore(t)
	for _, keys := range [][]string{{}, {"k1"}, {"k1", "k2"}} {
		b := begin(t, store, keys...)
		if len(keys) > 0 {
			if _, err := start(t, b, 0).ExecContext(t.Context(), hiddenSQLite+"commit"); err == nil {
				t.Error("a foreign COMMIT succeeds")
			}
			_ = b.Finish(t.Context(), 0, true, nil)
		}
		b.Abort()
		if n := count(t, db, "select (select count(*) from inbox) + (select count(*) from inbox_guard)"); n != 0 {
			t.Errorf("%d rows are left of a batch of %d", n, len(keys))
		}
	}
}

func TestVersionOfAnotherRelease(t *testing.T) {
	t.Parallel()
	store, db := sqliteStore(t)
	mustExec(t, db, "update inbox_schema set version = $1", migrations.Version+1)
	err := store.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), fmt.Sprint(migrations.Version+1)) || !strings.Contains(err.Error(), fmt.Sprint(migrations.Version)) {
		t.Errorf("Check: %v, want both versions", err)
	}
}
