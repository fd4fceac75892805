package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/migrations"
)

const (
	databaseTimeout = time.Minute
	// checkpointTimeout is generous: a checkpoint writes all that the other
	// databases of the server have left.
	checkpointTimeout = 5 * time.Minute
)

// schema is what the contestants write to: the business table that all share,
// and the table in which the hand-written loop keeps its keys. It has the
// columns that such a table usually has.
const schema = `
create table bookings (
    id         bigint generated always as identity primary key,
    order_id   text        not null,
    event_type text        not null,
    amount     bigint      not null,
    customer   bigint      not null,
    booked_at  timestamptz not null default now()
);
create table processed_messages (
    consumer     text        not null,
    message_key  text        not null,
    processed_at timestamptz not null default now(),
    primary key (consumer, message_key)
)`

// durable are the settings without which the figures say nothing, and stated
// what else a reader has to know.
var (
	durable = []string{"fsync", "synchronous_commit", "full_page_writes"}
	stated  = []string{"wal_sync_method", "wal_level", "shared_buffers", "max_wal_size", "checkpoint_timeout", "autovacuum"}
)

// database is a database of this run's own.
type database struct {
	server string // URL
	url    string // of the database
	name   string
	admin  *pgxpool.Pool // for everything that is not measured
}

// makeDatabase makes a database with all tables.
func makeDatabase(ctx context.Context, server, name string) (*database, error) {
	base, err := url.Parse(server)
	if err != nil || (base.Scheme != "postgres" && base.Scheme != "postgresql") || base.Host == "" {
		// The address may hold a password: it is not shown.
		return nil, fmt.Errorf("%s: must be a URL postgres://user:password@host:port/database", envPostgres)
	}
	own := *base
	own.Path = "/" + name
	d := &database{server: server, url: own.String(), name: name}
	if err := d.onServer(ctx, "create database "+name); err != nil {
		return nil, err
	}
	if err := d.fill(ctx); err != nil {
		d.drop(ctx)
		return nil, err
	}
	return d, nil
}

func (d *database) fill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
	defer cancel()
	var err error
	if d.admin, err = pgxpool.New(ctx, d.url); err != nil {
		return fmt.Errorf("connect to %s: %w", d.name, err)
	}
	up, err := migrations.Script(migrations.Postgres())
	if err != nil {
		return fmt.Errorf("read the migration: %w", err)
	}
	for _, statements := range []string{up, schema} {
		if _, err := d.admin.Exec(ctx, statements); err != nil {
			return fmt.Errorf("make the tables: %w", err)
		}
	}
	return nil
}

// onServer runs one statement outside of the database.
func (d *database) onServer(ctx context.Context, statement string) error {
	ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, d.server)
	if err != nil {
		return fmt.Errorf("%s: connect: %w", envPostgres, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, statement); err != nil {
		return fmt.Errorf("%s: %s: %w", envPostgres, statement, err)
	}
	return nil
}

// drop removes the database.
func (d *database) drop(ctx context.Context) {
	if d.admin != nil {
		d.admin.Close()
	}
	_ = d.onServer(context.WithoutCancel(ctx), "drop database if exists "+d.name+" with (force)")
}

// connect opens a pool with its connections made.
func (d *database) connect(ctx context.Context, connections int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(d.url)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", d.name, err)
	}
	config.MaxConns = int32(connections)
	ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
	defer cancel()
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", d.name, err)
	}
	made := make([]*pgxpool.Conn, 0, connections)
	for range connections {
		var conn *pgxpool.Conn
		if conn, err = pool.Acquire(ctx); err != nil {
			break
		}
		made = append(made, conn)
	}
	for _, conn := range made {
		conn.Release()
	}
	if err != nil {
		pool.Close()
		return nil, fmt.Errorf("connect to %s: %w", d.name, err)
	}
	return pool, nil
}

// settings returns the version and the settings, and an error when the server
// may lose what it has committed.
func (d *database) settings(ctx context.Context) (version string, settings []setting, err error) {
	ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
	defer cancel()
	if err := d.admin.QueryRow(ctx, "select current_setting('server_version')").Scan(&version); err != nil {
		return "", nil, fmt.Errorf("read the settings: %w", err)
	}
	for i, name := range append(append([]string(nil), durable...), stated...) {
		s := setting{Name: name}
		if err := d.admin.QueryRow(ctx, "select current_setting($1)", name).Scan(&s.Value); err != nil {
			return "", nil, fmt.Errorf("read the settings: %w", err)
		}
		if i < len(durable) && s.Value == "off" {
			return "", nil, fmt.Errorf("%s: %s is off: a server that may lose commits is not worth measuring", envPostgres, name)
		}
		settings = append(settings, s)
	}
	return version, settings, nil
}

// reset empties all tables.
func (d *database) reset(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
	defer cancel()
	_, err := d.admin.Exec(ctx, `truncate bookings, processed_messages, inbox, inbox_parked, inbox_consumers, inbox_horizons restart identity`)
	if err != nil {
		return fmt.Errorf("empty the tables: %w", err)
	}
	return nil
}

// settle brings the tables into the state that they have in a long-lived
// database (statistics, hint bits), and begins a checkpoint cycle, so that none
// falls into what is measured.
func (d *database) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkpointTimeout)
	defer cancel()
	for _, statement := range []string{"vacuum analyze bookings, processed_messages, inbox, inbox_parked", "checkpoint"} {
		if _, err := d.admin.Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}

// tally is what a contestant has left in the database.
type tally struct {
	bookings int // rows in the business table
	distinct int // distinct events in it
	keys     int // rows in the contestant's table of keys
	parked   int
}

// count reads the tally; keys is the contestant's table of keys.
func (d *database) count(ctx context.Context, keys string) (t tally, err error) {
	ctx, cancel := context.WithTimeout(ctx, databaseTimeout)
	defer cancel()
	err = errors.Join(
		d.admin.QueryRow(ctx, `select count(*), count(distinct (order_id, event_type)) from bookings`).Scan(&t.bookings, &t.distinct),
		d.admin.QueryRow(ctx, `select count(*) from `+pgx.Identifier{keys}.Sanitize()).Scan(&t.keys),
		d.admin.QueryRow(ctx, `select count(*) from inbox_parked`).Scan(&t.parked))
	if err != nil {
		return tally{}, fmt.Errorf("count what was written: %w", err)
	}
	return t, nil
}
