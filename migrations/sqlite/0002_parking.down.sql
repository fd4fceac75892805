-- Back to version 1. Parked messages are kept; those that a person gave up are
-- dead letters again, without their bodies.
drop table inbox_starts;
drop table inbox_runs;

create table inbox_parked_old (
    id              integer primary key autoincrement,
    tenant          text    not null default '',
    consumer        text    not null,
    message_key     text    not null,
    fingerprint     blob    not null default x'',
    lane            blob    not null default x'',
    state           text    not null check (state in ('retry', 'waiting', 'dead')),
    reason          text    not null,
    error           text    not null default '',
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
    next_attempt_at integer,
    lease_until     integer,
    token           integer,
    parked_at       integer not null,
    updated_at      integer not null,
    unique (tenant, consumer, message_key, fingerprint)
);
insert into inbox_parked_old (id, tenant, consumer, message_key, fingerprint, lane, state, reason, error, attempts, duplicates,
    message_id, source, position, broker_key, headers, body, message_time, event_time, worker,
    next_attempt_at, lease_until, token, parked_at, updated_at)
select id, tenant, consumer, message_key, fingerprint, lane, case state when 'discarded' then 'dead' else state end,
    reason, error, attempts, duplicates,
    message_id, source, position, broker_key, headers, body, message_time, event_time, worker,
    next_attempt_at, lease_until, token, parked_at, updated_at
from inbox_parked;
delete from sqlite_sequence where name = 'inbox_parked_old';
insert into sqlite_sequence (name, seq) select 'inbox_parked_old', seq from sqlite_sequence where name = 'inbox_parked';
drop table inbox_parked;
alter table inbox_parked_old rename to inbox_parked;

update inbox_schema set version = 1;
