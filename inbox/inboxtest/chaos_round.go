package inboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
)

// fate is what became of a message in a round.
type fate string

const (
	fateNone    fate = "" // it was not there
	fateHandled fate = "handled"
	fateDead    fate = "a dead letter"
)

// roundEnd is how a round ended.
type roundEnd struct {
	state     any
	fates     []fate     // by message
	reasons   []string   // by message: of a dead letter
	firsts    []int      // by message: how often it was a first attempt
	handled   [][]string // by message: the keys under which it was handled
	conflicts []bool     // by message: a delivery of it was a conflict
	published int
	events    []string
	err       error // the round could not be ended
}

// round is one run over a fresh world under a schedule.
type round[Tx any] struct {
	c     *chaos[Tx]
	s     *schedule
	world *World[Tx]
	queue *memory.Queue
	ctx   context.Context // ends with the round's time
	label string

	mu    sync.Mutex
	end   *roundEnd
	done  []bool // by message: its work is known to be committed, or it is dead
	times map[point][]int
	fired []bool // by fault
	waits []int  // by message: retries that asked for a later time
}

// rounds counts rounds, to tell their goroutines apart.
var rounds atomic.Int64

// play runs a schedule to its end.
func (c *chaos[Tx]) play(s *schedule) *roundEnd {
	c.t.Helper()
	tb := newRoundTB(c.t)
	defer tb.close()
	n := len(c.messages)
	r := &round[Tx]{
		c: c, s: s, queue: memory.New("chaos", &memory.Config{Lane: c.laneOf}), label: fmt.Sprint(rounds.Add(1)),
		end:   &roundEnd{fates: make([]fate, n), reasons: make([]string, n), firsts: make([]int, n), handled: make([][]string, n), conflicts: make([]bool, n)},
		done:  make([]bool, n),
		times: map[point][]int{atBegin: make([]int, n), atRun: make([]int, n), atCommit: make([]int, n)},
		fired: make([]bool, len(s.faults)), waits: make([]int, n),
	}
	if r.world = c.open(tb); r.world == nil {
		r.end.err = errors.New("open returned no world")
		return r.end
	}
	if err := r.world.validate(); err != nil {
		r.end.err = err
		return r.end
	}
	if sizer, ok := r.world.Store.(inbox.PoolSizer); ok && sizer.PoolSize() == 1 {
		c.blocked = maxBlocked // There is nobody to overlap with.
	}
	var cancel context.CancelFunc
	r.ctx, cancel = context.WithTimeout(c.t.Context(), c.cfg.Timeout)
	defer cancel()
	r.publish()
	if r.end.err = r.run(); r.end.err != nil {
		return r.end
	}
	r.awaitGoroutines()
	state, err := r.world.State(r.ctx)
	if err != nil {
		r.end.err = fmt.Errorf("State: %w", err)
	}
	r.end.state = state
	return r.end
}

func (w *World[Tx]) validate() error {
	switch {
	case w.Store == nil:
		return errors.New("World.Store: must not be nil")
	case (w.Handler == nil) == (w.Bulk == nil):
		return errors.New("World: needs a Handler or a Bulk, and not both")
	case w.State == nil:
		return errors.New("World.State: must not be nil")
	}
	return nil
}

// laneOf is the lane of a published message: against the lanes, there are none.
func (c *chaos[Tx]) laneOf(m *broker.Message) string {
	if c.cfg.Faults&FaultDisorder != 0 {
		return ""
	}
	return c.cfg.Lane(m)
}

func (r *round[Tx]) publish() {
	for _, e := range r.s.entries {
		m := r.c.messages[e.message]
		if e.copy == duplicate {
			m = again(m, duplicateSuffix)
		}
		r.queue.Publish(m)
		r.end.published++
	}
}

// The suffixes of broker ids of messages that are published again.
const (
	duplicateSuffix = "-again"
	twinSuffix      = "-twin"
)

// again returns m as a producer publishes it again.
func again(m *broker.Message, suffix string) *broker.Message {
	d := *m
	d.ID += suffix
	d.Position = broker.At(m.Position.Offset + 1_000_000)
	d.Time = m.Time.Add(time.Hour)
	return &d
}

// index returns which message of the caller's has the broker id, -1 for none.
func (r *round[Tx]) index(id string) int {
	for _, suffix := range []string{"", duplicateSuffix, twinSuffix} {
		if i, ok := r.c.indexes[strings.TrimSuffix(id, suffix)]; ok {
			return i
		}
	}
	return -1
}

// run lets one process after the other work until all is acked.
func (r *round[Tx]) run() error {
	for n := 1; ; n++ {
		if n > 1 && r.world.Restart != nil {
			r.world.Restart()
		}
		p := &process[Tx]{r: r, name: fmt.Sprintf("process %d", n), faults: true}
		size := r.s.batches[(n-1)%len(r.s.batches)]
		consumer, err := p.consumer(size, p)
		if err != nil {
			return err
		}
		r.note("%s starts, with transactions of up to %d", p.name, size)
		var ctx context.Context
		ctx, p.stop = context.WithCancel(r.ctx)
		p.source = newPluggedSource(r.queue)
		ended := make(chan error, 1)
		go func() {
			ended <- consumer.Run(ctx, p.source)
			p.stop()
		}()
		left := r.queue.Drained(ctx)
		p.stop()
		if err := <-ended; err != nil {
			return fmt.Errorf("Run: %w", err)
		}
		if left == nil {
			return nil
		}
		if r.ctx.Err() != nil {
			return fmt.Errorf("the round did not end within %v: %s", r.c.cfg.Timeout, r.unfinished())
		}
		if i := slices.IndexFunc(r.waits, func(n int) bool { return n > r.c.maxAttempts() }); i >= 0 {
			return fmt.Errorf("%s fails again and again and asks for a later attempt each time: "+
				"a message must be handled in the end, or refused for good (inbox.Permanent)", r.c.names[i])
		}
	}
}

func (r *round[Tx]) unfinished() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var names []string
	for _, e := range r.s.entries {
		if r.end.fates[e.message] == fateNone && !slices.Contains(names, r.c.names[e.message]) {
			names = append(names, r.c.names[e.message])
		}
	}
	if len(names) == 0 {
		return "a message is not acked"
	}
	return "not done: " + strings.Join(names, ", ")
}

// note writes down what happened.
func (r *round[Tx]) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.end.events = append(r.end.events, fmt.Sprintf(format, args...))
}

// story returns what happened, for people.
func (e *roundEnd) story() string {
	const limit = 60
	var b strings.Builder
	b.WriteString("what happened:")
	for i, event := range e.events {
		if i == limit {
			fmt.Fprintf(&b, "\n  ... and %d more", len(e.events)-limit)
			break
		}
		fmt.Fprintf(&b, "\n  %2d. %s", i+1, event)
	}
	return b.String()
}

// settled notes what became of a message.
func (r *round[Tx]) settled(id, key string, outcome inbox.Outcome, reason string) {
	i := r.index(id)
	if i < 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.end
	switch outcome {
	case inbox.FirstAttempt, inbox.Replay:
		e.fates[i] = fateHandled
		if outcome == inbox.FirstAttempt {
			e.firsts[i]++
		}
		if !slices.Contains(e.handled[i], key) {
			e.handled[i] = append(e.handled[i], key)
		}
	case inbox.Conflict:
		e.conflicts[i] = true
		if e.fates[i] == fateNone {
			e.fates[i] = fateDead
		}
	case inbox.Dead:
		if e.fates[i] == fateHandled {
			break
		}
		e.fates[i] = fateDead
		if reason != "" {
			e.reasons[i] = reason
		}
	default:
		return
	}
	r.done[i] = true
}

// due returns the faults of a point that happen now, with the messages that are
// at it, and counts that they are there.
func (r *round[Tx]) due(at point, messages []int) []fault {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, i := range messages {
		r.times[at][i]++
	}
	var faults []fault
	for n, f := range r.s.faults {
		if !r.fired[n] && kinds[f.kind].at == at && slices.Contains(messages, f.message) && r.times[at][f.message] >= f.time {
			if at != atRun { // Those of a run are taken when it comes to them.
				r.fired[n] = true
			}
			faults = append(faults, f)
		}
	}
	return faults
}

// take takes a fault of a run; it happens once.
func (r *round[Tx]) take(f fault) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for n, other := range r.s.faults {
		if other == f && !r.fired[n] {
			r.fired[n] = true
			return true
		}
	}
	return false
}

// overlapping returns the message that can be handled beside those of a batch,
// from i on; -1 when there is none.
func (r *round[Tx]) overlapping(i int, batch []int) int {
	for n := range r.c.messages {
		if other := (i + n) % len(r.c.messages); r.c.blocked < maxBlocked && r.mayOverlap(other, batch) {
			return other
		}
	}
	return -1
}

// mayOverlap tells that a message can be handled beside those of a batch: it is
// not done, and may run.
func (r *round[Tx]) mayOverlap(i int, batch []int) bool {
	if r.s.absent[i] || i == r.s.poison || slices.Contains(batch, i) || r.c.hasDuplicate(i) {
		return false
	}
	r.mu.Lock()
	done := r.done[i]
	r.mu.Unlock()
	return !done && r.mayRun(i)
}

// mayRun tells that all before a message in its lane are done: what is in a
// transaction that is still open may come after it.
func (r *round[Tx]) mayRun(i int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	lane := r.c.lanes[i]
	if lane == "" || r.c.cfg.Faults&FaultDisorder != 0 {
		return true
	}
	for before := range i {
		if r.c.lanes[before] == lane && !r.done[before] && !r.s.absent[before] {
			return false
		}
	}
	return true
}

// beside gives a message to another process and waits until it is done, or gets no
// further beside what is open here. join waits for its end.
func (r *round[Tx]) beside(m *broker.Message, patience time.Duration) (join func()) {
	p := &process[Tx]{r: r, name: "another process", progress: make(chan progress, 1)}
	consumer, err := p.consumer(1)
	if err != nil {
		r.note("another process: %v", err)
		return func() {}
	}
	i := r.index(m.ID)
	done := make(chan struct{})
	go func() {
		defer close(done)
		result, err := consumer.Process(r.ctx, m)
		if err != nil {
			r.note("another process: %s: %s%v", r.c.names[i], prefix(string(result.Outcome), ": "), err)
			return
		}
		r.note("another process: %s: %s", r.c.names[i], result.Outcome)
		r.settled(m.ID, result.Key.Tenant+result.Key.MessageKey, result.Outcome, "")
	}()
	join = func() { <-done }
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for reached := progress(0); ; {
		select {
		case <-done:
			r.c.blocked = 0
			return join
		case at := <-p.progress:
			reached = max(reached, at)
			timer.Reset(patience)
		case <-timer.C:
			if reached < progressBegun && patience == overlapPatience {
				r.c.blocked++
			} else {
				r.c.blocked = 0
			}
			return join
		}
	}
}

// progress is how far a process has come.
type progress int

const (
	// progressBegun: it has its keys.
	progressBegun progress = iota + 1
	// progressStatement: it sends a statement.
	progressStatement
)

const (
	// overlapPatience is how long an open transaction waits for a sign of life of
	// another process, which may have to wait for this one.
	overlapPatience = 100 * time.Millisecond
	// twinPatience is the same for a twin, which does wait.
	twinPatience = time.Millisecond
	// maxBlocked is how often in a row another process may get no keys until it is
	// taken for granted that there can be only one transaction.
	maxBlocked = 3
)

func prefix(s, sep string) string {
	if s == "" {
		return ""
	}
	return s + sep
}

// handlerLabel marks the goroutines that handlers start.
const handlerLabel = "inboxtest.chaos"

// goroutinePatience is how long goroutines that handlers left behind may take.
const goroutinePatience = time.Second

// awaitGoroutines waits until the goroutines that handlers have started have
// ended, so that what they write is in the state.
func (r *round[Tx]) awaitGoroutines() {
	if !r.c.patient {
		return
	}
	for deadline := time.Now().Add(goroutinePatience); r.goroutines() > 0; {
		if time.Now().After(deadline) {
			r.c.patient = false
			r.note("goroutines that the handler started still run")
			return
		}
		<-time.After(time.Millisecond) // Nothing tells when a goroutine ends.
	}
}

// goroutines counts those that handlers of this round have started.
func (r *round[Tx]) goroutines() int {
	var profile bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		return 0
	}
	return bytes.Count(profile.Bytes(), fmt.Appendf(nil, "%q:%q", handlerLabel, r.label))
}

// roundTB is the testing.TB of a round: what it is asked to clean up is cleaned
// up at the round's end.
type roundTB struct {
	testing.TB
	ctx      context.Context
	cancel   context.CancelFunc
	mu       sync.Mutex
	cleanups []func()
}

func newRoundTB(t testing.TB) *roundTB {
	tb := &roundTB{TB: t}
	tb.ctx, tb.cancel = context.WithCancel(t.Context())
	return tb
}

// Cleanup implements testing.TB.
func (tb *roundTB) Cleanup(f func()) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	tb.cleanups = append(tb.cleanups, f)
}

// Context implements testing.TB.
func (tb *roundTB) Context() context.Context { return tb.ctx }

// TempDir implements testing.TB.
func (tb *roundTB) TempDir() string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "inboxtest")
	if err != nil {
		tb.Fatalf("inboxtest: chaos: %v", err)
		return ""
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			tb.Errorf("inboxtest: chaos: %v", err)
		}
	})
	return dir
}

// close cleans up, the last first.
func (tb *roundTB) close() {
	tb.cancel()
	for {
		tb.mu.Lock()
		n := len(tb.cleanups)
		if n == 0 {
			tb.mu.Unlock()
			return
		}
		f := tb.cleanups[n-1]
		tb.cleanups = tb.cleanups[:n-1]
		tb.mu.Unlock()
		f()
	}
}
