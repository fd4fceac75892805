// Package pgxharness runs package inboxtest's suite for stores on the PostgreSQL
// store. It is for tests.
package pgxharness

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/inbox/internal/cutproxy"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
)

// Place makes a test's tables and says how pools reach them; the function may be
// nil.
type Place func(tb testing.TB) (pgtest.DB, func(*pgxpool.Config))

// Harness returns the harness of stores whose tables are at the place.
func Harness(at Place) inboxtest.StoreHarness[pgx.Tx] {
	return inboxtest.StoreHarness[pgx.Tx]{
		Open:           func(tb testing.TB, isolation string) *inboxtest.StoreFixture[pgx.Tx] { return open(tb, at, isolation) },
		Isolations:     []string{string(pgx.ReadCommitted), string(pgx.RepeatableRead), string(pgx.Serializable)},
		AbortsOnError:  true,
		NamesStatement: true,
		DeadTx:         true,
		Parking:        true,
		Marking:        true,
	}
}

func open(tb testing.TB, at Place, isolation string) *inboxtest.StoreFixture[pgx.Tx] {
	tb.Helper()
	db, mode := at(tb)
	pool := db.Pool(tb, mode)
	store := NewStore(tb, pool, pgx.TxIsoLevel(isolation))
	outside := db.Pool(tb, mode)
	f := &inboxtest.StoreFixture[pgx.Tx]{
		Store: store,
		Exec: func(ctx context.Context, tx pgx.Tx, sql string) error {
			_, err := tx.Exec(ctx, sql)
			return err
		},
		Count: func(ctx context.Context, tx pgx.Tx, sql string) (n int64, err error) {
			err = tx.QueryRow(ctx, sql).Scan(&n)
			return n, err
		},
		Outside: func(ctx context.Context, sql string) error {
			_, err := outside.Exec(ctx, sql)
			return err
		},
		OutsideCount: func(ctx context.Context, sql string) (n int64, err error) {
			err = outside.QueryRow(ctx, sql).Scan(&n)
			return n, err
		},
		Own: func(ctx context.Context, fn func(tx pgx.Tx) error) error {
			return pgx.BeginFunc(ctx, outside, fn)
		},
		Endings: endings(),
		Kill: func(ctx context.Context, tx pgx.Tx) error {
			// Behind a pooler the connection does not know its process.
			var pid int32
			if err := tx.QueryRow(ctx, "select pg_backend_pid()").Scan(&pid); err != nil {
				return err
			}
			_, err := outside.Exec(ctx, "select pg_terminate_backend($1::integer)", pid)
			return err
		},
		CutCommit: func(tb testing.TB, reached bool) inbox.Store[pgx.Tx] {
			return NewStore(tb, cutPool(tb, db, mode, reached), pgx.TxIsoLevel(isolation))
		},
	}
	if db.Schema != "" {
		f.Waiting = func(ctx context.Context) (n int64, err error) {
			err = outside.QueryRow(ctx, `select count(*) from pg_stat_activity a
where wait_event_type = 'Lock' and exists (select from pg_locks l join pg_class c on c.oid = l.relation
  join pg_namespace s on s.oid = c.relnamespace where l.pid = a.pid and s.nspname = $1::text)`, db.Schema).Scan(&n)
			return n, err
		}
	}
	return f
}

// NewStore returns a store; "" is the default isolation level.
func NewStore(tb testing.TB, pool *pgxpool.Pool, isolation pgx.TxIsoLevel) *inboxpgx.Store {
	tb.Helper()
	store, err := inboxpgx.NewWithConfig(pool, &inboxpgx.Config{Isolation: isolation})
	if err != nil {
		tb.Fatal(err)
	}
	return store
}

// cutPool is a pool of one connection that breaks at the first COMMIT after its
// first one.
func cutPool(tb testing.TB, db pgtest.DB, mode func(*pgxpool.Config), reached bool) *pgxpool.Pool {
	tb.Helper()
	var proxy *cutproxy.Proxy
	pool := db.Pool(tb, func(c *pgxpool.Config) {
		if mode != nil {
			mode(c)
		}
		proxy = cutproxy.New(tb, net.JoinHostPort(c.ConnConfig.Host, Port(c)))
		Through(c, proxy)
		c.MaxConns = 1
	})
	// Statements are prepared by a first round; COMMIT goes by its name then.
	store := NewStore(tb, pool, "")
	b, err := store.Begin(tb.Context(), nil, inbox.BeginOptions{LockTimeout: 1e9})
	if err == nil {
		err = b.Commit(tb.Context())
	}
	if err != nil {
		tb.Fatal(err)
	}
	pattern := []byte("commit")
	if pool.Config().ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement {
		sum := sha256.Sum256(pattern)
		pattern = []byte("stmtcache_" + hex.EncodeToString(sum[:24]))
	}
	proxy.CutOnRequest(pattern, reached)
	tb.Cleanup(func() {
		if proxy.Cuts() != 1 {
			tb.Errorf("%d connections were cut, want 1: the test has shown nothing", proxy.Cuts())
		}
	})
	return pool
}

// Through makes a pool connect to the proxy.
func Through(c *pgxpool.Config, proxy *cutproxy.Proxy) {
	c.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", proxy.Addr())
	}
}

// Port is the port that a pool connects to.
func Port(c *pgxpool.Config) string { return strconv.Itoa(int(c.ConnConfig.Port)) }

// endings are the forms of case D8, each as SQL of the Tx and past it.
func endings() []inboxtest.Ending[pgx.Tx] {
	const insert = "insert into effects (k, note) values ('ghost', 'after the end')"
	gid := rand.Text() // Prepared transactions are the whole server's.
	var all []inboxtest.Ending[pgx.Tx]
	for _, texts := range [][]string{
		{"rollback", insert}, {"commit"}, {"commit", "begin"}, {"commit", "begin", insert}, {"rollback", "begin", insert},
		{"commit; begin"}, {"rollback; begin; savepoint s"}, {"commit and chain"}, {"rollback and chain"}, {"end"}, {"abort"},
		{"/* x */ commit"}, {"select 1; -- x\ncommit"}, {"rollback to savepoint ackafter_run; commit"},
		{"release savepoint ackafter_run"}, {"prepare transaction '" + gid + "'", "rollback prepared '" + gid + "'"},
		{"set constraints all immediate; commit"},
	} {
		name := ""
		for _, q := range texts {
			name += q + "; "
		}
		all = append(all,
			inboxtest.Ending[pgx.Tx]{Name: "Exec " + name, Do: func(ctx context.Context, tx pgx.Tx) error {
				for _, q := range texts {
					_, _ = tx.Exec(ctx, q)
				}
				return nil
			}},
			inboxtest.Ending[pgx.Tx]{Name: "Exec, reported, " + name, Do: func(ctx context.Context, tx pgx.Tx) error {
				var errs []error
				for _, q := range texts {
					_, err := tx.Exec(ctx, q)
					errs = append(errs, err)
				}
				return errors.Join(errs...)
			}},
			inboxtest.Ending[pgx.Tx]{Name: "Conn.Exec " + name, Do: func(ctx context.Context, tx pgx.Tx) error {
				for _, q := range texts {
					_, _ = tx.Conn().Exec(ctx, q)
				}
				return nil
			}},
		)
	}
	return append(all,
		inboxtest.Ending[pgx.Tx]{Name: "return tx.Commit()", Do: func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }},
		inboxtest.Ending[pgx.Tx]{Name: "tx.Commit() ignored", Do: func(ctx context.Context, tx pgx.Tx) error { _ = tx.Commit(ctx); return nil }},
		inboxtest.Ending[pgx.Tx]{Name: "defer tx.Rollback()", Do: func(ctx context.Context, tx pgx.Tx) error {
			defer tx.Rollback(ctx) //nolint:errcheck // This is the habit.
			_, err := tx.Exec(ctx, "select 1")
			return err
		}},
		inboxtest.Ending[pgx.Tx]{Name: "SendBatch commit", Do: func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue("select 1")
			b.Queue("commit")
			_ = tx.SendBatch(ctx, b).Close()
			return nil
		}},
		inboxtest.Ending[pgx.Tx]{Name: "QueryRow commit", Do: func(ctx context.Context, tx pgx.Tx) error {
			_ = tx.QueryRow(ctx, "commit").Scan()
			return nil
		}},
		inboxtest.Ending[pgx.Tx]{Name: "Prepare commit", Do: func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Prepare(ctx, "fin", "commit")
			_, _ = tx.Exec(ctx, "fin")
			return nil
		}},
		inboxtest.Ending[pgx.Tx]{Name: "rewritten to commit", Do: func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, "select 1", Rewriter("commit"))
			return nil
		}},
		inboxtest.Ending[pgx.Tx]{Name: "nested tx, commit", Do: func(ctx context.Context, tx pgx.Tx) error {
			n, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			_, _ = n.Exec(ctx, "commit")
			return n.Commit(ctx)
		}},
	)
}

// Rewriter replaces any statement by itself.
type Rewriter string

// RewriteQuery implements pgx.QueryRewriter.
func (r Rewriter) RewriteQuery(context.Context, *pgx.Conn, string, []any) (string, []any, error) {
	return string(r), nil, nil
}
