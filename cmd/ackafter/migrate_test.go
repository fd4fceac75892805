package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ackafter/ackafter/migrations"
)

func TestMigrateUpDownUp(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		need := fmt.Sprint(migrations.Version)
		for range 2 {
			term.run("migrate", "up").expect(t, exitOK, "brought from version 0 to "+need)
			term.run("migrate", "up").expect(t, exitOK, "have version "+need+" already")
			term.run("migrate", "status").expect(t, exitOK, "have version  "+need+"\n", "need version  "+need+"\n")
			term.run("migrate", "down", "--yes").expect(t, exitOK, "dropped", "0 stored keys", "0 parked messages")
			term.run("migrate", "down", "--yes").expect(t, exitOK, "there are no inbox tables")
			term.run("migrate", "status").expect(t, exitFailure, "none, there are no tables", "the inbox tables are missing (make them with `ackafter migrate up`)")
		}
	})
}

func TestMigrateJSON(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		decode := func(o output, v any) {
			t.Helper()
			if err := json.Unmarshal([]byte(o.stdout), v); err != nil {
				t.Fatalf("%v\n%s", err, o.stdout)
			}
		}
		var moved migratedView
		decode(term.run("migrate", "up", "--json"), &moved)
		if moved.From != 0 || moved.To != migrations.Version || moved.Database == "" {
			t.Errorf("up: %+v", moved)
		}
		var status statusView
		decode(term.run("migrate", "status", "--json"), &status)
		if status.Have != migrations.Version || status.Need != migrations.Version || !status.Current {
			t.Errorf("status: %+v", status)
		}
		for i := range 3 {
			term.insertKey(keyRow{consumer: "billing", key: fmt.Sprint("K", i)})
		}
		var dropped droppedView
		decode(term.run("migrate", "down", "--yes", "--json"), &dropped)
		if dropped.From != migrations.Version || dropped.Keys != 3 || dropped.Parked != 0 {
			t.Errorf("down: %+v", dropped)
		}
		// Not current: the JSON is there, and the exit code tells as well.
		o := term.run("migrate", "status", "--json")
		decode(o, &status)
		if o.code != exitFailure || status.Have != 0 || status.Current {
			t.Errorf("status: exit code %d, %+v", o.code, status)
		}
	})
}

func TestMigrateDownAsks(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		term.must("migrate", "up")
		for _, answer := range []string{"", "no\n", "y\n", "YES\n", "\n"} {
			term.stdin = strings.NewReader(answer)
			term.run("migrate", "down").expect(t, exitFailure, "0 stored keys", "not confirmed; nothing was changed")
		}
		term.run("migrate", "status").expect(t, exitOK)
		for _, answer := range []string{"yes\n", " yes "} {
			term.must("migrate", "up")
			term.stdin = strings.NewReader(answer)
			term.run("migrate", "down").expect(t, exitOK, "Type \"yes\" to go on", "dropped")
		}
	})
}

// A signal ends the question.
func TestMigrateDownInterrupted(t *testing.T) {
	t.Parallel()
	term := onSQLite(t)
	term.must("migrate", "up")
	ctx, cancel := context.WithCancel(t.Context())
	term.ctx = ctx
	reader, writer := io.Pipe()
	defer func() { _ = writer.Close() }()
	term.stdin = readerFunc(func(p []byte) (int, error) {
		cancel() // The question stands.
		return reader.Read(p)
	})
	term.run("migrate", "down").expect(t, exitFailure, "interrupted; nothing was changed")
	term.ctx = nil
	term.run("migrate", "status").expect(t, exitOK)
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// Any number of "migrate up" may run at once.
func TestMigrateUpConcurrently(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		const together = 6
		outputs := make([]output, together)
		var wg sync.WaitGroup
		for i := range outputs {
			wg.Go(func() { outputs[i] = term.run("migrate", "up") })
		}
		wg.Wait()
		for _, o := range outputs {
			o.expect(t, exitOK)
		}
		term.run("migrate", "status").expect(t, exitOK)
		db := term.open()
		defer func() { _ = db.Close() }()
		var rows int
		if err := db.QueryRowContext(t.Context(), "select count(*) from "+migrations.GooseTable+" where version_id > 0").Scan(&rows); err != nil {
			t.Fatal(err)
		}
		if rows != migrations.Version {
			t.Errorf("%s has %d versions, want %d", migrations.GooseTable, rows, migrations.Version)
		}
	})
}

// A second migration waits for the first, no longer than --timeout.
func TestMigrateUpWaits(t *testing.T) {
	t.Parallel()
	term := onPostgres(t)
	db := term.open()
	defer func() { _ = db.Close() }()
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	// The lock is the database's: other tests would take it too, so this one
	// has a database of its own in a schema of a fresh name, and is short.
	if _, err := conn.ExecContext(t.Context(), "select pg_advisory_lock($1)", migrateLock); err != nil {
		t.Fatal(err)
	}
	term.run("migrate", "up", "--timeout", "300ms").expect(t, exitFailure,
		"not done within 300ms (--timeout)", "another migration is running in this database")
	if _, err := conn.ExecContext(t.Context(), "select pg_advisory_unlock($1)", migrateLock); err != nil {
		t.Fatal(err)
	}
	term.run("migrate", "up").expect(t, exitOK)
}

// The tables may have been made and dropped by other tools.
func TestMigrateAfterOtherTools(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		ups, downs := term.run("migrate", "sql").stdout, term.run("migrate", "sql", "--down").stdout
		if term.schema == "" {
			term.makeFile()
		} else {
			term.exec(`create schema "` + term.schema + `"`)
		}
		// Made by a shell: nothing to do; dropped here.
		term.exec(ups)
		term.run("migrate", "up").expect(t, exitOK, "already")
		term.run("migrate", "down", "--yes").expect(t, exitOK, "dropped")
		// Made here, dropped by a shell, made here again.
		term.run("migrate", "up").expect(t, exitOK, "from version 0")
		term.exec(downs)
		term.run("migrate", "status").expect(t, exitFailure)
		term.run("migrate", "up").expect(t, exitOK, "from version 0")
		term.run("migrate", "status").expect(t, exitOK)
	})
}

func (term *terminal) makeFile() {
	term.t.Helper()
	if err := os.WriteFile(strings.TrimPrefix(term.url, "sqlite:"), nil, 0o600); err != nil {
		term.t.Fatal(err)
	}
}

// Tables of a newer release are left alone; the error says both versions.
func TestMigrateNewerTables(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		term.must("migrate", "up")
		term.exec("update inbox_schema set version = 99")
		both := fmt.Sprintf("have version 99, this release needs version %d; use a newer release of ackafter", migrations.Version)
		for _, args := range [][]string{{"migrate", "up"}, {"migrate", "down", "--yes"}, {"migrate", "status"}, {"show", "K"}, {"dead", "list"}} {
			term.run(args...).expect(t, exitFailure, both)
		}
	})
}

func TestMissingTablesNameTheCommand(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		if term.schema == "" {
			term.makeFile()
		}
		for _, args := range [][]string{{"show", "K"}, {"dead", "list"}, {"dead", "show", "1"}} {
			term.run(args...).expect(t, exitFailure, "the inbox tables are missing (make them with `ackafter migrate up`)")
		}
	})
}

// Only "migrate up" makes a file.
func TestMissingFile(t *testing.T) {
	t.Parallel()
	term := onSQLite(t)
	path := strings.TrimPrefix(term.url, "sqlite:")
	for _, args := range [][]string{{"migrate", "status"}, {"migrate", "down", "--yes"}, {"show", "K"}, {"dead", "list"}} {
		term.run(args...).expect(t, exitFailure, "there is no file "+path+"; run: ackafter migrate up")
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("a command made the file")
	}
	term.url = "sqlite:" + filepath.Join(path, "missing", "inbox.db")
	term.run("migrate", "up").expect(t, exitFailure, "make the database file")
}

func TestSQLiteURI(t *testing.T) {
	t.Parallel()
	term := onSQLite(t)
	path := strings.TrimPrefix(term.url, "sqlite:")
	for _, url := range []string{"file:" + path, "file:" + path + "?cache=private", "sqlite://" + path, "sqlite3:" + path} {
		term.url = url
		term.must("migrate", "up")
		term.must("migrate", "status")
		term.must("migrate", "down", "--yes")
	}
}

func TestUnreachableDatabase(t *testing.T) {
	t.Parallel()
	term := &terminal{t: t, url: "postgres://app:verysecret@127.0.0.1:1/shop?connect_timeout=5"}
	for _, args := range [][]string{{"migrate", "up"}, {"migrate", "status"}, {"show", "K"}, {"dead", "list"}} {
		o := term.run(args...)
		o.expect(t, exitFailure, `connect to PostgreSQL database "shop" at 127.0.0.1:1`)
		if strings.Contains(o.stderr+o.stdout, "verysecret") {
			t.Errorf("the password is shown:\n%s", o.stderr)
		}
	}
}

// A database that does not answer is given up after --timeout.
func TestSilentDatabase(t *testing.T) {
	t.Parallel()
	address, _ := silentServer(t)
	term := &terminal{t: t, url: "postgres://app:verysecret@" + address + "/shop?sslmode=disable"}
	start := time.Now()
	o := term.run("migrate", "status", "--timeout", "200ms")
	o.expect(t, exitFailure, "not done within 200ms (--timeout)")
	if strings.Contains(o.stderr, "verysecret") {
		t.Errorf("the password is shown:\n%s", o.stderr)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
}

// Nothing is made in the wrong schema when the connection does not keep
// search_path.
func TestMigrateChecksSearchPath(t *testing.T) {
	t.Parallel()
	term := onPostgres(t)
	a, err := parseAddress(term.url, term.schema)
	if err != nil {
		t.Fatal(err)
	}
	db, err := openDatabase(t.Context(), a) // Without forMigrations.
	if err != nil {
		t.Fatal(err)
	}
	defer db.close()
	if _, err := db.makeTables(t.Context()); err == nil || !strings.Contains(err.Error(), "search_path is not kept") {
		t.Errorf("up: %v", err)
	}
	if err := db.dropTables(t.Context()); err == nil || !strings.Contains(err.Error(), "search_path is not kept") {
		t.Errorf("down: %v", err)
	}
}

// Everything works through a pooler in transaction mode.
func TestBehindPooler(t *testing.T) {
	t.Parallel()
	term := onPooler(t)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() { term.run("migrate", "up").expect(t, exitOK) })
	}
	wg.Wait()
	for range 10 {
		term.run("migrate", "status").expect(t, exitOK)
		term.run("show", "K").expect(t, exitNotFound)
		term.run("dead", "list").expect(t, exitOK)
		term.run("dead", "show", "1").expect(t, exitNotFound)
	}
	term.run("migrate", "down", "--yes").expect(t, exitOK, "dropped")
}

func TestMigrateSQLPrints(t *testing.T) {
	t.Parallel()
	term := &terminal{t: t}
	for name, files := range map[string]fs.FS{"postgres": migrations.Postgres(), "sqlite": migrations.SQLite()} {
		up, err := fs.ReadFile(files, "0001_inbox.up.sql")
		if err != nil {
			t.Fatal(err)
		}
		if got := term.must("migrate", "sql", "--dialect", name); !strings.HasPrefix(got, string(up)) {
			t.Errorf("%s: it does not begin with the first file:\n%s", name, got)
		}
		down, err := fs.ReadFile(files, "0001_inbox.down.sql")
		if err != nil {
			t.Fatal(err)
		}
		if got := term.must("migrate", "sql", "--dialect", name, "--down"); !strings.HasSuffix(got, string(down)) {
			t.Errorf("%s: it does not end with the first file's way down:\n%s", name, got)
		}
	}
	got := term.must("migrate", "sql", "--dialect", "postgres", "--schema", `a"b`)
	if want := "create schema if not exists \"a\"\"b\";\nset search_path to \"a\"\"b\";\n"; !strings.HasPrefix(got, want) {
		t.Errorf("it does not begin with %q:\n%s", want, got)
	}
	// No server is needed for the dialect of a URL.
	term.url = "postgres://127.0.0.1:1/shop"
	if got := term.must("migrate", "sql"); !strings.Contains(got, "timestamptz") {
		t.Error("the dialect is not that of the URL")
	}
}

func TestMigrateSQLWritesFiles(t *testing.T) {
	t.Parallel()
	for format, want := range map[string][]string{
		"plain":          {"0001_inbox.down.sql", "0001_inbox.up.sql", "0002_parking.down.sql", "0002_parking.up.sql"},
		"golang-migrate": {"0001_inbox.down.sql", "0001_inbox.up.sql", "0002_parking.down.sql", "0002_parking.up.sql"},
		"goose":          {"0001_inbox.sql", "0002_parking.sql"},
	} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			term := &terminal{t: t}
			dir := filepath.Join(t.TempDir(), "db", "inbox")
			args := []string{"migrate", "sql", "--dialect", "sqlite", "--format", format, "--dir", dir}
			first := term.must(args...)
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, e := range entries {
				names = append(names, e.Name())
				if !strings.Contains(first, "written "+filepath.Join(dir, e.Name())) {
					t.Errorf("%s is not named:\n%s", e.Name(), first)
				}
			}
			if !slices.Equal(names, want) {
				t.Errorf("files %v, want %v", names, want)
			}
			// Again: nothing changes. After a change: it is not overwritten.
			if again := term.must(args...); strings.Contains(again, "written") {
				t.Errorf("written again:\n%s", again)
			}
			path := filepath.Join(dir, want[0])
			if err := os.WriteFile(path, []byte("-- mine"), 0o600); err != nil {
				t.Fatal(err)
			}
			term.run(args...).expect(t, exitFailure, path+" is there already and differs")
			if b, err := os.ReadFile(path); err != nil || string(b) != "-- mine" {
				t.Errorf("the file was changed: %q, %v", b, err)
			}
		})
	}
}
