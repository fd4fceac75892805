package inboxsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
)

func parkAll(t *testing.T, store *inboxsql.Store, ps ...inbox.Parked) {
	t.Helper()
	b := begin(t, store)
	for _, p := range ps {
		if err := b.Park(t.Context(), -1, p); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func parkedAs(key, lane string, state inbox.ParkedState, after time.Duration) inbox.Parked {
	return inbox.Parked{Key: claimOf(key).Key, Lane: lane, State: state, Reason: inbox.ReasonFailed, After: after}
}

func leaseRequest() inbox.LeaseRequest {
	return inbox.LeaseRequest{Consumer: "billing", Limit: 5, For: time.Minute, Worker: "w", Order: inbox.Order{Keep: true}}
}

// As long as nothing is due, nobody who asks for it waits for the file's writer.
func TestSQLiteIdlePollsTakeNoLock(t *testing.T) {
	t.Parallel()
	_, path := newSQLite(t)
	db, err := sql.Open("sqlite", strings.Replace(inboxsql.SQLiteDSN(path), "busy_timeout(5000)", "busy_timeout(10)", 1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	store, err := inboxsql.New(db)
	if err != nil {
		t.Fatal(err)
	}
	parkAll(t, store, parkedAs("k1", "l1", inbox.ParkedRetry, time.Hour), parkedAs("k2", "l1", inbox.ParkedWaiting, 0),
		parkedAs("k3", "", inbox.ParkedRetry, time.Hour), parkedAs("k4", "", inbox.ParkedDead, 0))
	writer, err := openFile(t, path).BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, writer, "update inbox_parked set next_attempt_at = 0 where message_key = 'k3'")
	if got, err := store.Lease(t.Context(), leaseRequest()); err != nil || len(got.Rows) != 0 || got.Next <= 0 {
		t.Errorf("Lease: %d rows, next in %v, %v", len(got.Rows), got.Next, err)
	}
	if n, err := store.PurgeDead(t.Context(), "billing", time.Hour, false, 10); err != nil || n != 0 {
		t.Errorf("PurgeDead: %d, %v", n, err)
	}
	for _, err := range []error{store.Release(t.Context(), nil), second(store.RetryParked(t.Context(), nil))} {
		if err != nil {
			t.Error(err)
		}
	}
	if _, err := store.RetryParked(t.Context(), []int64{1}); store.Classify(err) != inbox.ClassContention {
		t.Errorf("a write while another one is writing: %v", err)
	}
	if err := writer.Commit(); err != nil {
		t.Fatal(err)
	}
	if writer, err = openFile(t, path).BeginTx(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Lease(t.Context(), leaseRequest()); store.Classify(err) != inbox.ClassContention {
		t.Errorf("Lease of a message that is due, while another one is writing: %v", err)
	}
	if err := writer.Rollback(); err != nil {
		t.Fatal(err)
	}
	if got, err := store.Lease(t.Context(), leaseRequest()); err != nil || len(got.Rows) != 1 || got.Rows[0].MessageKey != "k3" {
		t.Errorf("Lease: %+v, %v", got, err)
	}
}

func second[T any](_ T, err error) error { return err }

// Processes that share a file lease each row once, and keep the order of lanes.
func TestSQLiteProcessesFeedTogether(t *testing.T) {
	t.Parallel()
	const processes, lanes, perLane = 3, 5, 6
	db, path := newSQLite(t)
	first, err := inboxsql.New(db)
	if err != nil {
		t.Fatal(err)
	}
	var all []inbox.Parked
	for i := range perLane {
		for l := range lanes {
			all = append(all, parkedAs(fmt.Sprintf("%d-%d", l, i), fmt.Sprint(l), inbox.ParkedWaiting, 0))
		}
	}
	parkAll(t, first, all...)
	mustExec(t, db, "create table done (k text primary key, n integer)")
	var wg sync.WaitGroup
	for range processes {
		store, err := inboxsql.New(openFile(t, path))
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			for t.Context().Err() == nil {
				left, err := feedOnce(t.Context(), store)
				if err != nil && store.Classify(err) != inbox.ClassContention {
					t.Error(err)
					return
				}
				if err == nil && !left {
					return
				}
			}
		})
	}
	wg.Wait()
	for l := range lanes {
		var got string
		query := fmt.Sprintf("select group_concat(k, ' ' order by n) from done where k like '%d-%%'", l)
		if err := db.QueryRowContext(t.Context(), query).Scan(&got); err != nil {
			t.Fatal(err)
		}
		var want []string
		for i := range perLane {
			want = append(want, fmt.Sprintf("%d-%d", l, i))
		}
		if got != strings.Join(want, " ") {
			t.Errorf("lane %d: %s, want %v", l, got, want)
		}
	}
}

// feedOnce does what one lease gives, and tells whether anything is left.
func feedOnce(ctx context.Context, store *inboxsql.Store) (left bool, err error) {
	got, err := store.Lease(ctx, leaseRequest())
	if err != nil {
		return false, err
	}
	if len(got.Rows) == 0 {
		rows, err := store.ListParked(ctx, inbox.ParkedFilter{Limit: 1})
		return len(rows) > 0, err
	}
	var cs []inbox.Claim
	for _, r := range got.Rows {
		cs = append(cs, inbox.Claim{Key: r.Key, Fingerprint: r.Fingerprint, Lane: r.Lane, Parked: r.Lease})
	}
	for try := 0; ; try++ {
		if err = finishAll(ctx, store, cs); store.Classify(err) != inbox.ClassContention || try == 100 {
			return true, err
		}
	}
}

func finishAll(ctx context.Context, store *inboxsql.Store, cs []inbox.Claim) error {
	b, err := store.Begin(ctx, cs, inbox.BeginOptions{LockTimeout: 10 * time.Second, Order: inbox.Order{Keep: true}})
	if err != nil {
		return err
	}
	defer b.Abort()
	for i, e := range b.Entries() {
		if !e.Claimed() || e.Held {
			return fmt.Errorf("entry of %s: %+v", cs[i].MessageKey, e)
		}
		tx, err := b.Start(ctx, i)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "insert into done select ?, count(*) from done", cs[i].MessageKey); err != nil {
			return err
		}
		if err := b.Finish(ctx, i, true, nil); err != nil {
			return err
		}
	}
	return b.Commit(ctx)
}

// A duplicate waits for a parked row that somebody has locked as it does for a key:
// for LockTimeout. When the row is gone then, the message counts as new.
func TestDuplicateWaitsForParkedRow(t *testing.T) {
	t.Parallel()
	f := openPostgres(t, postgresURL(t), "", pgx.QueryExecModeCacheStatement)
	store := newPostgresStore(t, f.DB, "")
	parkAll(t, store, parkedAs("k1", "", inbox.ParkedDead, 0))
	locker, err := f.DB.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, locker, "delete from inbox_parked")
	_, err = store.Begin(t.Context(), []inbox.Claim{claimOf("k1")}, inbox.BeginOptions{LockTimeout: 300 * time.Millisecond})
	if !errors.Is(err, inbox.ErrInFlight) {
		t.Errorf("Begin while the row is locked: %v, want ErrInFlight", err)
	}
	waiting := make(chan inbox.Batch[*sql.Tx], 1)
	go func() {
		b, err := store.Begin(t.Context(), []inbox.Claim{claimOf("k1")}, inbox.BeginOptions{LockTimeout: time.Minute})
		if err != nil {
			t.Error(err)
		}
		waiting <- b
	}()
	for {
		n, err := f.Waiting(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			break
		}
		<-time.After(5 * time.Millisecond)
	}
	if err := locker.Commit(); err != nil {
		t.Fatal(err)
	}
	b := <-waiting
	if b == nil {
		return
	}
	defer b.Abort()
	if e := b.Entries()[0]; e.Outcome != inbox.FirstAttempt {
		t.Errorf("a message whose parked row has gone: %+v", e)
	}
}

func TestLeaseRequestIsChecked(t *testing.T) {
	t.Parallel()
	store, _ := sqliteStore(t)
	for want, change := range map[string]func(r *inbox.LeaseRequest){
		"Limit = 0":  func(r *inbox.LeaseRequest) { r.Limit = 0 },
		"Limit = -1": func(r *inbox.LeaseRequest) { r.Limit = -1 },
		"For = 0s":   func(r *inbox.LeaseRequest) { r.For = 0 },
		"For = -1s":  func(r *inbox.LeaseRequest) { r.For = -time.Second },
	} {
		r := leaseRequest()
		change(&r)
		if _, err := store.Lease(t.Context(), r); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
