package inboxsql

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// postgres is the dialect of PostgreSQL. Statements that work on many claims get
// them as one JSON text: one statement text for every size of batch, and no
// types that only some drivers know.
type postgres struct {
	schema string // Config.Schema
	prefix string // of tables, with its dot
	level  string // of isolation; empty is the database's default
}

var postgresLevels = map[sql.IsolationLevel]string{
	sql.LevelDefault:        "",
	sql.LevelReadCommitted:  "read committed",
	sql.LevelRepeatableRead: "repeatable read",
	sql.LevelSnapshot:       "repeatable read",
	sql.LevelSerializable:   "serializable",
}

func schemaPrefix(schema string) string {
	if schema == "" {
		return ""
	}
	return `"` + strings.ReplaceAll(schema, `"`, `""`) + `".`
}

// postgresRows makes rows of the JSON in $1: i is the place in it.
const postgresRows = `json_to_recordset($1::text::json) as c(i int, t text, c text, k text, f text, m text, s text,
	p bigint, e bigint, w text, r text, a int, x bigint, v text, l text, q bigint, o bigint)`

// postgresSame joins those rows with a table.
const postgresSame = `%[1]s.tenant = c.t and %[1]s.consumer = c.c and %[1]s.message_key = c.k`

func (d postgres) sql(query string) string {
	return strings.NewReplacer("@", d.prefix, "{now}", "clock_timestamp()", "{at}", "statement_timestamp()", "{rows}", postgresRows,
		"{same i}", fmt.Sprintf(postgresSame, "i"), "{same p}", fmt.Sprintf(postgresSame, "p"),
		"{none}", "''::bytea", "{loose p}", "(p.lane = '')", "{laned p}", "(p.lane = '') is false", "{find}", "strpos",
		"{ids}", "(select v::text::bigint from json_array_elements($1::text::json) as v)",
		"{leases}", "(select (v->>0)::bigint, (v->>1)::bigint from json_array_elements($1::text::json) as v)",
		"{due}", "(select n, (v->>0)::bigint, v->>1 from json_array_elements($1::text::json) with ordinality as e (v, n))",
		"{for update}", " for update", "{skip locked}", " for update of p skip locked",
		"{greatest}", "greatest", "{token}", "(extract(epoch from clock_timestamp()) * 1000000)::bigint").Replace(query)
}

func (postgres) returned(columns string) string { return columns }

func (postgres) time(n int) string { return fmt.Sprintf(postgresTime, fmt.Sprintf("$%d::bigint", n)) }

func (postgres) until(t string) string {
	return "(extract(epoch from " + t + " - clock_timestamp()) * 1000000)::bigint"
}

func (postgres) after(n int) string {
	return fmt.Sprintf("clock_timestamp() + $%d::bigint * interval '1 microsecond'", n)
}

func (postgres) check(context.Context, querier) error { return nil }

func (postgres) explain(_ context.Context, _ querier, err error) error {
	const undefinedTable = "42P01"
	if sqlState(err) == undefinedTable {
		return fmt.Errorf("%w: %w", inbox.ErrNoSchema, err)
	}
	return err
}

// open begins, sets the bounds and inserts the guard row in one round trip. The
// wait for claims is bounded as a whole by statement_timeout, since lock_timeout
// counts anew for every lock. What was set before is kept for opened in settings
// of our own, local to the transaction like the rest.
func (d postgres) open(ctx context.Context, s *session, o inbox.BeginOptions) error {
	var b strings.Builder
	b.WriteString("begin")
	if d.level != "" {
		b.WriteString(" isolation level " + d.level)
	}
	b.WriteString(`;
		select set_config('ackafter.lock_timeout', current_setting('lock_timeout'), true),
			set_config('ackafter.statement_timeout', current_setting('statement_timeout'), true);` + postgresDurable + bounds(o.LockTimeout))
	if o.IdleTimeout > 0 {
		fmt.Fprintf(&b, "set local idle_in_transaction_session_timeout = %d;", max(o.IdleTimeout.Milliseconds(), 1))
	}
	b.WriteString(d.sql("insert into @inbox_guard (id) values (txid_current())"))
	s.open = true // It may fail half-way.
	return d.explain(ctx, nil, s.exec(ctx, b.String()))
}

// postgresDurable overrules synchronous_commit = off: an acked message must not be
// lost with the server's last moments. All other values wait for the disk at least.
// (The name is in two pieces so that what watches the wire for a COMMIT does not
// find one here.)
const postgresDurable = `select set_config('synchronous_comm' || 'it', 'on', true) where current_setting('synchronous_comm' || 'it') = 'off';
`

// postgresPatient lets no limit of the session's end COMMIT's wait for a standby: it
// would claim success all the same. That it waits at all, even when all messages were
// handled before, is because of the guard row: the transaction has written something.
const postgresPatient = `select set_config('statement_timeout', '0', true) where current_setting('synchronous_standby_names') <> '';
`

// bounds limits the wait for locks. Zero would be no limit.
func bounds(d time.Duration) string {
	ms := max(d.Milliseconds(), 1)
	return fmt.Sprintf("set local lock_timeout = %d; set local statement_timeout = %d;", ms, ms)
}

const postgresUnbound = `set_config('lock_timeout', current_setting('ackafter.lock_timeout'), true),
	set_config('statement_timeout', current_setting('ackafter.statement_timeout'), true)`

func (postgres) opened(ctx context.Context, q querier) error {
	_, err := q.ExecContext(ctx, "select "+postgresUnbound)
	return err
}

func (postgres) patience(ctx context.Context, s *session, left time.Duration) error {
	return s.exec(ctx, bounds(left))
}

// commit removes the guard row and commits in one round trip. When the guard
// row of this transaction is not there, the handler has ended the transaction
// and whatever is open now shall not be committed: the division by zero stops
// it.
func (d postgres) commit(ctx context.Context, s *session) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, err)
	}
	err := s.exec(ctx, d.sql(postgresDurable+postgresPatient+`with g as (delete from @inbox_guard where id = txid_current() returning 1) select 1 / count(*) from g;
		commit`))
	const divisionByZero = "22012"
	switch state := sqlState(err); {
	case err == nil:
		s.open = false
		return nil
	case state == divisionByZero:
		return fmt.Errorf("%w: the guard row is gone: %w: %w", inbox.ErrNotCommitted, inbox.ErrTxEnded, err)
	case state == "" || leavesUnknown(state):
		return fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, err)
	}
	return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, err)
}

// leavesUnknown tells answers to COMMIT that do not say what became of it: a
// backend that is ended while it waits for a standby has committed already.
func leavesUnknown(state string) bool {
	const completionUnknown = "40003"
	return state == completionUnknown || strings.HasPrefix(state, "08") || strings.HasPrefix(state, "57")
}

// claimRow is a claim as a row of postgresRows.
type claimRow struct {
	I int     `json:"i"`
	T string  `json:"t"`
	C string  `json:"c"`
	K string  `json:"k"`
	F *string `json:"f"`
	M string  `json:"m"`
	S string  `json:"s"`
	P any     `json:"p"`
	E any     `json:"e"`
	W string  `json:"w"`
	R string  `json:"r"`
	A int     `json:"a"`
	X any     `json:"x"`
	V *string `json:"v"`
	L string  `json:"l,omitempty"`
	Q int64   `json:"q,omitempty"`
	O int64   `json:"o,omitempty"`
}

// document is the JSON of claims, and of results when there are any.
func document(cs []claim, results [][]byte) (string, error) {
	rows := make([]claimRow, len(cs))
	for i := range cs {
		c := &cs[i]
		rows[i] = claimRow{
			I: i, T: c.Tenant, C: c.Consumer, K: c.key, F: hexOrNull(c.Fingerprint), M: c.MessageID, S: c.Source,
			P: positionOrNull(c.Position), E: microsOrNull(c.EventTime), W: c.Worker, R: c.TraceID, A: c.Attempt,
			X: retention(c.Retention), L: hex.EncodeToString(column.Lane(c.Lane)), Q: c.Parked.ID, O: c.Parked.Token,
		}
		if results != nil {
			rows[i].V = hexOrNull(results[i])
		}
	}
	b, err := json.Marshal(rows)
	return string(b), err
}

func hexOrNull(b []byte) *string {
	if b == nil {
		return nil
	}
	s := hex.EncodeToString(b)
	return &s
}

// run executes a statement on claims.
func (d postgres) run(ctx context.Context, q querier, query string, cs []claim, results [][]byte) error {
	if len(cs) == 0 {
		return nil
	}
	doc, err := document(cs, results)
	if err != nil {
		return err
	}
	_, err = q.ExecContext(ctx, d.sql(query), doc)
	return err
}

// query runs a query on claims; scan is called for each row. more are arguments
// from $2 on.
func (d postgres) query(ctx context.Context, q querier, query string, cs []claim, scan func(rows *sql.Rows) error, more ...any) (err error) {
	if len(cs) == 0 {
		return nil
	}
	doc, err := document(cs, nil)
	if err != nil {
		return err
	}
	return scanAll(ctx, q, d.sql(query), scan, append([]any{doc}, more...)...)
}

// which runs a statement that returns the keys that it changed.
func (d postgres) which(ctx context.Context, q querier, query string, cs []claim) ([]bool, error) {
	changed := make([]bool, len(cs))
	index := make(map[inbox.Key]int, len(cs))
	for i := range cs {
		index[inbox.Key{Tenant: cs[i].Tenant, Consumer: cs[i].Consumer, MessageKey: cs[i].key}] = i
	}
	err := d.query(ctx, q, query, cs, func(rows *sql.Rows) error {
		var k inbox.Key
		if err := rows.Scan(&k.Tenant, &k.Consumer, &k.MessageKey); err != nil {
			return err
		}
		i, ok := index[k]
		if !ok {
			return errors.New("the database changed the text of a key")
		}
		changed[i] = true
		return nil
	})
	return changed, err
}

// postgresTime is a time that was given in microseconds.
const postgresTime = `timestamptz 'epoch' + %s * interval '1 microsecond'`

var postgresEventTime = fmt.Sprintf(postgresTime, "c.e")

func (d postgres) take(ctx context.Context, q querier, cs []claim) ([]bool, error) {
	return d.which(ctx, q, `
		insert into @inbox (tenant, consumer, message_key, fingerprint, message_id, source, position,
			event_time, worker, trace_id, attempts, expires_at)
		select c.t, c.c, c.k, decode(c.f, 'hex'), c.m, c.s, c.p, `+postgresEventTime+`, c.w, c.r, c.a,
			{now} + c.x * interval '1 microsecond'
		from {rows}
		order by c.i
		on conflict do nothing
		returning tenant, consumer, message_key`, cs)
}

// renew locks the rows in order first, as take does.
func (d postgres) renew(ctx context.Context, q querier, cs []claim) ([]bool, error) {
	return d.which(ctx, q, `
		with c as materialized (select * from {rows}),
		l as materialized (
			select i.tenant, i.consumer, i.message_key
			from c join @inbox as i on {same i}
			where `+isExpired+`
			order by c.i
			for update of i)
		update @inbox as i set status = 'done', fingerprint = decode(c.f, 'hex'), message_id = c.m, source = c.s, position = c.p,
			event_time = `+postgresEventTime+`, worker = c.w, trace_id = c.r, attempts = c.a, result = null, result_meta = null,
			processed_at = {now}, expires_at = {now} + c.x * interval '1 microsecond', lease_until = null, token = null
		from c, l
		where {same i} and l.tenant = c.t and l.consumer = c.c and l.message_key = c.k and `+isExpired+`
		returning i.tenant, i.consumer, i.message_key`, cs)
}

func (d postgres) read(ctx context.Context, q querier, cs []claim) ([]*found, error) {
	all := make([]*found, len(cs))
	err := d.query(ctx, q, `select `+recordColumns+`, c.i from {rows} join @inbox as i on {same i}`, cs, func(rows *sql.Rows) error {
		var i int
		f, err := scanRecord(rows.Scan, &i)
		if err != nil {
			return err
		}
		f.record.MessageKey = cs[i].MessageKey
		all[i] = f
		return nil
	})
	return all, err
}

func (d postgres) drop(ctx context.Context, q querier, cs []claim) error {
	return d.run(ctx, q, `delete from @inbox as i using {rows} where {same i}`, cs, nil)
}

func (d postgres) save(ctx context.Context, q querier, cs []claim, results [][]byte) error {
	return d.run(ctx, q, `update @inbox as i set result = decode(c.v, 'hex') from {rows} where {same i}`, cs, results)
}

// SQLSTATEs.
const (
	lockNotAvailable     = "55P03"
	queryCanceled        = "57014"
	serializationFailure = "40001"
	deadlockDetected     = "40P01"
	inFailedTransaction  = "25P02"
	noActiveTransaction  = "25P01"
	noSuchSavepoint      = "3B001"
)

func (postgres) clashed(err error) bool {
	state := sqlState(err)
	return state == serializationFailure || state == deadlockDetected
}

func (postgres) lockTimedOut(err error) bool {
	state := sqlState(err)
	return state == lockNotAvailable || state == queryCanceled
}

func (postgres) classify(err error) inbox.Class {
	switch state := sqlState(err); state {
	case serializationFailure, deadlockDetected, lockNotAvailable:
		return inbox.ClassContention
	case queryCanceled, "":
		return inbox.ClassMessage
	case "25006", // read-only: a standby, or a primary that is one now
		"25P03", // idle in transaction for too long: the connection was ended
		"25P04", // transaction_timeout, likewise
		"3D000", // no such database
		"40003": // statement completion unknown
		return inbox.ClassUnavailable
	default:
		switch state[:min(2, len(state))] {
		case "08", // connection
			"28", // not let in
			"53", // out of resources
			"57", // ended by an operator: shutting down, starting up
			"58": // system error
			return inbox.ClassUnavailable
		}
	}
	return inbox.ClassMessage
}
