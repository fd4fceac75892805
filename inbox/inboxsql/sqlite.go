package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// SQLiteDSN returns the data source name for a database file, for the driver
// modernc.org/sqlite:
//
//	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN("orders.db"))
//
// It sets what the inbox needs and what goes well with it: commits that are on
// the disk when they return (synchronous=FULL), foreign keys, write-ahead
// logging (readers do not wait for the writer), a wait of 5 s for the writer
// (busy_timeout), transactions that begin as writers (_txlock=immediate), so
// that they cannot fail half-way for lack of that, and times stored in SQLite's
// own format. path is a file name, relative or absolute, and may hold any
// character. The file is made when it is not there.
func SQLiteDSN(path string) string {
	const settings = "_pragma=busy_timeout(5000)&_pragma=foreign_keys(1)&_pragma=journal_mode(WAL)" +
		"&_pragma=synchronous(FULL)&_txlock=immediate&_time_format=sqlite"
	slashed := filepath.ToSlash(path)
	if filepath.VolumeName(path) != "" {
		slashed = "/" + slashed // file:///C:/...
	}
	escaped := (&url.URL{Path: slashed}).EscapedPath()
	if strings.HasPrefix(escaped, "/") {
		escaped = "//" + escaped
	}
	return "file:" + escaped + "?" + settings
}

// sqlite is the dialect of SQLite. There is one writer: while a session is
// open, nobody else changes anything, and there are no races to lose.
type sqlite struct{}

const (
	// sqliteNow is the time in microseconds. SQLite's own clock has
	// milliseconds.
	sqliteNow = `(cast(round(unixepoch('subsec') * 1000) as integer) * 1000)`
	// sqliteNeed is the first version with unixepoch('subsec').
	sqliteNeed = 3*1_000_000 + 42*1_000

	savepoint = "ackafter_run"
)

var sqliteWords = strings.NewReplacer("@", "", "{now}", sqliteNow, "{at}", sqliteNow, "$", "?",
	"{none}", "x''", "{loose p}", "(p.lane = x'') = 1", "{laned p}", "(p.lane = x'') = 0", "{find}", "instr",
	"{ids}", "(select value from json_each(?1))", "{leases}", "(select value ->> 0, value ->> 1 from json_each(?1))",
	"{due}", "(select key, value ->> 0, value ->> 1 from json_each(?1))", "{for update}", "", "{skip locked}", "",
	"{greatest}", "max", "{token}", sqliteNow)

func (sqlite) sql(query string) string { return sqliteWords.Replace(query) }

// returned: RETURNING knows no alias.
func (sqlite) returned(columns string) string { return strings.ReplaceAll(columns, "p.", "") }

func (sqlite) time(n int) string { return fmt.Sprintf("$%d", n) }

func (sqlite) after(n int) string { return fmt.Sprintf("{now} + $%d", n) }

func (sqlite) until(t string) string { return t + " - {now}" }

// settings are those of one connection.
type settings struct {
	foreignKeys, synchronous int
	busyTimeout              int
}

// readSettings asks with plain pragmas: as a query of their table-valued forms it
// would take a tenth of a small batch's time.
func readSettings(ctx context.Context, q querier) (s settings, err error) {
	for pragma, value := range map[string]*int{
		"pragma foreign_keys": &s.foreignKeys, "pragma synchronous": &s.synchronous, "pragma busy_timeout": &s.busyTimeout,
	} {
		if err := q.QueryRowContext(ctx, pragma).Scan(value); err != nil {
			return settings{}, err
		}
	}
	return s, nil
}

// validate tells what is wrong with a connection.
func (s settings) validate() error {
	const full = 2
	switch {
	case s.foreignKeys != 1:
		return errors.New("foreign_keys is off on a connection, but the inbox's guard is a foreign key: " +
			"open the database with inboxsql.SQLiteDSN or _pragma=foreign_keys(1)")
	case s.synchronous < full:
		return fmt.Errorf("synchronous is %d on a connection, so that a commit may be lost after it was acknowledged: "+
			"open the database with inboxsql.SQLiteDSN or _pragma=synchronous(FULL)", s.synchronous)
	}
	return nil
}

func (d sqlite) check(ctx context.Context, q querier) error {
	var version, mode, file string
	err := q.QueryRowContext(ctx, `select sqlite_version(), journal_mode, coalesce(file, '')
		from pragma_journal_mode, pragma_database_list where name = 'main'`).Scan(&version, &mode, &file)
	if err != nil {
		return err
	}
	var major, minor, patch int
	if _, err := fmt.Sscanf(version, "%d.%d.%d", &major, &minor, &patch); err != nil {
		return fmt.Errorf("sqlite_version is %q: %w", version, err)
	}
	switch {
	case major*1_000_000+minor*1_000 < sqliteNeed:
		return fmt.Errorf("SQLite %s is too old, 3.42 is needed", version)
	case file == "":
		return errors.New("the database is in memory, where nothing is durable and every connection has its own: use a file")
	case mode == "off" || mode == "memory":
		return fmt.Errorf("journal_mode is %s, so that a crash may destroy the database: use WAL", mode)
	}
	s, err := readSettings(ctx, q)
	if err != nil {
		return err
	}
	if err := s.validate(); err != nil {
		return err
	}
	return d.explain(ctx, q, errNoTable)
}

// errNoTable stands for "no such table", which has no result code of its own.
var errNoTable = errors.New("no such table")

func (sqlite) explain(ctx context.Context, q querier, err error) error {
	const generic = 1
	code, ok := sqliteCode(err)
	asked := err == errNoTable //nolint:errorlint // It is never wrapped.
	if !asked && (!ok || code != generic) {
		return err
	}
	var n int
	const tables = 8
	scanErr := q.QueryRowContext(ctx, `select count(*) from sqlite_master where type = 'table' and name in
		('inbox', 'inbox_parked', 'inbox_consumers', 'inbox_horizons', 'inbox_steps',
		'inbox_guard', 'inbox_guard_target', 'inbox_schema')`).Scan(&n)
	switch {
	case scanErr != nil && asked:
		return scanErr
	case scanErr != nil || n == tables:
		if asked {
			return nil
		}
		return err
	case asked:
		return inbox.ErrNoSchema
	}
	return fmt.Errorf("%w: %w", inbox.ErrNoSchema, err)
}

func (d sqlite) open(ctx context.Context, s *session, o inbox.BeginOptions) error {
	have, err := readSettings(ctx, s.own)
	if err != nil {
		return err
	}
	if err := have.validate(); err != nil {
		return err
	}
	if err := s.exec(ctx, fmt.Sprintf("pragma busy_timeout = %d", max(o.LockTimeout.Milliseconds(), 1))); err != nil {
		return err
	}
	err = s.exec(ctx, "begin immediate")
	s.open = err == nil
	if err != nil {
		// An interrupted BEGIN may have begun; without a transaction this fails
		// and does no harm.
		_ = s.exec(context.WithoutCancel(ctx), "rollback")
	}
	if back := s.exec(context.WithoutCancel(ctx), fmt.Sprintf("pragma busy_timeout = %d", have.busyTimeout)); back != nil {
		err = errors.Join(err, back)
	}
	if err != nil {
		return err
	}
	if err := s.exec(ctx, "insert into inbox_guard (id) values (1)"); err != nil {
		return d.explain(ctx, s.own, err)
	}
	return nil
}

func (sqlite) opened(context.Context, querier) error { return nil }

func (sqlite) patience(context.Context, *session, time.Duration) error { return nil }

// commit runs without the caller's context: nothing in it waits for anybody
// else, and an interrupted COMMIT would be one whose outcome is not known.
func (sqlite) commit(ctx context.Context, s *session) error {
	ctx = context.WithoutCancel(ctx)
	switch n, err := affected(s.own.ExecContext(ctx, "delete from inbox_guard where id = 1")); {
	case err != nil:
		return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, err)
	case n != 1:
		return fmt.Errorf("%w: the guard row is gone: %w", inbox.ErrNotCommitted, inbox.ErrTxEnded)
	}
	s.autoRollback = false // From here on this is looked at below.
	err := s.exec(ctx, "commit")
	if err == nil {
		s.open = false
		return nil
	}
	rolledBack := s.exec(ctx, "rollback") == nil
	s.open = false
	const ioError = 10
	// After an I/O error the commit may be in the log although it does not
	// count now: a crash could make it count.
	if code, ok := sqliteCode(err); rolledBack && ok && code&0xff != ioError {
		return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, err)
	}
	return fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, err)
}

func affected(r sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

// each runs one statement for every claim.
func (d sqlite) each(ctx context.Context, q querier, query string, cs []claim, args func(i int, c *claim) []any) (changed []bool, err error) {
	if len(cs) == 0 {
		return nil, nil
	}
	st, err := q.PrepareContext(ctx, d.sql(query))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	changed = make([]bool, len(cs))
	for i := range cs {
		n, err := affected(st.ExecContext(ctx, args(i, &cs[i])...))
		if err != nil {
			return nil, err
		}
		changed[i] = n > 0
	}
	return changed, nil
}

// eachRow runs a query for at most one row for every claim.
func (d sqlite) eachRow(ctx context.Context, q querier, query string, cs []claim, args func(c *claim) []any, scan func(i int, row *sql.Row) error) (err error) {
	if len(cs) == 0 {
		return nil
	}
	st, err := q.PrepareContext(ctx, d.sql(query))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	for i := range cs {
		err := scan(i, st.QueryRowContext(ctx, args(&cs[i])...))
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
	}
	return nil
}

func keyArgs(c *claim) []any { return []any{c.Tenant, c.Consumer, c.key} }

// fingerprintArgs are the unique key of a parked row.
func fingerprintArgs(c *claim) []any {
	return append(keyArgs(c), append([]byte{}, c.Fingerprint...))
}

// rowArgs are the columns of a claim that the caller gives.
func rowArgs(c *claim) []any {
	return append(keyArgs(c), bytesOrNull(c.Fingerprint), c.MessageID, c.Source, positionOrNull(c.Position),
		microsOrNull(c.EventTime), c.Worker, c.TraceID, c.Attempt, retention(c.Retention))
}

func (d sqlite) take(ctx context.Context, q querier, cs []claim) ([]bool, error) {
	return d.each(ctx, q, `
		insert into inbox (tenant, consumer, message_key, fingerprint, message_id, source, position,
			event_time, worker, trace_id, attempts, processed_at, expires_at)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, {now}, {now} + $12)
		on conflict do nothing`, cs, func(_ int, c *claim) []any { return rowArgs(c) })
}

func (d sqlite) renew(ctx context.Context, q querier, cs []claim) ([]bool, error) {
	return d.each(ctx, q, `
		update inbox as i set status = 'done', fingerprint = $4, message_id = $5, source = $6, position = $7,
			event_time = $8, worker = $9, trace_id = $10, attempts = $11, result = null, result_meta = null,
			processed_at = {now}, expires_at = {now} + $12, lease_until = null, token = null
		where tenant = $1 and consumer = $2 and message_key = $3 and `+isExpired,
		cs, func(_ int, c *claim) []any { return rowArgs(c) })
}

func (d sqlite) read(ctx context.Context, q querier, cs []claim) ([]*found, error) {
	rows := make([]*found, len(cs))
	err := d.eachRow(ctx, q, `select `+recordColumns+` from inbox as i where tenant = $1 and consumer = $2 and message_key = $3`,
		cs, keyArgs, func(i int, row *sql.Row) error {
			f, err := scanRecord(row.Scan)
			if err != nil {
				return err
			}
			f.record.MessageKey = cs[i].MessageKey
			rows[i] = f
			return nil
		})
	return rows, err
}

func (d sqlite) drop(ctx context.Context, q querier, cs []claim) error {
	_, err := d.each(ctx, q, `delete from inbox where tenant = $1 and consumer = $2 and message_key = $3`,
		cs, func(_ int, c *claim) []any { return keyArgs(c) })
	return err
}

func (d sqlite) save(ctx context.Context, q querier, cs []claim, results [][]byte) error {
	_, err := d.each(ctx, q, `update inbox set result = $4 where tenant = $1 and consumer = $2 and message_key = $3`,
		cs, func(i int, c *claim) []any { return append(keyArgs(c), bytesOrNull(results[i])) })
	return err
}

// Primary result codes.
const (
	sqliteBusy     = 5
	sqliteLocked   = 6
	sqliteNoMem    = 7
	sqliteReadOnly = 8
	sqliteIOErr    = 10
	sqliteCorrupt  = 11
	sqliteFull     = 13
	sqliteCantOpen = 14
	sqliteProtocol = 15
	sqliteNotADB   = 26
)

func (sqlite) clashed(error) bool { return false }

func (sqlite) lockTimedOut(err error) bool {
	code, ok := sqliteCode(err)
	return ok && (code&0xff == sqliteBusy || code&0xff == sqliteLocked)
}

func (sqlite) classify(err error) inbox.Class {
	code, ok := sqliteCode(err)
	if !ok {
		return inbox.ClassMessage
	}
	switch code & 0xff {
	case sqliteBusy, sqliteLocked:
		return inbox.ClassContention
	case sqliteNoMem, sqliteReadOnly, sqliteIOErr, sqliteCorrupt, sqliteFull, sqliteCantOpen, sqliteProtocol, sqliteNotADB:
		return inbox.ClassUnavailable
	}
	return inbox.ClassMessage
}
