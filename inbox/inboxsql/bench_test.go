package inboxsql_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
)

// BenchmarkBatch measures batches with one insert a message, beside the same
// statements written by hand: BEGIN, INSERT .. ON CONFLICT and the insert for
// each message, COMMIT. SQLite syncs each commit to the disk.
func BenchmarkBatch(b *testing.B) {
	for _, size := range []int{1, 50} {
		b.Run(fmt.Sprintf("SQLite/%d", size), func(b *testing.B) {
			db, _ := newSQLite(b)
			benchmark(b, db, size)
		})
		b.Run(fmt.Sprintf("PostgreSQL/%d", size), func(b *testing.B) {
			benchmark(b, openPostgres(b, postgresURL(b), "", pgx.QueryExecModeCacheStatement).DB, size)
		})
	}
}

func benchmark(b *testing.B, db *sql.DB, size int) {
	b.Helper()
	if _, err := db.ExecContext(b.Context(), "create table effects (k text not null)"); err != nil {
		b.Fatal(err)
	}
	store, err := inboxsql.New(db)
	if err != nil {
		b.Fatal(err)
	}
	n := 0
	keys := func() []string {
		all := make([]string, size)
		for i := range all {
			n++
			all[i] = fmt.Sprintf("%x-%d", uint32(n)*2654435761, n) // In random order, as real keys are.
		}
		return all
	}
	for name, handle := range map[string]func(ctx context.Context, keys []string) error{
		"inbox":   func(ctx context.Context, keys []string) error { return handleBatch(ctx, store, keys) },
		"by hand": func(ctx context.Context, keys []string) error { return byHand(ctx, db, keys) },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if err := handle(b.Context(), keys()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N*size)/b.Elapsed().Seconds(), "messages/s")
		})
	}
}

func handleBatch(ctx context.Context, store *inboxsql.Store, keys []string) error {
	claims := make([]inbox.Claim, len(keys))
	for i, k := range keys {
		claims[i] = claimOf(k)
	}
	batch, err := store.Begin(ctx, claims, inbox.BeginOptions{LockTimeout: 5 * time.Second, IdleTimeout: time.Minute})
	if err != nil {
		return err
	}
	defer batch.Abort()
	for i, k := range keys {
		tx, err := batch.Start(ctx, i)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "insert into effects values ($1)", k); err != nil {
			return err
		}
		if err := batch.Finish(ctx, i, true, nil); err != nil {
			return err
		}
	}
	return batch.Commit(ctx)
}

func byHand(ctx context.Context, db *sql.DB, keys []string) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	for _, k := range keys {
		r, err := tx.ExecContext(ctx, "insert into inbox (consumer, message_key, processed_at) values ('hand', $1, current_timestamp) on conflict do nothing", k)
		if err != nil {
			return err
		}
		if n, err := r.RowsAffected(); err != nil || n != 1 {
			return fmt.Errorf("%d rows, %w", n, err)
		}
		if _, err := tx.ExecContext(ctx, "insert into effects values ($1)", k); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// BenchmarkLease measures polls for parked messages with 100,000 rows in 1,000
// lanes, or one in each of 100,000: while the first of each lane has its time to
// come, and while all of them are due (100 are leased and given back).
func BenchmarkLease(b *testing.B) {
	const fill = `insert into inbox_parked (consumer, message_key, lane, state, reason, body, next_attempt_at, parked_at, updated_at)
		select 'billing', 'k' || i, LANE, case when i < LANES then 'retry' else 'waiting' end, 'bench', BODY, case when i < LANES then LATER end, NOW, NOW
		from ROWS`
	const now = "unixepoch() * 1000000"
	for _, lanes := range []string{"1000", "100000"} {
		b.Run("SQLite/"+lanes, func(b *testing.B) {
			db, _ := newSQLite(b)
			benchmarkLease(b, db, "with recursive n (i) as (select 0 union all select i + 1 from n where i < 99999) "+
				strings.NewReplacer("LANES", lanes, "LANE", "cast('lane' || (i % "+lanes+") as blob)", "BODY", "zeroblob(500)",
					"LATER", now+" + 3600000000", "NOW", now, "ROWS", "n").Replace(fill), now)
		})
		b.Run("PostgreSQL/"+lanes, func(b *testing.B) {
			db := openPostgres(b, postgresURL(b), "", pgx.QueryExecModeCacheStatement).DB
			benchmarkLease(b, db, strings.NewReplacer("LANES", lanes, "LANE", "convert_to('lane' || (i % "+lanes+"), 'UTF8')",
				"BODY", "decode(repeat('ab', 500), 'hex')", "LATER", "now() + interval '1 hour'", "NOW", "now()",
				"ROWS", "generate_series(0, 99999) as i").Replace(fill), "now()")
		})
	}
}

func benchmarkLease(b *testing.B, db *sql.DB, fill, now string) {
	b.Helper()
	if _, err := db.ExecContext(b.Context(), fill); err != nil {
		b.Fatal(err)
	}
	store, err := inboxsql.New(db)
	if err != nil {
		b.Fatal(err)
	}
	poll := func(b *testing.B, want int) {
		for b.Loop() {
			got, err := store.Lease(b.Context(), inbox.LeaseRequest{
				Consumer: "billing", Limit: 100, For: time.Hour, Order: inbox.Order{Keep: true},
			})
			if err != nil || len(got.Rows) != want {
				b.Fatalf("%d rows, %v; want %d", len(got.Rows), err, want)
			}
			leases := make([]inbox.Lease, len(got.Rows))
			for i, r := range got.Rows {
				leases[i] = r.Lease
			}
			if err := store.Release(b.Context(), leases); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("idle", func(b *testing.B) { poll(b, 0) })
	if _, err := db.ExecContext(b.Context(), "update inbox_parked set next_attempt_at = "+now+" where state = 'retry'"); err != nil {
		b.Fatal(err)
	}
	b.Run("due", func(b *testing.B) { poll(b, 100) })
}
