package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// batch is one open transaction with claimed keys.
type batch struct {
	store        *Store
	s            *session
	claims       []claim // in the order of their keys
	entries      []inbox.Entry
	ignoreParked bool
	order        inbox.Order

	done    []bool   // by entry: its work is to be kept
	again   []bool   // by entry: its message was parked
	results [][]byte // by entry
	run     *run     // the one that was started; nil between runs
	broken  error    // why nothing can be committed any more
	sealed  bool     // a handler changed settings; see Sealed
	ended   atomic.Bool
}

var (
	_ inbox.Batch[*sql.Tx] = (*batch)(nil)
	_ inbox.Sealer         = (*batch)(nil)
)

// Sealed implements inbox.Sealer. A rollback to the savepoint takes changed
// settings back; a run that was kept leaves them for the next one.
func (b *batch) Sealed() bool { return b.sealed }

func newBatch(store *Store, s *session, cs []claim, o inbox.BeginOptions) *batch {
	return &batch{
		store: store, s: s, claims: cs, ignoreParked: o.IgnoreParked, order: o.Order,
		entries: make([]inbox.Entry, len(cs)),
		done:    make([]bool, len(cs)),
		again:   make([]bool, len(cs)),
		results: make([][]byte, len(cs)),
	}
}

// Entries returns what became of each claim, in the order of the claims. The
// slice must not be changed.
func (b *batch) Entries() []inbox.Entry { return b.entries }

// usable tells why the batch cannot be used.
func (b *batch) usable(i int) error {
	switch {
	case b.ended.Load():
		return errors.New("the batch has ended")
	case b.broken != nil:
		return fmt.Errorf("the batch is unusable: %w", b.broken)
	case i >= len(b.entries):
		return fmt.Errorf("there is no entry %d, the batch has %d", i, len(b.entries))
	}
	return nil
}

// fail makes the batch unusable.
func (b *batch) fail(err error) error {
	b.broken = err
	return err
}

// Start opens a savepoint and returns the transaction for one handler run.
func (b *batch) Start(ctx context.Context, i int) (*sql.Tx, error) {
	tx, err := b.start(ctx, i)
	if err != nil {
		return nil, fmt.Errorf("inboxsql: start: %w", err)
	}
	return tx, nil
}

func (b *batch) start(ctx context.Context, i int) (*sql.Tx, error) {
	if err := b.usable(i); err != nil {
		return nil, err
	}
	switch {
	case b.run != nil:
		return nil, fmt.Errorf("the run of entry %d has not been finished", b.run.entry)
	case i < 0:
		return nil, fmt.Errorf("there is no entry %d", i)
	}
	ctx, cancel := b.store.bound(ctx, 0)
	defer cancel()
	if err := b.s.exec(ctx, "savepoint "+savepoint); err != nil {
		return nil, b.fail(b.store.timedOut(ctx, err))
	}
	r, err := b.s.begin(ctx, i)
	if err != nil {
		return nil, b.fail(err)
	}
	b.run = r
	return r.tx, nil
}

// Finish ends the run that Start began, see inbox.Batch.
func (b *batch) Finish(ctx context.Context, i int, ok bool, result []byte) error {
	if err := b.finish(ctx, i, ok, result); err != nil {
		return fmt.Errorf("inboxsql: finish: %w", err)
	}
	return nil
}

func (b *batch) finish(ctx context.Context, i int, ok bool, result []byte) error {
	if err := b.usable(i); err != nil {
		return err
	}
	if i < 0 {
		return fmt.Errorf("there is no entry %d", i)
	}
	if r := b.run; r != nil && r.entry == i {
		ctx, cancel := b.store.bound(ctx, 0)
		defer cancel()
		if err := b.endRun(ctx, ok); err != nil {
			return b.store.timedOut(ctx, err)
		}
	} else if r != nil {
		return fmt.Errorf("entry %d was not started, the run of entry %d has not been finished", i, r.entry)
	}
	if ok && b.entries[i].Claimed() {
		b.done[i], b.results[i] = true, slices.Clone(result)
		if result != nil && len(result) == 0 {
			b.results[i] = []byte{}
		}
	}
	return nil
}

// endRun keeps or undoes what the handler wrote.
func (b *batch) endRun(ctx context.Context, ok bool) error {
	r := b.run
	b.run = nil
	if err := b.s.retire(ctx, r); err != nil {
		return b.fail(err)
	}
	if b.s.lost != nil {
		// Nothing of it was committed: the session let nothing run after that.
		if b.store.d.classify(b.s.lost) == inbox.ClassMessage && !contextEnded(b.s.lost) {
			return b.fail(fmt.Errorf("%w: %w", inbox.ErrTxEnded, b.s.lost))
		}
		return b.fail(b.s.lost)
	}
	if ok && r.failed == nil {
		err := b.s.exec(ctx, "release savepoint "+savepoint)
		if err == nil {
			b.sealed = b.sealed || r.resets
			return nil
		}
		if sqlState(err) != inFailedTransaction {
			return b.fail(b.savepointGone(err))
		}
		r.failed = &inbox.StatementError{SQL: "(a statement that the handler did not see fail)", Err: err}
	}
	err := b.s.exec(ctx, "rollback to savepoint "+savepoint+"; release savepoint "+savepoint)
	switch {
	case err != nil:
		return b.fail(b.savepointGone(err))
	case ok:
		return fmt.Errorf("%w: %w", inbox.ErrSwallowed, r.failed)
	}
	return nil
}

// savepointGone tells what it means that the run's savepoint could not be ended.
// Only somebody who ended the transaction can have taken it away: whatever came
// after that was committed by itself.
func (b *batch) savepointGone(err error) error {
	const generic = 1
	code, isSQLite := sqliteCode(err)
	switch state := sqlState(err); {
	case isSQLite && code == generic, state == noSuchSavepoint, state == noActiveTransaction:
		return fmt.Errorf("%w: %w", inbox.ErrTxEnded, err)
	}
	return err
}

// Park inserts p into the parked table, see inbox.Batch.
func (b *batch) Park(ctx context.Context, i int, p inbox.Parked) error {
	err := b.usable(i)
	if err == nil && b.run != nil {
		err = fmt.Errorf("the run of entry %d has not been finished", b.run.entry)
	}
	if err == nil {
		ctx, cancel := b.store.bound(ctx, 0)
		defer cancel()
		err = park(ctx, b.s.own, b.store.d, p)
		if err != nil && !errors.Is(err, inbox.ErrNotFound) {
			err = b.fail(b.store.timedOut(ctx, err))
		}
	}
	if err != nil {
		return fmt.Errorf("inboxsql: park: %w", err)
	}
	if i >= 0 {
		b.done[i], b.again[i] = false, true
	}
	return nil
}

// Commit deletes the claims of unfinished entries and commits, see inbox.Batch.
func (b *batch) Commit(ctx context.Context) error {
	if !b.ended.CompareAndSwap(false, true) {
		return fmt.Errorf("inboxsql: commit: the batch has ended before: %w", inbox.ErrNotCommitted)
	}
	ctx, cancel := b.store.bound(ctx, 0)
	defer cancel()
	err := b.commit(ctx)
	if err != nil {
		err = fmt.Errorf("inboxsql: commit: %w", b.store.timedOut(ctx, err))
	}
	b.s.cut()
	<-b.s.turn
	b.tidy(ctx)
	return err
}

func (b *batch) commit(ctx context.Context) error {
	err := b.broken
	if err == nil && b.run != nil {
		err = fmt.Errorf("the run of entry %d has not been finished", b.run.entry)
	}
	if err == nil {
		err = b.settle(ctx)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, err)
	}
	return b.store.d.commit(ctx, b.s)
}

// settle writes what the entries have come to.
func (b *batch) settle(ctx context.Context) error {
	var undone, parked, fed, saved []claim
	var results [][]byte
	for _, c := range b.claims {
		isLeased := c.Parked.ID != 0
		switch e := b.entries[c.entry]; {
		case !e.Claimed():
			if handled := e.Outcome == inbox.Replay || e.Outcome == inbox.Conflict; handled && isLeased && !b.again[c.entry] {
				fed = append(fed, c)
			}
		case !b.done[c.entry]:
			undone = append(undone, c)
		default:
			if isLeased {
				fed = append(fed, c)
			}
			if b.ignoreParked {
				parked = append(parked, c)
			}
			if r := b.results[c.entry]; r != nil {
				saved, results = append(saved, c), append(results, r)
			}
		}
	}
	d, q := b.store.d, b.s.own
	if err := d.drop(ctx, q, undone); err != nil {
		return err
	}
	if err := d.save(ctx, q, saved, results); err != nil {
		return err
	}
	if err := d.unlease(ctx, q, fed); err != nil {
		return err
	}
	return d.unpark(ctx, q, parked)
}

// Abort rolls everything back. It does not wait for a handler that runs: the
// handler's transaction is dead at once, a statement that it is in is
// interrupted, and the connection is freed when that has returned.
func (b *batch) Abort() { b.abort(context.Background()) }

func (b *batch) abort(ctx context.Context) {
	if !b.ended.CompareAndSwap(false, true) {
		return
	}
	b.s.cut()
	if b.run == nil {
		<-b.s.turn // Nobody keeps it for long.
		b.tidy(ctx)
		return
	}
	select {
	case <-b.s.turn:
		b.tidy(ctx)
	default: // The handler is in a statement.
		go func() {
			<-b.s.turn
			b.tidy(ctx)
		}()
	}
}

// tidyTimeout bounds a ROLLBACK on a connection that is to be used again.
const tidyTimeout = 5 * time.Second

// tidy gives the connection back, rolled back if need be; the caller holds the
// turn.
func (b *batch) tidy(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyTimeout)
	defer cancel()
	if r := b.run; r != nil {
		b.s.retireHeld(ctx, r)
		r.cancel()
	}
	reuse := b.s.rollback(ctx)
	b.s.yield()
	b.s.release(reuse)
	b.store.freeWriter()
}
