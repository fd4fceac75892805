package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// case D2: the database hangs for longer than a handler may run, or than the
// handler itself wants to wait for a statement. That costs no message an attempt.
func TestHangingDatabaseCostsNoAttempt(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 50} {
		for name, wait := range map[string]func(ctx context.Context) error{
			"handler timeout": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
			"own timeout": func(ctx context.Context) error {
				own, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				<-own.Done()
				return fmt.Errorf("insert: %w", own.Err())
			},
			"no context": func(context.Context) error { <-time.After(time.Hour); return errors.New("awake") },
		} {
			t.Run(fmt.Sprintf("%s/batch=%d", name, batch), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t)
					var hung, hangs atomic.Bool
					r.store.fault = func(op string, _ []string) error {
						if !hangs.Load() {
							return nil
						}
						<-time.After(time.Second)
						return errDown
					}
					r.publish("a-1", "b-1", "c-1")
					r.start(func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
						if m.MessageKey == "a-1" && !hung.Swap(true) {
							hangs.Store(true)
							time.AfterFunc(time.Minute, func() { hangs.Store(false) })
							return wait(ctx)
						}
						return tx.Write(m.MessageKey)
					}, &inbox.Config{Workers: 1, BatchSize: batch, HandlerTimeout: 10 * time.Second, Retry: inbox.Retry{MaxAttempts: 1}})
					r.drain()
					_ = r.end()
					<-time.After(time.Hour) // a handler that was left behind has to end
					r.wantEffects("a-1", "b-1", "c-1")
					if counted, _ := r.seen.counted(); counted != 0 || r.seen.count(inbox.Dead) != 0 {
						t.Errorf("%d counted attempts, %d dead, want none", counted, r.seen.count(inbox.Dead))
					}
				})
			})
		}
	}
}
