package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
)

// rig is a store over tables of its own.
type rig struct {
	*testing.T
	db    pgtest.DB
	pool  *pgxpool.Pool
	store *inboxpgx.Store
}

func newRig(t *testing.T, mode pgx.QueryExecMode) *rig {
	t.Helper()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	pool := db.Pool(t, func(c *pgxpool.Config) {
		if mode != 0 {
			c.ConnConfig.DefaultQueryExecMode = mode
		}
	})
	r := &rig{t, db, pool, pgxharness.NewStore(t, pool, "")}
	r.sql("create table effects (k text not null, note text not null, check (note <> 'bad'))")
	return r
}

func (r *rig) sql(text string) {
	r.Helper()
	if _, err := r.pool.Exec(r.Context(), text); err != nil {
		r.Fatalf("%s: %v", text, err)
	}
}

func (r *rig) count(text string, args ...any) (n int) {
	r.Helper()
	if err := r.pool.QueryRow(r.Context(), text, args...).Scan(&n); err != nil {
		r.Fatalf("%s: %v", text, err)
	}
	return n
}

func (r *rig) begin(keys ...string) inbox.Batch[pgx.Tx] {
	r.Helper()
	b, err := r.store.Begin(r.Context(), claims(keys...), inbox.BeginOptions{LockTimeout: 10 * time.Second, IdleTimeout: time.Minute})
	if err != nil {
		r.Fatalf("Begin: %v", err)
	}
	r.Cleanup(b.Abort)
	return b
}

func claims(keys ...string) []inbox.Claim {
	cs := make([]inbox.Claim, len(keys))
	for i, k := range keys {
		cs[i] = inbox.Claim{Key: inbox.Key{Consumer: "billing", MessageKey: k}, Fingerprint: []byte("fp"), Attempt: 1, Retention: time.Hour}
	}
	return cs
}

// use runs a handler for entry i.
func (r *rig) use(b inbox.Batch[pgx.Tx], i int, ok bool, handler func(ctx context.Context, tx pgx.Tx) error) error {
	r.Helper()
	tx, err := b.Start(r.Context(), i)
	if err != nil {
		r.Fatalf("Start: %v", err)
	}
	if err := handler(r.Context(), tx); err != nil {
		r.Fatalf("handler: %v", err)
	}
	return b.Finish(r.Context(), i, ok, nil)
}

func effect(k string) func(ctx context.Context, tx pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "insert into effects values ($1, 'work')", k)
		return err
	}
}

const (
	insertOne = "insert into effects (k, note) values ('way', 'plain')"
	insertArg = "insert into effects (k, note) values ('way', $1)"
	// failing fails in the server when it is run, not when it is prepared.
	failing = "insert into effects (k, note) values ('way', 'bad')"
	// failingLate fails after rows have been sent.
	failingLate = "select 1 / (3 - n) from generate_series(1, 5) n"
)

// way is a way to use the transaction.
type way struct {
	name string
	rows int    // that it leaves in effects
	sql  string // of the statement that fails, for those that swallow an error
	do   func(ctx context.Context, tx pgx.Tx) error
}

func goodWays() []way {
	ways := []way{
		{name: "nothing", do: func(context.Context, pgx.Tx) error { return nil }},
		{name: "Exec", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error { return second(tx.Exec(ctx, insertOne)) }},
		{name: "Exec with arguments", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error { return second(tx.Exec(ctx, insertArg, "a")) }},
		{name: "Exec of several statements", rows: 3, do: func(ctx context.Context, tx pgx.Tx) error {
			return second(tx.Exec(ctx, insertOne+"; "+insertOne+";"+insertOne))
		}},
		{name: "Exec of nothing", do: func(ctx context.Context, tx pgx.Tx) error { return second(tx.Exec(ctx, "")) }},
		{name: "named arguments", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			sql := strings.ReplaceAll(insertArg, "$1", "@note")
			return errors.Join(second(tx.Exec(ctx, sql, pgx.NamedArgs{"note": "n"})), second(tx.Exec(ctx, sql, pgx.StrictNamedArgs{"note": "n"})))
		}},
		{name: "query rewriter", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue("whatever", pgxharness.Rewriter(insertOne))
			return errors.Join(second(tx.Exec(ctx, "whatever", pgxharness.Rewriter(insertOne))), tx.SendBatch(ctx, b).Close())
		}},
		{name: "Query read", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, insertArg+" returning note", "q")
			if err != nil {
				return err
			}
			notes, err := pgx.CollectRows(rows, pgx.RowTo[string])
			return errors.Join(err, same(fmt.Sprint(notes), "[q]"))
		}},
		{name: "Query left open", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, insertArg+" returning note", "q")
			_ = rows.Next()
			return err
		}},
		{name: "Query closed early", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			rows, _ := tx.Query(ctx, "select n, 'x' as note from generate_series(1, 1000) n")
			ok := rows.Next()
			err := same(fmt.Sprint(ok, len(rows.FieldDescriptions()), len(rows.RawValues()), rows.TypeMap() != nil), "true 2 2 true")
			values, verr := rows.Values()
			rows.Close()
			rows.Close()
			return errors.Join(err, verr, same(fmt.Sprint(values), "[1 x]"), rows.Err(), second(tx.Exec(ctx, insertOne)))
		}},
		{name: "Query with formats", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			var note string
			return tx.QueryRow(ctx, insertArg+" returning note", pgx.QueryResultFormats{0}, "f").Scan(&note)
		}},
		{name: "QueryRow", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			var note string
			err := tx.QueryRow(ctx, insertArg+" returning note", "r").Scan(&note)
			none := tx.QueryRow(ctx, "select 1 where false").Scan(&note)
			if !errors.Is(none, pgx.ErrNoRows) {
				err = errors.Join(err, fmt.Errorf("no row: %w", none))
			}
			var raw pgtype.DriverBytes
			if tx.QueryRow(ctx, "select 'x'").Scan(&raw) == nil {
				err = errors.New("driver bytes from QueryRow")
			}
			return errors.Join(err, same(note, "r"))
		}},
		{name: "QueryRow not scanned", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			tx.QueryRow(ctx, insertArg+" returning note", "r")
			return nil
		}},
		{name: "scan error", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			var n int
			if tx.QueryRow(ctx, insertArg+" returning note", "r").Scan(&n) == nil {
				return errors.New("text scanned into int")
			}
			return nil
		}},
		{name: "encode error", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			if second(tx.Exec(ctx, insertArg, make(chan int))) == nil {
				return errors.New("a channel was encoded")
			}
			return second(tx.Exec(ctx, insertOne))
		}},
		{name: "Prepare", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Prepare(ctx, "ins", insertArg)
			var note string
			return errors.Join(err, second(tx.Exec(ctx, "ins", "p")), tx.QueryRow(ctx, insertArg+" returning note", "x").Scan(&note))
		}},
		{name: "CopyFrom", rows: 3, do: func(ctx context.Context, tx pgx.Tx) error {
			n, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"k", "note"}, pgx.CopyFromRows([][]any{{"way", "1"}, {"way", "2"}, {"way", "3"}}))
			return errors.Join(err, same(fmt.Sprint(n), "3"))
		}},
		{name: "Conn", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error { return second(tx.Conn().Exec(ctx, insertOne)) }},
		{name: "Conn of rows", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, "select 1")
			conn := rows.Conn()
			rows.Close()
			return errors.Join(err, rows.Err(), second(conn.Exec(ctx, insertOne)))
		}},
		{name: "large objects", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			lo := tx.LargeObjects()
			oid, err := lo.Create(ctx, 0)
			if err != nil {
				return err
			}
			obj, err := lo.Open(ctx, oid, pgx.LargeObjectModeWrite)
			if err != nil {
				return err
			}
			_, err = obj.Write([]byte("hello"))
			return errors.Join(err, obj.Close(), lo.Unlink(ctx, oid), second(tx.Exec(ctx, insertOne)))
		}},
		{name: "DDL", rows: 1, do: func(ctx context.Context, tx pgx.Tx) error {
			return errors.Join(second(tx.Exec(ctx, "create table fresh (n integer)")), second(tx.Exec(ctx, "insert into fresh values ($1)", 1)),
				second(tx.Exec(ctx, "drop table fresh")), second(tx.Exec(ctx, insertOne)))
		}},
		{name: "savepoints of its own", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			for _, q := range []string{insertOne, "savepoint mine", insertOne, "rollback to savepoint mine", "rollback to mine", insertOne, "release mine"} {
				if err := second(tx.Exec(ctx, q)); err != nil {
					return fmt.Errorf("%s: %w", q, err)
				}
			}
			return nil
		}},
	}
	return append(append(ways, batchWays()...), nestedWays()...)
}

func batchWays() []way {
	return []way{
		{name: "SendBatch with callbacks", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			b, got := &pgx.Batch{}, ""
			b.Queue(insertOne).Exec(func(ct pgconn.CommandTag) error { got += ct.String(); return nil })
			b.Queue("select $1::text", "x").QueryRow(func(row pgx.Row) error {
				var s string
				err := row.Scan(&s)
				got += " " + s
				return err
			})
			b.Queue(insertArg, "b")
			b.Queue("select n from generate_series(1, 3) n").Query(func(rows pgx.Rows) error {
				ns, err := pgx.CollectRows(rows, pgx.RowTo[int])
				got += fmt.Sprint(" ", ns)
				return err
			})
			br := tx.SendBatch(ctx, b)
			return errors.Join(br.Close(), br.Close(), same(got, "INSERT 0 1 x [1 2 3]"))
		}},
		{name: "SendBatch read", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue(insertOne)
			b.Queue(insertArg+" returning note", "b")
			b.Queue("select n from generate_series(1, 3) n")
			br := tx.SendBatch(ctx, b)
			_, err := br.Exec()
			var note string
			rowErr := br.QueryRow().Scan(&note)
			rows, _ := br.Query()
			ns, rowsErr := pgx.CollectRows(rows, pgx.RowTo[int])
			if br.Tx() != nil {
				err = errors.New("a batch has a transaction")
			}
			return errors.Join(err, rowErr, rowsErr, br.Close(), same(fmt.Sprint(note, ns), "b[1 2 3]"))
		}},
		{name: "SendBatch left open", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue(insertOne)
			b.Queue(insertArg, "b")
			tx.SendBatch(ctx, b)
			return nil
		}},
		{name: "SendBatch of nothing", do: func(ctx context.Context, tx pgx.Tx) error { return tx.SendBatch(ctx, &pgx.Batch{}).Close() }},
	}
}

func nestedWays() []way {
	return []way{
		{name: "nested", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			n, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			defer n.Rollback(ctx) //nolint:errcheck // The habit; harmless after Commit.
			return errors.Join(second(n.Exec(ctx, insertOne)), second(n.Exec(ctx, insertArg, "n")), n.Commit(ctx), closed(n.Commit(ctx)), closed(second(n.Exec(ctx, insertOne))))
		}},
		{name: "nested, failed and undone", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			n, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			_, _ = n.Exec(ctx, insertOne)
			if second(n.Exec(ctx, failing)) == nil {
				return errors.New("no failure")
			}
			return errors.Join(n.Rollback(ctx), closed(n.Rollback(ctx)), second(tx.Exec(ctx, insertOne)), second(tx.Exec(ctx, insertArg, "n")))
		}},
		{name: "nested in nested", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			return pgx.BeginFunc(ctx, tx, func(outer pgx.Tx) error {
				err := pgx.BeginFunc(ctx, outer, func(inner pgx.Tx) error {
					return errors.Join(second(inner.Exec(ctx, insertOne)), errUndo)
				})
				if !errors.Is(err, errUndo) {
					return err
				}
				_, err = outer.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"k", "note"}, pgx.CopyFromRows([][]any{{"way", "1"}}))
				b := &pgx.Batch{}
				b.Queue(insertOne)
				var n int
				lo := outer.LargeObjects()
				oid, loErr := lo.Create(ctx, 0)
				_, prepErr := outer.Prepare(ctx, "nested", "select 1")
				return errors.Join(err, outer.SendBatch(ctx, b).Close(), outer.QueryRow(ctx, "nested").Scan(&n), loErr, lo.Unlink(ctx, oid), prepErr,
					second(outer.Conn().Exec(ctx, "select 1")))
			})
		}},
		{name: "nested left open", rows: 2, do: func(ctx context.Context, tx pgx.Tx) error {
			n, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			return errors.Join(second(n.Exec(ctx, insertOne)), second(tx.Exec(ctx, insertOne)))
		}},
	}
}

var errUndo = errors.New("undo")

func second[T any](_ T, err error) error { return err }

func same(got, want string) error {
	if got != want {
		return fmt.Errorf("got %q, want %q", got, want)
	}
	return nil
}

func closed(err error) error {
	if !errors.Is(err, pgx.ErrTxClosed) {
		return fmt.Errorf("got %w, want pgx.ErrTxClosed", err)
	}
	return nil
}

// Everything a handler can do with a pgx.Tx works under its savepoint: kept with
// ok, undone without, and the neighbours' work is there in both cases.
func TestEveryWay(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, mode)
			for n, w := range goodWays() {
				for _, ok := range []bool{true, false} {
					keys := []string{fmt.Sprint("a", n, ok), fmt.Sprint("b", n, ok), fmt.Sprint("c", n, ok)}
					r.sql("delete from effects")
					b := r.begin(keys...)
					if err := r.use(b, 0, true, effect("neighbour")); err != nil {
						t.Fatalf("%s: before: %v", w.name, err)
					}
					if err := r.use(b, 1, ok, w.do); err != nil {
						t.Errorf("%s, ok %v: Finish: %v", w.name, ok, err)
						b.Abort()
						continue
					}
					if err := r.use(b, 2, true, effect("neighbour")); err != nil {
						t.Fatalf("%s: after: %v", w.name, err)
					}
					if err := b.Commit(t.Context()); err != nil {
						t.Fatalf("%s: Commit: %v", w.name, err)
					}
					want := w.rows
					if !ok {
						want = 0
					}
					if got := r.count("select count(*) from effects where k = 'way'"); got != want {
						t.Errorf("%s, ok %v: %d rows, want %d", w.name, ok, got, want)
					}
					if got := r.count("select count(*) from effects where k = 'neighbour'"); got != 2 {
						t.Errorf("%s, ok %v: the neighbours have %d rows, want 2", w.name, ok, got)
					}
				}
			}
		})
	}
}

func swallowingWays() []way {
	return []way{
		{name: "Exec", sql: failing, do: func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Exec(ctx, failing); return nil }},
		{name: "the first of two", sql: failing, do: func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, failing)
			_, _ = tx.Exec(ctx, "select 1")
			return nil
		}},
		{name: "one after an undone one", sql: "select 1/0", do: func(ctx context.Context, tx pgx.Tx) error {
			n, _ := tx.Begin(ctx)
			_, _ = n.Exec(ctx, failing)
			err := n.Rollback(ctx)
			_, _ = tx.Exec(ctx, "select 1/0")
			return err
		}},
		{name: "unknown table, in any mode", sql: "select * from nowhere where n = $1", do: func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, "select * from nowhere where n = $1", 1)
			return nil
		}},
		{name: "Query unread", sql: failingLate, do: func(ctx context.Context, tx pgx.Tx) error {
			rows, _ := tx.Query(ctx, failingLate) //nolint:sqlclosecheck // The handler forgets to.
			_ = rows
			return nil
		}},
		{name: "Query read to its error", sql: failingLate, do: func(ctx context.Context, tx pgx.Tx) error {
			rows, _ := tx.Query(ctx, failingLate)
			for rows.Next() {
				_ = rows.Scan(nil)
			}
			return nil
		}},
		{name: "QueryRow", sql: failing + " returning k", do: func(ctx context.Context, tx pgx.Tx) error {
			var k string
			_ = tx.QueryRow(ctx, failing+" returning k").Scan(&k)
			return nil
		}},
		{name: "QueryRow not scanned", sql: failing + " returning k", do: func(ctx context.Context, tx pgx.Tx) error {
			tx.QueryRow(ctx, failing+" returning k")
			return nil
		}},
		{name: "SendBatch", sql: failing, do: func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue(insertOne)
			b.Queue(failing)
			b.Queue(insertOne)
			_ = tx.SendBatch(ctx, b).Close()
			return nil
		}},
		{name: "SendBatch left open", sql: failing, do: func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue(insertOne)
			b.Queue(failing)
			_, err := tx.SendBatch(ctx, b).Exec()
			return err
		}},
		{name: "CopyFrom", sql: `copy "effects" from stdin`, do: func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"k", "note"}, pgx.CopyFromRows([][]any{{"way", "bad"}}))
			return nil
		}},
		{name: "Prepare", sql: "select nonsense", do: func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Prepare(ctx, "x", "select nonsense"); return nil }},
		{name: "nested left in error", sql: failing, do: func(ctx context.Context, tx pgx.Tx) error {
			n, err := tx.Begin(ctx)
			_, _ = n.Exec(ctx, failing)
			return err
		}},
		{name: "Conn", do: func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Conn().Exec(ctx, failing); return nil }},
		{name: "large objects", do: func(ctx context.Context, tx pgx.Tx) error {
			lo := tx.LargeObjects()
			_ = lo.Unlink(ctx, 1)
			return nil
		}},
		{name: "refused commit", sql: "commit", do: func(ctx context.Context, tx pgx.Tx) error {
			if err := tx.Commit(ctx); !errors.Is(err, inboxpgx.ErrRefused) {
				return fmt.Errorf("Commit: %w", err)
			}
			return second(tx.Exec(ctx, insertOne))
		}},
		{name: "refused text", sql: "select 1; rollback", do: func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "select 1; rollback"); !errors.Is(err, inboxpgx.ErrRefused) {
				return fmt.Errorf("Exec: %w", err)
			}
			return nil
		}},
	}
}

// However a handler comes by an error that it ignores, it has failed, and the
// error names the statement.
//
// case D7
func TestEveryWayToSwallowAnError(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, mode)
			for n, w := range swallowingWays() {
				b := r.begin(fmt.Sprint("a", n), fmt.Sprint("b", n))
				err := r.use(b, 0, true, w.do)
				var st *inbox.StatementError
				want := w.sql
				if want == "" {
					want = "(sent on the connection itself, text not known)"
				}
				if !errors.Is(err, inbox.ErrSwallowed) || !errors.As(err, &st) || st.SQL != want {
					t.Errorf("%s: Finish: %v, want ErrSwallowed for %q", w.name, err, want)
				}
				if err := r.use(b, 1, true, effect(fmt.Sprint("b", n))); err != nil {
					t.Fatalf("%s: the neighbour: %v", w.name, err)
				}
				if err := b.Commit(t.Context()); err != nil {
					t.Fatalf("%s: Commit: %v", w.name, err)
				}
				if got := r.count("select count(*) from effects where k = 'way'"); got != 0 {
					t.Errorf("%s: %d rows stay", w.name, got)
				}
				if got := r.count("select count(*) from inbox where message_key = $1::text", fmt.Sprint("a", n)); got != 0 {
					t.Errorf("%s: the claim stays", w.name)
				}
			}
		})
	}
}

// A Tx is dead after its run, whatever is asked of it and of what came from it.
func TestDeadTx(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	b := r.begin("k1")
	ctx := t.Context()
	tx, err := b.Start(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := tx.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	rows, _ := tx.Query(ctx, "select n from generate_series(1, 5) n")
	rows.Next()
	if err := b.Finish(ctx, 0, true, nil); err != nil {
		t.Fatal(err)
	}
	if rows.Next() || rows.Scan(new(int)) == nil || rows.Err() == nil {
		t.Error("rows outlive the run")
	}
	queue := &pgx.Batch{}
	queue.Queue("select 1")
	for _, tx := range []pgx.Tx{tx, n} {
		lo := tx.LargeObjects()
		_, queryErr := tx.Query(ctx, "select 1") //nolint:sqlclosecheck // There are none.
		_, beginErr := tx.Begin(ctx)
		_, copyErr := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"k"}, pgx.CopyFromRows(nil))
		for i, err := range []error{
			second(tx.Exec(ctx, "select 1")), queryErr, tx.QueryRow(ctx, "select 1").Scan(nil), tx.SendBatch(ctx, queue).Close(), copyErr,
			second(tx.Prepare(ctx, "x", "select 1")), second(lo.Create(ctx, 0)), beginErr, tx.Commit(ctx), tx.Rollback(ctx),
		} {
			if !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("%T, use %d: %v, want pgx.ErrTxClosed", tx, i, err)
			}
		}
		if tx.Conn() != nil {
			t.Errorf("%T: the connection can still be had", tx)
		}
	}
	if err := b.Commit(ctx); err != nil {
		t.Fatal(err)
	}
}

// A goroutine that a handler left behind on the transaction makes the batch
// unusable, and Abort gets rid of both.
func TestGoroutineLeftBehind(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	b := r.begin("k1")
	tx, err := b.Start(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- second(tx.Exec(t.Context(), "select pg_sleep(60)")) }()
	for r.count("select count(*) from pg_stat_activity where query = 'select pg_sleep(60)' and state = 'active' and wait_event = 'PgSleep'") == 0 {
		runtime.Gosched()
	}
	if second(tx.Exec(t.Context(), "select 1")) == nil {
		t.Error("two goroutines use one transaction")
	}
	if err := b.Finish(t.Context(), 0, true, nil); err == nil {
		t.Error("Finish beside a running statement succeeds")
	}
	b.Abort()
	select {
	case err := <-done:
		if err == nil {
			t.Error("the statement went on")
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the statement goes on after Abort")
	}
	if err := b.Commit(t.Context()); !errors.Is(err, inbox.ErrNotCommitted) {
		t.Errorf("Commit after Abort: %v", err)
	}
	b = r.begin("k1") // The server has let go as well.
	if got := b.Entries()[0].Outcome; got != inbox.FirstAttempt {
		t.Errorf("outcome %q", got)
	}
}

// "set constraints all immediate" in a batch meets the batch's guard: that is
// contention, so the message runs again alone, where it works.
func TestSetConstraintsImmediate(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	const sql = "set constraints all immediate"
	b := r.begin("k1", "k2")
	tx, err := b.Start(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), sql); r.store.Classify(err) != inbox.ClassContention {
		t.Errorf("in a batch: %v: class %d", err, r.store.Classify(err))
	}
	b.Abort()
	b = r.begin("k1")
	if err := r.use(b, 0, true, func(ctx context.Context, tx pgx.Tx) error { return second(tx.Exec(ctx, sql)) }); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}
