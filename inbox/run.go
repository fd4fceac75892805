package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox/internal/backoff"
	"github.com/ackafter/ackafter/inbox/internal/lanes"
)

// Run receives from src and handles messages until ctx ends, then stops in
// order: no new message is started; running handlers get
// Config.ShutdownTimeout; what is done is committed and acked, everything else
// is given back; src is closed. It returns nil after such a wanted stop, and
// also when src was closed by somebody else.
//
// While the database or the broker cannot be reached, Run pauses and goes on by
// itself. It returns an error for what only a person can mend: missing or
// outdated tables (ErrNoSchema, ErrSchemaVersion), a changed key function
// (*KeyDefinitionError), a source that cannot go on, and a conflict under
// ConflictFail (ErrConflict). src is closed in every case.
//
// Several Runs of one Consumer may go on at once, with different sources; each
// has workers of its own.
func (c *Consumer[Tx]) Run(ctx context.Context, src broker.Source) error {
	if isNil(src) {
		return errors.New("inbox: run: source must not be nil")
	}
	hard, hardStop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer hardStop(nil)
	soft, softStop := context.WithCancelCause(ctx)
	defer softStop(nil)
	r := &runner[Tx]{c: c, src: src, soft: soft, softStop: softStop, hard: hard}
	r.batchSize.Store(int64(c.cfg.BatchSize))
	r.gate = newGate(c.cfg.Logger, func(e PauseEvent) { c.onPause(ctx, e) })
	r.queue = lanes.New(c.cfg.Workers, lanes.Limits{Items: c.cfg.MaxInFlight, Bytes: c.cfg.MaxInFlightBytes}, (*work).lost)

	if err := r.start(); err != nil {
		return errors.Join(err, r.closeSource())
	}
	var loops sync.WaitGroup
	loops.Go(func() { r.gate.keep(soft, c.store.Check) })
	loops.Go(r.receive)
	for range c.cfg.Workers {
		loops.Go(r.work)
	}
	<-soft.Done()
	grace := time.AfterFunc(c.cfg.ShutdownTimeout, func() { hardStop(errHardStop) })
	loops.Wait()
	grace.Stop()
	hardStop(errHardStop)
	r.giveBack()
	err := r.closeSource()
	r.leaveHandlers()
	return errors.Join(r.fatal(), err)
}

// runner is one Run.
type runner[Tx any] struct {
	c     *Consumer[Tx]
	src   broker.Source
	queue *lanes.Queue[*work]
	gate  *gate

	soft     context.Context // ends when the stop begins
	softStop context.CancelCauseFunc
	hard     context.Context // ends when the grace is over

	// batchSize is Config.BatchSize, less for a while after batches failed.
	batchSize atomic.Int64
	handlers  sync.WaitGroup
}

// fatalError ends Run with an error.
type fatalError struct{ err error }

func (e *fatalError) Error() string { return e.err.Error() }

func (r *runner[Tx]) fail(err error) { r.softStop(&fatalError{err}) }

// fatal returns the error that ended Run, nil after a wanted stop.
func (r *runner[Tx]) fatal() error {
	var f *fatalError
	if errors.As(context.Cause(r.soft), &f) {
		return f.err
	}
	return nil
}

// start prepares the consumer, and waits for a database that is not there yet.
func (r *runner[Tx]) start() error {
	for n := 1; ; n++ {
		pctx, cancel := context.WithTimeout(r.soft, probeTimeout)
		err := r.c.prepare(pctx)
		cancel()
		switch {
		case err == nil && n > 1:
			r.gate.pass()
			return nil
		case err == nil:
			return nil
		case r.soft.Err() != nil:
			return nil //nolint:nilerr // Stopped: what failed meanwhile does not matter.
		case isSetup(err):
			return err
		}
		if n == 1 {
			r.gate.trip(err)
		}
		if !sleep(r.soft, nil, backoff.Delay(n, gateBackoff, gateMaxBackoff)) {
			return nil
		}
	}
}

// receive moves deliveries from the source into the lanes.
func (r *runner[Tx]) receive() {
	for {
		if !r.gate.wait(r.soft) {
			return
		}
		room, ok := r.queue.Room(r.soft)
		if !ok {
			return
		}
		ds, err := r.src.Receive(r.soft, room)
		switch {
		case err == nil:
		case r.soft.Err() != nil:
			return
		case errors.Is(err, broker.ErrClosed):
			r.softStop(err)
			return
		default:
			r.fail(fmt.Errorf("inbox: consumer %q: receive: %w", r.c.name, err))
			return
		}
		for _, d := range ds {
			r.queue.Put(d.Lane, r.c.newWork(d.Message, d), d.Message.Size())
		}
	}
}

// work is one worker: it takes batches from the lanes until the stop.
func (r *runner[Tx]) work() {
	for {
		if !r.gate.wait(r.soft) {
			return
		}
		items := r.queue.Take(r.soft, int(r.batchSize.Load()))
		if items == nil {
			return
		}
		r.batch(items)
		r.queue.Finish(items)
	}
}

// batch handles taken items together, and one by one when that fails.
func (r *runner[Tx]) batch(items []*item) {
	err := r.attempt(items)
	if err == nil {
		r.settle(items)
		if len(items) > 1 {
			r.grow()
		}
		return
	}
	if len(items) == 1 {
		r.single(items[0], err)
		return
	}
	if r.unusable(err) {
		r.keep(items)
		r.gate.trip(err)
		return
	}
	r.shrink(len(items), err)
	held := map[string]bool{}
	for i, it := range items {
		w := it.Value
		switch {
		case r.soft.Err() != nil || !r.gate.isOpen():
			r.keep(items[i:])
			return
		case w.delivery.Lane != "" && held[w.delivery.Lane]:
			it.Keep = true
			continue
		case w == err.culprit && w.fate.kind == fateFailed:
			r.failed(it, w.fate)
		default:
			if err := r.attempt([]*item{it}); err != nil {
				r.single(it, err)
			} else {
				r.settle([]*item{it})
			}
		}
		if it.Keep {
			held[w.delivery.Lane] = true
		}
	}
}

// attempt runs one transaction over the items.
func (r *runner[Tx]) attempt(items []*item) *batchError {
	works := make([]*work, len(items))
	for i, it := range items {
		works[i] = it.Value
	}
	a := &attempt[Tx]{
		c: r.c, works: works, handlers: &r.handlers, park: true,
		stopping: func() bool { return r.soft.Err() != nil },
	}
	err := a.run(r.hard)
	if err == nil {
		if a.batch != nil {
			r.gate.pass()
		}
		return nil
	}
	var be *batchError
	if !errors.As(err, &be) {
		be = &batchError{err: err}
	}
	return be
}

// unusable tells that the database could not even be asked.
func (r *runner[Tx]) unusable(err *batchError) bool {
	return err.stage == stageBegin && !errors.Is(err, ErrInFlight) && r.c.store.Classify(err) != ClassContention
}

// aloneLimit is how often in a row a message that runs alone may fail like
// infrastructure, on a database that answers, before it counts as its own
// failure.
const aloneLimit = 5

// single decides about an item whose transaction failed while it ran alone.
func (r *runner[Tx]) single(it *item, err *batchError) {
	w := it.Value
	it.Keep = true
	switch {
	case w.lost():
		it.Keep = false
		return
	case r.hard.Err() != nil:
		return
	case r.unusable(err):
		r.gate.trip(err)
		return
	case err.culprit == w && w.fate.kind == fateFailed:
		r.failed(it, w.fate)
		return
	case err.stage == stageBegin:
		// In flight elsewhere, or contention on the claim: not its fault.
		it.Delay = backoff.Delay(1, max(r.c.cfg.Retry.Backoff, gateBackoff), r.c.cfg.Retry.MaxBackoff)
		r.c.onRetry(r.hard, w, false, it.Delay, err)
		return
	case err.stage == stageCommit && !errors.Is(err, ErrCommitUnknown) && r.c.store.Classify(err) == ClassMessage:
		// A deferred constraint: the handler's own failure.
		r.failed(it, fate{kind: fateFailed, ran: true, err: err})
		return
	}
	w.alone++
	if w.alone >= aloneLimit {
		// The claim succeeded each time, so the database was there: it is the
		// message.
		r.failed(it, fate{kind: fateFailed, ran: true, err: err})
		return
	}
	it.Delay = backoff.Delay(w.alone, gateBackoff, gateMaxBackoff)
	r.c.onRetry(r.hard, w, false, it.Delay, err)
}

// failed counts a failed attempt whose transaction is gone.
func (r *runner[Tx]) failed(it *item, f fate) {
	w := it.Value
	w.failed++
	w.alone = 0
	w.last = f.err
	it.Keep = true
	if f.reason == ReasonEffectsUnknown {
		w.doomed = &doom{ReasonEffectsUnknown, f.err}
		return
	}
	if d := r.c.doomOf(w.failed, f.err); d != nil {
		w.doomed = d
		return
	}
	it.Delay = r.c.retryDelay(w.failed, f.err)
	r.c.onRetry(r.hard, w, true, it.Delay, f.err)
}

// retryDelay is the time before the attempt after n failed ones.
func (c *Consumer[Tx]) retryDelay(n int, err error) time.Duration {
	var after *retryAfterError
	if errors.As(err, &after) {
		return after.after
	}
	return backoff.Delay(n, c.cfg.Retry.Backoff, c.cfg.Retry.MaxBackoff)
}

// settle applies the fates of a committed transaction.
func (r *runner[Tx]) settle(items []*item) {
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
			r.ack(w)
			r.c.observe(r.hard, w)
		case fateFailed:
			r.failed(it, w.fate)
		case fateLost:
		case fateOpen:
			it.Keep = true
		}
	}
}

// ack tells the broker, with a context that a stop does not end.
func (r *runner[Tx]) ack(w *work) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.hard), r.c.cfg.AckTimeout)
	defer cancel()
	switch err := w.delivery.Ack(ctx); {
	case err == nil:
	case errors.Is(err, broker.ErrLost):
		r.c.onStaleAck(r.hard, w)
	default:
		r.c.cfg.Logger.LogAttrs(r.hard, slog.LevelWarn, "inbox: ack failed: the message may come again, as a replay",
			append(r.c.attrs(w), slog.Any("error", err))...)
	}
}

// keep leaves items as they are for later.
func (r *runner[Tx]) keep(items []*item) {
	for _, it := range items {
		it.Keep = true
	}
}

// giveBack returns what was received and is not done.
func (r *runner[Tx]) giveBack() {
	for _, w := range r.queue.Close() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.hard), r.c.cfg.AckTimeout)
		err := w.delivery.Nack(ctx, 0)
		cancel()
		if err != nil && !errors.Is(err, broker.ErrLost) {
			r.c.cfg.Logger.LogAttrs(r.hard, slog.LevelWarn, "inbox: give back failed: the broker delivers the message again by itself",
				append(r.c.attrs(w), slog.Any("error", err))...)
		}
	}
}

func (r *runner[Tx]) closeSource() error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.hard), r.c.cfg.AckTimeout)
	defer cancel()
	if err := r.src.Close(ctx); err != nil {
		return fmt.Errorf("inbox: consumer %q: close source: %w", r.c.name, err)
	}
	return nil
}

// leaveHandlers waits a last moment for handlers that ignored the end of their
// contexts. Their transactions are gone; what they do is their own.
func (r *runner[Tx]) leaveHandlers() {
	done := make(chan struct{})
	go func() {
		r.handlers.Wait()
		close(done)
	}()
	t := time.NewTimer(abandonGrace)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
		r.c.cfg.Logger.LogAttrs(r.hard, slog.LevelError, "inbox: stopped while a handler that ignores its context still runs",
			slog.String("consumer", r.c.name))
	}
}

// shrink halves the batch size after a batch failed as a whole; grow gives it
// back slowly.
func (r *runner[Tx]) shrink(size int, err error) {
	r.batchSize.Store(max(1, int64(size)/2))
	r.c.cfg.Logger.LogAttrs(r.hard, slog.LevelInfo, "inbox: a batch failed as a whole; its messages run one by one",
		slog.String("consumer", r.c.name), slog.Int("messages", size), slog.Any("error", err))
}

func (r *runner[Tx]) grow() {
	if n := r.batchSize.Load(); n < int64(r.c.cfg.BatchSize) {
		r.batchSize.CompareAndSwap(n, n+1)
	}
}
