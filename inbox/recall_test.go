package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// What the source wants back is given back at once, except what runs: that is
// finished and acked. Of a batch, too, nothing more is started.
func TestRecallGivesBackWhatWasNotStarted(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 2, 50} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			release := make(chan struct{})
			started := 0
			ids := []string{"a-1", "b-1", "a-2", "c-1", "b-2", "d-1"}
			r.publish(ids...)
			r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
				started++
				<-release
				return tx.Write(m.MessageKey)
			}, &inbox.Config{Workers: 1, BatchSize: batch})
			synctest.Wait()
			if n := r.src.Recall(); n != len(ids) {
				t.Fatalf("%d deliveries are out, want all %d", n, len(ids))
			}
			synctest.Wait()
			if s := r.queue.Stats(); s.Nacked != max(len(ids)-batch, 0) || started != 1 {
				t.Errorf("batch %d: %d given back and %d started while the first one runs", batch, s.Nacked, started)
			}
			release <- struct{}{}
			synctest.Wait()
			if s := r.queue.Stats(); s.Nacked != len(ids)-1 || s.Acked != 1 || s.Delivered != 2*len(ids)-1 {
				t.Errorf("batch %d: %+v, want the first acked and the others given back and delivered again", batch, s)
			}
			close(release)
			r.drain()
			if err := r.end(); err != nil {
				t.Errorf("Run = %v", err)
			}
			r.wantEffects(ids...)
			if counted, free := r.seen.counted(); counted+free != 0 || r.seen.stale != 0 {
				t.Errorf("%d counted and %d uncounted failures, %d stale acks, want none", counted, free, r.seen.stale)
			}
		})
	}
}

// Messages that wait out a delay, or for the database, are given back as well.
func TestRecallEndsWaiting(t *testing.T) {
	t.Parallel()
	t.Run("delay", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			var once sync.Once
			failed := make(chan struct{})
			r.publish("a-1", "a-2")
			r.start(func(context.Context, *fakeTx, *inbox.Message) error {
				once.Do(func() { close(failed) })
				return inbox.RetryAfter(errors.New("not now"), time.Hour)
			}, &inbox.Config{Parking: inbox.Parking{Hold: -1}})
			<-failed
			synctest.Wait()
			r.wantGivenBack(2)
		})
	})
	t.Run("pause", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			down := false
			r.store.fault = func(op string, _ []string) error {
				if down && (op == "begin" || op == "check") {
					return errDown
				}
				return nil
			}
			r.start(write, nil)
			synctest.Wait() // It has started, and waits for messages.
			down = true
			r.publish("a-1", "a-2", "b-1")
			synctest.Wait()
			r.wantGivenBack(3)
		})
	})
}

// wantGivenBack recalls everything and checks that it is given back at once, and
// unharmed.
func (r *rig) wantGivenBack(n int) {
	r.t.Helper()
	start := time.Now()
	if out := r.src.Recall(); out != n {
		r.t.Fatalf("%d deliveries are out, want %d", out, n)
	}
	synctest.Wait()
	s := r.queue.Stats()
	if s.Nacked != n || s.Lost != 0 || time.Since(start) != 0 {
		r.t.Errorf("%d of %d given back after %v, %d lost", s.Nacked, n, time.Since(start), s.Lost)
	}
	_ = r.end()
}

// Nobody waits for a recall of deliveries that were lost without one.
func TestLostIsNotWatched(t *testing.T) { //nolint:paralleltest // It counts goroutines.
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(write, nil)
		var before int
		for i := range 20 {
			r.publish(fmt.Sprintf("a-%d", i))
			r.drain()
			r.src.Revoke()
			synctest.Wait()
			if n := runtime.NumGoroutine(); i == 0 {
				before = n
			} else if n > before {
				t.Fatalf("%d goroutines after %d losses, %d after the first one", n, i+1, before)
			}
		}
		if err := r.end(); err != nil {
			t.Errorf("Run = %v", err)
		}
	})
}

// Order is kept over a recall, and every message has one effect.
func TestRecallKeepsOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var ids []string
		for i := range 200 {
			ids = append(ids, fmt.Sprintf("%c-%02d", 'a'+i%5, i/5))
		}
		r.publish(ids...)
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			<-time.After(time.Millisecond)
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 3, BatchSize: 7, MaxInFlight: 40})
		for range 30 {
			<-time.After(1500 * time.Microsecond)
			r.src.Recall()
			<-time.After(500 * time.Microsecond)
			r.src.Revoke()
		}
		r.drain()
		if err := r.end(); err != nil {
			t.Errorf("Run = %v", err)
		}
		r.wantEffects(ids...)
		effects, _, _ := r.store.state()
		for lane := range 5 {
			prefix := string(rune('a' + lane))
			var got []string
			for _, e := range effects {
				if e[:1] == prefix {
					got = append(got, e)
				}
			}
			if !slices.IsSorted(got) {
				t.Errorf("lane %s: effects %v are not in order", prefix, got)
			}
		}
	})
}
