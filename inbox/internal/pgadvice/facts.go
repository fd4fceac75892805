// Package pgadvice judges the settings of a PostgreSQL server and of a connection
// to it, for the stores that work on one. It needs no driver.
package pgadvice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// Session is one connection to the server.
type Session interface {
	// Scan runs a query for one row, with parameters as $1.
	Scan(ctx context.Context, sql string, args []any, dest ...any) error
	// Within calls do in a transaction, which is rolled back.
	Within(ctx context.Context, do func() error) error
}

// Store is what is to know about the store that asks.
type Store struct {
	// Schema is where the tables are; empty: search_path finds them. Prefix stands
	// before their names in statements: the schema in quotes and a dot, or nothing.
	Schema, Prefix string
	// PoolSize is the highest number of connections; 0: no bound.
	PoolSize int
	// MaxIdle is how long the pool keeps an idle connection; 0: not known.
	MaxIdle time.Duration
	// Isolated: the store asks for an isolation level of its own.
	Isolated bool
	// BoundsIdle: the store sets idle_in_transaction_session_timeout for its own
	// transactions even if handlers have no bound.
	BoundsIdle bool
	// Now is the time of this process; nil: time.Now.
	Now func() time.Time
}

// facts are what one look at the server shows.
type facts struct {
	Version        int    `json:"version"`
	Recovery       bool   `json:"recovery"`
	ReadOnly       string `json:"read_only"`
	Durability     string `json:"durability"`
	Fsync          string `json:"fsync"`
	FullPageWrites string `json:"full_page_writes"`
	StandbyNames   string `json:"standby_names"`
	SeesStandbys   bool   `json:"sees_standbys"`
	Standbys       int    `json:"standbys"`
	Isolation      string `json:"isolation"`
	Role           string `json:"role"`
	Autovacuum     string `json:"autovacuum"`
	TrackCounts    string `json:"track_counts"`
	Connections    int    `json:"connections"`
	RoleLimit      int    `json:"role_limit"`
	DatabaseLimit  int    `json:"database_limit"`
	Now            int64  `json:"now"` // microseconds since 1970
	Guards         int    `json:"guards"`
	Idle           int64  `json:"idle"` // all of these in milliseconds
	IdleSession    int64  `json:"idle_session"`
	Statement      int64  `json:"statement"`
	Lock           int64  `json:"lock"`
	Transaction    int64  `json:"transaction"`
	Tables         []fact `json:"tables"`
	SearchPath     string `json:"search_path"`

	clockOff time.Duration
}

// fact is what there is to know about one table; without a schema it is not there.
type fact struct {
	Name     string `json:"name"`
	Schema   string `json:"schema"`
	Hidden   string `json:"hidden"`   // schemas of the search path with another one
	Lacks    string `json:"lacks"`    // privileges
	Usable   bool   `json:"usable"`   // its schema
	Logged   bool   `json:"logged"`   // its rows survive a crash
	Vacuumed bool   `json:"vacuumed"` // by autovacuum
	Hides    bool   `json:"hides"`    // rows, by row-level security
	Dead     int64  `json:"dead"`
	Live     int64  `json:"live"`
}

// look reads the facts in one statement. Names of settings are in two pieces where
// they hold a word that what watches the wire for the end of a transaction looks for.
const look = `with here as materialized (
  select c.* from pg_class c where c.relkind in ('r', 'p') and c.relname like 'inbox%'
    and case $1::text when '' then pg_table_is_visible(c.oid)
    else c.relnamespace = (select n.oid from pg_namespace n where n.nspname = $1::text) end)
select json_build_object(
'version', current_setting('server_version_num')::integer,
'recovery', pg_is_in_recovery(),
'read_only', current_setting('default_transaction_read_only'),
'durability', current_setting('synchronous_comm' || 'it'),
'fsync', current_setting('fsync'),
'full_page_writes', current_setting('full_page_writes'),
'standby_names', current_setting('synchronous_standby_names'),
'sees_standbys', pg_has_role(current_user, 'pg_read_all_stats', 'usage'),
'standbys', (select count(*) from pg_stat_replication where sync_state in ('sync', 'quorum')),
'isolation', current_setting('default_transaction_isolation'),
'role', current_setting('session_replication_role'),
'autovacuum', current_setting('autovacuum'),
'track_counts', current_setting('track_counts'),
'connections', current_setting('max_connections')::integer - case when r.rolsuper then 0 else
  current_setting('superuser_reserved_connections')::integer + coalesce(current_setting('reserved_connections', true)::integer, 0) end,
'role_limit', case when r.rolsuper then -1 else r.rolconnlimit end,
'database_limit', case when r.rolsuper then -1 else d.datconnlimit end,
'now', (extract(epoch from clock_timestamp()) * 1000000)::bigint,
'guards', (select count(*) from pg_trigger g where g.tgrelid = (select c.oid from here c where c.relname = 'inbox_guard')
  and g.tgisinternal and g.tginitdeferred and g.tgenabled in ('O', 'A')),
'search_path', array_to_string(current_schemas(false), ', '),
'idle', s.idle, 'idle_session', s.idle_session, 'statement', s.statement, 'lock', s.lock, 'transaction', s.transaction,
'tables', (select json_agg(json_build_object('name', t.name, 'schema', coalesce(n.nspname, ''),
    'hidden', coalesce((select string_agg(o.nspname::text, ', ') from pg_class x join pg_namespace o on o.oid = x.relnamespace
      where x.relname = t.name and x.relkind in ('r', 'p') and o.nspname = any (current_schemas(false)) and x.oid <> c.oid), ''),
    'lacks', coalesce((select string_agg(p, ', ') from unnest(string_to_array(t.needs, ' ')) p where not has_table_privilege(c.oid, p)), ''),
    'usable', coalesce(has_schema_privilege(n.oid, 'usage'), true),
    'logged', coalesce(c.relpersistence = 'p', true),
    'vacuumed', coalesce((select option_value::boolean from pg_options_to_table(c.reloptions) where option_name = 'autovacuum_enabled'), true),
    'hides', coalesce(row_security_active(c.oid), false),
    'dead', coalesce(u.n_dead_tup, 0), 'live', coalesce(u.n_live_tup, 0)) order by t.name)
  from (values ('inbox', 'select insert update delete'), ('inbox_parked', 'select insert update delete'),
    ('inbox_consumers', 'select insert update'), ('inbox_guard', 'select insert delete'), ('inbox_schema', 'select'),
    ('inbox_runs', 'select insert update delete'), ('inbox_starts', 'select insert update delete'))
    as t(name, needs)
  left join here c on c.relname = t.name
  left join pg_namespace n on n.oid = c.relnamespace
  left join pg_stat_all_tables u on u.relid = c.oid)
)::text
from pg_roles r, pg_database d, (select
  max(setting::bigint) filter (where name = 'idle_in_transaction_session_timeout') as idle,
  max(setting::bigint) filter (where name = 'idle_session_timeout') as idle_session,
  max(setting::bigint) filter (where name = 'statement_timeout') as statement,
  max(setting::bigint) filter (where name = 'lock_timeout') as lock,
  coalesce(max(setting::bigint) filter (where name = 'transaction_timeout'), 0) as transaction
  from pg_settings where name in ('idle_in_transaction_session_timeout', 'idle_session_timeout', 'statement_timeout',
    'lock_timeout', 'transaction_timeout')) s
where r.rolname = session_user and d.datname = current_database()`

// overdueAfter is how long a parked message may be due until something is wrong.
const overdueAfter = 5 * time.Minute

// maxOverdue bounds the counting.
const maxOverdue = 1000

// Advise looks at the server through a session and judges what it sees. pooler is
// what is known about a pooler in between, see FindPooler.
func Advise(ctx context.Context, s Session, store Store, r inbox.AdviceRequest, pooler Pooler) ([]inbox.Finding, error) {
	f, err := gather(ctx, s, &store)
	if err != nil {
		return nil, err
	}
	found := judge(f, &store, r, pooler)
	if r.Consumer == "" || !f.readable("inbox_parked") {
		return found, nil
	}
	overdue, err := countOverdue(ctx, s, store.Prefix, r.Consumer)
	if err != nil {
		return found, err
	}
	return append(found, Overdue(overdue, maxOverdue)...), nil
}

func gather(ctx context.Context, s Session, store *Store) (*facts, error) {
	now := store.Now
	if now == nil {
		now = time.Now
	}
	var text string
	before := now()
	if err := s.Scan(ctx, look, []any{store.Schema}, &text); err != nil {
		return nil, err
	}
	after := now()
	f := new(facts)
	if err := json.Unmarshal([]byte(text), f); err != nil {
		return nil, fmt.Errorf("read the settings: %w", err)
	}
	// The clock was read at some time in between.
	switch at := time.UnixMicro(f.Now); {
	case at.Before(before):
		f.clockOff = at.Sub(before)
	case at.After(after):
		f.clockOff = at.Sub(after)
	}
	return f, nil
}

func (f *facts) readable(table string) bool {
	for _, t := range f.Tables {
		if t.Name == table {
			return t.Schema != "" && t.Usable && t.Lacks == ""
		}
	}
	return false
}

func countOverdue(ctx context.Context, s Session, prefix, consumer string) (n int, err error) {
	query := `select count(*) from (select 1 from ` + prefix + `inbox_parked where consumer = $1::text and state = 'retry'
		and coalesce(next_attempt_at, parked_at) < clock_timestamp() - $2::text::interval
		and (lease_until is null or lease_until < clock_timestamp()) limit $3::text::bigint) x`
	err = s.Scan(ctx, query, []any{consumer, fmt.Sprint(int(overdueAfter.Seconds()), " seconds"), fmt.Sprint(maxOverdue)}, &n)
	return n, err
}

// Overdue returns the finding about n parked messages that should have run long ago.
func Overdue(n, limit int) []inbox.Finding {
	if n == 0 {
		return nil
	}
	value := fmt.Sprintf("%d due", n)
	if n >= limit {
		value += " or more"
	}
	return []inbox.Finding{{
		Code: "parked_overdue", Severity: inbox.SeverityWarning, Setting: "inbox_parked", Value: value,
		Meaning: fmt.Sprintf("Parked messages have been due for more than %v, and nobody runs them.", overdueAfter),
		Advice:  "See that processes of the consumer run, that their database is not paused, and that Parking.Poll is not negative in all of them.",
	}}
}

// Pooler is what is known about a pooler between this process and the server.
type Pooler struct {
	// Present: there is one. Shares: it gives one server connection to several
	// clients in turn (transaction mode). Refuses: it takes no transactions
	// (statement mode). Mixes: prepared statements get lost.
	Present, Shares, Refuses, Mixes bool
	// Mode is how statements are sent, for people; may be empty.
	Mode string
}

const backend = "select pg_backend_pid()"

// FindPooler finds out about a pooler by two connections that are open at once, with
// statements as the store sends them: without a pooler that shares connections each
// has a server process of its own. A busy pooler may go unnoticed, but what is
// reported is so.
func FindPooler(ctx context.Context, a, b Session) (p Pooler, err error) {
	var first, other, second int
	err = a.Scan(ctx, backend, nil, &first)
	if err == nil {
		err = b.Within(ctx, func() error {
			// While b holds its process, a has to take another one.
			if err := b.Scan(ctx, backend, nil, &other); err != nil {
				return err
			}
			return a.Scan(ctx, backend, nil, &second)
		})
	}
	const (
		noStatement = "26000"
		thereBefore = "42P05"
		protocol    = "08P01"
	)
	switch state(err) {
	case noStatement, thereBefore:
		return Pooler{Present: true, Shares: true, Mixes: true}, nil
	case protocol:
		return Pooler{Present: true, Shares: true, Refuses: true}, nil
	}
	if err != nil {
		return Pooler{}, err
	}
	p.Shares = first == other || first != second
	p.Present = p.Shares
	return p, nil
}

// state returns the SQLSTATE of err, whatever the driver; "" when it has none.
func state(err error) string {
	var s interface{ SQLState() string }
	if errors.As(err, &s) {
		return s.SQLState()
	}
	return ""
}
