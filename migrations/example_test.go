package migrations_test

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"log"
	"os"
	"path/filepath"

	"github.com/pressly/goose/v3"
	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/migrations"
)

// The tables are made at the start of a program, by goose as a library.
func ExampleGoose() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "inbox")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "orders.db"))
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = db.Close() }()

	// A table name of its own keeps these versions apart from your own ones.
	provider, err := goose.NewProvider(goose.DialectSQLite3, db,
		migrations.Goose(migrations.SQLite()), goose.WithTableName(migrations.GooseTable))
	if err != nil {
		log.Fatal(err)
	}
	done, err := provider.Up(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range done {
		fmt.Println("applied", m.Source.Path)
	}

	var version int
	if err := db.QueryRowContext(ctx, "select version from inbox_schema").Scan(&version); err != nil {
		log.Fatal(err)
	}
	fmt.Println("version", version, "needed", migrations.Version)
	// Output:
	// applied 0001_inbox.sql
	// applied 0002_parking.sql
	// version 2 needed 2
}

// The plain files are named for golang-migrate and run in psql as they are.
func ExamplePostgres() {
	names, err := fs.Glob(migrations.Postgres(), "*.sql")
	if err != nil {
		log.Fatal(err)
	}
	for _, name := range names {
		fmt.Println(name)
	}
	// Output:
	// 0001_inbox.down.sql
	// 0001_inbox.up.sql
	// 0002_parking.down.sql
	// 0002_parking.up.sql
}

// Without any migration tool, a new database gets its tables from one text.
func ExampleScript() {
	ctx := context.Background()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	db.SetMaxOpenConns(1) // Each connection to :memory: is a database of its own.

	script, err := migrations.Script(migrations.SQLite())
	if err != nil {
		log.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, script); err != nil {
		log.Fatal(err)
	}
	var keys int
	if err := db.QueryRowContext(ctx, "select count(*) from inbox").Scan(&keys); err != nil {
		log.Fatal(err)
	}
	fmt.Println(keys, "keys")
	// Output: 0 keys
}
