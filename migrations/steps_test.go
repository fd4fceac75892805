package migrations_test

import (
	"database/sql"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"testing"

	"github.com/pressly/goose/v3"

	"github.com/ackafter/ackafter/migrations"
)

func TestSQLiteStepByStep(t *testing.T) {
	t.Parallel()
	db := openSQLite(t, filepath.Join(t.TempDir(), "inbox.db"))
	stepByStep(t, db, goose.DialectSQLite3, migrations.SQLite(), "1700000000000000")
}

func TestPostgresStepByStep(t *testing.T) {
	t.Parallel()
	db, _ := openPostgres(t)
	stepByStep(t, db, goose.DialectPostgres, migrations.Postgres(), "'2023-11-14 22:13:20Z'")
}

// stepByStep has rows in the tables while their version changes. at is a time as
// the dialect writes it.
func stepByStep(t *testing.T, db *sql.DB, dialect goose.Dialect, files fs.FS, at string) {
	t.Helper()
	p := provider(t, db, dialect, files)
	if _, err := p.UpTo(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	insert := func(key, state string) {
		t.Helper()
		execAll(t, db, fmt.Appendf(nil, `insert into inbox_parked (consumer, message_key, state, reason, body, parked_at, updated_at)
			values ('billing', '%s', '%s', 'attempts exhausted', 'body', %s, %s)`, key, state, at, at))
	}
	want := func(query string, want ...string) {
		t.Helper()
		if got := column(t, db, query); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
	const states = "select message_key || ' ' || state from inbox_parked order by message_key"
	execAll(t, db, fmt.Appendf(nil, "insert into inbox (consumer, message_key, processed_at) values ('billing', 'done', %s)", at))
	insert("dead", "dead")
	insert("retry", "retry")
	for range 2 {
		if _, err := p.UpTo(t.Context(), 2); err != nil {
			t.Fatalf("from 1 to 2: %v", err)
		}
		want("select version from inbox_schema", "2")
		want("select message_key from inbox_parked where dead_at = parked_at", "dead")
		want("select message_key from inbox_parked where failure = '' order by message_key", "dead", "retry")
		insert("gone", "discarded")
		want(states, "dead dead", "gone discarded", "retry retry")
		if _, err := p.DownTo(t.Context(), 1); err != nil {
			t.Fatalf("from 2 to 1: %v", err)
		}
		want("select version from inbox_schema", "1")
		want(states, "dead dead", "gone dead", "retry retry")
		execAll(t, db, []byte("delete from inbox_parked where message_key = 'gone'"))
	}
	want("select message_key from inbox", "done")
	if _, err := db.ExecContext(t.Context(), "update inbox_parked set state = 'discarded'"); err == nil {
		t.Error("version 1 takes the state discarded")
	}
}
