package memory

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ackafter/ackafter/broker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// m returns a message that is told by its body.
func m(key, body string) *broker.Message {
	return &broker.Message{Key: []byte(key), Body: []byte(body)}
}

// receive returns what is there, and fails when that is nothing.
func receive(t *testing.T, s *Source) []*broker.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	deliveries, err := s.Receive(ctx, 100)
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	return deliveries
}

// want receives what is there and compares it.
func want(t *testing.T, s *Source, bodies ...string) []*broker.Delivery {
	t.Helper()
	deliveries := receive(t, s)
	var got []string
	for _, d := range deliveries {
		got = append(got, string(d.Message.Body))
	}
	if !slices.Equal(got, bodies) {
		t.Fatalf("received %v, want %v", got, bodies)
	}
	return deliveries
}

// nothing checks that nothing can be received now.
func nothing(t *testing.T, s *Source) {
	t.Helper()
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	if deliveries := s.queue.take(s, 100, time.Now()); len(deliveries) > 0 {
		t.Fatalf("%s can be received, want nothing", deliveries[0].Message.Body)
	}
}

func ack(t *testing.T, deliveries ...*broker.Delivery) {
	t.Helper()
	for _, d := range deliveries {
		if err := d.Ack(t.Context()); err != nil {
			t.Fatalf("ack: %v", err)
		}
	}
}

func nack(t *testing.T, delay time.Duration, deliveries ...*broker.Delivery) {
	t.Helper()
	for _, d := range deliveries {
		if err := d.Nack(t.Context(), delay); err != nil {
			t.Fatalf("nack: %v", err)
		}
	}
}

func is(t *testing.T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("got the error %v, want %v", got, want)
	}
}

func stats(t *testing.T, q *Queue, want Stats) {
	t.Helper()
	if got := q.Stats(); got != want {
		t.Errorf("stats are\n%+v, want\n%+v", got, want)
	}
}
