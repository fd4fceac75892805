package integration_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/database"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	migratesqlite "github.com/golang-migrate/migrate/v4/database/sqlite"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/migrations"
)

// versionTable is a table of our own, so that golang-migrate counts these
// migrations apart from others.
const versionTable = "inbox_migrations"

func TestGolangMigratePostgres(t *testing.T) {
	t.Parallel()
	for name, server := range map[string]func(testing.TB) string{"15": servers.Postgres, "18": servers.Postgres18} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := openDatabase(t, "pgx", server(t))
			driver, err := migratepgx.WithInstance(db, &migratepgx.Config{MigrationsTable: versionTable})
			if err != nil {
				t.Fatal(err)
			}
			source, err := iofs.New(migrations.Postgres(), ".")
			if err != nil {
				t.Fatal(err)
			}
			m, err := migrate.NewWithInstance("migrations", source, "pgx", driver)
			if err != nil {
				t.Fatal(err)
			}
			upDownUp(t, m, driver, db, `select tablename from pg_tables where schemaname = current_schema() order by 1`)
		})
	}
}

func TestGolangMigrateSQLite(t *testing.T) {
	t.Parallel()
	db := openDatabase(t, "sqlite", "file:"+filepath.Join(t.TempDir(), "inbox.db"))
	driver, err := migratesqlite.WithInstance(db, &migratesqlite.Config{MigrationsTable: versionTable})
	if err != nil {
		t.Fatal(err)
	}
	source, err := iofs.New(migrations.SQLite(), ".")
	if err != nil {
		t.Fatal(err)
	}
	m, err := migrate.NewWithInstance("migrations", source, "sqlite", driver)
	if err != nil {
		t.Fatal(err)
	}
	upDownUp(t, m, driver, db, `select name from sqlite_master where type = 'table' and name not like 'sqlite_%' order by 1`)
}

// upDownUp goes up, all the way down and up again, and looks each time.
func upDownUp(t *testing.T, m *migrate.Migrate, driver database.Driver, db *sql.DB, list string) {
	t.Helper()
	t.Cleanup(func() {
		if err := errors.Join(m.Close()); err != nil {
			t.Error(err)
		}
	})
	tables := []string{
		"inbox", "inbox_consumers", "inbox_guard", "inbox_guard_target", "inbox_horizons",
		versionTable, "inbox_parked", "inbox_runs", "inbox_schema", "inbox_starts", "inbox_steps",
	}
	for range 2 {
		if err := m.Up(); err != nil {
			t.Fatalf("up: %v", err)
		}
		if version, dirty, err := driver.Version(); err != nil || dirty || version != migrations.Version {
			t.Errorf("version %d, dirty %t, error %v", version, dirty, err)
		}
		if got := names(t, db, list); !slices.Equal(got, tables) {
			t.Errorf("tables %v, want %v", got, tables)
		}
		if got := names(t, db, "select version from inbox_schema"); !slices.Equal(got, []string{fmt.Sprint(migrations.Version)}) {
			t.Errorf("inbox_schema says %v", got)
		}
		if err := m.Up(); !errors.Is(err, migrate.ErrNoChange) {
			t.Errorf("up once more: %v", err)
		}
		if err := m.Down(); err != nil {
			t.Fatalf("down: %v", err)
		}
		if got := names(t, db, list); !slices.Equal(got, []string{versionTable}) {
			t.Errorf("tables left: %v", got)
		}
	}
}

func names(t *testing.T, db *sql.DB, query string) []string {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var all []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		all = append(all, name)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

func openDatabase(t *testing.T, driver, source string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, source)
	if err != nil {
		t.Fatal(err)
	}
	if err := db.PingContext(context.WithoutCancel(t.Context())); err != nil {
		t.Fatal(err)
	}
	return db
}
