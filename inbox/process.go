package inbox

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ackafter/ackafter/broker"
)

// processTries is how often Process runs one message when only another
// transaction got in its way.
const processTries = 3

// Process handles one message from anywhere: an own loop, a webhook, a test. It
// returns once the work is committed, or not done. It never parks and never
// waits to try again: what to do about an error is the caller's choice.
//
// A nil error means that the message is done: Outcome is FirstAttempt or Replay
// (Conflict too, under ConflictSkip), and Value the stored result. Otherwise
// nothing was committed and the error wraps
//
//   - the handler's error, for a failed attempt (IsPermanent tells whether
//     another one is of use);
//   - keyfunc.ErrInvalid, permanent, for a key that cannot be trusted; the
//     error of Tenant, EventTime or Fingerprint, permanent;
//   - ErrConflict, with Outcome Conflict and First set;
//   - ErrInFlight, with Outcome InFlight: try again later;
//   - ErrTxEnded, when the handler ended the transaction: its effects are
//     unknown;
//   - ErrNoSchema, ErrSchemaVersion or a *KeyDefinitionError;
//   - ctx's error, or the database's when it cannot be reached.
//
// When no answer to COMMIT comes, Process claims again to learn what happened;
// only if that fails as well does the error wrap ErrCommitUnknown. A message
// that was parked before is run; its success removes the parked row.
func (c *Consumer[Tx]) Process(ctx context.Context, m *broker.Message) (Result, error) {
	if m == nil {
		return Result{}, errors.New("inbox: process: message must not be nil")
	}
	if err := c.prepare(ctx); err != nil {
		return Result{}, err
	}
	w := c.newWork(m, nil)
	if w.keyErr != nil {
		return Result{Key: w.claim.Key}, c.notHandled(ctx, w, Permanent(w.keyErr))
	}
	var handlers sync.WaitGroup
	var unknown error // no answer to COMMIT, and none from the claim that would tell
	for try := 1; ; try++ {
		a := &attempt[Tx]{c: c, works: []*work{w}, handlers: &handlers}
		err := a.run(ctx)
		if err == nil {
			break
		}
		if unknown != nil {
			err = errors.Join(unknown, err)
		} else if errors.Is(err, ErrCommitUnknown) {
			unknown = err
		}
		var be *batchError
		again := errors.As(err, &be) && c.again(be)
		switch {
		case be != nil && len(be.culprits) == 1 && w.fate.kind == fateFailed:
			return Result{Key: w.claim.Key}, c.notHandled(ctx, w, c.classify(ctx, w, w.fate.err))
		case ctx.Err() != nil:
			return Result{Key: w.claim.Key}, c.notHandled(ctx, w, errors.Join(context.Cause(ctx), err))
		case be != nil && be.stage == stageBegin && errors.Is(err, ErrInFlight):
			return Result{Key: w.claim.Key, Outcome: InFlight}, c.notHandled(ctx, w, err)
		case !again || try == processTries:
			return Result{Key: w.claim.Key}, c.notHandled(ctx, w, err)
		}
	}
	return c.processed(ctx, w)
}

// again tells whether running a message again at once is expected to help.
func (c *Consumer[Tx]) again(err *batchError) bool {
	return errors.Is(err, ErrCommitUnknown) || (!errors.Is(err, ErrInFlight) && c.store.Classify(err) == ClassContention)
}

func (c *Consumer[Tx]) processed(ctx context.Context, w *work) (Result, error) {
	f := w.fate
	r := Result{Key: w.claim.Key, Outcome: f.outcome, Value: f.value, First: f.first, Skipped: f.skipped}
	switch f.kind {
	case fateDone:
		c.observe(ctx, w)
		if f.outcome == Conflict && c.cfg.OnConflict != ConflictSkip {
			return r, c.notHandled(ctx, w, ErrConflict)
		}
		return r, nil
	case fateFailed:
		return Result{Key: w.claim.Key}, c.notHandled(ctx, w, f.err)
	default:
		// Not run, or interrupted: the caller's context has ended.
		return Result{Key: w.claim.Key}, c.notHandled(ctx, w, errors.Join(errors.New("not handled"), context.Cause(ctx)))
	}
}

// notHandled logs why a message was not handled, and returns it.
func (c *Consumer[Tx]) notHandled(ctx context.Context, w *work, err error) error {
	c.refused(ctx, w, err)
	return fmt.Errorf("inbox: consumer %q: process: %w", c.name, err)
}
