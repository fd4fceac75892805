// Package migrations holds the SQL that makes ackafter's tables, one folder per
// dialect, as plain numbered files.
//
// The files are named as golang-migrate expects them (0001_inbox.up.sql) and can
// be run by psql or sqlite3 as they are. Goose gives the same files in the form
// that goose expects. Names in the SQL are not qualified: in PostgreSQL the
// tables go into the first schema of search_path.
//
// The ways to run them:
//
//   - ackafter migrate up, which needs nothing else;
//   - goose as a library, with [Goose]; as a command, with the files that
//     "ackafter migrate sql --format goose --dir DIR" writes and -table
//     inbox_goose_version;
//   - golang-migrate as a library, with iofs.New(migrations.Postgres(), "."); as
//     a command, with the files of "--format golang-migrate" and
//     x-migrations-table=inbox_migrations in the database URL;
//   - psql -1 -v ON_ERROR_STOP=1 -f FILE, or sqlite3 -bail DATABASE < FILE, in the
//     order of the numbers.
//
// These migrations count from 1. Keep them in a folder and a version table of
// their own, apart from yours. Table inbox_schema holds the version whichever way
// they were run.
package migrations

import (
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

// Version is the version of the tables that this release works with: the number
// of the last file.
const Version = 2

// GooseTable is where the command line "ackafter migrate" has goose keep its
// versions. It is not goose's default, which may be in use for your own
// migrations.
const GooseTable = "inbox_goose_version"

//go:embed postgres/*.sql
var postgres embed.FS

//go:embed sqlite/*.sql
var sqlite embed.FS

// Postgres returns the files for PostgreSQL, up and down apart.
func Postgres() fs.FS { return sub(postgres, "postgres") }

// SQLite returns the files for SQLite, up and down apart.
func SQLite() fs.FS { return sub(sqlite, "sqlite") }

// Script returns all up files of [Postgres] or [SQLite] in one text, in their
// order: what makes the tables in a database that has none of them. It is for
// tests and for databases that a program makes for itself; it does not bring
// tables of an older version up to date. The error is that of reading files.
func Script(files fs.FS) (string, error) {
	names, err := fs.Glob(files, "*"+upEnding)
	if err != nil {
		return "", fmt.Errorf("migrations: script: %w", err)
	}
	slices.Sort(names)
	var all strings.Builder
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return "", fmt.Errorf("migrations: script: %w", err)
		}
		all.Write(text)
		all.WriteByte('\n')
	}
	return all.String(), nil
}

func sub(f embed.FS, dir string) fs.FS {
	s, err := fs.Sub(f, dir)
	if err != nil {
		panic(err) // The folders are compiled in: only a broken build gets here.
	}
	return s
}
