package main

import (
	"errors"
	"io"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/inbox"
)

// Every command says what it does, and shows how it is called.
func TestEveryCommandHasHelp(t *testing.T) {
	t.Parallel()
	root := (&program{}).rootCommand()
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: short help %q", c.CommandPath(), c.Short)
		}
		if !c.HasSubCommands() && !strings.Contains(c.Example, c.CommandPath()) {
			t.Errorf("%s has no example", c.CommandPath())
		}
		for line := range strings.Lines(c.Long) {
			if len(line) > 101 {
				t.Errorf("%s: a line of the help is too long: %s", c.CommandPath(), line)
			}
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(root)
}

func TestHelpSaysExitCodes(t *testing.T) {
	t.Parallel()
	term := &terminal{t: t}
	for _, args := range [][]string{{"help"}, {"--help"}, {"-h"}} {
		term.run(args...).expect(t, exitOK, "Exit codes:", "  0  done", "  1  failed", "  2  wrong command line", "  3  not found")
	}
	term.run("completion", "bash").expect(t, exitOK, "__complete")
	term.run("__complete", "dead", "list", "--state", "").expect(t, exitOK, "dead\n", "retry\n", "waiting\n", "all\n")
	term.run("__complete", "migrate", "sql", "--format", "").expect(t, exitOK, "plain\n", "goose\n", "golang-migrate\n")
}

// A wrong command line is exit code 2, says what is wrong, and touches nothing.
func TestUsageErrors(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"":                                    "a command is missing",
		"migrate":                             "ackafter: migrate: a command is missing",
		"dead":                                "ackafter: dead: a command is missing",
		"migrat":                              `unknown command "migrat"; did you mean "migrate"?`,
		"migrate upp":                         `unknown command "upp"; did you mean "up"?`,
		"dead 7":                              `unknown command "7"`,
		"--nope":                              "unknown flag: --nope",
		"show":                                "the argument KEY is missing",
		"show a b":                            `unexpected argument "b"`,
		"migrate up now":                      `unexpected argument "now"`,
		"migrate up":                          "no database: give --database URL or set ACKAFTER_DATABASE_URL",
		"show K --database mysql://x":         "the database URL must begin with",
		"show K --schema s --database file:x": "--schema is for PostgreSQL only",
		"show K --timeout 0":                  "--timeout 0s: must be positive",
		"show K --timeout -1s":                "--timeout -1s: must be positive",
		"show K --timeout soon":               "--timeout",
		"dead list --state done":              `--state "done": must be one of "dead", "retry", "waiting", "discarded", "all"`,
		"dead list --state=":                  `--state "": must be one of`,
		"dead list --reason bad":              `--reason "bad": must be one of "attempts exhausted"`,
		"dead list --limit 0":                 "--limit 0: must be from 1 to 10000",
		"dead list --limit 10001":             "--limit 10001: must be from 1 to 10000",
		"dead list --after -1":                "--after -1: must not be negative",
		"dead list --all --state dead":        "--all does not go with --state",
		"dead list --group --after 1":         "--after does not go with --group",
		"dead list --since yesterday":         `--since "yesterday": must be how long ago (90m, 36h, 7d) or a time`,
		"dead list --since -1h":               `--since "-1h": must be how long ago`,
		"dead list --since 0s":                `--since "0s": must be how long ago`,
		"dead list --before 200000d":          `--before "200000d": must be how long ago`,
		"dead list --before 9223372036854775807d":            "must be how long ago",
		"dead list --error \x00":                             "--error: must be valid UTF-8 without NUL",
		"dead retry":                                         "say which: IDs, a filter such as --failure or --consumer, or --all",
		"dead retry --limit 5 --after 7":                     "say which",
		"dead retry 7 --all":                                 "--all does not go with IDs",
		"dead retry 7 --consumer billing":                    "--consumer does not go with IDs",
		"dead retry 7 --after 5":                             "--after does not go with IDs",
		"dead retry 7 --state dead":                          "--state does not go with IDs",
		"dead retry --state retry":                           "say which",
		"dead retry --consumer=":                             "--consumer: must not be empty",
		"dead discard --failure= --note x --yes":             "--failure: must not be empty",
		"dead export --since=":                               "--since: must not be empty",
		"dead retry 7 x":                                     `ID "x": must be a number from 1`,
		"dead retry --all --state waiting":                   `--state "waiting": must be one of "dead", "retry"`,
		"dead retry --all --limit 0":                         "--limit 0: must be positive",
		"dead retry --all --rate 50":                         `--rate "50": must be how many in a second, minute or hour`,
		"dead retry --all --rate 0/s":                        `--rate "0/s"`,
		"dead retry --all --rate 50/d":                       `--rate "50/d"`,
		"dead retry --all --rate 9999999/s":                  `--rate "9999999/s"`,
		"dead discard --note x":                              "say which: IDs",
		"dead discard 7":                                     "--note is missing: say who discards, and why",
		"dead discard 7 --note=":                             "--note is missing",
		"dead discard --consumer billing --note x":           "what filters select is discarded only with --yes",
		"dead discard --all --note x":                        "what filters select is discarded only with --yes",
		"dead discard 7 --note " + strings.Repeat("x", 501):  "--note: must be valid UTF-8 without NUL, of at most 500 bytes",
		"dead discard --all --state discarded --note x":      `--state "discarded": must be one of "dead", "retry", "waiting"`,
		"dead export 7":                                      `unexpected argument "7"`,
		"dead export --limit -1":                             "--limit -1: must be positive",
		"dead show x":                                        `ID "x": must be a number from 1`,
		"dead show 0":                                        `ID "0": must be a number from 1`,
		"dead show 99999999999999999999":                     "must be a number from 1",
		"migrate sql":                                        "--dialect postgres or --dialect sqlite is missing",
		"migrate sql --dialect mysql":                        `--dialect "mysql": must be postgres or sqlite`,
		"migrate sql --dialect sqlite --schema s":            "--schema is for PostgreSQL only",
		"migrate sql --dialect sqlite --format x":            `--format "x": must be plain, goose or golang-migrate`,
		"migrate sql --dialect sqlite --format goose":        "name a folder with --dir",
		"migrate sql --dialect sqlite --json":                "--json does not go with SQL",
		"migrate sql --dialect sqlite --dir d --down":        "--down does not go with --dir",
		"migrate sql --dialect postgres --dir d --schema s":  "--schema does not go with --dir",
		"migrate sql --database postgres://u:hunter2@h:x/db": "the database URL cannot be used",
	} {
		o := (&terminal{t: t}).run(strings.Fields(line)...)
		if o.code != exitUsage || !strings.Contains(o.stderr, want) || o.stdout != "" {
			t.Errorf("ackafter %s: exit code %d, want %d and %q on stderr only\nstdout:\n%s\nstderr:\n%s", line, o.code, exitUsage, want, o.stdout, o.stderr)
		}
		if !strings.Contains(o.stderr, "--help\" for help.") || strings.Contains(o.stderr, "hunter2") {
			t.Errorf("ackafter %s: stderr:\n%s", line, o.stderr)
		}
	}
}

// The flag wins over the environment, and flags work before and after the
// command.
func TestDatabaseFlag(t *testing.T) {
	t.Parallel()
	term := onSQLite(t)
	url := term.url
	term.must("migrate", "up")
	term.url = "nonsense"
	term.must("migrate", "status", "--database", url)
	term.must("--database", url, "migrate", "status")
	term.run("migrate", "status").expect(t, exitUsage)
}

func TestExitCodes(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		err  error
		code int
	}{
		{nil, 0},
		{errors.New("x"), 1},
		{inbox.ErrNoSchema, 1},
		{usagef("x"), 2},
		{errors.Join(errors.New("y"), usagef("x")), 2},
		{&notFoundError{"x"}, 3},
	} {
		if got := exitCode(row.err); got != row.code {
			t.Errorf("%v: exit code %d, want %d", row.err, got, row.code)
		}
	}
}

// A reader that has gone away is a failure, not a success.
func TestBrokenOutput(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"version"}, {"version", "--json"}, {"migrate", "sql", "--dialect", "sqlite"}} {
		reader, writer := io.Pipe()
		if err := reader.Close(); err != nil {
			t.Fatal(err)
		}
		var stderr strings.Builder
		code := run(t.Context(), args, strings.NewReader(""), writer, &stderr)
		if code != exitFailure || !strings.Contains(stderr.String(), "write the output") {
			t.Errorf("%v: exit code %d, stderr %q", args, code, stderr.String())
		}
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	newVersionView(nil).text(&b)
	if want := "ackafter unknown\ntables version 2\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
	b.Reset()
	newVersionView(&debug.BuildInfo{
		GoVersion: "go1.26.0", Main: debug.Module{Version: "v0.1.0"},
		Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.modified", Value: "true"}},
	}).text(&b)
	if want := "ackafter v0.1.0\nrevision abc, with changes\nbuilt with go1.26.0\ntables version 2\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
	(&terminal{t: t}).run("version").expect(t, exitOK, "ackafter ", "tables version 2")
}
