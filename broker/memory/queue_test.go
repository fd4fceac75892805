package memory

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
)

func TestPublishFillsWhatIsAbsent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New("orders", nil)
		given := time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC)
		q.Publish(
			&broker.Message{},
			nil,
			&broker.Message{ID: "mine", Source: "kafka:orders/3", Position: broker.At(41), Time: given},
			&broker.Message{},
		)
		start := time.Now()
		got := receive(t, q.Source())
		for i, want := range []broker.Message{
			{ID: "orders#1", Source: "memory:orders", Position: broker.At(0), Time: start},
			{ID: "orders#2", Source: "memory:orders", Position: broker.At(1), Time: start},
			{ID: "mine", Source: "kafka:orders/3", Position: broker.At(41), Time: given},
			{ID: "orders#3", Source: "memory:orders", Position: broker.At(42), Time: start},
		} {
			m := got[i].Message
			if m.ID != want.ID || m.Source != want.Source || m.Position != want.Position || !m.Time.Equal(want.Time) {
				t.Errorf("message %d is %+v, want %+v", i, m, want)
			}
		}
	})
}

func TestPublishCopies(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	mine := &broker.Message{Key: []byte("k"), Body: []byte("b"), Headers: broker.Headers{{Name: "h", Value: []byte("v")}}}
	q.Publish(mine)
	if mine.ID != "" || mine.Source != "" || mine.Position.Known || !mine.Time.IsZero() {
		t.Errorf("Publish changed the caller's message: %+v", mine)
	}
	mine.Key[0], mine.Body[0], mine.Headers[0].Value[0], mine.Headers[0].Name = 'x', 'x', 'x', "x"

	got := receive(t, q.Source())[0].Message
	if v, _ := got.Headers.Get("h"); string(got.Key) != "k" || string(got.Body) != "b" || string(v) != "v" {
		t.Errorf("the caller's later changes came through: key %q, body %q, headers %q", got.Key, got.Body, got.Headers)
	}
}

func TestDrainedWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New("orders", nil)
		if err := q.Drained(t.Context()); err != nil {
			t.Errorf("empty queue: %v", err)
		}
		q.Publish(m("a", "a1"), m("b", "b1"))
		s := q.Source()
		got := want(t, s, "a1", "b1")
		ack(t, got[0])

		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := q.Drained(short)
		is(t, err, context.DeadlineExceeded)
		if !strings.Contains(err.Error(), `"orders" to drain: 0 ready, 1 in flight`) {
			t.Errorf("the error %q does not say what is left", err)
		}

		drained := make(chan error, 1)
		go func() { drained <- q.Drained(t.Context()) }()
		synctest.Wait()
		nack(t, time.Minute, got[1])
		synctest.Wait()
		select {
		case err := <-drained:
			t.Fatalf("Drained returned %v while a nacked message waits", err)
		default:
		}
		<-time.After(time.Minute)
		ack(t, want(t, s, "b1")...)
		if err := <-drained; err != nil {
			t.Errorf("Drained: %v", err)
		}
	})
}

func TestRewindDeliversAllAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New("orders", nil)
		q.Publish(m("a", "a1"), m("b", "b1"), m("a", "a2"), m("", "n1"))
		s := q.Source()
		first := want(t, s, "a1", "b1", "a2", "n1")
		ack(t, first[0])
		nack(t, time.Hour, first[1]) // must not be late in the new pass
		nack(t, 0, first[3])
		q.Rewind()
		stats(t, q, Stats{Published: 4, Ready: 4, Delivered: 4, Acked: 1, Nacked: 2, Lost: 1, Rewinds: 1})
		is(t, first[2].Ack(t.Context()), broker.ErrLost)
		if first[2].Context().Err() == nil {
			t.Error("the context of a delivery goes on after Rewind")
		}

		second := want(t, s, "a1", "b1", "a2", "n1")
		for i := range second {
			a, b := first[i].Message, second[i].Message
			if a.ID == b.ID {
				t.Errorf("%s has the id %s in both passes", a.Body, a.ID)
			}
			if a.Position != b.Position || a.Source != b.Source || !a.Time.Equal(b.Time) || string(a.Key) != string(b.Key) {
				t.Errorf("the message was %+v and is %+v after Rewind", a, b)
			}
			if second[i].Attempt != 1 {
				t.Errorf("%s has attempt %d after Rewind, want 1", b.Body, second[i].Attempt)
			}
		}
		ack(t, second...)
		q.Publish(m("a", "a3"))
		ack(t, want(t, s, "a3")...)
		if err := q.Drained(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestRewindGivesNewIDToGivenOnes(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	q.Publish(&broker.Message{ID: "mine"})
	s := q.Source()
	ack(t, receive(t, s)...)
	q.Rewind()
	if id := receive(t, s)[0].Message.ID; id == "mine" || id == "" {
		t.Errorf("the id after Rewind is %q, want a new one", id)
	}
}

func TestRewindWakesReceivers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New("orders", nil)
		q.Publish(m("a", "a1"))
		s := q.Source()
		ack(t, want(t, s, "a1")...)
		go func() {
			<-time.After(time.Second)
			q.Rewind()
		}()
		want(t, s, "a1")
	})
}

func TestStatsFollowAMessage(t *testing.T) {
	t.Parallel()
	q := New("orders", nil)
	q.Publish(m("a", "a1"))
	stats(t, q, Stats{Published: 1, Ready: 1})
	s := q.Source()
	d := want(t, s, "a1")
	stats(t, q, Stats{Published: 1, InFlight: 1, Delivered: 1})
	nack(t, 0, d...)
	stats(t, q, Stats{Published: 1, Ready: 1, Delivered: 1, Nacked: 1})
	d = want(t, s, "a1")
	s.Revoke()
	stats(t, q, Stats{Published: 1, Ready: 1, Delivered: 2, Nacked: 1, Lost: 1})
	is(t, d[0].Nack(t.Context(), 0), broker.ErrLost)
	d = want(t, s, "a1")
	ack(t, d...)
	is(t, d[0].Ack(t.Context()), broker.ErrSettled)
	stats(t, q, Stats{Published: 1, Delivered: 3, Acked: 1, Nacked: 1, Lost: 1, Refused: 2})
}
