package inboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/pgadvice"
)

var _ inbox.Advisor = (*Store)(nil)

// secondWait bounds the wait for a second connection of the pool.
const secondWait = time.Second

// Advise implements inbox.Advisor. It takes one connection of the pool for a moment,
// and a second one when there is a pooler between the pool and the server. It judges
// the settings as the pool's connections have them.
func (s *Store) Advise(ctx context.Context, r inbox.AdviceRequest) ([]inbox.Finding, error) {
	found, err := s.advise(ctx, r)
	if err != nil {
		return found, fmt.Errorf("inboxpgx: advise: %w", withoutSchema(markedByPool(err)))
	}
	return found, nil
}

func (s *Store) advise(ctx context.Context, r inbox.AdviceRequest) ([]inbox.Finding, error) {
	conn, err := s.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer giveBack(ctx, conn)
	pooler, err := s.findPooler(ctx, conn)
	if err != nil {
		return nil, err
	}
	config := s.pool.Config()
	return pgadvice.Advise(ctx, session{conn.Conn(), pgx.QueryExecModeExec}, pgadvice.Store{
		Schema: s.schema, Prefix: s.prefix(), PoolSize: s.PoolSize(), MaxIdle: config.MaxConnIdleTime,
		Isolated: s.isolation != "", BoundsIdle: true,
	}, r, pooler)
}

// prefix stands before the names of tables.
func (s *Store) prefix() string {
	if s.schema == "" {
		return ""
	}
	return pgx.Identifier{s.schema}.Sanitize() + "."
}

// findPooler compares the server process with the one that was announced when the
// connection was made; a pooler announces one of its own.
func (s *Store) findPooler(ctx context.Context, conn *pgxpool.Conn) (pgadvice.Pooler, error) {
	mode := s.pool.Config().ConnConfig.DefaultQueryExecMode
	a := session{conn.Conn(), mode}
	var pid uint32
	if err := (session{conn.Conn(), pgx.QueryExecModeExec}).Scan(ctx, "select pg_backend_pid()", nil, &pid); err != nil {
		return pgadvice.Pooler{}, err
	}
	if pid == conn.Conn().PgConn().PID() {
		return pgadvice.Pooler{}, nil
	}
	waited, cancel := context.WithTimeout(ctx, secondWait)
	second, err := s.acquire(waited)
	cancel()
	if err != nil {
		if ctx.Err() != nil {
			return pgadvice.Pooler{}, err
		}
		return pgadvice.Pooler{Present: true}, nil // All connections are in use.
	}
	defer giveBack(ctx, second)
	p, err := pgadvice.FindPooler(ctx, a, session{second.Conn(), mode})
	p.Present, p.Mode = true, mode.String()
	return p, err
}

// session is a connection that sends statements in one manner.
type session struct {
	conn *pgx.Conn
	mode pgx.QueryExecMode
}

func (s session) Scan(ctx context.Context, sql string, args []any, dest ...any) error {
	return s.conn.QueryRow(ctx, sql, append([]any{s.mode}, args...)...).Scan(dest...)
}

func (s session) Within(ctx context.Context, do func() error) error {
	if _, err := s.conn.Begin(ctx); err != nil {
		return err
	}
	defer undo(ctx, s.conn)
	return do()
}
