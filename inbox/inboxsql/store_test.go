package inboxsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/migrations"
)

func TestMain(m *testing.M) {
	if os.Getenv(crashEnv) != "" {
		crashChild()
		return
	}
	goleak.VerifyTestMain(m)
}

func TestSQLite(t *testing.T) {
	t.Parallel()
	inboxtest.RunStore(t, inboxtest.StoreHarness[*sql.Tx]{
		Open:           openSQLite,
		OneWriter:      true,
		AbortsOnError:  true, // The store sees to it that a failed statement counts.
		NamesStatement: true,
		DeadTx:         true,
		Parking:        true,
		Marking:        true,
	})
}

func TestPostgreSQL(t *testing.T) {
	t.Parallel()
	url := postgresURL(t)
	inboxtest.RunStore(t, inboxtest.StoreHarness[*sql.Tx]{
		Open: func(tb testing.TB, isolation string) *inboxtest.StoreFixture[*sql.Tx] {
			return openPostgres(tb, url, isolation, pgx.QueryExecModeCacheStatement).StoreFixture
		},
		Isolations:     []string{"read committed", "repeatable read", "serializable"},
		AbortsOnError:  true,
		NamesStatement: true,
		DeadTx:         true,
		Parking:        true,
		Marking:        true,
	})
}

// Poolers in transaction mode know no prepared statements.
func TestPostgreSQLWithoutPreparedStatements(t *testing.T) {
	t.Parallel()
	url := postgresURL(t)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			inboxtest.RunStore(t, inboxtest.StoreHarness[*sql.Tx]{
				Open: func(tb testing.TB, isolation string) *inboxtest.StoreFixture[*sql.Tx] {
					return openPostgres(tb, url, isolation, mode).StoreFixture
				},
				AbortsOnError:  true,
				NamesStatement: true,
				DeadTx:         true,
				Parking:        true,
				Marking:        true,
			})
		})
	}
}

// postgresURL is the server for tests.
func postgresURL(tb testing.TB) string {
	tb.Helper()
	url := os.Getenv("ACKAFTER_TEST_POSTGRES")
	switch {
	case url != "":
	case os.Getenv("ACKAFTER_TEST_REQUIRE") == "1":
		tb.Fatal("ACKAFTER_TEST_POSTGRES is not set, but ACKAFTER_TEST_REQUIRE=1")
	default:
		tb.Skip("ACKAFTER_TEST_POSTGRES is not set")
	}
	return url
}

// migration is the SQL that makes the tables.
func migration(tb testing.TB, files fs.FS) string {
	tb.Helper()
	names, err := fs.Glob(files, "*.up.sql")
	if err != nil || len(names) == 0 {
		tb.Fatalf("no migrations: %v", err)
	}
	var text strings.Builder
	for _, name := range names {
		b, err := fs.ReadFile(files, name)
		if err != nil {
			tb.Fatal(err)
		}
		text.Write(b)
		text.WriteString(";\n")
	}
	return text.String()
}

// newSQLite returns a migrated database file and its path.
func newSQLite(tb testing.TB) (*sql.DB, string) {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "inbox.db")
	db := openFile(tb, path)
	if _, err := db.ExecContext(tb.Context(), migration(tb, migrations.SQLite())); err != nil {
		tb.Fatal(err)
	}
	return db, path
}

func openFile(tb testing.TB, path string) *sql.DB {
	tb.Helper()
	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(path))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := db.Close(); err != nil {
			tb.Error(err)
		}
	})
	return db
}

func openSQLite(tb testing.TB, _ string) *inboxtest.StoreFixture[*sql.Tx] {
	tb.Helper()
	db, path := newSQLite(tb)
	store, err := inboxsql.New(db)
	if err != nil {
		tb.Fatal(err)
	}
	f := fixture(store, db, openFile(tb, path))
	f.Endings = append(f.Endings,
		sqlEnding("END", "end"),
		sqlEnding("hidden COMMIT", hiddenSQLite+"commit"),
		sqlEnding("hidden ROLLBACK", hiddenSQLite+"rollback", "insert into effects (k, note) values ('gone', 'autocommit')"),
		sqlEnding("hidden COMMIT and BEGIN", hiddenSQLite+"commit; begin"),
		inboxtest.Ending[*sql.Tx]{Name: "conflict clause", Do: func(ctx context.Context, tx *sql.Tx) error {
			return execAll(ctx, tx, "create table once (id integer primary key)", "insert into once values (1)",
				"insert or rollback into once values (1)", "insert into effects (k, note) values ('gone', 'autocommit')")
		}},
	)
	return f
}

// hiddenSQLite makes SQLite see what follows, and the store a comment.
const hiddenSQLite = "/* /* */ "

var schemas atomic.Int64

// postgresFixture is a store in a schema of its own.
type postgresFixture struct {
	*inboxtest.StoreFixture[*sql.Tx]
	DB *sql.DB
	// Cut is CutCommit, with what the store needs.
	Cut func(tb testing.TB, reached bool) (*inboxsql.Store, *sql.DB)
}

func openPostgres(tb testing.TB, url, isolation string, mode pgx.QueryExecMode) postgresFixture {
	tb.Helper()
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		tb.Fatal(err)
	}
	schema := fmt.Sprintf("inboxsql_%d_%d", os.Getpid(), schemas.Add(1))
	cfg.RuntimeParams["search_path"] = schema
	cfg.RuntimeParams["application_name"] = schema
	cfg.DefaultQueryExecMode = mode
	outside := openConfig(tb, cfg)
	for _, q := range []string{"create schema " + schema, migration(tb, migrations.Postgres())} {
		if _, err := outside.ExecContext(tb.Context(), q); err != nil {
			tb.Fatal(err)
		}
	}
	tb.Cleanup(func() {
		if _, err := outside.ExecContext(context.WithoutCancel(tb.Context()), "drop schema "+schema+" cascade"); err != nil {
			tb.Error(err)
		}
	})
	db := openConfig(tb, cfg)
	store := newPostgresStore(tb, db, isolation)
	f := fixture(store, db, outside)
	f.Endings = append(f.Endings,
		sqlEnding("END", "end"),
		sqlEnding("ABORT", "abort"),
		sqlEnding("PREPARE TRANSACTION", "prepare transaction 'x'"),
		sqlEnding("hidden COMMIT", hiddenPostgres...),
		sqlEnding("hidden ROLLBACK", strings.Split(strings.ReplaceAll(strings.Join(hiddenPostgres, "|"), "commit", "rollback"), "|")...),
		sqlEnding("hidden COMMIT and BEGIN", append(hiddenPostgres, "savepoint ackafter_run")...),
	)
	f.Kill = func(ctx context.Context, tx *sql.Tx) error {
		pid, err := f.Count(ctx, tx, "select pg_backend_pid()")
		if err != nil {
			return err
		}
		// Waits until the backend has ended.
		return f.Outside(ctx, fmt.Sprintf("select pg_terminate_backend(%d, 10000)", pid))
	}
	cut := func(tb testing.TB, reached bool) (*inboxsql.Store, *sql.DB) {
		tb.Helper()
		through := cfg.Copy()
		through.Host, through.Port = cutCommits(tb, fmt.Sprintf("%s:%d", cfg.Host, cfg.Port), reached)
		through.Fallbacks = nil
		db := openConfig(tb, through)
		return newPostgresStore(tb, db, isolation), db
	}
	f.CutCommit = func(tb testing.TB, reached bool) inbox.Store[*sql.Tx] {
		tb.Helper()
		store, _ := cut(tb, reached)
		return store
	}
	f.Waiting = func(ctx context.Context) (int64, error) {
		return f.OutsideCount(ctx, "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name = '"+schema+"'")
	}
	return postgresFixture{f, db, cut}
}

// hiddenPostgres makes PostgreSQL see a COMMIT, and the store a string.
var hiddenPostgres = []string{
	"set local standard_conforming_strings = off", `select 'a\''; commit; select ''`,
	"insert into effects (k, note) values ('gone', 'autocommit')",
}

func openConfig(tb testing.TB, cfg *pgx.ConnConfig) *sql.DB {
	tb.Helper()
	db := stdlib.OpenDB(*cfg)
	tb.Cleanup(func() {
		if err := db.Close(); err != nil {
			tb.Error(err)
		}
	})
	return db
}

func newPostgresStore(tb testing.TB, db *sql.DB, isolation string) *inboxsql.Store {
	tb.Helper()
	level := map[string]sql.IsolationLevel{
		"read committed": sql.LevelReadCommitted, "repeatable read": sql.LevelRepeatableRead, "serializable": sql.LevelSerializable,
	}[isolation]
	store, err := inboxsql.NewWithConfig(db, &inboxsql.Config{Isolation: level})
	if err != nil {
		tb.Fatal(err)
	}
	return store
}

// fixture is what both databases have in common.
func fixture(store *inboxsql.Store, db, outside *sql.DB) *inboxtest.StoreFixture[*sql.Tx] {
	return &inboxtest.StoreFixture[*sql.Tx]{
		Store: store,
		Exec: func(ctx context.Context, tx *sql.Tx, query string) error {
			_, err := tx.ExecContext(ctx, query)
			return err
		},
		Count: func(ctx context.Context, tx *sql.Tx, query string) (n int64, err error) {
			err = tx.QueryRowContext(ctx, query).Scan(&n)
			return n, err
		},
		Outside: func(ctx context.Context, query string) error {
			_, err := outside.ExecContext(ctx, query)
			return err
		},
		OutsideCount: func(ctx context.Context, query string) (n int64, err error) {
			err = outside.QueryRowContext(ctx, query).Scan(&n)
			return n, err
		},
		Own: func(ctx context.Context, fn func(tx *sql.Tx) error) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			if err := fn(tx); err != nil {
				return errors.Join(err, tx.Rollback())
			}
			return tx.Commit()
		},
		Endings: []inboxtest.Ending[*sql.Tx]{
			sqlEnding("ROLLBACK and more", "rollback", "insert into effects (k, note) values ('gone', 'autocommit')"),
			sqlEnding("COMMIT", "commit"),
			sqlEnding("COMMIT and BEGIN", "commit", "begin"),
			sqlEnding("COMMIT among others", "select 1; /* now */ commit; begin"),
			{Name: "return tx.Commit()", Do: func(_ context.Context, tx *sql.Tx) error { return tx.Commit() }},
			{Name: "tx.Commit()", Do: func(_ context.Context, tx *sql.Tx) error { _ = tx.Commit(); return nil }},
			{Name: "return tx.Rollback()", Do: func(_ context.Context, tx *sql.Tx) error { return tx.Rollback() }},
			{Name: "tx.Rollback()", Do: func(_ context.Context, tx *sql.Tx) error { _ = tx.Rollback(); return nil }},
			{Name: "defer tx.Rollback()", Do: func(_ context.Context, tx *sql.Tx) error {
				defer func() { _ = tx.Rollback() }()
				return errors.New("failed")
			}},
			{Name: "prepared COMMIT", Do: func(ctx context.Context, tx *sql.Tx) error {
				st, err := tx.PrepareContext(ctx, "commit")
				if err != nil {
					return nil
				}
				defer func() { _ = st.Close() }()
				_, _ = st.ExecContext(ctx)
				return nil
			}},
		},
	}
}

// sqlEnding executes statements and ignores their errors.
func sqlEnding(name string, queries ...string) inboxtest.Ending[*sql.Tx] {
	return inboxtest.Ending[*sql.Tx]{Name: name, Do: func(ctx context.Context, tx *sql.Tx) error {
		return execAll(ctx, tx, queries...)
	}}
}

func execAll(ctx context.Context, tx *sql.Tx, queries ...string) error {
	for _, q := range queries {
		_, _ = tx.ExecContext(ctx, q) // The handler looks away.
	}
	return nil
}
