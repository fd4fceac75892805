package inboxsql_test

import (
	"database/sql"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/migrations"
)

func TestAdviseSQLite(t *testing.T) {
	t.Parallel()
	change := func(old, to string) func(string) string {
		return func(dsn string) string { return strings.ReplaceAll(dsn, old, to) }
	}
	overdue := `insert into inbox_parked (consumer, message_key, state, reason, next_attempt_at, parked_at, updated_at)
		values ('billing', 'k', 'retry', 'attempt failed', (unixepoch() - {age}) * 1000000, 0, 0)`
	for name, c := range map[string]struct {
		dsn      func(string) string
		sql      string
		code     string
		severity inbox.Severity
	}{
		"as it should be":    {},
		"extra":              {dsn: change("FULL", "EXTRA")},
		"not overdue":        {sql: strings.ReplaceAll(overdue, "{age}", "240")},
		"overdue":            {sql: strings.ReplaceAll(overdue, "{age}", "360"), code: "parked_overdue", severity: inbox.SeverityWarning},
		"synchronous normal": {dsn: change("FULL", "NORMAL"), code: "synchronous", severity: inbox.SeverityError},
		"rollback journal":   {dsn: change("WAL", "DELETE"), code: "journal_mode", severity: inbox.SeverityInfo},
		"journal in memory":  {dsn: change("WAL", "MEMORY"), code: "journal_mode", severity: inbox.SeverityError},
		"no foreign keys":    {dsn: change("foreign_keys(1)", "foreign_keys(0)"), code: "foreign_keys", severity: inbox.SeverityError},
		"no patience":        {dsn: change("busy_timeout(5000)", "busy_timeout(0)"), code: "busy_timeout", severity: inbox.SeverityWarning},
		"exclusive":          {dsn: change("foreign_keys(1)", "foreign_keys(1)&_pragma=locking_mode(EXCLUSIVE)"), code: "locking_mode", severity: inbox.SeverityWarning},
		"query only":         {dsn: change("_txlock", "_pragma=query_only(1)&_txlock"), code: "query_only", severity: inbox.SeverityError},
		"in memory": {
			dsn: func(string) string {
				return "file::memory:?_pragma=foreign_keys(1)&_pragma=synchronous(FULL)&_pragma=busy_timeout(9)"
			},
			code: "in_memory", severity: inbox.SeverityError,
		},
		"no tables": {dsn: func(string) string { return inboxsql.SQLiteDSN(filepath.Join(t.TempDir(), "new.db")) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "inbox.db")
			dsn := inboxsql.SQLiteDSN(path)
			if c.dsn != nil {
				dsn = c.dsn(dsn)
			}
			if strings.Contains(dsn, path) {
				// The journal mode is the file's.
				made, err := sql.Open("sqlite", strings.NewReplacer("WAL", "DELETE").Replace(inboxsql.SQLiteDSN(path)))
				if err != nil {
					t.Fatal(err)
				}
				mustExec(t, made, migration(t, migrations.SQLite()))
				if c.sql != "" {
					mustExec(t, made, c.sql)
				}
				if err := made.Close(); err != nil {
					t.Fatal(err)
				}
			}
			db, err := sql.Open("sqlite", dsn)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = db.Close() })
			store, err := inboxsql.New(db)
			if err != nil {
				t.Fatal(err)
			}
			found, err := store.Advise(t.Context(), inbox.AdviceRequest{Consumer: "billing"})
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case c.code == "" && len(found) > 0:
				t.Errorf("found %+v", found)
			case c.code == "":
			case len(found) != 1 || found[0].Code != c.code || found[0].Severity != c.severity:
				t.Errorf("found %+v, want %s %s", found, c.severity, c.code)
			case found[0].Setting == "" || found[0].Value == "" || found[0].Meaning == "" || found[0].Advice == "":
				t.Errorf("%+v does not say everything", found[0])
			}
			if err := db.PingContext(t.Context()); err != nil || db.Stats().InUse != 0 {
				t.Errorf("the connection is not in order: %v, %+v", err, db.Stats())
			}
		})
	}
}

// The judgement is that of package inboxpgx; here is what is different.
func TestAdvisePostgres(t *testing.T) {
	t.Parallel()
	url := postgresURL(t)
	bounded := inbox.AdviceRequest{HandlerTimeout: 30 * time.Second, LockTimeout: time.Second}
	for name, c := range map[string]struct {
		settings map[string]string
		mode     pgx.QueryExecMode
		request  inbox.AdviceRequest
		code     string
		severity inbox.Severity
	}{
		"idle, bounded": {
			settings: map[string]string{"idle_in_transaction_session_timeout": "10s"}, request: bounded,
			code: "idle_in_transaction", severity: inbox.SeverityInfo,
		},
		"idle, no bound": {
			settings: map[string]string{"idle_in_transaction_session_timeout": "1h"},
			code:     "idle_in_transaction", severity: inbox.SeverityWarning,
		},
		"read only": {
			settings: map[string]string{"default_transaction_read_only": "on"}, mode: pgx.QueryExecModeSimpleProtocol, request: bounded,
			code: "read_only", severity: inbox.SeverityError,
		},
		"fsync": {request: bounded, code: "fsync", severity: inbox.SeverityError},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, err := pgx.ParseConfig(url)
			if err != nil {
				t.Fatal(err)
			}
			cfg.DefaultQueryExecMode = max(c.mode, cfg.DefaultQueryExecMode)
			for k, v := range c.settings {
				cfg.RuntimeParams[k] = v
			}
			db := openConfig(t, cfg)
			for _, conns := range []int{0, 1, 2} {
				db.SetMaxOpenConns(conns)
				found := adviseOn(t, db, c.request)
				i := slices.IndexFunc(found, func(f inbox.Finding) bool { return f.Code == c.code })
				if i < 0 || found[i].Severity != c.severity {
					t.Errorf("found %+v, want %s %s", found, c.severity, c.code)
				}
				if slices.ContainsFunc(found, func(f inbox.Finding) bool { return strings.HasPrefix(f.Code, "pooler") }) {
					t.Errorf("found a pooler, which there is not: %+v", found)
				}
			}
		})
	}
}

func TestAdvisePooler(t *testing.T) {
	t.Parallel()
	postgresURL(t)
	url := os.Getenv("ACKAFTER_TEST_PGBOUNCER")
	if url == "" {
		if os.Getenv("ACKAFTER_TEST_REQUIRE") == "1" {
			t.Fatal("ACKAFTER_TEST_PGBOUNCER is not set, but ACKAFTER_TEST_REQUIRE=1")
		}
		t.Skip("ACKAFTER_TEST_PGBOUNCER is not set")
	}
	for mode, want := range map[pgx.QueryExecMode]string{
		pgx.QueryExecModeCacheStatement: "pooler_prepared",
		pgx.QueryExecModeExec:           "pooler_transaction",
	} {
		cfg, err := pgx.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		cfg.DefaultQueryExecMode = mode
		db := openConfig(t, cfg)
		found := adviseOn(t, db, inbox.AdviceRequest{})
		if !slices.ContainsFunc(found, func(f inbox.Finding) bool { return f.Code == want }) {
			t.Errorf("%v: found %+v, want %s", mode, found, want)
		}
	}
}

func adviseOn(t *testing.T, db *sql.DB, r inbox.AdviceRequest) []inbox.Finding {
	t.Helper()
	store, err := inboxsql.NewWithConfig(db, &inboxsql.Config{Dialect: inboxsql.PostgreSQL})
	if err != nil {
		t.Fatal(err)
	}
	found, err := store.Advise(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if n := db.Stats().InUse; n != 0 {
		t.Errorf("%d connections were not given back", n)
	}
	return found
}
