package integration_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/keyfunc"
)

// subscriber is a consumer that runs, on any broker.
type subscriber struct {
	witness
	cancel context.CancelFunc
	done   chan error
}

// newSubscribers makes a database for subscribers.
func newSubscribers(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := openPool(t, servers.Postgres(t))
	if _, err := pool.Exec(t.Context(), "create table effects (consumer text not null, key text not null)"); err != nil {
		t.Fatal(err)
	}
	return pool
}

// subscribe starts an instance of a subscriber.
func subscribe(t *testing.T, pool *pgxpool.Pool, name string, from place) *subscriber {
	t.Helper()
	opening, opened := context.WithTimeout(t.Context(), time.Minute)
	defer opened()
	src, err := from.open(opening, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return subscribeTo(t, pool, name, src)
}

// subscribeTo starts an instance of a subscriber on a source.
func subscribeTo(t *testing.T, pool *pgxpool.Pool, name string, src broker.Source) *subscriber {
	t.Helper()
	s := &subscriber{done: make(chan error, 1)}
	store, err := inboxpgx.New(pool)
	if err != nil {
		t.Fatal(err)
	}
	c, err := inbox.New(store, name, keyfunc.JSON("id"), func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		_, err := tx.Exec(ctx, "insert into effects values ($1, $2)", name, m.MessageKey)
		return err
	}, &inbox.Config{Logger: slog.New(slog.DiscardHandler), Hooks: []inbox.Hook{&s.witness}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	s.cancel = cancel
	go func() { s.done <- c.Run(ctx, src) }()
	t.Cleanup(cancel)
	return s
}

// stop stops it in order.
func (s *subscriber) stop(t *testing.T) {
	t.Helper()
	s.cancel()
	select {
	case err := <-s.done:
		if err != nil {
			t.Errorf("Run = %v", err)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("Run does not end")
	}
}

// dones is how many messages were done with.
func (s *subscriber) dones() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.outcomes)
}

// wantOutcomes checks how messages ended, for all these together.
func wantOutcomes(t *testing.T, first, replays int, of ...*subscriber) {
	t.Helper()
	var gotFirst, gotReplays, all int
	for _, s := range of {
		gotFirst += s.count(inbox.FirstAttempt)
		gotReplays += s.count(inbox.Replay)
		all += s.dones()
	}
	if gotFirst != first || gotReplays != replays || all != first+replays {
		t.Errorf("%d first attempts, %d replays, %d in all; want %d and %d", gotFirst, gotReplays, all, first, replays)
	}
}

// wantEffects checks that a consumer has one effect and one inbox row for each of
// the ids m-0 to m-(n-1), and nothing else.
func wantEffects(t *testing.T, pool *pgxpool.Pool, consumer string, n int) {
	t.Helper()
	for query, want := range map[string]int{
		"select count(*) from effects where consumer = $1":                                                                       n,
		"select count(distinct key) from effects where consumer = $1":                                                            n,
		fmt.Sprintf("select count(*) from effects where consumer = $1 and substr(key, 3)::int between 0 and %d", n-1):            n,
		"select count(*) from effects e join inbox i on i.message_key = e.key and i.consumer = e.consumer where e.consumer = $1": n,
		"select count(*) from inbox where consumer = $1 and status = 'done'":                                                     n,
		"select count(*) from inbox_parked where consumer = $1":                                                                  0,
	} {
		if got := count(t, pool, query, consumer); got != want {
			t.Errorf("%s: %s = %d, want %d", consumer, query, got, want)
		}
	}
}

// ids returns bodies with the ids m-FROM to m-(TO-1).
func ids(from, to int) []string {
	bodies := make([]string, 0, to-from)
	for i := from; i < to; i++ {
		bodies = append(bodies, fmt.Sprintf(`{"id":"m-%d"}`, i))
	}
	return bodies
}

// twice returns each body and, right behind it, the same again.
func twice(bodies []string) []string {
	var all []string
	for _, b := range bodies {
		all = append(all, b, b)
	}
	return all
}

// case D4: two subscribers on one database each handle every message once, and each
// has its own replays.
func TestTwoSubscribers(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, s supply) {
		pool := newSubscribers(t)
		const n = 200
		billing, shipping := s.at("billing"), s.at("shipping")
		s.produce(twice(ids(0, n))...)
		a, b := subscribe(t, pool, "billing", billing), subscribe(t, pool, "shipping", shipping)
		for _, c := range []*subscriber{a, b} {
			eventually(t, time.Minute, "everything is done", func() bool { return c.dones() >= 2*n })
			c.stop(t)
			wantOutcomes(t, n, n, c)
		}
		wantEffects(t, pool, "billing", n)
		wantEffects(t, pool, "shipping", n)
		if rows := count(t, pool, "select count(*) from inbox"); rows != 2*n {
			t.Errorf("%d rows in the inbox, want %d", rows, 2*n)
		}
	})
}

// case D4: two instances of one subscriber, both at work, handle every message once.
// Every message comes twice, so that the instances race for it.
func TestTwoInstances(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, s supply) {
		pool := newSubscribers(t)
		from := s.at("billing")
		a, b := subscribe(t, pool, "billing", from), subscribe(t, pool, "billing", from)
		first := func() int { return a.count(inbox.FirstAttempt) + b.count(inbox.FirstAttempt) }
		const wave = 50
		n := 0
		eventually(t, 2*time.Minute, "both instances work", func() bool {
			s.produce(twice(ids(n, n+wave))...)
			n += wave
			eventually(t, time.Minute, "the wave is done", func() bool { return first() >= n && a.dones()+b.dones() >= 2*n })
			return a.count(inbox.FirstAttempt) > 0 && b.count(inbox.FirstAttempt) > 0
		})
		a.stop(t)
		b.stop(t)
		t.Logf("%d messages twice: first attempts %d and %d", n, a.count(inbox.FirstAttempt), b.count(inbox.FirstAttempt))
		// In a rebalance some may come once more.
		wantOutcomes(t, n, max(n, a.count(inbox.Replay)+b.count(inbox.Replay)), a, b)
		wantEffects(t, pool, "billing", n)
	})
}

// A subscriber moves from Kafka to another broker. Its keys are those of the
// business, so what it handled there is a replay here, whether the one has ended or
// still runs.
func TestMoveToAnotherBroker(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, next supply) { move(t, newKafkaSupply(t, 4), next) }, "kafka")
}

func move(t *testing.T, old, next supply) {
	t.Helper()
	pool := newSubscribers(t)
	const name, before, both, after = "billing", 200, 200, 50
	there, here := old.at(name), next.at(name)

	// Up to now there was the old one.
	old.produce(ids(0, before)...)
	k := subscribe(t, pool, name, there)
	eventually(t, time.Minute, "everything is done on the old one", func() bool { return k.dones() >= before })
	wantOutcomes(t, before, 0, k)

	// What was there before is published again.
	next.produce(ids(0, before)...)
	n := subscribe(t, pool, name, here)
	eventually(t, time.Minute, "everything is done on the next one", func() bool { return n.dones() >= before })
	wantOutcomes(t, 0, before, n)

	// For a while producers publish to both.
	const wave = 20
	for i := before; i < before+both; i += 2 * wave {
		old.produce(ids(i, i+wave)...)
		next.produce(ids(i, i+2*wave)...)
		old.produce(ids(i+wave, i+2*wave)...)
	}
	eventually(t, time.Minute, "everything is done on both", func() bool { return k.dones()+n.dones() >= 2*before+2*both })
	k.stop(t)
	t.Logf("of what was on both, the old one's was first %d times, the next one's %d times",
		k.count(inbox.FirstAttempt)-before, n.count(inbox.FirstAttempt))
	wantOutcomes(t, before+both, before+both, k, n)

	// From now on there is the next one.
	next.produce(ids(before+both, before+both+after)...)
	eventually(t, time.Minute, "everything is done on the next one", func() bool { return k.dones()+n.dones() >= 2*before+2*both+after })
	n.stop(t)
	wantOutcomes(t, before+both+after, before+both, k, n)
	wantEffects(t, pool, name, before+both+after)
	eventually(t, time.Minute, "nothing is left", func() bool { return next.drained(name) })
}
