package sqs

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"
)

// What a request brings that is under way when Close is called goes back at once. A
// request that was broken off would leave it hidden until VisibilityTimeout has
// passed.
func TestCloseGivesBackWhatArrives(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders.fifo", Config{VisibilityTimeout: time.Hour})
	received := make(chan error, 1)
	go func() {
		_, err := s.Receive(within(t, time.Minute), 10)
		received <- err
	}()
	f.await(t, "receive", 1)
	closed := make(chan error, 1)
	go func() { closed <- closeNow(t, s) }()
	<-s.closing.Done()
	f.send(message("a", "g"), message("b", "g"))
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if err := <-received; err == nil {
		t.Error("receive returned messages while the source was closed")
	}
	if want := []change{{"h-b", 0}, {"h-a", 0}}; !slices.Equal(f.changes, want) {
		t.Errorf("went back: %v, want %v", f.changes, want)
	}
	if st := s.Stats(); st.Received != 2 || st.Waiting != 0 {
		t.Errorf("got %+v", st)
	}
}

// A request that waits at an empty queue does not hold Close up for longer than a
// while, and not beyond its deadline.
func TestCloseBreaksOffWhatWaits(t *testing.T) {
	t.Parallel()
	for _, deadline := range []time.Duration{
		time.Minute, // a long poll of the fake has no end
		200 * time.Millisecond,
	} {
		f := newFake()
		s := openFake(t, f, "orders", Config{})
		ctx, cancel := context.WithCancel(t.Context())
		received := make(chan error, 1)
		go func() {
			_, err := s.Receive(ctx, 10)
			received <- err
		}()
		f.await(t, "receive", 1)
		cancel()
		if err := <-received; !errors.Is(err, context.Canceled) {
			t.Errorf("receive: %v", err)
		}
		closing, stop := context.WithTimeout(t.Context(), deadline)
		start := time.Now()
		if err := s.Close(closing); err != nil || closing.Err() != nil {
			t.Errorf("close: %v after %v of %v", err, time.Since(start), deadline)
		}
		stop()
	}
}
