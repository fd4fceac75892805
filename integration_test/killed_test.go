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

	program := build(t, "github.com/ackafter/ackafter/examples/kafka-orders")
	group := tp.name
	procs := make([]*process, 2)
	for i := range procs {
		procs[i] = &process{
			t: t, path: program, log: filepath.Join(t.TempDir(), fmt.Sprintf("%d.log", i)),
			env:  []string{"LOG_LEVEL=WARN"},
			args: []string{"-database", url, "-brokers", tp.brokers[0], "-topic", tp.name, "-group", group, "-session-timeout", "6s", "-batch", "10"},
		}
		procs[i].start()
		defer func() { _ = procs[i].end(syscall.SIGKILL) }()
	}
	booked := func() int {
		if count(t, pool, "select count(*) from pg_tables where tablename = 'bookings'") == 0 {
			return 0
		}
		return count(t, pool, "select count(*) from bookings")
	}
	start = time.Now()
	const kills = 5
	for k := range kills {
		for i, p := range procs {
			// A random moment in the next stretch of the work.
			stretch := stream.Distinct * 9 / 10 / (kills * len(procs))
			at := (k*len(procs)+i)*stretch + r.IntN(stretch)
			eventually(t, 2*time.Minute, fmt.Sprintf("%d of %d bookings; log: %s", at, stream.Distinct, p.tail()), func() bool { return booked() > at })
			if err := p.end(syscall.SIGKILL); err == nil {
				t.Fatalf("process %d had ended before it was killed: %s", i, p.tail())
			}
			p.start()
		}
	}
	drained := func() bool { return booked() >= stream.Distinct && tp.lag(group) == 0 }
	eventually(t, 3*time.Minute, "lag 0 after the kills", drained)
	t.Logf("consumed by two processes with %d kills in %v", kills*len(procs), time.Since(start))
	checkBookings(t, pool, stream.Distinct)

	for i, p := range procs {
		if err := p.end(syscall.SIGTERM); err != nil {
			t.Errorf("process %d stopped with %v: %s", i, err, p.tail())
		}
	}
	tp.rewind(group)
	start = time.Now()
	for _, p := range procs {
		p.start()
	}
	eventually(t, 3*time.Minute, "lag 0 after the replay", func() bool { return tp.lag(group) == 0 })
	t.Logf("replayed from the earliest offset in %v", time.Since(start))
	checkBookings(t, pool, stream.Distinct)
	for i, p := range procs {
		if err := p.end(syscall.SIGTERM); err != nil {
			t.Errorf("process %d stopped with %v: %s", i, err, p.tail())
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
		"select count(*) from bookings b join inbox i on i.message_key = b.order_id || '|' || b.event_type and i.source = b.source and i.position = b.source_offset": distinct,
		"select count(*) from inbox_parked": 0,
		"select count(*) from inbox_guard":  0,
	} {
		if n := count(t, pool, query); n != want {
			t.Errorf("%s = %d, want %d", query, n, want)
		}
	}
}
