package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// Dialect names a kind of database.
type Dialect string

// The dialects.
const (
	// SQLite is SQLite 3.42 or newer; the driver is modernc.org/sqlite.
	SQLite Dialect = "sqlite"
	// PostgreSQL is PostgreSQL 15 or newer; the driver is
	// github.com/jackc/pgx/v5/stdlib.
	PostgreSQL Dialect = "postgres"
)

// dialect is what differs between the databases. Methods that take claims get
// them in the order of their keys, and answer in that order.
type dialect interface {
	// sql fills in a statement: @ before the name of a table, arguments as $1,
	// and words in braces.
	sql(query string) string

	// time is the SQL of a time that argument n has in microseconds, after that of
	// now plus argument n, and until that of the microseconds until t.
	time(n int) string
	after(n int) string
	until(t string) string

	// returned is a list of columns of the table p for RETURNING.
	returned(columns string) string

	// check looks for what is wrong with the database beside its tables.
	check(ctx context.Context, q querier) error

	// explain makes an error of a statement of the store say so when the reason
	// is that the tables are missing.
	explain(ctx context.Context, q querier, err error) error

	// open begins a transaction in a session, with the guard row and with the
	// bounds for the claims. A lock that is not to be had in time is an
	// inbox.ErrInFlight.
	open(ctx context.Context, s *session, o inbox.BeginOptions) error

	// opened lifts the bounds that were for the claims only.
	opened(ctx context.Context, q querier) error

	// patience sets what is left of the lock timeout, for another round.
	patience(ctx context.Context, s *session, left time.Duration) error

	// commit removes the guard row and commits. The error wraps
	// inbox.ErrNotCommitted or inbox.ErrCommitUnknown.
	commit(ctx context.Context, s *session) error

	// take inserts the rows that are not there, and tells which ones it did.
	take(ctx context.Context, q querier, cs []claim) ([]bool, error)

	// renew replaces rows that are past their window, and tells which ones.
	renew(ctx context.Context, q querier, cs []claim) ([]bool, error)

	// read returns the stored rows; nil for those that are not there.
	read(ctx context.Context, q querier, cs []claim) ([]*found, error)

	// leased locks the rows that the claims come from, and tells which leases
	// still hold.
	leased(ctx context.Context, q querier, cs []claim) ([]bool, error)

	// parked returns the parked rows of the claims' keys and fingerprints, and
	// what is parked of their lanes; the zero value for none. It does what opened
	// does in the same round trip. The leases in own hold nothing back that has a
	// lease itself.
	parked(ctx context.Context, q querier, cs []claim, own []int64, o inbox.Order) ([]parkedState, error)

	// drop deletes rows.
	drop(ctx context.Context, q querier, cs []claim) error

	// save stores results with the keys.
	save(ctx context.Context, q querier, cs []claim, results [][]byte) error

	// unpark deletes the parked rows of the claims' keys and fingerprints.
	unpark(ctx context.Context, q querier, cs []claim) error

	// unlease deletes the rows that the claims come from.
	unlease(ctx context.Context, q querier, cs []claim) error

	// clashed tells that a transaction failed only because of another one that
	// ran at the same time.
	clashed(err error) bool

	// lockTimedOut tells that a statement gave up waiting for a lock.
	lockTimedOut(err error) bool

	// classify is Store.Classify for an error that is not marked.
	classify(err error) inbox.Class
}

// found is a stored row, and whether it is past its window.
type found struct {
	record  inbox.Record
	expired bool
}

// parkedState is what the parked table has to say about a claim.
type parkedState struct {
	id    int64 // of the row of its key and fingerprint; 0: there is none
	state inbox.ParkedState

	held    bool // an earlier message of its lane is there
	waiting int  // what waits in the lane, for a claim that is held and has no lease
	bytes   int64
}

// detect finds out the dialect of a pool.
func detect(db *sql.DB) (Dialect, error) {
	t := reflect.TypeOf(db.Driver())
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	for part, d := range map[string]Dialect{"sqlite": SQLite, "/pgx/": PostgreSQL, "lib/pq": PostgreSQL} {
		if strings.Contains(t.PkgPath(), part) {
			return d, nil
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var version string
	err1 := db.QueryRowContext(ctx, `select sqlite_version()`).Scan(&version)
	if err1 == nil {
		return SQLite, nil
	}
	err2 := db.QueryRowContext(ctx, `select current_setting('server_version_num')`).Scan(&version)
	if err2 == nil {
		return PostgreSQL, nil
	}
	return "", fmt.Errorf("inboxsql: driver %T: cannot find out which database this is, set Config.Dialect: %w",
		db.Driver(), errors.Join(err1, err2))
}
