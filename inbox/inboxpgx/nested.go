package inboxpgx

import (
	"context"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// nested is a nested transaction of a handler, on a savepoint of its own.
type nested struct {
	run    *run
	name   string
	closed atomic.Bool
}

var _ pgx.Tx = (*nested)(nil)

func (n *nested) err() error {
	if n.closed.Load() {
		return pgx.ErrTxClosed
	}
	return nil
}

// Begin implements pgx.Tx.
func (n *nested) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := n.err(); err != nil {
		return nil, err
	}
	return n.run.Begin(ctx)
}

// Commit implements pgx.Tx: it releases the savepoint.
func (n *nested) Commit(ctx context.Context) error { return n.end(ctx, "release savepoint ") }

// Rollback implements pgx.Tx: it rolls back to the savepoint.
func (n *nested) Rollback(ctx context.Context) error { return n.end(ctx, "rollback to savepoint ") }

func (n *nested) end(ctx context.Context, sql string) error {
	if n.closed.Swap(true) {
		return pgx.ErrTxClosed
	}
	_, err := n.run.exec(ctx, sql+n.name)
	return err
}

// Exec implements pgx.Tx.
func (n *nested) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := n.err(); err != nil {
		return pgconn.CommandTag{}, err
	}
	return n.run.Exec(ctx, sql, args...)
}

// Query implements pgx.Tx.
func (n *nested) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := n.err(); err != nil {
		return &rows{run: n.run, err: err}, err
	}
	return n.run.Query(ctx, sql, args...)
}

// QueryRow implements pgx.Tx.
func (n *nested) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	out, _ := n.Query(ctx, sql, args...)
	return row{out}
}

// SendBatch implements pgx.Tx.
func (n *nested) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if err := n.err(); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	return n.run.SendBatch(ctx, b)
}

// CopyFrom implements pgx.Tx.
func (n *nested) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, source pgx.CopyFromSource) (int64, error) {
	if err := n.err(); err != nil {
		return 0, err
	}
	return n.run.CopyFrom(ctx, table, columns, source)
}

// Prepare implements pgx.Tx.
func (n *nested) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := n.err(); err != nil {
		return nil, err
	}
	return n.run.Prepare(ctx, name, sql)
}

// LargeObjects implements pgx.Tx.
func (n *nested) LargeObjects() pgx.LargeObjects {
	if n.err() != nil {
		return closedTx().LargeObjects()
	}
	return n.run.LargeObjects()
}

// Conn implements pgx.Tx.
func (n *nested) Conn() *pgx.Conn { return n.run.Conn() }
