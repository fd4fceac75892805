package inboxpgx_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
)

// adviceCase changes one thing; code is the finding that comes of it.
type adviceCase struct {
	name     string
	settings map[string]string // of the connections
	sql      string            // run in the schema before
	role     string            // grants to a role of its own, which then asks; empty: the owner asks
	config   *inboxpgx.Config
	conns    int32
	request  inbox.AdviceRequest
	since    int // the server that has such a thing
	code     string
	severity inbox.Severity
	without  bool // the other way round: there must be no such finding
}

const everyPrivilege = `grant select, insert, update, delete on all tables in schema {schema} to {role}; grant usage on schema {schema} to {role}`

var usual = inbox.AdviceRequest{Workers: 2, BatchSize: 50, LockTimeout: 5 * time.Second, BatchTime: 200 * time.Millisecond, HandlerTimeout: 30 * time.Second}

func adviceCases() []adviceCase {
	set := func(name, value string) map[string]string { return map[string]string{name: value} }
	unbounded := usual
	unbounded.HandlerTimeout = 0
	return []adviceCase{
		{name: "read only", settings: set("default_transaction_read_only", "on"), code: "read_only", severity: inbox.SeverityError},
		{name: "asynchronous", settings: set("synchronous_commit", "off"), code: "durability_off", severity: inbox.SeverityInfo},
		{name: "synchronous", settings: set("synchronous_commit", "on"), code: "durability_off", without: true},
		{name: "local without standbys", settings: set("synchronous_commit", "local"), code: "durability_local", without: true},
		{name: "idle in transaction", settings: set("idle_in_transaction_session_timeout", "10s"), code: "idle_in_transaction", severity: inbox.SeverityInfo},
		{name: "idle in transaction, long", settings: set("idle_in_transaction_session_timeout", "31s"), code: "idle_in_transaction", without: true},
		{name: "transaction timeout", settings: set("transaction_timeout", "34s"), since: 17, code: "transaction_timeout", severity: inbox.SeverityWarning},
		{name: "transaction timeout, long", settings: set("transaction_timeout", "41s"), since: 17, code: "transaction_timeout", without: true},
		{name: "transaction timeout, no bound", settings: set("transaction_timeout", "1h"), since: 17, request: unbounded, code: "transaction_timeout", severity: inbox.SeverityWarning},
		{name: "statement timeout", settings: set("statement_timeout", "20s"), code: "statement_timeout", severity: inbox.SeverityInfo},
		{name: "statement timeout, short", settings: set("statement_timeout", "900ms"), code: "statement_timeout", severity: inbox.SeverityWarning},
		{name: "statement timeout, long", settings: set("statement_timeout", "30s"), code: "statement_timeout", without: true},
		{name: "lock timeout", settings: set("lock_timeout", "20s"), code: "lock_timeout", severity: inbox.SeverityInfo},
		{name: "lock timeout, short", settings: set("lock_timeout", "50ms"), code: "lock_timeout", severity: inbox.SeverityWarning},
		{name: "idle session", settings: set("idle_session_timeout", "1min"), code: "idle_session", severity: inbox.SeverityInfo},
		{name: "idle session, long", settings: set("idle_session_timeout", "2h"), code: "idle_session", without: true},
		{name: "repeatable read", settings: set("default_transaction_isolation", "repeatable read"), code: "isolation", severity: inbox.SeverityInfo},
		{name: "repeatable read, overruled", settings: set("default_transaction_isolation", "repeatable read"), config: &inboxpgx.Config{Isolation: pgx.ReadCommitted}, code: "isolation", without: true},
		{name: "foreign keys off", settings: set("session_replication_role", "replica"), code: "guard", severity: inbox.SeverityWarning},
		{name: "guard disabled", sql: "alter table inbox_guard disable trigger all", code: "guard", severity: inbox.SeverityWarning},
		{name: "guard dropped", sql: "alter table inbox_guard drop constraint inbox_guard_id_fkey", code: "guard", severity: inbox.SeverityWarning},
		{name: "unlogged", sql: "alter table inbox set unlogged", code: "unlogged", severity: inbox.SeverityError},
		{name: "no autovacuum", sql: "alter table inbox_parked set (autovacuum_enabled = off)", code: "autovacuum", severity: inbox.SeverityWarning},
		{name: "autovacuum", sql: "alter table inbox_parked set (autovacuum_enabled = on)", code: "autovacuum", without: true},
		{
			name: "dead rows", sql: `alter table inbox_guard set (autovacuum_enabled = off);
				insert into inbox_guard_target select generate_series(1, 50001); insert into inbox_guard select generate_series(1, 50001);
				delete from inbox_guard; select pg_stat_force_next_flush()`,
			code: "dead_rows", severity: inbox.SeverityInfo,
		},
		{name: "pool and server", conns: 10_000, code: "pool_size", severity: inbox.SeverityWarning},
		{name: "pool and role", role: everyPrivilege + "; alter role {role} connection limit 7", code: "pool_size", severity: inbox.SeverityWarning},
		{name: "pool within the role's limit", role: everyPrivilege + "; alter role {role} connection limit 8", code: "pool_size", without: true},
		{name: "workers", request: inbox.AdviceRequest{Workers: 8}, code: "workers", severity: inbox.SeverityWarning},
		{name: "fewer workers", request: inbox.AdviceRequest{Workers: 7}, code: "workers", without: true},
		{name: "large batches", request: inbox.AdviceRequest{BatchSize: 61}, code: "batch_size", severity: inbox.SeverityInfo},
		{name: "smaller batches", request: inbox.AdviceRequest{BatchSize: 60}, code: "batch_size", without: true},
		{name: "all privileges", role: everyPrivilege, code: "privileges", without: true},
		{name: "a privilege is missing", role: everyPrivilege + "; revoke delete on inbox from {role}", code: "privileges", severity: inbox.SeverityError},
		{name: "no schema", role: "grant select, insert, update, delete on all tables in schema {schema} to {role}", config: &inboxpgx.Config{Schema: "{schema}"}, code: "privileges", severity: inbox.SeverityError},
		{name: "row security", role: everyPrivilege + "; alter table inbox enable row level security", code: "row_security", severity: inbox.SeverityWarning},
		{
			name: "hidden tables", sql: "create schema {schema}_b; create table {schema}_b.inbox (like inbox)", settings: set("search_path", "{schema},{schema}_b"),
			code: "search_path", severity: inbox.SeverityWarning,
		},
		{
			name: "hidden tables, named schema", sql: "create schema {schema}_b; create table {schema}_b.inbox (like inbox)", settings: set("search_path", "{schema}_b,{schema}"),
			config: &inboxpgx.Config{Schema: "{schema}"}, code: "search_path", without: true,
		},
		{
			name: "tables apart", sql: "create schema {schema}_b; alter table inbox_parked set schema {schema}_b", settings: set("search_path", "{schema},{schema}_b"),
			code: "tables_apart", severity: inbox.SeverityError,
		},
		{
			name: "overdue", sql: `insert into inbox_parked (consumer, message_key, state, reason, next_attempt_at)
				values ('billing', 'k', 'retry', 'attempt failed', now() - interval '6 minutes')`,
			request: inbox.AdviceRequest{Consumer: "billing"}, code: "parked_overdue", severity: inbox.SeverityWarning,
		},
		{
			name: "not overdue", sql: `insert into inbox_parked (consumer, message_key, state, reason, next_attempt_at, lease_until, parked_at) values
				('billing', 'soon', 'retry', 'attempt failed', now() - interval '4 minutes', null, now() - interval '1 hour'),
				('billing', 'leased', 'retry', 'attempt failed', now() - interval '1 hour', now() + interval '1 minute', now()),
				('billing', 'dead', 'dead', 'attempts exhausted', now() - interval '1 hour', null, now()),
				('other', 'k', 'retry', 'attempt failed', now() - interval '1 hour', null, now())`,
			request: inbox.AdviceRequest{Consumer: "billing"}, code: "parked_overdue", without: true,
		},
		{name: "no tables", sql: "drop schema {schema} cascade", request: inbox.AdviceRequest{Consumer: "billing"}, code: "tables_apart", without: true},
		{name: "a pooler, which there is not", code: "pooler", without: true},
	}
}

func TestAdvise(t *testing.T) {
	t.Parallel()
	for variable, version := range map[string]int{pgtest.Postgres: 15, pgtest.Postgres18: 18} {
		t.Run(variable, func(t *testing.T) {
			t.Parallel()
			server := pgtest.URL(t, variable)
			plain := codes(advise(t, pgtest.Schema(t, server), &adviceCase{}))
			for _, c := range adviceCases() {
				if c.since > version {
					continue
				}
				t.Run(c.name, func(t *testing.T) {
					t.Parallel()
					found := advise(t, pgtest.Schema(t, server), &c)
					i := slices.IndexFunc(found, func(f inbox.Finding) bool { return f.Code == c.code })
					switch {
					case c.without && i >= 0:
						t.Errorf("found %+v", found[i])
					case c.without:
					case i < 0:
						t.Errorf("nothing with the code %q in %+v", c.code, found)
					case found[i].Severity != c.severity:
						t.Errorf("found %+v, want it as %s", found[i], c.severity)
					case slices.Contains(plain, c.code) && c.code != "durability_off":
						t.Errorf("%q is found without the change, too", c.code)
					}
					for _, f := range found {
						if f.Setting == "" || f.Value == "" || f.Meaning == "" || f.Advice == "" {
							t.Errorf("%+v does not say everything", f)
						}
					}
				})
			}
		})
	}
}

// What a crash can destroy is found by the server that is made for speed only.
func TestAdviseDurable(t *testing.T) {
	t.Parallel()
	for variable, want := range map[string]bool{pgtest.Postgres: true, "ACKAFTER_TEST_POSTGRES_DURABLE": false} {
		found := codes(advise(t, pgtest.Schema(t, pgtest.URL(t, variable)), &adviceCase{}))
		for _, code := range []string{"fsync", "full_page_writes"} {
			if slices.Contains(found, code) != want {
				t.Errorf("%s: %v; %s found should be %t", variable, found, code, want)
			}
		}
		if !want && len(found) > 0 {
			t.Errorf("a server as it should be: %v", found)
		}
	}
}

func TestAdvisePooler(t *testing.T) {
	t.Parallel()
	direct, through := pgtest.URL(t, pgtest.Postgres), pgtest.URL(t, pgtest.PgBouncer)
	for mode, want := range map[pgx.QueryExecMode]string{
		pgx.QueryExecModeCacheStatement: "pooler_prepared",
		pgx.QueryExecModeExec:           "pooler_transaction",
		pgx.QueryExecModeSimpleProtocol: "pooler_transaction",
		pgx.QueryExecModeCacheDescribe:  "pooler_transaction",
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := pgtest.Database(t, direct, through)
			pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			for range 5 { // It leaves the connections in order.
				if found := codes(adviseOn(t, pool, nil, usual)); !slices.Contains(found, want) {
					t.Errorf("found %v, want %s", found, want)
				}
			}
			one := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode, c.MaxConns = mode, 1 })
			if found := codes(adviseOn(t, one, nil, inbox.AdviceRequest{})); !slices.Contains(found, "pooler") {
				t.Errorf("by one connection: %v", found)
			}
		})
	}
}

func TestAdviseUnreachable(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nothing?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	store, err := inboxpgx.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	if found, err := store.Advise(t.Context(), usual); err == nil || store.Classify(err) != inbox.ClassUnavailable || found != nil {
		t.Errorf("Advise = %v, %v; want no findings and the database unavailable", found, err)
	}
}

func codes(found []inbox.Finding) (all []string) {
	for _, f := range found {
		all = append(all, f.Code)
	}
	return all
}

func adviseOn(t *testing.T, pool *pgxpool.Pool, config *inboxpgx.Config, r inbox.AdviceRequest) []inbox.Finding {
	t.Helper()
	store, err := inboxpgx.NewWithConfig(pool, config)
	if err != nil {
		t.Fatal(err)
	}
	found, err := store.Advise(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections were not given back", n)
	}
	return found
}

// advise makes the change of a case and asks.
func advise(t *testing.T, db pgtest.DB, c *adviceCase) []inbox.Finding {
	t.Helper()
	role := strings.ToLower("ackafter_" + rand.Text())
	fill := strings.NewReplacer("{schema}", db.Schema, "{role}", role).Replace
	admin := db.Pool(t, nil)
	run := func(ctx context.Context, sql string) {
		if _, err := admin.Exec(ctx, fill(sql), pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	run(t.Context(), c.sql)
	user := ""
	if c.role != "" {
		user = role
		run(t.Context(), "create role {role} login")
		run(t.Context(), c.role)
		t.Cleanup(func() { run(context.WithoutCancel(t.Context()), "drop owned by {role}; drop role {role}") })
	}
	t.Cleanup(func() { run(context.WithoutCancel(t.Context()), "drop schema if exists {schema}_b cascade") })
	pool := db.Pool(t, func(config *pgxpool.Config) {
		for name, value := range c.settings {
			config.ConnConfig.RuntimeParams[name] = fill(value)
		}
		if user != "" {
			config.ConnConfig.User = user
		}
		if c.conns > 0 {
			config.MaxConns = c.conns
		}
	})
	var config inboxpgx.Config
	if c.config != nil {
		config = *c.config
		config.Schema = fill(config.Schema)
	}
	r := c.request
	if r == (inbox.AdviceRequest{}) {
		r = usual
	}
	return adviseOn(t, pool, &config, r)
}

// The privileges that are asked for are those that a consumer needs: with them
// everything works, and without any one of them it is said.
func TestPrivilegesSuffice(t *testing.T) {
	t.Parallel()
	needs := map[string]string{
		"inbox": "select, insert, update, delete", "inbox_parked": "select, insert, update, delete",
		"inbox_consumers": "select, insert, update", "inbox_guard": "select, insert, delete", "inbox_schema": "select",
		"inbox_runs": "select, insert, update, delete", "inbox_starts": "select, insert, update, delete",
	}
	db := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres))
	role := strings.ToLower("ackafter_" + rand.Text())
	admin := db.Pool(t, nil)
	run := func(ctx context.Context, sql string) {
		if _, err := admin.Exec(ctx, strings.ReplaceAll(sql, "{role}", role), pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	run(t.Context(), "create role {role} login; grant usage on schema "+db.Schema+" to {role}")
	t.Cleanup(func() { run(context.WithoutCancel(t.Context()), "drop owned by {role}; drop role {role}") })
	for table, privileges := range needs {
		run(t.Context(), "grant "+privileges+" on "+table+" to {role}")
	}
	pool := db.Pool(t, func(config *pgxpool.Config) { config.ConnConfig.User = role })
	store, err := inboxpgx.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	if found := codes(adviseOn(t, pool, nil, usual)); slices.Contains(found, "privileges") {
		t.Errorf("found %v", found)
	}
	if err := useAll(t, store); err != nil {
		t.Error(err)
	}
	for table, privileges := range needs {
		for privilege := range strings.SplitSeq(privileges, ", ") {
			run(t.Context(), "revoke "+privilege+" on "+table+" from {role}")
			found := adviseOn(t, pool, nil, usual)
			if !slices.ContainsFunc(found, func(f inbox.Finding) bool {
				return f.Code == "privileges" && f.Setting == db.Schema+"."+table && f.Value == "lacks "+privilege
			}) {
				t.Errorf("without %s on %s: %+v", privilege, table, found)
			}
			run(t.Context(), "grant "+privilege+" on "+table+" to {role}")
		}
	}
}

// useAll does what a consumer does with a store.
func useAll(t *testing.T, store *inboxpgx.Store) error {
	t.Helper()
	ctx := t.Context()
	o := inbox.BeginOptions{LockTimeout: 10 * time.Second}
	cs := claims("done", "parked", "expired")
	cs[2].Retention = time.Microsecond
	errs := []error{
		store.Check(ctx),
		store.Register(ctx, inbox.Registration{Consumer: cs[0].Consumer, KeyDefinition: "d"}),
		store.Register(ctx, inbox.Registration{Consumer: cs[0].Consumer, KeyDefinition: "e", Replaces: "d"}),
	}
	for range 2 { // The second time there are a replay, a parked duplicate and an expired key.
		batch, err := store.Begin(ctx, cs, o)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		parked := inbox.Parked{Key: cs[1].Key, State: inbox.ParkedRetry, Reason: inbox.ReasonAttempts, Message: &broker.Message{Body: []byte("{}")}}
		for i := range cs {
			switch {
			case !batch.Entries()[i].Claimed():
			case i == 1:
				errs = append(errs, batch.Park(ctx, i, parked))
			default:
				_, err := batch.Start(ctx, i)
				errs = append(errs, err, batch.Finish(ctx, i, true, []byte("1")))
			}
		}
		errs = append(errs, batch.Commit(ctx))
	}
	leased, err := store.Lease(ctx, inbox.LeaseRequest{Consumer: cs[0].Consumer, Limit: 1, For: time.Minute})
	errs = append(errs, err)
	if len(leased.Rows) != 1 {
		return errors.Join(append(errs, fmt.Errorf("leased %d rows", len(leased.Rows)))...)
	}
	fed := claims("parked")
	fed[0].Parked = leased.Rows[0].Lease
	batch, err := store.Begin(ctx, fed, o)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	_, err = batch.Start(ctx, 0)
	errs = append(errs, err, batch.Finish(ctx, 0, true, nil), batch.Commit(ctx), store.Release(ctx, []inbox.Lease{leased.Rows[0].Lease}))
	_, err = store.PurgeDead(ctx, cs[0].Consumer, time.Hour, true, 10)
	errs = append(errs, err)
	_, err = store.Beat(ctx, cs[0].Consumer, inbox.RunRecord{ID: "r", Worker: "w", Host: "h"})
	errs = append(errs, err)
	_, err = store.MarkStart(ctx, cs[0])
	return errors.Join(append(errs, err, store.UnmarkStart(ctx, cs[0], false), store.EndRuns(ctx, cs[0].Consumer, "r"))...)
}
