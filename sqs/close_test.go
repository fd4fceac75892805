package sqs

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"
)

// What a request brings that is under way when Close is called goes back at once.
func TestCloseGivesBackWhatArrives(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders.fifo", Config{VisibilityTimeout: time.Hour, WaitTime: 20 * time.Second})
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

// A request that does not end holds Close up, and not beyond its deadline.
func TestCloseBreaksOffWhatWaits(t *testing.T) {
	t.Parallel()
	for _, deadline := range []time.Duration{5 * time.Second, 500 * time.Millisecond} {
		f := newFake()
		s := openFake(t, f, "orders", Config{WaitTime: 20 * time.Second})
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

// SQS goes on with a request whose connection is closed. So Close waits for its end:
// messages that come right after the Close are there for the next source at once.
func TestNothingIsGivenToARequestOfTheDead(t *testing.T) {
	t.Parallel()
	client := newTestClient(t, serverURL(t), nil)
	name, url := newQueue(t, client, false)
	sendBodies(t, client, url, "first")
	s, err := Open(within(t, time.Minute), name, &Config{Client: client, WaitTime: 3 * time.Second, VisibilityTimeout: time.Hour, Logger: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	ack(t, receive(t, s, 1)...)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond) // the request goes on
	defer cancel()
	if _, err := s.Receive(ctx, 10); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("receive: %v", err)
	}
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	sendBodies(t, client, url, "a", "b", "c")
	next := openOn(t, client, name, Config{})
	ack(t, receive(t, next, 3)...)
	if err := closeNow(t, next); err != nil {
		t.Error(err)
	}
	if n := left(t, client, url); n != "0 0" {
		t.Errorf("in the queue and in flight are %s messages", n)
	}
}
