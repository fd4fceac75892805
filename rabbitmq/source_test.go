package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/rabbitmq"
)

var kinds = []string{"classic", "quorum"}

// case R2: a late ack after a reconnect removes nothing.
func TestLateAckAfterACut(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			l := newLab(t).declare(kind, nil)
			n, ev := &network{}, newEvents()
			s := l.open(&rabbitmq.Config{Dial: n.dial, Hooks: []rabbitmq.Hook{ev}, MaxBackoff: 100 * time.Millisecond})
			l.publish(1, 3)
			old := l.receive(s, 3)
			l.ack(old[0])
			l.eventually("the ack is sent", func() bool { return s.Stats().Acks == 1 })
			n.cut()
			n.restore()
			for _, d := range old[1:] {
				<-d.Context().Done()
			}
			again := l.receive(s, 2)
			if err := old[1].Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
				t.Errorf("late ack: %v, want %v", err, broker.ErrLost)
			}
			if e := next(l, ev.stale); e.Epoch != 1 || e.ID != old[1].Message.ID {
				t.Errorf("stale ack %+v", e)
			}
			if e := next(l, ev.ended); e.Lost < 2 || e.Err == nil || e.AckTimeout {
				t.Errorf("ended %+v", e)
			}
			l.ack(again...)
			l.nothing(s)
			if st := s.Stats(); st.StaleAcks != 1 || st.Epochs != 2 || st.Epoch != 2 || !st.Consuming || st.InFlight != 0 {
				t.Errorf("stats %+v", st)
			}
			l.close(s)
			if n := l.ready(); n != 0 {
				t.Errorf("%d messages are left", n)
			}
		})
	}
}

// case R4 (b): the broker closes the connection.
func TestForcedClose(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("quorum", nil)
	ev := newEvents()
	s := l.open(&rabbitmq.Config{ClientID: l.queue, Hooks: []rabbitmq.Hook{ev}})
	next(l, ev.consuming)
	l.publish(0, 5)
	held := l.receive(s, 5)
	l.closeConnections(l.queue)
	if e := next(l, ev.ended); e.Lost != 5 || !strings.Contains(e.Err.Error(), "CONNECTION_FORCED") {
		t.Errorf("ended %+v", e)
	}
	began := time.Now()
	next(l, ev.consuming)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("consuming again after %v", took)
	}
	for _, d := range held {
		if d.Context().Err() == nil {
			t.Error("a delivery of the closed connection is not lost")
		}
	}
	l.ack(l.receive(s, 5)...)
	l.nothing(s)
}

// case R4 (c): the broker cannot be reached for a while, and a connection that
// swallows everything is noticed.
func TestSilentDeath(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("quorum", nil)
	n, ev := &network{}, newEvents()
	s := l.open(&rabbitmq.Config{Dial: n.dial, Hooks: []rabbitmq.Hook{ev}, Heartbeat: 2 * time.Second, RequestTimeout: time.Second})
	next(l, ev.consuming)
	l.publish(0, 3)
	l.receive(s, 3)
	began := time.Now()
	n.blackHole()
	if e := next(l, ev.ended); e.Lost != 3 {
		t.Errorf("ended %+v", e)
	}
	t.Logf("a dead connection was noticed after %v", time.Since(began))
	next(l, ev.consuming)
	l.eventually("the broker notices, too", func() bool { return s.Stats().Waiting == 3 })
	l.ack(l.receive(s, 3)...)

	n.cut()
	if e := next(l, ev.failed); e.Err == nil {
		t.Errorf("failed %+v", e)
	}
	l.eventually("it is not healthy", func() bool { return s.Health() != nil })
	for range 3 {
		next(l, ev.failed)
	}
	l.publish(3, 3)
	n.restore()
	began = time.Now()
	l.ack(l.receive(s, 3)...)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("consuming again after %v", took)
	}
	if err := s.Health(); err != nil {
		t.Error(err)
	}
}

// Close does not wait for a connection that swallows everything, and says that acks
// may not have arrived.
func TestCloseInABlackHole(t *testing.T) {
	t.Parallel()
	for _, lanes := range []rabbitmq.LaneBy{rabbitmq.LaneNone, rabbitmq.LaneQueue} {
		for _, requests := range []time.Duration{300 * time.Millisecond, 10 * time.Second} {
			t.Run(fmt.Sprintf("lanes %q, %v", lanes, requests), func(t *testing.T) {
				t.Parallel()
				l := newLab(t).declare("quorum", nil)
				n := &network{}
				s := l.open(&rabbitmq.Config{Dial: n.dial, Lanes: lanes, RequestTimeout: requests})
				l.publish(0, 3)
				ds := l.receive(s, 3)
				n.blackHole()
				l.ack(ds[0])
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				defer cancel()
				err := s.Close(ctx)
				if ctx.Err() != nil {
					t.Errorf("Close returned after its time")
				}
				if err == nil {
					t.Error("Close did not say that an ack may not have arrived")
				}
			})
		}
	}
}

// The queue is deleted: stop.
func TestDeletedQueueStops(t *testing.T) {
	t.Parallel()
	for _, kind := range append(kinds, "stream") {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			l := newLab(t).declare(kind, nil)
			ev := newEvents()
			cfg := &rabbitmq.Config{Hooks: []rabbitmq.Hook{ev}}
			if kind == "stream" {
				cfg.Stream = &rabbitmq.Stream{}
			}
			s := l.open(cfg)
			l.publish(0, 1)
			d := l.receive(s, 1)[0]
			if _, err := l.ch.QueueDelete(l.queue, false, false, false); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, err := s.Receive(ctx, 1); !errors.Is(err, rabbitmq.ErrNoQueue) {
				t.Errorf("receive: %v, want %v", err, rabbitmq.ErrNoQueue)
			}
			if e := next(l, ev.deleted); e.Queue != l.queue {
				t.Errorf("deleted %+v", e)
			}
			if err := d.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
				t.Errorf("ack: %v, want %v", err, broker.ErrLost)
			}
			if err := s.Health(); !errors.Is(err, rabbitmq.ErrNoQueue) {
				t.Errorf("health: %v", err)
			}
		})
	}
}

// The queue is deleted: wait until it is there again, or make it.
func TestDeletedQueueIsWaitedFor(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		declare *rabbitmq.Declare
	}{{"wait", nil}, {"declare", &rabbitmq.Declare{}}} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t).declare("quorum", nil)
			ev := newEvents()
			s := l.open(&rabbitmq.Config{Hooks: []rabbitmq.Hook{ev}, OnQueueDeleted: rabbitmq.QueueDeletedWait, MaxBackoff: 200 * time.Millisecond, Declare: row.declare})
			next(l, ev.consuming)
			if _, err := l.ch.QueueDelete(l.queue, false, false, false); err != nil {
				t.Fatal(err)
			}
			if row.declare == nil {
				next(l, ev.deleted)
				l.eventually("it is not healthy", func() bool { return errors.Is(s.Health(), rabbitmq.ErrNoQueue) })
				l.declare("quorum", nil)
			}
			next(l, ev.consuming)
			l.publish(0, 1)
			l.ack(l.receive(s, 1)...)
			if err := s.Health(); err != nil {
				t.Error(err)
			}
		})
	}
}

// Many acks right before the end arrive: a quorum queue of RabbitMQ 3.10 forgets
// some of them when the channel is closed too soon.
func TestManyAcksBeforeClose(t *testing.T) {
	t.Parallel()
	const n = 1000
	for round := range 3 {
		l := newLab(t).declare("quorum", nil)
		l.publish(0, n)
		s := l.open(&rabbitmq.Config{Prefetch: n})
		ds := l.receive(s, n)
		// Every second one first, in a random order: nothing can be acked together.
		slices.SortStableFunc(ds, func(a, b *broker.Delivery) int { return len(a.Message.Body)%2 - len(b.Message.Body)%2 })
		rand.Shuffle(n, func(i, j int) { ds[i], ds[j] = ds[j], ds[i] })
		l.ack(ds[:n-1]...)
		l.close(s)
		l.eventually("the channel's end gives back what was not acked", func() bool { return l.ready() > 0 })
		next := l.open(nil)
		l.ack(l.receive(next, 1)...)
		l.nothing(next)
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
}

// The broker's count of deliveries is the attempt.
func TestAttempts(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("quorum", nil)
	l.publish(0, 1)
	for attempt := range 3 {
		s := l.open(nil)
		d := l.receive(s, 1)[0]
		want := attempt + 1
		if attempt == 0 {
			want = 0 // Nothing says yet that the broker counts.
		}
		if d.Attempt != want {
			t.Errorf("attempt %d, want %d", d.Attempt, want)
		}
		l.close(s)
	}
}

// When nobody receives, nothing waits here until the broker loses its patience: it
// goes back, costs one delivery, and comes again when somebody receives.
func TestPause(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		kind  string
		lanes rabbitmq.LaneBy
	}{{"classic", rabbitmq.LaneNone}, {"quorum", rabbitmq.LaneNone}, {"quorum", rabbitmq.LaneQueue}} {
		t.Run(fmt.Sprint(row.kind, row.lanes), func(t *testing.T) {
			t.Parallel()
			l := newLab(t).declare(row.kind, nil)
			ev := newEvents()
			s := l.open(&rabbitmq.Config{AckTimeout: 2 * time.Second, Lanes: row.lanes, Hooks: []rabbitmq.Hook{ev}})
			next(l, ev.consuming)
			l.publish(0, 20)
			ds := l.receive(s, 5)
			gaveBack := make(chan struct{})
			go func() { // as the loop does, while its database is down
				defer close(gaveBack)
				for _, d := range ds {
					<-d.Recall
					if err := d.Nack(context.WithoutCancel(t.Context()), 0); err != nil {
						t.Error(err)
					}
				}
			}()
			if e := next(l, ev.pause); !e.Paused {
				t.Errorf("pause %+v", e)
			}
			<-gaveBack
			l.eventually("all is back in the queue", func() bool { return l.ready() == 20 })
			if st := s.Stats(); !st.Paused || st.Consuming || st.Waiting != 0 || st.InFlight != 0 {
				t.Errorf("stats %+v", st)
			}
			if err := s.Health(); err != nil {
				t.Errorf("health of a pause: %v", err)
			}
			got := l.receive(s, 20)
			if e := next(l, ev.pause); e.Paused || e.For <= 0 {
				t.Errorf("pause %+v", e)
			}
			for i, d := range got {
				if row.lanes != rabbitmq.LaneNone && string(d.Message.Body) != fmt.Sprintf("m%d", i) {
					t.Errorf("m%d came as number %d", i, i)
				}
				if count, ok := d.Message.Headers.Get("x-delivery-count"); row.kind == "quorum" && (!ok || string(count) != "1") {
					t.Errorf("%s came back %s times, want once", d.Message.Body, count)
				}
			}
			l.ack(got...)
			l.nothing(s)
		})
	}
}

// A slow handler is asked, and may finish; what waits behind it is not lost to the
// broker's patience; fewer messages are fetched afterwards.
func TestAges(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("quorum", nil)
	ev := newEvents()
	s := l.open(&rabbitmq.Config{AckTimeout: 2 * time.Second, Prefetch: 16, Hooks: []rabbitmq.Hook{ev}})
	next(l, ev.consuming)
	l.publish(0, 16)
	slow := l.receive(s, 1)[0]
	// Somebody receives now and then, as a busy loop does.
	for {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		ds, _ := s.Receive(ctx, 1)
		cancel()
		l.ack(ds...)
		if len(ev.recall) > 0 {
			break
		}
		<-time.After(150 * time.Millisecond)
	}
	e := next(l, ev.recall)
	if e.Recalled != 1 || e.Returned == 0 {
		t.Errorf("recall %+v, want the slow one to be asked for, and what waited to be given back", e)
	}
	<-slow.Recall
	l.ack(slow)
	if e := next(l, ev.consuming); e.Prefetch != 8 || e.Epoch != 1 {
		t.Errorf("consuming %+v, want half of the prefetch on the same channel", e)
	}
}

// Where one consumer at a time has the queue, the other one gets nothing before
// everything is back that this one has: neither when it closes, nor when messages
// grow old.
func TestOrderOverTwoProcesses(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"classic", "quorum"} {
		for _, byAge := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, by age %v", kind, byAge), func(t *testing.T) {
				t.Parallel()
				l := newLab(t).declare(kind, amqp.Table{"x-single-active-consumer": true})
				const n = 40
				cfg := &rabbitmq.Config{AckTimeout: 4 * time.Second, Prefetch: 10, Lanes: rabbitmq.LaneQueue}
				first := l.open(cfg)
				l.publish(0, n)
				held := l.receive(first, 3)
				second := l.open(cfg)
				l.ack(held[0])
				want := 1
				if byAge {
					<-held[1].Recall
					l.nothing(second)
					l.ack(held[1:]...)
					want = 3
				} else {
					l.close(first)
				}
				for i := want; i < want+20; i++ {
					d := l.receive(second, 1)[0]
					if string(d.Message.Body) != fmt.Sprintf("m%d", i) {
						t.Fatalf("the other one got %s, want m%d", d.Message.Body, i)
					}
					l.ack(d)
				}
			})
		}
	}
}

// What is out and was not started goes back when it is asked for, and then fewer are
// fetched, too. A slow handler alone changes nothing.
func TestAgesOfWhatIsOut(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("quorum", nil)
	ev := newEvents()
	s := l.open(&rabbitmq.Config{AckTimeout: 4 * time.Second, Prefetch: 16, Hooks: []rabbitmq.Hook{ev}})
	next(l, ev.consuming)
	l.publish(0, 1)
	slow := l.receive(s, 1)[0]
	later := make(chan []*broker.Delivery)
	go func() { later <- l.receive(s, 16) }() // as a loop does
	<-slow.Recall
	if e := next(l, ev.recall); e.Recalled != 1 || e.Returned != 0 {
		t.Errorf("recall %+v, want the slow one to be asked for", e)
	}
	l.ack(slow)
	l.publish(1, 16)
	ds := <-later
	go func() { later <- l.receive(s, 1) }()
	for _, d := range ds {
		<-d.Recall
	}
	if n := len(ev.consuming); n != 0 {
		t.Errorf("it began to consume anew %d times", n)
	}
	for _, d := range ds[1:] { // The first one runs.
		if err := d.Nack(t.Context(), 0); err != nil {
			t.Error(err)
		}
	}
	if e := next(l, ev.recall); e.Recalled != 16 || e.Returned != 0 {
		t.Errorf("recall %+v, want 16 to be asked for", e)
	}
	if e := next(l, ev.recall); e.Recalled != 0 || e.Returned != 15 {
		t.Errorf("recall %+v, want 15 that were given back", e)
	}
	if e := next(l, ev.consuming); e.Prefetch != 8 || e.Epoch != 1 {
		t.Errorf("consuming %+v, want half of the prefetch on the same channel", e)
	}
	l.ack(ds[0])
	<-later
}

func TestStream(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("stream", nil)
	n, ev := &network{}, newEvents()
	l.publish(0, 10)
	s := l.open(&rabbitmq.Config{Stream: &rabbitmq.Stream{}, Dial: n.dial, Hooks: []rabbitmq.Hook{ev}, MaxBackoff: 100 * time.Millisecond})
	next(l, ev.consuming)
	got := l.receive(s, 10)
	for i, d := range got {
		m := d.Message
		if !m.Position.Known || m.Position.Offset != int64(i) || m.ID != fmt.Sprintf("%s/%d", l.queue, i) || m.Source != "rabbitmq:"+l.queue || d.Attempt != 0 {
			t.Errorf("number %d is %+v, attempt %d", i, m, d.Attempt)
		}
	}
	l.ack(got[0], got[1], got[2], got[5])
	// After a reconnect it goes on with the first that is not acked.
	n.cut()
	n.restore()
	next(l, ev.consuming)
	again := l.receive(s, 7)
	if names := bodies(again); names[0] != "m3" || names[6] != "m9" {
		t.Errorf("received %v again, want m3 to m9", names)
	}
	l.ack(again...)
	if offset, known := s.Position(); !known || offset != 10 {
		t.Errorf("position %d, %v, want 10", offset, known)
	}
	l.publish(10, 1)
	l.ack(l.receive(s, 1)...)

	for _, row := range []struct {
		name   string
		stream rabbitmq.Stream
		want   []string
	}{
		{"offset", rabbitmq.Stream{Start: rabbitmq.StreamOffset, Offset: 8}, []string{"m8", "m9", "m10"}},
		{"timestamp", rabbitmq.Stream{Start: rabbitmq.StreamTimestamp, Time: time.Now().Add(-time.Hour)}, []string{"m0", "m1"}},
		{"last", rabbitmq.Stream{Start: rabbitmq.StreamLast}, []string{"m10"}},
		{"next", rabbitmq.Stream{Start: rabbitmq.StreamNext}, []string{"new next"}},
	} {
		s := l.open(&rabbitmq.Config{Stream: &row.stream})
		if row.name == "next" {
			if err := l.ch.PublishWithContext(t.Context(), "", l.queue, false, false, amqp.Publishing{Body: []byte("new next")}); err != nil {
				t.Fatal(err)
			}
		}
		if got := bodies(l.receive(s, len(row.want))); !slices.Equal(got, row.want) {
			t.Errorf("%s: received %v, want %v", row.name, got, row.want)
		}
		l.close(s)
	}
}

// What was written while a source that began at the end had no connection is not
// skipped.
func TestStreamNextSkipsNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("stream", nil)
	n, ev := &network{}, newEvents()
	s := l.open(&rabbitmq.Config{Stream: &rabbitmq.Stream{Start: rabbitmq.StreamNext}, Dial: n.dial, Hooks: []rabbitmq.Hook{ev}, MaxBackoff: 100 * time.Millisecond})
	next(l, ev.consuming)
	n.cut()
	next(l, ev.failed)
	l.publish(0, 3)
	n.restore()
	if got := bodies(l.receive(s, 3)); !slices.Equal(got, []string{"m0", "m1", "m2"}) {
		t.Errorf("received %v", got)
	}
}

// A message as another client sends it.
func TestMessageThroughTheBroker(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("quorum", nil)
	when := time.Now().Truncate(time.Second)
	err := l.ch.PublishWithContext(t.Context(), "", l.queue, true, false, amqp.Publishing{
		MessageId: "id-1", CorrelationId: "corr", ContentType: "application/json", Type: "order.paid", Timestamp: when, AppId: "shop", UserId: "guest",
		Headers: amqp.Table{"n": int64(42), "list": []any{int32(1), "two"}}, Body: []byte(`{"orderId":"A1"}`),
	})
	if err != nil {
		t.Fatal(err)
	}
	s := l.open(nil)
	m := l.receive(s, 1)[0].Message
	if m.ID != "id-1" || string(m.Key) != l.queue || !m.Time.Equal(when) {
		t.Errorf("message %+v", m)
	}
	for name, want := range map[string]string{
		"correlation-id": "corr", "content-type": "application/json", "type": "order.paid", "app-id": "shop", "user-id": "guest", "n": "42", "list": `[1,"two"]`,
	} {
		if got, ok := m.Headers.Get(name); !ok || string(got) != want {
			t.Errorf("header %s is %q, want %q", name, got, want)
		}
	}
}

// Access that is taken away is tried again for a while; Health says so.
func TestAccessRevoked(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	address := l.user(".*", ".*", ".*")
	ev := newEvents()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := rabbitmq.Open(ctx, []string{address}, l.queue, &rabbitmq.Config{ClientID: l.queue, Hooks: []rabbitmq.Hook{ev}, Logger: quiet(), MaxBackoff: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer l.close(s)
	next(l, ev.consuming)
	permissions := "permissions/%2F/" + l.queue + "-user"
	l.api(http.MethodPut, permissions, map[string]string{"configure": "^$", "write": "^$", "read": "^$"}, nil)
	l.closeConnections(l.queue)
	l.eventually("it is forbidden", func() bool { return errors.Is(s.Health(), rabbitmq.ErrForbidden) })
	l.api(http.MethodPut, permissions, map[string]string{"configure": ".*", "write": ".*", "read": ".*"}, nil)
	next(l, ev.consuming)
	if err := s.Health(); err != nil {
		t.Error(err)
	}
}

func TestReceiveLimit(t *testing.T) {
	t.Parallel()
	l := newLab(t).declare("classic", nil)
	s := l.open(nil)
	if _, err := s.Receive(t.Context(), 0); err == nil || !strings.Contains(err.Error(), "limit is 0") {
		t.Errorf("limit 0: %v", err)
	}
	l.publish(0, 1)
	l.ack(l.receive(s, 1)...)
}

// case R4: however often the connection breaks, nothing is left of it.
func TestReconnectsLeaveNothing(t *testing.T) { //nolint:paralleltest // it counts all goroutines
	l := newLab(t).declare("quorum", nil)
	n, ev := &network{}, newEvents()
	l.open(&rabbitmq.Config{Dial: n.dial, Hooks: []rabbitmq.Hook{ev}, MaxBackoff: 100 * time.Millisecond})
	next(l, ev.consuming)
	baseline := runtime.NumGoroutine()
	for range 10 {
		n.cut()
		next(l, ev.ended)
		n.restore()
		next(l, ev.consuming)
	}
	l.eventually("the goroutines are back at the baseline", func() bool { return runtime.NumGoroutine() <= baseline })
}

// The broker's own timeout, lowered: a handler that is slower loses its delivery and
// is told why; the others are not touched.
func TestAckTimeoutOfTheBroker(t *testing.T) { //nolint:paralleltest // it changes the broker for a moment
	l := newLab(t).declare("quorum", nil)
	ev := newEvents()
	// Channels that are opened now have it.
	l.ctl("eval", "application:set_env(rabbit, consumer_timeout, 3000).")
	s := l.open(&rabbitmq.Config{Hooks: []rabbitmq.Hook{ev}}) // AckTimeout says 30 min
	l.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
	next(l, ev.consuming)
	l.publish(0, 2)
	ds := l.receive(s, 2)
	l.ack(ds[1])
	e := next(l, ev.ended)
	if !e.AckTimeout || e.Lost != 1 {
		t.Errorf("ended %+v, want the ack timeout", e)
	}
	<-ds[0].Context().Done()
	if err := s.Health(); err == nil || !strings.Contains(err.Error(), "ack timeout") {
		t.Errorf("health: %v", err)
	}
	if st := s.Stats(); st.AckTimeouts != 1 {
		t.Errorf("stats %+v", st)
	}
	again := l.receive(s, 1)
	if names := bodies(again); names[0] != bodies(ds)[0] {
		t.Errorf("received %v", names)
	}
	l.ack(again...)
}

// With the right AckTimeout, deep prefetch and handlers that are slow together, the
// broker's timeout never strikes.
func TestAckTimeoutIsAvoided(t *testing.T) { //nolint:paralleltest // it changes the broker for a moment
	l := newLab(t).declare("quorum", nil)
	l.ctl("eval", "application:set_env(rabbit, consumer_timeout, 6000).")
	s := l.open(&rabbitmq.Config{AckTimeout: 6 * time.Second, Prefetch: 100})
	l.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
	const n = 60
	l.publish(0, n)
	seen := map[string]int{}
	for len(seen) < n {
		d := l.receive(s, 1)[0]
		<-time.After(150 * time.Millisecond) // the handler: all together 9 s
		if err := d.Ack(t.Context()); err == nil {
			seen[string(d.Message.Body)]++
		}
	}
	for name, times := range seen {
		if times != 1 {
			t.Errorf("%s was acked %d times", name, times)
		}
	}
	if st := s.Stats(); st.AckTimeouts != 0 || st.Lost != 0 || st.Returned == 0 {
		t.Errorf("stats %+v, want messages that were given back and none that was lost", st)
	}
}
