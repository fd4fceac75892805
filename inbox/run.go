package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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
// ConflictFail (ErrConflict). src is closed in every case; when its Close fails,
// that is logged: what was acked last may come again then.
//
// Besides src, Run feeds back the consumer's parked messages, whoever parked them,
// see Parking.
//
// Several Runs of one Consumer may go on at once, with different sources; each
// has workers of its own.
func (c *Consumer[Tx]) Run(ctx context.Context, src broker.Source) (err error) {
	if isNil(src) {
		return errors.New("inbox: run: source must not be nil")
	}
	hard, hardStop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer hardStop(nil)
	soft, softStop := context.WithCancelCause(ctx)
	defer softStop(nil)
	r := &runner[Tx]{c: c, src: src, soft: soft, softStop: softStop, hard: hard}
	r.batchSize.Store(int64(c.cfg.BatchSize))
	r.gate = newGate(c.cfg.Logger.With(slog.String("consumer", c.name)), func(e PauseEvent) { c.onPause(ctx, e) })
	r.queue = lanes.New(c.cfg.Workers, lanes.Limits{Items: c.cfg.MaxInFlight, Bytes: c.cfg.MaxInFlightBytes}, (*work).end)
	reporter, _ := src.(broker.HealthReporter)
	leave := c.vitals.enter(&vitalRun{soft: soft, gate: r.gate, queue: r.queue, source: reporter})
	defer func() { leave(err) }()
	r.caution = newCaution(r)
	defer r.caution.close()

	if err := r.start(); err != nil {
		r.closeSource()
		return err
	}
	r.loops.Go(func() { r.gate.keep(soft, c.store.Check, r.probeFailed) })
	r.loops.Go(r.checkAtStart)
	if r.caution != nil {
		r.loops.Go(r.caution.keep)
	}
	r.loops.Go(r.receive)
	if c.parker != nil && c.cfg.Parking.Poll > 0 {
		r.feeder = newFeeder(r)
		r.loops.Go(r.feeder.run)
	}
	for range c.cfg.Workers {
		r.loops.Go(r.work)
	}
	<-soft.Done()
	grace := time.AfterFunc(c.cfg.ShutdownTimeout, func() { hardStop(errHardStop) })
	r.loops.Wait()
	grace.Stop()
	hardStop(errHardStop)
	r.nack(r.queue.Close()) //nolint:contextcheck // What is given back has a deadline of its own.
	r.feeder.close()
	r.closeSource()
	r.leaveHandlers()
	return r.fatal()
}

// runner is one Run.
type runner[Tx any] struct {
	c     *Consumer[Tx]
	src   broker.Source
	queue *lanes.Queue[*work]
	gate  *gate
	// feeder is nil when this process feeds nothing back.
	feeder *feeder[Tx]
	// caution is nil when deaths of processes are not looked for.
	caution *caution[Tx]

	soft     context.Context // ends when the stop begins
	softStop context.CancelCauseFunc
	hard     context.Context // ends when the grace is over

	// batchSize is Config.BatchSize, less for a while after batches failed.
	batchSize atomic.Int64
	// successes counts messages that were handled.
	successes atomic.Int64
	// suspects are the messages that failed like infrastructure since then.
	suspects sync.Map
	// fullTold is when the log last told of a full lane.
	fullMu   sync.Mutex
	fullTold map[string]time.Time
	// recalls are the recall channels that are watched.
	recalls  sync.Map
	loops    sync.WaitGroup
	handlers sync.WaitGroup
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

// probeFailed ends Run when a probe found what only a person can mend.
func (r *runner[Tx]) probeFailed(err error) {
	if isSetup(err) {
		r.fail(fmt.Errorf("inbox: consumer %q: %w", r.c.name, err))
	}
}

// start prepares the consumer, and waits for a database that is not there yet.
func (r *runner[Tx]) start() error {
	for n := 1; ; n++ {
		pctx, cancel := context.WithTimeout(r.soft, probeTimeout)
		err := r.c.prepare(pctx)
		cancel()
		switch {
		case err == nil:
			if n > 1 {
				r.gate.pass()
			}
			r.caution.beat() // Before anything is received.
			return nil
		case r.soft.Err() != nil:
			return nil //nolint:nilerr // Stopped: what failed meanwhile does not matter.
		case isSetup(err):
			return err
		}
		if n == 1 {
			r.gate.trip(err)
		} else {
			r.gate.remind(time.Now(), err) // Nobody else uses the gate yet.
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
		for _, d := range ds {
			r.queue.Put(d.Lane, r.c.newWork(d.Message, d), d.Message.Size())
		}
		r.watchRecalls(ds)
		switch {
		case err == nil && len(ds) > 0:
		case err == nil:
			// Against the contract, but no reason for a hot loop.
			sleep(r.soft, nil, gateBackoff)
		case r.soft.Err() != nil:
			return
		case errors.Is(err, broker.ErrClosed):
			r.softStop(err)
			return
		default:
			r.fail(fmt.Errorf("inbox: consumer %q: receive: %w", r.c.name, err))
			return
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
		r.feeder.left(items)
		r.queue.Finish(items)
		if slices.ContainsFunc(items, func(it *item) bool { return it.Value.delivery.Recalled() }) {
			r.giveBackRecalled() // Of those that were kept the recall may be past.
		}
	}
}

// batch handles taken items together, and one by one when that fails.
func (r *runner[Tx]) batch(items []*item) {
	if len(items) > 1 && r.caution.anyNeeded(items) {
		r.singles(items, nil)
		return
	}
	err := r.attempt(r.hard, items)
	if err == nil {
		r.settle(items)
		r.grow()
		return
	}
	if len(items) == 1 {
		r.single(items[0], err)
		return
	}
	if r.hard.Err() != nil {
		r.keep(items)
		return
	}
	if r.unusable(err) || r.unanswered(err) {
		r.keep(items)
		r.gate.trip(err)
		return
	}
	r.shrink(len(items), err)
	if errors.Is(err, ErrInFlight) {
		for _, it := range items {
			it.Value.waits = max(it.Value.waits, 1)
		}
	}
	// What is known about the culprits must not get lost, whatever becomes of
	// the others.
	condemned := map[*item]bool{}
	for _, it := range items {
		if w := it.Value; w.fate.kind == fateFailed && slices.Contains(err.culprits, w) {
			r.condemn(it, w.fate)
			condemned[it] = true
		}
	}
	r.singles(items, condemned)
}

// singles handles items one by one, but for those that were condemned already.
func (r *runner[Tx]) singles(items []*item, condemned map[*item]bool) {
	held := map[string]bool{}
	for i, it := range items {
		w := it.Value
		switch {
		case condemned[it]:
		case r.soft.Err() != nil || !r.gate.isOpen():
			for _, it := range items[i:] {
				it.Keep = it.Keep || !condemned[it]
			}
			return
		case w.delivery.Lane != "" && held[w.delivery.Lane]:
			it.Keep = true
			continue
		default:
			if err := r.attempt(r.hard, []*item{it}); err != nil {
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

// attempt runs one transaction over the items, with care where that is needed.
func (r *runner[Tx]) attempt(ctx context.Context, items []*item) *batchError {
	if len(items) == 1 && r.caution.needed(items[0].Value) {
		return r.caution.attempt(ctx, items[0])
	}
	return r.transact(ctx, items)
}

// transact runs one transaction over the items.
func (r *runner[Tx]) transact(ctx context.Context, items []*item) *batchError {
	works := make([]*work, len(items))
	for i, it := range items {
		works[i] = it.Value
	}
	a := &attempt[Tx]{
		c: r.c, works: works, handlers: &r.handlers, park: true,
		stopping: func() bool { return r.soft.Err() != nil },
	}
	err := a.run(ctx)
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

// closeSource closes the source. That it could not say good-bye to its broker is no
// failure of Run: nothing is lost by it.
func (r *runner[Tx]) closeSource() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.hard), r.c.cfg.AckTimeout)
	defer cancel()
	if err := r.src.Close(ctx); err != nil {
		r.c.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "inbox: close source failed: what was acked last may come again, as a replay",
			slog.String("consumer", r.c.name), slog.Any("error", err))
	}
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
