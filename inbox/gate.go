package inbox

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/ackafter/ackafter/inbox/internal/backoff"
)

// How the loop comes back to a database that could not be used.
const (
	gateBackoff    = 100 * time.Millisecond
	gateMaxBackoff = 5 * time.Second
	probeTimeout   = 5 * time.Second
)

// gate stops the loop while the database cannot be used. It is shut by a worker
// whose transaction failed and opened by the receiver, which probes the store
// after a growing delay.
type gate struct {
	log      *slog.Logger
	onChange func(PauseEvent)
	tripped  chan struct{} // has a value when the keeper has something to do

	mu    sync.Mutex
	trips int           // since the last commit
	since time.Time     // of the first of them
	shut  chan struct{} // closed when the gate opens; nil while it is open
	until time.Time     // of the next probe
}

func newGate(log *slog.Logger, onChange func(PauseEvent)) *gate {
	return &gate{log: log, onChange: onChange, tripped: make(chan struct{}, 1)}
}

// trip shuts the gate. Several workers may notice the same trouble: while the
// gate is shut nothing changes.
func (g *gate) trip(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut != nil {
		return
	}
	g.shut = make(chan struct{})
	g.trips++
	g.until = time.Now().Add(backoff.Delay(g.trips, gateBackoff, gateMaxBackoff))
	select {
	case g.tripped <- struct{}{}:
	default:
	}
	if g.trips > 1 {
		return
	}
	g.since = time.Now()
	g.log.Warn("inbox: the database cannot be used; receiving pauses", slog.Any("error", err))
	g.onChange(PauseEvent{Paused: true, Err: err})
}

// pass says that a transaction was committed.
func (g *gate) pass() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.trips == 0 {
		return
	}
	paused := time.Since(g.since)
	g.trips = 0
	g.open()
	g.log.Info("inbox: the database can be used again; receiving goes on", slog.Duration("paused", paused))
	g.onChange(PauseEvent{For: paused})
}

func (g *gate) open() {
	if g.shut != nil {
		close(g.shut)
		g.shut = nil
	}
}

// wait waits until the gate is open; false when ctx ended.
func (g *gate) wait(ctx context.Context) bool {
	g.mu.Lock()
	shut := g.shut
	g.mu.Unlock()
	if shut == nil {
		return ctx.Err() == nil
	}
	select {
	case <-shut:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// keep probes the gate whenever it is shut, until it opens; it returns when ctx
// ends.
func (g *gate) keep(ctx context.Context, probe func(context.Context) error) {
	for {
		select {
		case <-g.tripped:
		case <-ctx.Done():
			return
		}
		for g.probe(ctx, probe) {
		}
	}
}

// probe waits for the time of the next probe of a shut gate, and opens it when
// the probe succeeds. It reports whether another one is needed.
func (g *gate) probe(ctx context.Context, probe func(context.Context) error) bool {
	g.mu.Lock()
	shut, until := g.shut, g.until
	g.mu.Unlock()
	if shut == nil || !sleep(ctx, shut, time.Until(until)) {
		return false
	}
	pctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err := probe(pctx)
	g.mu.Lock()
	defer g.mu.Unlock()
	if err == nil {
		g.open()
		return false
	}
	g.trips++
	g.until = time.Now().Add(backoff.Delay(g.trips, gateBackoff, gateMaxBackoff))
	return true
}

// sleep waits for d, or until early is closed; false when ctx ended.
func sleep(ctx context.Context, early <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-early:
	case <-ctx.Done():
		return false
	}
	return true
}

func (g *gate) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.shut == nil
}
