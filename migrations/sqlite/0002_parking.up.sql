-- ackafter inbox for SQLite, version 2: parked messages get later attempts.

-- SQLite cannot change a check, so the table is made anew.
create table inbox_parked_new (
    id              integer primary key autoincrement,
    tenant          text    not null default '',
    consumer        text    not null,
    message_key     text    not null,
    fingerprint     blob    not null default x'',
    lane            blob    not null default x'',
    state           text    not null check (state in ('retry', 'waiting', 'dead', 'discarded')),
    reason          text    not null,
    error           text    not null default '',
    failure         text    not null default '', -- the same for failures that look alike
    attempts        integer not null default 0,
    duplicates      integer not null default 0,
    message_id      text    not null default '',
    source          text    not null default '',
    position        integer,
    broker_key      blob,
    headers         blob,
    body            blob,
    message_time    integer,
    event_time      integer,
    worker          text    not null default '',
    next_attempt_at integer,              -- state retry only
    lease_until     integer,
    token           integer,
    dead_at         integer,              -- states dead and discarded: since when
    parked_at       integer not null,
    updated_at      integer not null,
    unique (tenant, consumer, message_key, fingerprint)
);
insert into inbox_parked_new (id, tenant, consumer, message_key, fingerprint, lane, state, reason, error, attempts, duplicates,
    message_id, source, position, broker_key, headers, body, message_time, event_time, worker,
    next_attempt_at, lease_until, token, dead_at, parked_at, updated_at)
select id, tenant, consumer, message_key, fingerprint, lane, state, reason, error, attempts, duplicates,
    message_id, source, position, broker_key, headers, body, message_time, event_time, worker,
    next_attempt_at, lease_until, token, case state when 'dead' then parked_at end, parked_at, updated_at
from inbox_parked;
-- No id comes twice, not even those of rows that are gone.
delete from sqlite_sequence where name = 'inbox_parked_new';
insert into sqlite_sequence (name, seq) select 'inbox_parked_new', seq from sqlite_sequence where name = 'inbox_parked';
drop table inbox_parked;
alter table inbox_parked_new rename to inbox_parked;

-- What is due, and when the next one will be, without a look at what is not: by
-- time, those without a lane apart from those with one. A waiting row has no time
-- and is due.
create index inbox_parked_due on inbox_parked (consumer, (lane = x''), coalesce(next_attempt_at, parked_at))
    where state in ('retry', 'waiting');

-- The rows of a lane in their order: for those who feed them back, and for every
-- live message of a lane.
create index inbox_parked_lanes on inbox_parked (consumer, lane, id)
    where lane <> x'' and state in ('retry', 'waiting');

-- Dead letters that block their lane, apart, so that lanes that pass by theirs do
-- not have to look at them.
create index inbox_parked_dead_lanes on inbox_parked (consumer, lane, id)
    where lane <> x'' and state = 'dead';

-- The oldest dead letters, for the purge.
create index inbox_parked_dead on inbox_parked (consumer, coalesce(dead_at, parked_at))
    where state in ('dead', 'discarded');

-- One row a run of a consumer, as long as it goes on or was not seen to end.
create table inbox_runs (
    consumer   text    not null,
    run_id     text    not null,
    worker     text    not null default '',
    host       text    not null default '',
    started_at integer not null,
    beat_at    integer not null,
    primary key (consumer, run_id)
) without rowid;

-- Messages whose handler was started after an unclean end of a run, with how often.
create table inbox_starts (
    tenant      text    not null default '',
    consumer    text    not null,
    message_key text    not null,
    fingerprint blob    not null default x'',
    starts      integer not null default 1,
    worker      text    not null default '',
    updated_at  integer not null,
    primary key (tenant, consumer, message_key, fingerprint)
) without rowid;

update inbox_schema set version = 2;
