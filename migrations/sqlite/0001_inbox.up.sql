-- ackafter inbox for SQLite, version 1. Times are microseconds since 1970, UTC.

-- One row a message key: the claim, who took it, and the stored result.
create table inbox (
    tenant       text    not null default '',
    consumer     text    not null,
    message_key  text    not null,
    status       text    not null default 'done' check (status in ('processing', 'done')),
    fingerprint  blob,
    message_id   text    not null default '',
    source       text    not null default '',
    position     integer,
    event_time   integer,
    worker       text    not null default '',
    trace_id     text    not null default '',
    attempts     integer not null default 1,
    result       blob,
    result_meta  text,
    processed_at integer not null,
    expires_at   integer,              -- null: kept for ever
    lease_until  integer,              -- leased claims only
    token        integer,              -- leased claims only
    primary key (tenant, consumer, message_key)
) without rowid;

-- Messages that failed: dead letters, and those that wait for another attempt.
create table inbox_parked (
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

-- One row a consumer: the definition that its keys were made by, its window.
create table inbox_consumers (
    consumer       text    primary key,
    key_definition text    not null,
    retention_us   integer,              -- microseconds; null: for ever
    first_seen_at  integer not null,
    last_seen_at   integer not null
) without rowid;

-- How far a purge has forgotten, by consumer and source partition.
create table inbox_horizons (
    consumer   text    not null,
    source     text    not null,
    position   integer,
    event_time integer,
    updated_at integer not null,
    primary key (consumer, source)
) without rowid;

-- The journal of pipelines: one row a step of a message key.
create table inbox_steps (
    tenant         text    not null default '',
    consumer       text    not null,
    message_key    text    not null,
    step           text    not null,
    status         text    not null,
    result         blob,
    attempts       integer not null default 1,
    correlation_id text    not null default '',
    started_at     integer not null,
    finished_at    integer,
    primary key (tenant, consumer, message_key, step)
) without rowid;

-- Empty between transactions. An open batch holds a row whose deferred foreign
-- key points nowhere and deletes it just before its own COMMIT: a COMMIT by
-- anybody else fails.
create table inbox_guard_target (
    id integer primary key
);
create table inbox_guard (
    id integer primary key
       references inbox_guard_target (id) deferrable initially deferred
);

-- The version of these tables, for the check at start.
create table inbox_schema (
    only_row integer primary key default 1 check (only_row = 1),
    version  integer not null
);
insert into inbox_schema (version) values (1);
