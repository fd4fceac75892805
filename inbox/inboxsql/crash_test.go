package inboxsql_test

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
)

// crashEnv makes the test program a child that is to be killed: driver, data
// source and the place where it waits for that.
const (
	crashEnv    = "ACKAFTER_TEST_CRASH"
	crashDriver = "ACKAFTER_TEST_CRASH_DRIVER"
	crashSource = "ACKAFTER_TEST_CRASH_SOURCE"
)

// Where the child waits.
const (
	afterClaim   = "after the claim"
	inHandler    = "in the handler"
	beforeCommit = "before COMMIT"
	afterCommit  = "after COMMIT"
	nowhere      = "nowhere" // it handles one message after the other
)

// crashChild is the child. It returns only if something goes wrong.
func crashChild() {
	fmt.Fprintln(os.Stderr, crashWork(os.Getenv(crashEnv)))
}

func crashWork(point string) error {
	ctx := context.Background()
	db, err := sql.Open(os.Getenv(crashDriver), os.Getenv(crashSource))
	if err != nil {
		return err
	}
	store, err := inboxsql.New(db)
	if err != nil {
		return err
	}
	for n := 0; ; n++ {
		key := fmt.Sprintf("%d-%d", os.Getpid(), n)
		if point != nowhere {
			key = "k"
		}
		if _, err := handleAt(ctx, store, key, func(reached string) {
			if reached == point {
				_, _ = fmt.Fprintln(os.Stdout, "here")
				select {}
			}
		}); err != nil {
			return err
		}
		_, _ = fmt.Fprintln(os.Stdout, key) // The ack.
	}
}

// handleAt handles a message and calls at on its way.
func handleAt(ctx context.Context, store *inboxsql.Store, key string, at func(point string)) (inbox.Outcome, error) {
	claims := []inbox.Claim{
		{Key: inbox.Key{Consumer: "billing", MessageKey: key}, Attempt: 1},
		{Key: inbox.Key{Consumer: "billing", MessageKey: key + " neighbour"}, Attempt: 1},
	}
	b, err := store.Begin(ctx, claims, inbox.BeginOptions{LockTimeout: 10 * time.Second})
	if err != nil {
		return "", err
	}
	defer b.Abort()
	at(afterClaim)
	for i, e := range b.Entries() {
		if !e.Claimed() {
			continue
		}
		tx, err := b.Start(ctx, i)
		if err != nil {
			return "", err
		}
		if _, err := tx.ExecContext(ctx, "insert into effects (k, note) values ($1, 'work')", claims[i].MessageKey); err != nil {
			return "", err
		}
		at(inHandler)
		if err := b.Finish(ctx, i, true, []byte("result")); err != nil {
			return "", err
		}
	}
	at(beforeCommit)
	if err := b.Commit(ctx); err != nil {
		return "", err
	}
	at(afterCommit)
	return b.Entries()[0].Outcome, nil
}

// database is one that children are killed at.
type database struct {
	driver, source string
	db             *sql.DB
	store          *inboxsql.Store
}

func crashDatabases() map[string]func(t *testing.T) database {
	open := func(t *testing.T, driver, source string) database {
		t.Helper()
		db, err := sql.Open(driver, source)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close() })
		store, err := inboxsql.New(db)
		if err != nil {
			t.Fatal(err)
		}
		return database{driver: driver, source: source, db: db, store: store}
	}
	return map[string]func(t *testing.T) database{
		"SQLite": func(t *testing.T) database {
			t.Helper()
			f, path := newSQLite(t)
			if _, err := f.ExecContext(t.Context(), "create table effects (k text not null, note text not null)"); err != nil {
				t.Fatal(err)
			}
			return open(t, "sqlite", inboxsql.SQLiteDSN(path))
		},
		"PostgreSQL": func(t *testing.T) database {
			t.Helper()
			address := postgresURL(t)
			f := openPostgres(t, address, "", pgx.QueryExecModeCacheStatement)
			if err := f.Outside(t.Context(), "create table effects (k text not null, note text not null)"); err != nil {
				t.Fatal(err)
			}
			var schema string
			if err := f.Own(t.Context(), func(tx *sql.Tx) error {
				return tx.QueryRowContext(t.Context(), "select current_schema()").Scan(&schema)
			}); err != nil {
				t.Fatal(err)
			}
			u, err := url.Parse(address)
			if err != nil {
				t.Fatal(err)
			}
			q := u.Query()
			q.Set("search_path", schema)
			u.RawQuery = q.Encode()
			return open(t, "pgx", u.String())
		},
	}
}

// child starts a child and returns its output.
func child(t *testing.T, d database, point string) (*exec.Cmd, *bufio.Scanner, *strings.Builder) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), crashEnv+"="+point, crashDriver+"="+d.driver, crashSource+"="+d.source)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, bufio.NewScanner(out), &stderr
}

// A process that is killed with SIGKILL leaves a row and its effect, or neither.
// The message that comes again has one effect in the end.
//
// case D3.
func TestKilled(t *testing.T) {
	t.Parallel()
	for name, open := range crashDatabases() {
		for point, want := range map[string]inbox.Outcome{
			afterClaim: inbox.FirstAttempt, inHandler: inbox.FirstAttempt, beforeCommit: inbox.FirstAttempt, afterCommit: inbox.Replay,
		} {
			t.Run(name+" "+point, func(t *testing.T) {
				t.Parallel()
				d := open(t)
				cmd, lines, stderr := child(t, d, point)
				if !lines.Scan() || lines.Text() != "here" {
					_ = cmd.Process.Kill()
					t.Fatalf("the child did not get to where it is to be killed: %q, %v, %s", lines.Text(), cmd.Wait(), stderr)
				}
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				_ = cmd.Wait() // It was killed.
				outcome, err := handleAt(t.Context(), d.store, "k", func(string) {})
				if err != nil || outcome != want {
					t.Errorf("the message again: %q, %v; want %q", outcome, err, want)
				}
				checkRows(t, d, map[string]bool{"k": true, "k neighbour": true})
				wantRows(t, d, 2)
			})
		}
	}
}

// Killed at random moments of many transactions: whatever was acked is there,
// and every row has its effect.
//
// case D3.
func TestKilledAtRandom(t *testing.T) {
	t.Parallel()
	for name, open := range crashDatabases() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := open(t)
			acked := map[string]bool{}
			for range 6 {
				cmd, lines, stderr := child(t, d, nowhere)
				const least, more, soon = 5, 30, 10 * time.Millisecond
				for left := least + rand.IntN(more); lines.Scan(); left-- {
					acked[lines.Text()] = true
					if left == 0 {
						time.AfterFunc(rand.N(soon), func() { _ = cmd.Process.Kill() })
					}
				}
				if err := cmd.Wait(); err == nil || stderr.Len() > 0 {
					t.Fatalf("the child was not killed, it failed: %v, %s", err, stderr)
				}
				checkRows(t, d, acked)
			}
			t.Logf("%d messages acked by 6 processes", len(acked))
		})
	}
}

// checkRows checks that rows and effects go together, and that the acked keys
// are there.
func checkRows(t *testing.T, d database, acked map[string]bool) {
	t.Helper()
	rows, err := d.db.QueryContext(t.Context(), `
		select message_key, count(k) from inbox left join effects on k = message_key group by message_key
		union all select k, 0 from effects where k not in (select message_key from inbox)`)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	there := map[string]bool{}
	for rows.Next() {
		var key string
		var effects int
		if err := rows.Scan(&key, &effects); err != nil {
			t.Fatal(err)
		}
		if effects != 1 {
			t.Errorf("key %s: row and effects do not go together (%d)", key, effects)
		}
		there[key] = true
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	for key := range acked {
		if !there[key] {
			t.Errorf("key %s was acked and is lost", key)
		}
	}
}

func wantRows(t *testing.T, d database, want int) {
	t.Helper()
	var n, guards int
	if err := d.db.QueryRowContext(t.Context(), "select count(*), (select count(*) from inbox_guard) from inbox").Scan(&n, &guards); err != nil {
		t.Fatal(err)
	}
	if n != want || guards != 0 {
		t.Errorf("%s rows and %d guards, want %d and none", strconv.Itoa(n), guards, want)
	}
}

// The write-ahead log of a killed process is not lost when its file is opened by
// another: nothing but the three files is needed.
func TestKilledLeavesOnlyFiles(t *testing.T) {
	t.Parallel()
	d := crashDatabases()["SQLite"](t)
	cmd, lines, _ := child(t, d, afterCommit)
	if !lines.Scan() {
		t.Fatal("the child ended")
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	var path string
	if err := d.db.QueryRowContext(t.Context(), "select file from pragma_database_list where name = 'main'").Scan(&path); err != nil {
		t.Fatal(err)
	}
	elsewhere := filepath.Join(t.TempDir(), "copy.db")
	for _, suffix := range []string{"", "-wal"} {
		copyFile(t, path+suffix, elsewhere+suffix)
	}
	store, err := inboxsql.New(openFile(t, elsewhere))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Lookup(t.Context(), inbox.Key{Consumer: "billing", MessageKey: "k"}); err != nil {
		t.Errorf("the committed row is not in the copy: %v", err)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	out, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}
