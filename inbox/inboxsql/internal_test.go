package inboxsql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/inbox"
)

func TestEndsTransaction(t *testing.T) {
	t.Parallel()
	for query, want := range map[string]bool{
		"":                                   false,
		";;":                                 false,
		"select 1":                           false,
		"commit":                             true,
		" \n\tCoMmIt ;":                      true,
		"END":                                true,
		"abort":                              true,
		"begin":                              true,
		"rollback":                           true,
		"rollback work":                      true,
		"rollback; select 1":                 true,
		"start transaction":                  true,
		"prepare transaction 'x'":            true,
		"commit prepared 'x'":                true,
		"rollback to a":                      false,
		"ROLLBACK WORK TO SAVEPOINT a":       false,
		"rollback transaction to a":          false,
		"savepoint a; release a":             false,
		"prepare p as select 1":              false,
		"-- note\ncommit":                    true,
		"-- commit":                          false,
		"-- ; \n commit":                     true,
		"/* a /* b */ c */ commit":           true,
		"/* ; commit ; */ select 1":          false,
		"select 1; commit":                   true,
		"select 'it''s; commit; '":           false,
		"select 'a'; commit":                 true,
		`select "a;commit;"`:                 false,
		"select `a;commit;`":                 false,
		`select E'\'; commit; '`:             false,
		`select e'\\'; commit`:               true,
		`select E'a''\'; commit; '`:          false,
		`select 'a\'; commit; --'`:           true, // A plain string ends at the second quote.
		"select $$ ; commit; $$":             false,
		"select $a$ ; commit; $b$ ; $a$":     false,
		"select $a$ x $a$; commit":           true,
		"update t set a = $1; commit":        true,
		"insert into t values ($1, $2)":      false,
		"select commit from t":               false,
		"update t set begin = 1 where x = 2": false,
		"create table end_of_day (id int)":   false,
		"create trigger a after insert on b begin insert into c values (1); end":              false,
		"create temp trigger a after insert on b begin delete from c; end":                    false,
		"create or replace function f() returns int language sql begin atomic; select 1; end": false,
		"create table a (b text default ';commit;')":                                          false,
		"do $$ begin perform 1; end $$":                                                       false,
		"select a, b, c, d, e, f from t where x = 'y;z'; commit":                              true,
		"commit/**/":                            true,
		"select 1 /* unfinished ; commit":       false,
		"select 'unfinished ; commit":           false,
		"insert into tä values ('ö'); rollback": true,
	} {
		if got := endsTransaction(query); got != want {
			t.Errorf("endsTransaction(%q) = %v, want %v", query, got, want)
		}
	}
	for query, want := range map[string]bool{
		"rollback to a": true, " ROLLBACK TRANSACTION TO SAVEPOINT a": true, "rollback": false, "": false, "release a": false,
	} {
		if got := rollsBackToSavepoint(query); got != want {
			t.Errorf("rollsBackToSavepoint(%q) = %v, want %v", query, got, want)
		}
	}
}

func FuzzEndsTransaction(f *testing.F) {
	for _, s := range []string{"commit", "select 'a;b'", "$a$;$a$", "/*/**/*/", "E'\\", "`", "-- \n;"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, query string) {
		endsTransaction(query) // It ends, and does not panic.
		rollsBackToSavepoint(query)
		if !endsTransaction("commit;" + query) {
			t.Error("a first COMMIT is missed")
		}
	})
}

type stateError string

func (e stateError) Error() string    { return "in another language" }
func (e stateError) SQLState() string { return string(e) }

// codeError has a Code method like the errors of SQLite drivers, but is not one.
type codeError int

func (e codeError) Error() string { return "rpc" }
func (e codeError) Code() int     { return int(e) }

func TestClassifyPostgreSQL(t *testing.T) {
	t.Parallel()
	s := &Store{d: postgres{}}
	for state, want := range map[stateError]inbox.Class{
		"40001": inbox.ClassContention, "40P01": inbox.ClassContention, "55P03": inbox.ClassContention,
		"08006": inbox.ClassUnavailable, "57P01": inbox.ClassUnavailable, "57P03": inbox.ClassUnavailable,
		"53300": inbox.ClassUnavailable, "53100": inbox.ClassUnavailable, "58030": inbox.ClassUnavailable,
		"28P01": inbox.ClassUnavailable, "3D000": inbox.ClassUnavailable, "25006": inbox.ClassUnavailable,
		"25P03": inbox.ClassUnavailable, "40003": inbox.ClassUnavailable,
		"23505": inbox.ClassMessage, "22012": inbox.ClassMessage, "42P01": inbox.ClassMessage, "57014": inbox.ClassMessage,
		"25P02": inbox.ClassMessage, "XX000": inbox.ClassMessage, "x": inbox.ClassMessage,
	} {
		if got := s.Classify(fmt.Errorf("handler: %w", state)); got != want {
			t.Errorf("SQLSTATE %s: class %d, want %d", string(state), got, want)
		}
	}
}

func TestClassifyWhatTheStoreSaw(t *testing.T) {
	t.Parallel()
	lost := []error{
		driver.ErrBadConn, sql.ErrConnDone, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNREFUSED,
		&net.OpError{Op: "read", Err: errors.New("x")},
	}
	for _, d := range []dialect{sqlite{}, postgres{}} {
		s := &Store{d: d}
		for _, err := range lost {
			if got := s.Classify(fmt.Errorf("elsewhere: %w", err)); got != inbox.ClassMessage {
				t.Errorf("%v, not from this database: class %d, want ClassMessage", err, got)
			}
			if got := s.Classify(fmt.Errorf("here: %w", marked(err))); got != inbox.ClassUnavailable {
				t.Errorf("%v, from this database: class %d, want ClassUnavailable", err, got)
			}
		}
		for _, err := range []error{context.Canceled, fmt.Errorf("x: %w", context.DeadlineExceeded), errors.New("x"), codeError(5), sql.ErrNoRows} {
			if got := s.Classify(marked(err)); got != inbox.ClassMessage {
				t.Errorf("%v: class %d, want ClassMessage", err, got)
			}
		}
		for err, want := range map[error]inbox.Class{
			fmt.Errorf("x: %w", inbox.ErrInFlight):      inbox.ClassContention,
			fmt.Errorf("x: %w", inbox.ErrCommitUnknown): inbox.ClassUnavailable,
			errTimeout: inbox.ClassUnavailable,
		} {
			if got := s.Classify(err); got != want {
				t.Errorf("%v: class %d, want %d", err, got, want)
			}
		}
	}
}

// Real errors of the SQLite driver are known by their code.
func TestClassifySQLite(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x.db")
	open := func(dsn string) *sql.DB {
		db, err := sql.Open("sqlite", dsn)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close() })
		return db
	}
	db, other := open(SQLiteDSN(path)), open("file:"+path+"?_txlock=immediate")
	exec := func(db *sql.DB, query string) error {
		_, err := db.ExecContext(t.Context(), query)
		return err
	}
	if err := exec(db, "create table t (id integer primary key, n integer not null)"); err != nil {
		t.Fatal(err)
	}
	s, err := New(db)
	if err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	busy := exec(other, "insert into t values (1, 1)")
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		err  error
		want inbox.Class
	}{
		"busy":       {busy, inbox.ClassContention},
		"constraint": {exec(db, "insert into t values (1, null)"), inbox.ClassMessage},
		"no table":   {exec(db, "insert into nothing values (1)"), inbox.ClassMessage},
		"no file":    {exec(open("file:"+filepath.Join(path, "no", "such")), "select 1 from t"), inbox.ClassUnavailable},
		"read-only":  {exec(open("file:"+path+"?mode=ro"), "insert into t values (2, 2)"), inbox.ClassUnavailable},
		"full": {exec(open("file:"+path+"?_pragma=max_page_count(1)"),
			"insert into t with recursive r (i) as (select 10 union all select i + 1 from r where i < 100000) select i, i from r"), inbox.ClassUnavailable},
	} {
		if c.err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		if got := s.Classify(fmt.Errorf("x: %w", c.err)); got != c.want {
			t.Errorf("%s: %v: class %d, want %d", name, c.err, got, c.want)
		}
	}
}

func TestSQLiteDSN(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]string{
		"orders.db":       "file:orders.db?",
		"a/b c.db":        "file:a/b%20c.db?",
		"/var/x.db":       "file:///var/x.db?",
		"/var/50%?#.db":   "file:///var/50%25%3F%23.db?",
		"./x.db":          "file:./x.db?",
		"/tmp/ä;b&c=d.db": "file:///tmp/%C3%A4;b&c=d.db?",
	} {
		if got := SQLiteDSN(path); !strings.HasPrefix(got, want) {
			t.Errorf("SQLiteDSN(%q) = %s, want %s...", path, got, want)
		}
	}
	for _, name := range []string{"plain.db", "with space.db", "50%25?#&=;+.db", "ä.db", ":memory:", "file:x"} {
		path := filepath.Join(t.TempDir(), name)
		db, err := sql.Open("sqlite", SQLiteDSN(path))
		if err != nil {
			t.Fatal(err)
		}
		var file, mode string
		err = db.QueryRowContext(t.Context(), "select file, journal_mode from pragma_database_list, pragma_journal_mode where name = 'main'").Scan(&file, &mode)
		if err != nil || filepath.Base(file) != name || mode != "wal" {
			t.Errorf("file %q: opened %q in mode %q, %v", name, file, mode, err)
		}
		got, err := readSettings(t.Context(), db)
		if want := (settings{foreignKeys: 1, synchronous: 2, busyTimeout: 5000}); err != nil || got != want {
			t.Errorf("file %q: settings %+v, %v; want %+v", name, got, err, want)
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Two batches that take the same keys take them in one order.
func TestSortedClaims(t *testing.T) {
	t.Parallel()
	var cs []inbox.Claim
	for _, k := range []inbox.Key{
		{Tenant: "b", Consumer: "a", MessageKey: "a"}, {Consumer: "b", MessageKey: "a"}, {Consumer: "a", MessageKey: "é"},
		{Consumer: "a", MessageKey: "b"}, {Consumer: "a", MessageKey: "B"}, {Consumer: "a", MessageKey: "a b"},
		{Consumer: "a", MessageKey: strings.Repeat("a", 600)}, {Consumer: "B", MessageKey: "z"},
	} {
		cs = append(cs, inbox.Claim{Key: k})
	}
	sorted, err := sortedClaims(cs)
	if err != nil {
		t.Fatal(err)
	}
	var got []int
	for _, c := range sorted {
		got = append(got, c.entry)
	}
	if want := []int{7, 4, 5, 6, 3, 2, 1, 0}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
}

func TestChangesSettings(t *testing.T) {
	t.Parallel()
	for query, want := range map[string]bool{
		"set local search_path = x":            true,
		"/* x */ SET role y":                   true,
		"select 1; reset all":                  true,
		"select set_config('a', 'b', true)":    true,
		"pragma foreign_keys = off":            true,
		"update t set a = 1":                   false,
		"insert into t values ('set local x')": false,
		"":                                     false,
	} {
		if got := changesSettings(query); got != want {
			t.Errorf("changesSettings(%q) = %v, want %v", query, got, want)
		}
	}
}
