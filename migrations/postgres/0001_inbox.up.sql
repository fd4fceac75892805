-- ackafter inbox, version 1. Plain SQL: names are not qualified, so the tables
-- go where search_path points.

-- One row a message key: the claim, who took it, and the stored result.
create table inbox (
    tenant       text        not null default '' collate "C",
    consumer     text        not null collate "C",
    message_key  text        not null collate "C",
    status       text        not null default 'done' check (status in ('processing', 'done')),
    fingerprint  bytea,
    message_id   text        not null default '',
    source       text        not null default '',
    position     bigint,
    event_time   timestamptz,
    worker       text        not null default '',
    trace_id     text        not null default '',
    attempts     integer     not null default 1,
    result       bytea,
    result_meta  jsonb,
    processed_at timestamptz not null default clock_timestamp(),
    expires_at   timestamptz,          -- null: kept for ever
    lease_until  timestamptz,          -- leased claims only
    token        bigint,               -- leased claims only
    primary key (tenant, consumer, message_key)
);

-- Messages that failed: dead letters, and those that wait for another attempt.
create table inbox_parked (
    id              bigint      generated always as identity primary key,
    tenant          text        not null default '' collate "C",
    consumer        text        not null collate "C",
    message_key     text        not null collate "C",
    fingerprint     bytea       not null default '',
    lane            bytea       not null default '',
    state           text        not null check (state in ('retry', 'waiting', 'dead')),
    reason          text        not null,
    error           text        not null default '',
    attempts        integer     not null default 0,
    duplicates      integer     not null default 0,
    message_id      text        not null default '',
    source          text        not null default '',
    position        bigint,
    broker_key      bytea,
    headers         bytea,
    body            bytea,
    message_time    timestamptz,
    event_time      timestamptz,
    worker          text        not null default '',
    next_attempt_at timestamptz,
    lease_until     timestamptz,
    token           bigint,
    parked_at       timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp(),
    unique (tenant, consumer, message_key, fingerprint)
);

-- One row a consumer: the definition that its keys were made by, its window.
create table inbox_consumers (
    consumer       text        primary key collate "C",
    key_definition text        not null,
    retention_us   bigint,               -- microseconds; null: for ever
    first_seen_at  timestamptz not null default clock_timestamp(),
    last_seen_at   timestamptz not null default clock_timestamp()
);

-- How far a purge has forgotten, by consumer and source partition.
create table inbox_horizons (
    consumer   text        not null collate "C",
    source     text        not null collate "C",
    position   bigint,
    event_time timestamptz,
    updated_at timestamptz not null default clock_timestamp(),
    primary key (consumer, source)
);

-- The journal of pipelines: one row a step of a message key.
create table inbox_steps (
    tenant         text        not null default '' collate "C",
    consumer       text        not null collate "C",
    message_key    text        not null collate "C",
    step           text        not null collate "C",
    status         text        not null,
    result         bytea,
    attempts       integer     not null default 1,
    correlation_id text        not null default '',
    started_at     timestamptz not null default clock_timestamp(),
    finished_at    timestamptz,
    primary key (tenant, consumer, message_key, step)
);

-- Empty between transactions. An open batch holds a row whose deferred foreign
-- key points nowhere and deletes it just before its own COMMIT: a COMMIT by
-- anybody else fails.
create table inbox_guard_target (
    id bigint primary key
);
create table inbox_guard (
    id bigint primary key
       references inbox_guard_target (id) deferrable initially deferred
);

-- The version of these tables, for the check at start.
create table inbox_schema (
    only_row boolean primary key default true check (only_row),
    version  integer not null
);
insert into inbox_schema (version) values (1);
