package inboxpgx_test

import (
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/cutproxy"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
)

// fillParked parks messages that are due.
func (r *rig) fillParked(lane string, keys ...string) {
	r.Helper()
	b := r.begin()
	for _, k := range keys {
		p := inbox.Parked{
			Key: claims(k)[0].Key, Fingerprint: []byte("fp"), Message: &broker.Message{Body: []byte(k)}, Lane: lane,
			State: inbox.ParkedRetry, Reason: inbox.ReasonFailed, Attempts: 1,
		}
		if err := b.Park(r.Context(), -1, p); err != nil {
			r.Fatal(err)
		}
	}
	if err := b.Commit(r.Context()); err != nil {
		r.Fatal(err)
	}
}

func leaseRequest(limit int) inbox.LeaseRequest {
	return inbox.LeaseRequest{Consumer: "billing", Limit: limit, For: time.Minute, Worker: "w", Order: inbox.Order{Keep: true}}
}

// A lease is one round trip when nothing is due and two when something is; what is
// leased costs a fed message no more than a live one.
func TestLeaseRoundTrips(t *testing.T) {
	t.Parallel()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	var proxy *cutproxy.Proxy
	pool := db.Pool(t, func(c *pgxpool.Config) {
		proxy = cutproxy.New(t, net.JoinHostPort(c.ConnConfig.Host, pgxharness.Port(c)))
		pgxharness.Through(c, proxy)
		c.MaxConns = 1
	})
	r := &rig{t, db, pool, pgxharness.NewStore(t, pool, "")}
	r.sql("create table effects (k text not null, note text not null)")
	turns := func(do func()) int {
		before := proxy.Turns()
		do()
		return proxy.Turns() - before
	}
	for round := range 3 { // In the last one everything is prepared.
		key := fmt.Sprint("k", round)
		var leased inbox.Leased
		var err error
		lease := func() { leased, err = r.store.Lease(t.Context(), leaseRequest(10)) }
		idle := turns(lease)
		if err != nil || len(leased.Rows) != 0 {
			t.Fatalf("%d rows, %v", len(leased.Rows), err)
		}
		r.fillParked("l", key)
		due := turns(lease)
		if err != nil || len(leased.Rows) != 1 {
			t.Fatalf("%d rows, %v", len(leased.Rows), err)
		}
		fed := turns(func() {
			c := claims(key)
			c[0].Lane, c[0].Parked = "l", leased.Rows[0].Lease
			b, err := r.store.Begin(t.Context(), c, inbox.BeginOptions{LockTimeout: time.Second, Order: inbox.Order{Keep: true}})
			if err == nil {
				err = runAll(r, b, []string{key}, nil)
			}
			if err == nil {
				err = b.Commit(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
		})
		if round == 2 && (idle != 1 || due != 2 || fed != 2+1) {
			t.Errorf("round trips: %d when idle, %d when something is due, %d for a fed message; want 1, 2, 3", idle, due, fed)
		}
	}
}

// When many dead letters are retried at once, the planner knows nothing of it until
// the next ANALYZE. A lease reads what it takes all the same, not all that is due.
func TestLeaseReadsWhatItTakes(t *testing.T) {
	t.Parallel()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	r := &rig{t, db, pool, pgxharness.NewStore(t, pool, "")}
	const rows, limit = 20_000, 10
	r.sql("alter table inbox_parked set (autovacuum_enabled = off)")
	r.sql(fmt.Sprintf("insert into inbox_parked (consumer, message_key, lane, state, reason) "+
		"select 'billing', i, convert_to('l' || i, 'UTF8'), 'dead', 'x' from generate_series(1, %d) i", rows))
	r.sql("analyze inbox_parked")
	r.sql("update inbox_parked set state = 'retry', next_attempt_at = clock_timestamp()")
	read := func() (n int) {
		r.sql("select pg_stat_force_next_flush()")
		err := pool.QueryRow(t.Context(), `select idx_tup_read from pg_stat_user_indexes
			where relid = 'inbox_parked'::regclass and indexrelname = 'inbox_parked_due'`).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := read()
	leased, err := r.store.Lease(t.Context(), leaseRequest(limit))
	if err != nil || len(leased.Rows) != limit {
		t.Fatalf("%d rows, %v", len(leased.Rows), err)
	}
	if n := read() - before; n > rows/10 {
		t.Errorf("a lease of %d rows has read %d entries of the index of what is due", limit, n)
	}
}

func TestLeaseRefusesNonsense(t *testing.T) {
	t.Parallel()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	store := pgxharness.NewStore(t, db.Pool(t, nil), "")
	for _, change := range []func(*inbox.LeaseRequest){
		func(r *inbox.LeaseRequest) { r.Limit = 0 },
		func(r *inbox.LeaseRequest) { r.Limit = -1 },
		func(r *inbox.LeaseRequest) { r.For = 0 },
		func(r *inbox.LeaseRequest) { r.For = -time.Second },
	} {
		r := leaseRequest(1)
		change(&r)
		if _, err := store.Lease(t.Context(), r); err == nil {
			t.Errorf("Lease(%+v) succeeds", r)
		}
	}
	if n, err := store.PurgeDead(t.Context(), "billing", -time.Hour, false, 0); n != 0 || err != nil {
		t.Errorf("PurgeDead without a limit: %d, %v", n, err)
	}
}

// Rows of the version before, which has left next_attempt_at and dead_at null, are
// fed and purged as well.
func TestRowsOfTheVersionBefore(t *testing.T) {
	t.Parallel()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	pool := db.Pool(t, nil)
	r := &rig{t, db, pool, pgxharness.NewStore(t, pool, "")}
	for _, state := range []string{"retry", "dead"} {
		r.sql("insert into inbox_parked (consumer, message_key, state, reason, parked_at) values ('billing', '" + state + "', '" + state + "', 'x', now() - interval '2 hours')")
	}
	leased, err := r.store.Lease(t.Context(), leaseRequest(10))
	if err != nil || len(leased.Rows) != 1 || leased.Rows[0].MessageKey != "retry" {
		t.Errorf("leased %+v, %v", leased, err)
	}
	rows, err := r.store.ListParked(t.Context(), inbox.ParkedFilter{State: inbox.ParkedDead})
	if err != nil || len(rows) != 1 || !rows[0].Died.Equal(rows[0].ParkedAt) {
		t.Errorf("dead: %+v, %v", rows, err)
	}
	if n, err := r.store.PurgeDead(t.Context(), "billing", time.Hour, false, 10); n != 1 || err != nil {
		t.Errorf("purged %d, %v", n, err)
	}
}

// A token never comes twice, not even when the row has forgotten its last one, as
// after a failover.
func TestTokensIncreaseAfterAFailover(t *testing.T) {
	t.Parallel()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	pool := db.Pool(t, nil)
	r := &rig{t, db, pool, pgxharness.NewStore(t, pool, "")}
	r.fillParked("", "k1")
	var tokens []int64
	for range 3 {
		leased, err := r.store.Lease(t.Context(), leaseRequest(1))
		if err != nil || len(leased.Rows) != 1 {
			t.Fatalf("%d rows, %v", len(leased.Rows), err)
		}
		tokens = append(tokens, leased.Rows[0].Lease.Token)
		r.sql("update inbox_parked set token = null, lease_until = null")
	}
	if sorted := slices.Sorted(slices.Values(tokens)); !slices.Equal(sorted, tokens) || len(slices.Compact(sorted)) != 3 {
		t.Errorf("tokens %v", tokens)
	}
}

// The server keeps the plans of what a single message needs: planning anew would
// cost more than the rest.
func TestPlansAreKept(t *testing.T) {
	t.Parallel()
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	r := &rig{t, db, pool, pgxharness.NewStore(t, pool, "")}
	const n = 40
	for i := range n {
		for _, lane := range []string{"", "l"} {
			cs := claims(fmt.Sprint(lane, i%20))
			cs[0].Lane = lane
			b, err := r.store.Begin(t.Context(), cs, inbox.BeginOptions{LockTimeout: time.Second, Order: inbox.Order{Keep: true, MaxWaiting: 1000}})
			if err != nil {
				t.Fatal(err)
			}
			if b.Entries()[0].Claimed() {
				err = b.Finish(t.Context(), 0, true, []byte("r"))
			}
			if err == nil {
				err = b.Commit(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	rows, err := pool.Query(t.Context(), "select statement, custom_plans from pg_prepared_statements where custom_plans > 10")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var text string
		var custom int
		if err := rows.Scan(&text, &custom); err != nil {
			t.Fatal(err)
		}
		t.Errorf("planned %d times:\n%s", custom, text)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
}
