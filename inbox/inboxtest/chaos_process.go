package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
)

// injectedError is an error that the database did not give.
type injectedError struct {
	text  string
	state string // SQLSTATE
	class inbox.Class
}

func (e *injectedError) Error() string { return "inboxtest: injected: " + e.text }

// SQLState is how handlers tell errors of a database by their class.
func (e *injectedError) SQLState() string { return e.state }

// The errors that are injected.
var (
	errInjected   = &injectedError{text: "a failure", class: inbox.ClassMessage}
	errPoison     = &injectedError{text: "this message cannot be handled", class: inbox.ClassMessage}
	errSerialize  = &injectedError{text: "could not serialize access", state: "40001", class: inbox.ClassContention}
	errConnection = &injectedError{text: "the connection to the database is lost", state: "08006", class: inbox.ClassUnavailable}
	errNoDatabase = &injectedError{text: "no connection to the database", state: "08001", class: inbox.ClassUnavailable}
	errDead       = &injectedError{text: "the process is dead", state: "57P01", class: inbox.ClassUnavailable}
)

// process is one consumer with the faults of the round around it. It is the hook
// of its consumer.
type process[Tx any] struct {
	r        *round[Tx]
	name     string
	faults   bool          // else nothing happens to it
	progress chan progress // how far it has come; nil: nobody asks

	source *pluggedSource
	stop   context.CancelFunc // of Run
	dead   atomic.Bool
	batch  *chaosBatch[Tx] // the open one; there is one worker
}

var (
	_ inbox.OnOutcome = (*process[any])(nil)
	_ inbox.OnRetry   = (*process[any])(nil)
	_ inbox.OnPause   = (*process[any])(nil)
)

func (p *process[Tx]) consumer(batchSize int, hooks ...inbox.Hook) (*inbox.Consumer[Tx], error) {
	cfg := p.r.c.consumerConfig(batchSize, hooks...)
	store := &chaosStore[Tx]{Store: p.r.world.Store, p: p}
	if p.r.world.Bulk != nil {
		return inbox.NewBulk(store, chaosConsumer, p.r.c.key, p.handle, cfg)
	}
	return inbox.New(store, chaosConsumer, p.r.c.key, func(ctx context.Context, tx Tx, m *inbox.Message) error {
		return p.handle(ctx, tx, []*inbox.Message{m})
	}, cfg)
}

// OnOutcome notes what became of a message.
func (p *process[Tx]) OnOutcome(_ context.Context, e inbox.OutcomeEvent) {
	reason := string(e.Reason)
	if e.Err != nil {
		reason += ": " + firstLine(e.Err.Error())
	}
	if i := p.r.index(e.Message.ID); i >= 0 {
		p.r.note("%s: %s%s", p.r.c.names[i], e.Outcome, because(reason))
	}
	p.r.settled(e.Message.ID, e.Tenant+e.MessageKey, e.Outcome, reason)
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// OnRetry stops a process that would wait before it goes on: the next one need
// not.
func (p *process[Tx]) OnRetry(_ context.Context, e inbox.RetryEvent) {
	if e.Delay <= 0 {
		return
	}
	if i := p.r.index(e.Message.ID); i >= 0 && e.Counted {
		p.r.mu.Lock()
		p.r.waits[i]++
		p.r.mu.Unlock()
	}
	p.stop()
}

// OnPause stops a process that waits for the database.
func (p *process[Tx]) OnPause(_ context.Context, e inbox.PauseEvent) {
	if e.Paused {
		p.stop()
	}
}

// crash lets the process die: what it has open is rolled back by the database,
// what it says from now on is heard by nobody.
func (p *process[Tx]) crash() {
	p.dead.Store(true)
	p.source.Revoke()
	p.stop()
}

// handle runs the user's handler, with what goes wrong around it.
func (p *process[Tx]) handle(ctx context.Context, tx Tx, ms []*inbox.Message) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	b := p.batch
	run := &chaosRun[Tx]{batch: b, ctx: ctx, cancel: cancel}
	for _, m := range ms {
		run.messages = append(run.messages, p.r.index(m.ID))
	}
	if p.faults {
		run.faults = p.r.due(atRun, run.messages)
	}
	b.begin(run)
	run.before()
	var err error
	pprof.Do(ctx, pprof.Labels(handlerLabel, p.r.label), func(ctx context.Context) {
		if bulk := p.r.world.Bulk; bulk != nil {
			err = bulk(ctx, tx, ms)
			return
		}
		err = p.r.world.Handler(ctx, tx, ms[0])
	})
	p.r.saw(run)
	p.r.note("%s: handler of %s, attempt %d%s", p.name, p.r.list(run.messages), ms[0].Attempt, failing(err))
	if slices.Contains(run.messages, p.r.s.poison) {
		return inbox.Permanent(errPoison)
	}
	return run.after(err)
}

// reach tells who asks how far the process has come.
func (p *process[Tx]) reach(at progress) {
	select {
	case p.progress <- at:
	default: // Nobody asks, or not as quickly.
	}
}

func failing(err error) string {
	if err == nil {
		return ""
	}
	return ", failed: " + firstLine(err.Error())
}

// list names messages by their numbers.
func (r *round[Tx]) list(messages []int) string {
	if len(messages) == 1 && messages[0] >= 0 {
		return r.c.names[messages[0]]
	}
	numbers := make([]string, len(messages))
	for i, m := range messages {
		numbers[i] = fmt.Sprint(m + 1)
	}
	return "messages " + strings.Join(numbers, ", ")
}

// saw notes how many statements a run sent.
func (r *round[Tx]) saw(run *chaosRun[Tx]) {
	run.mu.Lock()
	n := run.statements
	run.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, i := range run.messages {
		r.c.statements[i] = max(r.c.statements[i], n)
	}
}

// chaosRun is one run of the handler.
type chaosRun[Tx any] struct {
	batch    *chaosBatch[Tx]
	messages []int
	faults   []fault
	ctx      context.Context // the handler's
	cancel   context.CancelFunc

	mu         sync.Mutex
	statements int
	failed     error // every further statement fails
}

// before does what is due before the handler starts.
func (run *chaosRun[Tx]) before() {
	for _, f := range run.faults {
		if f.kind == runCancel && f.statement == 0 {
			_ = run.happen(f)
		}
	}
}

// statement is called before each statement of the handler.
func (run *chaosRun[Tx]) statement() error {
	run.mu.Lock()
	run.statements++
	n, failed := run.statements, run.failed
	run.mu.Unlock()
	if failed != nil {
		return failed
	}
	for _, f := range run.faults {
		if f.statement != n {
			continue
		}
		if err := run.happen(f); err != nil {
			run.mu.Lock()
			run.failed = err
			run.mu.Unlock()
			return err
		}
	}
	return nil
}

// after does what is due when the handler has returned err, and returns what the
// loop is told.
func (run *chaosRun[Tx]) after(err error) error {
	for _, f := range run.faults {
		if f.statement > 0 || f.kind == runCancel {
			continue
		}
		if e := run.happen(f); e != nil && err == nil {
			err = e
		}
	}
	return err
}

// happen lets a fault happen and returns the error that the handler gets.
func (run *chaosRun[Tx]) happen(f fault) error {
	p := run.batch.p
	other := -1
	if f.kind == runOverlap {
		if other = p.r.overlapping(f.other, run.batch.messages); other < 0 {
			return nil
		}
	}
	if !p.r.take(f) {
		return nil
	}
	p.r.note("%s: FAULT: %s", p.name, p.r.c.describeFault(f))
	switch f.kind {
	case runError:
		return errInjected
	case runBusy:
		return errSerialize
	case runLost:
		run.batch.lose(errConnection)
		return errConnection
	case runPanic:
		panic(errInjected.Error())
	case runCancel:
		run.cancel()
	case runCrash:
		run.batch.lose(errDead)
		p.crash()
		return errDead
	case runRevoke:
		p.source.Revoke()
		<-run.ctx.Done() // The loop tells the handler.
		p.stop()
	case runOverlap:
		run.batch.join(p.r.beside(p.r.c.messages[other], overlapPatience))
	}
	return nil
}

// chaosStore puts faults between the loop and a store. The optional interfaces of
// stores are forwarded where the loop needs them to work on the right terms
// (PoolSizer), and the batch's with it (Sealer). Others are not: without Parker
// failed messages are tried again in their lanes, which a test does not have to
// wait for. TestChaosForwardsInterfaces knows them all.
type chaosStore[Tx any] struct {
	inbox.Store[Tx]
	p *process[Tx]
}

var _ inbox.PoolSizer = (*chaosStore[any])(nil)

// PoolSize implements inbox.PoolSizer.
func (s *chaosStore[Tx]) PoolSize() int {
	if sizer, ok := s.Store.(inbox.PoolSizer); ok {
		return sizer.PoolSize()
	}
	return 0
}

// Classify implements inbox.Store.
func (s *chaosStore[Tx]) Classify(err error) inbox.Class {
	var injected *injectedError
	if errors.As(err, &injected) {
		return injected.class
	}
	return s.Store.Classify(err)
}

// Begin implements inbox.Store.
func (s *chaosStore[Tx]) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[Tx], error) {
	p := s.p
	b := &chaosBatch[Tx]{p: p}
	for _, c := range claims {
		b.messages = append(b.messages, p.r.index(c.MessageID))
	}
	if p.faults {
		if err := p.source.begun(ctx); err != nil {
			return nil, err
		}
		if p.dead.Load() {
			return nil, errDead
		}
		if faults := p.r.due(atBegin, b.messages); len(faults) > 0 { // One is enough.
			p.r.note("%s: FAULT: %s", p.name, p.r.c.describeFault(faults[0]))
			if faults[0].kind == beginBusy {
				return nil, errSerialize
			}
			return nil, errNoDatabase
		}
	}
	o.BeforeStatement = func(string) error {
		p.reach(progressStatement)
		return b.statement()
	}
	var err error
	if b.Batch, err = s.Store.Begin(ctx, claims, o); err != nil {
		p.r.note("%s: %s: not begun: %s", p.name, p.r.list(b.messages), firstLine(err.Error()))
		return nil, err
	}
	p.batch = b
	p.reach(progressBegun)
	return b, nil
}

// chaosBatch puts faults between the loop and a batch.
type chaosBatch[Tx any] struct {
	inbox.Batch[Tx]
	p        *process[Tx]
	messages []int // by claim

	mu    sync.Mutex
	run   *chaosRun[Tx]
	lost  error // the connection is gone
	done  []int // messages whose work is to be committed
	joins []func()
}

var _ inbox.Sealer = (*chaosBatch[any])(nil)

// Sealed implements inbox.Sealer.
func (b *chaosBatch[Tx]) Sealed() bool {
	sealer, ok := b.Batch.(inbox.Sealer)
	return ok && sealer.Sealed()
}

func (b *chaosBatch[Tx]) begin(run *chaosRun[Tx]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.run = run
}

func (b *chaosBatch[Tx]) lose(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lost = err
}

// gone tells why nothing can be done with the batch any more, and gives it up.
func (b *chaosBatch[Tx]) gone() error {
	b.mu.Lock()
	lost := b.lost
	b.mu.Unlock()
	if lost == nil && b.p.dead.Load() {
		lost = errDead
	}
	if lost != nil {
		b.Batch.Abort()
	}
	return lost
}

func (b *chaosBatch[Tx]) statement() error {
	b.mu.Lock()
	run := b.run
	b.mu.Unlock()
	if run == nil {
		return nil
	}
	return run.statement()
}

// join has the batch wait for somebody at its end.
func (b *chaosBatch[Tx]) join(wait func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.joins = append(b.joins, wait)
}

// joinAll waits for those who may have waited for this transaction.
func (b *chaosBatch[Tx]) joinAll() {
	b.mu.Lock()
	joins := b.joins
	b.joins = nil
	b.mu.Unlock()
	for _, wait := range joins {
		wait()
	}
}

// Start implements inbox.Batch.
func (b *chaosBatch[Tx]) Start(ctx context.Context, i int) (tx Tx, err error) {
	if err := b.gone(); err != nil {
		return tx, err
	}
	return b.Batch.Start(ctx, i)
}

// Finish implements inbox.Batch.
func (b *chaosBatch[Tx]) Finish(ctx context.Context, i int, ok bool, result []byte) error {
	if err := b.gone(); err != nil {
		return err
	}
	err := b.Batch.Finish(ctx, i, ok, result)
	if err == nil && ok {
		b.done = append(b.done, b.messages[i])
	}
	return err
}

// Park implements inbox.Batch.
func (b *chaosBatch[Tx]) Park(ctx context.Context, i int, p inbox.Parked) error {
	if err := b.gone(); err != nil {
		return err
	}
	return b.Batch.Park(ctx, i, p)
}

// Abort implements inbox.Batch.
func (b *chaosBatch[Tx]) Abort() {
	b.Batch.Abort()
	b.joinAll()
}

// Commit implements inbox.Batch.
func (b *chaosBatch[Tx]) Commit(ctx context.Context) error {
	defer b.joinAll()
	if err := b.gone(); err != nil {
		return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, err)
	}
	p := b.p
	if !p.faults || len(b.done) == 0 {
		return b.Batch.Commit(ctx)
	}
	var last *fault
	for _, f := range p.r.due(atCommit, b.done) {
		twin := f.kind == commitTwin
		if twin && !p.r.mayRun(f.message) || !twin && last != nil { // One is enough for a COMMIT.
			continue
		}
		p.r.note("%s: FAULT: %s", p.name, p.r.c.describeFault(f))
		if twin {
			b.join(p.r.beside(again(p.r.c.messages[f.message], twinSuffix), twinPatience))
			continue
		}
		last = &f
	}
	if last == nil {
		return b.commit(ctx)
	}
	return b.commitUnder(ctx, *last)
}

func (b *chaosBatch[Tx]) commit(ctx context.Context) error {
	err := b.Batch.Commit(ctx)
	if err != nil {
		b.p.r.note("%s: %s: COMMIT failed: %s", b.p.name, b.p.r.list(b.done), firstLine(err.Error()))
		return err
	}
	b.p.r.note("%s: %s: committed", b.p.name, b.p.r.list(b.done))
	return nil
}

func (b *chaosBatch[Tx]) commitUnder(ctx context.Context, f fault) error {
	p := b.p
	switch f.kind {
	case commitLostYes, commitCrashAfter, commitRevoke:
		if err := b.commit(ctx); err != nil {
			return err
		}
	default:
		b.Batch.Abort()
	}
	switch f.kind {
	case commitRefused:
		return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, errSerialize)
	case commitRevoke:
		p.source.Revoke()
		p.stop()
		return nil
	case commitCrashBefore, commitCrashAfter:
		p.crash()
	}
	return fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, errConnection)
}

// pluggedSource is a source of which the first transaction gets one message, and
// begins when all others have been received: so what each transaction gets does
// not depend on who is faster.
type pluggedSource struct {
	*memory.Source
	queue *memory.Queue
	calls int
	plug  chan struct{} // closed when the first transaction begins
	fed   chan struct{} // closed when it may go on
	begin sync.Once
	feed  sync.Once
}

func newPluggedSource(q *memory.Queue) *pluggedSource {
	return &pluggedSource{Source: q.Source(), queue: q, plug: make(chan struct{}), fed: make(chan struct{})}
}

// Receive implements broker.Source; it is called by one goroutine.
func (s *pluggedSource) Receive(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	if s.calls++; s.calls == 1 {
		return s.Source.Receive(ctx, 1)
	}
	select {
	case <-s.plug:
	case <-ctx.Done():
	}
	if s.calls > 2 || s.queue.Stats().Ready == 0 || ctx.Err() != nil {
		s.feed.Do(func() { close(s.fed) })
	}
	return s.Source.Receive(ctx, limit)
}

// begun is called when a transaction begins.
func (s *pluggedSource) begun(ctx context.Context) error {
	s.begin.Do(func() { close(s.plug) })
	select {
	case <-s.fed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
