package inboxsql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/pgadvice"
)

var _ inbox.Advisor = (*Store)(nil)

// secondWait bounds the wait for a second connection of the pool.
const secondWait = time.Second

// Advise implements inbox.Advisor. It takes one connection of the pool for a moment,
// and with PostgreSQL a second one, to find out about a pooler, when the pool has
// more. It judges the settings as the pool's connections have them.
func (s *Store) Advise(ctx context.Context, r inbox.AdviceRequest) (found []inbox.Finding, err error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	if found, err = s.advise(ctx, r); err != nil {
		return found, fmt.Errorf("inboxsql: advise: %w", s.failed(ctx, err))
	}
	return found, nil
}

func (s *Store) advise(ctx context.Context, r inbox.AdviceRequest) (found []inbox.Finding, err error) {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return nil, connectError(ctx, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	d, ok := s.d.(postgres)
	if !ok {
		return adviseSQLite(ctx, conn, r)
	}
	pooler, err := s.findPooler(ctx, conn)
	if err != nil {
		return nil, err
	}
	return pgadvice.Advise(ctx, oneConn{conn}, pgadvice.Store{
		Schema: d.schema, Prefix: d.prefix, PoolSize: s.PoolSize(), Isolated: d.level != "",
	}, r, pooler)
}

func (s *Store) findPooler(ctx context.Context, conn *sql.Conn) (p pgadvice.Pooler, err error) {
	if s.PoolSize() == 1 {
		return p, nil
	}
	waited, cancel := context.WithTimeout(ctx, secondWait)
	defer cancel()
	second, err := s.db.Conn(waited)
	if err != nil {
		if ctx.Err() != nil {
			return p, err
		}
		return p, nil // All connections are in use.
	}
	defer func() { err = errors.Join(err, second.Close()) }()
	return pgadvice.FindPooler(ctx, oneConn{conn}, oneConn{second})
}

// oneConn is a pgadvice.Session.
type oneConn struct{ conn *sql.Conn }

func (c oneConn) Scan(ctx context.Context, query string, args []any, dest ...any) error {
	return c.conn.QueryRowContext(ctx, query, args...).Scan(dest...)
}

func (c oneConn) Within(ctx context.Context, do func() error) error {
	if _, err := c.conn.ExecContext(ctx, "begin"); err != nil {
		return err
	}
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), secondWait)
		defer cancel()
		if _, err := c.conn.ExecContext(undo, "rollback"); err != nil {
			_ = c.conn.Raw(func(any) error { return driver.ErrBadConn }) // Nobody shall use it again.
		}
	}()
	return do()
}

// adviseSQLite looks at the file and at the settings of one connection.
func adviseSQLite(ctx context.Context, conn *sql.Conn, r inbox.AdviceRequest) ([]inbox.Finding, error) {
	var have liteFacts
	err := conn.QueryRowContext(ctx, `select sqlite_version(), journal_mode, coalesce(file, ''), locking_mode,
			(select count(*) from sqlite_master where type = 'table' and name = 'inbox_parked')
		from pragma_journal_mode, pragma_database_list, pragma_locking_mode where name = 'main'`).
		Scan(&have.version, &have.journal, &have.file, &have.locking, &have.parked)
	if err == nil {
		have.settings, err = readSettings(ctx, conn)
	}
	if err == nil {
		err = conn.QueryRowContext(ctx, "pragma query_only").Scan(&have.queryOnly)
	}
	if err != nil {
		return nil, err
	}
	found := have.judge()
	if r.Consumer == "" || have.parked == 0 {
		return found, nil
	}
	const after, limit = 5 * time.Minute, 1000
	var n int
	err = conn.QueryRowContext(ctx, sqlite{}.sql(`select count(*) from (select 1 from @inbox_parked where consumer = $1 and state = 'retry'
		and coalesce(next_attempt_at, parked_at) < {now} - $2 and (lease_until is null or lease_until < {now}) limit $3)`),
		r.Consumer, after.Microseconds(), limit).Scan(&n)
	if err != nil {
		return found, err
	}
	return append(found, pgadvice.Overdue(n, limit)...), nil
}

// liteFacts are what there is to know about a SQLite database.
type liteFacts struct {
	version, journal, file, locking string
	queryOnly, parked               int
	settings
}

func (f *liteFacts) judge() (found []inbox.Finding) {
	add := func(is bool, severity inbox.Severity, code, setting string, value any, meaning, advice string) {
		if is {
			found = append(found, inbox.Finding{
				Code: code, Severity: severity, Setting: setting, Value: fmt.Sprint(value), Meaning: meaning, Advice: advice,
			})
		}
	}
	const full = 2
	const dsn = "Open the database with inboxsql.SQLiteDSN."
	fragile := f.journal == "off" || f.journal == "memory" && f.file != ""
	add(f.file == "", inbox.SeverityError, "in_memory", "file", "none",
		"The database is in memory: nothing in it is durable, and every connection has one of its own.", "Use a file.")
	add(fragile, inbox.SeverityError, "journal_mode", "journal_mode", f.journal,
		"A crash in the middle of a transaction may destroy the database.", "Use WAL. "+dsn)
	add(!fragile && f.file != "" && f.journal != "wal", inbox.SeverityInfo, "journal_mode", "journal_mode", f.journal,
		"Readers wait for the writer, and the writer for readers.", "Use WAL. "+dsn)
	add(f.synchronous < full, inbox.SeverityError, "synchronous", "synchronous", f.synchronous,
		"What was acked can be lost when the machine crashes.", "Set it to FULL (2). "+dsn)
	add(f.foreignKeys != 1, inbox.SeverityError, "foreign_keys", "foreign_keys", f.foreignKeys,
		"The guard against a handler that commits by itself is a foreign key.", "Turn it on for every connection. "+dsn)
	add(f.busyTimeout == 0, inbox.SeverityWarning, "busy_timeout", "busy_timeout", f.busyTimeout,
		"Everything but a batch's claims fails at once while another process writes, such as feeding parked messages.", "Set some seconds. "+dsn)
	add(f.locking == "exclusive", inbox.SeverityWarning, "locking_mode", "locking_mode", f.locking,
		"The first connection that writes keeps the file to itself: others, and the command ackafter, are refused.", "Set it to normal.")
	add(f.queryOnly != 0, inbox.SeverityError, "query_only", "query_only", f.queryOnly,
		"Nothing can be written: nothing can be claimed.", "Turn it off.")
	return found
}
