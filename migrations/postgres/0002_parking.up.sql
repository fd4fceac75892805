-- ackafter inbox, version 2: parked messages get their later attempts, can be
-- discarded, and are grouped by how they failed.

alter table inbox_parked
    add column failure text not null default '' collate "C",
    add column dead_at timestamptz,    -- since when it is dead or discarded
    drop constraint inbox_parked_state_check,
    add constraint inbox_parked_state_check check (state in ('retry', 'waiting', 'dead', 'discarded'));
update inbox_parked set dead_at = parked_at where state = 'dead';

-- What is due, and when the next one will be, without a look at what is not: by
-- time, those without a lane apart from those with one, which have to be in their
-- order unless that was turned off. A waiting row has no time and is due.
create index inbox_parked_due on inbox_parked (consumer, (lane = ''), coalesce(next_attempt_at, parked_at))
    where state in ('retry', 'waiting');

-- The rows of a lane in their order: the first of each lane for those who feed
-- them back, and for every live message of a lane whether there is one before it.
create index inbox_parked_lanes on inbox_parked (consumer, lane, id)
    where lane <> '' and state in ('retry', 'waiting');

-- Dead letters that block their lane. They are apart, so that lanes that pass by
-- their dead letters do not have to look at them.
create index inbox_parked_dead_lanes on inbox_parked (consumer, lane, id)
    where lane <> '' and state = 'dead';

-- The oldest dead letters, for the purge. (A process of the version before leaves
-- dead_at null.)
create index inbox_parked_dead on inbox_parked (consumer, coalesce(dead_at, parked_at))
    where state in ('dead', 'discarded');

-- One row a run of a consumer, as long as it goes on or was not seen to end.
create table inbox_runs (
    consumer   text        not null collate "C",
    run_id     text        not null collate "C",
    worker     text        not null default '',
    host       text        not null default '',
    started_at timestamptz not null default clock_timestamp(),
    beat_at    timestamptz not null default clock_timestamp(),
    primary key (consumer, run_id)
);

-- Messages whose handler was started after an unclean end of a run, with how often.
create table inbox_starts (
    tenant      text        not null default '' collate "C",
    consumer    text        not null collate "C",
    message_key text        not null collate "C",
    fingerprint bytea       not null default '',
    starts      integer     not null default 1,
    worker      text        not null default '',
    updated_at  timestamptz not null default clock_timestamp(),
    primary key (tenant, consumer, message_key, fingerprint)
);

update inbox_schema set version = 2;
