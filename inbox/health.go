package inbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// stuckAfter is when a handler counts as stuck that has no HandlerTimeout.
const stuckAfter = 10 * time.Minute

// Health is how a consumer stands at one moment. Ready, Live, Problems and
// Warnings judge it; HealthHandler answers probes with it.
//
// Keys and errors may hold personal data: a Health is for the operator.
type Health struct {
	// Consumer is the consumer's name.
	Consumer string

	// State is where its Runs are. Runs is how many of them go on.
	State State
	Runs  int

	// Err is what the last Run that failed ended with; nil after a wanted stop, and
	// again when Run is called anew.
	Err error

	// Paused tells that receiving has stopped because the database cannot be used,
	// in at least one Run, PausedSince since when and PauseErr why. While nothing
	// was committed since, PausedSince is the begin of the first pause.
	Paused      bool
	PausedSince time.Time
	PauseErr    error

	// SourceErr is what the sources say is wrong with them. Nil when all is well,
	// and for sources that do not tell, see broker.HealthReporter.
	SourceErr error

	// InFlight and InFlightBytes are the deliveries that were received and are not
	// settled: waiting, in work, or between two attempts. OldestInFlight is when the
	// oldest of them was received; zero when there is none.
	InFlight       int
	InFlightBytes  int64
	OldestInFlight time.Time

	// Handlers are the runs of the handler that go on, of Run and Process, the
	// longest first.
	Handlers []RunningHandler

	// LastSuccess is when a message was last done with, whatever its outcome; zero
	// when none was.
	LastSuccess time.Time

	// LastError is when something last failed, and LastErrorKind what kind of error
	// it was; zero when nothing did.
	LastError     time.Time
	LastErrorKind ErrorKind
}

// State is where a consumer's Runs are.
type State string

// The states.
const (
	// StateIdle: Run was not called.
	StateIdle State = "idle"
	// StateStarting: Run has not seen its tables yet.
	StateStarting State = "starting"
	// StateRunning: messages are handled.
	StateRunning State = "running"
	// StateStopping: every Run that goes on is about to stop.
	StateStopping State = "stopping"
	// StateStopped: every Run has returned, the last one nil.
	StateStopped State = "stopped"
	// StateFailed: every Run has returned, and one with an error.
	StateFailed State = "failed"
)

// ErrorKind is a rough name of an error that is safe to show: it holds nothing of
// the message. The texts do not change between releases.
type ErrorKind string

// The kinds.
const (
	KindMessage     ErrorKind = "message"     // the message's or its handler's own failure
	KindPermanent   ErrorKind = "permanent"   // such a failure that no attempt can cure
	KindTimeout     ErrorKind = "timeout"     // the handler ran past its timeout
	KindPanic       ErrorKind = "panic"       // the handler panicked
	KindInFlight    ErrorKind = "in_flight"   // the key is held elsewhere
	KindContention  ErrorKind = "contention"  // serialization failure, deadlock, lock timeout
	KindUnavailable ErrorKind = "unavailable" // the database cannot be used
)

// RunningHandler is a run of the handler that goes on.
type RunningHandler struct {
	// Tenant, MessageKey, MessageID, Source and Attempt are those of its message,
	// of the first one of a bulk handler's set.
	Tenant     string
	MessageKey string
	MessageID  string
	Source     string
	Attempt    int
	// Messages is how many it handles: 1, or those of a bulk handler's set.
	Messages int
	// Since is when it was started.
	Since time.Time
	// Stuck tells that it runs past Config.HandlerTimeout, or for more than ten
	// minutes when there is none.
	Stuck bool
	// LeftBehind tells that it ignores the end of its context: its lane has gone
	// on, its transaction is gone, and what it still does is its own.
	LeftBehind bool
}

// HealthReporter tells how it stands. Every Consumer is one, whatever its
// transactions are.
type HealthReporter interface {
	// Health does not wait and may be called concurrently.
	Health() Health
}

// Live tells that the process need not be restarted: no Run has failed. A database
// or a broker that is away, and a stuck handler, are no reason to.
func (h Health) Live() bool { return h.Err == nil }

// Ready tells that messages are handled: the consumer runs and has seen its
// tables, the database can be used, and the sources have nothing to complain of.
// A consumer of which only Process is used is never ready.
func (h Health) Ready() bool { return len(h.Problems()) == 0 }

// Problems are why the consumer is not ready, in words that hold no keys and no
// errors.
func (h Health) Problems() []string {
	var all []string
	if h.Err != nil {
		all = append(all, "a Run ended with an error")
	}
	if h.State != StateRunning && h.State != StateFailed {
		all = append(all, "it is "+string(h.State))
	}
	if h.Paused {
		all = append(all, "the database cannot be used")
	}
	if h.SourceErr != nil {
		all = append(all, "a source is in trouble")
	}
	return all
}

// Warnings are what a person should look at although the consumer may be ready, in
// words that hold no keys and no errors.
func (h Health) Warnings() []string {
	stuck, left := 0, 0
	for _, r := range h.Handlers {
		switch {
		case r.LeftBehind:
			left++
		case r.Stuck:
			stuck++
		}
	}
	var all []string
	if stuck > 0 {
		all = append(all, fmt.Sprintf("%d handlers are stuck", stuck))
	}
	if left > 0 {
		all = append(all, fmt.Sprintf("%d handlers were left behind and still run", left))
	}
	return all
}

// Health returns how the consumer stands. It asks neither the database nor the
// broker.
func (c *Consumer[Tx]) Health() Health {
	h := Health{Consumer: c.name}
	bound := c.cfg.HandlerTimeout
	if bound <= 0 {
		bound = stuckAfter
	}
	c.vitals.fill(&h, bound, c.ready.Load())
	return h
}

// vitals is what a consumer knows of its own health.
type vitals struct {
	done atomic.Int64 // of the last message, in nanoseconds since 1970; 0: none

	mu       sync.Mutex
	runs     map[*vitalRun]struct{}
	ran      bool
	err      error
	handlers map[*RunningHandler]struct{}
	failed   time.Time
	kind     ErrorKind
}

// vitalRun is one Run.
type vitalRun struct {
	soft  context.Context
	gate  *gate
	queue interface {
		Held() (int, int64)
		Oldest() (time.Time, bool)
	}
	source broker.HealthReporter // nil: it does not tell
}

// enter adds a Run; the result takes it out again when it returns err.
func (v *vitals) enter(r *vitalRun) (leave func(err error)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.runs == nil {
		v.runs = map[*vitalRun]struct{}{}
	}
	v.runs[r], v.ran, v.err = struct{}{}, true, nil
	return func(err error) {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.runs, r)
		if err != nil {
			v.err = err
		}
	}
}

// handle adds a run of the handler.
func (v *vitals) handle(ms []*Message) *RunningHandler {
	m := ms[0]
	r := &RunningHandler{Tenant: m.Tenant, MessageKey: m.MessageKey, MessageID: m.ID, Source: m.Source, Attempt: m.Attempt, Messages: len(ms), Since: time.Now()}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.handlers == nil {
		v.handlers = map[*RunningHandler]struct{}{}
	}
	v.handlers[r] = struct{}{}
	return r
}

// leaveBehind marks a run of the handler whose context has ended.
func (v *vitals) leaveBehind(r *RunningHandler) {
	v.mu.Lock()
	defer v.mu.Unlock()
	r.LeftBehind = true
}

// handled takes out a run of the handler that has returned.
func (v *vitals) handled(r *RunningHandler) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.handlers, r)
}

// succeed says that a message is done with.
func (v *vitals) succeed() { v.done.Store(time.Now().UnixNano()) }

// fail says that something failed.
func (v *vitals) fail(kind ErrorKind) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failed, v.kind = time.Now(), kind
}

// fill writes down the state. Nothing of others is asked with the mutex held.
func (v *vitals) fill(h *Health, bound time.Duration, prepared bool) {
	v.mu.Lock()
	runs := make([]*vitalRun, 0, len(v.runs))
	for r := range v.runs {
		runs = append(runs, r)
	}
	ran := v.ran
	h.Err, h.LastError, h.LastErrorKind = v.err, v.failed, v.kind
	for r := range v.handlers {
		h.Handlers = append(h.Handlers, *r)
	}
	v.mu.Unlock()

	if n := v.done.Load(); n != 0 {
		h.LastSuccess = time.Unix(0, n)
	}
	slices.SortFunc(h.Handlers, func(a, b RunningHandler) int { return a.Since.Compare(b.Since) })
	for i := range h.Handlers {
		h.Handlers[i].Stuck = time.Since(h.Handlers[i].Since) > bound
	}
	h.Runs = len(runs)
	stopping := 0
	for _, r := range runs {
		if r.soft.Err() != nil {
			stopping++
		}
		r.fill(h)
	}
	switch {
	case len(runs) == 0 && !ran:
		h.State = StateIdle
	case len(runs) == 0 && h.Err != nil:
		h.State = StateFailed
	case len(runs) == 0:
		h.State = StateStopped
	case stopping == len(runs):
		h.State = StateStopping
	case !prepared:
		h.State = StateStarting
	default:
		h.State = StateRunning
	}
}

func (r *vitalRun) fill(h *Health) {
	items, bytes := r.queue.Held()
	h.InFlight += items
	h.InFlightBytes += bytes
	if since, ok := r.queue.Oldest(); ok && (h.OldestInFlight.IsZero() || since.Before(h.OldestInFlight)) {
		h.OldestInFlight = since
	}
	if paused, since, err := r.gate.state(); paused && (!h.Paused || since.Before(h.PausedSince)) {
		h.Paused, h.PausedSince, h.PauseErr = true, since, err
	}
	if r.source != nil && r.soft.Err() == nil { // One that stops has closed it.
		h.SourceErr = errors.Join(h.SourceErr, r.source.Health())
	}
}

// errorKind names an error.
func (c *Consumer[Tx]) errorKind(err error) ErrorKind {
	switch {
	case errors.Is(err, ErrHandlerTimeout):
		return KindTimeout
	case errors.Is(err, ErrPanic):
		return KindPanic
	case errors.Is(err, ErrInFlight):
		return KindInFlight
	case IsPermanent(err):
		return KindPermanent
	}
	switch c.store.Classify(err) {
	case ClassContention:
		return KindContention
	case ClassUnavailable:
		return KindUnavailable
	}
	return KindMessage
}
