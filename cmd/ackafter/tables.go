package main

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pressly/goose/v3"
	goosedb "github.com/pressly/goose/v3/database"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/migrations"
)

// queryer is a *sql.DB or a *sql.Tx.
type queryer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// tablesVersion returns the version of the inbox tables; 0 when there are none.
// Table inbox_schema decides, whichever tool made the tables.
func (db *database) tablesVersion(ctx context.Context, q queryer) (int, error) {
	exists, name := "select count(*) from sqlite_master where type = 'table' and name = $1", db.table("inbox_schema")
	if db.pool != nil {
		exists = "select count(to_regclass($1)::text)"
	}
	var n int
	if err := q.QueryRowContext(ctx, exists, name).Scan(&n); err != nil {
		return 0, fmt.Errorf("look for table inbox_schema: %w", err)
	}
	if n == 0 {
		return 0, nil
	}
	var version int
	if err := q.QueryRowContext(ctx, "select version from "+name).Scan(&version); err != nil {
		return 0, fmt.Errorf("read table inbox_schema: %w", err)
	}
	return version, nil
}

// checkVersion returns the error that an inbox with tables of version have gives.
func checkVersion(have int) error {
	switch {
	case have == 0:
		return inbox.ErrNoSchema
	case have != migrations.Version:
		return &inbox.SchemaVersionError{Have: have, Need: migrations.Version}
	}
	return nil
}

// makeTables brings the tables to the version of this release and returns the
// version they had. Several of them may run at once, on any number of machines:
// one does the work.
func (db *database) makeTables(ctx context.Context) (from int, err error) {
	err = db.exclusively(ctx, func(ctx context.Context) error {
		if err := db.makeSchema(ctx); err != nil {
			return err
		}
		if err := db.checkSearchPath(ctx); err != nil {
			return err
		}
		if from, err = db.tablesVersion(ctx, db.sql); err != nil {
			return err
		}
		if from > migrations.Version {
			return &inbox.SchemaVersionError{Have: from, Need: migrations.Version}
		}
		return db.up(ctx, from)
	})
	return from, err
}

// up goes from version have to that of this release.
func (db *database) up(ctx context.Context, have int) error {
	for have < migrations.Version {
		provider, err := db.provider(ctx)
		if err == nil {
			_, err = provider.Up(ctx)
		}
		if err == nil {
			return nil
		}
		// SQLite has no lock that outlasts a transaction. When another process
		// made the tables meanwhile, this one's transaction has failed as a
		// whole and there is nothing to complain about.
		now, lookErr := db.tablesVersion(ctx, db.sql)
		if lookErr != nil || now <= have {
			return fmt.Errorf("migrate from version %d: %w", have, err)
		}
		have = now
	}
	return nil
}

// dropTables drops everything that makeTables made, but the schema.
func (db *database) dropTables(ctx context.Context) error {
	return db.exclusively(ctx, func(ctx context.Context) error {
		if err := db.checkSearchPath(ctx); err != nil {
			return err
		}
		provider, err := db.provider(ctx)
		if err != nil {
			return err
		}
		if _, err := provider.DownTo(ctx, 0); err != nil {
			return fmt.Errorf("migrate to version 0: %w", err)
		}
		if _, err := db.sql.ExecContext(ctx, "drop table "+migrations.GooseTable); err != nil {
			return fmt.Errorf("drop table %s: %w", migrations.GooseTable, err)
		}
		return nil
	})
}

// provider returns goose, ready to go up or down from the version that the
// tables have.
func (db *database) provider(ctx context.Context) (*goose.Provider, error) {
	provider, err := goose.NewProvider(db.goose, db.sql, migrations.Goose(db.files()),
		goose.WithTableName(migrations.GooseTable),
		goose.WithDisableGlobalRegistry(true),
		goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return nil, fmt.Errorf("prepare the migrations: %w", err)
	}
	// It makes its table.
	if _, err := provider.GetDBVersion(ctx); err != nil {
		return nil, fmt.Errorf("read table %s: %w", migrations.GooseTable, err)
	}
	if err := db.agree(ctx); err != nil {
		return nil, fmt.Errorf("bring table %s in agreement with inbox_schema: %w", migrations.GooseTable, err)
	}
	return provider, nil
}

// agree makes goose's table say what inbox_schema says: another tool (psql,
// golang-migrate, a person) may have made or dropped the tables. Both are read in
// one transaction, so that no migration can come in between.
func (db *database) agree(ctx context.Context) error {
	store, err := goosedb.NewStore(db.goose, migrations.GooseTable)
	if err != nil {
		return err
	}
	tx, err := db.sql.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	version, err := db.tablesVersion(ctx, tx)
	if err != nil {
		return err
	}
	want := int64(version)
	recorded, err := store.GetLatestVersion(ctx, tx)
	if err != nil {
		return err
	}
	for v := recorded + 1; v <= want; v++ {
		if err := store.Insert(ctx, tx, goosedb.InsertRequest{Version: v}); err != nil {
			return err
		}
	}
	for v := recorded; v > want; v-- {
		if err := store.Delete(ctx, tx, v); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// makeSchema makes the schema of --schema when it is missing. It asks first,
// because "if not exists" needs the privilege to create even when it exists.
func (db *database) makeSchema(ctx context.Context) error {
	if db.schema == "" {
		return nil
	}
	var exists bool
	err := db.sql.QueryRowContext(ctx, "select exists (select from pg_namespace where nspname = $1)", db.schema).Scan(&exists)
	if err != nil {
		return fmt.Errorf("look for schema %q: %w", db.schema, err)
	}
	if exists {
		return nil
	}
	if _, err := db.sql.ExecContext(ctx, "create schema "+pgx.Identifier{db.schema}.Sanitize()); err != nil {
		return fmt.Errorf("create schema %q: %w", db.schema, err)
	}
	return nil
}

// checkSearchPath makes sure that unqualified names mean the schema of --schema: a
// pooler may have dropped the setting.
func (db *database) checkSearchPath(ctx context.Context) error {
	if db.schema == "" {
		return nil
	}
	var current sql.NullString
	if err := db.sql.QueryRowContext(ctx, "select current_schema()").Scan(&current); err != nil {
		return fmt.Errorf("read the current schema: %w", err)
	}
	if current.String != db.schema {
		return fmt.Errorf("search_path is not kept by this connection (the current schema is %q, not %q): "+
			"connect to the server itself, not through a pooler, as a user who may use the schema", current.String, db.schema)
	}
	return nil
}

// migrateLock is the advisory lock of all migrations in a database.
const migrateLock int64 = 0x61636b6166746572 // "ackafter"

// lockPoll is the time between two attempts to get it.
const lockPoll = 200 * time.Millisecond

// exclusively runs do while no other process is in it for the same PostgreSQL
// database. The lock belongs to a transaction, which makes it hold behind a
// transaction-mode pooler too. It is tried for rather than waited for: a waiting
// statement would hold up "create index concurrently".
func (db *database) exclusively(ctx context.Context, do func(context.Context) error) error {
	if db.pool == nil {
		return do(ctx)
	}
	taken := false
	for {
		tx, err := db.tryLock(ctx)
		switch {
		case err != nil && taken && ctx.Err() != nil:
			return fmt.Errorf("another migration is running in this database: %w", err)
		case err != nil:
			return fmt.Errorf("take the lock of migrations: %w", err)
		case tx != nil:
			// The end of the transaction frees the lock; it wrote nothing.
			defer func() { _ = tx.Rollback() }()
			return do(ctx)
		}
		taken = true
		select {
		case <-ctx.Done(): // The next attempt says so.
		case <-time.After(lockPoll):
		}
	}
}

// tryLock returns a transaction that holds the lock, or nil when it is taken.
func (db *database) tryLock(ctx context.Context) (_ *sql.Tx, err error) {
	tx, err := db.sql.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	locked := false
	defer func() {
		if !locked {
			_ = tx.Rollback()
		}
	}()
	// It is idle for as long as the migrations take.
	if _, err := tx.ExecContext(ctx, "set local idle_in_transaction_session_timeout = 0"); err != nil {
		return nil, err
	}
	if err := tx.QueryRowContext(ctx, "select pg_try_advisory_xact_lock($1)", migrateLock).Scan(&locked); err != nil {
		return nil, err
	}
	if !locked {
		return nil, nil
	}
	return tx, nil
}

// rowCounts is what dropping the tables would lose.
type rowCounts struct {
	Keys   int64 `json:"keys"`
	Parked int64 `json:"parked"`
}

// countLimit bounds the counting: of a large inbox only "at least" is said.
const countLimit = 1_000_000

func (db *database) countRows(ctx context.Context) (rowCounts, error) {
	var c rowCounts
	for table, n := range map[string]*int64{"inbox": &c.Keys, "inbox_parked": &c.Parked} {
		query := fmt.Sprintf("select count(*) from (select 1 from %s limit %d) x", db.table(table), countLimit) //nolint:gosec // The name is quoted.
		if err := db.sql.QueryRowContext(ctx, query).Scan(n); err != nil {
			return c, fmt.Errorf("count the rows of %s: %w", table, err)
		}
	}
	return c, nil
}
