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

	if err := r.start(); err != nil {
		r.closeSource()
		return err
	}
	r.loops.Go(func() { r.gate.keep(soft, c.store.Check, r.probeFailed) })
	r.loops.Go(r.receive)
	for range c.cfg.Workers {
		r.loops.Go(r.work)
	}
	<-soft.Done()
	grace := time.AfterFunc(c.cfg.ShutdownTimeout, func() { hardStop(errHardStop) })
	r.loops.Wait()
	grace.Stop()
	hardStop(errHardStop)
	r.nack(r.queue.Close()) //nolint:contextcheck // What is given back has a deadline of its own.
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

	soft     context.Context // ends when the stop begins
	softStop context.CancelCauseFunc
	hard     context.Context // ends when the grace is over

	// batchSize is Config.BatchSize, less for a while after batches failed.
	batchSize atomic.Int64
	// successes counts messages that were handled.
	successes atomic.Int64
	// suspects are the messages that failed like infrastructure since then.
	suspects sync.Map
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
		r.queue.Finish(items)
		if slices.ContainsFunc(items, func(it *item) bool { return it.Value.delivery.Recalled() }) {
			r.giveBackRecalled() // Of those that were kept the recall may be past.
		}
	}
}

// batch handles taken items together, and one by one when that fails.
func (r *runner[Tx]) batch(items []*item) {
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

// attempt runs one transaction over the items.
func (r *runner[Tx]) attempt(ctx context.Context, items []*item) *batchError {
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
	ctx, cancel := context.WithTimeout(r.hard, probeTimeout)
	defer cancel()
	probe := r.c.store.Check(ctx)
	return probe != nil && (ctx.Err() != nil || r.c.store.Classify(probe) == ClassUnavailable)
}

// How often in a row, while it runs alone, a message may fail like infrastructure
// on a database that takes its claims, before it counts as its own failure: fewer
// times when others succeed in between, more when nobody does.
const (
	aloneLimit  = 5
	lonelyLimit = 20
	lonelyTime  = 10 * time.Minute
)

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
		it.Delay = backoff.Delay(w.waits, max(r.c.cfg.Retry.Backoff, gateBackoff), max(r.c.cfg.Retry.MaxBackoff, gateMaxBackoff))
		r.c.onRetry(r.hard, w, false, it.Delay, err)
	case w.doomed != nil:
		// It could not be parked. The verdict stands.
		w.suspect.alone++
		it.Delay = backoff.Delay(w.suspect.alone, gateBackoff, max(r.c.cfg.Retry.MaxBackoff, gateMaxBackoff))
		r.c.onRetry(r.hard, w, false, it.Delay, err)
	case err.stage == stageCommit && !errors.Is(err, ErrCommitUnknown) && r.c.store.Classify(err) == ClassMessage:
		// A deferred constraint: the handler's own failure.
		r.failed(it, fate{kind: fateFailed, ran: true, err: err})
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

// failed counts a failed attempt whose transaction is gone.
func (r *runner[Tx]) failed(it *item, f fate) {
	w := it.Value
	w.failed++
	it.Keep, it.Alone = true, true
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
