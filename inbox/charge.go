package inbox

import (
	"context"
	"errors"
	"fmt"
)

// infrastructure tells that a handler's error is the database's trouble. An error
// of the network is not enough: it may be that of another server which the
// handler called; if it is the database's, the transaction is gone and Finish
// says so.
func (c *Consumer[Tx]) infrastructure(err error) bool {
	if IsPermanent(err) {
		return false
	}
	switch c.store.Classify(err) {
	case ClassContention:
		return true
	case ClassUnavailable:
		var postgres interface{ SQLState() string }
		var sqlite interface{ Code() int }
		return errors.As(err, &postgres) || errors.As(err, &sqlite)
	}
	return false
}

// failed decides about a run that failed while the batch stays usable.
func (a *attempt[Tx]) failed(ctx context.Context, group []*work, ran call) error {
	for _, w := range group {
		a.hold(w)
	}
	switch {
	case ran.cause != nil && !errors.Is(ran.cause, ErrHandlerTimeout):
		// Shutdown or a lost delivery: not a failure.
		for _, w := range group {
			if w.lost() {
				w.fate = fate{kind: fateLost}
			}
		}
		return nil
	case len(group) > 1:
		return &batchError{stage: stageHandler, err: ran.err}
	}
	return a.charge(ctx, group[0], withCause(ran))
}

// withCause makes a handler's context error say why its context ended.
func withCause(ran call) error {
	if ran.cause != nil && !errors.Is(ran.err, ran.cause) {
		return fmt.Errorf("%w: %w", ran.cause, ran.err)
	}
	return ran.err
}

// charge counts a failed attempt, and parks the message after the last one.
func (a *attempt[Tx]) charge(ctx context.Context, w *work, err error) error {
	d := a.c.doomOf(w.failed+1, err)
	if d != nil && d.reason == ReasonAttempts && a.event.Claimed > 1 && len(a.works) > 1 && a.park {
		// The last attempt is not spent behind another message's run: what that
		// left in the transaction (a temporary table, a cursor) may be the cause.
		w.alone = true
		return nil
	}
	if d != nil && a.park {
		// The verdict stands even if this transaction is not committed.
		w.failed++
		w.doomed = d
		return a.parkNow(ctx, w, a.index[w], d)
	}
	w.fate = fate{kind: fateFailed, err: err, ran: true}
	return nil
}

// doomOf tells whether a message has failed for good.
func (c *Consumer[Tx]) doomOf(failed int, err error) *doom {
	switch {
	case IsPermanent(err):
		return &doom{ReasonPermanent, err}
	case c.cfg.Retry.MaxAttempts > 0 && failed >= c.cfg.Retry.MaxAttempts:
		return &doom{ReasonAttempts, err}
	}
	return nil
}

// broken decides about a run after which the batch is unusable.
func (a *attempt[Tx]) broken(group []*work, ran call, err error) error {
	be := &batchError{stage: stageHandler, err: err}
	if errors.Is(err, ErrTxEnded) {
		// What any of the group wrote may be there.
		for _, w := range group {
			w.fate = fate{kind: fateFailed, ran: true, err: err, reason: ReasonEffectsUnknown}
		}
		be.culprits = group
		return be
	}
	if len(group) != 1 {
		return be
	}
	w := group[0]
	interrupted := ran.cause != nil && !errors.Is(ran.cause, ErrHandlerTimeout)
	switch {
	case interrupted:
		if w.lost() {
			w.fate = fate{kind: fateLost}
			be.culprits = group
		}
	case ran.cause != nil, endedOwnContext(ran.err),
		a.c.store.Classify(err) == ClassMessage && !endedOwnContext(err):
		// Its own timeout, or a context of its own, took the connection along; or
		// the store says what it did to the connection.
		w.fate = fate{kind: fateFailed, ran: true, err: withCause(ran)}
		be.culprits = group
	}
	return be
}

// endedOwnContext tells that a handler failed because a context ended that was
// not the loop's.
func endedOwnContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// parkNow makes w a dead letter in the open transaction; i is its claim or -1.
func (a *attempt[Tx]) parkNow(ctx context.Context, w *work, i int, d *doom) error {
	pctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if err := a.batch.Park(pctx, i, w.parked(d.reason, d.err)); err != nil {
		return &batchError{stage: stageHandler, err: fmt.Errorf("park: %w", err)}
	}
	w.fate = fate{kind: fateDone, outcome: Dead, reason: d.reason, err: d.err}
	return nil
}
