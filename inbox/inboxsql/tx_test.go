package inboxsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
)

// bothStores runs a test on a store of each database, with a table effects
// (k text, n integer).
func bothStores(t *testing.T, run func(t *testing.T, store *inboxsql.Store, db *sql.DB)) {
	t.Helper()
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		store, db := sqliteStore(t)
		run(t, store, db)
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		store, db := postgresStore(t)
		run(t, store, db)
	})
}

func postgresStore(t *testing.T) (*inboxsql.Store, *sql.DB) {
	t.Helper()
	f := openPostgres(t, postgresURL(t), "", pgx.QueryExecModeCacheStatement)
	store, ok := f.Store.(*inboxsql.Store)
	if !ok {
		t.Fatalf("the store is a %T", f.Store)
	}
	if err := f.Outside(t.Context(), "create table effects (k text not null, n integer not null default 1)"); err != nil {
		t.Fatal(err)
	}
	return store, f.DB
}

// finish ends a run and commits.
func finish(t *testing.T, b inbox.Batch[*sql.Tx], i int) {
	t.Helper()
	if err := b.Finish(t.Context(), i, true, nil); err != nil {
		t.Fatalf("Finish: %v", err)
	}
	if err := b.Commit(t.Context()); err != nil {
		t.Fatalf("Commit: %v", err)
	}
}

// A handler's transaction is a usual one.
func TestTxDoesWhatHandlersNeed(t *testing.T) {
	t.Parallel()
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		ctx := t.Context()
		b := begin(t, store, "k")
		tx := start(t, b, 0)
		st, err := tx.PrepareContext(ctx, "insert into effects (k, n) values ($1, $2)")
		if err != nil {
			t.Fatal(err)
		}
		for i := range 5 {
			if _, err := st.ExecContext(ctx, fmt.Sprint("k", i), i); err != nil {
				t.Fatal(err)
			}
		}
		defer func() { _ = st.Close() }()
		var returned string
		if err := tx.QueryRowContext(ctx, "insert into effects (k, n) values ($1, $2) returning k", "r", 10).Scan(&returned); err != nil || returned != "r" {
			t.Errorf("returning: %q, %v", returned, err)
		}
		rows, err := tx.QueryContext(ctx, "select k, n from effects where n < 3 order by n")
		if err != nil {
			t.Fatal(err)
		}
		types, err := rows.ColumnTypes()
		if err != nil || len(types) != 2 || !strings.EqualFold(types[0].DatabaseTypeName(), "text") {
			t.Errorf("column types: %v, %v", types, err)
		}
		var got []string
		for rows.Next() {
			var k string
			var n int
			if err := rows.Scan(&k, &n); err != nil {
				t.Fatal(err)
			}
			got = append(got, k)
		}
		if err := rows.Err(); err != nil || len(got) != 3 {
			t.Errorf("rows: %v, %v", got, err)
		}
		if rows.NextResultSet() {
			t.Error("there is a second result set")
		}
		_ = rows.Close() //nolint:sqlclosecheck // Before the next statement.
		// An error that is expected, under a savepoint of the handler's own.
		mustExec(t, tx, "savepoint mine")
		if _, err := tx.ExecContext(ctx, "insert into effects (k) values (null)"); err == nil {
			t.Error("null is accepted")
		}
		mustExec(t, tx, "rollback to savepoint mine")
		mustExec(t, tx, "release savepoint mine")
		if err := tx.QueryRowContext(ctx, "select k from effects where k = 'none'").Scan(&returned); !errors.Is(err, sql.ErrNoRows) {
			t.Errorf("no rows: %v", err)
		}
		finish(t, b, 0)
		if n := count(t, db, "select count(*) from effects"); n != 6 {
			t.Errorf("%d rows, want 6", n)
		}
	})
}

// An expected error without a savepoint fails the run on both databases.
//
// case D7.
func TestFailedStatementCounts(t *testing.T) {
	t.Parallel()
	const broken = "insert into effects (k) values (null)"
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		ctx := t.Context()
		for name, fail := range map[string]func(tx *sql.Tx) error{
			"exec": func(tx *sql.Tx) error { _, err := tx.ExecContext(ctx, broken); return err },
			"query": func(tx *sql.Tx) error {
				var k string
				return tx.QueryRowContext(ctx, broken+" returning k").Scan(&k)
			},
			"prepared": func(tx *sql.Tx) error {
				st, err := tx.PrepareContext(ctx, broken)
				if err != nil {
					return err
				}
				defer func() { _ = st.Close() }()
				_, err = st.ExecContext(ctx)
				return err
			},
			"prepare": func(tx *sql.Tx) error {
				st, err := tx.PrepareContext(ctx, "select from from")
				if err == nil {
					defer func() { _ = st.Close() }()
				}
				return err
			},
			"an argument that no driver takes": func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, "insert into effects (k, n) values ('x', $1)", "not a number, "+fmt.Sprint(time.Now()))
				_, err2 := tx.ExecContext(ctx, broken)
				return errors.Join(err, err2)
			},
		} {
			b := begin(t, store, "k1", "k2")
			mustExec(t, start(t, b, 0), "insert into effects (k) values ('k1')")
			if err := b.Finish(ctx, 0, true, nil); err != nil {
				t.Fatal(err)
			}
			tx := start(t, b, 1)
			mustExec(t, tx, "insert into effects (k) values ('k2')")
			if err := fail(tx); err == nil {
				t.Fatalf("%s: no error", name)
			}
			err := b.Finish(ctx, 1, true, nil)
			var st *inbox.StatementError
			if !errors.Is(err, inbox.ErrSwallowed) || !errors.As(err, &st) {
				t.Errorf("%s: Finish: %v, want ErrSwallowed with the statement", name, err)
			}
			if err := b.Commit(ctx); err != nil {
				t.Errorf("%s: Commit: %v", name, err)
			}
			if n := count(t, db, "select count(*) from effects where k = 'k2'") + count(t, db, "select count(*) from effects"); n != 1 {
				t.Errorf("%s: %d effects, want that of k1 only", name, n)
			}
			mustExec(t, db, "delete from effects")
			mustExec(t, db, "delete from inbox")
		}
	})
}

// An error that only shows while rows are read, or when they are closed for the
// handler, counts as well.
//
// case D7.
func TestErrorAmongRows(t *testing.T) {
	t.Parallel()
	queries := map[string]string{
		"SQLite":     "select abs(case when n > 2 then -9223372036854775808 else n end) from effects",
		"PostgreSQL": "select 1 / (3 - n) from effects",
	}
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		for i := range 5 {
			mustExec(t, db, "insert into effects (k, n) values ('x', $1)", i)
		}
		query := queries[t.Name()[strings.LastIndex(t.Name(), "/")+1:]]
		for _, reads := range []int{10, 0} {
			if reads == 0 && strings.Contains(query, "abs") {
				continue // SQLite does not compute what nobody reads.
			}
			b := begin(t, store, "k")
			rows, err := start(t, b, 0).QueryContext(t.Context(), query)
			if err != nil {
				t.Fatal(err)
			}
			for range reads {
				rows.Next()
			}
			if reads > 0 {
				_ = rows.Err()   // Ignored by the handler.
				_ = rows.Close() //nolint:sqlclosecheck // Not for every case.
			}
			err = b.Finish(t.Context(), 0, true, nil)
			var st *inbox.StatementError
			if !errors.Is(err, inbox.ErrSwallowed) || !errors.As(err, &st) || st.SQL != query {
				t.Errorf("%d rows read: Finish: %v, want ErrSwallowed with the query", reads, err)
			}
			if err := b.Commit(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// What a handler leaves open is closed; the next run has the connection.
func TestLeftOpen(t *testing.T) {
	t.Parallel()
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		for i := range 2000 {
			mustExec(t, db, "insert into effects (k, n) values ('old', $1)", i)
		}
		ctx := t.Context()
		b := begin(t, store, "k1", "k2")
		tx := start(t, b, 0)
		mustExec(t, tx, "insert into effects (k) values ('k1')")
		st, err := tx.PrepareContext(ctx, "select n from effects where n > $1")
		if err != nil {
			t.Fatal(err)
		}
		rows, err := st.QueryContext(ctx, 0)
		if err != nil || !rows.Next() {
			t.Fatalf("no rows: %v", err)
		}
		var raw sql.RawBytes
		if err := rows.Scan(&raw); err != nil { // Keeps database/sql from closing the rows by itself.
			t.Fatal(err)
		}
		if err := b.Finish(ctx, 0, true, nil); err != nil {
			t.Fatalf("Finish: %v", err)
		}
		if rows.Next() || rows.Err() == nil {
			t.Error("rows go on after the run has ended")
		}
		if _, err := st.ExecContext(ctx, 0); err == nil {
			t.Error("a statement goes on after the run has ended")
		}
		mustExec(t, start(t, b, 1), "insert into effects (k) values ('k2')")
		finish(t, b, 1)
		_ = rows.Close() //nolint:sqlclosecheck // After the run's end: it does no harm.
		_ = st.Close()   //nolint:sqlclosecheck // As above.
		if n := count(t, db, "select count(*) from effects where k <> 'old'"); n != 2 {
			t.Errorf("%d effects, want 2", n)
		}
	})
}

// A handler that starts a query while it reads the rows of another gets an error
// that says so, where the driver cannot do it; that is not a lost connection.
func TestRowsAreOpen(t *testing.T) {
	t.Parallel()
	store, db := postgresStore(t)
	mustExec(t, db, "insert into effects (k) select 'old' from generate_series(1, 2000)")
	b := begin(t, store, "k1")
	tx := start(t, b, 0)
	rows, err := tx.QueryContext(t.Context(), "select k from effects")
	if err != nil || !rows.Next() {
		t.Fatalf("no rows: %v", err)
	}
	_, err = tx.ExecContext(t.Context(), "insert into effects (k) values ('k1')")
	if err == nil || !strings.Contains(err.Error(), "close them first") || store.Classify(err) != inbox.ClassMessage {
		t.Errorf("a statement among rows: %v", err)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil { //nolint:sqlclosecheck // Before the end of the run.
		t.Error(err)
	}
	if err := b.Finish(t.Context(), 0, false, nil); err != nil {
		t.Errorf("Finish: %v", err)
	}
	if err := b.Commit(t.Context()); err != nil {
		t.Errorf("Commit: %v", err)
	}
}

// Goroutines that a handler leaves behind cannot write into the runs of others.
func TestStrayGoroutines(t *testing.T) {
	t.Parallel()
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		b := begin(t, store, "k1", "k2", "k3")
		stop, tried := make(chan struct{}), make(chan struct{})
		var strays sync.WaitGroup
		stray := func(tx *sql.Tx) {
			strays.Go(func() {
				for {
					_, _ = tx.ExecContext(context.WithoutCancel(t.Context()), "insert into effects (k) values ('stray')")
					select {
					case tried <- struct{}{}:
					case <-stop:
						return
					}
				}
			})
		}
		for i, k := range []string{"k1", "k2", "k3"} {
			tx := start(t, b, i)
			mustExec(t, tx, "insert into effects (k) values ($1)", k)
			stray(tx)
			stray(tx)
			for range 10 {
				<-tried
			}
			if err := b.Finish(t.Context(), i, i != 0, nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		before := count(t, db, "select count(*) from effects where k = 'stray'")
		for range 30 {
			<-tried
		}
		close(stop)
		strays.Wait()
		if n := count(t, db, "select count(*) from effects where k = 'k1'"); n != 0 {
			t.Error("the failed run left something")
		}
		if after := count(t, db, "select count(*) from effects where k = 'stray'"); after != before {
			t.Errorf("strays wrote %d rows after the commit", after-before)
		}
		begin(t, store, "k1").Abort()
	})
}

// Abort interrupts a statement that a handler is in, and returns before it has
// ended; the store has its connection back when it has.
func TestAbortInterrupts(t *testing.T) {
	t.Parallel()
	slow := map[string]string{
		"SQLite":     "with recursive r (i) as (select 1 union all select i + 1 from r where i < 1000000000) select count(*) from r",
		"PostgreSQL": "select pg_sleep(60)",
	}
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		b := begin(t, store, "k")
		tx := start(t, b, 0)
		running, ended := make(chan struct{}), make(chan error, 1)
		go func() {
			close(running)
			_, err := tx.ExecContext(context.WithoutCancel(t.Context()), slow[t.Name()[strings.LastIndex(t.Name(), "/")+1:]])
			ended <- err
		}()
		<-running
		time.Sleep(20 * time.Millisecond) //nolint:forbidigo // Nothing tells that the statement has begun; caught before, it must fail as well.
		began := time.Now()
		b.Abort()
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("Abort took %v", took)
		}
		select {
		case err := <-ended:
			if err == nil {
				t.Error("the statement succeeded")
			}
		case <-time.After(30 * time.Second):
			t.Fatal("the statement was not interrupted")
		}
		begin(t, store, "k").Abort()
		if n := db.Stats().OpenConnections; n > 2 {
			t.Errorf("%d connections are open", n)
		}
	})
}

// All connections are back in the pool after whatever happened.
func TestConnectionsComeBack(t *testing.T) {
	t.Parallel()
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		db.SetMaxOpenConns(2)
		for i := range 30 {
			b := begin(t, store, "k1", "k2")
			tx := start(t, b, 0)
			switch i % 6 {
			case 1:
				_, _ = tx.ExecContext(t.Context(), "insert into nothing values (1)")
			case 2:
				_ = tx.Commit()
			case 3:
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				_, _ = tx.ExecContext(ctx, "insert into effects (k) values ('x')")
			case 4:
				_, _ = tx.QueryContext(t.Context(), "select k from effects") //nolint:sqlclosecheck,rowserrcheck // Left open.
			case 5:
				b.Abort()
			}
			_ = b.Finish(t.Context(), 0, i%2 == 0, nil)
			_ = b.Commit(t.Context())
		}
		if s := db.Stats(); s.InUse != 0 {
			t.Errorf("%d connections are in use", s.InUse)
		}
	})
}

// Wrong use of a batch is an error, not a panic, and does not commit anything.
func TestWrongUse(t *testing.T) {
	t.Parallel()
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		ctx := t.Context()
		if _, err := store.Begin(ctx, []inbox.Claim{claimOf("k")}, inbox.BeginOptions{}); err == nil || !strings.Contains(err.Error(), "LockTimeout") {
			t.Errorf("Begin without a LockTimeout: %v", err)
		}
		o := inbox.BeginOptions{LockTimeout: time.Second}
		for _, c := range [][]inbox.Claim{{claimOf("k"), claimOf("k")}, {claimOf("a\x00b")}, {claimOf("a\xffb")}} {
			if _, err := store.Begin(ctx, c, o); err == nil {
				t.Errorf("Begin accepts %q", c[0].MessageKey)
			}
		}
		odd := claimOf("odd")
		odd.Attempt = math.MaxInt
		b, err := store.Begin(ctx, []inbox.Claim{odd}, o)
		if err != nil {
			t.Fatalf("Begin with an absurd attempt: %v", err)
		}
		if err := b.Park(ctx, 0, inbox.Parked{Key: odd.Key, State: inbox.ParkedDead, Attempts: math.MaxInt}); err != nil {
			t.Errorf("Park with an absurd number of attempts: %v", err)
		}
		b.Abort()
		b = begin(t, store, "k1", "k2")
		for _, i := range []int{-1, 2} {
			if _, err := b.Start(ctx, i); err == nil {
				t.Errorf("Start(%d) succeeds", i)
			}
			if err := b.Finish(ctx, i, true, nil); err == nil {
				t.Errorf("Finish(%d) succeeds", i)
			}
		}
		if err := b.Park(ctx, 2, inbox.Parked{Key: claimOf("k1").Key, State: inbox.ParkedDead}); err == nil {
			t.Error("Park(2) succeeds")
		}
		start(t, b, 0)
		if _, err := b.Start(ctx, 1); err == nil {
			t.Error("a second Start succeeds")
		}
		if err := b.Finish(ctx, 1, true, nil); err == nil {
			t.Error("Finish of another entry succeeds")
		}
		if err := b.Park(ctx, 0, inbox.Parked{Key: claimOf("k1").Key, State: inbox.ParkedDead}); err == nil {
			t.Error("Park during a run succeeds")
		}
		if err := b.Commit(ctx); !errors.Is(err, inbox.ErrNotCommitted) {
			t.Errorf("Commit during a run: %v, want ErrNotCommitted", err)
		}
		if _, err := b.Start(ctx, 1); err == nil {
			t.Error("Start after Commit succeeds")
		}
		if _, err := store.Claim(ctx, nil, "billing", "k"); err == nil {
			t.Error("Claim without a transaction succeeds")
		}
		if err := store.SaveResult(ctx, nil, "billing", "k", nil); err == nil {
			t.Error("SaveResult without a transaction succeeds")
		}
		if n := count(t, db, "select count(*) from inbox"); n != 0 {
			t.Errorf("%d rows", n)
		}
	})
}

// A handler that gets around everything, rolls back, begins a transaction of its
// own and even makes the savepoint: the batch's claims are gone, and so what is
// open now must not be committed.
//
// case D8.
func TestTransactionReplaced(t *testing.T) {
	t.Parallel()
	ways := map[string][]string{
		"SQLite":     {hiddenSQLite + "rollback; begin; savepoint ackafter_run"},
		"PostgreSQL": {"set local standard_conforming_strings = off", `select 'a\''; rollback; begin; savepoint ackafter_run; select ''`},
	}
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		b := begin(t, store, "k1", "k2")
		mustExec(t, start(t, b, 0), "insert into effects (k) values ('k1')")
		if err := b.Finish(t.Context(), 0, true, nil); err != nil {
			t.Fatal(err)
		}
		tx := start(t, b, 1)
		for _, query := range ways[t.Name()[strings.LastIndex(t.Name(), "/")+1:]] {
			mustExec(t, tx, query)
		}
		mustExec(t, tx, "insert into effects (k) values ('k2')")
		_ = b.Finish(t.Context(), 1, true, nil) // It cannot know.
		if err := b.Commit(t.Context()); !errors.Is(err, inbox.ErrNotCommitted) || !errors.Is(err, inbox.ErrTxEnded) {
			t.Errorf("Commit: %v, want ErrNotCommitted and ErrTxEnded", err)
		}
		if n := count(t, db, "select (select count(*) from effects) + (select count(*) from inbox)"); n != 0 {
			t.Errorf("%d rows are there", n)
		}
	})
}

// A connection that breaks without a word is the database's fault, and it is not
// used again.
func TestConnectionBreaks(t *testing.T) {
	t.Parallel()
	for _, reached := range []bool{false, true} {
		for _, query := range []string{"select 'commit'", "insert into effects (k) values ('commit') returning k"} {
			f := openPostgres(t, postgresURL(t), "", pgx.QueryExecModeCacheStatement)
			mustExec(t, f.DB, "create table effects (k text not null)")
			store, db := f.Cut(t, reached)
			b := begin(t, store, "k")
			tx := start(t, b, 0)
			var k string
			err := tx.QueryRowContext(t.Context(), query).Scan(&k)
			if err == nil || store.Classify(err) != inbox.ClassUnavailable {
				t.Errorf("query: %v: class %d, want ClassUnavailable", err, store.Classify(err))
			}
			if _, err = tx.ExecContext(t.Context(), "select 1"); err == nil || store.Classify(err) != inbox.ClassUnavailable {
				t.Errorf("exec: %v: class %d, want ClassUnavailable", err, store.Classify(err))
			}
			err = b.Finish(t.Context(), 0, true, nil)
			if store.Classify(err) != inbox.ClassUnavailable || errors.Is(err, inbox.ErrSwallowed) || errors.Is(err, inbox.ErrTxEnded) {
				t.Errorf("Finish: %v: class %d, want ClassUnavailable", err, store.Classify(err))
			}
			b.Abort()
			if n := db.Stats().OpenConnections; n != 0 {
				t.Errorf("%d connections are kept", n)
			}
			b = begin(t, store, "k")
			tx = start(t, b, 0)
			if _, err = tx.ExecContext(t.Context(), query); err == nil || store.Classify(err) != inbox.ClassUnavailable {
				t.Errorf("exec: %v: class %d, want ClassUnavailable", err, store.Classify(err))
			}
			b.Abort()
			if n := count(t, f.DB, "select (select count(*) from effects) + (select count(*) from inbox)"); n != 0 {
				t.Errorf("%d rows are there", n)
			}
		}
	}
}
