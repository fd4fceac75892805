package integration_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
)

// What Advise says of synchronous standbys: none are wanted, one is there, it is
// gone; and of the standby itself.
func TestAdviseStandby(t *testing.T) {
	t.Parallel()
	primary := servers.OwnPostgres(t)
	standby := servers.OwnStandby(t, primary)
	find := func(address, durability, code string) inbox.Severity {
		t.Helper()
		config, err := pgxpool.ParseConfig(address)
		if err != nil {
			t.Fatal(err)
		}
		config.ConnConfig.RuntimeParams["synchronous_commit"] = durability
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		store, err := inboxpgx.New(pool)
		if err != nil {
			t.Fatal(err)
		}
		found, err := store.Advise(t.Context(), inbox.AdviceRequest{})
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(found, func(f inbox.Finding) bool { return f.Code == code })
		if i < 0 {
			return ""
		}
		return found[i].Severity
	}
	expect := func(when, address, durability, code string, want inbox.Severity) {
		t.Helper()
		if got := find(address, durability, code); got != want {
			t.Errorf("%s, %s: %s is %q, want %q", when, durability, code, got, want)
		}
	}
	for _, code := range []string{"standby", "standby_missing"} {
		expect("no synchronous standby", primary.Address, "on", code, "")
	}
	expect("no synchronous standby", primary.Address, "local", "durability_local", "")
	expect("no synchronous standby", primary.Address, "remote_write", "durability_remote_write", "")
	expect("on the standby", standby.Address, "on", "standby", inbox.SeverityError)

	pool := openPool(t, primary.Address)
	for _, sql := range []string{"alter system set synchronous_standby_names = '*'", "select pg_reload_conf()"} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, time.Minute, "the standby is synchronous", func() bool {
		return count(t, pool, "select count(*) from pg_stat_replication where sync_state = 'sync'") == 1
	})
	expect("a synchronous standby", primary.Address, "on", "standby_missing", "")
	expect("a synchronous standby", primary.Address, "local", "durability_local", inbox.SeverityWarning)
	expect("a synchronous standby", primary.Address, "remote_write", "durability_remote_write", inbox.SeverityWarning)
	expect("a synchronous standby", primary.Address, "remote_apply", "durability_remote_write", "")

	standby.Crash(t)
	eventually(t, time.Minute, "it is missed", func() bool {
		return count(t, pool, "select count(*) from pg_stat_replication") == 0
	})
	expect("a missing standby", primary.Address, "on", "standby_missing", inbox.SeverityError)
	expect("a missing standby", primary.Address, "local", "standby_missing", "")
}
