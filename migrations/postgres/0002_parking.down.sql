-- Back to version 1. Discarded messages become dead ones, without a body: they
-- must not run when they are delivered again. Those that wait for another attempt
-- stay, and nothing feeds them back.
drop table inbox_starts;
drop table inbox_runs;
drop index inbox_parked_dead;
drop index inbox_parked_dead_lanes;
drop index inbox_parked_lanes;
drop index inbox_parked_due;
update inbox_parked set state = 'dead' where state = 'discarded';
alter table inbox_parked
    drop constraint inbox_parked_state_check,
    add constraint inbox_parked_state_check check (state in ('retry', 'waiting', 'dead')),
    drop column dead_at,
    drop column failure;
update inbox_schema set version = 1;
