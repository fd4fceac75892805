package inboxsql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// session is one connection out of the user's pool, held for one transaction.
//
// A *sql.Tx cannot be wrapped, but the driver beneath it can: handlers get a
// *sql.Tx of an inner *sql.DB whose connections, of type link, all lead to the
// driver's connection that the session holds. So the session sees every
// statement, and a link can be closed for its handler without the connection
// being harmed.
type session struct {
	raw driver.Conn
	// turn holds a token while nobody uses raw, and everything below that
	// changes. It is a channel so that waiting can end.
	turn chan struct{}
	// cut ends every statement that runs for a handler, and refuses further ones.
	cut     context.CancelFunc
	cutCtx  context.Context
	verdict chan error    // what becomes of the connection: nil is kept
	back    chan struct{} // closed when the pool has it back
	inner   *sql.DB
	own     *sql.Conn // for the store's own statements
	runs    []*run
	before  func(sql string) error // see inbox.BeginOptions; may be nil

	// autoRollback says that the database may end the transaction by itself when
	// a statement fails, and go on without one (SQLite).
	autoRollback bool
	open         bool  // there is a transaction, as far as is known
	lost         error // why the transaction is not there any more
}

// ErrRefused is what a handler gets that tries to begin or end a transaction, by
// a method of its *sql.Tx or by SQL. It wraps inbox.ErrRefused. Nothing was sent
// to the database.
var ErrRefused = fmt.Errorf("inboxsql: %w", inbox.ErrRefused)

var (
	errRunOver  = errors.New("inboxsql: the handler's run is over, its transaction cannot be used any more")
	errRowsOpen = errors.New("the rows of another query are still open: close them first")
)

// borrow takes a connection out of the pool.
func borrow(ctx context.Context, db *sql.DB, autoRollback bool) (*session, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, connectError(ctx, err)
	}
	s := &session{
		turn:         make(chan struct{}, 1),
		verdict:      make(chan error, 1),
		back:         make(chan struct{}),
		autoRollback: autoRollback,
	}
	s.cutCtx, s.cut = context.WithCancel(context.Background())
	handed := make(chan driver.Conn, 1)
	go s.hold(conn, handed)
	select {
	case s.raw = <-handed:
	case <-s.back:
		return nil, &unavailableError{driver.ErrBadConn}
	}
	s.yield()
	s.inner = sql.OpenDB(connector{s})
	s.inner.SetMaxIdleConns(-1)
	if s.own, err = s.inner.Conn(ctx); err != nil {
		s.release(true)
		return nil, fmt.Errorf("get a connection: %w", err)
	}
	return s, nil
}

// connectError is the error of a connection that was not to be had: that is the
// database's fault, unless the caller did not wait.
func connectError(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		err = &unavailableError{err}
	}
	return fmt.Errorf("get a connection: %w", err)
}

// hold keeps the driver's connection for as long as the session lasts: it may
// only be used while Raw runs.
func (s *session) hold(conn *sql.Conn, handed chan<- driver.Conn) {
	defer close(s.back)
	// An error is the verdict itself, or says that the connection was closed
	// before Raw could begin; release and borrow notice both.
	_ = conn.Raw(func(c any) error {
		raw, ok := c.(driver.Conn)
		if !ok {
			return fmt.Errorf("inboxsql: the driver's connection is a %T", c)
		}
		handed <- raw
		return <-s.verdict
	})
	_ = conn.Close() // After a verdict of ErrBadConn it is closed already.
}

// release gives the connection back to the pool, or has it closed when it must
// not be used again. No link may have anything open. The caller does not hold
// the turn.
func (s *session) release(reuse bool) {
	s.cut()
	s.awaitRuns()
	if s.own != nil {
		_ = s.own.Close() // Nothing is behind it but this session.
	}
	_ = s.inner.Close()
	var verdict error
	if !reuse {
		verdict = driver.ErrBadConn
	}
	s.verdict <- verdict
	<-s.back
}

// awaitRuns waits until database/sql has ended the goroutines that it keeps for
// the handlers' transactions. They hold nothing of the connection by now, so
// one that a handler keeps busy (a goroutine that reads Rows for ever) is left
// to itself.
func (s *session) awaitRuns() {
	patience := time.NewTimer(100 * time.Millisecond)
	defer patience.Stop()
	for _, r := range s.runs {
		select {
		case <-r.closed:
		case <-patience.C:
			return
		}
	}
}

// acquire waits for the turn.
func (s *session) acquire(ctx context.Context) error {
	select {
	case <-s.turn:
		return nil
	default:
	}
	select {
	case <-s.turn:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *session) yield() { s.turn <- struct{}{} }

// exec runs a statement of the session's own that has no arguments. Several
// statements in one text are one round trip where the driver can do that.
func (s *session) exec(ctx context.Context, query string) error {
	if err := s.acquire(ctx); err != nil {
		return err
	}
	defer s.yield()
	if s.lost != nil {
		return s.lost
	}
	return s.note(ctx, s.execHeld(ctx, query), false)
}

// execHeld is exec for who holds the turn, and without looking at its error.
func (s *session) execHeld(ctx context.Context, query string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx = s.unhurried(ctx)
	if x, ok := s.raw.(driver.ExecerContext); ok {
		_, err := x.ExecContext(ctx, query, nil)
		if !errors.Is(err, driver.ErrSkip) {
			return err
		}
	}
	st, err := prepare(ctx, s.raw, query)
	if err != nil {
		return err
	}
	_, err = stmtExec(ctx, st, nil)
	return errors.Join(err, st.Close())
}

// unhurried is the context for statements of the store's own that wait for
// nobody: those of the one writer of a file. To be able to interrupt each of them
// would cost more than they do.
func (s *session) unhurried(ctx context.Context) context.Context {
	if s.autoRollback && s.open {
		return context.WithoutCancel(ctx)
	}
	return ctx
}

// note looks at the error of a statement; the caller holds the turn. It returns
// the error, marked when the connection was lost. busy says that rows are being
// read, so that the connection cannot be asked.
func (s *session) note(ctx context.Context, err error, busy bool) error {
	if err == nil || errors.Is(err, driver.ErrSkip) {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	s.probe(ctx, err)
	if err = marked(err); isMarked(err) || contextEnded(err) || hasCode(err) || busy || s.alive(ctx) {
		return err
	}
	return &unavailableError{err}
}

// alive asks the connection after an error that does not say by itself what
// happened to it. An empty statement is answered in any state of a transaction.
func (s *session) alive(ctx context.Context) bool {
	if s.autoRollback {
		return true // It is a file.
	}
	ctx, cancel := context.WithTimeout(ctx, aliveTimeout)
	defer cancel()
	err := s.execHeld(ctx, ";")
	return err == nil || hasCode(err)
}

// aliveTimeout is how long a connection may take to answer an empty statement.
const aliveTimeout = time.Second

// probe finds out whether the database has ended the transaction because of
// cause. SQLite does that for a full disk, an I/O error, an interrupted write,
// and where a conflict clause says so, and would run whatever comes next in
// autocommit mode: effects without a key. BEGIN fails in a transaction, without
// harming it.
func (s *session) probe(ctx context.Context, cause error) {
	if !s.autoRollback || !s.open || s.lost != nil {
		return
	}
	if s.execHeld(ctx, "begin") != nil {
		return
	}
	s.open = false
	s.lost = fmt.Errorf("the database rolled the transaction back: %w", marked(cause))
	if err := s.execHeld(ctx, "rollback"); err != nil {
		s.open = true // Nobody shall use this connection again.
	}
}

// rollback ends the transaction; the caller holds the turn. It tells whether the
// connection can be used again.
func (s *session) rollback(ctx context.Context) (reuse bool) {
	if !s.open {
		return true
	}
	s.open = false
	return s.execHeld(ctx, "rollback") == nil
}

// begin makes a *sql.Tx for one run of a handler.
func (s *session) begin(ctx context.Context, entry int) (*run, error) {
	r := &run{entry: entry, open: map[child]struct{}{}, closed: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.WithValue(context.WithoutCancel(ctx), runKey{}, r))
	tx, err := s.inner.BeginTx(ctx, nil)
	if err != nil {
		cancel()
		return nil, err
	}
	r.tx, r.cancel = tx, cancel
	s.runs = append(s.runs, r)
	return r, nil
}

// retire ends a run: its transaction refuses everything from now on, and what
// it left open is closed. It waits for a statement that still runs.
func (s *session) retire(ctx context.Context, r *run) error {
	if err := s.acquire(ctx); err != nil {
		return err
	}
	s.retireHeld(ctx, r)
	s.yield()
	r.cancel()
	return nil
}

// retireHeld is the part of retire that needs the turn. Rows go first: while
// they are open, some drivers cannot close a statement. An error that shows when
// they are closed is their query's.
func (s *session) retireHeld(ctx context.Context, r *run) {
	r.over = true
	for c := range r.open {
		if rows, ok := c.(*rows); ok {
			delete(r.open, c)
			r.fail(rows.query, s.note(ctx, rows.shut(), len(r.open) > 0))
		}
	}
	for c := range r.open {
		_ = c.shut() // What it was used for has been looked at.
	}
	clear(r.open)
}

// connector makes the connections of a session's inner database.
type connector struct{ s *session }

// runKey is the context key of the run that a connection is for.
type runKey struct{}

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	r, _ := ctx.Value(runKey{}).(*run)
	return &link{s: c.s, run: r}, nil
}

func (c connector) Driver() driver.Driver { return innerDriver{} }

// innerDriver is nobody's to open.
type innerDriver struct{}

func (innerDriver) Open(string) (driver.Conn, error) {
	return nil, errors.New("inboxsql: the transaction's connection cannot be opened again")
}
