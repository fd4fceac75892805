package integration_test

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/integration_test/orders"
	"github.com/ackafter/ackafter/integration_test/servers"
)

// The main job: two processes of examples/kafka-orders, each killed with -9 at
// least five times at random moments, then everything once more from the
// earliest offset. The events are produced by kcat.
func TestKafkaOrdersKilled(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 0))
	stream, err := orders.Generate(orders.Config{Events: sized(10_000, 100_000), Repeats: 0.2, Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("seed %d, %d events, %d distinct keys", seed, len(stream.Lines), stream.Distinct)
	url := servers.PostgresDurable(t)
	tp := newTopic(t, servers.Kafka(t), 8)
	pool := openPool(t, url)
	start := time.Now()
	tp.kcat(stream)
	t.Logf("produced in %v", time.Since(start))

	group := tp.name
	b := newBookers(t, pool, stream.Distinct, "examples/kafka-orders",
		"-database", url, "-brokers", tp.brokers[0], "-topic", tp.name, "-group", group, "-session-timeout", "6s", "-batch", "10")
	b.start()
	start = time.Now()
	const kills = 5
	b.kill(r, kills, nil)
	eventually(t, 3*time.Minute, "lag 0 after the kills", func() bool { return b.booked() >= stream.Distinct && tp.lag(group) == 0 })
	t.Logf("consumed by two processes with %d kills in %v", kills*len(b.procs), time.Since(start))
	checkBookings(t, pool, stream.Distinct)

	b.stop()
	tp.rewind(group)
	start = time.Now()
	b.start()
	eventually(t, 3*time.Minute, "lag 0 after the replay", func() bool { return tp.lag(group) == 0 })
	t.Logf("replayed from the earliest offset in %v", time.Since(start))
	checkBookings(t, pool, stream.Distinct)
	b.stop()
}

// bookers are two processes of an example that book orders.
type bookers struct {
	t        *testing.T
	pool     *pgxpool.Pool
	distinct int // how many bookings there will be
	procs    []*process
}

func newBookers(t *testing.T, pool *pgxpool.Pool, distinct int, example string, args ...string) *bookers {
	t.Helper()
	program := build(t, "github.com/ackafter/ackafter/"+example)
	b := &bookers{t: t, pool: pool, distinct: distinct, procs: make([]*process, 2)}
	for i := range b.procs {
		p := &process{
			t: t, path: program, log: filepath.Join(t.TempDir(), fmt.Sprintf("%d.log", i)),
			env: []string{"LOG_LEVEL=WARN"}, args: args,
		}
		b.procs[i] = p
		t.Cleanup(func() { _ = p.end(syscall.SIGKILL) })
	}
	return b
}

func (b *bookers) start() {
	b.t.Helper()
	for _, p := range b.procs {
		p.start()
	}
}

// stop stops them in order.
func (b *bookers) stop() {
	b.t.Helper()
	for i, p := range b.procs {
		if err := p.end(syscall.SIGTERM); err != nil {
			b.t.Errorf("process %d stopped with %v: %s", i, err, p.tail())
		}
	}
}

func (b *bookers) booked() int {
	b.t.Helper()
	if count(b.t, b.pool, "select count(*) from pg_tables where tablename = 'bookings'") == 0 {
		return 0
	}
	return count(b.t, b.pool, "select count(*) from bookings")
}

// kill kills each process some times with -9 at random moments, and starts it again
// at once. After each kill it calls after, unless that is nil, with how many there
// were.
func (b *bookers) kill(r *rand.Rand, times int, after func(kills int)) {
	b.t.Helper()
	for n := range times * len(b.procs) {
		p := b.procs[n%len(b.procs)]
		// A random moment in the next stretch of the work.
		stretch := b.distinct * 9 / 10 / (times * len(b.procs))
		at := n*stretch + r.IntN(stretch)
		eventually(b.t, time.Duration(sized(2, 10))*time.Minute, fmt.Sprintf("%d of %d bookings; log: %s", at, b.distinct, p.tail()), func() bool { return b.booked() > at })
		if err := p.end(syscall.SIGKILL); err == nil {
			b.t.Fatalf("process %d had ended before it was killed: %s", n%len(b.procs), p.tail())
		}
		p.start()
		if after != nil {
			after(n + 1)
		}
	}
}

// checkBookings checks that every key has exactly one booking and that the inbox
// agrees with it.
func checkBookings(t *testing.T, pool *pgxpool.Pool, distinct int) {
	t.Helper()
	for query, want := range map[string]int{
		"select count(*) from bookings":                                               distinct,
		"select count(*) from (select distinct order_id, event_type from bookings) b": distinct,
		"select count(*) from inbox where status = 'done'":                            distinct,
		"select count(*) from inbox":                                                  distinct,
		"select count(*) from bookings b join inbox i on i.message_key = b.order_id || '|' || b.event_type and i.source = b.source and i.message_id = b.message_id": distinct,
		"select count(*) from inbox_parked": 0,
		"select count(*) from inbox_guard":  0,
	} {
		if n := count(t, pool, query); n != want {
			t.Errorf("%s = %d, want %d", query, n, want)
		}
	}
}
