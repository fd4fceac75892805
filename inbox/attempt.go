package inbox

import (
	"context"
	"errors"
	"sync"
	"time"
)

// The deadlines of the loop's own calls of the database.
const (
	// commitTimeout bounds the wait for the answer to COMMIT; without one the
	// outcome is unknown, and the next claim tells.
	commitTimeout = 30 * time.Second
	// beginMargin is what Begin may take beyond the wait for keys.
	beginMargin = 10 * time.Second
	// patience is the wait for a key that was waited for before, and of a batch.
	patience = 200 * time.Millisecond
	// statementTimeout bounds every other call.
	statementTimeout = 30 * time.Second
)

// attempt is one transaction over some messages. Its result is a fate for every
// work, which counts when run returns nil.
type attempt[Tx any] struct {
	c     *Consumer[Tx]
	works []*work

	// handlers counts running handlers.
	handlers *sync.WaitGroup
	// park is set in Run: dead letters are parked in the transaction.
	park bool
	// stopping tells that no further handler shall be started.
	stopping func() bool

	batch  Batch[Tx]
	index  map[*work]int   // of those that Begin was asked for
	twins  map[*work]*work // follower -> leader: same key and fingerprint
	held   map[string]bool // lanes of which nothing more may run now
	waits  map[string]bool // lanes of which something was parked as ParkedWaiting
	opened time.Time
	event  BatchEvent
}

// stage says how far an attempt got that failed as a whole.
type stage int

const (
	stageBegin stage = iota
	stageHandler
	stageCommit
)

// batchError is the failure of an attempt as a whole: nothing was committed, or
// it is not known whether. The fates do not count, except the culprit's.
type batchError struct {
	stage    stage
	culprits []*work // the messages whose handler brought the batch down
	down     bool    // the database did not answer in time
	err      error
}

func (e *batchError) Error() string { return e.err.Error() }
func (e *batchError) Unwrap() error { return e.err }

// run claims, handles and commits. ctx is the one that handlers get; a shutdown
// ends it only after the grace.
func (a *attempt[Tx]) run(ctx context.Context) error {
	a.event = BatchEvent{Consumer: a.c.name, Size: len(a.works)}
	err := a.transact(ctx)
	if err != nil {
		a.event.Err = err
	}
	a.c.onBatch(ctx, a.event)
	return err
}

func (a *attempt[Tx]) transact(ctx context.Context) error {
	now := time.Now()
	a.held, a.waits = map[string]bool{}, map[string]bool{}
	for _, w := range a.works {
		w.fate, w.start = fate{}, now
	}
	claims := a.plan()
	if len(claims) == 0 && !a.anyKeyless() {
		return nil // Everything is lost or held.
	}
	batch, err := a.begin(ctx, claims)
	if err != nil {
		return err
	}
	a.batch, a.opened = batch, time.Now()
	a.event.Claim = a.opened.Sub(now)
	defer batch.Abort()
	if err := a.work(ctx); err != nil {
		a.event.Handlers = time.Since(a.opened)
		return err
	}
	commitStart := time.Now()
	a.event.Handlers = commitStart.Sub(a.opened)
	// Nothing may cancel a COMMIT: its outcome would be unknown for no reason.
	cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	err = batch.Commit(cctx)
	a.event.Commit = time.Since(commitStart)
	if err != nil {
		return &batchError{stage: stageCommit, err: err}
	}
	return nil
}

func (a *attempt[Tx]) begin(ctx context.Context, claims []Claim) (Batch[Tx], error) {
	wait := a.c.cfg.LockTimeout
	if len(a.works) > 1 || a.works[0].waits > 0 {
		// A batch runs one by one if a key is held, so that the others need not
		// wait for it; and a message that waited before comes again and again, with
		// a growing delay, and need not also keep a worker for long.
		wait = min(wait, patience)
	}
	bctx, cancel := context.WithTimeout(ctx, wait+beginMargin)
	defer cancel()
	o := BeginOptions{LockTimeout: wait, IdleTimeout: a.c.idleTimeout(), IgnoreParked: !a.park}
	if a.park {
		o.Order = a.c.order()
	}
	batch, err := a.c.store.Begin(bctx, claims, o)
	if err != nil {
		return nil, &batchError{stage: stageBegin, err: err, down: bctx.Err() != nil && ctx.Err() == nil}
	}
	return batch, nil
}

// work goes through the messages in their order, so that lanes are kept.
func (a *attempt[Tx]) work(ctx context.Context) error {
	// Lanes were held while planning only to keep later messages out of the
	// claims; what has a claim may run.
	held := a.held
	a.held = map[string]bool{}
	var group []*work
	for _, w := range a.works {
		i, planned := a.index[w]
		switch {
		case w.fate.kind == fateLost, a.held[w.lane()] && (!planned || !a.rowGoes(w, i)):
			continue
		case w.keyErr != nil && a.park:
			if err := a.parkNow(ctx, w, -1, dead(ReasonInvalidKey, w.keyErr)); err != nil {
				return err
			}
			continue
		case !planned:
			a.unplanned(w, held[w.lane()])
			continue
		}
		run, err := a.entry(ctx, w, i)
		if err != nil {
			return err
		}
		if !run {
			continue
		}
		a.event.Claimed++
		if a.c.bulk {
			group = append(group, w)
			continue
		}
		if err := a.handle(ctx, []*work{w}); err != nil {
			return err
		}
	}
	if len(group) == 0 {
		return nil
	}
	if err := a.handle(ctx, group); err != nil {
		return err
	}
	for _, w := range a.works {
		if leader := a.twins[w]; leader != nil && w.fate.kind == fateOpen && !a.held[w.lane()] {
			a.follow(w, leader)
		}
	}
	return nil
}

// mayNotStart tells that no further handler shall be started: because of a stop,
// because a handler changed the transaction's settings, or because the transaction
// has been open for BatchTime; at least one has run by then.
func (a *attempt[Tx]) mayNotStart(ctx context.Context) bool {
	if ctx.Err() != nil || (a.stopping != nil && a.stopping()) {
		return true
	}
	if s, ok := a.batch.(Sealer); ok && s.Sealed() {
		return true
	}
	return a.c.cfg.BatchTime > 0 && a.event.Claimed > 0 && time.Since(a.opened) > a.c.cfg.BatchTime
}

// handle runs the handler for a group: one message, or all of a bulk batch.
func (a *attempt[Tx]) handle(ctx context.Context, group []*work) error {
	first := a.index[group[0]]
	sctx, cancel := context.WithTimeout(ctx, statementTimeout)
	tx, err := a.batch.Start(sctx, first)
	cancel()
	if err != nil {
		return &batchError{stage: stageHandler, err: err}
	}
	ms := make([]*Message, len(group))
	for i, w := range group {
		ms[i] = w.newMessage()
	}
	hctx, ended := a.c.onHandle(ctx, ms)
	ran := a.c.invoke(hctx, a.handlers, group, tx, ms)
	var verdict error // why the run's work is rolled back, for the hooks
	defer func() { ended(verdict) }()
	if ran.abandoned {
		verdict = ran.err
		a.batch.Abort()
		return a.broken(group, ran, ran.err)
	}
	skipped, skip := skipReason(ran.err)
	ok := ran.err == nil || skip
	if ok {
		if err := resultError(ms); err != nil {
			ok, ran.err = false, Permanent(err)
		}
	}
	if !ok {
		verdict = withCause(ran)
	}
	if !ok && a.c.infrastructure(ran.err) {
		// The transaction cannot go on, or only with other rows than it has
		// seen.
		return &batchError{stage: stageHandler, err: ran.err}
	}
	if err := a.finish(ctx, first, ok, ms[0].result); err != nil {
		if ok {
			verdict = err
		}
		switch swallowed := ok && errors.Is(err, ErrSwallowed); {
		case swallowed && a.c.store.Classify(err) != ClassMessage:
			return &batchError{stage: stageHandler, err: err}
		case swallowed:
			return a.failed(ctx, group, call{err: err, cause: ran.cause})
		}
		return a.broken(group, ran, err)
	}
	if !ok {
		return a.failed(ctx, group, ran)
	}
	for i, w := range group {
		if i > 0 {
			if err := a.finish(ctx, a.index[w], true, ms[i].result); err != nil {
				verdict = err
				return &batchError{stage: stageHandler, err: err}
			}
		}
		w.fate = fate{kind: fateDone, outcome: FirstAttempt, ran: true, value: ms[i].result, skipped: skipped}
	}
	return nil
}

func (a *attempt[Tx]) finish(ctx context.Context, i int, ok bool, result []byte) error {
	fctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	return a.batch.Finish(fctx, i, ok, result)
}

// idleTimeout is how long the transaction may sit idle.
func (c *Consumer[Tx]) idleTimeout() time.Duration {
	if c.cfg.HandlerTimeout <= 0 {
		return 0
	}
	return c.cfg.HandlerTimeout + idleMargin
}
