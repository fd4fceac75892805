package integration_test

import (
	"context"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	kafkago "github.com/segmentio/kafka-go"

	toxiclient "github.com/Shopify/toxiproxy/v2/client"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
)

// The limits of the consumer that is soaked.
const (
	soakHandler  = 5 * time.Second
	soakShutdown = 2 * time.Second
	soakAck      = 3 * time.Second
	// soakStop is the most that a stop may take in a broken network: the grace, a
	// COMMIT under way, acking, giving back, closing; and some for the machine.
	soakStop = soakShutdown + 30*time.Second + 3*soakAck + 10*time.Second
	// soakDials is how many connections in a second may be tried at most while
	// there is a fault: a hot loop tries thousands.
	soakDials = 50
)

// weather is what a network does for a while.
type weather struct {
	name string
	// storm begins it on the network to some servers.
	storm func(n *proxies, addresses []string) (cure func() error, err error)
	// brokers is how many brokers it hits, database whether it hits the database.
	brokers  int
	database bool
	// restart: the consumer is stopped and started meanwhile.
	restart bool
}

// toxic is weather that toxiproxy makes.
func toxic(kind string, a toxiclient.Attributes) func(*proxies, []string) (func() error, error) {
	return func(n *proxies, addresses []string) (func() error, error) { return n.poison(kind, a, addresses) }
}

var (
	slow      = toxic("latency", toxiclient.Attributes{"latency": 150, "jitter": 140})
	narrow    = toxic("bandwidth", toxiclient.Attributes{"rate": 30})
	blackHole = toxic("timeout", toxiclient.Attributes{"timeout": 0})
	reset     = toxic("reset_peer", toxiclient.Attributes{"timeout": 50})
)

// forecast begins with what a short soak has time for.
var forecast = []weather{
	{name: "latency", storm: slow, brokers: 3, database: true},
	{name: "brokers in a black hole", storm: blackHole, brokers: 3},
	{name: "database in a black hole, restart", storm: blackHole, database: true, restart: true},
	{name: "all connections reset", storm: reset, brokers: 3, database: true},
	{name: "all frozen", storm: (*proxies).freeze, brokers: 3, database: true},
	{name: "one broker in a black hole", storm: blackHole, brokers: 1},
	{name: "all refuse, restart", storm: (*proxies).refuse, brokers: 3, database: true, restart: true},

	{name: "narrow, restart", storm: narrow, brokers: 3, database: true, restart: true},
	{name: "brokers refuse", storm: (*proxies).refuse, brokers: 3},
	{name: "database refuses", storm: (*proxies).refuse, database: true},
	{name: "brokers in a black hole, restart", storm: blackHole, brokers: 3, restart: true},
	{name: "database in a black hole", storm: blackHole, database: true},
	{name: "one broker is slow", storm: slow, brokers: 1},
	{name: "latency, restart", storm: slow, brokers: 3, database: true, restart: true},
	{name: "all frozen, restart", storm: (*proxies).freeze, brokers: 3, database: true, restart: true},
	{name: "narrow", storm: narrow, brokers: 3, database: true},
}

// shortForecast is how much of it a short soak has.
const shortForecast = 7

// A consumer whose network to Kafka and PostgreSQL gets worse and better, with
// restarts in between and while it is bad. After each change of the weather it
// goes on by itself; every message has one effect; a consumer that has ended leaves
// no goroutine behind, and memory does not grow.
func TestSoak(t *testing.T) { //nolint:paralleltest // It counts goroutines and memory.
	s := newSoak(t)
	began := time.Now()
	goOn := func(i int) bool { return i < shortForecast }
	if soak() {
		goOn = func(int) bool { return time.Since(began) < 10*time.Minute }
	}
	var heaps []uint64
	for i := 0; goOn(i); i++ {
		s.cycle(forecast[i%len(forecast)])
		heaps = append(heaps, s.heap())
	}
	few := max(len(heaps)/3, 1)
	first, last := median(heaps[:few]), median(heaps[len(heaps)-few:])
	t.Logf("%d cycles in %v, %d messages; heap after the first ones %d KiB, after the last ones %d KiB; outcomes %s",
		len(heaps), time.Since(began).Round(time.Second), s.traffic.next, first>>10, last>>10, s.progress.counts())
	if last > first+first/2+8<<20 {
		t.Errorf("the heap grew from %d to %d bytes", first, last)
	}
}

func median(v []uint64) uint64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// soaked is a consumer and what lies between it and its servers.
type soaked struct {
	t         *testing.T
	brokers   []string
	database  string
	url       string
	pool      *pgxpool.Pool // not through a proxy
	topic     *topic
	transport *kafkago.Transport // of topic
	traffic   *traffic
	progress  *progress
	log       io.Writer
	baseline  int // goroutines without a consumer
}

func newSoak(t *testing.T) *soaked {
	t.Helper()
	s := &soaked{t: t, url: servers.Postgres(t), brokers: servers.Kafka3(t).Brokers, progress: newProgress()}
	u, err := url.Parse(s.url)
	if err != nil {
		t.Fatal(err)
	}
	s.database = u.Host
	s.pool = openPool(t, s.url)
	if _, err := s.pool.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
		t.Fatal(err)
	}
	s.topic = newCopiedTopic(t, s.brokers, faultPartitions, 3)
	s.transport = new(kafkago.Transport)
	s.topic.client.Transport = s.transport
	s.traffic = &traffic{brokers: s.brokers, topic: s.topic.name}
	// Not into the test's log, which would be kept in memory.
	file, err := os.Create(filepath.Join(t.TempDir(), "consumer.log"))
	if err != nil {
		t.Fatal(err)
	}
	s.log = file
	t.Cleanup(func() {
		_ = file.Close()
		if t.Failed() {
			b, _ := os.ReadFile(file.Name())
			t.Logf("the end of the consumer's log:\n%s", b[max(0, len(b)-16<<10):])
		}
	})
	s.quiet()
	s.baseline = settled(t)
	return s
}

// quiet ends what the test itself has open.
func (s *soaked) quiet() {
	s.transport.CloseIdleConnections()
	kafkago.DefaultTransport.(*kafkago.Transport).CloseIdleConnections()
	s.pool.Reset()
}

// cycle is one change of the weather, with a consumer and a network of its own.
func (s *soaked) cycle(w weather) {
	t := s.t
	t.Helper()
	began := time.Now()
	hit := slices.Clone(s.brokers)
	rand.Shuffle(len(hit), func(i, j int) { hit[i], hit[j] = hit[j], hit[i] })
	hit = hit[:w.brokers]
	if w.database {
		hit = append(hit, s.database)
	}
	lasts := 3 * time.Second
	if soak() {
		lasts = 3*time.Second + rand.N(12*time.Second)
	}

	network := newProxies(t, append(slices.Clone(s.brokers), s.database)...)
	consumer := s.consume(network)
	s.traffic.start(t.Context())
	eventually(t, time.Minute, "the load is worked on", func() bool { return s.progress.beyond(began, faultPartitions) })
	s.progress.longest()

	dials, processor := network.dials.Load(), processorTime()
	cure, err := w.storm(network, hit)
	if err != nil {
		t.Fatal(err)
	}
	var stopped time.Duration
	if w.restart {
		<-time.After(lasts / 2) // In the middle of it.
		var err error
		if stopped, err = consumer.stop(); err != nil {
			t.Logf("%s: stopped with: %v", w.name, err)
		}
		consumer = s.consume(network)
		<-time.After(lasts / 2)
	} else {
		<-time.After(lasts)
	}
	tried, used := network.dials.Load()-dials, processorTime()-processor
	if tried > soakDials*int64((lasts+stopped).Seconds()+1) {
		t.Errorf("%s: %d connections tried in %v", w.name, tried, lasts+stopped)
	}
	if err := cure(); err != nil {
		t.Fatal(err)
	}
	end := time.Now()
	eventually(t, 90*time.Second, w.name+": consuming goes on", func() bool { return s.progress.beyond(end, faultPartitions) })
	resumed := time.Since(end)
	n := s.traffic.end(t)
	eventually(t, time.Minute, w.name+": lag 0", func() bool { return s.topic.lag(s.topic.name) == 0 })
	pause := s.progress.longest()
	if _, err := consumer.stop(); err != nil {
		t.Errorf("%s: Run = %v", w.name, err)
	}
	s.topic.checkOffsets(s.topic.name)
	network.close()
	onceEach(t, s.pool, n)
	s.quiet()
	before := s.baseline
	left := settledAt(t, before)
	s.baseline = left
	t.Logf("%s for %v: going on after %v, longest pause %v, %d connections tried, %v of processor time, stop %v, %d messages so far, %d goroutines before, %d after, heap %d KiB",
		w.name, lasts.Round(100*time.Millisecond), resumed.Round(10*time.Millisecond), pause.Round(10*time.Millisecond), tried,
		used.Round(10*time.Millisecond), stopped.Round(10*time.Millisecond), n, before, left, s.heap()>>10)
}

// running is a consumer with a pool of its own.
type running struct {
	s      *soaked
	cancel context.CancelFunc
	done   chan error
}

func (s *soaked) consume(network *proxies) *running {
	s.t.Helper()
	cfg, err := pgxpool.ParseConfig(s.url)
	if err != nil {
		s.t.Fatal(err)
	}
	cfg.ConnConfig.DialFunc = network.dial
	cfg.ConnConfig.ConnectTimeout = 3 * time.Second
	pool, err := pgxpool.NewWithConfig(s.t.Context(), cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(s.t.Context())
	r := &running{s: s, cancel: cancel, done: make(chan error, 1)}
	go func() {
		r.done <- s.run(ctx, pool, network)
		pool.Close() // pgx takes up to 15 s for this in a black hole
	}()
	return r
}

// stop ends the consumer and returns how long it took and what Run returned.
func (r *running) stop() (time.Duration, error) {
	r.s.t.Helper()
	began := time.Now()
	r.cancel()
	select {
	case err := <-r.done:
		return time.Since(began), err
	case <-time.After(soakStop):
		r.s.t.Fatalf("the consumer did not stop within %v:\n%s", soakStop, stacks())
		return 0, nil
	}
}

// run is the consumer.
func (s *soaked) run(ctx context.Context, pool *pgxpool.Pool, network *proxies) error {
	store, err := inboxpgx.New(pool)
	if err != nil {
		return err
	}
	c, err := inbox.New(store, s.topic.name, keyfunc.JSON("id"), effect, &inbox.Config{
		HandlerTimeout: soakHandler, ShutdownTimeout: soakShutdown, AckTimeout: soakAck,
		Logger: s.logger(slog.LevelWarn), Hooks: []inbox.Hook{s.progress},
	})
	if err != nil {
		return err
	}
	src, err := kafka.Open(ctx, s.brokers, s.topic.name, []string{s.topic.name}, &kafka.Config{
		Dial: network.dial, DialTimeout: 2 * time.Second, RequestTimeout: 3 * time.Second, SessionTimeout: 6 * time.Second,
		Logger: s.logger(slog.LevelInfo),
	})
	if err != nil {
		return err
	}
	return c.Run(ctx, src)
}

func (s *soaked) logger(level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(s.log, &slog.HandlerOptions{Level: level}))
}

// settled waits until the number of goroutines does not change any more.
func settled(t *testing.T) int {
	t.Helper()
	var last, since = 0, time.Now()
	eventually(t, time.Minute, "no goroutine comes or goes", func() bool {
		if n := runtime.NumGoroutine(); n != last {
			last, since = n, time.Now()
		}
		return time.Since(since) > 500*time.Millisecond
	})
	return last
}

// settledAt waits until there are no more goroutines than before, and returns how
// many there are. When there are fewer, one of an earlier test has ended: that is
// the measure from then on.
func settledAt(t *testing.T, baseline int) int {
	t.Helper()
	limit := time.Now().Add(time.Minute)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for runtime.NumGoroutine() > baseline {
		if time.Now().After(limit) {
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), baseline, stacks())
		}
		<-tick.C
	}
	return min(baseline, settled(t))
}

// heap returns the bytes that are in use.
func (s *soaked) heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // What a finalizer or a pool has let go.
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func stacks() string {
	var b strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&b, 1)
	return b.String()
}
