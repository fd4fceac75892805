package inboxpgx

import (
	"strings"

	"github.com/jackc/pgx/v5"
)

// runSavepoint is the savepoint that every run of a handler is under. One name
// for all, so that statement caches hold it once.
const runSavepoint = "ackafter_run"

// The statements that end and begin a run.
const (
	sqlSavepoint  = "savepoint " + runSavepoint
	sqlRelease    = "release savepoint " + runSavepoint
	sqlRollbackTo = "rollback to savepoint " + runSavepoint
	sqlCommit     = "commit"
	sqlRollback   = "rollback"
)

// statements are the texts of one store; parameters are cast everywhere, so
// that they work in every query mode of pgx.
type statements struct {
	bound, unbound     string
	guard, unguard     string
	claim, claimFrozen string
	unprobe            string
	look, attach       string
	stored, storedOne  string
	forget             string
	drop, saveResults  string
	unpark, park       string

	lookLanes, lockFed          string
	lookOne, lookLaneOne        string
	unparkFed, parkFed          string
	leasable, leasableUnordered string
	lease, release, purgeDead   string
	retryParked, discardParked  string
	groupParked                 string

	beat, endRuns, purgeMarks, markStart, unmarkStart string

	version, register, definition string
	lookup, find, saveResult      string
	listParked, getParked         string
}

// columns of a record, in the order of scanRecord.
const recordColumns = `i.tenant, i.consumer, i.message_key, i.status, i.fingerprint, i.message_id, i.source, i.position,
  i.event_time, i.worker, i.trace_id, i.attempts, i.result, i.processed_at, i.expires_at`

// isExpired tells that a row is past its window; a lease that is held keeps it.
const isExpired = `(i.expires_at is not null and i.expires_at <= clock_timestamp()
  and (i.status = 'done' or i.lease_until is null or i.lease_until <= clock_timestamp()))`

// durable overrules synchronous_commit = off: an acked message must not be lost
// with the server's last moments. All other values wait for the disk at least.
// (The name is in two pieces so that what watches the wire for a COMMIT does not
// find one here.)
const durable = `case current_setting('synchronous_comm' || 'it') when 'off' then set_config('synchronous_comm' || 'it', 'on', true) end`

// replicated tells that COMMIT waits for a standby.
const replicated = `current_setting('synchronous_standby_names') <> '' and current_setting('synchronous_comm' || 'it') <> 'local'`

// waitForStandby makes COMMIT wait for a standby although the transaction has written
// nothing: a row that was found may not have reached it yet. And no limit of the
// session's may end the wait, since COMMIT would then claim success all the same.
const waitForStandby = `select pg_logical_emit_message(true, 'ackafter', ''), set_config('statement_timeout', '0', true)`

// keys are the stored keys $1 to $3, in their order.
const keys = `unnest($1::text[], $2::text[], $3::text[]) with ordinality as t(tenant, consumer, message_key, n)`

// keysAnd are keys with a value each, $4.
const keysAndBytes = `unnest($1::text[], $2::text[], $3::text[], $4::bytea[]) with ordinality as t(tenant, consumer, message_key, value, n)`

const sameKey = `x.tenant = t.tenant and x.consumer = t.consumer and x.message_key = t.message_key`

const insertClaims = `insert into {inbox} (tenant, consumer, message_key, fingerprint, message_id, source, position, event_time,
  worker, trace_id, attempts, expires_at)
select t.tenant, t.consumer, t.message_key, t.fingerprint, t.message_id, t.source, t.position, t.event_time,
  t.worker, t.trace_id, t.attempts, clock_timestamp() + t.retention_us * interval '1 microsecond'
from unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::text[], $7::bigint[], $8::timestamptz[],
  $9::text[], $10::text[], $11::integer[], $12::bigint[]) with ordinality
  as t(tenant, consumer, message_key, fingerprint, message_id, source, position, event_time,
  worker, trace_id, attempts, retention_us, n)
order by t.n
on conflict (tenant, consumer, message_key) do nothing
returning tenant, consumer, message_key`

// probeReason marks the rows that claimFrozen inserts to meet parked rows that
// its snapshot cannot see; they are deleted before anybody can see them.
const probeReason = "probe"

// newStatements returns the texts for tables in schema, or for those that
// search_path finds.
func newStatements(schema string) statements {
	prefix := ""
	if schema != "" {
		prefix = pgx.Identifier{schema}.Sanitize() + "."
	}
	var pairs []string
	for _, table := range []string{"inbox", "inbox_parked", "inbox_consumers", "inbox_guard", "inbox_schema", "inbox_runs", "inbox_starts"} {
		pairs = append(pairs, "{"+table+"}", prefix+table)
	}
	fill := strings.NewReplacer(pairs...).Replace
	s := statements{
		// The settings of the session are kept in variables of the transaction, so
		// that unbound can put them back without a round trip.
		bound: `with kept as materialized (
  select set_config('ackafter.lock_timeout', current_setting('lock_timeout'), true) as a,
    set_config('ackafter.statement_timeout', current_setting('statement_timeout'), true) as b)
select set_config('lock_timeout', $1::text, true), set_config('statement_timeout', $1::text, true),
  set_config('idle_in_transaction_session_timeout', $2::text, true), a, b,
  ` + durable + `, current_setting('transaction_isolation'), ` + replicated + `
from kept`,
		unbound: `select set_config('lock_timeout', current_setting('ackafter.lock_timeout'), true),
  set_config('statement_timeout', current_setting('ackafter.statement_timeout'), true)`,
		guard:   `insert into {inbox_guard} (id) values (pg_current_xact_id()::text::bigint)`,
		unguard: `delete from {inbox_guard} where id = pg_current_xact_id()::text::bigint`,
		claim:   insertClaims,
		claimFrozen: `with claimed as (` + insertClaims + `),
probed as (insert into {inbox_parked} (tenant, consumer, message_key, fingerprint, state, reason)
  select c.tenant, c.consumer, c.message_key, coalesce(t.value, ''), 'dead', '` + probeReason + `'
  from claimed c join unnest($1::text[], $2::text[], $3::text[], $4::bytea[]) with ordinality as t(tenant, consumer, message_key, value, n)
    on c.tenant = t.tenant and c.consumer = t.consumer and c.message_key = t.message_key
  order by t.n
  on conflict (tenant, consumer, message_key, fingerprint) do nothing)
select tenant, consumer, message_key from claimed`,
		unprobe: `delete from {inbox_parked} x using ` + keys + ` where ` + sameKey + ` and x.reason = '` + probeReason + `'`,
		look: `select t.n, x.id, x.state from ` + keysAndBytes + `
join {inbox_parked} x on ` + sameKey + ` and x.fingerprint = coalesce(t.value, '')`,
		attach: `with l as (select id from {inbox_parked} where id = any($1::bigint[]) order by id for update)
update {inbox_parked} p set duplicates = p.duplicates + 1, updated_at = clock_timestamp()
from l where p.id = l.id returning p.id, p.state`,
		stored: `select t.n, ` + isExpired + `, ` + recordColumns + `
from ` + keys + ` join {inbox} i on i.tenant = t.tenant and i.consumer = t.consumer and i.message_key = t.message_key`,
		// For one key there is a statement without arrays: the server keeps its plan.
		storedOne: `select 1::bigint, ` + isExpired + `, ` + recordColumns + `
from {inbox} i where i.tenant = $1::text and i.consumer = $2::text and i.message_key = $3::text`,
		forget: `with l as (select i.tenant, i.consumer, i.message_key from ` + keys + `
  join {inbox} i on i.tenant = t.tenant and i.consumer = t.consumer and i.message_key = t.message_key
  where ` + isExpired + ` order by t.n for update of i)
delete from {inbox} x using l t where ` + sameKey,
		drop:        `delete from {inbox} x using ` + keys + ` where ` + sameKey,
		saveResults: `update {inbox} x set result = t.value from ` + keysAndBytes + ` where ` + sameKey,

		version: `select version from {inbox_schema}`,
		register: `insert into {inbox_consumers} as c (consumer, key_definition, retention_us) values ($1::text, $2::text, $3::bigint)
on conflict (consumer) do update set key_definition = excluded.key_definition, retention_us = excluded.retention_us,
  last_seen_at = clock_timestamp()
where c.key_definition = excluded.key_definition or c.key_definition = $4::text
returning true`,
		definition: `select key_definition from {inbox_consumers} where consumer = $1::text`,
		lookup: `select ` + recordColumns + ` from {inbox} i
where i.tenant = $1::text and i.consumer = $2::text and i.message_key = $3::text`,
		find: `select ` + recordColumns + ` from {inbox} i where i.message_key = $1::text order by i.consumer, i.tenant`,
		saveResult: `update {inbox} set result = $4::bytea
where tenant = $1::text and consumer = $2::text and message_key = $3::text`,
	}
	s.beat, s.endRuns, s.purgeMarks, s.markStart, s.unmarkStart = beat, endRuns, purgeMarks, markStart, unmarkStart
	addParking(&s)
	for _, text := range []*string{
		&s.guard, &s.unguard, &s.claim, &s.claimFrozen, &s.unprobe, &s.look, &s.attach, &s.stored, &s.storedOne, &s.forget, &s.drop,
		&s.saveResults, &s.unpark, &s.park, &s.version, &s.register, &s.definition, &s.lookup, &s.find, &s.saveResult,
		&s.listParked, &s.getParked, &s.lookLanes, &s.lookOne, &s.lookLaneOne, &s.lockFed, &s.unparkFed, &s.parkFed, &s.leasable, &s.leasableUnordered,
		&s.lease, &s.release, &s.purgeDead, &s.retryParked, &s.discardParked, &s.groupParked,
		&s.beat, &s.endRuns, &s.purgeMarks, &s.markStart, &s.unmarkStart,
	} {
		*text = fill(*text)
	}
	return s
}
