package migrations_test

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/migrations"
)

func numbered(version int) string { return fmt.Sprintf("%04d_", version) }

// The tables of this version, as the stores know them.
var tables = []string{
	"inbox", "inbox_consumers", "inbox_guard", "inbox_guard_target", "inbox_horizons",
	"inbox_parked", "inbox_runs", "inbox_schema", "inbox_starts", "inbox_steps",
}

func TestSQLiteThroughGoose(t *testing.T) {
	t.Parallel()
	db := openSQLite(t, filepath.Join(t.TempDir(), "inbox.db"))
	upDownUp(t, db, goose.DialectSQLite3, migrations.SQLite(), sqliteTables)
}

func TestSQLitePlainAndGooseMakeTheSame(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plain := openSQLite(t, filepath.Join(dir, "plain.db"))
	execAll(t, plain, ups(t, migrations.SQLite()))
	byGoose := openSQLite(t, filepath.Join(dir, "goose.db"))
	up(t, provider(t, byGoose, goose.DialectSQLite3, migrations.SQLite()))

	const shape = `select sql from sqlite_master where name not like 'sqlite_%' and name <> 'inbox_goose_version' and sql is not null order by name`
	want, got := column(t, plain, shape), column(t, byGoose, shape)
	if len(want) < len(tables) || !slices.Equal(want, got) {
		t.Errorf("plain:\n%s\ngoose:\n%s", strings.Join(want, "\n"), strings.Join(got, "\n"))
	}
	execAll(t, plain, downs(t, migrations.SQLite()))
	if left := sqliteTables(t, plain); len(left) > 0 {
		t.Errorf("after the plain files down: %v", left)
	}
}

// lookPath finds a program; where nothing may be skipped it has to be there.
func lookPath(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	switch {
	case err == nil:
	case os.Getenv("ACKAFTER_TEST_REQUIRE") == "1":
		t.Fatal(err)
	default:
		t.Skip(err)
	}
	return path
}

// The files run in the shell of SQLite as they are.
func TestSQLiteShell(t *testing.T) {
	t.Parallel()
	shell := lookPath(t, "sqlite3")
	path := filepath.Join(t.TempDir(), "inbox.db")
	run := func(script []byte) {
		cmd := exec.CommandContext(t.Context(), shell, "-bail", path)
		cmd.Stdin = strings.NewReader(string(script))
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Fatalf("sqlite3: %v\n%s", err, out)
		}
	}
	run(ups(t, migrations.SQLite()))
	if got := sqliteTables(t, openSQLite(t, path)); !slices.Equal(got, tables) {
		t.Errorf("tables: %v", got)
	}
	run(downs(t, migrations.SQLite()))
	if got := sqliteTables(t, openSQLite(t, path)); len(got) > 0 {
		t.Errorf("tables left: %v", got)
	}
}

func TestPostgresThroughGoose(t *testing.T) {
	t.Parallel()
	db, _ := openPostgres(t)
	upDownUp(t, db, goose.DialectPostgres, migrations.Postgres(), postgresTables)
}

func TestPostgresPlainAndGooseMakeTheSame(t *testing.T) {
	t.Parallel()
	plain, _ := openPostgres(t)
	execAll(t, plain, ups(t, migrations.Postgres()))
	byGoose, _ := openPostgres(t)
	up(t, provider(t, byGoose, goose.DialectPostgres, migrations.Postgres()))

	const columns = `select concat_ws(' ', table_name, column_name, data_type, is_nullable, collation_name, is_identity, column_default)
		from information_schema.columns where table_schema = current_schema() and table_name <> 'inbox_goose_version'
		order by table_name, ordinal_position`
	const indexes = `select replace(indexdef, current_schema() || '.', '') from pg_indexes where schemaname = current_schema() and tablename <> 'inbox_goose_version' order by 1`
	const constraints = `select concat_ws(' ', conrelid::regclass, conname, pg_get_constraintdef(c.oid))
		from pg_constraint c where connamespace = current_schema()::regnamespace and conrelid::regclass::text <> 'inbox_goose_version'
		order by 1`
	for _, shape := range []string{columns, indexes, constraints} {
		want, got := column(t, plain, shape), column(t, byGoose, shape)
		if len(want) < len(tables) || !slices.Equal(want, got) {
			t.Errorf("plain:\n%s\ngoose:\n%s", strings.Join(want, "\n"), strings.Join(got, "\n"))
		}
	}
	execAll(t, plain, downs(t, migrations.Postgres()))
	if left := postgresTables(t, plain); len(left) > 0 {
		t.Errorf("after the plain files down: %v", left)
	}
}

// The files run in psql as they are.
func TestPsql(t *testing.T) {
	t.Parallel()
	db, address := openPostgres(t)
	psql := lookPath(t, "psql")
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	schema := q.Get("search_path")
	q.Del("search_path") // libpq does not know it.
	u.RawQuery = q.Encode()
	run := func(script []byte) {
		cmd := exec.CommandContext(t.Context(), psql, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", u.String())
		cmd.Env = append(os.Environ(), "PGOPTIONS=-c search_path="+schema)
		cmd.Stdin = strings.NewReader(string(script))
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Fatalf("psql: %v\n%s", err, out)
		}
	}
	run(ups(t, migrations.Postgres()))
	if got := postgresTables(t, db); !slices.Equal(got, tables) {
		t.Errorf("tables: %v", got)
	}
	run(downs(t, migrations.Postgres()))
	if got := postgresTables(t, db); len(got) > 0 {
		t.Errorf("tables left: %v", got)
	}
}

// upDownUp goes up, all the way down, and up again, and looks each time.
func upDownUp(t *testing.T, db *sql.DB, dialect goose.Dialect, files fs.FS, list func(*testing.T, *sql.DB) []string) {
	t.Helper()
	p := provider(t, db, dialect, files)
	up(t, p)
	checkUp(t, db, list(t, db))
	if _, err := p.DownTo(t.Context(), 0); err != nil {
		t.Fatalf("down: %v", err)
	}
	if left := list(t, db); len(left) > 0 {
		t.Errorf("after down: %v", left)
	}
	up(t, p)
	checkUp(t, db, list(t, db))
	if done, err := p.Up(t.Context()); err != nil || len(done) > 0 {
		t.Errorf("up once more did %v, error %v", done, err)
	}
}

func checkUp(t *testing.T, db *sql.DB, got []string) {
	t.Helper()
	if !slices.Equal(got, tables) {
		t.Errorf("tables: %v, want %v", got, tables)
	}
	if got := column(t, db, "select version from inbox_schema"); !slices.Equal(got, []string{fmt.Sprint(migrations.Version)}) {
		t.Errorf("inbox_schema has %v, want one row with version %d", got, migrations.Version)
	}
}

func provider(t *testing.T, db *sql.DB, dialect goose.Dialect, files fs.FS) *goose.Provider {
	t.Helper()
	p, err := goose.NewProvider(dialect, db, migrations.Goose(files),
		goose.WithTableName(migrations.GooseTable), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func up(t *testing.T, p *goose.Provider) {
	t.Helper()
	done, err := p.Up(t.Context())
	if err != nil {
		t.Fatalf("up: %v", err)
	}
	if len(done) != migrations.Version {
		t.Errorf("up applied %d files, want %d", len(done), migrations.Version)
	}
}

func ups(t *testing.T, files fs.FS) []byte { return script(t, files, "*.up.sql", false) }

func downs(t *testing.T, files fs.FS) []byte { return script(t, files, "*.down.sql", true) }

func script(t *testing.T, files fs.FS, pattern string, reverse bool) []byte {
	t.Helper()
	names, err := fs.Glob(files, pattern)
	if err != nil || len(names) == 0 {
		t.Fatalf("%s: %v, error %v", pattern, names, err)
	}
	if reverse {
		slices.Reverse(names)
	}
	var all []byte
	for _, name := range names {
		b, err := fs.ReadFile(files, name)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b...)
	}
	return all
}

func execAll(t *testing.T, db *sql.DB, script []byte) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), string(script)); err != nil {
		t.Fatal(err)
	}
}

func column(t *testing.T, db *sql.DB, query string) []string {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var values []string
	for rows.Next() {
		var v string
		if err := rows.Scan(&v); err != nil {
			t.Fatal(err)
		}
		values = append(values, v)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return values
}

func sqliteTables(t *testing.T, db *sql.DB) []string {
	return column(t, db, `select name from sqlite_master where type = 'table'
		and name not like 'sqlite_%' and name <> 'inbox_goose_version' order by name`)
}

func postgresTables(t *testing.T, db *sql.DB) []string {
	return column(t, db, `select tablename from pg_tables where schemaname = current_schema()
		and tablename <> 'inbox_goose_version' order by tablename`)
}

func openSQLite(t *testing.T, path string) *sql.DB {
	t.Helper()
	return open(t, "sqlite", "file:"+path)
}

// openPostgres opens a schema of its own in the database of
// ACKAFTER_TEST_POSTGRES, and returns its URL too.
func openPostgres(t *testing.T) (*sql.DB, string) {
	t.Helper()
	address := os.Getenv("ACKAFTER_TEST_POSTGRES")
	if address == "" {
		if os.Getenv("ACKAFTER_TEST_REQUIRE") == "1" {
			t.Fatal("ACKAFTER_TEST_POSTGRES is not set")
		}
		t.Skip("ACKAFTER_TEST_POSTGRES is not set")
	}
	schema := fmt.Sprintf("migrations_%d", rand.Uint64())
	admin := open(t, "pgx", address)
	if _, err := admin.ExecContext(t.Context(), "create schema "+schema); err != nil {
		t.Fatal(err)
	}
	ctx := context.WithoutCancel(t.Context()) // A cleanup comes after the test's own context.
	t.Cleanup(func() {
		if _, err := admin.ExecContext(ctx, "drop schema "+schema+" cascade"); err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal("ACKAFTER_TEST_POSTGRES is not a URL")
	}
	q := u.Query()
	q.Set("search_path", schema)
	u.RawQuery = q.Encode()
	return open(t, "pgx", u.String()), u.String()
}

func open(t *testing.T, driver, source string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, source)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}
