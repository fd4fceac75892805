package inboxsql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"modernc.org/sqlite"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
)

// through is a connector of a driver whose type says nothing.
type through struct {
	driver.Connector
	driver driver.Driver
}

func (c through) Driver() driver.Driver { return c }

func (c through) Open(name string) (driver.Conn, error) { return c.driver.Open(name) }

// bareConn is a connection with nothing but what a driver must have.
type bareConn struct{ driver.Conn }

type bare struct{ driver.Connector }

func (c bare) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	return bareConn{conn}, err
}

func TestConfig(t *testing.T) {
	t.Parallel()
	db, path := newSQLite(t)
	if _, err := inboxsql.New(nil); err == nil || !strings.Contains(err.Error(), "db") {
		t.Errorf("New(nil): %v", err)
	}
	for _, c := range []struct {
		name  string
		cfg   inboxsql.Config
		names string // "" for no error
	}{
		{"defaults", inboxsql.Config{}, ""},
		{"dialect SQLite", inboxsql.Config{Dialect: inboxsql.SQLite}, ""},
		{"dialect PostgreSQL", inboxsql.Config{Dialect: inboxsql.PostgreSQL}, ""},
		{"unknown dialect", inboxsql.Config{Dialect: "mysql"}, "Dialect"},
		{"schema with SQLite", inboxsql.Config{Schema: "x"}, "Schema"},
		{"schema with PostgreSQL", inboxsql.Config{Dialect: inboxsql.PostgreSQL, Schema: `odd "name`}, ""},
		{"schema with NUL", inboxsql.Config{Dialect: inboxsql.PostgreSQL, Schema: "a\x00"}, "Schema"},
		{"schema with invalid UTF-8", inboxsql.Config{Dialect: inboxsql.PostgreSQL, Schema: "a\xff"}, "Schema"},
		{"blank schema", inboxsql.Config{Dialect: inboxsql.PostgreSQL, Schema: "  "}, "Schema"},
		{"isolation of SQLite", inboxsql.Config{Isolation: sql.LevelSerializable}, ""},
		{"isolation that SQLite lacks", inboxsql.Config{Isolation: sql.LevelReadCommitted}, "Isolation"},
		{"isolation that nobody has", inboxsql.Config{Dialect: inboxsql.PostgreSQL, Isolation: sql.LevelLinearizable}, "Isolation"},
		{"no timeout", inboxsql.Config{Timeout: -1}, ""},
	} {
		store, err := inboxsql.NewWithConfig(db, &c.cfg)
		if (err == nil) != (c.names == "") || err != nil && !strings.Contains(err.Error(), c.names) || (store == nil) != (err != nil) {
			t.Errorf("%s: %v, want an error that names %q", c.name, err, c.names)
		}
	}
	// A driver of an unknown type is asked.
	connector, err := sqlite.NewConnector(inboxsql.SQLiteDSN(path))
	if err != nil {
		t.Fatal(err)
	}
	unknown := sql.OpenDB(through{connector, connector.Driver()})
	t.Cleanup(func() { _ = unknown.Close() })
	store, err := inboxsql.New(unknown)
	if err != nil {
		t.Fatalf("New with a driver of an unknown type: %v", err)
	}
	if err := store.Check(t.Context()); err != nil {
		t.Error(err)
	}
	begin(t, store, "k").Abort()
	// No database at all.
	nowhere := sql.OpenDB(through{failing{}, connector.Driver()})
	t.Cleanup(func() { _ = nowhere.Close() })
	if _, err := inboxsql.New(nowhere); err == nil || !strings.Contains(err.Error(), "Dialect") || !errors.Is(err, errNoDatabase) {
		t.Errorf("New without a database: %v", err)
	}
	store, err = inboxsql.NewWithConfig(nowhere, &inboxsql.Config{Dialect: inboxsql.SQLite})
	if err != nil {
		t.Fatal(err)
	}
	_, err = store.Begin(t.Context(), nil, inbox.BeginOptions{LockTimeout: time.Second})
	if !errors.Is(err, errNoDatabase) || store.Classify(err) != inbox.ClassUnavailable {
		t.Errorf("Begin without a database: %v: class %d, want ClassUnavailable", err, store.Classify(err))
	}
}

var errNoDatabase = errors.New("no database")

type failing struct{ driver.Connector }

func (failing) Connect(context.Context) (driver.Conn, error) { return nil, errNoDatabase }

// A driver with none of the optional interfaces will do.
func TestBareDriver(t *testing.T) {
	t.Parallel()
	_, path := newSQLite(t)
	connector, err := sqlite.NewConnector(inboxsql.SQLiteDSN(path))
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(bare{connector})
	t.Cleanup(func() { _ = db.Close() })
	mustExec(t, db, "create table effects (k text)")
	store, err := inboxsql.New(db)
	if err != nil {
		t.Fatal(err)
	}
	b := begin(t, store, "k")
	tx := start(t, b, 0)
	mustExec(t, tx, "insert into effects values ($1)", "k")
	var k string
	if err := tx.QueryRowContext(t.Context(), "select k from effects").Scan(&k); err != nil || k != "k" {
		t.Errorf("query: %q, %v", k, err)
	}
	finish(t, b, 0)
	if _, err := store.Lookup(t.Context(), claimOf("k").Key); err != nil {
		t.Error(err)
	}
}

// The tables can be in a schema of any name, whatever search_path says.
func TestSchema(t *testing.T) {
	t.Parallel()
	f := openPostgres(t, postgresURL(t), "", pgx.QueryExecModeCacheStatement)
	var schema string
	if err := f.DB.QueryRowContext(t.Context(), "select current_schema()").Scan(&schema); err != nil {
		t.Fatal(err)
	}
	odd := schema + ` Odd"é`
	quoted := `"` + strings.ReplaceAll(odd, `"`, `""`) + `"`
	mustExec(t, f.DB, "alter schema "+schema+" rename to "+quoted)
	t.Cleanup(func() {
		_, _ = f.DB.ExecContext(context.WithoutCancel(t.Context()), "alter schema "+quoted+" rename to "+schema)
	})
	store, err := inboxsql.New(f.DB)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Check(t.Context()); !errors.Is(err, inbox.ErrNoSchema) {
		t.Errorf("Check without the schema: %v, want ErrNoSchema", err)
	}
	if store, err = inboxsql.NewWithConfig(f.DB, &inboxsql.Config{Schema: odd}); err != nil {
		t.Fatal(err)
	}
	if err := store.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := store.Register(t.Context(), inbox.Registration{Consumer: "billing", KeyDefinition: "d"}); err != nil {
		t.Error(err)
	}
	b := begin(t, store, "k", "dead")
	if err := b.Park(t.Context(), 1, inbox.Parked{Key: claimOf("dead").Key, State: inbox.ParkedDead}); err != nil {
		t.Error(err)
	}
	start(t, b, 0)
	finish(t, b, 0)
	b = begin(t, store, "k", "dead")
	if e := b.Entries(); e[0].Outcome != inbox.Replay || e[1].Outcome != inbox.Dead {
		t.Errorf("entries: %+v", e)
	}
	b.Abort()
	if all, err := store.ListParked(t.Context(), inbox.ParkedFilter{}); err != nil || len(all) != 1 {
		t.Errorf("ListParked: %d rows, %v", len(all), err)
	}
	if all, err := store.Find(t.Context(), "k"); err != nil || len(all) != 1 {
		t.Errorf("Find: %d rows, %v", len(all), err)
	}
}

// The store's own timeout ends what the database does not answer, and that is
// the database's fault; the caller's own context is not.
func TestTimeout(t *testing.T) {
	t.Parallel()
	f := openPostgres(t, postgresURL(t), "", pgx.QueryExecModeCacheStatement)
	store, err := inboxsql.NewWithConfig(f.DB, &inboxsql.Config{Timeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	lock, err := f.DB.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, lock, "lock table inbox, inbox_consumers, inbox_schema")
	for name, call := range map[string]func(ctx context.Context) error{
		"Check": store.Check,
		"Register": func(ctx context.Context) error {
			return store.Register(ctx, inbox.Registration{Consumer: "c", KeyDefinition: "d"})
		},
		"Lookup": func(ctx context.Context) error { _, err := store.Lookup(ctx, claimOf("k").Key); return err },
		"Find":   func(ctx context.Context) error { _, err := store.Find(ctx, "k"); return err },
	} {
		if err := call(t.Context()); !errors.Is(err, context.DeadlineExceeded) || store.Classify(err) != inbox.ClassUnavailable {
			t.Errorf("%s: %v: class %d, want ClassUnavailable", name, err, store.Classify(err))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) || store.Classify(err) != inbox.ClassMessage {
			t.Errorf("%s with a context that ends: %v: class %d, want ClassMessage", name, err, store.Classify(err))
		}
		cancel()
	}
	if err := lock.Rollback(); err != nil {
		t.Fatal(err)
	}
	// All connections are taken.
	f.DB.SetMaxOpenConns(1)
	if lock, err = f.DB.BeginTx(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	_, err = store.Begin(t.Context(), nil, inbox.BeginOptions{LockTimeout: 50 * time.Millisecond})
	if store.Classify(err) != inbox.ClassUnavailable {
		t.Errorf("Begin without a connection: %v: class %d, want ClassUnavailable", err, store.Classify(err))
	}
	if err := lock.Rollback(); err != nil {
		t.Fatal(err)
	}
}
