package memory

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
)

func TestReceiveRefusesLimitBelowOne(t *testing.T) {
	t.Parallel()
	s := New("orders", nil).Source()
	for _, limit := range []int{0, -1} {
		_, err := s.Receive(t.Context(), limit)
		if err == nil || !strings.Contains(err.Error(), "must be at least 1") {
			t.Errorf("limit %d: got the error %v", limit, err)
		}
	}
}

func TestReceiveKeepsTheOrderOfTheQueue(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	q.Publish(m("a", "a1"), m("", "n1"), m("b", "b1"), m("a", "a2"), m("", "n2"), m("b", "b2"))
	s := q.Source()
	got := want(t, s, "a1", "n1", "b1", "a2", "n2", "b2")
	for i, lane := range []string{"orders/a", "", "orders/b", "orders/a", "", "orders/b"} {
		if got[i].Lane != lane {
			t.Errorf("%s has the lane %q, want %q", got[i].Message.Body, got[i].Lane, lane)
		}
	}
}

func TestNackDelayIsExact(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New("orders", nil)
		q.Publish(m("a", "a1"), m("b", "b1"), m("", "n1"))
		s := q.Source()
		got := want(t, s, "a1", "b1", "n1")
		start := time.Now()
		nack(t, 3*time.Second, got[0])
		nack(t, time.Second, got[1])
		nack(t, -time.Second, got[2])
		for _, step := range []struct {
			body string
			at   time.Duration
		}{{"n1", 0}, {"b1", time.Second}, {"a1", 3 * time.Second}} {
			d := want(t, s, step.body)
			if at := time.Since(start); at != step.at || d[0].Attempt != 2 {
				t.Errorf("%s came at %v with attempt %d, want at %v with attempt 2", step.body, at, d[0].Attempt, step.at)
			}
		}
	})
}

// A lane is not handed out past its message that waits; others are.
func TestDelayedMessageHoldsItsLane(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New("orders", nil)
		q.Publish(m("a", "a1"), m("a", "a2"))
		s, other := q.Source(), q.Source()
		got := want(t, s, "a1", "a2")
		nack(t, time.Minute, got[0])
		nack(t, 0, got[1])
		q.Publish(m("a", "a3"), m("b", "b1"))
		want(t, other, "b1")
		nothing(t, other)
		nothing(t, s)
		<-time.After(time.Minute)
		want(t, other, "a1", "a2", "a3")
	})
}

// What was given back goes out again only when the later ones of its lane are
// settled: whoever holds a lane holds it in order.
func TestLaterOnesAreSettledFirst(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	q.Publish(m("a", "a1"), m("a", "a2"), m("a", "a3"))
	s := q.Source()
	got := want(t, s, "a1", "a2", "a3")
	nack(t, 0, got[0])
	nothing(t, s)
	ack(t, got[2])
	nothing(t, s)
	nack(t, 0, got[1])
	want(t, s, "a1", "a2")
}

func TestLaneIsWithOneSource(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	q.Publish(m("a", "a1"), m("b", "b1"), m("a", "a2"))
	one, two := q.Source(), q.Source()
	first, err := one.Receive(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	want(t, two, "b1")
	nothing(t, two)
	ack(t, first...)
	want(t, two, "a2")
	nothing(t, one)
}

func TestSourceGoesOnWithItsLane(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	q.Publish(m("a", "a1"), m("a", "a2"))
	one, two := q.Source(), q.Source()
	if _, err := one.Receive(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	nothing(t, two)
	want(t, one, "a2")
}

func TestPublishWakesReceivers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New("orders", nil)
		go func() {
			<-time.After(time.Second)
			q.Publish(m("a", "a1"))
		}()
		want(t, q.Source(), "a1")
	})
}

// A source that waits for a lane is woken when the lane is free.
func TestFreeLaneWakesReceivers(t *testing.T) {
	t.Parallel()
	for name, free := range map[string]func(t *testing.T, s *Source, d *broker.Delivery){
		"ack":    func(t *testing.T, _ *Source, d *broker.Delivery) { ack(t, d) },
		"close":  func(t *testing.T, s *Source, _ *broker.Delivery) { is(t, s.Close(t.Context()), nil) },
		"revoke": func(_ *testing.T, s *Source, _ *broker.Delivery) { s.Revoke() },
		"nack":   func(t *testing.T, _ *Source, d *broker.Delivery) { nack(t, 0, d) },
		"late ctx": func(t *testing.T, _ *Source, d *broker.Delivery) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			is(t, d.Ack(ctx), context.Canceled)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				q := New("orders", nil)
				q.Publish(m("a", "a1"), m("a", "a2"))
				one, two := q.Source(), q.Source()
				first, err := one.Receive(t.Context(), 1)
				if err != nil {
					t.Fatal(err)
				}
				woken := make(chan []*broker.Delivery, 1)
				go func() {
					deliveries, err := two.Receive(t.Context(), 1)
					is(t, err, nil)
					woken <- deliveries
				}()
				synctest.Wait()
				if len(woken) > 0 {
					t.Fatal("the lane was handed to a second source")
				}
				free(t, one, first[0])
				if got := <-woken; len(got) != 1 {
					t.Errorf("received %d deliveries, want 1", len(got))
				}
			})
		})
	}
}

func TestLanesByConfig(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		config *Config
		want   []string // what can be had beside a message of key a that is out elsewhere
	}{
		{"default", nil, []string{"b1", "n1"}},
		{"empty config", &Config{}, []string{"b1", "n1"}},
		{"by key", &Config{Lane: ByKey}, []string{"b1", "n1"}},
		{"unordered", &Config{Lane: Unordered}, []string{"b1", "a2", "n1"}},
		{"one lane", &Config{Lane: OneLane}, nil},
		{"own", &Config{Lane: func(m *broker.Message) string { return string(m.Body[1:]) }}, []string{"a2"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			q := New("orders", tt.config)
			q.Publish(m("a", "a1"), m("b", "b1"), m("a", "a2"), m("", "n1"))
			one, two := q.Source(), q.Source()
			if _, err := one.Receive(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			if tt.want == nil {
				nothing(t, two)
				return
			}
			want(t, two, tt.want...)
		})
	}
}

func TestCloseGivesBackInOrder(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	q.Publish(m("a", "a1"), m("b", "b1"), m("a", "a2"), m("a", "a3"))
	one, two := q.Source(), q.Source()
	got := want(t, one, "a1", "b1", "a2", "a3")
	ack(t, got[0])
	is(t, one.Close(t.Context()), nil)
	is(t, one.Close(t.Context()), nil)
	if len(q.sources) != 1 {
		t.Errorf("the queue knows %d sources, want the open one only", len(q.sources))
	}
	for _, d := range got[1:] {
		is(t, d.Ack(t.Context()), broker.ErrLost)
	}
	if one.Revoke() != 0 {
		t.Error("Revoke after Close took something away")
	}
	_, err := one.Receive(t.Context(), 1)
	is(t, err, broker.ErrClosed)
	for _, d := range want(t, two, "b1", "a2", "a3") {
		if d.Attempt != 2 {
			t.Errorf("%s has attempt %d, want 2", d.Message.Body, d.Attempt)
		}
	}
}

// A context of the caller that has ended fails the settlement, and the message
// is not stuck.
func TestSettlingWithAnEndedContext(t *testing.T) {
	t.Parallel()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, settle := range map[string]func(d *broker.Delivery) error{
		"ack":  func(d *broker.Delivery) error { return d.Ack(ended) },
		"nack": func(d *broker.Delivery) error { return d.Nack(ended, time.Hour) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			q := New("orders", nil)
			q.Publish(m("a", "a1"))
			s := q.Source()
			is(t, settle(want(t, s, "a1")[0]), context.Canceled)
			stats(t, q, Stats{Published: 1, Ready: 1, Delivered: 1})
			ack(t, want(t, s, "a1")...)
		})
	}
}

// The delivery looks at its context before it calls the settler; a loss in
// between must not let the ack through (case R2).
func TestLossBetweenLookAndAck(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	q.Publish(m("a", "a1"))
	s := q.Source()
	hold := s.hold
	d := want(t, s, "a1")[0]
	var e *entry
	for e = range hold.out {
	}
	late := &settler{queue: q, entry: e, hold: hold}
	s.Revoke()
	want(t, s, "a1")
	is(t, late.Ack(t.Context(), d), broker.ErrLost)
	is(t, late.Nack(t.Context(), d, 0), broker.ErrLost)
	stats(t, q, Stats{Published: 1, InFlight: 1, Delivered: 2, Lost: 1, Refused: 2})
}

func TestRecall(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	q.Publish(&broker.Message{Key: []byte("a"), Body: []byte("a1")}, &broker.Message{Key: []byte("b")}, &broker.Message{Key: []byte("a"), Body: []byte("a2")})
	s := q.Source()
	ds, err := s.Receive(t.Context(), 2)
	if err != nil || len(ds) != 2 {
		t.Fatalf("received %d, %v", len(ds), err)
	}
	if n := s.Recall(); n != 2 || !ds[0].Recalled() || !ds[1].Recalled() || ds[0].Context().Err() != nil {
		t.Errorf("%d recalled, want both, and none lost", n)
	}
	if n := s.Recall(); n != 2 {
		t.Errorf("the second call says %d are out, want 2", n)
	}
	if err := ds[0].Ack(t.Context()); err != nil {
		t.Error(err)
	}
	again, err := s.Receive(t.Context(), 10)
	if err != nil || len(again) != 1 || string(again[0].Message.Body) != "a2" || again[0].Recalled() {
		t.Errorf("received %d, %v; want a2, not recalled", len(again), err)
	}
	if lost := s.Revoke(); lost != 2 || ds[1].Context().Err() == nil || again[0].Context().Err() == nil {
		t.Errorf("%d lost, want the recalled and the new one", lost)
	}
	_ = s.Close(t.Context())
	if s.Recall() != 0 {
		t.Error("a closed source recalls")
	}
}
