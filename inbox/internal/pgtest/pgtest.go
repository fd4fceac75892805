// Package pgtest gives tests PostgreSQL schemas and databases of their own. The
// servers come from the environment.
package pgtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"io/fs"
	"net/url"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/migrations"
)

// The variables that name servers, as URLs.
const (
	Postgres   = "ACKAFTER_TEST_POSTGRES"
	Postgres18 = "ACKAFTER_TEST_POSTGRES18"
	// PgBouncer is in transaction mode, in front of the server of Postgres.
	PgBouncer = "ACKAFTER_TEST_PGBOUNCER"
	require   = "ACKAFTER_TEST_REQUIRE"
)

// URL returns the server that variable names. Without one the test is skipped,
// or fails when ACKAFTER_TEST_REQUIRE is 1.
func URL(tb testing.TB, variable string) string {
	tb.Helper()
	if u := os.Getenv(variable); u != "" {
		return u
	}
	if os.Getenv(require) == "1" {
		tb.Fatalf("%s is not set and %s=1", variable, require)
	}
	tb.Skipf("%s is not set", variable)
	return ""
}

// DB is a place for one test's tables.
type DB struct {
	URL string
	// Schema is the schema with the tables; empty when the database is the
	// test's own.
	Schema string
}

// Schema returns a new schema on the server at url, with the inbox tables, that
// is dropped after the test.
func Schema(tb testing.TB, url string) DB {
	tb.Helper()
	db := Empty(tb, url)
	db.Migrate(tb)
	return db
}

// Empty is Schema without tables.
func Empty(tb testing.TB, url string) DB {
	tb.Helper()
	name := unique()
	admin(tb, url, "create schema "+name)
	tb.Cleanup(func() { admin(tb, url, "drop schema if exists "+name+" cascade") })
	return DB{URL: url, Schema: name}
}

// Database returns a new database with the inbox tables, made through the
// server at direct and reached at through: a pooler does not let tests choose a
// schema.
func Database(tb testing.TB, direct, through string) DB {
	tb.Helper()
	name := unique()
	admin(tb, direct, "create database "+name+" template template0")
	tb.Cleanup(func() { admin(tb, direct, "drop database if exists "+name+" with (force)") })
	DB{URL: withPath(tb, direct, name)}.Migrate(tb)
	return DB{URL: withPath(tb, through, name)}
}

// Migrate makes the inbox tables.
func (d DB) Migrate(tb testing.TB) {
	tb.Helper()
	files, err := fs.Glob(migrations.Postgres(), "*.up.sql")
	if err != nil || len(files) == 0 {
		tb.Fatalf("pgtest: migrations: %v, %v", files, err)
	}
	ctx, cancel := context.WithTimeout(tb.Context(), time.Minute)
	defer cancel()
	config := d.config(tb)
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	defer conn.Close(ctx) //nolint:errcheck // The test is not about it.
	for _, f := range files {
		text, err := fs.ReadFile(migrations.Postgres(), f)
		if err != nil {
			tb.Fatalf("pgtest: %v", err)
		}
		if _, err := conn.Exec(ctx, string(text)); err != nil {
			tb.Fatalf("pgtest: %s: %v", f, err)
		}
	}
}

func (d DB) config(tb testing.TB) *pgxpool.Config {
	tb.Helper()
	config, err := pgxpool.ParseConfig(d.URL)
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	if d.Schema != "" {
		config.ConnConfig.RuntimeParams["search_path"] = d.Schema
	}
	config.MaxConns = 8
	return config
}

// Pool opens a pool of at most 8 connections that find the tables without a
// schema's name, and closes it after the test. change may be nil.
func (d DB) Pool(tb testing.TB, change func(*pgxpool.Config)) *pgxpool.Pool {
	tb.Helper()
	config := d.config(tb)
	if change != nil {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(tb.Context(), config)
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	tb.Cleanup(pool.Close)
	return pool
}

func admin(tb testing.TB, url, sql string) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(tb.Context()), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	defer conn.Close(ctx) //nolint:errcheck // The test is not about it.
	if _, err := conn.Exec(ctx, sql); err != nil {
		tb.Errorf("pgtest: %s: %v", sql, err)
	}
}

func unique() string {
	b := make([]byte, 8)
	_, _ = rand.Read(b)
	return "ackafter_" + hex.EncodeToString(b)
}

func withPath(tb testing.TB, server, database string) string {
	tb.Helper()
	u, err := url.Parse(server)
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	u.Path = "/" + database
	return u.String()
}
