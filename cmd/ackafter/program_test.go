package main

import (
	"bytes"
	"context"
	"database/sql"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// asProgram, set to 1, makes the test binary be the program itself.
const asProgram = "ACKAFTER_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) == "1" {
		main()
	}
	goleak.VerifyTestMain(m)
}

var update = flag.Bool("update", false, "write the golden files anew")

// pinned is the time at which the tests look at the database.
var pinned = time.Date(2026, 3, 10, 12, 0, 0, 0, time.UTC)

// terminal runs command lines as an operator would, on one database.
type terminal struct {
	t      *testing.T
	url    string
	schema string
	stdin  io.Reader
	ctx    context.Context

	// watch stands between the commands and the inbox, see program.
	watch func(keeper) keeper
	// clock is that of the process; nil for the real one.
	clock *fakeClock
}

// output is what a command line gave.
type output struct {
	stdout, stderr string
	code           int
}

// run runs a command line against the terminal's database.
func (term *terminal) run(args ...string) output {
	term.t.Helper()
	if term.schema != "" {
		args = append([]string{"--schema", term.schema}, args...)
	}
	env := map[string]string{environmentURL: term.url}
	var stdout, stderr bytes.Buffer
	p := &program{stdin: term.stdin, stdout: &stdout, stderr: &stderr, getenv: func(name string) string { return env[name] }}
	p.now, p.clock, p.wait, p.watch = func() time.Time { return pinned }, time.Now, sleep, term.watch
	if term.clock != nil {
		p.clock, p.wait = term.clock.now, term.clock.wait
	}
	ctx := term.ctx
	if ctx == nil {
		ctx = term.t.Context()
	}
	code := p.run(ctx, args)
	return output{stdout.String(), stderr.String(), code}
}

// fakeClock is a clock that goes on only when somebody waits.
type fakeClock struct {
	elapsed time.Duration
	waits   []time.Duration
}

func (c *fakeClock) now() time.Time { return pinned.Add(c.elapsed) }

func (c *fakeClock) wait(ctx context.Context, d time.Duration) error {
	c.elapsed += d
	c.waits = append(c.waits, d)
	return ctx.Err()
}

// must runs a command line that has to succeed, and returns its output.
func (term *terminal) must(args ...string) string {
	term.t.Helper()
	o := term.run(args...)
	if o.code != exitOK || o.stderr != "" {
		term.t.Fatalf("ackafter %s: exit code %d\n%s%s", strings.Join(args, " "), o.code, o.stdout, o.stderr)
	}
	return o.stdout
}

// expect checks the exit code, and that the output holds each of the texts.
func (o output) expect(t *testing.T, code int, texts ...string) {
	t.Helper()
	if o.code != code {
		t.Errorf("exit code %d, want %d", o.code, code)
	}
	all := o.stdout + o.stderr
	for _, text := range texts {
		if !strings.Contains(all, text) {
			t.Errorf("the output lacks %q", text)
		}
	}
	if t.Failed() {
		t.Logf("stdout:\n%s\nstderr:\n%s", o.stdout, o.stderr)
	}
}

// onSQLite returns a terminal for a SQLite file that is not there yet.
func onSQLite(t *testing.T) *terminal {
	t.Helper()
	return &terminal{t: t, url: "sqlite:" + filepath.Join(t.TempDir(), "inbox.db"), stdin: strings.NewReader("")}
}

// onPostgres returns a terminal for a schema that is not there yet, in the
// database of ACKAFTER_TEST_POSTGRES.
func onPostgres(t *testing.T) *terminal {
	t.Helper()
	address := serverURL(t, "ACKAFTER_TEST_POSTGRES")
	// The name has to be quoted.
	term := &terminal{t: t, url: address, schema: fmt.Sprintf("Cli-%x", rand.Uint64()), stdin: strings.NewReader("")}
	ctx := context.WithoutCancel(t.Context()) // A cleanup comes after the test's own context.
	t.Cleanup(func() {
		db := term.open() //nolint:contextcheck // As above.
		if _, err := db.ExecContext(ctx, `drop schema if exists "`+term.schema+`" cascade`); err != nil {
			t.Error(err)
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return term
}

// onPooler returns a terminal for a new database behind the PgBouncer of
// ACKAFTER_TEST_PGBOUNCER.
func onPooler(t *testing.T) *terminal {
	t.Helper()
	server := serverURL(t, "ACKAFTER_TEST_PGBOUNCER")
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal("ACKAFTER_TEST_PGBOUNCER is not a URL")
	}
	name := fmt.Sprintf("cli_%x", rand.Uint64())
	u.Path = "/" + name
	admin := &terminal{t: t, url: server}
	admin.exec("create database " + name)
	ctx := context.WithoutCancel(t.Context()) // A cleanup comes after the test's own context.
	t.Cleanup(func() {
		db := admin.open() //nolint:contextcheck // As above.
		if _, err := db.ExecContext(ctx, "drop database "+name+" with (force)"); err != nil {
			t.Error(err)
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return &terminal{t: t, url: u.String(), stdin: strings.NewReader("")}
}

// serverURL returns the value of the environment variable, which names a server.
func serverURL(t *testing.T, variable string) string {
	t.Helper()
	value := os.Getenv(variable)
	switch {
	case value != "":
	case os.Getenv("ACKAFTER_TEST_REQUIRE") == "1":
		t.Fatalf("%s is not set", variable)
	default:
		t.Skipf("%s is not set", variable)
	}
	return value
}

// onBoth runs test on both databases.
func onBoth(t *testing.T, test func(t *testing.T, term *terminal)) {
	t.Helper()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		test(t, onSQLite(t))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		test(t, onPostgres(t))
	})
}

// open opens the database of the terminal, past the command line.
func (term *terminal) open() *sql.DB {
	term.t.Helper()
	a, err := parseAddress(term.url, term.schema)
	if err != nil {
		term.t.Fatal(err)
	}
	db, err := openDatabase(context.WithoutCancel(term.t.Context()), a.forMigrations())
	if err != nil {
		term.t.Fatal(err)
	}
	if db.pool != nil {
		term.t.Cleanup(db.pool.Close)
	}
	return db.sql
}

// exec runs statements in the database of the terminal.
func (term *terminal) exec(statements ...string) {
	term.t.Helper()
	db := term.open()
	defer func() {
		if err := db.Close(); err != nil {
			term.t.Error(err)
		}
	}()
	for _, s := range statements {
		if _, err := db.ExecContext(term.t.Context(), s); err != nil {
			term.t.Fatalf("%s: %v", s, err)
		}
	}
}

// golden compares the transcript of command lines with a file of testdata.
func (term *terminal) golden(name string, lines ...[]string) {
	term.t.Helper()
	var b strings.Builder
	for i, args := range lines {
		if i > 0 {
			b.WriteByte('\n')
		}
		o := term.run(args...)
		fmt.Fprintf(&b, "$ ackafter %s\n%s", strings.Join(args, " "), o.stdout)
		if o.stderr != "" {
			fmt.Fprintf(&b, "--- stderr\n%s", o.stderr)
		}
		if o.code != exitOK {
			fmt.Fprintf(&b, "--- exit code %d\n", o.code)
		}
	}
	compareGolden(term.t, name, b.String())
}

func compareGolden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".txt")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-update writes it anew).\ngot:\n%s\nwant:\n%s", path, got, want)
	}
}

// lacks checks that the output holds none of the texts.
func (o output) lacks(t *testing.T, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if strings.Contains(o.stdout+o.stderr, text) {
			t.Errorf("the output holds %q:\n%s%s", text, o.stdout, o.stderr)
		}
	}
}
