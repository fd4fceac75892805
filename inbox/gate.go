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
	told  time.Time     // of the last line about a failed probe
	cause string        // that it told
	err   error         // why it is shut
}

// gateReminder is how often a pause that lasts is logged.
const gateReminder = time.Minute

func newGate(log *slog.Logger, onChange func(PauseEvent)) *gate {
	return &gate{log: log, onChange: onChange, tripped: make(chan struct{}, 1)}
}

// trip shuts the gate. Several workers may notice the same trouble: while the
// gate is shut nothing changes.
func (g *gate) trip(err error) {
	if !g.close(err) {
		return
	}
	g.log.Warn("inbox: the database cannot be used; receiving pauses", slog.Any("error", err))
	g.onChange(PauseEvent{Paused: true, Err: err})
}

// close shuts an open gate and reports whether that is news.
func (g *gate) close(err error) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut != nil {
		return false
	}
	g.shut = make(chan struct{})
	g.trips++
	g.err = err
	now := time.Now()
	g.until = now.Add(backoff.Delay(g.trips, gateBackoff, gateMaxBackoff))
	select {
	case g.tripped <- struct{}{}:
	default:
	}
	if g.trips > 1 {
		return false
	}
	g.since, g.told, g.cause = now, now, err.Error()
	return true
}

// pass says that a transaction was committed.
func (g *gate) pass() {
	g.mu.Lock()
	if g.trips == 0 {
		g.mu.Unlock()
		return
	}
	paused := time.Since(g.since)
	g.trips = 0
	g.open()
	g.mu.Unlock()
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
// ends. probe's error goes to failed.
func (g *gate) keep(ctx context.Context, probe func(context.Context) error, failed func(error)) {
	for {
		select {
		case <-g.tripped:
		case <-ctx.Done():
			return
		}
		for g.probe(ctx, probe, failed) {
		}
	}
}

// probe waits for the time of the next probe of a shut gate, and opens it when
// the probe succeeds. It reports whether another one is needed.
func (g *gate) probe(ctx context.Context, probe func(context.Context) error, failed func(error)) bool {
	g.mu.Lock()
	shut, until := g.shut, g.until
	g.mu.Unlock()
	if shut == nil || !sleep(ctx, shut, time.Until(until)) {
		return false
	}
	pctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err := probe(pctx)
	if err != nil && ctx.Err() == nil {
		failed(err)
	}
	return g.probed(shut, err)
}

// probed takes the answer of a probe of the gate that was shut then. It reports
// whether another one is needed.
func (g *gate) probed(shut chan struct{}, err error) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.shut != shut: // A commit has opened it meanwhile.
		return false
	case err == nil:
		g.open()
		return false
	}
	g.trips++
	g.err = err
	now := time.Now()
	g.until = now.Add(backoff.Delay(g.trips, gateBackoff, gateMaxBackoff))
	g.remind(now, err)
	return true
}

// remind writes a line when the cause of a pause changes, and now and then.
func (g *gate) remind(now time.Time, err error) {
	if text := err.Error(); text != g.cause || now.Sub(g.told) >= gateReminder {
		g.cause, g.told = text, now
		g.log.Warn("inbox: the database still cannot be used", slog.Any("error", err), slog.Duration("paused", now.Sub(g.since)))
	}
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

// state tells whether the gate is shut, since when nothing could be committed, and
// why.
func (g *gate) state() (paused bool, since time.Time, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut == nil {
		return false, time.Time{}, nil
	}
	return true, g.since, g.err
}

func (g *gate) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.shut == nil
}
