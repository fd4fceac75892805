package kafka

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/internal/retry"
)

// fakeGroup is the coordinator's side of commits.
type fakeGroup struct {
	mu       sync.Mutex
	answers  []error // for the next commits; then nil
	offsets  []int64 // what was taken, of partition 0
	requests int
	failures []int
}

func newCommitter(d *desk, g *fakeGroup) *committer {
	c := &committer{
		ledger: d.ledger, interval: time.Second, backoff: retry.Backoff{Most: 5 * time.Second}, kicked: make(chan struct{}, 1),
		send: func(ctx context.Context, items []commitItem) error {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.requests++
			if err := ctx.Err(); err != nil {
				return err
			}
			var err error
			if len(g.answers) > 0 {
				err, g.answers = g.answers[0], g.answers[1:]
			}
			for i := range items {
				items[i].err = err
				if err == nil && items[i].part.id == 0 {
					g.offsets = append(g.offsets, items[i].offset)
				}
			}
			return err
		},
		failed: func(attempt int, _ error) { g.failures = append(g.failures, attempt) },
		done:   func() {},
	}
	d.ledger.kick = c.kick
	return c
}

func (g *fakeGroup) taken() []int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.offsets)
}

func ackNext(d *desk) {
	d.t.Helper()
	d.fetch(0, "k")
	for _, x := range d.offers(1) {
		d.settle(x.Ack(d.t.Context()))
	}
}

func TestCommitterByTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, Config{}, 1)
		g := &fakeGroup{}
		c := newCommitter(d, g)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- c.run(ctx, t.Context()) }()
		for range 3 {
			for range 100 {
				ackNext(d)
			}
			<-time.After(time.Second)
			synctest.Wait()
		}
		<-time.After(time.Minute)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if want := []int64{100, 200, 300}; !slices.Equal(g.offsets, want) {
			t.Errorf("committed %v, want %v: many acks make one commit", g.offsets, want)
		}
		if g.requests != 3 {
			t.Errorf("%d requests, want 3: nothing new is not committed", g.requests)
		}
	})
}

// case K2
func TestCommitterTriesAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, Config{CommitCount: 1}, 1)
		g := &fakeGroup{answers: []error{kafkago.NotCoordinatorForGroup, kafkago.RequestTimedOut, errors.New("connection reset")}}
		c := newCommitter(d, g)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- c.run(ctx, t.Context()) }()
		began := time.Now()
		ackNext(d)
		synctest.Wait()
		ackNext(d) // is not held up
		for len(g.taken()) == 0 {
			<-time.After(10 * time.Millisecond)
			synctest.Wait()
		}
		took := time.Since(began)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if want := []int64{2}; !slices.Equal(g.offsets, want) {
			t.Errorf("committed %v, want %v", g.offsets, want)
		}
		if want := []int{1, 2, 3}; !slices.Equal(g.failures, want) {
			t.Errorf("failures %v, want %v", g.failures, want)
		}
		if took < 300*time.Millisecond || took > time.Second {
			t.Errorf("three failures took %v, want a growing time between attempts", took)
		}
		if c.backoff.Tries() != 0 {
			t.Error("the time between attempts does not begin anew")
		}
	})
}

func TestCommitterGenerationOver(t *testing.T) {
	t.Parallel()
	for _, over := range []error{kafkago.IllegalGeneration, kafkago.UnknownMemberId, kafkago.FencedInstanceID} {
		synctest.Test(t, func(t *testing.T) {
			d := newDesk(t, Config{CommitCount: 1}, 1)
			g := &fakeGroup{answers: []error{over}}
			c := newCommitter(d, g)
			c.kick()
			if err := c.run(t.Context(), t.Context()); !errors.Is(err, over) {
				t.Errorf("got %v, want %v", err, over)
			}
			if g.requests != 1 {
				t.Errorf("%d requests, want 1: nobody takes the others", g.requests)
			}
		})
	}
}

func TestCommitterFlush(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, Config{}, 1)
		g := &fakeGroup{answers: []error{kafkago.RebalanceInProgress}}
		c := newCommitter(d, g)
		ackNext(d)
		if err := c.flush(t.Context(), t.Context()); err != nil {
			t.Error(err)
		}
		if want := []int64{1}; !slices.Equal(g.offsets, want) {
			t.Errorf("committed %v, want %v", g.offsets, want)
		}
		if err := c.flush(t.Context(), t.Context()); err != nil || g.requests != 2 {
			t.Errorf("flush of nothing: %v, %d requests, want 2", err, g.requests)
		}

		ackNext(d)
		g.answers = make([]error, 1000)
		for i := range g.answers {
			g.answers[i] = kafkago.GroupLoadInProgress
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		g.requests = 0
		if err := c.flush(ctx, ctx); !errors.Is(err, kafkago.GroupLoadInProgress) {
			t.Errorf("got %v, want the reason", err)
		}
		if g.requests > 30 {
			t.Errorf("%d requests in a minute", g.requests)
		}
	})
}
