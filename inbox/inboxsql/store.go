package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
	"github.com/ackafter/ackafter/migrations"
)

// Store is an inbox.Store on a *sql.DB. It also is an inbox.PoolSizer, an
// inbox.Inspector, an inbox.Parker and an inbox.Undertaker. All methods may be called concurrently. It holds nothing that
// has to be closed; the *sql.DB is the caller's to close, after the consumers
// have stopped.
type Store struct {
	db        *sql.DB
	d         dialect
	isolation sql.IsolationLevel
	timeout   time.Duration
	// writer holds a token while no batch of this store is open, for databases
	// with one writer; else it is nil.
	writer chan struct{}
	turns  turns
}

var (
	_ inbox.Store[*sql.Tx] = (*Store)(nil)
	_ inbox.PoolSizer      = (*Store)(nil)
	_ inbox.Inspector      = (*Store)(nil)
	_ inbox.Parker         = (*Store)(nil)
	_ inbox.Undertaker     = (*Store)(nil)
)

// Config configures a Store. A nil *Config means all defaults. It is copied by
// NewWithConfig.
type Config struct {
	// Dialect is the database's. Default: found out from the driver's type, or,
	// for a driver that is not known, by asking the database (once, within 10 s).
	Dialect Dialect

	// Schema is where the tables are, for PostgreSQL. Default: wherever
	// search_path finds them. SQLite has no schemas: there it is an error.
	Schema string

	// Isolation is the isolation level of the transactions that handlers run in.
	// Default: the database's. PostgreSQL knows sql.LevelReadCommitted,
	// sql.LevelRepeatableRead (or sql.LevelSnapshot) and sql.LevelSerializable;
	// SQLite is always serializable. Others are an error.
	Isolation sql.IsolationLevel

	// Timeout bounds what the store itself does with the database: each method
	// as a whole, beyond LockTimeout, where the caller's context does not end
	// earlier. It bounds neither the statements of handlers nor Claim and
	// SaveResult, which work in the caller's transaction. When it ends, the
	// database counts as unavailable. Default 30 s. Negative: no bound.
	Timeout time.Duration
}

const defaultTimeout = 30 * time.Second

// New returns a Store on db with all defaults. Everything about it is as for
// NewWithConfig.
func New(db *sql.DB) (*Store, error) { return NewWithConfig(db, nil) }

// NewWithConfig returns a Store on db, which stays the caller's and may be used
// for anything else. A nil cfg means all defaults.
//
// It returns an error that names the argument or field and the rule for a nil
// db, an unknown dialect, a schema with SQLite, and an isolation level that the
// database does not have. It does not look at the tables: Check does.
func NewWithConfig(db *sql.DB, cfg *Config) (*Store, error) {
	if db == nil {
		return nil, errors.New("inboxsql: db: must not be nil")
	}
	var c Config
	if cfg != nil {
		c = *cfg
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.Dialect == "" {
		var err error
		if c.Dialect, err = detect(db); err != nil {
			return nil, err
		}
	}
	s := &Store{db: db, isolation: c.Isolation, timeout: max(c.Timeout, 0)}
	switch c.Dialect {
	case SQLite:
		if c.Schema != "" {
			return nil, configError("Schema", c.Schema, "SQLite has no schemas")
		}
		if c.Isolation != sql.LevelDefault && c.Isolation != sql.LevelSerializable {
			return nil, configError("Isolation", c.Isolation, "SQLite is always serializable")
		}
		s.d = sqlite{}
		s.writer = make(chan struct{}, 1)
		s.writer <- struct{}{}
	case PostgreSQL:
		if bad := !storable(c.Schema); bad || c.Schema != "" && strings.TrimSpace(c.Schema) == "" {
			return nil, configError("Schema", fmt.Sprintf("%q", c.Schema), "must be the name of a schema: UTF-8 without NUL, not blank")
		}
		level, ok := postgresLevels[c.Isolation]
		if !ok {
			return nil, configError("Isolation", c.Isolation,
				"must be the default, Read Committed, Repeatable Read, Snapshot or Serializable")
		}
		s.d = postgres{schema: c.Schema, prefix: schemaPrefix(c.Schema), level: level}
	default:
		return nil, configError("Dialect", fmt.Sprintf("%q", c.Dialect), "must be SQLite or PostgreSQL")
	}
	return s, nil
}

func configError(field string, value any, rule string) error {
	return fmt.Errorf("inboxsql: config: %s = %v: %s", field, value, rule)
}

// PoolSize returns how many batches can be open at once: what db.SetMaxOpenConns
// was given. Without such a limit it is 0 (no bound) for PostgreSQL and 1 for
// SQLite, which has one writer: a consumer with defaults then has one worker,
// and more would only queue for the writer. Give the *sql.DB a limit to have
// them anyway. A limit of 1 leaves no connection for anything else: a handler
// that uses the *sql.DB beside its transaction would wait for itself.
func (s *Store) PoolSize() int {
	n := s.db.Stats().MaxOpenConnections
	if n == 0 && s.writer != nil {
		return 1
	}
	return n
}

// Check tells whether the store can be used: the tables are there
// (inbox.ErrNoSchema) and of the right version (inbox.ErrSchemaVersion), and
// SQLite has the settings that durability and the guard need. The error says
// what to do.
func (s *Store) Check(ctx context.Context) error {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	if err := s.check(ctx); err != nil {
		return fmt.Errorf("inboxsql: check: %w", s.failed(ctx, err))
	}
	return nil
}

func (s *Store) check(ctx context.Context) (err error) {
	conn, err := s.db.Conn(ctx) // Settings are one connection's.
	if err != nil {
		return connectError(ctx, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := s.d.check(ctx, conn); err != nil {
		return err
	}
	var have int
	if err := conn.QueryRowContext(ctx, s.d.sql(`select version from @inbox_schema`)).Scan(&have); err != nil {
		if errors.Is(err, sql.ErrNoRows) {
			return inbox.ErrNoSchema
		}
		return err
	}
	if have != migrations.Version {
		return &inbox.SchemaVersionError{Have: have, Need: migrations.Version}
	}
	return nil
}

// Register records that a consumer is running, see inbox.Store.
func (s *Store) Register(ctx context.Context, r inbox.Registration) error {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	stored, err := s.register(ctx, r)
	if err != nil {
		return fmt.Errorf("inboxsql: register consumer %q: %w", r.Consumer, s.failed(ctx, err))
	}
	if stored != r.KeyDefinition {
		return &inbox.KeyDefinitionError{Consumer: r.Consumer, Stored: stored, Now: r.KeyDefinition}
	}
	return nil
}

// register returns the definition that is stored afterwards.
func (s *Store) register(ctx context.Context, r inbox.Registration) (stored string, err error) {
	err = s.db.QueryRowContext(ctx, s.d.sql(`
		insert into @inbox_consumers as i (consumer, key_definition, retention_us, first_seen_at, last_seen_at)
		values ($1, $2, $3, {now}, {now})
		on conflict (consumer) do update
		set key_definition = excluded.key_definition, retention_us = excluded.retention_us, last_seen_at = excluded.last_seen_at
		where i.key_definition = excluded.key_definition or i.key_definition = $4
		returning key_definition`),
		r.Consumer, r.KeyDefinition, retention(r.Retention), nullIfEmpty(r.Replaces)).Scan(&stored)
	if !errors.Is(err, sql.ErrNoRows) {
		return stored, err
	}
	err = s.db.QueryRowContext(ctx, s.d.sql(`select key_definition from @inbox_consumers where consumer = $1`), r.Consumer).Scan(&stored)
	return stored, err
}

// retention in microseconds; nil is for ever.
func retention(d time.Duration) any {
	if d <= 0 {
		return nil
	}
	return d.Microseconds()
}

func nullIfEmpty(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// bound gives ctx the store's own timeout, plus what may be waited for a lock.
func (s *Store) bound(ctx context.Context, lock time.Duration) (context.Context, context.CancelFunc) {
	if s.timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, lock+s.timeout, errTimeout)
}

var errTimeout = &unavailableError{errors.New("the database did not answer within Config.Timeout")}

// failed completes the error of a statement on the pool: marked when the
// connection was lost, with what to do when the tables are missing, and with the
// store's own timeout when that was it.
func (s *Store) failed(ctx context.Context, err error) error {
	return s.timedOut(ctx, s.d.explain(ctx, s.db, marked(err)))
}

// timedOut says so in err when it came from the store's own timeout.
func (s *Store) timedOut(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil && errors.Is(context.Cause(ctx), errTimeout) {
		return fmt.Errorf("%w: %w", errTimeout, err)
	}
	return err
}

// querier is what statements run on: a transaction, a connection or the pool.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// claim is a claim as it is stored.
type claim struct {
	inbox.Claim
	key   string // the stored form of the message key
	entry int    // its place among the claims of its batch
}

// storedKey is the key as it is stored. That of a message that comes from the
// parked table may have been read from there.
func storedKey(c inbox.Claim) string {
	if c.Parked.ID != 0 {
		return column.Stored(c.MessageKey)
	}
	return column.Key(c.MessageKey)
}

// maxText is how much is stored of texts that are for people: ids, names of
// sources and workers.
const maxText = 1024

// sortedClaims returns the claims in the order of their stored keys, byte by
// byte: every store takes claims in this order, so that two batches cannot wait
// for each other.
func sortedClaims(cs []inbox.Claim) ([]claim, error) {
	sorted := make([]claim, len(cs))
	for i, c := range cs {
		if err := validKey(c.Key); err != nil {
			return nil, fmt.Errorf("claim %d: %w", i, err)
		}
		c.MessageID = column.Text(c.MessageID, maxText)
		c.Source = column.Text(c.Source, maxText)
		c.Worker = column.Text(c.Worker, maxText)
		c.TraceID = column.Text(c.TraceID, maxText)
		c.Attempt = min(c.Attempt, math.MaxInt32)
		sorted[i] = claim{Claim: c, key: storedKey(c), entry: i}
	}
	slices.SortFunc(sorted, compareKeys)
	for i := 1; i < len(sorted); i++ {
		if compareKeys(sorted[i-1], sorted[i]) == 0 {
			if sorted[i-1].Parked.ID != 0 || sorted[i].Parked.ID != 0 {
				// A parked message and its duplicate, with the two forms of a long key.
				return nil, fmt.Errorf("%w: claims %d and %d are of one message", inbox.ErrInFlight, sorted[i-1].entry, sorted[i].entry)
			}
			return nil, fmt.Errorf("claims %d and %d have the same key", sorted[i-1].entry, sorted[i].entry)
		}
	}
	return sorted, nil
}

// validKey refuses texts that a database would refuse, or, worse, change.
func validKey(k inbox.Key) error {
	for i, v := range []string{k.Tenant, k.Consumer, k.MessageKey} {
		if !storable(v) {
			return fmt.Errorf("%s: must be valid UTF-8 without NUL", []string{"tenant", "consumer", "message key"}[i])
		}
	}
	return nil
}

// storable tells that every database takes a text, and as it is.
func storable(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

func compareKeys(a, b claim) int {
	if c := strings.Compare(a.Tenant, b.Tenant); c != 0 {
		return c
	}
	if c := strings.Compare(a.Consumer, b.Consumer); c != 0 {
		return c
	}
	return strings.Compare(a.key, b.key)
}
