package inboxpgx

import (
	"context"
	"reflect"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// The savepoint of a run costs no round trip when it travels in front of the
// handler's first statement. It must be set before anything of the statement can
// fail, and pgx prepares a text that it does not know before it sends the rest.
// So only texts travel that have succeeded on the connection before, with
// arguments of the same types; for others, and for everything but Exec and Query,
// the savepoint is set on its own.
//
// If it comes to the worst (a statement that pgx has forgotten, and whose table
// has since been dropped; an argument whose value cannot be encoded, which makes
// pgx give up the connection) the savepoint is not there when the statement
// fails. Then the batch is unusable, its messages run one by one, and there the
// failure is the message's alone: a single one's savepoint was set at the begin.

const (
	// maxSeen bounds the texts that are remembered for a connection; pgx itself
	// keeps 512 by default.
	maxSeen = 256
	// maxSeenText is the longest text that is remembered.
	maxSeenText = 8 << 10
	seenKey     = "ackafter inboxpgx statements"
)

// seen are texts that have succeeded on a connection, with the types of their
// arguments.
type seen map[string][]reflect.Type

// saw remembers a text that has succeeded. The caller has the connection.
func (r *run) saw(sql string, args []any) {
	if len(sql) > maxSeenText {
		return
	}
	data := r.conn.PgConn().CustomData()
	s, _ := data[seenKey].(seen)
	if _, known := s[sql]; s == nil || !known && len(s) >= maxSeen {
		s = make(seen)
		data[seenKey] = s
	}
	if !sameTypes(s[sql], args) || s[sql] == nil {
		s[sql] = typesOf(args)
	}
}

func typesOf(args []any) []reflect.Type {
	types := make([]reflect.Type, len(args))
	for i, a := range args {
		types[i] = reflect.TypeOf(a)
	}
	return types
}

func sameTypes(types []reflect.Type, args []any) bool {
	return slices.EqualFunc(types, args, func(t reflect.Type, a any) bool { return t == reflect.TypeOf(a) })
}

// travels tells whether the savepoint is to be set and can travel in front of
// the statement.
func (r *run) travels(sql string, args []any) bool {
	if len(r.prelude) == 0 || r.broken != nil || r.conn.PgConn().IsBusy() || r.batch.store.describes {
		return false
	}
	if len(args) > 0 {
		switch args[0].(type) {
		case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID, pgx.QueryRewriter:
			return false
		}
	}
	s, _ := r.conn.PgConn().CustomData()[seenKey].(seen)
	types, known := s[sql]
	return known && sameTypes(types, args)
}

// ready sets the savepoint on its own, if it is not set. The caller has the
// connection.
func (r *run) ready(ctx context.Context) error {
	if r.broken != nil || len(r.prelude) == 0 {
		return r.broken
	}
	if err := r.batch.control(ctx, strings.Join(r.prelude, "; ")); err != nil {
		return r.notSet(err)
	}
	r.set()
	return nil
}

// set notes that the savepoint is there.
func (r *run) set() { r.prelude, r.batch.sp = nil, spClean }

// notSet notes that the savepoint could not be set. When nothing has failed on
// the server, nothing was sent, and it can still be.
func (r *run) notSet(err error) error {
	if !r.conn.IsClosed() && r.conn.PgConn().TxStatus() == 'T' {
		return err
	}
	r.broken = savepointError(marked(r.conn, err))
	return r.broken
}

// sendBehind sends the savepoint and a statement behind it, and reads up to the
// statement's answer.
func (r *run) sendBehind(ctx context.Context, sql string, args []any) (pgx.BatchResults, error) {
	q := &pgx.Batch{}
	for _, text := range r.prelude {
		q.Queue(text)
	}
	q.Queue(sql, slices.Clone(args)...)
	results := r.conn.SendBatch(ctx, q)
	for range r.prelude {
		if _, err := results.Exec(); err != nil {
			_ = results.Close()
			return nil, r.notSet(err)
		}
	}
	r.set()
	return results, nil
}

func (r *run) execBehind(ctx context.Context, sql string, args []any) (pgconn.CommandTag, error) {
	results, err := r.sendBehind(ctx, sql, args)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := results.Exec()
	if closing := results.Close(); err == nil {
		err = closing
	}
	return tag, err
}

func (r *run) queryBehind(ctx context.Context, sql string, args []any) (pgx.Rows, pgx.BatchResults, error) {
	results, err := r.sendBehind(ctx, sql, args)
	if err != nil {
		return nil, nil, err
	}
	in, err := results.Query()
	if err != nil {
		_ = results.Close()
		return in, nil, err
	}
	return in, results, nil
}
