package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

func TestRunHandlesOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var ids []string
		for i := range 100 {
			ids = append(ids, fmt.Sprintf("%d-%d", i%7, i))
		}
		r.publish(ids...)
		r.publish(ids...)
		r.start(write, nil)
		r.drain()
		r.queue.Rewind()
		r.drain()
		if err := r.end(); err != nil {
			t.Fatalf("Run = %v", err)
		}
		r.wantEffects(ids...)
		if first, replay := r.seen.count(inbox.FirstAttempt), r.seen.count(inbox.Replay); first != 100 || replay != 300 {
			t.Errorf("%d first attempts and %d replays, want 100 and 300", first, replay)
		}
		if strings.Contains(r.logs.String(), `"id"`) || strings.Contains(r.logs.String(), `{\"id`) {
			t.Error("the log holds a body")
		}
		for _, want := range []string{"consumer=billing", "key=0-0", "message_id=", "source=memory:orders", "position=", "outcome=first_attempt", "attempt=1", "duration="} {
			if !strings.Contains(r.logs.String(), want) {
				t.Errorf("the log lacks %s", want)
			}
		}
	})
}

// case S3, for any source with lanes: a failing message holds its own lane only.
func TestFailingMessageHoldsItsLane(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		failed := false
		r.publish("g1-a", "g1-b", "g2-c", "g1-d")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if m.MessageKey == "g1-a" && !failed {
				failed = true
				_ = tx.Write("rolled back")
				return errors.New("not now")
			}
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 1})
		synctest.Wait()
		r.wantEffects("g2-c")
		r.drain()
		_ = r.end()
		effects, _, _ := r.store.state()
		if want := []string{"g2-c", "g1-a", "g1-b", "g1-d"}; !slices.Equal(effects, want) {
			t.Errorf("effects %v, want %v", effects, want)
		}
		if counted, free := r.seen.counted(); counted != 1 || free != 0 {
			t.Errorf("%d counted and %d uncounted failures, want 1 and 0", counted, free)
		}
	})
}

func TestDeadLetters(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		body     string
		handler  handler
		runs     int
		reason   inbox.Reason
		attempts int
	}{
		{"attempts", `{"id":"x"}`, func(context.Context, *fakeTx, *inbox.Message) error { return errors.New("no") }, 3, inbox.ReasonAttempts, 3},
		{"permanent", `{"id":"x"}`, func(context.Context, *fakeTx, *inbox.Message) error { return inbox.Permanent(errors.New("no")) }, 1, inbox.ReasonPermanent, 1},
		{"panic", `{"id":"x"}`, func(context.Context, *fakeTx, *inbox.Message) error { panic("no") }, 3, inbox.ReasonAttempts, 3},
		{"invalid key", `{"id":""}`, write, 0, inbox.ReasonInvalidKey, 0},
		{"not JSON", `hello`, write, 0, inbox.ReasonInvalidKey, 0},
		// case D7: a swallowed SQL error is a failed attempt.
		{"swallowed", `{"id":"x"}`, func(_ context.Context, tx *fakeTx, _ *inbox.Message) error { _ = tx.Fail(); return nil }, 3, inbox.ReasonAttempts, 3},
		// case D8: a handler that ended the transaction is not run again.
		{"ended tx", `{"id":"x"}`, func(_ context.Context, tx *fakeTx, _ *inbox.Message) error { tx.End(); return nil }, 1, inbox.ReasonEffectsUnknown, 1},
		{"ended tx and failed", `{"id":"x"}`, func(_ context.Context, tx *fakeTx, _ *inbox.Message) error { tx.End(); return errors.New("no") }, 1, inbox.ReasonEffectsUnknown, 1},
		// case D11: poison that looks like infrastructure.
		{"always contention", `{"id":"x"}`, func(context.Context, *fakeTx, *inbox.Message) error { return errDeadlock }, 0, inbox.ReasonAttempts, 3},
		{"always cuts its connection", `{"id":"x"}`, func(_ context.Context, tx *fakeTx, _ *inbox.Message) error { return tx.Cut() }, 0, inbox.ReasonAttempts, 3},
		{"own context took the connection", `{"id":"x"}`, func(_ context.Context, tx *fakeTx, _ *inbox.Message) error {
			_ = tx.Cut()
			return fmt.Errorf("query: %w", context.DeadlineExceeded)
		}, 3, inbox.ReasonAttempts, 3},
		{"result that does not encode", `{"id":"x"}`, func(_ context.Context, _ *fakeTx, m *inbox.Message) error { _ = m.SetResult(func() {}); return nil }, 1, inbox.ReasonPermanent, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.publish("before-1")
				r.queue.Publish(&broker.Message{Key: []byte("lane"), Body: []byte(c.body)})
				r.queue.Publish(&broker.Message{Key: []byte("lane"), Body: []byte(`{"id":"behind"}`)})
				r.publish("after-1")
				runs := 0
				r.start(func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
					if m.MessageKey != "x" {
						return write(ctx, tx, m)
					}
					runs++
					return c.handler(ctx, tx, m)
				}, &inbox.Config{Workers: 1, Retry: inbox.Retry{MaxAttempts: 3}})
				r.drain()
				_ = r.end()
				r.wantEffects("before-1", "behind", "after-1")
				if c.runs != 0 && runs != c.runs {
					t.Errorf("the handler ran %d times, want %d", runs, c.runs)
				}
				_, rows, parked := r.store.state()
				if rows != 3 || parked != 1 {
					t.Fatalf("%d rows and %d parked, want 3 and 1\n%s", rows, parked, r.logs)
				}
				p := r.store.parked[0]
				if p.Reason != c.reason || p.Attempts != c.attempts || p.State != inbox.ParkedDead || p.Error == "" || string(p.Message.Body) != c.body {
					t.Errorf("parked as %q after %d attempts, state %q, error %q", p.Reason, p.Attempts, p.State, p.Error)
				}
				if n := r.seen.count(inbox.Dead); n != 1 {
					t.Errorf("%d dead outcomes, want 1", n)
				}
				// A duplicate of a dead letter attaches to it.
				r.queue.Rewind()
				r.start(write, nil)
				r.drain()
				_ = r.end()
				r.wantEffects("before-1", "behind", "after-1")
				if len(r.store.parked) != 1 {
					t.Errorf("%d parked rows after a redelivery, want 1", len(r.store.parked))
				}
			})
		})
	}
}

func TestHandlerTimeout(t *testing.T) {
	t.Parallel()
	for _, obeys := range []bool{true, false} {
		t.Run(fmt.Sprintf("obeys=%v", obeys), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				release := make(chan struct{})
				first := true
				r.publish("a-1", "b-1", "c-1")
				r.start(func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
					if m.MessageKey == "b-1" && first {
						first = false
						_ = tx.Write("never")
						if obeys {
							<-ctx.Done()
							return ctx.Err()
						}
						<-release
						if err := tx.Write("zombie"); err == nil {
							t.Error("a handler that was left behind can still write")
						}
						return nil
					}
					return tx.Write(m.MessageKey)
				}, &inbox.Config{Workers: 1, HandlerTimeout: 10 * time.Second})
				r.drain()
				close(release)
				_ = r.end()
				r.wantEffects("a-1", "b-1", "c-1")
				if counted, _ := r.seen.counted(); counted != 1 {
					t.Errorf("%d counted attempts, want 1", counted)
				}
				if !errors.Is(r.seen.retries[0].Err, inbox.ErrHandlerTimeout) {
					t.Errorf("retried because of %v, want ErrHandlerTimeout", r.seen.retries[0].Err)
				}
			})
		})
	}
}

// case K6: a context of somebody else is not a shutdown.
func TestForeignCancelIsAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		first := true
		r.publish("a-1")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if first {
				first = false
				return fmt.Errorf("lookup: %w", context.Canceled)
			}
			return tx.Write(m.MessageKey)
		}, nil)
		r.drain()
		_ = r.end()
		r.wantEffects("a-1")
		if counted, _ := r.seen.counted(); counted != 1 {
			t.Errorf("%d counted attempts, want 1", counted)
		}
	})
}

// case K7: shutdown is not a failure.
func TestShutdown(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		takes   time.Duration
		obeys   bool
		done    int
		maximum time.Duration
	}{
		{"longer than the grace", 5 * time.Second, true, 0, time.Second},
		{"longer than the grace, deaf", 5 * time.Second, false, 0, 4 * time.Second},
		{"ends just in time", 900 * time.Millisecond, true, 1, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.publish("a-1", "a-2", "b-1")
				started := make(chan struct{}, 9)
				r.start(func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
					_ = tx.Write(m.MessageKey)
					started <- struct{}{}
					end := ctx.Done()
					if !c.obeys {
						end = nil
					}
					select {
					case <-time.After(c.takes):
						return nil
					case <-end:
						return ctx.Err()
					}
				}, &inbox.Config{Workers: 1, ShutdownTimeout: time.Second})
				<-started
				begin := time.Now()
				if err := r.end(); err != nil {
					t.Errorf("Run = %v", err)
				}
				if took := time.Since(begin); took > c.maximum {
					t.Errorf("the stop took %v, want at most %v", took, c.maximum)
				}
				effects, rows, parked := r.store.state()
				if len(effects) != c.done || rows != c.done || parked != 0 || r.queue.Stats().Acked != c.done {
					t.Errorf("%d effects, %d rows, %d parked, %d acked; want %d, %d, 0, %d", len(effects), rows, parked, r.queue.Stats().Acked, c.done, c.done, c.done)
				}
				if counted, free := r.seen.counted(); counted+free != 0 {
					t.Errorf("%d failures reported for a shutdown", counted+free)
				}
				r.start(write, nil)
				r.drain()
				_ = r.end()
				r.wantEffects("a-1", "a-2", "b-1")
				<-time.After(c.takes) // The deaf handler ends.
			})
		})
	}
}

// case D2: while the database is down nothing is acked, nothing is dead, no
// attempt is used, there is no hot loop, and work goes on alone.
func TestDatabaseDown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var down atomic.Bool
		var begins, checks atomic.Int64
		r.store.fault = func(op string, _ []string) error {
			switch op {
			case "begin":
				begins.Add(1)
			case "check":
				checks.Add(1)
			}
			if down.Load() {
				return errDown
			}
			return nil
		}
		var ids []string
		for i := range 100 {
			ids = append(ids, fmt.Sprintf("%d-%d", i, i))
		}
		entered := make(chan struct{}, 1)
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			select {
			case entered <- struct{}{}:
			default:
			}
			if err := tx.Write(m.MessageKey); err != nil {
				return err
			}
			if down.Load() {
				return tx.Cut()
			}
			return nil
		}, nil)
		synctest.Wait()
		down.Store(true)
		begins.Store(0)
		checks.Store(0)
		r.publish(ids...)
		<-time.After(time.Minute)
		if s := r.queue.Stats(); s.Acked != 0 {
			t.Errorf("%d acked while the database is down", s.Acked)
		}
		if n := begins.Load() + checks.Load(); n > 60 {
			t.Errorf("%d calls of the database within a minute: a hot loop", n)
		}
		down.Store(false)
		up := time.Now()
		r.drain()
		if took := time.Since(up); took > 30*time.Second {
			t.Errorf("went on %v after the database was back", took)
		}
		_ = r.end()
		r.wantEffects(ids...)
		if counted, _ := r.seen.counted(); counted != 0 || len(r.store.parked) != 0 {
			t.Errorf("%d attempts counted, %d parked", counted, len(r.store.parked))
		}
		if n := strings.Count(r.logs.String(), "receiving pauses"); n != 1 {
			t.Errorf("%d lines say that receiving pauses, want 1", n)
		}
		if n := len(r.seen.pauses); n != 2 || !r.seen.pauses[0].Paused || r.seen.pauses[1].Paused {
			t.Errorf("pauses %+v, want one and its end", r.seen.pauses)
		}
	})
}

func TestDatabaseDownAtStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var down atomic.Bool
		down.Store(true)
		r.store.fault = func(string, []string) error {
			if down.Load() {
				return errDown
			}
			return nil
		}
		r.publish("a-1")
		r.start(write, nil)
		<-time.After(time.Minute)
		down.Store(false)
		r.drain()
		if err := r.end(); err != nil {
			t.Errorf("Run = %v", err)
		}
		r.wantEffects("a-1")
		down.Store(true)
		r.start(write, nil)
		<-time.After(time.Second)
		if err := r.end(); err != nil {
			t.Errorf("stopped while the database is down: Run = %v", err)
		}
	})
}

// case D9: no answer to COMMIT; the next claim tells what happened.
func TestCommitUnknown(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"commit", "committed"} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				failures := 3
				r.store.fault = func(o string, _ []string) error {
					if o == op && failures > 0 {
						failures--
						return fmt.Errorf("fake: %w: %w", inbox.ErrCommitUnknown, errDown)
					}
					return nil
				}
				r.publish("a-1", "b-1", "c-1", "a-2")
				r.start(write, &inbox.Config{Workers: 1})
				r.drain()
				_ = r.end()
				r.wantEffects("a-1", "b-1", "c-1", "a-2")
				if counted, _ := r.seen.counted(); counted != 0 {
					t.Errorf("%d attempts counted", counted)
				}
			})
		})
	}
}

// case D6: a batch that fails as a whole runs one by one; no attempt is used.
func TestBatchFailsAsAWhole(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"begin", "start", "finish", "commit"} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				failures := 1
				r.store.fault = func(o string, keys []string) error {
					if o == op && failures > 0 {
						failures--
						return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, errDeadlock)
					}
					return nil
				}
				r.publish("a-1", "a-2", "b-1", "c-1")
				r.start(write, &inbox.Config{Workers: 1})
				r.drain()
				_ = r.end()
				r.wantEffects("a-1", "a-2", "b-1", "c-1")
				if counted, _ := r.seen.counted(); counted != 0 {
					t.Errorf("%d attempts counted", counted)
				}
				if got := r.store.begins; len(got) < 4 || got[len(got)-1] != 1 {
					t.Errorf("batches of %v: want singles after the failure", got)
				}
			})
		})
	}
}

func TestKeyInFlightElsewhere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		key := inbox.Key{Consumer: "billing", MessageKey: "a-1"}
		r.store.locked[key] = true
		r.publish("a-1", "b-1")
		r.start(write, &inbox.Config{Workers: 1})
		<-time.After(time.Minute)
		r.wantEffects("b-1")
		r.store.mu.Lock()
		delete(r.store.locked, key)
		r.store.mu.Unlock()
		r.drain()
		_ = r.end()
		r.wantEffects("a-1", "b-1")
		if counted, free := r.seen.counted(); counted != 0 || free == 0 {
			t.Errorf("%d counted, %d uncounted retries", counted, free)
		}
	})
}

func TestConflict(t *testing.T) {
	t.Parallel()
	for policy, want := range map[inbox.ConflictPolicy]struct{ acked, parked int }{
		inbox.ConflictDeadLetter: {3, 1},
		inbox.ConflictSkip:       {3, 0},
		inbox.ConflictFail:       {2, 0},
	} {
		for _, workers := range []int{1, 4} {
			t.Run(fmt.Sprintf("policy=%d workers=%d", policy, workers), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t)
					r.queue.Publish(message("a-1", ""), message("b-1", ""), message("a-1", `,"other":1`))
					r.start(write, &inbox.Config{OnConflict: policy, Workers: workers})
					var err error
					if policy == inbox.ConflictFail {
						if err = <-r.done; !errors.Is(err, inbox.ErrConflict) {
							t.Errorf("Run = %v, want ErrConflict", err)
						}
					} else {
						r.drain()
						err = r.end()
						if err != nil {
							t.Errorf("Run = %v", err)
						}
					}
					r.wantEffects("a-1", "b-1")
					if s := r.queue.Stats(); s.Acked != want.acked || len(r.store.parked) != want.parked {
						t.Errorf("%d acked, %d parked; want %+v", s.Acked, len(r.store.parked), want)
					}
					if n := r.seen.count(inbox.Conflict); n != 1 {
						t.Errorf("%d conflicts seen, want 1", n)
					}
				})
			})
		}
	}
}

// case D6: one key twice in a batch is one effect and one replay, and the twin
// shares the fate of a leader that fails.
func TestTwinsInABatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		failures := 1
		r.publish("a-1", "a-1", "a-2")
		r.queue.Publish(&broker.Message{Key: []byte("other"), Body: message("a-1", "").Body})
		r.publish("other-2")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if m.MessageKey == "a-1" && failures > 0 {
				failures--
				return errors.New("not now")
			}
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 1})
		r.drain()
		_ = r.end()
		r.wantEffects("a-1", "a-2", "other-2")
		effects, _, _ := r.store.state()
		if effects[0] != "a-1" {
			t.Errorf("effects %v: lanes are not kept behind a twin of a failed message", effects)
		}
		if n := r.seen.count(inbox.Replay); n != 2 {
			t.Errorf("%d replays, want 2", n)
		}
	})
}

func TestRevokedDeliveryIsNotAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("a-1", "a-2")
		first := true
		r.start(func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
			_ = tx.Write(m.MessageKey)
			if first {
				first = false
				r.src.Revoke()
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}, nil)
		r.drain()
		_ = r.end()
		r.wantEffects("a-1", "a-2")
		if counted, free := r.seen.counted(); counted+free != 0 {
			t.Errorf("%d failures reported for a revoke", counted+free)
		}
	})
}

func TestStaleAck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("a-1")
		first := true
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if first {
				first = false
				r.src.Revoke()
			}
			return tx.Write(m.MessageKey)
		}, nil)
		r.drain()
		_ = r.end()
		r.wantEffects("a-1")
		if r.seen.stale != 1 || r.seen.count(inbox.Replay) != 1 {
			t.Errorf("%d stale acks, %d replays; want 1 and 1", r.seen.stale, r.seen.count(inbox.Replay))
		}
	})
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var times []time.Duration
		start := time.Now()
		r.publish("skip-1", "later-1")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			_ = tx.Write(m.MessageKey)
			if m.MessageKey == "skip-1" {
				return inbox.Skip("an old version")
			}
			times = append(times, time.Since(start))
			if m.Attempt == 1 {
				return inbox.RetryAfter(errors.New("busy"), 42*time.Second)
			}
			return nil
		}, nil)
		r.drain()
		_ = r.end()
		r.wantEffects("skip-1", "later-1")
		if len(times) != 2 || times[1] != 42*time.Second {
			t.Errorf("ran at %v, want the second run 42s after the first", times)
		}
		if !strings.Contains(r.logs.String(), `skipped="an old version"`) {
			t.Error("the reason for skipping is not logged")
		}
	})
}

func TestBackoffGrows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var times []time.Time
		r.publish("a-1")
		r.start(func(context.Context, *fakeTx, *inbox.Message) error {
			times = append(times, time.Now())
			return errors.New("no")
		}, &inbox.Config{Retry: inbox.Retry{MaxAttempts: 6, Backoff: time.Second, MaxBackoff: 4 * time.Second}, Parking: inbox.Parking{Hold: -1}})
		r.drain()
		_ = r.end()
		for i, full := range []time.Duration{1, 2, 4, 4, 4} {
			full *= time.Second
			if d := times[i+1].Sub(times[i]); d <= 0 || d > full {
				t.Errorf("attempt %d came after %v, want something up to %v", i+2, d, full)
			}
		}
	})
}

func TestMaxInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 50 {
			r.publish(fmt.Sprintf("%d-1", i))
		}
		release := make(chan struct{})
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			<-release
			return tx.Write(m.MessageKey)
		}, &inbox.Config{MaxInFlight: 10, HandlerTimeout: -1})
		synctest.Wait()
		if s := r.queue.Stats(); s.InFlight != 10 {
			t.Errorf("%d in flight, want 10", s.InFlight)
		}
		close(release)
		r.drain()
		_ = r.end()
	})
}

func TestBatchTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 20 {
			r.publish(fmt.Sprintf("a-%d", i))
		}
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			<-time.After(100 * time.Millisecond)
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 1, BatchTime: 250 * time.Millisecond})
		r.drain()
		_ = r.end()
		effects, _, _ := r.store.state()
		if len(effects) != 20 || !slices.IsSortedFunc(effects, func(a, b string) int {
			return slices.Index(effects, a) - slices.Index(effects, b)
		}) {
			t.Errorf("effects %v", effects)
		}
		for _, b := range r.seen.batches {
			if b.Handlers > 400*time.Millisecond {
				t.Errorf("a batch of %d was open for %v", b.Size, b.Handlers)
			}
		}
	})
}

func TestBulk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var sizes []int
		for i := range 10 {
			r.publish(fmt.Sprintf("%d-1", i))
		}
		r.publish("3-1") // a twin
		bulk := func(_ context.Context, tx *fakeTx, ms []*inbox.Message) error {
			sizes = append(sizes, len(ms))
			for _, m := range ms {
				if m.MessageKey == "7-1" && m.Attempt < 3 {
					return errors.New("poisoned set")
				}
				if err := errors.Join(tx.Write(m.MessageKey), m.SetResult(m.MessageKey)); err != nil {
					return err
				}
			}
			return nil
		}
		r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
			return inbox.NewBulk(r.store, "billing", keyfunc.JSON("id"), bulk, c)
		}, &inbox.Config{Workers: 1})
		r.drain()
		_ = r.end()
		r.wantEffects("0-1", "1-1", "2-1", "3-1", "4-1", "5-1", "6-1", "7-1", "8-1", "9-1")
		if sizes[0] != 10 {
			t.Errorf("the handler got sets of %v, want the first one of 10", sizes)
		}
		for key, row := range r.store.rows {
			if string(row.Result) != fmt.Sprintf("%q", key.MessageKey) {
				t.Errorf("result of %s is %s", key.MessageKey, row.Result)
			}
		}
		if n := r.seen.count(inbox.Replay); n != 1 {
			t.Errorf("%d replays, want 1", n)
		}
	})
}

func TestRunErrors(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want error
	}{
		{fmt.Errorf("fake: %w", inbox.ErrNoSchema), inbox.ErrNoSchema},
		{&inbox.SchemaVersionError{Have: 3, Need: 4}, inbox.ErrSchemaVersion},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.store.fault = func(op string, _ []string) error {
				if op == "check" {
					return c.err
				}
				return nil
			}
			r.start(write, nil)
			if err := <-r.done; !errors.Is(err, c.want) {
				t.Errorf("Run = %v, want %v", err, c.want)
			}
			if _, err := r.src.Receive(t.Context(), 1); !errors.Is(err, broker.ErrClosed) {
				t.Errorf("the source is not closed: %v", err)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.store.consumer["billing"] = "json:other;v1"
		r.start(write, nil)
		var changed *inbox.KeyDefinitionError
		if err := <-r.done; !errors.As(err, &changed) || changed.Stored != "json:other;v1" || changed.Now != "json:id;v1" {
			t.Errorf("Run = %v, want a KeyDefinitionError that names both", err)
		}
		r.start(write, &inbox.Config{ReplacesKey: "json:other;v1"})
		r.publish("a-1")
		r.drain()
		if err := r.end(); err != nil {
			t.Errorf("Run with the change confirmed = %v", err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(write, nil)
		synctest.Wait()
		_ = r.src.Close(t.Context())
		if err := <-r.done; err != nil {
			t.Errorf("Run over a source that was closed = %v", err)
		}
		broken := errors.New("topic is gone")
		c, err := inbox.New(r.store, "billing", keyfunc.JSON("id"), write, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Run(t.Context(), &brokenSource{receive: broken}); !errors.Is(err, broken) {
			t.Errorf("Run over a broken source = %v", err)
		}
		if err := c.Run(t.Context(), nil); err == nil {
			t.Error("Run without a source = nil")
		}
	})
}

// A source that cannot say good-bye to its broker is told of, and no failure of Run.
func TestRunLogsFailedClose(t *testing.T) {
	t.Parallel()
	var logs lockedWriter
	c, err := inbox.New(newFakeStore(), "billing", keyfunc.JSON("id"), write, &inbox.Config{Logger: slog.New(slog.NewTextHandler(&logs, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Run(t.Context(), &brokenSource{receive: broker.ErrClosed, close: errors.New("no coordinator")}); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	if got := logs.String(); !strings.Contains(got, "close source failed") || !strings.Contains(got, "no coordinator") {
		t.Errorf("the log %q does not tell of it", got)
	}
}

type brokenSource struct{ receive, close error }

func (s *brokenSource) Receive(context.Context, int) ([]*broker.Delivery, error) {
	return nil, s.receive
}
func (s *brokenSource) Close(context.Context) error { return s.close }
