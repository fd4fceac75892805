-- Drops the inbox, version 1, with every stored key.
drop table inbox_schema;
drop table inbox_guard;
drop table inbox_guard_target;
drop table inbox_steps;
drop table inbox_horizons;
drop table inbox_consumers;
drop table inbox_parked;
drop table inbox;
