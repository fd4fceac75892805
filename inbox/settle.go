package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/ackafter/ackafter/broker"
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
			if w.fate.outcome == Conflict && r.c.cfg.OnConflict == ConflictFail {
				it.Keep = true
				r.c.observe(r.hard, w)
				r.fail(fmt.Errorf("inbox: consumer %q: message %s: %w", r.c.name, w.message.ID, ErrConflict))
				continue
			}
			if w.fate.outcome == FirstAttempt {
				r.successes.Add(1)
				r.suspects.Clear()
			}
			r.suspects.Delete(w)
			r.ack(ctx, w)
			r.c.observe(r.hard, w)
		case fateFailed:
			r.failed(it, w.fate)
		case fateLost:
		case fateOpen:
			it.Keep, it.Alone = true, w.alone
		}
	}
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
