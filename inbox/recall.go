package inbox

import (
	"context"
	"errors"
	"log/slog"

	"github.com/ackafter/ackafter/broker"
)

// recalled tells that the source wants the message back and may have it: only a
// message whose effects are unknown stays until it is parked or lost.
func (w *work) recalled() bool {
	return w.delivery != nil && w.delivery.Recalled() && !w.effectsUnknown()
}

// watchRecalls sees to it that received deliveries are given back when the source
// wants them back. They must be in the queue already.
func (r *runner[Tx]) watchRecalls(ds []*broker.Delivery) {
	var last <-chan struct{}
	for _, d := range ds {
		if d.Recall == nil || d.Recall == last {
			continue
		}
		last = d.Recall
		if _, watched := r.recalls.LoadOrStore(d.Recall, nil); watched {
			continue
		}
		r.loops.Go(func() {
			select {
			case <-d.Recall:
			case <-d.Context().Done():
				// It was lost, and most often all that came with it. Nobody may close
				// the channel any more.
			case <-r.soft.Done():
				return // Everything is given back.
			}
			// First of all, so that what is received from now on is watched anew.
			r.recalls.Delete(d.Recall)
			r.giveBackRecalled()
		})
	}
}

// giveBackRecalled gives back what the source wants back and nobody works on.
func (r *runner[Tx]) giveBackRecalled() {
	works := r.queue.Remove((*work).recalled)
	if len(works) == 0 {
		return
	}
	r.c.cfg.Logger.LogAttrs(r.hard, slog.LevelDebug, "inbox: the source wants messages back that were not started",
		slog.String("consumer", r.c.name), slog.Int("messages", len(works)))
	r.nack(works)
}

// nack gives messages back that were received and are not done.
func (r *runner[Tx]) nack(works []*work) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.hard), r.c.cfg.AckTimeout)
	defer cancel()
	for _, w := range works {
		err := w.delivery.Nack(ctx, 0)
		if err != nil && !errors.Is(err, broker.ErrLost) {
			r.c.cfg.Logger.LogAttrs(r.hard, slog.LevelWarn, "inbox: give back failed: the broker delivers the message again by itself",
				append(r.c.attrs(w), slog.Any("error", err))...)
		}
	}
}
