package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/inbox/inboxsql"
)

// database is an open database.
type database struct {
	*address

	// sql is there for both kinds, pool for PostgreSQL only.
	sql  *sql.DB
	pool *pgxpool.Pool

	// inbox answers the questions about keys and parked messages.
	inbox keeper
}

// keeper is the part of a store that this program uses.
type keeper interface {
	inbox.Inspector
	inbox.Undertaker
	inbox.Advisor
	Check(ctx context.Context) error
}

// openDatabase connects to the database at a.
func openDatabase(ctx context.Context, a *address) (*database, error) {
	if a.postgres != nil {
		return openPostgres(ctx, a)
	}
	return openSQLite(ctx, a)
}

func openPostgres(ctx context.Context, a *address) (*database, error) {
	pool, err := pgxpool.NewWithConfig(ctx, a.postgres)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", a.label, err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, fmt.Errorf("connect to %s: %w", a.label, err)
	}
	db := &database{address: a, sql: stdlib.OpenDBFromPool(pool), pool: pool}
	if db.inbox, err = inboxpgx.NewWithConfig(pool, &inboxpgx.Config{Schema: a.schema}); err != nil {
		db.close()
		return nil, err
	}
	return db, nil
}

// openSQLite opens the file. It does not make one: see makeFile.
func openSQLite(ctx context.Context, a *address) (*database, error) {
	if _, err := os.Stat(a.path); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("there is no file %s; run: ackafter migrate up", a.path)
	}
	file, err := sql.Open("sqlite", a.source)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", a.label, err)
	}
	db := &database{address: a, sql: file}
	if err := file.PingContext(ctx); err != nil {
		db.close()
		return nil, fmt.Errorf("open %s: %w", a.label, err)
	}
	if db.inbox, err = inboxsql.New(file); err != nil { //nolint:contextcheck // The driver is known: nothing is asked.
		db.close()
		return nil, err
	}
	return db, nil
}

// makeFile makes an empty file when there is none, which SQLite takes for an
// empty database.
func (a *address) makeFile() error {
	if a.postgres != nil {
		return nil
	}
	f, err := os.OpenFile(a.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("make the database file: %w", err)
	}
	return f.Close()
}

// table returns the qualified name of one of the inbox's tables.
func (db *database) table(name string) string {
	if db.schema == "" {
		return name
	}
	return pgx.Identifier{db.schema, name}.Sanitize()
}

func (db *database) close() {
	// Nothing is left to be written: the errors would tell nothing.
	_ = db.sql.Close()
	if db.pool != nil {
		db.pool.Close()
	}
}

// clock returns the time of the database.
func (db *database) clock(ctx context.Context) (time.Time, error) {
	if db.pool == nil {
		return time.Now(), nil // SQLite runs in this process.
	}
	var now time.Time
	if err := db.sql.QueryRowContext(ctx, "select clock_timestamp()").Scan(&now); err != nil {
		return now, fmt.Errorf("read the database's clock: %w", err)
	}
	return now, nil
}
