package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
)

// batch implements inbox.Batch.
type batch struct {
	store  *Store
	pooled *pgxpool.Conn
	conn   *pgx.Conn
	tx     pgx.Tx // for large objects only

	set     *claimSet
	entries []inbox.Entry
	ours    []bool // by index: the row is this transaction's
	kept    []bool // by index: it stays at Commit
	results [][]byte
	guarded bool
	unparks bool // success removes parked rows

	locked   []bool // by index: the parked row that the claim comes from is ours
	reparked []bool // by index: it was parked again

	sp   savepoint
	over bool // the transaction has ended with nothing in it; see begin.duplicates

	replicated bool // COMMIT waits for a standby

	sealed bool                   // a handler changed settings; see Sealed
	before func(sql string) error // see inbox.BeginOptions; may be nil

	mu    sync.Mutex
	phase phase
	run   *run // the one that is going on, or nil
}

// savepoint is the state of runSavepoint on the server.
type savepoint int

const (
	// spNone: there is none.
	spNone savepoint = iota
	// spClean: it is set and nothing was written since.
	spClean
	// spWritten: it is set, with the writes of a run that succeeded after it.
	spWritten
)

// phase says who uses the connection.
type phase int

const (
	idle    phase = iota
	busy          // a method of the batch
	running       // a handler
	ended
)

// errEnded is the answer to any use after Commit or Abort.
var errEnded = errors.New("the batch has ended")

// cancelTimeout bounds the request to the server to give up the statement of a
// handler that was left behind.
const cancelTimeout = time.Second

func newBatch(s *Store, pooled *pgxpool.Conn, g *begin) *batch {
	n, sp := len(g.entries), spClean
	if g.over {
		sp = spNone
	}
	return &batch{
		store: s, pooled: pooled, conn: g.conn, tx: g.tx,
		set: g.set, entries: g.entries, ours: g.ours, kept: make([]bool, n), results: make([][]byte, n),
		guarded: g.guarded && !g.over, unparks: g.o.IgnoreParked, locked: g.locked, reparked: make([]bool, n), sp: sp, over: g.over,
		replicated: g.replicated, before: g.o.BeforeStatement,
	}
}

// enter takes the connection for a method.
func (b *batch) enter(from phase) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.phase == ended:
		return errEnded
	case b.phase != from && from == running:
		return errors.New("no run was started")
	case b.phase != from:
		return errors.New("the run before has not been finished")
	}
	b.phase = busy
	return nil
}

// leave gives the connection up, to the run if there is one. An Abort that came
// meanwhile has ended the batch.
func (b *batch) leave(to phase, run *run) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.phase == busy {
		b.phase, b.run = to, run
	}
}

// end marks the batch as ended and reports whether it was not before: then the
// caller has the connection to give back.
func (b *batch) end() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.phase
	b.phase = ended
	return was != ended
}

// Entries implements inbox.Batch.
func (b *batch) Entries() []inbox.Entry { return b.entries }

// index checks that i is an entry that a handler can run for.
func (b *batch) index(i int) error {
	switch {
	case i < 0 || i >= len(b.entries):
		return fmt.Errorf("entry %d: there are %d", i, len(b.entries))
	case !b.entries[i].Claimed():
		return fmt.Errorf("entry %d: its outcome is %q, it is not claimed", i, b.entries[i].Outcome)
	}
	return nil
}

// Start implements inbox.Batch.
func (b *batch) Start(ctx context.Context, i int) (pgx.Tx, error) {
	tx, err := b.start(ctx, i)
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: start: %w", err)
	}
	return tx, nil
}

func (b *batch) start(ctx context.Context, i int) (pgx.Tx, error) {
	if err := b.index(i); err != nil {
		return nil, err
	}
	if err := b.enter(idle); err != nil {
		return nil, err
	}
	run := newRun(ctx, b, i)
	switch b.sp {
	case spNone:
		run.prelude = []string{sqlSavepoint}
	case spWritten:
		run.prelude = []string{sqlRelease, sqlSavepoint}
	}
	b.leave(running, run)
	return run, nil
}

// control sends statements of ours that take no parameters.
func (b *batch) control(ctx context.Context, sql string) error {
	_, err := b.conn.PgConn().Exec(ctx, sql).ReadAll()
	return marked(b.conn, err)
}

// savepointError says what it means that our savepoint is not there: this is
// another transaction.
func savepointError(err error) error {
	if state(err) == stateNoSavepoint {
		return fmt.Errorf("%w: %w", inbox.ErrTxEnded, err)
	}
	return err
}

// Finish implements inbox.Batch.
func (b *batch) Finish(ctx context.Context, i int, ok bool, result []byte) error {
	if err := b.finish(ctx, i, ok, result); err != nil {
		return fmt.Errorf("inboxpgx: finish: %w", err)
	}
	return nil
}

func (b *batch) finish(ctx context.Context, i int, ok bool, result []byte) error {
	if err := b.index(i); err != nil {
		return err
	}
	b.mu.Lock()
	run := b.run
	b.mu.Unlock()
	if run == nil || run.index != i {
		// Not started: part of a bulk run, or a message that was given up.
		if err := b.enter(idle); err != nil {
			return err
		}
		defer b.leave(idle, nil)
		b.keep(i, ok, result)
		return nil
	}
	if err := b.enter(running); err != nil {
		return err
	}
	if err := run.close(); err != nil {
		// A goroutine of the handler is on the connection: Abort has to cut it.
		b.leave(running, run)
		return err
	}
	defer b.leave(idle, nil)
	if err := b.endRun(ctx, run, ok); err != nil {
		b.keep(i, false, nil)
		return err
	}
	if ok && (run.resets.Load() || run.exposed.Load()) {
		b.sealed = true
	}
	b.keep(i, ok, result)
	return nil
}

// Sealed implements inbox.Sealer. A rollback to the savepoint takes changed
// settings back; a run that was kept leaves them for the next one.
func (b *batch) Sealed() bool { return b.sealed }

func (b *batch) keep(i int, ok bool, result []byte) {
	b.kept[i], b.results[i] = ok, nil
	if ok {
		b.results[i] = result
	}
}

// endRun keeps or undoes the writes of a closed run.
func (b *batch) endRun(ctx context.Context, run *run, ok bool) error {
	pg := b.conn.PgConn()
	switch {
	case run.broken != nil:
		return run.broken
	case b.conn.IsClosed():
		return &lostError{errors.New("the connection was lost under the handler")}
	case pg.IsBusy():
		return errors.New("the handler left a query open on the connection itself")
	case pg.TxStatus() == 'I':
		return inbox.ErrTxEnded
	}
	aborted := pg.TxStatus() == 'E'
	failure := run.failure(aborted)
	switch {
	case len(run.prelude) > 0 && aborted:
		return errors.New("a statement failed before the savepoint of the run")
	case len(run.prelude) > 0, !run.touched():
		// Nothing of the run reached the server. If there is a savepoint, it is
		// the one before: going back to it would take another run's work along.
	case !ok || failure != nil:
		if err := b.control(ctx, sqlRollbackTo); err != nil {
			return savepointError(err)
		}
	case run.exposed.Load():
		// The handler had the connection itself. That our savepoint is there
		// proves that this is still our transaction.
		if err := b.control(ctx, sqlRelease); err != nil {
			return savepointError(err)
		}
		b.sp = spNone
	default:
		b.sp = spWritten
	}
	if ok && failure != nil {
		return fmt.Errorf("%w: %w", inbox.ErrSwallowed, failure)
	}
	return nil
}

// Abort implements inbox.Batch.
func (b *batch) Abort() {
	b.mu.Lock()
	was := b.phase
	b.phase = ended
	run := b.run
	b.mu.Unlock()
	switch was {
	case ended:
	case idle:
		giveBack(context.Background(), b.pooled)
	default:
		if run != nil {
			run.dead.Store(true)
		}
		b.cut()
	}
}

// cut breaks the connection while somebody else uses it. The pool gets its slot
// back at once; the connection itself is only touched where that is safe beside
// its user. The server is asked to give up the statement that may be going on:
// it would notice the broken connection only after it.
func (b *batch) cut() {
	pg := b.pooled.Hijack().PgConn()
	socket := pg.Conn()
	if t, ok := socket.(interface{ NetConn() net.Conn }); ok {
		socket = t.NetConn() // Closing TLS could wait for the handler's write.
	}
	_ = socket.Close()
	ctx, cancel := context.WithTimeout(context.Background(), cancelTimeout)
	defer cancel()
	_ = pg.CancelRequest(ctx)
}
