package inbox

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/ackafter/ackafter/inbox/internal/backoff"
)

// How often in a row, while it runs alone, a message may fail like infrastructure
// on a database that takes its claims, before it counts as its own failure: fewer
// times when others succeed in between, more when nobody does.
const (
	aloneLimit  = 5
	lonelyLimit = 20
	lonelyTime  = 10 * time.Minute
)

// unusable tells that the database could not even be asked.
func (r *runner[Tx]) unusable(err *batchError) bool {
	return err.stage == stageBegin && (err.down || r.c.store.Classify(err) == ClassUnavailable)
}

// unanswered tells that the database answers nobody at the moment. It is asked when
// a handler that ran out of time, or whose own context ended, took its connection
// along: that may have been the wait for a database that hangs, which is not the
// message's fault.
func (r *runner[Tx]) unanswered(err *batchError) bool {
	outOfTime := func(w *work) bool { return errors.Is(w.fate.err, ErrHandlerTimeout) || endedOwnContext(w.fate.err) }
	if !slices.ContainsFunc(err.culprits, outOfTime) {
		return false
	}
	return !r.answers()
}

// answers asks the database for a sign of life.
func (r *runner[Tx]) answers() bool {
	ctx, cancel := context.WithTimeout(r.hard, probeTimeout)
	defer cancel()
	probe := r.c.store.Check(ctx)
	return probe == nil || (ctx.Err() == nil && r.c.store.Classify(probe) != ClassUnavailable)
}

// single decides about an item whose transaction failed while it ran alone.
func (r *runner[Tx]) single(it *item, err *batchError) {
	w := it.Value
	it.Keep, it.Alone = true, true
	switch {
	case w.lost() && !w.effectsUnknown():
		it.Keep = false
	case r.hard.Err() != nil:
	case r.unusable(err), r.unanswered(err):
		r.gate.trip(err)
	case slices.Contains(err.culprits, w) && w.fate.kind == fateFailed:
		r.condemn(it, w.fate)
	case err.stage == stageBegin && (errors.Is(err, ErrInFlight) || r.c.store.Classify(err) == ClassContention):
		// The key is held elsewhere: not its fault, however long it takes.
		w.waits++
		it.Delay = backoff.Delay(w.waits, max(r.c.cfg.Retry.Backoff, gateBackoff), r.c.longestWait())
		r.c.onRetry(r.hard, w, false, it.Delay, err)
	case w.verdict != nil:
		// It could not be parked. The verdict stands.
		w.suspect.alone++
		it.Delay = backoff.Delay(w.suspect.alone, gateBackoff, r.c.longestWait())
		r.c.onRetry(r.hard, w, false, it.Delay, err)
	case err.stage == stageCommit && !errors.Is(err, ErrCommitUnknown) && r.c.store.Classify(err) == ClassMessage:
		// A deferred constraint: the handler's own failure.
		r.failed(it, fate{kind: fateFailed, ran: true, err: r.c.classify(r.hard, w, err)})
	default:
		r.suspect(it, err)
	}
}

// suspect decides about a failure that may be the message's or the database's: the
// claim succeeded and what came after did not, or the database answered the claim
// with a refusal.
func (r *runner[Tx]) suspect(it *item, err *batchError) {
	w, s := it.Value, &it.Value.suspect
	successes := r.successes.Load()
	r.suspects.Store(w, true)
	others := s.alone == 0 || successes != s.successes || r.c.store.Classify(err) == ClassContention ||
		(err.stage != stageBegin && r.onlySuspect(w) && !exhausted(err))
	s.successes = successes
	switch {
	case s.alone >= aloneLimit:
		// Judged before.
	case others:
		s.alone++
	default:
		// Nobody has succeeded since, and others fail alike: it may well be the
		// database.
		if s.lonely == 0 {
			s.since = time.Now()
		}
		if s.lonely++; s.lonely < lonelyLimit || time.Since(s.since) < lonelyTime {
			r.gate.trip(err)
			return
		}
		s.alone = aloneLimit
	}
	if s.alone < aloneLimit {
		it.Delay = backoff.Delay(s.alone, gateBackoff, gateMaxBackoff)
		r.c.onRetry(r.hard, w, false, it.Delay, err)
		return
	}
	if err.stage == stageBegin {
		// The database refuses the claim itself: there is no key to park it under.
		it.Delay = gateMaxBackoff
		w.keyErr = err
		return
	}
	r.failed(it, fate{kind: fateFailed, ran: true, err: err})
}

// onlySuspect tells that no other message has failed like infrastructure since the
// last success. That the claims succeed is then the probe that speaks against the
// message.
func (r *runner[Tx]) onlySuspect(w *work) bool {
	only := true
	r.suspects.Range(func(other, _ any) bool {
		if other.(*work).lost() {
			r.suspects.Delete(other)
		} else if other != any(w) {
			only = false
		}
		return only
	})
	return only
}

// exhausted tells that the database itself says that it has no more disk, memory
// or connections: that is nobody's fault, however often one message meets it.
func exhausted(err error) bool {
	var postgres interface{ SQLState() string }
	if errors.As(err, &postgres) {
		switch postgres.SQLState() {
		case "53000", "53100", "53200", "53300":
			return true
		}
	}
	var sqlite interface{ Code() int }
	if errors.As(err, &sqlite) {
		const noMemory, inputOutput, full = 7, 10, 13
		switch sqlite.Code() & 0xff {
		case noMemory, inputOutput, full:
			return true
		}
	}
	return false
}

// condemn counts a failed attempt whose transaction is gone. When the effects
// are unknown the message is parked at once: another run of its handler could
// double them.
func (r *runner[Tx]) condemn(it *item, f fate) {
	if f.reason != ReasonEffectsUnknown {
		f.err = r.c.classify(r.hard, it.Value, f.err)
	}
	r.failed(it, f)
	if f.reason != ReasonEffectsUnknown {
		return
	}
	// Neither a stop nor the loss of the delivery may come in between.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.hard), r.c.cfg.AckTimeout)
	defer cancel()
	if err := r.attempt(ctx, []*item{it}); err != nil {
		r.single(it, err)
		return
	}
	it.Keep = false
	r.settle([]*item{it})
}

// failed counts a failed attempt whose transaction is gone, or after which the
// message stays in its lane.
func (r *runner[Tx]) failed(it *item, f fate) {
	w := it.Value
	w.failed++
	it.Keep, it.Alone = true, true
	if f.reason == ReasonEffectsUnknown {
		w.verdict = dead(ReasonEffectsUnknown, f.err)
		return
	}
	v, delay := r.c.verdictOf(w, w.failed, f.err)
	if v != nil {
		w.verdict = v
		return
	}
	it.Delay = delay
	r.c.onRetry(r.hard, w, true, delay, f.err)
}

// longestWait caps the time after which a message is tried again that waits in its
// lane for no fault of its own.
func (c *Consumer[Tx]) longestWait() time.Duration {
	const limit = 30 * time.Second
	return min(max(c.cfg.Retry.MaxBackoff, gateMaxBackoff), limit)
}
