package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

var travelModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

const travelling = "insert into effects (k, note) values ($1::text, $2::text)"

// travelWays run one statement that was seen before, first thing in the run; note
// "bad" makes it fail.
func travelWays() map[string]func(ctx context.Context, tx pgx.Tx, note string) error {
	return map[string]func(ctx context.Context, tx pgx.Tx, note string) error{
		"Exec": func(ctx context.Context, tx pgx.Tx, note string) error {
			tag, err := tx.Exec(ctx, travelling, "way", note)
			if err == nil && tag.String() != "INSERT 0 1" {
				err = fmt.Errorf("tag %q", tag)
			}
			return err
		},
		"QueryRow": func(ctx context.Context, tx pgx.Tx, note string) error {
			var got string
			if err := tx.QueryRow(ctx, travelling+" returning note", "way", note).Scan(&got); err != nil {
				return err
			}
			return same(got, note)
		},
		"QueryRow without rows": func(ctx context.Context, tx pgx.Tx, note string) error {
			if err := tx.QueryRow(ctx, "select 1 where $1 = 'nobody'", "x").Scan(nil); !errors.Is(err, pgx.ErrNoRows) {
				return err
			}
			return second(tx.Exec(ctx, travelling, "way", note))
		},
		"Query": func(ctx context.Context, tx pgx.Tx, note string) error {
			rows, err := tx.Query(ctx, travelling+" returning k, note", "way", note)
			if err != nil {
				return err
			}
			got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ K, Note string }])
			if err != nil {
				return err
			}
			return errors.Join(same(fmt.Sprint(got), "[{way "+note+"}]"), same(rows.CommandTag().String(), "INSERT 0 1"), second(tx.Exec(ctx, "select 1")))
		},
		"Query left open": func(ctx context.Context, tx pgx.Tx, note string) error {
			rows, err := tx.Query(ctx, travelling+" returning note", "way", note)
			if note == "bad" {
				rows.Close()
				return errors.Join(err, rows.Err())
			}
			return err
		},
		"Query closed early": func(ctx context.Context, tx pgx.Tx, note string) error {
			rows, _ := tx.Query(ctx, "select n, $1::text from generate_series(1, 1000) n", "x")
			rows.Next()
			rows.Close()
			return errors.Join(rows.Err(), second(tx.Exec(ctx, travelling, "way", note)))
		},
		"scan error": func(ctx context.Context, tx pgx.Tx, note string) error {
			var n int
			err := tx.QueryRow(ctx, travelling+" returning note", "way", note).Scan(&n)
			var scan pgx.ScanArgError
			if errors.As(err, &scan) {
				return second(tx.Exec(ctx, "select 1"))
			}
			return err
		},
		"named arguments": func(ctx context.Context, tx pgx.Tx, note string) error {
			return second(tx.Exec(ctx, "insert into effects (k, note) values ('way', @note)", pgx.NamedArgs{"note": note}))
		},
	}
}

// The savepoint that travels in front of a run's first statement does what one
// of its own does: a run that fails loses its work, its neighbours keep theirs.
func TestTravellingSavepoint(t *testing.T) {
	t.Parallel()
	for _, mode := range travelModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, mode)
			n := 0
			for name, do := range travelWays() {
				for _, fate := range []string{"succeeds", "succeeds again", "reports", "swallows", "is refused"} {
					n++
					r.sql("delete from effects")
					keys := []string{fmt.Sprint("a", n), fmt.Sprint("b", n), fmt.Sprint("c", n), fmt.Sprint("d", n)}
					b := r.begin(keys...)
					run := func(i int) error {
						note, ok := "fine", true
						if i == 2 && (fate == "reports" || fate == "swallows") {
							note, ok = "bad", fate == "swallows"
						}
						err := r.use(b, i, ok, func(ctx context.Context, tx pgx.Tx) error {
							err := do(ctx, tx, note)
							if note == "bad" && err == nil {
								return errors.New("a bad note is accepted")
							} else if note == "bad" {
								return nil
							}
							if i == 2 && fate == "is refused" {
								_ = tx.Rollback(ctx)
							}
							return err
						})
						return err
					}
					for i := range keys {
						err := run(i)
						wantErr := i == 2 && (fate == "swallows" || fate == "is refused")
						if wantErr != errors.Is(err, inbox.ErrSwallowed) || err != nil && !wantErr {
							t.Fatalf("%s %s: Finish(%d): %v", name, fate, i, err)
						}
					}
					if err := b.Commit(t.Context()); err != nil {
						t.Fatalf("%s %s: Commit: %v", name, fate, err)
					}
					want := 3
					if fate == "succeeds" || fate == "succeeds again" {
						want = 4
					}
					if got := r.count("select count(*) from effects"); got != want {
						t.Errorf("%s %s: %d effects, want %d", name, fate, got, want)
					}
				}
			}
		})
	}
}

// A value that cannot be encoded is the message's fault, also where pgx gives up
// the connection for it. Alone, the batch stays usable.
func TestUnencodableValue(t *testing.T) {
	t.Parallel()
	for _, mode := range travelModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, mode)
			r.sql("create table numbers (n integer)")
			insert := func(n int64) func(ctx context.Context, tx pgx.Tx) error {
				return func(ctx context.Context, tx pgx.Tx) error {
					return second(tx.Exec(ctx, "insert into numbers values ($1::integer)", n))
				}
			}
			b := r.begin("k1", "k2", "k3")
			for i := range 2 {
				if err := r.use(b, i, true, insert(1)); err != nil {
					t.Fatal(err)
				}
			}
			tx, err := b.Start(t.Context(), 2)
			if err != nil {
				t.Fatal(err)
			}
			err = insert(math.MaxInt64)(t.Context(), tx)
			if err == nil || r.store.Classify(err) != inbox.ClassMessage {
				t.Errorf("handler: %v: class %d, want ClassMessage", err, r.store.Classify(err))
			}
			if err := b.Finish(t.Context(), 2, false, nil); err != nil {
				if r.store.Classify(err) != inbox.ClassMessage || errors.Is(err, inbox.ErrTxEnded) {
					t.Errorf("Finish: %v: class %d, want ClassMessage", err, r.store.Classify(err))
				}
				b.Abort()
				if n := r.count("select count(*) from numbers"); n != 0 {
					t.Errorf("%d rows of an aborted batch", n)
				}
			} else if err := b.Commit(t.Context()); err != nil {
				t.Errorf("Commit: %v", err)
			}
			single := r.begin("k3")
			tx, err = single.Start(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := insert(math.MaxInt64)(t.Context(), tx); err == nil {
				t.Error("a value is encoded that cannot be")
			}
			if err := errors.Join(single.Finish(t.Context(), 0, false, nil), single.Commit(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
}

// A context that has ended before a run's first statement fails the run and not
// the batch.
func TestEndedContextBeforeTheFirstStatement(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	b := r.begin("k1", "k2", "k3", "k4")
	for i := range 4 {
		err := r.use(b, i, i%2 == 0, func(ctx context.Context, tx pgx.Tx) error {
			if i%2 == 0 {
				return second(tx.Exec(ctx, travelling, "k", "fine"))
			}
			if err := second(tx.Exec(ended, travelling, "k", "ended")); !errors.Is(err, context.Canceled) {
				return fmt.Errorf("Exec: %w", err)
			}
			if _, err := tx.Begin(ended); !errors.Is(err, context.Canceled) {
				return fmt.Errorf("Begin: %w", err)
			}
			return nil
		})
		if err != nil {
			t.Fatalf("run %d: %v", i, err)
		}
	}
	if err := b.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := r.count("select count(*) from effects"); n != 2 {
		t.Errorf("%d effects, want 2", n)
	}
}

// A transaction that is not the batch's any more is noticed wherever the
// savepoint is set, without anything of the handler's in between.
func TestForeignTransactionIsNoticed(t *testing.T) {
	t.Parallel()
	r := newRig(t, 0)
	for _, next := range []string{"start", "park", "commit"} {
		b := r.begin("a-"+next, "b-"+next)
		var conn *pgx.Conn
		if err := r.use(b, 0, true, func(ctx context.Context, tx pgx.Tx) error {
			conn = tx.Conn()
			return second(tx.Exec(ctx, travelling, "k", "fine"))
		}); err != nil {
			t.Fatal(err)
		}
		if err := r.use(b, 1, true, effect("k")); err != nil { // Not by Conn: its savepoint stays for the next.
			t.Fatal(err)
		}
		// A goroutine that kept the connection, with the worst timing.
		for _, q := range []string{"rollback", "begin"} {
			if _, err := conn.Exec(t.Context(), q); err != nil {
				t.Fatal(err)
			}
		}
		var err error
		switch next {
		case "start":
			var tx pgx.Tx
			if tx, err = b.Start(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			if err := second(tx.Exec(t.Context(), travelling, "k", "lost")); err == nil {
				t.Error("a statement runs in a foreign transaction")
			}
			err = b.Finish(t.Context(), 0, true, nil)
		case "park":
			p := inbox.Parked{Key: claims("x")[0].Key, State: inbox.ParkedDead, Reason: inbox.ReasonAttempts}
			p.Message = &broker.Message{}
			err = b.Park(t.Context(), -1, p)
		case "commit":
			err = b.Commit(t.Context())
		}
		if !errors.Is(err, inbox.ErrTxEnded) {
			t.Errorf("%s: %v, want ErrTxEnded", next, err)
		}
		b.Abort()
	}
	if n := r.count("select count(*) from effects") + r.count("select count(*) from inbox") + r.count("select count(*) from inbox_parked"); n != 0 {
		t.Errorf("%d rows", n)
	}
}
