package inboxpgx_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
)

func TestPostgres(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t, pgtest.Postgres)
	inboxtest.RunStore(t, pgxharness.Harness(func(tb testing.TB) (pgtest.DB, func(*pgxpool.Config)) { return pgtest.Schema(tb, url), nil }))
}

func TestPostgres18(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t, pgtest.Postgres18)
	inboxtest.RunStore(t, pgxharness.Harness(func(tb testing.TB) (pgtest.DB, func(*pgxpool.Config)) { return pgtest.Schema(tb, url), nil }))
}

// The query modes of pgx in which no statement stays prepared, and those that
// poolers need.
var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

func TestPostgresModes(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t, pgtest.Postgres)
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			h := pgxharness.Harness(func(tb testing.TB) (pgtest.DB, func(*pgxpool.Config)) {
				return pgtest.Schema(tb, url), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }
			})
			h.Isolations = nil // Levels and modes have nothing to do with each other.
			inboxtest.RunStore(t, h)
		})
	}
}

func TestPgBouncer(t *testing.T) {
	t.Parallel()
	direct, pooler := pgtest.URL(t, pgtest.Postgres), pgtest.URL(t, pgtest.PgBouncer)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			h := pgxharness.Harness(func(tb testing.TB) (pgtest.DB, func(*pgxpool.Config)) {
				return pgtest.Database(tb, direct, pooler), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }
			})
			h.Isolations = nil
			inboxtest.RunStore(t, h)
		})
	}
}
