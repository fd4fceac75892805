package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
)

// Store is an inbox.Store on PostgreSQL. All methods may be called
// concurrently. It needs no closing; its pool belongs to the caller and must
// stay open while the store is used.
//
// An open batch uses one connection of the pool; the other methods borrow one
// for a moment.
type Store struct {
	pool      *pgxpool.Pool
	schema    string // Config.Schema
	isolation pgx.TxIsoLevel
	sql       statements
	describes bool // pgx asks for a description of each statement before it sends any

	// frozen is set when transactions keep one snapshot (REPEATABLE READ and
	// SERIALIZABLE): a parked row can then be there and not be seen.
	frozen atomic.Bool

	turns turns // of those who lease
}

var (
	_ inbox.Store[pgx.Tx] = (*Store)(nil)
	_ inbox.PoolSizer     = (*Store)(nil)
	_ inbox.Inspector     = (*Store)(nil)
	_ inbox.Parker        = (*Store)(nil)
	_ inbox.Undertaker    = (*Store)(nil)
	_ inbox.Batch[pgx.Tx] = (*batch)(nil)
)

// Config configures a Store. Nil means all defaults.
type Config struct {
	// Schema is where the inbox tables are. Default: they are found by the
	// connection's search_path. It must be a valid PostgreSQL name of at most 63
	// bytes, as it is in the catalog (no quotes); a blank one is an error.
	Schema string

	// Isolation is the isolation level of the transactions that handlers run
	// in. Default: the database's (default_transaction_isolation, READ COMMITTED
	// unless it was changed). At REPEATABLE READ and SERIALIZABLE handlers must
	// expect serialization failures; they use no attempt of the message.
	Isolation pgx.TxIsoLevel
}

// ErrRefused is returned to a handler that tries to end its transaction, which
// belongs to the inbox: by Commit or Rollback of its Tx, or by SQL text that
// holds such a statement. Nothing was sent to the server. It is inbox.ErrRefused.
var ErrRefused = inbox.ErrRefused

const (
	// undoTimeout bounds a ROLLBACK on a connection that is to be reused.
	undoTimeout = 5 * time.Second
	// maxSchema is the length of a name in PostgreSQL.
	maxSchema = 63
)

// New returns a Store with the default configuration. It does not connect. The
// only error is a nil pool.
func New(pool *pgxpool.Pool) (*Store, error) { return NewWithConfig(pool, nil) }

// NewWithConfig returns a Store; a nil config means the defaults. It does not
// connect. An error says which argument or field is wrong.
func NewWithConfig(pool *pgxpool.Pool, config *Config) (*Store, error) {
	if pool == nil {
		return nil, errors.New("inboxpgx: new: pool must not be nil")
	}
	var c Config
	if config != nil {
		c = *config
	}
	if err := c.validate(); err != nil {
		return nil, err
	}
	s := &Store{
		pool: pool, schema: c.Schema, isolation: c.Isolation, sql: newStatements(c.Schema),
		describes: pool.Config().ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeDescribeExec,
	}
	s.frozen.Store(c.Isolation == pgx.RepeatableRead || c.Isolation == pgx.Serializable)
	return s, nil
}

func (c *Config) validate() error {
	switch {
	case c.Schema == "":
	case strings.TrimSpace(c.Schema) == "":
		return fmt.Errorf("inboxpgx: config: Schema = %q: must not be blank", c.Schema)
	case len(c.Schema) > maxSchema:
		return fmt.Errorf("inboxpgx: config: Schema: has %d bytes, a PostgreSQL name has at most %d", len(c.Schema), maxSchema)
	case !utf8.ValidString(c.Schema) || strings.ContainsRune(c.Schema, 0):
		return fmt.Errorf("inboxpgx: config: Schema = %q: must be valid UTF-8 without NUL", c.Schema)
	}
	switch c.Isolation {
	case "", pgx.ReadUncommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
		return nil
	}
	return fmt.Errorf("inboxpgx: config: Isolation = %q: is none of pgx's isolation levels", c.Isolation)
}

// PoolSize returns the highest number of connections of the pool.
func (s *Store) PoolSize() int { return int(s.pool.Stat().MaxConns()) }

// acquire borrows a connection.
func (s *Store) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, &acquireError{err}
	}
	return conn, nil
}

// undo rolls back whatever is open on conn, so that it can be used again, even
// when ctx has ended. What cannot be rolled back in time is closed by the pool
// when it is released.
func undo(ctx context.Context, conn *pgx.Conn) {
	if conn.IsClosed() || conn.PgConn().TxStatus() == 'I' {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	_, _ = conn.PgConn().Exec(ctx, sqlRollback).ReadAll()
}

// giveBack rolls back and returns conn to the pool, which closes it when it is
// not fit to be used again.
func giveBack(ctx context.Context, conn *pgxpool.Conn) {
	undo(ctx, conn.Conn())
	conn.Release()
}
