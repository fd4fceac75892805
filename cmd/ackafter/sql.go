package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/migrations"
)

const migrateSQLHelp = `Print the migrations, or write them into a folder for another tool.

Without --dir the SQL of all versions is printed, up or (--down) down; --schema
makes it begin with that schema. With --dir the files are written:
  plain, golang-migrate   0001_inbox.up.sql, 0001_inbox.down.sql, ...
  goose                   0001_inbox.sql, ...
They are not mixed with other migrations: give them a folder of their own, and
the tool a version table of its own (golang-migrate: x-migrations-table=..., goose:
-table ` + migrations.GooseTable + `). Names in them are not qualified; search_path decides.

The dialect is that of --database, or of --dialect. No database is contacted.`

// sqlFlags are the flags of "migrate sql".
type sqlFlags struct {
	dialect, format, dir string
	down                 bool
}

func (p *program) migrateSQLCommand() *cobra.Command {
	var f sqlFlags
	command := &cobra.Command{
		Use:   "sql",
		Short: "Print the migrations, or write them for goose or golang-migrate",
		Long:  migrateSQLHelp,
		Example: `  ackafter migrate sql --dialect postgres | psql -1 -v ON_ERROR_STOP=1 "$DATABASE"
  ackafter migrate sql --dialect sqlite | sqlite3 -bail orders.db
  ackafter migrate sql --dialect postgres --format goose --dir db/inbox
  ackafter migrate sql --dialect postgres --format golang-migrate --dir db/inbox`,
		Args: arguments(),
		RunE: func(*cobra.Command, []string) error { return p.migrateSQL(f) },
	}
	flags := command.Flags()
	flags.StringVar(&f.dialect, "dialect", "", "`postgres` or sqlite (default: that of the database URL)")
	flags.StringVar(&f.format, "format", "plain", "`plain`, goose or golang-migrate")
	flags.StringVar(&f.dir, "dir", "", "write the files into this `folder`, which is made when missing")
	flags.BoolVar(&f.down, "down", false, "print the way down, newest version first")
	complete(command, "dialect", "postgres", "sqlite")
	complete(command, "format", "plain", "goose", "golang-migrate")
	return command
}

func (p *program) migrateSQL(f sqlFlags) error {
	d, err := p.dialectOf(f.dialect)
	if err != nil {
		return err
	}
	files := d.files()
	switch f.format {
	case "plain", "golang-migrate":
	case "goose":
		files = migrations.Goose(files)
	default:
		return usagef("--format %q: must be plain, goose or golang-migrate", f.format)
	}
	switch {
	case p.json:
		return usagef("--json does not go with SQL")
	case f.dir == "" && f.format != "plain":
		return usagef("--format %s makes several files: name a folder with --dir", f.format)
	case f.dir == "":
		return p.printSQL(d, files, f.down)
	case f.down:
		return usagef("--down does not go with --dir: the files for both ways are written")
	case p.schema != "":
		return usagef("--schema does not go with --dir: the files hold no schema, set search_path in the tool that runs them")
	}
	return p.writeSQL(files, f.dir)
}

// dialectOf returns the dialect of the name, or that of the database URL when
// the name is empty.
func (p *program) dialectOf(name string) (*dialect, error) {
	switch name {
	case dialectPostgres.name:
		return dialectPostgres, nil
	case dialectSQLite.name:
		if p.schema != "" {
			return nil, usagef("--schema is for PostgreSQL only")
		}
		return dialectSQLite, nil
	case "":
		if p.databaseURL == "" && p.getenv(environmentURL) == "" {
			return nil, usagef("--dialect postgres or --dialect sqlite is missing")
		}
		address, err := p.address()
		if err != nil {
			return nil, err
		}
		return address.dialect, nil
	}
	return nil, usagef("--dialect %q: must be postgres or sqlite", name)
}

func (p *program) printSQL(d *dialect, files fs.FS, down bool) error {
	pattern := "*.up.sql"
	if down {
		pattern = "*.down.sql"
	}
	names, err := fs.Glob(files, pattern)
	if err != nil {
		return fmt.Errorf("list the migrations: %w", err)
	}
	var b bytes.Buffer
	if p.schema != "" {
		name := pgx.Identifier{p.schema}.Sanitize()
		if !down {
			b.WriteString("create schema if not exists " + name + ";\n")
		}
		b.WriteString("set search_path to " + name + ";\n\n")
	}
	if down {
		slices.Reverse(names)
	}
	for _, name := range names {
		content, err := fs.ReadFile(files, name)
		if err != nil {
			return fmt.Errorf("read migration %s of %s: %w", name, d.name, err)
		}
		b.Write(content)
	}
	if _, err := p.stdout.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write the output: %w", err)
	}
	return nil
}

// writeSQL writes the files into dir and says their names. A file that is there
// already stays when it is the same, and is an error when it is not: it may have
// been applied.
func (p *program) writeSQL(files fs.FS, dir string) error {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return fmt.Errorf("list the migrations: %w", err)
	}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("make the folder: %w", err)
	}
	for _, name := range names {
		content, err := fs.ReadFile(files, name)
		if err != nil {
			return fmt.Errorf("read migration %s: %w", name, err)
		}
		path := filepath.Join(dir, name)
		done, err := writeNew(path, content)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(p.stdout, "%s %s\n", done, path); err != nil {
			return fmt.Errorf("write the output: %w", err)
		}
	}
	return nil
}

func writeNew(path string, content []byte) (done string, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644) //nolint:gosec // The path is the operator's own, and SQL is no secret.
	if errors.Is(err, fs.ErrExist) {
		there, err := os.ReadFile(path) //nolint:gosec // As above.
		switch {
		case err != nil:
			return "", fmt.Errorf("compare with the file that is there: %w", err)
		case !bytes.Equal(there, content):
			return "", fmt.Errorf("%s is there already and differs; it was left as it is", path)
		}
		return "unchanged", nil
	}
	if err != nil {
		return "", fmt.Errorf("write a migration: %w", err)
	}
	_, err = io.Copy(f, bytes.NewReader(content))
	if err := errors.Join(err, f.Close()); err != nil {
		return "", fmt.Errorf("write %s: %w", path, err)
	}
	return "written", nil
}
