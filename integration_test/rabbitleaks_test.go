package integration_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/rabbitmq"
)

// Opening, consuming and closing many times leaves no goroutine behind, and neither
// does a source whose connection the broker closes again and again.
func TestRabbitLeaks(t *testing.T) { //nolint:paralleltest // It counts goroutines.
	const rounds, closes, each = 50, 20, 3
	pool := newSubscribers(t)
	r := newRabbitQueue(t, servers.RabbitMQ(t), "quorum", nil, pool)
	user, address := r.login()
	n := 0
	// consume handles some messages more.
	consume := func(s *subscriber) {
		before := s.dones()
		r.publish(n, each)
		n += each
		eventually(t, time.Minute, "everything is done", func() bool { return s.dones() >= before+each })
	}
	var events *rabbitEvents
	open := func() *subscriber {
		events = &rabbitEvents{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		src, err := rabbitmq.Open(ctx, []string{address}, r.queue, &rabbitmq.Config{
			MaxBackoff: 100 * time.Millisecond, Hooks: []rabbitmq.Hook{events}, Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		return subscribeTo(t, pool, "leaks", src)
	}
	round := func() {
		s := open()
		consume(s)
		s.stop(t)
	}
	round()
	pool.Reset()
	baseline := settled(t)

	began := time.Now()
	for range rounds {
		round()
	}
	pool.Reset()
	left := settledAt(t, baseline)
	t.Logf("opened and closed %d times in %v: %d goroutines before, %d after", rounds, time.Since(began).Round(time.Millisecond), baseline, left)

	began = time.Now()
	s := open()
	consume(s)
	pool.Reset()
	running := settled(t)
	for i := range closes {
		r.closeConnectionsOf(user)
		eventually(t, time.Minute, "consuming again", func() bool { return len(noted(events, &events.consuming)) > i+1 })
		consume(s)
	}
	pool.Reset()
	t.Logf("connection closed %d times in %v: %d goroutines before, %d after", closes, time.Since(began).Round(time.Millisecond), running, settledAt(t, running))
	s.stop(t)
	pool.Reset()
	settledAt(t, left)
	wantEffects(t, pool, "leaks", n)
}
