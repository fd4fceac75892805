package inboxpgx_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/cutproxy"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
)

// Round trips are counted on the wire: how often the client speaks after the
// server has. Each scenario runs until its statements are prepared, then once
// to be counted. The handlers have one statement each.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	scenarios := []struct {
		name string
		keys int
		want int
		run  func(r *rig, b inbox.Batch[pgx.Tx], keys []string) error
	}{
		{"one message", 1, 2 + 1, func(r *rig, b inbox.Batch[pgx.Tx], keys []string) error { return runAll(r, b, keys, nil) }},
		{"one message with a result", 1, 2 + 1, func(r *rig, b inbox.Batch[pgx.Tx], keys []string) error { return runAll(r, b, keys, []byte("r")) }},
		{"one message that fails", 1, 2 + 1 + 1, func(r *rig, b inbox.Batch[pgx.Tx], keys []string) error {
			return r.use(b, 0, false, effect(keys[0]))
		}},
		{"ten messages", 10, 2 + 10, func(r *rig, b inbox.Batch[pgx.Tx], keys []string) error { return runAll(r, b, keys, []byte("r")) }},
		{"ten messages in bulk", 10, 2 + 1, func(r *rig, b inbox.Batch[pgx.Tx], keys []string) error {
			err := r.use(b, 0, true, effect(keys[0]))
			for i := 1; err == nil && i < len(keys); i++ {
				err = b.Finish(r.Context(), i, true, nil)
			}
			return err
		}},
		{"ten handlers without statements", 10, 2, func(r *rig, b inbox.Batch[pgx.Tx], keys []string) error {
			for i := range keys {
				if err := r.use(b, i, true, func(context.Context, pgx.Tx) error { return nil }); err != nil {
					return err
				}
			}
			return nil
		}},
		{"one message in a lane", 1, 2 + 1, func(r *rig, b inbox.Batch[pgx.Tx], keys []string) error { return runAll(r, b, keys, nil) }},
		{"ten messages in a lane", 10, 2 + 10, func(r *rig, b inbox.Batch[pgx.Tx], keys []string) error { return runAll(r, b, keys, nil) }},
		{"one duplicate", -1, 2, nil},
		{"ten duplicates", -10, 2, nil},
	}
	duplicates := func(*rig, inbox.Batch[pgx.Tx], []string) error { return nil }
	for _, level := range []pgx.TxIsoLevel{"", pgx.Serializable} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
			db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
			var proxy *cutproxy.Proxy
			pool := db.Pool(t, func(c *pgxpool.Config) {
				proxy = cutproxy.New(t, net.JoinHostPort(c.ConnConfig.Host, pgxharness.Port(c)))
				pgxharness.Through(c, proxy)
				c.MaxConns, c.ConnConfig.DefaultQueryExecMode = 1, mode
			})
			r := &rig{t, db, pool, pgxharness.NewStore(t, pool, level)}
			r.sql("create table effects (k text not null, note text not null)")
			var done []string
			for i := range 10 {
				done = append(done, fmt.Sprint("done", i))
			}
			b := r.begin(done...)
			if err := runAll(r, b, done, nil); err != nil {
				t.Fatal(err)
			}
			if err := b.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, s := range scenarios {
				turns := 0
				for round := range 3 {
					var keys []string
					if s.keys < 0 {
						keys, s.run = done[:-s.keys], duplicates
					}
					for i := range s.keys {
						keys = append(keys, fmt.Sprintf("%s-%d-%d", s.name, round, i))
					}
					cs := claims(keys...)
					for i := range cs {
						if strings.HasSuffix(s.name, "in a lane") {
							cs[i].Lane = "orders/3/A1"
						}
					}
					before := proxy.Turns()
					b, err := r.store.Begin(t.Context(), cs, inbox.BeginOptions{
						LockTimeout: time.Second, IdleTimeout: time.Minute, Order: inbox.Order{Keep: true, MaxWaiting: 1000, MaxWaitingBytes: 16 << 20},
					})
					if err == nil {
						err = s.run(r, b, keys)
					}
					if err == nil {
						err = b.Commit(t.Context())
					}
					if err != nil {
						t.Fatalf("%s: %v", s.name, err)
					}
					turns = proxy.Turns() - before
				}
				if turns != s.want {
					t.Errorf("%s, %v, level %q: %d round trips, want %d", s.name, mode, level, turns, s.want)
				}
			}
		}
	}
}

func runAll(r *rig, b inbox.Batch[pgx.Tx], keys []string, result []byte) error {
	for i, k := range keys {
		tx, err := b.Start(r.Context(), i)
		if err == nil {
			err = effect(k)(r.Context(), tx)
		}
		if err == nil {
			err = b.Finish(r.Context(), i, true, result)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
