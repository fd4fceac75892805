package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox/internal/backoff"
)

// settle applies the fates of a committed transaction. The acks have a context
// that a stop does not end, and a deadline together.
func (r *runner[Tx]) settle(items []*item) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.hard), r.c.cfg.AckTimeout)
	defer cancel()
	for _, it := range items {
		w := it.Value
		switch w.fate.kind {
		case fateDone:
			r.done(ctx, it)
		case fateFailed:
			r.failed(it, w.fate)
		case fateLost, fateHeld:
			r.suspects.Delete(w)
		case fateFull:
			it.Keep, it.Alone = true, w.alone
			w.full++
			it.Delay = backoff.Delay(w.full, fullBackoff, fullMaxBackoff)
			r.tellFull(w)
		case fateOpen:
			it.Keep, it.Alone = true, w.alone
		}
	}
}

// done acks a message that this process has no more to do with, and tells of it.
func (r *runner[Tx]) done(ctx context.Context, it *item) {
	w := it.Value
	if w.fate.outcome == Conflict && r.c.cfg.OnConflict == ConflictFail {
		it.Keep = true
		r.c.observe(ctx, w)
		r.fail(fmt.Errorf("inbox: consumer %q: message %s: %w", r.c.name, w.message.ID, ErrConflict))
		return
	}
	if w.fate.outcome == FirstAttempt {
		r.successes.Add(1)
		r.suspects.Clear()
	}
	r.suspects.Delete(w)
	failed := w.fate.outcome == WasParked && w.fate.reason == ReasonFailed
	if failed {
		r.c.onRetry(ctx, w, true, w.fate.after, w.fate.err)
		r.feeder.ask(w.fate.after)
	}
	r.ack(ctx, w)
	if !failed || !w.fed() { // Parked it was before.
		r.c.observe(ctx, w)
	}
}

// How a message waits that found no room to wait in the parked table.
const (
	fullBackoff    = time.Second
	fullMaxBackoff = 5 * time.Second
	fullReminder   = time.Minute
)

// tellFull logs now and then that a lane is full.
func (r *runner[Tx]) tellFull(w *work) {
	r.fullMu.Lock()
	defer r.fullMu.Unlock()
	lane, now := w.claim.Lane, time.Now()
	if told, ok := r.fullTold[lane]; ok && now.Sub(told) < fullReminder {
		return
	}
	for other, told := range r.fullTold {
		if now.Sub(told) >= fullReminder {
			delete(r.fullTold, other)
		}
	}
	if r.fullTold == nil {
		r.fullTold = map[string]time.Time{}
	}
	r.fullTold[lane] = now
	r.c.cfg.Logger.LogAttrs(r.hard, slog.LevelWarn, "inbox: as many messages wait behind a parked one as may; their lane stands still",
		append(r.c.attrs(w), slog.String("lane", lane))...)
}

// ack tells the broker.
func (r *runner[Tx]) ack(ctx context.Context, w *work) {
	switch err := w.delivery.Ack(ctx); {
	case err == nil:
	case errors.Is(err, broker.ErrLost):
		r.c.onStaleAck(ctx, w)
	default:
		r.c.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "inbox: ack failed: the message may come again, as a replay",
			append(r.c.attrs(w), slog.Any("error", err))...)
	}
}

// keep leaves items as they are for later.
func (r *runner[Tx]) keep(items []*item) {
	for _, it := range items {
		it.Keep = true
	}
}
