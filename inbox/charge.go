package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ackafter/ackafter/inbox/internal/backoff"
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

// charge counts a failed attempt, and parks the message when the next one does not
// come soon.
func (a *attempt[Tx]) charge(ctx context.Context, w *work, err error) error {
	err = a.c.classify(ctx, w, err)
	v, _ := a.c.verdictOf(w, w.failed+1, err)
	if v != nil && v.reason == ReasonAttempts && a.event.Claimed > 1 && len(a.works) > 1 && a.park {
		// The last attempt is not spent behind another message's run: what that
		// left in the transaction (a temporary table, a cursor) may be the cause.
		w.alone = true
		return nil
	}
	if v != nil && a.park {
		// The verdict stands even if this transaction is not committed.
		w.failed++
		w.verdict = v
		return a.parkNow(ctx, w, a.index[w], v)
	}
	w.fate = fate{kind: fateFailed, err: err, ran: true}
	return nil
}

// classify asks Retry.Classify about a failed attempt.
func (c *Consumer[Tx]) classify(ctx context.Context, w *work, err error) error {
	var after *retryAfterError
	if c.cfg.Retry.Classify == nil || IsPermanent(err) || errors.As(err, &after) {
		return err
	}
	var other error
	if p := protect(func() error { other = c.cfg.Retry.Classify(err); return nil }); p != nil {
		c.cfg.Logger.LogAttrs(ctx, slog.LevelError, "inbox: Retry.Classify failed", append(c.attrs(w), errorAttrs(p)...)...)
		return err
	}
	if _, skip := skipReason(other); other == nil || skip {
		return err
	}
	return other
}

// verdictOf tells what becomes of a message after so many failures. Nil: it waits for
// delay in its lane.
func (c *Consumer[Tx]) verdictOf(w *work, failed int, err error) (v *verdict, delay time.Duration) {
	switch {
	case IsPermanent(err):
		return dead(ReasonPermanent, err), 0
	case c.cfg.Retry.MaxAttempts > 0 && failed >= c.cfg.Retry.MaxAttempts:
		return dead(ReasonAttempts, err), 0
	}
	longest := backoff.Step(failed, c.cfg.Retry.Backoff, c.cfg.Retry.MaxBackoff)
	delay = backoff.Jitter(longest)
	var after *retryAfterError
	if errors.As(err, &after) {
		longest, delay = after.after, after.after
	}
	hold := c.cfg.Parking.Hold
	if w.fed() || (c.parker != nil && hold >= 0 && longest > hold) {
		return &verdict{state: ParkedRetry, reason: ReasonFailed, err: err, after: delay}, delay
	}
	return nil, delay
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

// parkNow parks w in the open transaction; i is its claim or -1. What comes behind it
// in its lane does not run in this transaction when v holds it.
func (a *attempt[Tx]) parkNow(ctx context.Context, w *work, i int, v *verdict) error {
	pctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	switch err := a.batch.Park(pctx, i, w.parked(v)); {
	case err == nil:
	case w.fed() && errors.Is(err, ErrNotFound):
		w.fate = fate{kind: fateLost}
		a.hold(w)
		return nil
	default:
		return &batchError{stage: stageHandler, err: fmt.Errorf("park: %w", err)}
	}
	w.fate = fate{kind: fateDone, outcome: Dead, reason: v.reason, err: v.err, after: v.after}
	order := a.c.order()
	switch v.state {
	case ParkedDead:
		if order.BlockedByDead {
			a.hold(w)
		}
	case ParkedRetry:
		w.fate.outcome = WasParked
		if order.Keep {
			a.hold(w)
		}
	default:
		w.fate.outcome = WasParked
	}
	return nil
}
