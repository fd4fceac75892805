package pgadvice

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// The versions that are tested.
const (
	oldest = 15
	newest = 18
)

const (
	// short is a limit that the inbox's own statements may reach.
	short = time.Second
	// margin is what a transaction takes beyond its handlers.
	margin = 5 * time.Second
	// clockMargin is how much two clocks may differ.
	clockMargin = 5 * time.Second
	// manyDead is how many dead rows a table may have whatever its size.
	manyDead = 50_000
	// subtransactions is how many savepoints a transaction may have until others
	// that read have to look them up.
	subtransactions = 60
)

// judge tells what the facts mean.
func judge(f *facts, store *Store, r inbox.AdviceRequest, pooler Pooler) []inbox.Finding {
	return slices.Concat(
		aboutServer(f), aboutDurability(f), aboutLimits(f, store, r), aboutConnections(f, store, r, pooler),
		aboutPooler(pooler), aboutTables(f, store), aboutWork(f, store, r),
	)
}

// list collects findings.
type list []inbox.Finding

func (l *list) add(is bool, severity inbox.Severity, code, setting string, value any, meaning, advice string) {
	if is {
		*l = append(*l, inbox.Finding{
			Code: code, Severity: severity, Setting: setting, Value: fmt.Sprint(value), Meaning: meaning, Advice: advice,
		})
	}
}

func aboutServer(f *facts) list {
	var l list
	major := f.Version / 10_000
	l.add(major < oldest, inbox.SeverityError, "server_version", "server_version", major,
		fmt.Sprintf("This PostgreSQL is older than %d, for which the inbox is made and tested.", oldest), "Upgrade the server.")
	l.add(major > newest, inbox.SeverityInfo, "server_version", "server_version", major,
		fmt.Sprintf("This PostgreSQL is newer than %d, the newest that was tested.", newest), "Look for a newer release of ackafter.")
	l.add(f.Recovery, inbox.SeverityError, "standby", "pg_is_in_recovery()", "true",
		"This is a standby: nothing can be claimed.", "Connect to the primary; with several hosts in the URL, target_session_attrs=read-write finds it.")
	l.add(f.ReadOnly == "on", inbox.SeverityError, "read_only", "default_transaction_read_only", f.ReadOnly,
		"Transactions are read-only: nothing can be claimed.", "Turn it off for the role or the database of the service (alter role ... set).")
	l.add(f.Role == "replica", inbox.SeverityWarning, "guard", "session_replication_role", f.Role,
		"Foreign keys are not enforced, so the guard against a handler that commits by itself is off.", "Set it to origin for the service.")
	off := f.clockOff.Abs()
	l.add(off > clockMargin, inbox.SeverityInfo, "clock", "clock_timestamp()", "off by "+f.clockOff.Round(time.Millisecond).String(),
		"The clocks of this process and of the database differ. Windows and due times go by the database's, event times and logs by others.",
		"Synchronise both with NTP.")
	return l
}

func aboutDurability(f *facts) list {
	var l list
	name := "synchronous_comm" + "it"
	l.add(f.Fsync == "off", inbox.SeverityError, "fsync", "fsync", f.Fsync,
		"What was acked can be lost, and the database destroyed, by a crash of the machine.", "Turn it on.")
	l.add(f.FullPageWrites == "off", inbox.SeverityError, "full_page_writes", "full_page_writes", f.FullPageWrites,
		"A crash of the machine can leave half-written pages, in the inbox, too.", "Turn it on, unless the file system writes pages as a whole.")
	l.add(f.Durability == "off", inbox.SeverityInfo, "durability_off", name, f.Durability,
		"The store's own transactions overrule it: what is acked is on the disk. Transactions of yours (Store.Claim) are not: a crash of the server can take their last moments back.",
		"Leave it if you do not use Store.Claim, or set it to on for the service.")
	if f.StandbyNames == "" {
		return l
	}
	l.add(f.Durability == "local", inbox.SeverityWarning, "durability_local", name, f.Durability,
		"There are synchronous standbys, but this service does not wait for them: after a failover, messages that were acked last are not handled.",
		"Set it to on for the service, or be ready to rewind the broker after a failover.")
	l.add(f.Durability == "remote_write", inbox.SeverityWarning, "durability_remote_write", name, f.Durability,
		"A standby has a transaction in memory when it is acked, not on its disk: if primary and standby fail at once, it is lost.",
		"Set it to on for the service.")
	waits := f.Durability != "local"
	l.add(waits && f.SeesStandbys && f.Standbys == 0, inbox.SeverityError, "standby_missing", "synchronous_standby_names", f.StandbyNames,
		"No synchronous standby is connected: every transaction waits at its end, and nothing is acked.",
		"Bring the standby back, or take it out of the setting. Do not cancel what waits: it would be visible without being on a standby.")
	return l
}

func milliseconds(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// shorter tells that a limit ends what may take the time t; t that is not positive
// has no bound.
func shorter(limit, t time.Duration) bool { return limit > 0 && (t <= 0 || limit < t) }

func bound(t time.Duration) string {
	if t <= 0 {
		return "a handler has no bound"
	}
	return fmt.Sprintf("a handler may take %v", t)
}

func aboutLimits(f *facts, store *Store, r inbox.AdviceRequest) list {
	var l list
	takes := r.HandlerTimeout
	idle := milliseconds(f.Idle)
	l.add(shorter(idle, takes) && !store.BoundsIdle && takes <= 0, inbox.SeverityWarning,
		"idle_in_transaction", "idle_in_transaction_session_timeout", idle,
		"A handler that does something else for so long than asking the database loses its transaction, uses no attempt, and comes again.",
		"Set Config.HandlerTimeout: the store then sets a limit of its own.")
	l.add(shorter(idle, takes) && (store.BoundsIdle || takes > 0), inbox.SeverityInfo,
		"idle_in_transaction", "idle_in_transaction_session_timeout", idle,
		"The store's own transactions overrule it. It ends transactions of yours (Store.Claim) that sit idle for so long.", "Nothing, unless you use Store.Claim.")
	whole := takes
	if whole > 0 {
		whole += r.LockTimeout + max(r.BatchTime, 0) + margin
	}
	transaction := milliseconds(f.Transaction)
	l.add(shorter(transaction, whole), inbox.SeverityWarning, "transaction_timeout", "transaction_timeout", transaction,
		"A transaction that takes longer loses its connection; that counts as the database's failure, so its messages use no attempt, receiving pauses, and they come again and again ("+bound(takes)+").",
		"Turn it off for the service, or set it above LockTimeout + BatchTime + HandlerTimeout.")
	for name, limit := range map[string]time.Duration{"statement_timeout": milliseconds(f.Statement), "lock_timeout": milliseconds(f.Lock)} {
		l.add(limit > 0 && limit < short, inbox.SeverityWarning, name, name, limit,
			"It bounds the inbox's own statements at the end of a transaction and between transactions, too: on a busy server they fail for no fault of the message.",
			"Set at least some seconds for the service.")
		l.add(limit >= short && shorter(limit, takes), inbox.SeverityInfo, name, name, limit,
			"A statement of a handler ends there, although "+bound(takes)+": "+map[string]string{
				"statement_timeout": "a failed attempt.", "lock_timeout": "tried again, without an attempt used.",
			}[name],
			"Nothing, if that is what you want.")
	}
	session := milliseconds(f.IdleSession)
	l.add(session > 0 && (store.MaxIdle <= 0 || session < store.MaxIdle), inbox.SeverityInfo,
		"idle_session", "idle_session_timeout", session,
		"The server closes connections that the pool keeps: the next one that uses such a connection may see the database as unavailable for a moment.",
		"Turn it off for the service, or let the pool close idle connections sooner (MaxConnIdleTime, SetConnMaxIdleTime).")
	return l
}

func aboutConnections(f *facts, store *Store, r inbox.AdviceRequest, pooler Pooler) list {
	var l list
	size := store.PoolSize
	for _, limit := range []struct {
		setting string
		n       int
	}{{"max_connections", f.Connections}, {"role's connection limit", f.RoleLimit}, {"database's connection limit", f.DatabaseLimit}} {
		l.add(limit.n >= 0 && size > limit.n && !pooler.Present, inbox.SeverityWarning, "pool_size", limit.setting, limit.n,
			fmt.Sprintf("The pool may open %d connections, the server gives this role %d: beyond, the database counts as unavailable.", size, limit.n),
			"Lower the pool's size; all processes of the service count together.")
	}
	l.add(size > 0 && r.Workers >= size, inbox.SeverityWarning, "workers", "Config.Workers", r.Workers,
		fmt.Sprintf("Workers can hold all %d connections of the pool: a handler that takes a second one waits until its timeout, and parked messages are fed late.", size),
		"Leave at least one connection more than there are workers.")
	return l
}

func aboutPooler(p Pooler) list {
	var l list
	mode := "sent as " + p.Mode
	if p.Mode == "" {
		mode = "mode not known"
	}
	switch {
	case p.Refuses:
		l.add(true, inbox.SeverityError, "pooler_statement", "pooler", "statement mode",
			"The pooler takes no transactions, so nothing can be claimed.", "Use transaction mode (pool_mode), or connect to the server itself.")
	case p.Mixes:
		l.add(true, inbox.SeverityError, "pooler_prepared", "pooler", "transaction mode, statements "+mode,
			"The pooler hands connections on between transactions and loses prepared statements: statements fail at random.",
			"Set the query mode of pgx to exec, cache_describe or simple_protocol, or have the pooler carry prepared statements (max_prepared_statements of PgBouncer, 1.21 or newer).")
	case p.Shares:
		l.add(true, inbox.SeverityInfo, "pooler_transaction", "pooler", "transaction mode, statements "+mode,
			"It works. What a handler leaves in the session (advisory locks, temporary tables, settings) does not last beyond the transaction; the pooler's own time limits cannot be seen from here.",
			"Keep its query_timeout and idle_transaction_timeout above HandlerTimeout.")
	case p.Present:
		l.add(true, inbox.SeverityInfo, "pooler", "pooler", "present",
			"There is a pooler between this process and the server, which did not share connections just now. Its own time limits cannot be seen from here.",
			"Keep its query_timeout and idle_transaction_timeout above HandlerTimeout.")
	}
	return l
}

func aboutTables(f *facts, store *Store) list {
	var l list
	schemas := map[string]bool{}
	for _, t := range f.Tables {
		if t.Schema == "" {
			continue // That is for Store.Check to say.
		}
		schemas[t.Schema] = true
		name := t.Schema + "." + t.Name
		l.add(!t.Usable, inbox.SeverityError, "privileges", name, "lacks usage of the schema",
			"The role cannot use the table.", "grant usage on schema "+t.Schema+" to the service's role.")
		l.add(t.Lacks != "", inbox.SeverityError, "privileges", name, "lacks "+t.Lacks,
			"The role cannot do what a consumer does.", "grant "+t.Lacks+" on "+name+" to the service's role.")
		l.add(!t.Logged, inbox.SeverityError, "unlogged", name, "unlogged",
			"A crash of the server empties the table, and standbys do not have it: its keys and messages are gone then.", "alter table "+name+" set logged.")
		l.add(t.Hides, inbox.SeverityWarning, "row_security", name, "on",
			"Row-level security hides rows from this role: a key that is there and cannot be seen is waited for until LockTimeout, again and again.",
			"Exempt the service's role (bypassrls), or take the policies off the inbox's tables.")
		l.add(!t.Vacuumed, inbox.SeverityWarning, "autovacuum", name, "autovacuum_enabled=false",
			"Nobody removes the table's dead rows: it grows and gets slower.", "alter table "+name+" reset (autovacuum_enabled).")
		l.add(t.Dead > manyDead && t.Dead > t.Live/2, inbox.SeverityInfo, "dead_rows", name, strconv.FormatInt(t.Dead, 10),
			"Many dead rows wait for a vacuum. A transaction that stays open for hours, or a replication slot, may hold it up.",
			"vacuum "+name+"; look for the oldest xact_start in pg_stat_activity.")
		l.add(store.Schema == "" && t.Hidden != "", inbox.SeverityWarning, "search_path", name, "another one in "+t.Hidden,
			"The search path finds this table first and hides another one. With another path, keys that were handled count as new.",
			"Set Config.Schema, or drop the one that is not used.")
	}
	l.add(len(schemas) > 1, inbox.SeverityError, "tables_apart", "search_path", f.SearchPath,
		"The inbox's tables are found in several schemas: "+strings.Join(sorted(schemas), ", ")+".", "Set Config.Schema, and drop the tables that are not used.")
	const checks = 2 // A foreign key has one trigger for inserts and one for updates.
	guarded := slices.ContainsFunc(f.Tables, func(t fact) bool { return t.Name == "inbox_guard" && t.Schema != "" })
	l.add(guarded && f.Guards < checks, inbox.SeverityWarning, "guard", "inbox_guard", "no enforced deferred foreign key",
		"The guard against a handler that commits by itself is off: what it wrote may stay without its key.",
		"Enable the table's triggers, or make the foreign key as the migrations do.")
	l.add(f.Autovacuum == "off", inbox.SeverityWarning, "autovacuum", "autovacuum", f.Autovacuum,
		"Nobody removes dead rows: the tables grow and get slower.", "Turn it on.")
	l.add(f.Autovacuum == "on" && f.TrackCounts == "off", inbox.SeverityWarning, "autovacuum", "track_counts", f.TrackCounts,
		"Autovacuum does not see which tables need it.", "Turn it on.")
	return l
}

func sorted(set map[string]bool) []string {
	var all []string
	for s := range set {
		all = append(all, s)
	}
	slices.Sort(all)
	return all
}

func aboutWork(f *facts, store *Store, r inbox.AdviceRequest) list {
	var l list
	frozen := f.Isolation == "repeatable read" || f.Isolation == "serializable"
	l.add(frozen && !store.Isolated, inbox.SeverityInfo, "isolation", "default_transaction_isolation", f.Isolation,
		"Handlers run at this level. It works, and costs: serialization failures make messages run again, and a claim needs more work.",
		"Set the store's Config.Isolation if that is not wanted for handlers.")
	l.add(r.BatchSize > subtransactions, inbox.SeverityInfo, "batch_size", "Config.BatchSize", r.BatchSize,
		"A transaction with more than 64 savepoints makes every other reader of the server look them up, which is slow.",
		fmt.Sprintf("Keep BatchSize at %d or less, or use a bulk handler.", subtransactions))
	return l
}
