package inbox

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// A probe that fails after a commit has opened the gate must not leave a trip behind.
func TestFaultGateStaleProbe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var events []PauseEvent
		g := newGate(slog.New(slog.DiscardHandler), func(e PauseEvent) { events = append(events, e) })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			g.keep(ctx, func(context.Context) error { <-time.After(time.Second); return errors.New("no connection") }, func(error) {})
			close(done)
		}()
		g.trip(errors.New("one connection broke"))
		<-time.After(500 * time.Millisecond) // the probe is under way
		g.pass()                             // another worker commits
		<-time.After(10 * time.Second)
		g.pass() // and another
		if n := len(events); n != 2 {
			t.Errorf("one pause gave %d events: %+v", n, events)
		}
		cancel()
		<-done
	})
}
