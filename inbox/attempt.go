package inbox

import (
	"context"
	"errors"
	"fmt"
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
	a.held = map[string]bool{}
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
	batch, err := a.c.store.Begin(bctx, claims, BeginOptions{
		LockTimeout:  wait,
		IdleTimeout:  a.c.idleTimeout(),
		IgnoreParked: !a.park,
	})
	if err != nil {
		return nil, &batchError{stage: stageBegin, err: err, down: bctx.Err() != nil && ctx.Err() == nil}
	}
	return batch, nil
}

// plan chooses what to claim. Keys are distinct in a batch: a second message
// with the same key and fingerprint follows the first one's fate; one with
// another fingerprint waits for the next batch, and its lane with it.
func (a *attempt[Tx]) plan() []Claim {
	type id struct{ tenant, key string }
	leaders := make(map[id]*work, len(a.works))
	a.index = make(map[*work]int, len(a.works))
	claims := make([]Claim, 0, len(a.works))
	for _, w := range a.works {
		switch {
		case w.lost() && !w.effectsUnknown():
			w.fate.kind = fateLost
			continue
		case w.recalled():
			a.hold(w)
			continue
		case w.keyErr != nil, a.held[w.lane()]:
			continue
		}
		k := id{w.claim.Tenant, w.claim.MessageKey}
		leader := leaders[k]
		switch {
		case leader == nil:
			leaders[k] = w
			w.claim.Attempt = w.failed + 1
			a.index[w] = len(claims)
			claims = append(claims, w.claim)
		case string(leader.claim.Fingerprint) == string(w.claim.Fingerprint):
			if a.twins == nil {
				a.twins = map[*work]*work{}
			}
			a.twins[w] = leader
		default:
			a.hold(w)
		}
	}
	return claims
}

func (a *attempt[Tx]) anyKeyless() bool {
	for _, w := range a.works {
		if w.keyErr != nil && w.fate.kind == fateOpen && a.park {
			return true
		}
	}
	return false
}

// hold keeps the rest of w's lane from running in this attempt.
func (a *attempt[Tx]) hold(w *work) {
	if lane := w.lane(); lane != "" {
		a.held[lane] = true
	}
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
		case w.fate.kind == fateLost || a.held[w.lane()]:
			continue
		case w.keyErr != nil && a.park:
			if err := a.parkNow(ctx, w, -1, &doom{ReasonInvalidKey, w.keyErr}); err != nil {
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

// unplanned decides about a message that has no claim of its own in this
// attempt: a twin follows its leader, anything else waits, and its lane with it.
func (a *attempt[Tx]) unplanned(w *work, held bool) {
	leader := a.twins[w]
	switch {
	case leader != nil && a.c.bulk && leader.fate.kind == fateOpen && !a.held[leader.lane()]:
		// The leader runs at the end, with the group.
	case leader != nil && a.follow(w, leader):
	case leader != nil || held:
		a.hold(w)
	}
}

// follow gives a twin its fate when its leader is done; it reports whether the
// twin has one.
func (a *attempt[Tx]) follow(w, leader *work) bool {
	if leader.fate.kind != fateDone || (leader.fate.outcome != FirstAttempt && leader.fate.outcome != Replay) {
		return false
	}
	w.fate = fate{kind: fateDone, outcome: Replay, first: leader.fate.first, value: leader.fate.value}
	return true
}

// entry looks at the answer to one claim and reports whether the handler is to
// run.
func (a *attempt[Tx]) entry(ctx context.Context, w *work, i int) (bool, error) {
	e := a.batch.Entries()[i]
	switch e.Outcome {
	case FirstAttempt:
	case Conflict:
		return false, a.conflict(ctx, w, i, e)
	case Replay, Dead, WasParked:
		if w.effectsUnknown() && a.park {
			// The row may be the one that the handler committed by itself.
			return false, a.parkNow(ctx, w, -1, w.doomed)
		}
		w.fate = fate{kind: fateDone, outcome: e.Outcome, first: e.Stored}
		if e.Stored != nil {
			w.fate.value = e.Stored.Result
		}
		return false, nil
	default:
		return false, &batchError{stage: stageHandler, err: fmt.Errorf("inbox: the store answered a claim with outcome %q", e.Outcome)}
	}
	switch {
	case w.doomed != nil && a.park:
		return false, a.parkNow(ctx, w, i, w.doomed)
	case w.lost():
		w.fate.kind = fateLost
		return false, nil
	case w.recalled(), a.mayNotStart(ctx):
		a.hold(w)
		return false, nil
	}
	return true, nil
}

func (a *attempt[Tx]) conflict(ctx context.Context, w *work, i int, e Entry) error {
	w.fate = fate{kind: fateDone, outcome: Conflict, first: e.Stored, value: e.Stored.Result}
	if a.c.cfg.OnConflict == ConflictFail {
		a.hold(w) // Nothing behind it may run.
	}
	if a.c.cfg.OnConflict != ConflictDeadLetter || !a.park {
		return nil
	}
	first := w.fate
	err := a.parkNow(ctx, w, i, &doom{ReasonConflict, ErrConflict})
	w.fate.outcome, w.fate.first, w.fate.value = Conflict, first.first, first.value
	return err
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

func (a *attempt[Tx]) finish(ctx context.Context, i int, ok bool, result []byte) error {
	fctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	return a.batch.Finish(fctx, i, ok, result)
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

// charge counts a failed attempt, and parks the message after the last one.
func (a *attempt[Tx]) charge(ctx context.Context, w *work, err error) error {
	d := a.c.doomOf(w.failed+1, err)
	if d != nil && d.reason == ReasonAttempts && a.event.Claimed > 1 && len(a.works) > 1 && a.park {
		// The last attempt is not spent behind another message's run: what that
		// left in the transaction (a temporary table, a cursor) may be the cause.
		w.alone = true
		return nil
	}
	if d != nil && a.park {
		// The verdict stands even if this transaction is not committed.
		w.failed++
		w.doomed = d
		return a.parkNow(ctx, w, a.index[w], d)
	}
	w.fate = fate{kind: fateFailed, err: err, ran: true}
	return nil
}

// doomOf tells whether a message has failed for good.
func (c *Consumer[Tx]) doomOf(failed int, err error) *doom {
	switch {
	case IsPermanent(err):
		return &doom{ReasonPermanent, err}
	case c.cfg.Retry.MaxAttempts > 0 && failed >= c.cfg.Retry.MaxAttempts:
		return &doom{ReasonAttempts, err}
	}
	return nil
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

// parkNow makes w a dead letter in the open transaction; i is its claim or -1.
func (a *attempt[Tx]) parkNow(ctx context.Context, w *work, i int, d *doom) error {
	pctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	if err := a.batch.Park(pctx, i, w.parked(d.reason, d.err)); err != nil {
		return &batchError{stage: stageHandler, err: fmt.Errorf("park: %w", err)}
	}
	w.fate = fate{kind: fateDone, outcome: Dead, reason: d.reason, err: d.err}
	return nil
}

// idleTimeout is how long the transaction may sit idle.
func (c *Consumer[Tx]) idleTimeout() time.Duration {
	if c.cfg.HandlerTimeout <= 0 {
		return 0
	}
	return c.cfg.HandlerTimeout + idleMargin
}
