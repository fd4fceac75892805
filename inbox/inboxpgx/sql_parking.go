package inboxpgx

// Parts of the statements about parked rows, which are x in all of them. Times of
// the statement's begin can be looked up in an index; they do not move on while it
// runs.
const (
	// isFed: it gets another attempt, or waits for its lane.
	isFed = `x.state in ('retry', 'waiting')`
	// isDead and isBlocking are as the indexes have them.
	isDead     = `x.state in ('dead', 'discarded')`
	isBlocking = `x.lane <> '' and x.state = 'dead'`
	// dueTime is as the index inbox_parked_due has it.
	dueTime = `coalesce(x.next_attempt_at, x.parked_at)`
	isDue   = dueTime + ` <= statement_timestamp()`
	// isLeft: nobody has leased it.
	isLeft = `(x.lease_until is null or x.lease_until <= statement_timestamp())`
	// waitTime is the time that a row waits for, if it does.
	waitTime = `case when x.state = 'retry' and ` + isLeft + ` and ` + dueTime + ` > statement_timestamp() then ` + dueTime + ` end`
	// deadSince is as the index inbox_parked_dead has it.
	deadSince = `coalesce(x.dead_at, x.parked_at)`
)

// parkedFilter are the conditions $1 to $9 of inbox.ParkedFilter.
const parkedFilter = `($1::text = '' or x.consumer = $1::text) and ($2::text = '' or x.tenant = $2::text)
  and ($3::text[] is null or x.message_key = any($3::text[])) and ($4::text = '' or x.state = $4::text)
  and ($5::text = '' or x.reason = $5::text) and ($6::text = '' or x.failure = $6::text)
  and ($7::text = '' or strpos(x.error, $7::text) > 0)
  and ($8::timestamptz is null or x.parked_at >= $8::timestamptz) and ($9::timestamptz is null or x.parked_at < $9::timestamptz)`

// parkedColumns of a record, in the order of parkedScan.
const parkedColumns = `x.id, x.tenant, x.consumer, x.message_key, x.fingerprint, x.lane, x.state, x.reason, x.error, x.failure,
  x.attempts, x.duplicates, x.message_id, x.source, x.position, x.message_time, x.event_time, x.worker,
  case when x.state = 'retry' then x.next_attempt_at end, x.lease_until,
  case when ` + isDead + ` then ` + deadSince + ` end, x.parked_at, x.updated_at`

// lanes reports what holds the lanes $5 (consumers) and $6: the first row (with the
// dead ones if $7) that is none of the leases $8 and $9, which are the batch's
// own; and how many messages wait, up to $10, with their bytes.
const lanes = `select l.n, f.id, '', w.n, w.bytes
from unnest($5::text[], $6::bytea[], $10::bigint[]) with ordinality as l(consumer, lane, most, n)
cross join lateral (select y.id from (
    (select x.id from {inbox_parked} x where x.consumer = l.consumer and x.lane = l.lane and x.lane <> '' and ` + isFed + `
       and not ` + isOwn + ` order by x.id limit 1)
    union all
    (select x.id from {inbox_parked} x where $7::boolean and x.consumer = l.consumer and x.lane = l.lane and ` + isBlocking + `
       and not ` + isOwn + ` order by x.id limit 1)) y
  order by y.id limit 1) f
cross join lateral (select count(*) as n, coalesce(sum(z.size), 0)::bigint as bytes from (
    select octet_length(x.body) as size from {inbox_parked} x
    where x.consumer = l.consumer and x.lane = l.lane and x.lane <> '' and ` + isFed + ` and x.state = 'waiting' limit l.most) z) w`

// ofOneLane is lanes for a single claim of consumer $2 and lane $5; the batch's own
// row, if it has one, is $7.
const ofOneLane = `select 1::bigint, f.id, '', w.n, w.bytes
from (select y.id from (
    (select x.id from {inbox_parked} x where x.consumer = $2::text and x.lane = $5::bytea and x.lane <> '' and ` + isFed + `
       and x.id <> $7::bigint order by x.id limit 1)
    union all
    (select x.id from {inbox_parked} x where $6::boolean and x.consumer = $2::text and x.lane = $5::bytea and ` + isBlocking + `
       and x.id <> $7::bigint order by x.id limit 1)) y
  order by y.id limit 1) f
cross join lateral (select count(*) as n, coalesce(sum(z.size), 0)::bigint as bytes from (
    select octet_length(x.body) as size from {inbox_parked} x
    where x.consumer = $2::text and x.lane = $5::bytea and x.lane <> '' and ` + isFed + ` and x.state = 'waiting'
    limit $8::bigint) z) w`

const isOwn = `exists (select from unnest($8::bigint[], $9::bigint[]) as o(id, token)
         where o.id = x.id and o.token = x.token and x.lease_until is not null)`

// chain walks over the rows of lanes in their order: from each lane the rows that
// can be leased, up to the first that cannot; that one too, for its time. One step
// is one look into the index, so what waits behind costs nothing. $2 is the lane to
// begin after, $3 the last one (null: to the end), $4 the limit, of which it takes
// one more; with $5 dead letters block their lanes.
const chain = `chain(lane, id, free, wait, taken) as (
  (select x.lane, x.id, ` + isFree + `, ` + waitTime + `, (` + isFree + `)::integer
   from {inbox_parked} x
   where x.consumer = $1::text and x.lane > $2::bytea and x.lane <> '' and ` + isFed + ` and ($3::bytea is null or x.lane <= $3::bytea)
   order by x.lane, x.id limit 1)
  union all
  select n.lane, n.id, n.free, n.wait, c.taken + n.free::integer
  from chain c cross join lateral (
    select x.lane, x.id, ` + isFree + ` as free, ` + waitTime + ` as wait
    from {inbox_parked} x
    where x.consumer = $1::text and (x.lane, x.id) > (c.lane, case when c.free then c.id else 9223372036854775807 end)
      and x.lane <> '' and ` + isFed + ` and ($3::bytea is null or x.lane <= $3::bytea)
    order by x.lane, x.id limit 1) n
  where c.taken <= $4::integer)`

const isFree = `(` + isLeft + ` and ` + isDue + ` and not ($5::boolean and exists (select from {inbox_parked} d
     where d.consumer = x.consumer and d.lane = x.lane and d.lane <> '' and d.state = 'dead' and d.id < x.id)))`

// microsecondsTo is the time until a timestamp.
func microsecondsTo(at string) string {
	return `(extract(epoch from ` + at + ` - statement_timestamp()) * 1000000)::bigint`
}

// dueOf selects the ids that are due of the rows with a property that the index
// inbox_parked_due tells apart, the longest due first, one more than $4.
func dueOf(which string) string {
	return `coalesce((select array_agg(y.id order by y.due, y.id) from (select x.id, ` + dueTime + ` as due from {inbox_parked} x
  where x.consumer = $1::text and ` + which + ` and ` + isFed + ` and ` + isDue + ` and ` + isLeft + `
  order by ` + dueTime + ` limit $4::integer + 1) y), '{}')::bigint[]`
}

// nextOf selects the time of the first one of them that is not due.
func nextOf(which string) string {
	return `(select ` + dueTime + ` from {inbox_parked} x
  where x.consumer = $1::text and ` + which + ` and ` + isFed + ` and ` + dueTime + ` > statement_timestamp()
  order by ` + dueTime + ` limit 1)`
}

const (
	withoutLane = `(x.lane = '')`
	withLane    = `(x.lane = '') is false`
)

func addParking(s *statements) {
	s.lookLanes = `select t.n, x.id, x.state, 0::bigint, 0::bigint from ` + keysAndBytes + `
join {inbox_parked} x on ` + sameKey + ` and x.fingerprint = coalesce(t.value, '')
union all ` + lanes
	// Those for one key have no arrays: for them the server keeps a plan, and it is
	// by index from the first row on.
	s.lookOne = `select 1::bigint, x.id, x.state from {inbox_parked} x
where x.tenant = $1::text and x.consumer = $2::text and x.message_key = $3::text and x.fingerprint = $4::bytea`
	s.lookLaneOne = `select 1::bigint, x.id, x.state, 0::bigint, 0::bigint from {inbox_parked} x
where x.tenant = $1::text and x.consumer = $2::text and x.message_key = $3::text and x.fingerprint = $4::bytea
union all ` + ofOneLane + `
`
	s.lockFed = `select t.n from unnest($1::bigint[], $2::bigint[]) with ordinality as t(id, token, n)
join {inbox_parked} x on x.id = t.id and x.token = t.token and x.lease_until is not null
order by x.id for update of x`
	s.unpark = `delete from {inbox_parked} x using ` + keysAndBytes + ` where ` + sameKey + ` and x.fingerprint = coalesce(t.value, '')`
	s.unparkFed = `delete from {inbox_parked} where id = any($1::bigint[])`
	s.park = `insert into {inbox_parked} (tenant, consumer, message_key, fingerprint, lane, state, reason, error, failure, attempts,
  message_id, source, position, broker_key, headers, body, message_time, event_time, worker, next_attempt_at, dead_at)
values ($1::text, $2::text, $3::text, $4::bytea, $5::bytea, $6::text, $7::text, $8::text, $9::text, $10::integer,
  $11::text, $12::text, $13::bigint, $14::bytea, $15::bytea, $16::bytea, $17::timestamptz, $18::timestamptz, $19::text,
  case $6::text when 'retry' then clock_timestamp() + $20::bigint * interval '1 microsecond' end,
  case $6::text when 'dead' then clock_timestamp() end)
on conflict (tenant, consumer, message_key, fingerprint) do nothing`
	s.parkFed = `update {inbox_parked} set state = $3::text, reason = $4::text, error = $5::text, failure = $6::text,
  attempts = $7::integer, worker = $8::text, lease_until = null, updated_at = clock_timestamp(),
  next_attempt_at = case $3::text when 'retry' then clock_timestamp() + $9::bigint * interval '1 microsecond' end,
  dead_at = case $3::text when 'dead' then clock_timestamp() end
where id = $1::bigint and token = $2::bigint and lease_until is not null`

	// The rows that can be leased: without a lane, with one, the lanes of these; and
	// the time until the next.
	s.leasable = `with recursive ` + chain + `
select ` + dueOf(withoutLane) + `, coalesce(array_agg(chain.id order by chain.lane, chain.id) filter (where chain.free), '{}')::bigint[],
  coalesce(array_agg(chain.lane order by chain.lane, chain.id) filter (where chain.free), '{}')::bytea[],
  ` + microsecondsTo(`least(min(chain.wait), `+nextOf(withoutLane)+`)`) + `
from chain`
	s.leasableUnordered = `select ` + dueOf(withoutLane) + `, ` + dueOf(withLane) + `, '{}'::bytea[],
  ` + microsecondsTo(`least(`+nextOf(withoutLane)+`, `+nextOf(withLane)+`)`) + `
where $2::bytea is not null and $3::bytea is null and $5::boolean is not null`
	// A token is higher than any before, even when a failover has forgotten some.
	// The case hides the state from the planner: when many rows have become due since
	// the last ANALYZE, it would go through all of inbox_parked_due for a few ids.
	s.lease = `with l as materialized (select x.id from {inbox_parked} x
  where x.id = any($1::bigint[]) and case when ` + isFed + ` then ` + isDue + ` and ` + isLeft + ` else false end
  order by x.id for update skip locked),
ok as (select y.id from (
    select w.id, w.lane, l.id is not null as got, bool_and(l.id is not null) over (partition by w.lane order by w.n) as unbroken
    from unnest($1::bigint[], $2::bytea[]) with ordinality as w(id, lane, n) left join l on l.id = w.id) y
  where case when y.lane = '' then y.got else y.unbroken end)
update {inbox_parked} x set token = greatest(coalesce(x.token, 0) + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint),
  lease_until = clock_timestamp() + $3::bigint * interval '1 microsecond', worker = $4::text, updated_at = clock_timestamp()
from ok where x.id = ok.id
returning ` + parkedColumns + `, x.broker_key, x.headers, x.body, x.token`
	s.release = `with l as materialized (select x.id from unnest($1::bigint[], $2::bigint[]) as t(id, token)
  join {inbox_parked} x on x.id = t.id and x.token = t.token and x.lease_until is not null order by x.id for update of x)
update {inbox_parked} x set lease_until = null, updated_at = clock_timestamp() from l where x.id = l.id`
	s.purgeDead = `with l as materialized (select x.id from {inbox_parked} x
  where x.consumer = $1::text and ` + isDead + ` and ` + deadSince + ` < statement_timestamp() - $2::bigint * interval '1 microsecond'
    and not ($3::boolean and ` + isBlocking + `)
  order by ` + deadSince + `, x.id limit $4::integer for update skip locked)
delete from {inbox_parked} x using l where x.id = l.id`

	s.retryParked = `with l as materialized (select x.id from {inbox_parked} x
  where x.id = any($1::bigint[]) and x.state in ('dead', 'retry') and ` + isLeft + ` order by x.id for update)
update {inbox_parked} x set state = 'retry', attempts = 0, next_attempt_at = clock_timestamp(), dead_at = null, lease_until = null,
  updated_at = clock_timestamp()
from l where x.id = l.id`
	s.discardParked = `with l as materialized (select x.id from {inbox_parked} x
  where x.id = any($1::bigint[]) and x.state <> 'discarded' and ` + isLeft + ` order by x.id for update)
update {inbox_parked} x set state = 'discarded', body = null, headers = null, error = $2::text, next_attempt_at = null,
  lease_until = null, dead_at = clock_timestamp(), updated_at = clock_timestamp()
from l where x.id = l.id`
	s.groupParked = `select g.failure, g.consumer, g.state, g.reason, e.error, g.n, g.first, g.last from (
    select x.failure, x.consumer, x.state, x.reason, count(*) as n, min(x.parked_at) as first, max(x.parked_at) as last, max(x.id) as newest
    from {inbox_parked} x where ` + parkedFilter + ` group by x.failure, x.consumer, x.state, x.reason) g
  join {inbox_parked} e on e.id = g.newest
order by g.n desc, g.last desc, g.newest desc`
	s.listParked = `select ` + parkedColumns + ` from {inbox_parked} x
where x.id > $10::bigint and ` + parkedFilter + ` order by x.id limit $11::bigint`
	s.getParked = `select ` + parkedColumns + `, x.broker_key, x.headers, x.body from {inbox_parked} x where x.id = $1::bigint`
}
