package main

import (
	"fmt"
	"io/fs"
	"net/url"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3"

	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/migrations"
)

// dialect is what the two databases differ in, as far as the tables' files go.
type dialect struct {
	name  string
	goose goose.Dialect
	files func() fs.FS
}

var (
	dialectPostgres = &dialect{name: "postgres", goose: goose.DialectPostgres, files: migrations.Postgres}
	dialectSQLite   = &dialect{name: "sqlite", goose: goose.DialectSQLite3, files: migrations.SQLite}
)

// address is a parsed database URL.
type address struct {
	*dialect

	// label names the database for people. It never holds a password.
	label string

	// schema is that of --schema; empty for the first of search_path.
	schema string

	// postgres is set for PostgreSQL only.
	postgres *pgxpool.Config

	// path is the file of a SQLite database, source what its driver gets.
	path   string
	source string
}

// parseAddress parses a database URL. Its errors are usage errors and never hold
// any part of a password.
func parseAddress(raw, schema string) (*address, error) {
	scheme, rest, _ := strings.Cut(raw, ":")
	scheme = strings.ToLower(scheme)
	switch scheme {
	case "postgres", "postgresql":
		if strings.HasPrefix(rest, "//") {
			return parsePostgres(scheme+":"+rest, schema)
		}
	case "sqlite", "sqlite3", "file":
		switch {
		case schema != "":
			return nil, usagef("--schema is for PostgreSQL only: a SQLite file has no schemas")
		case scheme == "file":
			return parseSQLiteURI(scheme + ":" + rest)
		}
		// sqlite:///var/x.db and sqlite://x.db are widespread too.
		return sqliteAddress(strings.TrimPrefix(rest, "//"), "")
	}
	// The text is not repeated: it may be a password that lacks its beginning.
	return nil, usagef("the database URL must begin with postgres://, sqlite: or file:")
}

// sqliteSettings are those of this program's own connections: the checks of
// package inboxsql ask for them, and migrations that run at once have to wait for
// each other.
const sqliteSettings = "_pragma=busy_timeout(5000)&_pragma=foreign_keys(1)&_pragma=synchronous(FULL)&_txlock=immediate"

func sqliteAddress(path, source string) (*address, error) {
	switch path {
	case "":
		return nil, usagef("the database URL names no file")
	case ":memory:":
		return nil, usagef("the database URL names %s, which lives only inside one process; name a file", path)
	}
	if source == "" {
		// Only the name: the settings that come with it would change the file.
		source, _, _ = strings.Cut(inboxsql.SQLiteDSN(path), "?")
	}
	separator := "?"
	if strings.Contains(source, "?") {
		separator = "&"
	}
	source += separator + sqliteSettings
	return &address{dialect: dialectSQLite, label: "sqlite:" + path, path: path, source: source}, nil
}

func parseSQLiteURI(raw string) (*address, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, usagef("the database URL is not a valid file: URI")
	}
	path := u.Path
	if u.Opaque != "" {
		if path, err = url.PathUnescape(u.Opaque); err != nil {
			return nil, usagef("the database URL is not a valid file: URI")
		}
	}
	if u.Query().Get("mode") == "memory" {
		path = ":memory:"
	}
	return sqliteAddress(path, raw)
}

func parsePostgres(raw, schema string) (*address, error) {
	if misplacedAt(raw) {
		return nil, usagef("the database URL cannot be used: %s", adviceEncode)
	}
	config, err := pgxpool.ParseConfig(raw)
	if err != nil {
		return nil, usagef("the database URL cannot be used: %s", reason(raw, err))
	}
	c := config.ConnConfig
	if schema != "" {
		if strings.ContainsRune(schema, 0) {
			return nil, usagef("--schema must not contain a NUL")
		}
	}
	if !strings.Contains(raw, "default_query_exec_mode") {
		// Works behind a pooler too, and a command has few statements to prepare.
		c.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	// One for the lock, one for the migrations, one for a question in between.
	config.MinConns, config.MinIdleConns, config.MaxConns = 0, 0, 4
	label := fmt.Sprintf("PostgreSQL database %q at %s:%d", c.Database, c.Host, c.Port)
	if schema != "" {
		label += fmt.Sprintf(", schema %q", schema)
	}
	return &address{dialect: dialectPostgres, label: label, schema: schema, postgres: config}, nil
}

// forMigrations returns a with the schema as the search_path, because names in
// the migrations are not qualified. A pooler may refuse such a setting; what only
// reads does without it, see database.table.
func (a *address) forMigrations() *address {
	if a.schema == "" {
		return a
	}
	b := *a
	b.postgres = a.postgres.Copy()
	b.postgres.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{a.schema}.Sanitize()
	return &b
}

// misplacedAt tells whether an unescaped character of a password has ended the
// host part too early: "u:12/ret@h/db" would be host u, port 12, database
// "ret@h/db", and messages would show them.
func misplacedAt(raw string) bool {
	_, rest, _ := strings.Cut(raw, "://")
	end := strings.IndexAny(rest, "/?")
	if end < 0 {
		return false
	}
	authority, rest := rest[:end], rest[end:]
	path, _, _ := strings.Cut(rest, "?")
	return strings.Contains(path, "@") || !strings.Contains(authority, "@") && strings.Contains(rest, "@")
}

const adviceEncode = "it is malformed; in user and password every character like / ? # @ : % or a space " +
	"must be percent-encoded (%2F for /)"

var word = regexp.MustCompile(`[\pL\pN]{3,}`)

// reason returns why pgx refused the URL raw, unless that could hold a part of
// its user or password.
func reason(raw string, err error) string {
	text := err.Error()
	// "cannot parse `URL`: why"
	end := strings.LastIndex(text, "`: ")
	if end < 0 {
		return adviceEncode
	}
	why := text[end+len("`: "):]
	_, secret, _ := strings.Cut(raw, "://")
	if at := strings.LastIndexByte(secret, '@'); at >= 0 {
		secret = secret[:at]
	} else {
		secret = ""
	}
	if _, query, ok := strings.Cut(raw, "password="); ok {
		value, _, _ := strings.Cut(query, "&")
		secret += " " + value
	}
	for _, w := range word.FindAllString(secret, -1) {
		if strings.Contains(why, w) {
			return adviceEncode
		}
	}
	return why
}
